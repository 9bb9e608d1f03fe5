"""GBP, the GPU behavioral profiler: from samples of devices and jobs to one signature per job, GPU and window.

Not a thread: the host agent's device loop calls ``tick`` at the sampling rate and ``collect`` once per window. What
cannot be believed is dropped and counted, and a window without anything to go by says None, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.actors.devices.base import DeviceBackend, DeviceSample, JobSample
from cotenant.actors.reports import JobReport
from cotenant.configs.settings import ProfilerSettings
from cotenant.forecasting.types import Reading, Signature
from cotenant.placement.types import Share

ABSURD_UTIL = 1.5  # of the device
ABSURD_MEMORY = 2.0  # times what the hardware has
STALLED_STEPS = 2.0  # a job without a new step counts as stalled after this many of its own step times


class Profiler:
    """Profiles the jobs of one host. Used by one thread, the one that owns the backend.

    ``rejected`` is the number of readings dropped so far because they cannot be true.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        settings: ProfilerSettings,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Profile with a backend.

        Args:
            backend: Where samples come from.
            settings: The sampling rate: readings closer together than half its period are left out.
            clock: Unix seconds; only says when a window began.
            monotonic: The clock of ``Sample.monotonic_s``; every duration is measured with it.
        """
        self.rejected = 0
        self._backend = backend
        self._period_s = 1.0 / settings.sample_hz
        self._clock = clock
        self._monotonic = monotonic
        self._memory_limit = {
            gpu.gpu_id: ABSURD_MEMORY * (gpu.physical_memory_bytes or gpu.memory_bytes) for gpu in backend.discover()
        }
        self._window_began_s = monotonic()
        self._sampled_s: float | None = None
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._present: frozenset[tuple[str, str]] = frozenset()  # in the last sample
        self._progress: dict[str, _Progress] = {}
        self._devices = {gpu_id: _DeviceTrack() for gpu_id in self._memory_limit}

    def tick(self) -> None:
        """Take one sample."""
        sample = self._backend.sample()
        interval_s = self._period_s if self._sampled_s is None else sample.monotonic_s - self._sampled_s
        if 0 <= interval_s < self._period_s / 2:
            return  # too close to the last one to divide by; counters lose nothing by waiting
        self._sampled_s = sample.monotonic_s
        if interval_s < 0:
            self._forget_counters()  # the clock is another one: nothing before can be compared with anything after
            interval_s = self._period_s
        for device in sample.devices:
            self._take_device(device, interval_s)
        for job in sample.jobs:
            self._take_job(job, sample.monotonic_s, interval_s)
        self._present = frozenset((job.job_id, job.gpu_id) for job in sample.jobs)
        for key in self._tracks.keys() - self._present:
            self._tracks[key].forget_counters()

    def collect(self, reports: Mapping[str, JobReport], shares: Mapping[str, Sequence[Share]]) -> list[Signature]:
        """End the window.

        Args:
            reports: What the jobs' shims say now, by job id; a job that says nothing is absent.
            shares: The shares of every job of this host now, by job id.

        Returns:
            One signature per job and GPU: for every job that was sampled in the window, and for every job that was
            sampled earlier and still has its share. In order of job and GPU.
        """
        now = self._monotonic()
        window_s, self._window_began_s = now - self._window_began_s, now
        start_s = self._clock() - window_s
        granted = {(job_id, share.gpu_id): share for job_id, held in shares.items() for share in held}
        progress = {job_id: self._advance(job_id, report, now) for job_id, report in reports.items()}
        signatures = []
        for key, track in sorted(self._tracks.items()):
            if track.samples == 0 and key not in granted:
                continue
            job_id, gpu_id = key
            step_rate, throttled = progress.get(job_id, (None, None))
            share = granted.get(key)
            util_mean, util_peak = track.utilisation()
            signatures.append(
                Signature(
                    job_id=job_id,
                    gpu_id=gpu_id,
                    start_s=start_s,
                    window_s=window_s,
                    samples=track.samples,
                    util_mean=util_mean,
                    util_peak=util_peak,
                    memory_bytes=track.memory.last,
                    memory_peak_bytes=track.memory.peak,
                    step_rate=step_rate,
                    throttled_fraction=throttled,
                    host_cores=track.host.mean(),
                    neighbours=sum(other[1] == gpu_id and other[0] != job_id for other in granted),
                    compute_share=None if share is None else share.compute,
                )
            )
        self._begin_window(granted.keys() | self._present, shares.keys() | reports.keys())
        return signatures

    def device_readings(self) -> tuple[DeviceSample, ...]:
        """Return every GPU's last full window (mean utilisation, last memory), with its newest state and note."""
        return tuple(track.reading() for track in self._devices.values() if track.newest is not None)

    def _take_device(self, device: DeviceSample, interval_s: float) -> None:
        track = self._devices[device.gpu_id]
        track.newest = device
        self._reject_unless(track.util.add(device.util, interval_s, ABSURD_UTIL))
        self._reject_unless(track.memory.add(device.memory_bytes, interval_s, self._memory_limit[device.gpu_id]))

    def _take_job(self, job: JobSample, at_s: float, interval_s: float) -> None:
        track = self._tracks.setdefault((job.job_id, job.gpu_id), _Track())
        track.samples += 1
        self._reject_unless(track.busy.add(job.busy_s, at_s, ABSURD_UTIL))
        self._reject_unless(track.util.add(job.util, interval_s, ABSURD_UTIL))
        self._reject_unless(track.memory.add(job.memory_bytes, interval_s, self._memory_limit[job.gpu_id]))
        self._reject_unless(track.host.add(job.host_busy_s, at_s, None))

    def _reject_unless(self, believable: bool) -> None:
        if not believable:
            self.rejected += 1

    def _forget_counters(self) -> None:
        for track in self._tracks.values():
            track.forget_counters()

    def _begin_window(self, keep: set[tuple[str, str]], jobs: set[str]) -> None:
        self._tracks = {key: track.next() for key, track in self._tracks.items() if key in keep}
        self._progress = {job_id: last for job_id, last in self._progress.items() if job_id in jobs}
        for device in self._devices.values():
            device.close()

    def _advance(self, job_id: str, report: JobReport, now: float) -> tuple[Reading, Reading]:
        """Take in a job's report; returns its step rate and the fraction of the time it was throttled."""
        last = self._progress.get(job_id)
        new = _Progress.of(report, now)
        self._progress[job_id] = new
        if last is None or now <= last.at_s:
            return None, None
        throttled = _growth(last.throttled_s, new.throttled_s)
        fraction = None if throttled is None else min(1.0, throttled / (now - last.at_s))
        return new.rate_since(last), fraction


@dataclass(slots=True)
class _Counter:
    """The mean rate of a counter over a window: the sum of its believable steps over the sum of their times.

    Inside a window missing readings are bridged, because the counter went on; from one window to the next they are
    not, because the step would belong to both.
    """

    base: tuple[float, float] | None = None  # time and value of the last reading
    grown: float = 0.0
    time_s: float = 0.0
    peak: Reading = None
    missing: bool = True  # the last reading was
    backwards: bool = False

    def add(self, value: Reading, at_s: float, limit: float | None) -> bool:
        """Take in a reading; False when it is rejected. ``limit`` is the largest believable rate."""
        self.missing = value is None
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
        self.peak = rate if self.peak is None else max(self.peak, rate)
        return True

    def known(self) -> bool:
        return self.time_s > 0 and not self.backwards

    def mean(self) -> Reading:
        return self.grown / self.time_s if self.known() else None

    def next(self) -> _Counter:
        return _Counter() if self.missing else _Counter(base=self.base, missing=False)


@dataclass(slots=True)
class _Level:
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
class _Track:
    """One job on one GPU in one window."""

    busy: _Counter = field(default_factory=_Counter)
    host: _Counter = field(default_factory=_Counter)
    util: _Level = field(default_factory=_Level)
    memory: _Level = field(default_factory=_Level)
    samples: int = 0

    def utilisation(self) -> tuple[Reading, Reading]:
        """Mean and peak, from the counter where there is one. A hair above 1 is the clocks' doing and cut off."""
        if self.busy.known():
            mean, peak = self.busy.mean(), self.busy.peak
        elif self.busy.backwards:
            mean = peak = None
        else:
            mean, peak = self.util.mean(), self.util.peak
        return (None if mean is None else min(1.0, mean)), (None if peak is None else min(1.0, peak))

    def forget_counters(self) -> None:
        """Compare nothing that comes with anything that was."""
        self.busy.base = self.host.base = None

    def next(self) -> _Track:
        return _Track(busy=self.busy.next(), host=self.host.next())


@dataclass(slots=True)
class _DeviceTrack:
    """One GPU: this window's readings, the last window's, and the newest sample."""

    newest: DeviceSample | None = None
    util: _Level = field(default_factory=_Level)
    memory: _Level = field(default_factory=_Level)
    closed: tuple[Reading, Reading] | None = None

    def close(self) -> None:
        self.closed = (self.util.mean(), self.memory.last)
        self.util, self.memory = _Level(), _Level()

    def reading(self) -> DeviceSample:
        assert self.newest is not None
        util, memory = (self.util.mean(), self.memory.last) if self.closed is None else self.closed
        if self.newest.lost:
            util = memory = None
        return replace(self.newest, util=None if util is None else min(1.0, util), memory_bytes=memory)


@dataclass(slots=True)
class _Progress:
    """How far a job was, by its own report at ``at_s``.

    Attributes:
        at_s: When the report was read.
        steps: Steps so far.
        throttled_s: Seconds throttled so far.
        last_step_s: When the last step ended.
        told_s: The moment up to which the step rate has been told: the end of a step, or of a window without one.
        step_time_s: What a step took when last measured.
    """

    at_s: float
    steps: int | None
    throttled_s: float | None
    last_step_s: Reading
    told_s: Reading
    step_time_s: Reading = None

    @classmethod
    def of(cls, report: JobReport, now: float) -> _Progress:
        last_step_s = None if report.last_step_age_s is None else now - report.last_step_age_s
        return cls(now, report.steps, report.throttled_s, last_step_s, last_step_s)

    def rate_since(self, last: _Progress) -> Reading:
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
