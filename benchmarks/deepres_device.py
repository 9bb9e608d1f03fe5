"""One device whose shares are enforced, second by second in virtual time, in a closed loop with the shipped scheduler.

What decides is what ships: the core with its placement, deadlines and resizing, the demand forecaster and the profiles.
It sees windows of one second, with noise, of what each job used; it never sees the phases.

The device: a job that alone keeps it busy for the fraction ``u`` of the time and holds the share ``c`` runs at
``min(1, c / u)`` of its speed alone, since a job that is held back reads its input ahead (``docs/shim.md``). Sharing
costs as measured on two cores: 4 % of the device for switching, and for each job its ``sensitivity`` per unit of what
its neighbours use. Both methods run on the same device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cotenant.configs.settings import Settings
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import JobMeasurement, Signature
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted, MeasurementsReported
from cotenant.scheduler.core.model import Gpu, Hints, Host, JobSpec

GIB = 1 << 30
STEP_S = 0.25
WINDOW_S = 1.0
START_S = 1.0  # from the command to the first step
STEPS_PER_S = 10.0  # of every job alone: only ratios count
NOISE = 0.03
SWITCHING = (
    0.04  # of the device, once all but the heaviest together use a fifth of it (forecasting/interference/rule.py)
)
LONGEST_S = 20_000.0
FIRST_RUN_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of an application: for so many seconds alone it keeps the device busy for this fraction of the time."""

    seconds: float
    util: float


@dataclass(frozen=True, slots=True)
class Application:
    """A program. Its phases repeat until the work of a job is done; ``sensitivity``: what neighbours cost it."""

    name: str
    phases: tuple[Phase, ...]
    sensitivity: float = 0.05

    @property
    def period_s(self) -> float:
        """Seconds alone until its phases repeat."""
        return math.fsum(phase.seconds for phase in self.phases)

    def util(self, done_s: float) -> float:
        """Return what it wants of the device after so many seconds' worth of running alone."""
        at = done_s % self.period_s
        for phase in self.phases:
            at -= phase.seconds
            if at < 0.0:
                return phase.util
        return self.phases[-1].util


@dataclass(frozen=True, slots=True)
class Work:
    """A job: so many seconds alone, submitted then. ``hints``: beside memory, accepted slowdown and deadline."""

    application: Application
    solo_s: float
    submit_s: float = 0.0
    deadline_s: float | None = None  # after submission
    hints: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of a job of a mix that began at ``begin_s``; all in seconds of virtual time."""

    work: Work
    begin_s: float
    done_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def submitted_s(self) -> float:
        """When it was submitted."""
        return self.begin_s + self.work.submit_s

    @property
    def progress(self) -> float:
        """Speed over its whole time in the system, waiting included, relative to alone."""
        assert self.ended_s is not None
        return self.work.solo_s / (self.ended_s - self.submitted_s)

    @property
    def missed(self) -> bool:
        """Whether it had a deadline and missed it."""
        deadline, ended = self.work.deadline_s, self.ended_s
        return deadline is not None and ended is not None and ended - self.submitted_s > deadline


@dataclass(slots=True)
class _Live:
    """A job on the device, and what was measured of it in the present window."""

    outcome: Outcome
    epoch: int
    share: float
    begins_at: float
    running: bool = False
    used_s: float = 0.0
    peak: float = 0.0
    steps: float = 0.0
    held_s: float = 0.0


def run(works: Sequence[Work], settings: Settings, seed: int = 0, memory_bytes: int = 24 * GIB) -> list[Outcome]:
    """Run the jobs to their ends on one device; returns what became of each, in order.

    Every application has run once before, alone: the applications are known ones, as in most clusters.
    """
    loop = _Loop(settings, seed, memory_bytes)
    for application in dict.fromkeys(work.application for work in works):
        loop.run([Work(application, max(FIRST_RUN_S, application.period_s))])
    return loop.run(works)


class _Loop:
    def __init__(self, settings: Settings, seed: int, memory_bytes: int) -> None:
        self.now = 0.0
        self._outcomes: dict[str, Outcome] = {}
        self._coming: list[str] = []
        self._names = itertools.count()
        self._core, self._forecaster, self._book = Core(settings), MixtureForecaster(), ProfileBook()
        self._live: dict[str, _Live] = {}
        self._rng = np.random.default_rng(seed)
        self._window_at = 0.0
        self._measures = settings.placement.policy != "static"  # which looks at nothing that is measured
        gpu = Gpu("gpu-0", "host", "simulated", 0, memory_bytes)
        self._tell([HostJoined(Host("host", "host", (gpu,), joined_at=0.0))])

    def run(self, works: Sequence[Work]) -> list[Outcome]:
        """Run these jobs, submitted from now on, to their ends."""
        begin = self.now
        mine = {f"{next(self._names)}-{work.application.name}": Outcome(work, begin) for work in works}
        self._outcomes.update(mine)
        self._coming = sorted(mine, key=lambda job_id: mine[job_id].submitted_s)
        while any(outcome.ended_s is None for outcome in mine.values()):
            self._step()
            if self.now - begin > LONGEST_S:
                raise RuntimeError(f"not all jobs ended within {LONGEST_S:g} s")
        return list(mine.values())

    def _step(self) -> None:
        """Let a quarter of a second pass."""
        self.now = now = self.now + STEP_S
        events: list[Event] = []
        while self._coming and self._outcomes[self._coming[0]].submitted_s <= now:
            job_id = self._coming.pop(0)
            events.append(JobSubmitted(_spec(job_id, self._outcomes[job_id].work, now)))
        for job_id, live in self._live.items():
            if not live.running and live.begins_at <= now:
                live.running, live.outcome.started_s = True, now
                events.append(JobStarted(job_id, live.epoch, "host"))
        if self._measures and now - self._window_at >= WINDOW_S:
            self._window_at = now
            events.append(MeasurementsReported("host", tuple(self._measured())))
        self._tell(events)
        self._tell(self._progress())

    def _tell(self, events: Sequence[Event]) -> None:
        if events:
            self._carry_out(self._core.handle(events, self.now))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, StartJob):
                (share,) = command.shares
                outcome = self._outcomes[command.job_id]
                self._live[command.job_id] = _Live(outcome, command.epoch, share.compute, self.now + START_S)
            elif isinstance(command, ResizeShares):
                (share,) = command.shares
                self._live[command.job_id].share = share.compute
            elif isinstance(command, StopJob):
                raise TypeError(f"nothing is to be stopped here: {command.reason}")

    def _progress(self) -> list[Event]:
        """Move everybody on; returns the ends of jobs."""
        live = [each for each in self._live.values() if each.running]
        wants = [each.outcome.work.application.util(each.outcome.done_s) for each in live]
        uses = [min(want, each.share) for want, each in zip(wants, live, strict=True)]
        total = math.fsum(uses)
        capacity = 1.0 - SWITCHING * min(1.0, (total - max(uses, default=0.0)) / 0.2)
        for want, use, each in zip(wants, uses, live, strict=True):
            capped = (
                min(1.0, each.share / want) if total <= capacity else min(1.0, each.share / want) * capacity / total
            )
            speed = capped / (1.0 + each.outcome.work.application.sensitivity * (total - use))
            each.outcome.done_s += speed * STEP_S
            each.used_s += want * speed * STEP_S
            each.peak = max(each.peak, want * speed)
            each.steps += STEPS_PER_S * speed * STEP_S
            each.held_s += max(0.0, 1.0 - each.share / want) * STEP_S
        ended = [job_id for job_id, each in self._live.items() if each.outcome.done_s >= each.outcome.work.solo_s]
        for job_id in ended:
            self._outcomes[job_id].ended_s = self.now + STEP_S
        return [JobExited(job_id, self._live.pop(job_id).epoch, "host", 0) for job_id in ended]

    def _measured(self) -> Iterable[JobMeasurement]:
        """Return the windows of everybody, with forecasts and profiles, and begin new ones."""
        windows: list[Signature] = []
        for job_id, live in self._live.items():
            if live.running and live.steps > 0.0:
                windows.append(self._signature(job_id, live))
            live.used_s = live.peak = live.steps = live.held_s = 0.0
        for window in windows:
            self._book.observe(window, self._name(window.job_id))
        self._forecaster.observe_batch(windows)
        forecasts = self._forecaster.forecast_batch([window.job_id for window in windows])
        for window in windows:
            name = self._name(window.job_id)
            if window.job_id in forecasts:
                profile = self._book.profile(window.job_id, name)
                yield JobMeasurement(window.job_id, name, window, forecasts[window.job_id], profile)

    def _signature(self, job_id: str, live: _Live) -> Signature:
        noise = max(0.0, 1.0 + NOISE * float(self._rng.standard_normal()))
        memory = 2.0 * GIB
        return Signature(
            job_id=job_id,
            gpu_id="gpu-0",
            start_s=self.now - WINDOW_S,
            window_s=WINDOW_S,
            samples=10,
            util_mean=min(1.0, live.used_s / WINDOW_S * noise),
            util_peak=min(1.0, live.peak * noise),
            memory_bytes=memory,
            memory_peak_bytes=memory,
            step_rate=live.steps / WINDOW_S * noise,
            throttled_fraction=live.held_s / WINDOW_S,
            host_cores=None,
            neighbours=len(self._live) - 1,
            compute_share=live.share,
        )

    def _name(self, job_id: str) -> str:
        return self._outcomes[job_id].work.application.name


def _spec(job_id: str, work: Work, now: float) -> JobSpec:
    deadline = None if work.deadline_s is None else now + work.deadline_s
    hints = Hints(
        gpu_memory=4 * GIB,
        deadline_s=deadline,
        expected_duration_s=work.solo_s,
        **work.hints,  # type: ignore[arg-type]
    )
    name = work.application.name
    return JobSpec(job_id, name, "command", ("simulated",), "/", {}, hints, name, submitted_at=now)
