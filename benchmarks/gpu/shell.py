"""A cotenant in one process, without Ray: the core, one host's launcher and profiler, and forecasts, in one loop."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.dry import Dry
from benchmarks.gpu.host import FOREVER_S, PROGRAM, STARTED_S, Failed

from cotenant.actors.devices.base import DeviceBackend, GpuInfo
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.heldback import HeldBackWatch
from cotenant.actors.jobrecords import Launched
from cotenant.actors.launcher import Launcher
from cotenant.actors.overruns import OverrunWatch
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import Settings
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import JobMeasurement, Signature
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    Event,
    HostJoined,
    JobExited,
    JobHeldBack,
    JobStarted,
    JobSubmitted,
    MeasurementsReported,
    MemoryOverrun,
    Tick,
)
from cotenant.scheduler.core.model import Gpu, Host, Job, JobSpec
from cotenant.scheduler.core.requests import grace_s
from cotenant.scheduler.hints import parse_hints

HOST = "here"
TICK_S = 0.5


class Shell:
    """What the scheduler, the host agent and the PRM do, one after the other.

    Args:
        folder: The run directory.
        backend: The device backend.
        gpus: Those of its GPUs that jobs may use.
        settings: All settings.
        env: What every job has in its environment.
        dry: The stand-in's hardware, in a dry run.
    """

    def __init__(
        self,
        folder: Path,
        backend: DeviceBackend,
        gpus: Sequence[GpuInfo],
        *,
        settings: Settings,
        env: Mapping[str, str],
        dry: Dry | None,
    ) -> None:
        self.settings = settings
        self.core = Core(settings)
        self._backend, self._env, self._dry = backend, dict(env), dry
        enforcement = HostEnforcement(folder, gpus, settings.enforcement)
        self.launcher = Launcher(folder, gpus, enforcement, first_validity_s=FOREVER_S)
        self._profiler = Profiler(backend, settings.profiler)
        self._overruns, self._held_back = OverrunWatch(), HeldBackWatch()
        self._forecaster, self._book = MixtureForecaster(), ProfileBook()
        self._watched: dict[str, tuple[int, set[int]]] = {}
        self._capped: set[str] = set()
        self._next_s = self._window_s = self._tick_s = time.monotonic()
        found = tuple(Gpu(gpu.gpu_id, HOST, gpu.gpu_type, gpu.index, gpu.memory_bytes) for gpu in gpus)
        self.tell(HostJoined(Host(HOST, HOST, found, joined_at=time.time())))

    def submit(self, job_id: str, hints: Mapping[str, object], *arguments: str) -> None:
        """Submit the program with these hints."""
        now = time.time()
        self.tell(
            JobSubmitted(
                JobSpec(
                    job_id=job_id,
                    name=job_id,
                    kind="command",
                    command=(sys.executable, str(PROGRAM), *arguments),
                    cwd="/",
                    env={**os.environ, **self._env},
                    hints=parse_hints(hints, now),
                    fingerprint=job_id,
                    submitted_at=now,
                )
            )
        )

    def tell(self, *events: Event) -> None:
        """Hand events to the core and do what it wants done."""
        pending = list(events)
        while pending:
            commands = self.core.handle(pending, time.time())
            pending = [event for command in commands for event in self._apply(command)]

    def job(self, job_id: str) -> Job:
        """Return a job as the core sees it."""
        return self.core.state.jobs[job_id]

    def shares(self, job_id: str) -> tuple[Share, ...]:
        """Return the shares of a job."""
        lease = self.job(job_id).lease
        return lease.shares if lease else ()

    def steps(self, job_id: str) -> int:
        """Return how many steps this run of a job has made."""
        report = self.launcher.report(job_id)
        return 0 if report is None else report.steps or 0

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = STARTED_S) -> float:
        """Go on until this holds; returns the seconds that took.

        Raises:
            Failed: It does not, in time.
        """
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > timeout_s:
                states = {job_id: f"{job.state}: {job.reason}" for job_id, job in self.core.state.jobs.items()}
                raise Failed(f"not within {timeout_s:g} s: {what}; {states}")
            self.step()
        return time.monotonic() - began

    def step(self) -> None:
        """Sample once, as ten times a second, and do what is due."""
        held = {launched.job_id: launched for launched in self.launcher.running()}
        self._follow(held)
        self._profiler.tick()
        self._look(held)
        now = time.monotonic()
        if now >= self._window_s:
            self._window_s = now + self.settings.profiler.window_s
            self._close_window(held)
        if now >= self._tick_s:
            self._tick_s = now + TICK_S
            self.launcher.tend()
            self.tell(Tick())
        self._next_s = max(self._next_s + 1.0 / self.settings.profiler.sample_hz, now)
        time.sleep(max(0.0, self._next_s - time.monotonic()))

    def close(self) -> None:
        """End every job."""
        for launched in self.launcher.running():
            self.launcher.stop(launched.job_id, launched.epoch, 0.0, "the measurement is over")
        deadline = time.monotonic() + STARTED_S
        while self.launcher.running() and time.monotonic() < deadline:
            self.launcher.poll()
            time.sleep(0.02)
        for job_id in list(self._watched):
            self._backend.unwatch(job_id)
        self._held_back.close()
        self.launcher.close()

    def _apply(self, command: Command) -> list[Event]:
        match command:
            case StartJob(spec=spec):
                self.launcher.launch(
                    job_id=spec.job_id,
                    epoch=command.epoch,
                    revision=command.revision,
                    kind=spec.kind,
                    command=spec.command,
                    cwd=spec.cwd,
                    env=spec.env,
                    shares=command.shares,
                    isolation=spec.hints.isolation,
                    grace_s=grace_s(spec.hints, self.settings),
                    saves=spec.hints.checkpoint == "own",
                )
                ceiling = self.launcher.ceiling(spec.job_id, command.epoch)
                return [JobStarted(spec.job_id, command.epoch, HOST, ceiling=ceiling)]
            case ResizeShares():
                self.launcher.resize(command.job_id, command.epoch, command.revision, command.shares)
            case StopJob():
                self.launcher.stop(command.job_id, command.epoch, command.grace_s, command.reason)
        return []

    def _follow(self, held: Mapping[str, Launched]) -> None:
        """Tell the backend whose processes are whose."""
        for job_id, (epoch, _) in list(self._watched.items()):
            if job_id not in held or held[job_id].epoch != epoch:
                self._backend.unwatch(job_id)
                del self._watched[job_id]
        for job_id, launched in held.items():
            _, known = self._watched.setdefault(job_id, (launched.epoch, set()))
            for pid in self.launcher.root_pids(job_id) - known:
                self._backend.watch(job_id, [share.gpu_id for share in launched.shares], pid)
                known.add(pid)

    def _look(self, held: Mapping[str, Launched]) -> None:
        """Take note at once of jobs that are held back, and of those that have ended."""
        dirs = {job_id: held[job_id].job_dir for job_id in self._capped & held.keys()}
        for job_id, fraction in self._held_back.look(time.monotonic(), dirs).items():
            self.tell(JobHeldBack(job_id, held[job_id].epoch, HOST, fraction))
        for ended in self.launcher.poll():
            how = (ended.exit_code, ended.reason, ended.lost, ended.stopped, ended.out_of_memory)
            self.launcher.release(ended.job_id, ended.epoch)
            self.tell(JobExited(ended.job_id, ended.epoch, HOST, *how))

    def _close_window(self, held: Mapping[str, Launched]) -> None:
        if self._dry is not None:
            places = {job_id: [share.gpu_id for share in launched.shares] for job_id, launched in held.items()}
            self._dry.show({held[job_id].job_dir: gpu_ids for job_id, gpu_ids in places.items()})
        reports = {job_id: report for job_id in held if (report := self.launcher.report(job_id)) is not None}
        shares = {job_id: self.launcher.shares(job_id) for job_id in held}
        self._capped = {job_id for job_id, given in shares.items() if any(share.compute < 1.0 for share in given)}
        signatures = [each for each in self._profiler.collect(reports, shares) if each.job_id in held]
        epochs = {job_id: launched.epoch for job_id, launched in held.items()}
        for job_id, found in self._overruns.observe(signatures, shares, epochs).items():
            self.tell(MemoryOverrun(job_id, held[job_id].epoch, HOST, found.used_bytes, found.estimated))
        measured = self._measurements(signatures)
        if measured:
            self.tell(MeasurementsReported(HOST, measured))

    def _measurements(self, signatures: Sequence[Signature]) -> tuple[JobMeasurement, ...]:
        """What the PRM makes of the windows."""
        self._forecaster.observe_batch(signatures, self._profiler.foreseen())
        for signature in signatures:
            self._book.observe(signature, signature.job_id)
        forecasts = self._forecaster.forecast_batch([signature.job_id for signature in signatures])
        return tuple(
            JobMeasurement(
                job_id=each.job_id,
                fingerprint=each.job_id,
                signature=each,
                forecast=forecasts[each.job_id],
                profile=replace(self._book.profile(each.job_id, each.job_id), fingerprint=each.job_id),
            )
            for each in signatures
            if each.job_id in forecasts
        )
