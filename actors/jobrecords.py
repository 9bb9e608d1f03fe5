"""A job of this host as the launcher knows it: read from its directory, looked at until it has ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cotenant.actors import jobfiles, runner
from cotenant.actors.enforcement.base import DETACH_S, EnforcementBackend
from cotenant.actors.reports import NO_HINTS, Descriptors
from cotenant.actors.shim.bootstrap import OUT_OF_MEMORY
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Share

START_TIMEOUT_S = 10.0
OVERTIME_S = 2.0  # a supervisor that has not ended its job this long after the grace period is stuck

Phase = Literal["starting", "running", "stopping", "exited"]
# What reading a damaged file raises: not the format; a field or a type that is not right; not a file that can be read.
_DAMAGE = (ValueError, KeyError, TypeError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass(frozen=True, slots=True)
class Launched:
    """A job on this host.

    Attributes:
        job_id: The job.
        epoch: Epoch of its lease.
        root_pid: Process id of its supervisor, the root of all its processes; None for lease jobs.
        job_dir: Its directory.
        kind: "command" or "lease".
        fingerprint: Class of runs it belongs to.
        shares: Its shares when it was launched or adopted; position = share index.
        descriptors: What its hints say of it.
    """

    job_id: str
    epoch: int
    root_pid: int | None
    job_dir: Path
    kind: Literal["command", "lease"]
    fingerprint: str
    shares: tuple[Share, ...]
    descriptors: Descriptors = NO_HINTS


@dataclass(frozen=True, slots=True)
class Exited:
    """No process of the job is left on this host.

    Attributes:
        job_id: The job.
        epoch: Epoch of its lease.
        exit_code: Of its command; negative for a signal, as in ``subprocess``.
        reason: Why, for people.
        lost: The host let it down (its lease expired, its record is damaged): the job itself did nothing wrong.
        stopped: It was asked to end before it ended by itself.
        out_of_memory: One of its processes has ended since an allocation failed.
    """

    job_id: str
    epoch: int
    exit_code: int
    reason: str
    lost: bool = False
    stopped: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A job in the inventory of this host. ``frozen``: its processes are held still, off its GPUs."""

    job_id: str
    epoch: int
    revision: int
    phase: Phase
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class _Detaching:
    """Processes on their way off the device: each is asked for once."""

    done: Future[Any] | None
    until: float

    def over(self, now: float) -> bool:
        return self.done is None or self.done.done() or now >= self.until


def _key(process: runner.Process) -> tuple[int, int]:
    return process.pid, process.start_ticks


@dataclass(slots=True)
class JobRecord:
    """A job of this host.

    ``damage`` says what is wrong with its directory, when something is: then it must end. ``freeze`` and ``thaw`` are
    ``freezing``'s: how far that is, and the revision and the shares with which it is to go on as soon as it is frozen.
    """

    launched: Launched
    shares: tuple[Share, ...]
    revision: int
    supervisor: runner.Process | None = None
    exited: Exited | None = None
    stop: jobfiles.StopRequest | None = None
    damage: str = ""
    freeze: jobfiles.Freeze | None = None
    thaw: tuple[int, tuple[Share, ...]] | None = None
    thawed_s: float = 0.0  # the monotonic clock when its processes went on last
    known_since: float = field(default_factory=time.monotonic)
    detach: Callable[[Path, Collection[int]], Future[Any] | None] | None = None  # what comes before a kill
    detaching: dict[tuple[int, int], _Detaching] = field(default_factory=dict)  # by pid and start time

    @property
    def key(self) -> tuple[str, int]:
        """Job id and epoch."""
        return self.launched.job_id, self.launched.epoch

    @property
    def gpu_ids(self) -> list[str]:
        """The GPUs of its shares; position = share index."""
        return [share.gpu_id for share in self.shares]

    @property
    def still(self) -> bool:
        """Whether its processes are held still, or about to be: what they do by the clock means nothing."""
        return self.freeze is not None and self.freeze.phase != "failed"

    @property
    def frozen(self) -> bool:
        """Whether its processes are held still and its GPUs free of it."""
        return self.freeze is not None and self.freeze.phase == "frozen"

    @property
    def phase(self) -> Phase:
        """Where this host is with it."""
        if self.exited:
            return "exited"
        if self.stop or self.damage:
            return "stopping"
        return "starting" if self.freeze is not None and self.freeze.phase == "thawing" else "running"

    def frozen_words(self) -> str:
        """Say what holds it still; empty when nothing does."""
        if self.freeze is None or not self.still:
            return ""
        moved = f"{self.freeze.memory_bytes / (1 << 20):.0f} MiB of its device memory are in the host's"
        return {"freezing": "being frozen", "frozen": f"frozen: {moved}", "thawing": f"being thawed: {moved}"}[
            self.freeze.phase
        ]

    def held(self) -> Held:
        """Return it as an item of the inventory."""
        thawing = self.freeze is not None and self.freeze.phase == "thawing"
        return Held(*self.key, self.revision, self.phase, self.frozen or thawing)

    def look(self) -> Exited | None:
        """Say whether the job has ended. Kills what is left of a job that should have."""
        if self.exited is None:
            try:
                self.exited = self._look()
            except _DAMAGE as error:
                self.damage = f"its record on the host cannot be read: {error!r}"
        return self.exited

    def signal(self) -> None:
        """Tell the job's processes that it shall end, unless they look for the request in its directory themselves."""
        if self.stop is not None and self.stop.asks:
            return
        roots = [] if self.supervisor is None else [self.supervisor]
        for process in roots + jobfiles.attached(self.launched.job_dir, started_only=True):
            runner.send(process, signal.SIGTERM)
            runner.send(process, signal.SIGCONT)  # a stopped process takes no SIGTERM

    def _look(self) -> Exited | None:
        if self.damage:
            return self._end_damaged()
        return self._look_at_lease() if self.launched.kind == "lease" else self._look_at_command()

    def _look_at_command(self) -> Exited | None:
        if self.supervisor is None:
            self.supervisor = jobfiles.read_supervisor(self.launched.job_dir)
            if self.supervisor is not None and self.stop is not None:
                self.signal()  # the request came before there was anybody to be told
        supervisor = self.supervisor
        if supervisor is not None:
            alive = jobfiles.is_alive(supervisor)
        else:
            alive = time.monotonic() - self.known_since <= START_TIMEOUT_S
        ended = runner.read_json(str(self.launched.job_dir / runner.EXIT))  # after the look at its writer
        if ended is not None:
            lost, stopped = (bool(ended.get(name, False)) for name in ("lost", "stopped"))
            short = (self.launched.job_dir / OUT_OF_MEMORY).exists()
            return Exited(*self.key, int(ended["exit_code"]), str(ended["reason"]), lost, stopped, short)
        if alive:
            if supervisor is not None and self.stop and time.monotonic() >= self.stop.kill_at + OVERTIME_S:
                runner.send(supervisor, signal.SIGKILL)  # the kernel kills the command with it
            return None
        if self._kill_left_behind():
            return None
        if supervisor is None:
            return Exited(*self.key, -signal.SIGKILL, "its start was cut short on the host", lost=True)
        reason = self.stop.reason if self.stop else "its supervisor was killed, and the job with it"
        lost = self.stop is not None and self.stop.lost
        return Exited(*self.key, -signal.SIGKILL, reason, lost, stopped=self.stop is not None)

    def _look_at_lease(self) -> Exited | None:
        if self.stop is None:
            return None
        if self.stop.asks:
            return self._end_asked() if time.monotonic() >= self.stop.kill_at else None
        left = jobfiles.attached(self.launched.job_dir, started_only=True)
        if not left:
            code = -signal.SIGKILL if self.stop.lost else 0
            return Exited(*self.key, code, self.stop.reason, self.stop.lost, stopped=True)
        if time.monotonic() >= self.stop.kill_at:
            self._kill(left)
        return None

    def _end_asked(self) -> Exited | None:
        """Its program was to give the lease back, and has not."""
        left = jobfiles.attached(self.launched.job_dir, started_only=True)
        self._kill(left)
        if left or self.stop is None:
            return None
        reason = f"{self.stop.reason}; its program did not give it back within {self.stop.grace_s:g} s"
        return Exited(*self.key, -signal.SIGKILL, reason, self.stop.lost, stopped=True)

    def _end_damaged(self) -> Exited | None:
        """What the job is or was cannot be told for certain: end it and say so."""
        if self.supervisor is not None and jobfiles.is_alive(self.supervisor):
            runner.send(self.supervisor, signal.SIGKILL)
            return None
        return None if self._kill_left_behind() else Exited(*self.key, -signal.SIGKILL, self.damage, lost=True)

    def _kill_left_behind(self) -> bool:
        job_dir = self.launched.job_dir
        left = jobfiles.left_behind(job_dir, self.supervisor) + jobfiles.attached(job_dir, started_only=True)
        self._kill(left)
        return bool(left)

    def _kill(self, processes: Sequence[runner.Process]) -> None:
        """Kill processes as soon as they are off their device, or that takes too long; waits for nothing."""
        now = time.monotonic()
        fresh = [process for process in processes if _key(process) not in self.detaching]
        if fresh:
            begun = _Detaching(self._begin_detaching(fresh), now + DETACH_S)
            self.detaching |= dict.fromkeys(map(_key, fresh), begun)
        for process in processes:
            if self.detaching[_key(process)].over(now):
                runner.send(process, signal.SIGKILL)

    def _begin_detaching(self, processes: Sequence[runner.Process]) -> Future[Any] | None:
        if self.detach is not None:
            with contextlib.suppress(*_DAMAGE, OSError):
                return self.detach(self.launched.job_dir, [process.pid for process in processes])
        return None


def load(job_dir: Path, backend: EnforcementBackend) -> JobRecord:
    """Read a job's directory.

    Raises:
        OSError, ValueError, KeyError, TypeError: Something in it is missing or damaged.
    """
    launch = jobfiles.read_launch(job_dir)
    backend.check(job_dir)
    epoch, revision = backend.in_force(job_dir)
    shares = tuple(backend.shares(job_dir, launch["gpu_ids"]))
    supervisor = jobfiles.read_supervisor(job_dir)
    planned = DemandProfile(**kept) if (kept := launch.get("planned")) else None
    launched = Launched(
        job_id=launch["job_id"],
        epoch=epoch,
        root_pid=supervisor.pid if supervisor else None,
        job_dir=job_dir,
        kind=launch["kind"],
        fingerprint=launch["fingerprint"],
        shares=shares,
        descriptors=Descriptors(launch.get("batch_size"), launch.get("framework"), launch.get("family"), planned),
    )
    if launch["kind"] not in ("command", "lease") or (launched.job_id, epoch) != jobfiles.key_of(job_dir):
        raise ValueError(f"launch.json is of a {launch['kind']} {launched.job_id}, share of epoch {epoch}")
    stop = jobfiles.read_stop(job_dir)
    record = JobRecord(launched, shares, revision, supervisor, stop=stop, detach=backend.detach)
    record.freeze = jobfiles.read_freeze(job_dir)
    return record


def adopt(job_dir: Path, backend: EnforcementBackend) -> JobRecord:
    """Read the directory of a job that an earlier host agent started; a damaged one gives a job that has to end."""
    try:
        record = load(job_dir, backend)
    except (*_DAMAGE, OSError) as error:
        return _damaged(job_dir, f"its record on the host cannot be read: {error!r}")
    if record.stop is not None:
        # The agent may have been killed before it had told the job. Clocks count anew: never longer than was asked.
        record.stop = record.stop.capped(time.monotonic())
        record.signal()
    return record


def _damaged(job_dir: Path, damage: str) -> JobRecord:
    job_id, epoch = jobfiles.key_of(job_dir)
    try:
        supervisor = jobfiles.read_supervisor(job_dir)
    except _DAMAGE:
        supervisor = None  # it is found, and ends, with the processes it has started
    launched = Launched(job_id, epoch, supervisor.pid if supervisor else None, job_dir, "command", "", ())
    return JobRecord(launched, (), 0, supervisor, damage=damage)
