"""Starts, watches, resizes and ends the jobs of one host. Its state is in the run directory: a restart loses nothing.

Layout of the run directory (owner only)::

    renewal                 until when the leases of this host hold (CLOCK_MONOTONIC seconds, f64)
    <job_id>.<epoch>/       a job; ``actors/runner.py`` and ``docs/shim.md`` say what is in it
    outputs/                output of released jobs, kept for a while; the names also tell which epochs are over
    checkpoints/<job_id>/   what a job has saved, for its next start; kept until nobody has used it for long
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cotenant.actors import jobfiles, jobrecords, launchspec, runner
from cotenant.actors.checkpoints import CHECKPOINTS, Checkpoints, lease_variables
from cotenant.actors.cleaners import keep_cleaners_off
from cotenant.actors.clock import SteadyClock
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import JobEnforcement, ServiceDown, StaleCommand, bounds_of
from cotenant.actors.enforcement.host import HostEnforcement, whole
from cotenant.actors.freezing import Freezing
from cotenant.actors.jobrecords import Exited, Held, JobRecord, Launched, Phase
from cotenant.actors.launchspec import LaunchError
from cotenant.actors.reports import Descriptors, JobReport
from cotenant.actors.starts import Key, Starts, start_supervisor
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Bounds, Isolation

FIRST_VALIDITY_S = 30.0
SUPERSEDE_TIMEOUT_S = 2.0
SWEEP_PERIOD_S = 60.0

__all__ = ["Exited", "Held", "LaunchError", "Launched", "Launcher", "Phase", "StaleCommand"]


class Launcher:
    """The jobs of one host. All methods may be called from any thread; only ``launch`` takes more than a moment.

    Args:
        run_dir: Where everything is kept; made when it does not exist. One launcher per directory.
        gpus: The GPUs of this host.
        backend: How shares are enforced; None = in the ways of this host, by default settings.
        keep_output_s: How long the output of a released job can still be read.
        first_validity_s: How long leases hold before the first renewal in a new directory. In one that was used before
            they hold as long as they did, and no longer than this: nobody has renewed them.
        variables: Environment variables that every job gets that does not set them itself.
        checkpoints: Where jobs save their state; None = in the directory.

    Raises:
        OSError: The directory cannot be made or used.
    """

    def __init__(
        self,
        run_dir: Path,
        gpus: Sequence[GpuInfo],
        backend: JobEnforcement | None = None,
        keep_output_s: float = 3600.0,
        first_validity_s: float = FIRST_VALIDITY_S,
        *,
        variables: Mapping[str, str] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._dir = run_dir.absolute()
        (self._dir / jobfiles.OUTPUTS).mkdir(parents=True, exist_ok=True)
        self._dir.chmod(0o700)
        keep_cleaners_off(self._dir)
        self._gpus = {gpu.gpu_id: gpu for gpu in gpus}
        self._backend = backend or HostEnforcement(self._dir, gpus, EnforcementSettings())
        self._keep_output_s = keep_output_s
        self._variables = dict(variables or {})
        self._checkpoints = checkpoints or Checkpoints(self._dir / CHECKPOINTS)
        self._launching = threading.Lock()  # one program is started at a time; the other methods do not wait for it
        self._lock = threading.RLock()
        self._clock, self._swept_at = SteadyClock(), 0.0
        limit = time.monotonic() + first_validity_s
        used_before = (self._dir / runner.RENEWAL).exists()
        self._renewal = jobfiles.open_renewal(self._dir / runner.RENEWAL)
        self.renew(min(self.valid_until(), limit) if used_before else limit)
        self._starts = Starts(self._lock, jobfiles.kept_epochs(self._dir))
        self._jobs: dict[Key, JobRecord] = {}
        self.freezing = Freezing(self._lock, self._jobs, self._backend, lambda: whole(self._gpus.values()), self.stop)
        for job_dir in jobfiles.load_job_dirs(self._dir):
            job = jobrecords.adopt(job_dir, self._backend)
            self._jobs[job.key] = job

    def add_gpus(self, gpus: Sequence[GpuInfo]) -> None:
        """Let jobs start on these GPUs too, which have come later."""
        self._gpus = self._gpus | {gpu.gpu_id: gpu for gpu in gpus}

    # -- starting ---------------------------------------------------------------------------------------------------

    def launch(
        self,
        *,
        job_id: str,
        epoch: int,
        revision: int,
        kind: Literal["command", "lease"],
        command: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        shares: Sequence[Share],
        grace_s: float,
        fingerprint: str = "",
        descriptors: Descriptors | None = None,
        operator_mix: bool | None = None,
        isolation: Isolation = "soft",
        saves: bool = False,
        freezes: bool = False,
    ) -> Launched:
        """Start a job, or say what is running when it was started before. A lease job gets shares and no process.

        A command that cannot be executed (not found, no such working directory) is launched all the same and ends at
        once: ``poll`` says why.

        Args:
            job_id: The job: letters, digits, ``_``, ``-`` and ``.``.
            epoch: Epoch of its lease.
            revision: Revision of its shares.
            kind: "command" or "lease".
            command: Argument vector; ignored for leases.
            cwd: Absolute path of the working directory; ignored for leases.
            env: The command's environment; what cotenant needs is added.
            shares: Its shares on this host.
            grace_s: Seconds between SIGTERM and SIGKILL when it ends.
            fingerprint: Class of runs it belongs to.
            descriptors: What its hints say of it.
            operator_mix: Profile its operators now and then, or never; None = as its environment or the host says.
            isolation: How strictly its hints ask for it to be kept apart.
            saves: It continues from its own checkpoint, and is told where that is.
            freezes: Its processes are to be frozen where that is possible.

        Raises:
            StaleCommand: A newer epoch of the job is, or was, here; or this one is over; or the host's leases are.
            LaunchError: It cannot be started as asked.
        """
        launch: launchspec.Launch = {
            "job_id": job_id,
            "epoch": epoch,
            "kind": kind,
            "fingerprint": fingerprint,
            "gpu_ids": [share.gpu_id for share in shares],
            "command": list(command),
            "cwd": cwd,
            "env": launchspec.base_environment(env),
            "host_cores": sorted(os.sched_getaffinity(0)),
            "grace_s": grace_s,
            "token": secrets.token_hex(16),
            **launchspec.described(descriptors, operator_mix),
        }
        key = job_id, epoch
        with self._lock:
            self._starts.wait(key)
            existing = self._jobs.get(key)
            if existing is not None:
                return existing.launched
            self._check_start(key)
            self._starts.add(key)
        with self._starts.within(key):
            launchspec.check(launch, shares, self._gpus)
            with self._lock:
                self._end_older(key)  # they have time to end while this one is made ready
            if saves:
                launch["env"] = self._checkpoints.environment(job_id, epoch, grace_s) | launch["env"]
            job_dir = self._dir / f"{job_id}.{epoch}"
            try:
                self._make_ready(launch, job_dir, shares, isolation, freezes)
                return self._start_in_turn(launch, job_dir, shares, revision)
            except (OSError, LaunchError, StaleCommand) as error:
                shutil.rmtree(job_dir, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                wait_s = error.wait_s if isinstance(error, ServiceDown) else None
                reason = f"cannot start on this host: {error}"
                raise LaunchError(reason, exit_code=1, retry=True, retry_after_s=wait_s) from error

    def is_over(self, job_id: str, epoch: int) -> bool:
        """Whether this epoch of the job will not start here (any more)."""
        with self._lock:
            return (job_id, epoch) not in self._jobs and self._starts.ended((job_id, epoch))

    def _check_start(self, key: Key) -> None:
        self._starts.check(key, self._jobs)
        if time.monotonic() >= self.valid_until():
            raise StaleCommand(f"{key[0]}: start of epoch {key[1]}, but the leases of this host have expired")

    def _make_ready(
        self, launch: launchspec.Launch, job_dir: Path, shares: Sequence[Share], isolation: Isolation, freezes: bool
    ) -> None:
        """What the job needs of its GPUs: it may take long, and holds up no start on others."""
        job_dir.mkdir(mode=0o700)
        self._backend.admit(job_dir, [self._gpus[i] for i in launch["gpu_ids"]], shares, isolation, freezes=freezes)

    def _start_in_turn(
        self, launch: launchspec.Launch, job_dir: Path, shares: Sequence[Share], revision: int
    ) -> Launched:
        """Start what has been made ready, unless it must not start any more, once no older run of the job is left."""
        key = launch["job_id"], launch["epoch"]
        deadline = time.monotonic() + SUPERSEDE_TIMEOUT_S
        while True:
            with self._launching:
                with self._lock:
                    self._check_start(key)
                    older = self._end_older(key)
                if not older:
                    return self._start(launch, job_dir, shares, revision)
            if time.monotonic() > deadline:
                raise LaunchError(f"{key[0]}: its older run does not end", exit_code=1, retry=True)
            time.sleep(0.01)

    def _start(self, launch: launchspec.Launch, job_dir: Path, shares: Sequence[Share], revision: int) -> Launched:
        launch["env"] = self._variables | launch["env"] | self._environment(launch, job_dir, launch["env"])
        self._backend.apply(job_dir, shares, launch["epoch"], revision)
        runner.write_json(str(job_dir / runner.LAUNCH), dict(launch))
        if launch["kind"] == "command":
            start_supervisor(job_dir)
        with self._lock:
            job = jobrecords.adopt(job_dir, self._backend)  # it runs: a record that cannot be read ends it
            self._jobs[job.key] = job
            if self._starts.ended(job.key):
                self.stop(*job.key, 0.0, "stopped while it was being started")
            return job.launched

    def _end_older(self, key: Key) -> list[JobRecord]:
        """Have older runs of the job end, since a job runs once; returns those that have not ended yet."""
        job_id, epoch = key
        older = [job for (name, other), job in self._jobs.items() if name == job_id and other < epoch]
        running = [job for job in older if self._check(job) is None]
        for job in running:
            self.stop(*job.key, 0.0, "superseded by a newer lease of the same job")
        return running

    def _environment(self, launch: launchspec.Launch, job_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
        job, path = (launch["job_id"], launch["epoch"], job_dir), base.get("PYTHONPATH", "")
        mix, token = launch.get("operator_mix"), launch.get("token", "")
        own = launchspec.job_variables(*job, path, operator_mix=mix, token=token)
        return self._backend.environment(job_dir, [self._gpus[gpu_id] for gpu_id in launch["gpu_ids"]], base) | own

    def environment(self, job_id: str, epoch: int) -> dict[str, str]:
        """Return the environment variables that put a process of this host under a lease job's shares.

        Raises:
            KeyError: The job is not here.
        """
        with self._lock:
            job = self._jobs[job_id, epoch]
            launch = jobfiles.read_launch(job.launched.job_dir)
            base = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            own = lease_variables(launch, job.launched.job_dir)
            return self._variables | self._environment(launch, job.launched.job_dir, base) | own

    def holds(self, job_id: str, epoch: int, token: str) -> bool:
        """Whether this is the token of a job that runs here."""
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            # Its program may be up before its record is among the jobs.
            here = (job_id, epoch) in self._starts if job is None else self._check(job) is None
        try:
            known = jobfiles.read_launch(self._dir / f"{job_id}.{epoch}").get("token", "") if here else ""
        except (OSError, ValueError):
            return False
        return bool(known) and secrets.compare_digest(known.encode(), token.encode(errors="replace"))

    def ceiling(self, job_id: str, epoch: int) -> Bounds:
        """Return what the job's running processes cannot exceed on any of its GPUs."""
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            return bounds_of(() if job is None else self._backend.ceilings(job.launched.job_dir))

    # -- watching ---------------------------------------------------------------------------------------------------

    def running(self) -> list[Launched]:
        """Return the jobs that have not ended."""
        with self._lock:
            return [job.launched for job in self._jobs.values() if self._check(job) is None]

    def inventory(self) -> list[Held]:
        """Return every job that is here, those that ended and were not released included."""
        with self._lock:
            for job in self._jobs.values():
                self._check(job)
            return [job.held() for job in self._jobs.values()]

    def poll(self) -> list[Exited]:
        """Return the jobs that have ended, again and again until they are released. To be called all the time: it also
        ends what outlived its grace period or its lease, and forgets old output.
        """
        with self._lock:
            if time.monotonic() >= self.valid_until():
                for job in self._jobs.values():  # other jobs' supervisors see to that
                    if job.launched.kind == "lease" and not job.damage and self._check(job) is None:
                        self._let_down(job, runner.LEASE_EXPIRED)
            if (now := self._clock.now()) - self._swept_at >= SWEEP_PERIOD_S:
                self._swept_at = now
                self.sweep(min(now, time.time()))  # a clock that was wrong before makes nothing look old
            return [exited for job in self._jobs.values() if (exited := self._check(job)) is not None]

    def _check(self, job: JobRecord) -> Exited | None:
        with self._lock:
            if job.exited is None:
                job.exited = self._judged(job, job.look())
            return job.exited

    def _judged(self, job: JobRecord, exited: Exited | None) -> Exited | None:
        """Say whether a job that failed did so because of what it ran under."""
        if exited is None or exited.exit_code == 0 or exited.lost or job.stop is not None:
            return exited
        why = self._lost(job)
        return replace(exited, lost=True, reason=f"{why}; it ended with {exited.exit_code}") if why else exited

    def _lost(self, job: JobRecord) -> str:
        try:
            return self._backend.lost(job.launched.job_dir)
        except (OSError, ValueError, KeyError):
            return ""  # its record is gone or damaged, which is told elsewhere

    def tend(self) -> None:
        """See to what the jobs run under, and end those that cannot go on. To be called every second or so."""
        with self._lock:
            running = [job for job in self._jobs.values() if self._check(job) is None and not job.damage]
        with suppress(OSError, ValueError, KeyError):  # a job has ended meanwhile, or its record is damaged
            self._backend.tend([job.launched.job_dir for job in running])
        for job in running:
            self._let_down(job, self._lost(job))

    def _let_down(self, job: JobRecord, why: str) -> None:
        with suppress(OSError):  # when the disk is full it has been signalled all the same
            if why:
                self.stop(*job.key, 0.0, why, lost=True)

    def close(self) -> tuple[str, ...]:
        """Start nothing more and give back what the host lent; what jobs that have not ended run under stays, and is
        told for people. Starts under way are waited for, ``starts.LAST_S`` at most.
        """
        late = [self._dir / f"{job_id}.{epoch}" for job_id, epoch in self._starts.close(self._launching)]
        return self._backend.close([*late, *(launched.job_dir for launched in self.running())])

    def root_pids(self, job_id: str) -> set[int]:
        """Return the processes that, with their descendants, are the job: its supervisor, and those attached to it."""
        with self._lock:
            job = self._newest(job_id)
            if job is None or job.exited is not None:
                return set()
            roots = {process.pid for process in jobfiles.attached(job.launched.job_dir)}
            return roots | ({job.supervisor.pid} if job.supervisor else set())

    def report(self, job_id: str) -> JobReport | None:
        """Return what the job's processes say; None when the job is not here."""
        with self._lock:
            job = self._newest(job_id)
            if job is None or job.damage or not job.launched.job_dir.exists():
                return None
            return self._backend.report(job.launched.job_dir, time.monotonic()).since(job.thawed_s, time.monotonic())

    def guarantees(self, job_id: str) -> str:
        """Say what holds the job's shares and what cannot be held; empty when the job is not here."""
        report = self.report(job_id)
        with self._lock:
            job = self._newest(job_id)
            if job is None or report is None:
                return ""
            return job.frozen_words() or self._backend.guarantees(job.launched.job_dir, report)

    def shares(self, job_id: str) -> tuple[Share, ...]:
        """Return the shares in force; empty when the job is not here."""
        with self._lock:
            job = self._newest(job_id)
            return () if job is None else job.shares

    def read_output(self, job_id: str, epoch: int, offset: int, limit: int) -> tuple[bytes, int, bool]:
        """Return a piece of a job's output.

        Args:
            job_id: The job.
            epoch: Epoch of its lease.
            offset: Where to start, in bytes.
            limit: Most bytes to return.

        Returns:
            (bytes, next offset, whether the job has ended and nothing follows).

        Raises:
            KeyError: No output of that job is, or is still, on this host.
            ValueError: A negative offset or limit.
        """
        if offset < 0 or limit < 0:
            raise ValueError(f"offset, limit: {offset}, {limit} is not accepted; give whole numbers >= 0")
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            ended = job is None or self._check(job) is not None
            path = jobfiles.kept_output(self._dir, job_id, epoch)
            file = jobfiles.open_output(job.launched.job_dir / runner.OUTPUT if job else path)
        if file is None and job is None:
            raise KeyError(f"no output of {job_id!r} (epoch {epoch}) on this host")
        if file is None:
            return b"", offset, ended
        data, at_end = jobfiles.read_piece(file, offset, limit)
        return data, offset + len(data), ended and at_end

    def _newest(self, job_id: str) -> JobRecord | None:
        epochs = [epoch for other, epoch in self._jobs if other == job_id]
        return self._jobs[job_id, max(epochs)] if epochs else None

    # -- steering ---------------------------------------------------------------------------------------------------

    def renew(self, valid_until_s: float) -> None:
        """Let the leases of this host hold until then (``time.monotonic()``); later every job here ends at once."""
        runner.RENEWAL_LAYOUT.pack_into(self._renewal, 0, valid_until_s)

    def valid_until(self) -> float:
        """Return until when the leases of this host hold."""
        return float(runner.RENEWAL_LAYOUT.unpack_from(self._renewal, 0)[0])

    def resize(self, job_id: str, epoch: int, revision: int, shares: Sequence[Share]) -> None:
        """Hold a job to other shares of the same GPUs from now on.

        Raises:
            StaleCommand: The job is not here with that epoch, or ``revision`` is not newer.
            ValueError: Other GPUs, or a value that is not accepted.
        """
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            if job is None:
                raise StaleCommand(f"{job_id}: resize for epoch {epoch}, which is not here")
            by_gpu = {share.gpu_id: share for share in shares}
            if set(by_gpu) != {share.gpu_id for share in job.shares}:
                raise ValueError(f"shares: GPUs {sorted(by_gpu)} are not accepted; give those the job has")
            if job.frozen:
                raise StaleCommand(f"{job_id}: resize for epoch {epoch}, which is frozen: it has no share of a GPU")
            ordered = tuple(by_gpu[share.gpu_id] for share in job.shares)
            self._backend.apply(job.launched.job_dir, ordered, epoch, revision)
            job.shares, job.revision = ordered, revision

    def stop(
        self, job_id: str, epoch: int, grace_s: float, reason: str, *, lost: bool = False, asks: bool = False
    ) -> None:
        """Begin to end a job: SIGTERM now, SIGKILL to what is left after ``grace_s``. ``poll`` says when it is over.

        A second call can only shorten the grace period. A job that is not here (any more) is fine, and will not start.

        Args:
            job_id: The job.
            epoch: Epoch of its lease.
            grace_s: Seconds.
            reason: Why, for people.
            lost: It has done nothing wrong, the host lets it down.
            asks: Nobody is signalled: its processes find the request, and it is over when it is stopped without this.
        """
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            if job is None:
                self._starts.end((job_id, epoch))
                return
            if self._check(job) is not None:
                return
            grace_s = 0.0 if job.frozen else grace_s  # a frozen one cannot react
            request = jobfiles.StopRequest(grace_s, reason, time.monotonic() + grace_s, lost, asks)
            if job.stop is not None:
                request = request.after(job.stop)
            if request == job.stop:
                return
            job.stop = request
            try:
                jobfiles.write_stop(job.launched.job_dir, request)
            finally:
                job.signal()  # even when the disk is full: the supervisor then takes its usual grace period

    def release(self, job_id: str, epoch: int) -> None:
        """Forget a job that has ended; its output can be read for some more time. Unknown jobs are ignored.

        Raises:
            ValueError: The job has not ended.
        """
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            if job is None:
                return
            if self._check(job) is None:
                raise ValueError(f"{job_id} (epoch {epoch}) has not ended: stop it first")
            jobfiles.retire(job.launched.job_dir, jobfiles.kept_output(self._dir, job_id, epoch))
            self._starts.end((job_id, epoch))
            del self._jobs[job_id, epoch]

    def sweep(self, now: float) -> None:
        """Delete the output of jobs released longer than ``keep_output_s`` before ``now`` (Unix seconds)."""
        with self._lock:
            jobfiles.delete_older(self._dir, now - self._keep_output_s)
            self._checkpoints.sweep(now, {job_id for job_id, _ in self._jobs})
