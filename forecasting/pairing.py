"""From the stream of windows to measured co-location: how fast jobs really are beside each other.

What a window tells of a pair is only worth something when the pair was settled and nothing else was going on. So most
of this module is about which windows do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.forecasting.clock import WindowClock
from cotenant.forecasting.interference.observations import MOST_THROUGHPUT, Observation
from cotenant.forecasting.profiles import CLEAN_THROTTLE, WARM_UP_WINDOWS, trim
from cotenant.forecasting.rates import Blocks, Rate, rate_of, student_t
from cotenant.forecasting.types import DemandProfile, Signature
from cotenant.forecasting.windows import finite, usable_rate

SETTLING_WINDOWS = 2  # after a change of the set: somebody is being moved, started or ended
FIRST_EMISSIONS_S = (5.0, 10.0, 20.0, 40.0, 60.0)  # of measurement of the same set; from then on at every doubling
LEAST_EMISSION_S = 5.0  # what is measured in less than that before a set dissolves is dropped
GAP_S = 1.5  # later than this after the last window, one is missing in between …
APART_S = 5.0  # … and after this long the set counts as dissolved, and its jobs as started anew
NEVER_STEPS_AFTER = 60  # windows without a step: the job is of the kind that never tells any
MOST_HELD = 0.5  # held back by its own share for more of a window than this, little of it shows the neighbours
ELSEWHERE_S = 10.0  # a job seen this recently on a GPU of another host is one of several hosts
INTERVAL_LEVEL = 0.9  # upper end of an 80 % interval
_LEAST_THROUGHPUT = 1e-3  # slower than that, something else is wrong
_LEAST_PART = 0.01  # of the throughput: the low end of an interval is a throughput too, so above 0
_SOLO_BLOCKS = 15


@dataclass(frozen=True, slots=True)
class _Window:
    """What this module needs of a signature."""

    job_id: str
    gpu_id: str
    start_s: float
    window_s: float
    step_rate: float | None
    held: float
    neighbours: int


@dataclass(slots=True, eq=False)
class _Crowd:
    """The jobs that are together on one GPU since its set last changed; a changed set is a new crowd."""

    members: frozenset[str]
    gpu_type: str | None = None
    profiles: dict[str, DemandProfile] = field(default_factory=dict)
    windows: int = 0
    elapsed_s: float = 0.0  # since the window before
    ready: bool = False  # the present window counts


@dataclass(frozen=True, slots=True)
class _Moment:
    """One job's window on all its GPUs.

    Attributes:
        window: The window.
        length_s: Its length, no longer than the time since the one before.
        ready: Whether it shows settled sets.
    """

    window: _Window
    length_s: float
    ready: bool


@dataclass(slots=True)
class _Gpu:
    clock: WindowClock = field(default_factory=WindowClock)
    crowd: _Crowd | None = None


@dataclass(slots=True)
class _Together:
    """What was measured of one job in one set."""

    crowds: tuple[_Crowd, ...]
    blocks: Blocks = field(default_factory=Blocks)
    measured_s: float = 0.0  # in full blocks, emitted ones included
    emission: int = 0  # number of the next one
    clean_s: float = 0.0  # counted windows without an interruption
    pending_s: float = 0.0  # of those, the last ones, in which no step ended

    def count(self, window: _Window, length_s: float) -> None:
        """Count a window of a settled set.

        A rate is told from the end of a step to the end of a step (``actors/tracks.py``), so that of a slow job covers
        the windows before in which none ended. If it covers more than is clean, the step began before the set did.
        """
        self.clean_s += length_s
        if window.step_rate is None:
            self.pending_s += length_s
            return
        covered_s, self.pending_s = self.pending_s + length_s, 0.0
        if window.step_rate > 0.0:
            step_s = 1.0 / window.step_rate
            if step_s > self.clean_s:
                return
            covered_s = min(covered_s, max(length_s, step_s))
        self.blocks.add(window.step_rate / (1.0 - window.held) * covered_s, covered_s)


@dataclass(slots=True)
class _Member:
    """One job, on all its GPUs."""

    windows: int = 0
    stepped: int = 0
    silent_s: float = 0.0
    rate: float = 0.0  # when it last stepped
    seen: dict[str, float] = field(default_factory=dict)  # when, by GPU
    together: _Together | None = None
    alone: Blocks = field(default_factory=Blocks)

    @property
    def started(self) -> bool:
        """Whether it does now what it will go on doing."""
        return self.stepped > WARM_UP_WINDOWS or (self.stepped == 0 and self.windows > NEVER_STEPS_AFTER)

    def begin_anew(self) -> None:
        self.windows = self.stepped = 0
        self.silent_s = self.rate = 0.0

    def advance(self, window: _Window) -> None:
        """Count a window into the warm-up. A job silent for longer than its steps take has begun anew."""
        self.windows += 1
        if window.step_rate is None:
            self.silent_s += window.window_s
            if self.stepped and self.silent_s > max(APART_S, 3.0 / self.rate):
                self.begin_anew()
            return
        self.silent_s = 0.0
        if window.step_rate > 0.0:
            self.stepped += 1
            self.rate = window.step_rate


class PairTracker:
    """Measures how fast jobs are beside each other, relative to alone, from one-second windows. Pure.

    **What is emitted.** One ``Observation`` per job and set: throughput n = step rate together / solo step rate. It
    covers only what was measured since the last one of the same job and set: observations *add up*. Reading them all,
    weighted by ``seconds``, counts no second twice. They come once the same set has been measured for 5, 10, 20, 40,
    60, 120, 240 … seconds, and with what is left (5 s or more) when the set dissolves. Measured seconds are those of
    full blocks of eight steps (``rates``), so those of a slow job come later.

    **Which windows count.** All jobs with a window on a GPU at one moment are a set. Not counted are the first two
    windows of a set; those in which some member warms up (its first two windows with steps, and until then up to 60
    without); those in which a neighbour exists that has no window; those in which the job was held back by its own
    share for more than half of the time. If for less, its rate counts as rate / (1 − held), as its utilisation does: a
    small share is not the neighbours' doing. Pauses (step rate 0) count as time. A window without a step rate counts
    with the next one that has some: a step was under way.

    **Missing windows.** Nothing is learnt across a hole. After more than 5 s the set counts as dissolved and its jobs
    as started anew; so do jobs that were silent for longer than three of their steps take. Late and duplicate windows
    are ignored; when a clock was set back, until ten windows have advanced.

    **Several GPUs.** A job has one step rate, that of its slowest GPU. So it is measured only when the same programs
    are beside it on every GPU of one type that it shares; beside different ones nobody knows who slowed it down. A job
    on several hosts is not measured. As a neighbour it counts on every GPU.

    **Nothing is emitted** for a job that has no solo step rate measured alone, that never stepped, whose n would be
    outside (0, 2], on a GPU whose type is not known, or when a member has no profile or fingerprint, as such a set can
    not be found again. What else is missing of a member does not stop the others.

    **Interval**: 80 %, from Student's t over the blocks, and from the spread of the program's solo blocks where some
    were seen.

    The least recently seen jobs, GPUs and programs are dropped beyond the limit. Cost: linear in the windows, and
    quadratic in the few jobs of one GPU when something is emitted. Not thread-safe.

    Args:
        most: Largest number of jobs, of GPUs and of programs kept.
    """

    def __init__(self, most: int = 20_000) -> None:
        self.most = most
        self._jobs: dict[str, _Member] = {}
        self._gpus: dict[str, _Gpu] = {}
        self._solo: dict[str, list[float]] = {}  # block rates alone, by fingerprint

    def observe(
        self,
        at: float,
        windows: Sequence[Signature],
        profiles: Mapping[str, DemandProfile],
        gpu_types: Mapping[str, str],
    ) -> list[Observation]:
        """Take in one host's windows of one second; their order does not matter.

        Args:
            at: Unix seconds at the end of the windows.
            windows: One per job and GPU; of several for the same moment the one with the lowest step rate counts.
            profiles: What the jobs do alone, by job id; those of ended jobs are not needed.
            gpu_types: Type of every GPU, by GPU id.

        Returns:
            What is measured well enough now, in order of GPU and job. Never raises for bad windows.
        """
        found: list[Observation] = []
        for gpus in _moments(windows):
            crowds = {}
            for gpu_id, members in gpus.items():
                crowd = self._gather(gpu_id, members, found)
                if crowd is not None:
                    crowds[gpu_id] = crowd
                    crowd.gpu_type = gpu_types.get(gpu_id)
                    crowd.profiles.update((each, profiles[each]) for each in crowd.members if each in profiles)
            self._measure(at, gpus, crowds, found)
        for kept in (self._jobs, self._gpus, self._solo):
            trim(kept, self.most)
        return found

    def discard(self, job_id: str) -> None:
        """Drop what was measured of a job beside others and not emitted yet: its rate alone turned out to be none.

        Unlike that of a job whose rate alone is still to come, it must not be held against one that comes later.
        """
        member = self._jobs.get(job_id)
        if member is not None and member.together is not None:
            member.together.blocks = Blocks()

    def forget(self, job_id: str) -> list[Observation]:
        """Drop a job that ended; returns what was measured of it and not emitted yet. Unknown ids are ignored."""
        member = self._jobs.pop(job_id, None)
        found: list[Observation] = []
        if member is None:
            return found
        if member.together is not None:
            self._emit(job_id, member.together, found)
        for gpu_id in member.seen:
            gpu = self._gpus.get(gpu_id)
            if gpu is not None and gpu.crowd is not None and not any(each in self._jobs for each in gpu.crowd.members):
                del self._gpus[gpu_id]
        return found

    def _gather(self, gpu_id: str, windows: Mapping[str, _Window], found: list[Observation]) -> _Crowd | None:
        """Return who is together on a GPU at a moment; None when that is not known."""
        gpu = self._gpus.pop(gpu_id, None) or _Gpu()
        self._gpus[gpu_id] = gpu  # most recently seen last
        if any(each.neighbours != len(windows) - 1 for each in windows.values()):
            return None  # somebody is coming or going
        elapsed = gpu.clock.advance(next(iter(windows.values())).start_s)
        if elapsed is None:
            return None
        crowd = gpu.crowd
        apart = not 0.0 < elapsed <= APART_S
        if crowd is None or apart or crowd.members != windows.keys():
            if crowd is not None:
                self._dissolve(crowd, found)
            crowd = gpu.crowd = _Crowd(frozenset(windows))
        crowd.windows += 1
        crowd.elapsed_s = elapsed
        for job_id in windows:
            member = self._jobs.pop(job_id, None) or _Member()
            self._jobs[job_id] = member
            if apart:
                member.begin_anew()
            elif elapsed > GAP_S and member.together is not None:
                member.together.clean_s = member.together.pending_s = 0.0
        return crowd

    def _dissolve(self, crowd: _Crowd, found: list[Observation]) -> None:
        for job_id in sorted(crowd.members):
            member = self._jobs.get(job_id)
            if member is not None and member.together is not None and crowd in member.together.crowds:
                self._emit(job_id, member.together, found)
                member.together = None

    def _measure(
        self,
        at: float,
        gpus: Mapping[str, Mapping[str, _Window]],
        crowds: Mapping[str, _Crowd],
        found: list[Observation],
    ) -> None:
        """Count one moment's windows for every job in them."""
        places: dict[str, list[str]] = {}
        for gpu_id, crowd in crowds.items():
            for job_id in sorted(crowd.members):
                places.setdefault(job_id, []).append(gpu_id)
        window_of = {job_id: _slowest([gpus[gpu_id][job_id] for gpu_id in own]) for job_id, own in places.items()}
        for job_id, window in window_of.items():
            self._jobs[job_id].advance(window)
        for crowd in crowds.values():
            crowd.ready = crowd.windows > SETTLING_WINDOWS and all(self._jobs[each].started for each in crowd.members)
        for job_id, own in places.items():
            member = self._jobs[job_id]
            recent = {gpu_id: last for gpu_id, last in member.seen.items() if abs(at - last) <= ELSEWHERE_S}
            member.seen = recent | dict.fromkeys(own, at)
            here = [crowds[gpu_id] for gpu_id in own]
            moment = _Moment(
                window=window_of[job_id],
                length_s=min(window_of[job_id].window_s, *(crowd.elapsed_s for crowd in here)),
                ready=all(crowd.ready for crowd in here),
            )
            if len(member.seen) > len(own):
                self._count_together(job_id, moment, (), found)
                continue
            shared = tuple(crowd for crowd in here if len(crowd.members) > 1)
            if moment.ready and not shared:
                self._count_alone(job_id, moment, here[0])
            self._count_together(job_id, moment, shared, found)

    def _count_alone(self, job_id: str, moment: _Moment, crowd: _Crowd) -> None:
        """Learn how much the program's rate varies when it is alone."""
        window, profile = moment.window, crowd.profiles.get(job_id)
        if window.step_rate is None or window.held > CLEAN_THROTTLE or profile is None or not profile.fingerprint:
            return
        alone = self._jobs[job_id].alone
        alone.add(window.step_rate * moment.length_s, moment.length_s)
        rates = self._solo.pop(profile.fingerprint, []) + alone.empty()
        self._solo[profile.fingerprint] = rates[-_SOLO_BLOCKS:]

    def _count_together(
        self, job_id: str, moment: _Moment, shared: tuple[_Crowd, ...], found: list[Observation]
    ) -> None:
        member = self._jobs[job_id]
        together = member.together
        if together is None or together.crowds != shared:
            if together is not None:
                self._emit(job_id, together, found)
            together = member.together = _Together(shared) if shared else None
        if together is None:
            return
        if not moment.ready or moment.window.held > MOST_HELD:
            together.clean_s = together.pending_s = 0.0
            return
        together.count(moment.window, moment.length_s)
        if together.measured_s + together.blocks.seconds >= _emission_s(together.emission):
            self._emit(job_id, together, found)

    def _emit(self, job_id: str, together: _Together, found: list[Observation]) -> None:
        """Append what was measured since the last emission, if that is enough and everything needed is known."""
        seconds = together.blocks.seconds
        key = _companions(job_id, together.crowds)
        focal = together.crowds[0].profiles.get(job_id)
        if seconds < LEAST_EMISSION_S or key is None or focal is None or not focal.fingerprint or focal.from_shared:
            return
        solo, rate = focal.solo_step_rate, None
        if finite(solo) and solo > 0.0:
            rate = together.blocks.take()
        if rate is None or solo is None:
            return
        together.measured_s += seconds
        while _emission_s(together.emission) <= together.measured_s:
            together.emission += 1
        throughput = rate.mean / solo
        if not _LEAST_THROUGHPUT <= throughput <= MOST_THROUGHPUT:
            return
        error = _relative_error(rate, rate_of(self._solo.get(focal.fingerprint, ())))
        half = student_t(INTERVAL_LEVEL, rate.freedom) * error * throughput
        gpu_type, others = key
        found.append(
            Observation(
                gpu_type=gpu_type,
                focal=focal,
                others=others,
                throughput=throughput,
                low=max(_LEAST_PART * throughput, throughput - half),
                high=min(MOST_THROUGHPUT, throughput + half),
                seconds=seconds,
            )
        )


def _companions(job_id: str, crowds: Iterable[_Crowd]) -> tuple[str, tuple[DemandProfile, ...]] | None:
    """Return the GPU type and a job's neighbours by fingerprint; None when they are not the same everywhere."""
    found: dict[tuple[str | None, tuple[str, ...]], tuple[DemandProfile, ...]] = {}
    for crowd in crowds:
        others = [crowd.profiles.get(each) for each in sorted(crowd.members) if each != job_id]
        known = tuple(sorted((each for each in others if each is not None), key=lambda each: each.fingerprint))
        if len(known) < len(others) or not all(each.fingerprint for each in known):
            return None
        found[crowd.gpu_type, tuple(each.fingerprint for each in known)] = known
    if len(found) != 1:
        return None
    (gpu_type, _), known = next(iter(found.items()))
    return (gpu_type, known) if gpu_type else None


def _relative_error(rate: Rate, solo: Rate | None) -> float:
    """Return the standard error of rate / solo over its value; the solo rate counts as exact where it never varied."""
    own = rate.error / rate.mean
    return own if solo is None else math.hypot(own, solo.error / solo.mean)


def _emission_s(number: int) -> float:
    """Return after how many measured seconds of a set the emission of this number is due."""
    if number < len(FIRST_EMISSIONS_S):
        return FIRST_EMISSIONS_S[number]
    return FIRST_EMISSIONS_S[-1] * 2.0 ** (number - len(FIRST_EMISSIONS_S) + 1)


def _moments(windows: Iterable[Signature]) -> list[dict[str, dict[str, _Window]]]:
    """Return usable windows by moment (in order), GPU and job; the same for any order of the windows."""
    moments: dict[float, dict[str, dict[str, _Window]]] = {}
    for each in sorted(filter(None, map(_window, windows)), key=_order):
        moments.setdefault(each.start_s, {}).setdefault(each.gpu_id, {}).setdefault(each.job_id, each)
    return list(moments.values())


def _order(window: _Window) -> tuple[Any, ...]:
    rate = math.inf if window.step_rate is None else window.step_rate
    return window.start_s, window.gpu_id, window.job_id, rate, window.window_s, window.held, window.neighbours


def _window(signature: Signature) -> _Window | None:
    start_s, window_s = signature.start_s, signature.window_s
    if not (math.isfinite(start_s) and math.isfinite(window_s) and window_s > 0.0):
        return None
    throttled = signature.throttled_fraction
    return _Window(
        job_id=signature.job_id,
        gpu_id=signature.gpu_id,
        start_s=start_s,
        window_s=window_s,
        step_rate=usable_rate(signature),
        held=min(1.0, max(0.0, throttled)) if finite(throttled) else 0.0,
        neighbours=signature.neighbours,
    )


def _slowest(windows: Sequence[_Window]) -> _Window:
    """Return the window of the GPU on which a job was slowest; its report is one for all of them."""
    return min(windows, key=_order)
