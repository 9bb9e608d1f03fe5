"""The host agent: one Ray actor per GPU host, holding its profiler (GBP) and its resource allocator (DRA).

Four threads: the device loop samples the GPUs and watches the jobs' processes; the enforcement loop sees to what the
jobs run under; the uplink reports to the scheduler and renews the host's leases with every acknowledgement; Ray's own
threads take commands and serve output.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, RuntimeEnvSetupError

from cotenant.actors.checkpoints import Checkpoints
from cotenant.actors.claims import claim_gpus, release_claim
from cotenant.actors.devices.registry import create_backend
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.environment import resolve_environment
from cotenant.actors.gpufaults import GpuFaults, judged
from cotenant.actors.heldback import HeldBackWatch
from cotenant.actors.launcher import Launched, Launcher, LaunchError, StaleCommand
from cotenant.actors.leasesocket import LeaseSocket, socket_path
from cotenant.actors.messages import HostReport, WindowBatch
from cotenant.actors.nodes import live_nodes
from cotenant.actors.overruns import OverrunWatch
from cotenant.actors.processors import processors
from cotenant.actors.profiler import Profiler
from cotenant.actors.reports import Descriptors
from cotenant.actors.shim.bootstrap import OPERATOR_MIX
from cotenant.actors.shim.resources import AGENT
from cotenant.actors.uplink import Uplink
from cotenant.actors.vacating import Vacating
from cotenant.actors.vital import start_vital_thread
from cotenant.configs.settings import Settings
from cotenant.forecasting.types import DemandProfile
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.events import (
    Event,
    FreezeFailed,
    JobExited,
    JobHeldBack,
    JobStarted,
    MemoryOverrun,
    StartFailed,
)
from cotenant.scheduler.core.model import Gpu, Hints, Host, Wish
from cotenant.scheduler.core.reconcile import InventoryItem
from cotenant.scheduler.core.requests import grace_s
from cotenant.scheduler.errors import CotenantError, NotConnected, NotPermitted
from cotenant.scheduler.names import NAMESPACE, PRM, SCHEDULER, run_dir
from cotenant.scheduler.views import AllocationView, ResourcesView

CLAIM_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 5.0
CLAIM_RETRY_S = 0.2
ANSWER_S = 10.0
ENFORCEMENT_PERIOD_S = 1.0


class HostAgent:
    """Methods of the host agent actor."""

    def __init__(self, host_id: str, settings_json: str) -> None:
        self.settings = Settings.model_validate_json(settings_json)
        self._host_id = host_id
        session = ray.get_runtime_context().get_session_name()
        counted = live_nodes()[host_id].gpus
        self._backend = create_backend(
            self.settings.device, f"{socket.gethostname()}-{host_id[:6]}", counted or self.settings.device.count
        )
        self._gpus = tuple(self._backend.discover())
        self._counted = counted
        self._claimed, self._claims = False, True
        self._claim = self._note = ""
        self._notes: list[str] = []  # what stays as it is
        self._claim_gpus(CLAIM_TIMEOUT_S)
        jobs_dir = run_dir(session, host_id)
        jobs_dir.mkdir(parents=True, exist_ok=True)
        agent_socket = socket_path(jobs_dir)
        self._lease_socket: LeaseSocket | None = None
        self._enforcement = HostEnforcement(jobs_dir, self._gpus, self.settings.enforcement)
        self._launcher = Launcher(
            jobs_dir,
            self._gpus,
            self._enforcement,
            first_validity_s=self.settings.lease.ttl_s,
            variables={AGENT: agent_socket, **({OPERATOR_MIX: "1"} if self.settings.profiler.operator_mix else {})},
            checkpoints=Checkpoints.of(self.settings.checkpoints, jobs_dir),
        )
        try:
            self._lease_socket = LeaseSocket(agent_socket, self._answer_job)
        except OSError as error:  # the rest works without
            self._notes.append(f"jobs cannot ask about their leases: {agent_socket}: {error}")
        self._profiler = Profiler(self._backend, self.settings.profiler)
        self._overruns = OverrunWatch()
        self._held_back = HeldBackWatch()
        self._capped: set[str] = set()  # jobs with less than a whole GPU at the last window, device loop only
        self._faults = GpuFaults()
        self._vacating = Vacating()
        self._vacated = ""  # the last memory that did not come back
        self._joined_at = time.time()
        self._cpus = processors()
        self._lock = threading.RLock()
        self._held: dict[str, Launched] = {}  # jobs that run, device loop only
        # (job id, epoch) -> (revision, since when); made ready for its start
        self._preparing: dict[tuple[str, int], tuple[int, float]] = {}
        # job id -> (epoch, GPUs, root pids), device loop only
        self._watched: dict[str, tuple[int, tuple[str, ...], set[int]]] = {}
        self._starting = False  # a command is just being started that the launcher does not have yet
        self._exits_told: set[tuple[str, int]] = set()
        self._controls: dict[str, str] = {}
        self._uplink = Uplink(self, self.settings.lease.ttl_s, self.settings.profiler.window_s)
        self._stopping = threading.Event()
        self._launcher.freezing.take_up(host_id, self._uplink.tell)
        start_vital_thread("device", self._device_loop)
        start_vital_thread("enforcement", self._enforcement_loop)
        start_vital_thread("uplink", lambda: self._uplink.run(self._stopping))

    # -- commands ---------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def apply(self, commands: Sequence[Command]) -> list[str]:
        """Carry out commands in order; returns one line per refused command."""
        refused = []
        for command in commands:
            try:
                self._apply(command)
            except (StaleCommand, ValueError, OSError) as error:
                # The next inventory shows what is missing; the other commands must not wait for it.
                refused.append(str(error))
        return refused

    @ray.method(concurrency_group="output")
    def read_output(self, job_id: str, epoch: int, offset: int, limit: int) -> tuple[bytes, int, bool]:
        """Return (bytes, next offset, end reached) of a job's output on this host."""
        return self._launcher.read_output(job_id, epoch, offset, limit)

    @ray.method(concurrency_group="output")
    def lease_environment(self, job_id: str, epoch: int) -> dict[str, str]:
        """Return the environment a process needs to run under a lease job's shares on this host."""
        return self._launcher.environment(job_id, epoch)

    @ray.method(concurrency_group="output")
    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def shut_down(self) -> tuple[str, ...]:
        """Stop the threads and release the devices; returns what stays since jobs have not ended yet, for people."""
        self._stopping.set()
        self._uplink.wake()
        if self._lease_socket is not None:
            self._lease_socket.close()
        left = self._launcher.close()
        self._backend.close()
        return left

    # -- what jobs ask ----------------------------------------------------------------------------------------------

    def _answer_job(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a job that asks something of its own lease. Others' it cannot: the token says which one is its own."""
        job_id, epoch, token = (str(question.get(name, "")) for name in ("job_id", "epoch", "token"))
        if not epoch.isdecimal() or not self._launcher.holds(job_id, int(epoch), token):
            raise NotPermitted("this is not the token of a lease that is held on this host")
        scheduler: Any = ray.get_actor(SCHEDULER, NAMESPACE)
        if question.get("method") == "get_available_resources":
            asked = scheduler.resources.remote(job_id)
        else:
            action, resource, amount = (question.get(name) for name in ("action", "resource_type", "amount"))
            wish = Wish(action, resource, amount, str(question.get("request_id", "")), int(epoch))
            asked = scheduler.allocate.remote(job_id, wish)
        try:
            answer: AllocationView | ResourcesView = ray.get(asked, timeout=ANSWER_S)
            return answer.model_dump()
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, CotenantError) else error from None
        except (RayActorError, GetTimeoutError) as error:
            raise NotConnected(f"the scheduler does not answer: {type(error).__name__}") from error

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _apply(self, command: Command) -> None:
        if isinstance(command, StartJob):
            self._claims = True  # it was decided before the GPUs were given back
        freezing = self._launcher.freezing
        match command:
            case StartJob(thaws=True):
                freezing.thaw(command.job_id, command.epoch, command.revision, command.shares)
            case StopJob(freezes=True):
                freezing.freeze(command.job_id, command.epoch, command.revision)
            case StartJob() if self._may_take_long(command):
                self._prepare(command)
            case StartJob():
                self._start_now(command)
            case ResizeShares():
                self._launcher.resize(command.job_id, command.epoch, command.revision, command.shares)
            case StopJob():
                with self._lock:
                    self._preparing.pop((command.job_id, command.epoch), None)
                how = (command.grace_s, command.reason)
                self._launcher.stop(command.job_id, command.epoch, *how, asks=command.asks)

    def _may_take_long(self, command: StartJob) -> bool:
        gpu_ids = [share.gpu_id for share in command.shares]
        freezes = command.spec.hints.checkpoint == "driver"  # whether that can be is found out at the first of them
        return self._needs_environment(command) or freezes or self._enforcement.may_take_long(gpu_ids)

    def _needs_environment(self, command: StartJob) -> bool:
        return command.spec.runtime_env is not None and command.spec.submit_host != self._host_id

    def _prepare(self, command: StartJob) -> None:
        """Start a job in a thread of its own, since others must not wait: Ray may take minutes to install packages, and
        what serves a GPU to hang.
        """
        key = (command.spec.job_id, command.epoch)
        with self._lock:
            if key in self._preparing:
                return  # the command was repeated
            self._claims, self._preparing[key] = True, (command.revision, time.monotonic())

        def prepare() -> None:
            try:
                self._start(command)
            except StaleCommand as error:
                if self._launcher.is_over(*key):  # else a repeat may still start it
                    self._uplink.tell(StartFailed(*key, self._host_id, str(error), retry=True))
            finally:
                with self._lock:
                    self._preparing.pop(key, None)

        threading.Thread(target=prepare, name=f"prepare-{command.spec.job_id}", daemon=True).start()

    def _start_now(self, command: StartJob) -> None:
        with self._lock:
            self._claims = self._starting = True
        try:
            self._start(command)
        finally:
            with self._lock:
                self._starting = False

    def _start(self, command: StartJob) -> None:
        spec = command.spec
        try:
            cwd, env = spec.cwd, spec.env
            if spec.runtime_env is not None and self._needs_environment(command):
                cwd, env = resolve_environment(self._host_id, spec.runtime_env, spec.env)
            launched = self._launcher.launch(
                job_id=spec.job_id,
                epoch=command.epoch,
                revision=command.revision,
                kind=spec.kind,
                command=spec.command,
                cwd=cwd,
                env=env,
                shares=command.shares,
                fingerprint=spec.fingerprint,
                descriptors=_descriptors(spec.hints, command.planned),
                operator_mix=spec.hints.operator_mix,
                isolation=spec.hints.isolation,
                grace_s=grace_s(spec.hints, self.settings),
                saves=spec.hints.checkpoint == "own",
                freezes=spec.hints.checkpoint == "driver",
            )
        except LaunchError as error:
            key = spec.job_id, command.epoch, self._host_id
            self._uplink.tell(StartFailed(*key, str(error), error.exit_code, error.retry, error.retry_after_s))
        except (RuntimeEnvSetupError, GetTimeoutError) as error:
            self._uplink.tell(StartFailed(spec.job_id, command.epoch, self._host_id, f"runtime environment: {error}"))
        except RayError as error:
            reason = f"Ray failed while it set up the runtime environment: {error}"
            self._uplink.tell(StartFailed(spec.job_id, command.epoch, self._host_id, reason, retry=True))
        else:
            ceiling = self._launcher.ceiling(spec.job_id, command.epoch)
            self._uplink.tell(JobStarted(spec.job_id, command.epoch, self._host_id, launched.root_pid, ceiling))

    def hold_gpus(self, wanted: bool) -> bool:
        """Give the GPUs back to Ray, so that its autoscaler may remove this node, or claim them again.

        Those of a node on which jobs run are kept. While they are given back they are announced as unusable.

        Returns:
            Whether they are given back.
        """
        with self._lock:
            self._claims = wanted or self._starting or bool(self._inventory())
        if self._claimed and not self._claims:
            release_claim(self._host_id)
            self._claimed, self._claim = False, "given back: nothing has run here for a while"
        return not self._claims

    def _claim_gpus(self, timeout_s: float) -> None:
        """Until Ray has handed the GPUs over they are announced as unusable; the claim waits in Ray's queue."""
        try:
            self._claim = claim_gpus(self._host_id, self._counted, timeout_s)
            self._claimed = True
        except TimeoutError as error:
            self._claim = f"waiting: {error}"

    # -- device loop ------------------------------------------------------------------------------------------------

    def _device_loop(self) -> None:
        period = 1.0 / self.settings.profiler.sample_hz
        next_tick = time.monotonic()
        next_window = next_tick + self.settings.profiler.window_s
        while not self._stopping.is_set():
            self._look()
            now = time.monotonic()
            if now >= next_window:
                self._take_in_gpus()
                next_window = max(next_window + self.settings.profiler.window_s, now)
                self._close_window()
            next_tick = max(next_tick + period, now)
            self._stopping.wait(next_tick - now)

    def _look(self) -> None:
        """Take one sample, and see to all that cannot wait for the end of a window."""
        freezing = self._launcher.freezing
        still = freezing.still()
        self._held = {each.job_id: each for each in self._launcher.running() if each.job_id not in still}
        self._follow_processes()
        self._profiler.tick()
        self._tell_held_back()
        if self._profiler.newest is not None:
            self._vacating.see(self._profiler.newest, freezing.moving())
        freezing.look(self._backend, self._vacating, time.monotonic())
        self._reap(time.monotonic())

    def _take_in_gpus(self) -> None:
        """Use the GPUs and instances too that have come since this agent started."""
        found = tuple(self._backend.discover())
        new = found[len(self._gpus) :]
        if new:
            self._enforcement.add_gpus(new)
            self._launcher.add_gpus(new)
            self._gpus = found
            for *_, pids in self._watched.values():  # a job that was here before may be on one of them
                pids.clear()

    def _enforcement_loop(self) -> None:
        """What jobs run under may take seconds to answer, which the device loop cannot wait for."""
        while not self._stopping.wait(ENFORCEMENT_PERIOD_S):
            self._launcher.tend()

    def _follow_processes(self) -> None:
        """Tell the profiler which processes belong to which job (only this thread may touch the backend)."""
        known = {gpu.gpu_id for gpu in self._gpus}
        on = {
            job_id: (launched.epoch, tuple(share.gpu_id for share in launched.shares if share.gpu_id in known))
            for job_id, launched in self._held.items()
        }
        for job_id, (epoch, gpu_ids, _) in list(self._watched.items()):
            if on.get(job_id) != (epoch, gpu_ids):
                self._backend.unwatch(job_id)
                del self._watched[job_id]
        for job_id, (epoch, gpu_ids) in on.items():
            *_, pids = self._watched.setdefault(job_id, (epoch, gpu_ids, set()))
            for pid in self._launcher.root_pids(job_id) - pids:
                self._backend.watch(job_id, list(gpu_ids), pid)
                pids.add(pid)

    def _tell_held_back(self) -> None:
        """Tell at once that a job begins to be held back by its share: the end of its window is up to a second away."""
        capped = {job_id: self._held[job_id] for job_id in self._capped if job_id in self._held}
        dirs = {job_id: launched.job_dir for job_id, launched in capped.items()}
        for job_id, fraction in self._held_back.look(time.monotonic(), dirs).items():
            self._uplink.tell(JobHeldBack(job_id, capped[job_id].epoch, self._host_id, fraction))

    def _reap(self, now: float) -> None:
        for ended in self._launcher.poll():
            with self._lock:
                if (ended.job_id, ended.epoch) in self._exits_told:
                    continue
            gpu_ids = [share.gpu_id for share in self._launcher.shares(ended.job_id)]
            left = self._vacating.wait(ended.job_id, ended.epoch, gpu_ids, now)
            if left is None:
                continue
            self._vacated = left or self._vacated
            with self._lock:
                self._exits_told.add((ended.job_id, ended.epoch))
            told = judged(ended, gpu_ids, self._profiler.device_readings())
            how = (told.exit_code, told.reason, told.lost, told.stopped, told.out_of_memory)
            self._uplink.tell(JobExited(told.job_id, told.epoch, self._host_id, *how))

    def _close_window(self) -> None:
        """Send the PRM this second's windows, all jobs of the host in one message."""
        held = self._held
        reports = {job_id: report for job_id in held if (report := self._launcher.report(job_id)) is not None}
        shares = {job_id: self._launcher.shares(job_id) for job_id in held}
        self._capped = {job_id for job_id, given in shares.items() if any(share.compute < 1.0 for share in given)}
        hints = {job_id: launched.descriptors for job_id, launched in held.items()}
        signatures = self._profiler.collect(reports, shares, hints)
        epochs = {job_id: launched.epoch for job_id, launched in held.items()}
        for job_id, found in self._overruns.observe(signatures, shares, epochs).items():
            if job_id in held:
                seen = found.used_bytes, found.estimated
                self._uplink.tell(MemoryOverrun(job_id, held[job_id].epoch, self._host_id, *seen))
        self._controls = {each.job_id: self._launcher.guarantees(each.job_id) for each in self._launcher.running()}
        batch = WindowBatch(
            host_id=self._host_id,
            at=time.time(),
            signatures=tuple(s for s in signatures if s.job_id in held),
            fingerprints={job_id: launched.fingerprint for job_id, launched in held.items()},
            devices=self._profiler.device_readings(),
            gpu_types={gpu.gpu_id: gpu.gpu_type for gpu in self._gpus},
            families={job_id: said for job_id, launched in held.items() if (said := launched.descriptors.family)},
            foreseen={key: said for key, said in self._profiler.foreseen().items() if key[0] in held},
            planned={job_id: plan for job_id, launched in held.items() if (plan := launched.descriptors.planned)},
        )
        try:
            ray.get_actor(PRM, NAMESPACE).observe.remote(batch)
        except (ValueError, RayError):
            self._note = "the PRM cannot be reached: no forecasts from this host"
        else:
            self._note = ""

    # -- uplink -----------------------------------------------------------------------------------------------------

    def report(self, number: int, events: tuple[Event, ...], note: str) -> HostReport:
        """See ``UplinkHost.report``."""
        if self._claims and not self._claimed:
            self._claim_gpus(CLAIM_RETRY_S)
        lasting = (*self._notes, *self._backend.notes, *self._enforcement.notes)
        notes = "; ".join(text for text in (note, self._note, self._vacated, *lasting) if text)
        frozen, controls = self._enforcement.no_freezing(), dict(self._controls)
        return HostReport(self._host(), self._inventory(), events, self._claim, notes, controls, number, frozen)

    def send(self, report: HostReport) -> bool:
        """See ``UplinkHost.send``."""
        return bool(ray.get(ray.get_actor(SCHEDULER, NAMESPACE).report.remote(report), timeout=REPORT_TIMEOUT_S))

    def renew(self, valid_until_s: float) -> None:
        """See ``UplinkHost.renew``. What was made ready under leases that have expired does not start under new ones:
        it may have been started elsewhere.
        """
        expired_at = self._launcher.valid_until()
        if time.monotonic() >= expired_at:
            with self._lock:
                late = [key for key, (_, since) in self._preparing.items() if since < expired_at]
            for job_id, epoch in late:
                self._launcher.stop(job_id, epoch, 0.0, "the leases of this host expired before it had started")
        self._launcher.renew(valid_until_s)

    def recorded(self, events: tuple[Event, ...]) -> None:
        """See ``UplinkHost.recorded``."""
        for event in events:
            if isinstance(event, JobExited):
                self._launcher.release(event.job_id, event.epoch)
                with self._lock:
                    self._exits_told.discard((event.job_id, event.epoch))
            elif isinstance(event, FreezeFailed):
                self._launcher.freezing.recorded(event)

    def _host(self) -> Host:
        faults = self._faults.update(self._profiler.device_readings())
        self._enforcement.hold_again(self._faults.back)
        return Host(
            host_id=self._host_id,
            name=socket.gethostname(),
            gpus=tuple(
                Gpu(
                    g.gpu_id,
                    self._host_id,
                    g.gpu_type,
                    g.index,
                    g.memory_bytes,
                    self._claimed and g.gpu_id not in faults,
                    faults.get(g.gpu_id, ""),
                    g.island,
                    self._enforcement.can_freeze(g.gpu_id),
                )
                for g in self._gpus
            ),
            joined_at=self._joined_at,
            cpus=self._cpus,
        )

    def _inventory(self) -> tuple[InventoryItem, ...]:
        with self._lock:  # before the launcher's: what is launched meanwhile is in one of the two
            preparing = dict(self._preparing)
        held = {
            (item.job_id, item.epoch): InventoryItem(item.job_id, item.epoch, item.revision, item.phase, item.frozen)
            for item in self._launcher.inventory()
        }
        waiting = [
            InventoryItem(job_id, epoch, revision, "starting")
            for (job_id, epoch), (revision, _) in preparing.items()
            if (job_id, epoch) not in held
        ]
        return (*held.values(), *waiting)


def _descriptors(hints: Hints, planned: DemandProfile | None) -> Descriptors:
    return Descriptors(hints.batch_size, hints.framework, hints.model_family or hints.model, planned)
