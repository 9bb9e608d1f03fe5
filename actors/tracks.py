"""What the profiler keeps between samples and windows: counters, levels, and how far a job is by its own report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.reports import JobReport
from cotenant.forecasting.signatures import BY_NAME
from cotenant.forecasting.types import DeviceActivity, MemorySource, Reading, UtilSource

STALLED_STEPS = 2.0  # a job without a new step counts as stalled after this many of its own step times
# What is averaged of a device's activity, and the largest value of each that can be believed.
_ACTIVITY = {each.name: BY_NAME["device_" + each.name].most for each in fields(DeviceActivity) if each.name != "util"}


@dataclass(slots=True)
class Counter:
    """The mean rate of a counter over a window: the sum of its believable steps over the sum of their times.

    Inside a window missing readings are bridged, because the counter went on; from one window to the next they are
    not, because the step would belong to both.
    """

    base: tuple[float, float] | None = None  # time and value of the last reading
    grown: float = 0.0
    time_s: float = 0.0
    peak: Reading = None
    newest: Reading = None  # rate since the reading before the last; None when that is not known
    missing: bool = True  # the last reading was
    backwards: bool = False

    def add(self, value: Reading, at_s: float, limit: float | None) -> bool:
        """Take in a reading; False when it is rejected. ``limit`` is the largest believable rate."""
        self.missing = value is None
        self.newest = None
        if value is None:
            return True
        base, self.base = self.base, (at_s, value)
        if base is None:
            return True
        time_s, grown = at_s - base[0], value - base[1]
        if grown < 0:
            self.backwards = True  # whose counter it is now, and was until now, is unknown: so is the window
            return False
        rate = grown / time_s
        if limit is not None and rate > limit:
            return False
        self.grown += grown
        self.time_s += time_s
        self.newest = rate
        self.peak = rate if self.peak is None else max(self.peak, rate)
        return True

    def known(self) -> bool:
        return self.time_s > 0 and not self.backwards

    def mean(self) -> Reading:
        return self.grown / self.time_s if self.known() else None

    def next(self) -> Counter:
        return Counter() if self.missing else Counter(base=self.base, missing=False)


@dataclass(slots=True)
class Level:
    """Mean, last and largest of a reading that is not a counter."""

    total: float = 0.0
    time_s: float = 0.0
    last: Reading = None
    peak: Reading = None

    def add(self, value: Reading, interval_s: float, limit: float) -> bool:
        """Take in a reading that stands for the interval before it; False when it is rejected."""
        if value is None:
            self.last = None
            return True
        if not 0 <= value <= limit:
            return False
        self.total += value * interval_s
        self.time_s += interval_s
        self.last = value
        self.peak = value if self.peak is None else max(self.peak, value)
        return True

    def mean(self) -> Reading:
        return self.total / self.time_s if self.time_s > 0 else None


@dataclass(slots=True)
class Track:
    """One job on one GPU in one window."""

    busy: Counter = field(default_factory=Counter)
    host: Counter = field(default_factory=Counter)
    util: Level = field(default_factory=Level)
    memory: Level = field(default_factory=Level)
    age: Level = field(default_factory=Level)
    estimated: bool = False  # some of the utilisation was a part of the whole device's
    memory_estimated: bool = False  # some of the readings of the memory were the whole device's
    read: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)
    memory_from: tuple[float, float] | None = None  # time and value of the window's first memory reading
    memory_to: tuple[float, float] | None = None  # and of its last
    samples: int = 0

    def add_memory(
        self, value: Reading, source: MemorySource | None, at_s: float, interval_s: float, limit: float
    ) -> bool:
        """Take in a reading of the memory; False when it is rejected."""
        believable = self.memory.add(value, interval_s, limit)
        if believable and value is not None:
            self.memory_estimated = self.memory_estimated or source == "device"
            self.memory_to = (at_s, value)
            self.memory_from = self.memory_from or self.memory_to
        return believable

    def memory_growth(self) -> Reading:
        """Growth of the memory over the window, bytes per second."""
        if self.memory_from is None or self.memory_to is None or self.memory_to[0] <= self.memory_from[0]:
            return None
        return (self.memory_to[1] - self.memory_from[1]) / (self.memory_to[0] - self.memory_from[0])

    def note_source(self, source: UtilSource | None, age_s: Reading, interval_s: float) -> None:
        """Take in where a reading of the utilisation came from, and how old it was."""
        self.estimated = self.estimated or source == "device"
        self.age.add(age_s, interval_s, math.inf)

    def util_source(self) -> UtilSource | None:
        """Return where the window's utilisation comes from; one estimate among the readings makes it one."""
        if self.busy.known():
            return "counter"
        if self.util.mean() is None:
            return None
        return "device" if self.estimated else "process"

    def memory_source(self) -> MemorySource | None:
        """Return where the window's memory comes from; one estimate among the readings makes it one."""
        if self.memory.mean() is None:
            return None
        return "device" if self.memory_estimated else "process"

    def utilisation(self) -> tuple[Reading, Reading]:
        """Mean and peak, from the counter where there is one. A hair above 1 is the clocks' doing and cut off."""
        if self.busy.known():
            mean, peak = self.busy.mean(), self.busy.peak
        elif self.busy.backwards:
            mean = peak = None
        else:
            mean, peak = self.util.mean(), self.util.peak
        return (None if mean is None else min(1.0, mean)), (None if peak is None else min(1.0, peak))

    def newest(self) -> Reading:
        """Utilisation in the last sample, from the counter where there is one."""
        value = self.util.last if self.busy.base is None else self.busy.newest
        return None if value is None else min(1.0, value)

    def forget_counters(self) -> None:
        """Compare nothing that comes with anything that was."""
        self.busy.base = self.host.base = self.read.base = self.written.base = None
        self.memory_from = self.memory_to = None

    def next(self) -> Track:
        return Track(self.busy.next(), self.host.next(), read=self.read.next(), written=self.written.next())


@dataclass(slots=True)
class DeviceTrack:
    """One GPU: this window's readings, the last window's, and the newest sample."""

    newest: DeviceSample | None = None
    util: Level = field(default_factory=Level)
    memory: Level = field(default_factory=Level)
    levels: dict[str, Level] = field(default_factory=dict)  # of the activity, those that were read
    closed: tuple[Reading, Reading, DeviceActivity | None] | None = None

    def add_activity(self, activity: DeviceActivity, interval_s: float) -> int:
        """Take in what else the device says; returns the number of rejected readings."""
        rejected = 0
        for name, most in _ACTIVITY.items():
            value: Reading = getattr(activity, name)
            if value is not None:
                rejected += not self.levels.setdefault(name, Level()).add(value, interval_s, most)
        return rejected

    def activity(self) -> DeviceActivity | None:
        """Means over the window so far; None when there are none."""
        util = self.util.mean()
        means = {name: level.mean() for name, level in self.levels.items()}
        if util is None and not means:
            return None
        return DeviceActivity(util=None if util is None else min(1.0, util), **means)

    def close(self) -> None:
        self.closed = (self.util.mean(), self.memory.last, self.activity())
        self.util, self.memory, self.levels = Level(), Level(), {}

    def reading(self) -> DeviceSample:
        assert self.newest is not None
        util, memory, activity = self.closed or (self.util.mean(), self.memory.last, self.activity())
        if self.newest.lost:
            util = memory = activity = None
        util = None if util is None else min(1.0, util)
        return replace(self.newest, util=util, memory_bytes=memory, activity=activity)


@dataclass(frozen=True, slots=True)
class Told:
    """What a job's report says of a window: step rate, fraction held back, median and 95th percentile step time."""

    rate: Reading = None
    throttled: Reading = None
    step_p50_s: Reading = None
    step_p95_s: Reading = None


@dataclass(slots=True)
class Progress:
    """How far a job was, by its own report at ``at_s``.

    Attributes:
        at_s: When the report was read.
        steps: Steps so far.
        throttled_s: Seconds throttled so far.
        last_step_s: When the last step ended.
        told_s: The moment up to which the step rate has been told: the end of a step, or of a window without one.
        step_time_s: What a step took when last measured.
        recent: Steps so far and the last step times, by process.
    """

    at_s: float
    steps: int | None
    throttled_s: float | None
    last_step_s: Reading
    told_s: Reading
    step_time_s: Reading = None
    recent: Mapping[int, tuple[int, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, report: JobReport, now: float) -> Progress:
        last_step_s = None if report.last_step_age_s is None else now - report.last_step_age_s
        recent = {each.pid: (each.steps, each.seconds) for each in report.recent}
        return cls(now, report.steps, report.throttled_s, last_step_s, last_step_s, recent=recent)

    def since(self, last: Progress) -> Told:
        """What happened since an earlier report."""
        throttled = _growth(last.throttled_s, self.throttled_s)
        fraction = None if throttled is None else min(1.0, throttled / (self.at_s - last.at_s))
        seconds = sorted(self._step_times_since(last))
        return Told(self.rate_since(last), fraction, _quantile(seconds, 0.50), _quantile(seconds, 0.95))

    def _step_times_since(self, last: Progress) -> list[float]:
        """How long the steps took that ended since then, as far as is known."""
        found: list[float] = []
        for pid, (steps, seconds) in self.recent.items():
            new = steps - last.recent.get(pid, (0, ()))[0]
            if new > 0:
                found += seconds[-new:]
        return found

    def rate_since(self, last: Progress) -> Reading:
        """Steps per second, from the end of a step to the end of a step: so a second with two steps is exact too."""
        steps = _growth(last.steps, self.steps)
        if steps is None:
            return None
        self.step_time_s = last.step_time_s
        if last.steps == 0:
            return None  # the first steps began at an unknown moment
        if self.last_step_s is None or last.told_s is None:
            return steps / (self.at_s - last.at_s)
        if steps == 0:
            self.told_s = last.told_s
            return self._rate_without_step(self.last_step_s)
        took_s = self.last_step_s - last.told_s
        if took_s <= 0:
            return None
        self.step_time_s = took_s / steps
        return 1.0 / self.step_time_s

    def _rate_without_step(self, last_step_s: float) -> Reading:
        """0 when a step is overdue; None while one may be under way."""
        if self.step_time_s is None or self.at_s - last_step_s < STALLED_STEPS * self.step_time_s:
            return None
        self.told_s = self.at_s  # the pause has been told and must not slow the next steps as well
        return 0.0


def _growth(before: float | None, after: float | None) -> float | None:
    """How much a counter has grown; None when it is not known, or fell because it began anew."""
    if before is None or after is None or after < before:
        return None
    return after - before


def _quantile(ordered: list[float], level: float) -> Reading:
    """The quantile of values in order, linear between them; None when there are none."""
    if not ordered:
        return None
    place = level * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
