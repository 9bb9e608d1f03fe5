"""The ``replay`` backend: plays a recording, with scripted faults. For tests, and for hosts by the thousand.

Nothing is measured and no process is looked at. Time comes from an injected clock, so the same calls at the same
times give the same readings. A device's readings and the faults run from the making of the backend, a job's from the
moment it is watched.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cotenant.actors.devices.base import SILENT_LOST_S, Contexts, DeviceSample, GpuInfo, JobSample, Sample
from cotenant.actors.devices.recording import Fault, FaultKind, Levels, RecordedSample, Recording
from cotenant.forecasting.types import Reading

ABSURD_MEMORY_BYTES = 18446744073707737660.0  # what a driver says that subtracts past zero in 64 bits
ABSURD_UTIL = 2.5
_SILENT = Levels()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A job being played since ``since_s`` on the backend's clock."""

    track: _Track
    since_s: float
    gpu_ids: list[str]


class _Track:
    """What a recording says about one job, added up so that a counter at any time is one look-up."""

    def __init__(self, recording: Recording, job_id: str) -> None:
        self._times = [sample.at_s for sample in recording.samples]
        self._levels = [_levels_of(sample, job_id) for sample in recording.samples]
        self._period_s = recording.period_s
        ends = [*self._times[1:], recording.period_s or self._times[-1]]
        lengths = [end - begin for begin, end in zip(self._times, ends, strict=True)]
        self._busy = _sums([level.util for level in self._levels], lengths)
        self._host = _sums([level.host_cores for level in self._levels], lengths)

    def at(self, age_s: float) -> tuple[Levels, float, float]:
        """Return the levels at an age, and the device and host seconds used until then."""
        rounds, into_s = divmod(age_s, self._period_s) if self._period_s else (0.0, age_s)
        index = bisect.bisect_right(self._times, into_s) - 1
        level, partly_s = self._levels[index], into_s - self._times[index]
        busy_s = rounds * self._busy[-1] + self._busy[index] + (level.util or 0.0) * partly_s
        host_s = rounds * self._host[-1] + self._host[index] + (level.host_cores or 0.0) * partly_s
        return level, busy_s, host_s


def _levels_of(sample: RecordedSample, job_id: str) -> Levels:
    return next((levels for pattern, levels in sample.jobs.items() if fnmatchcase(job_id, pattern)), _SILENT)


def _sums(rates: Sequence[Reading], lengths_s: Sequence[float]) -> list[float]:
    parts = ((rate or 0.0) * length_s for rate, length_s in zip(rates, lengths_s, strict=True))
    return list(itertools.accumulate(parts, initial=0.0))


class ReplayBackend:
    """Devices played from a recording. See ``DeviceBackend``."""

    name = "replay"
    notes: Sequence[str] = ()

    def __init__(
        self,
        recording: Recording,
        host_name: str,
        count: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Play a recording.

        Args:
            recording: What to play.
            host_name: Unique per Ray node; part of the GPU ids.
            count: Number of GPUs to offer; None = all of the recording's.
            clock: Monotonic seconds.

        Raises:
            ValueError: More GPUs are asked for than the recording has.
        """
        known = len(recording.gpus)
        if count is not None and not 1 <= count <= known:
            raise ValueError(f"device.count: {count} is not accepted; give 1 to {known}, the GPUs of the recording")
        host = re.sub(r"[^A-Za-z0-9-]+", "-", host_name).strip("-")
        self._recording = recording
        self._gpus = tuple(
            GpuInfo(f"replay-{host}-{index}", gpu.gpu_type, index, gpu.memory_bytes, visible_env={})
            for index, gpu in enumerate(recording.gpus[:count])
        )
        self._index = {gpu.gpu_id: gpu.index for gpu in self._gpus}
        self._clock = clock
        self._start_s = clock()
        self._jobs: dict[str, _Watched] = {}

    def discover(self) -> Sequence[GpuInfo]:
        """See ``DeviceBackend.discover``."""
        return self._gpus

    def watch(self, job_id: str, gpu_ids: Sequence[str], root_pid: int) -> None:
        """See ``DeviceBackend.watch``. The process is not looked at."""
        for gpu_id in gpu_ids:
            if gpu_id not in self._index:
                raise KeyError(gpu_id)
        now_s = self._clock() - self._start_s
        job = self._jobs.setdefault(job_id, _Watched(_Track(self._recording, job_id), now_s, []))
        job.gpu_ids.extend(gpu_id for gpu_id in gpu_ids if gpu_id not in job.gpu_ids)

    def unwatch(self, job_id: str) -> None:
        """See ``DeviceBackend.unwatch``."""
        self._jobs.pop(job_id, None)

    def sample(self) -> Sample:
        """See ``DeviceBackend.sample``."""
        now = self._clock()
        now_s = now - self._start_s
        jobs = tuple(
            self._job_sample(job_id, job, gpu_id, now_s) for job_id, job in self._jobs.items() for gpu_id in job.gpu_ids
        )
        return Sample(now, tuple(self._device_sample(gpu.gpu_id, now_s) for gpu in self._gpus), jobs)

    def contexts(self, gpu_ids: Sequence[str], pids: Collection[int]) -> Contexts | None:
        """See ``DeviceBackend.contexts``: such a device has no memory of its own."""
        del gpu_ids, pids
        return None

    def close(self) -> None:
        """See ``DeviceBackend.close``."""
        self._jobs.clear()

    def _job_sample(self, job_id: str, job: _Watched, gpu_id: str, now_s: float) -> JobSample:
        faults = self._faults(gpu_id, now_s, job_id)
        if faults.keys() & {"lost", "hang", "missing"}:
            return JobSample(job_id, gpu_id, busy_s=None, util=None, memory_bytes=None, host_busy_s=None)
        level, busy_s, host_s = job.track.at(now_s - job.since_s)
        begin_s = self._counting_since(job_id, job, now_s)
        _, busy_before_s, host_before_s = job.track.at(begin_s - job.since_s)
        busy_s += self._absurd_s(job_id, gpu_id, begin_s, now_s) * ABSURD_UTIL
        return JobSample(
            job_id=job_id,
            gpu_id=gpu_id,
            busy_s=None if level.util is None else busy_s - busy_before_s,
            util=None,
            memory_bytes=ABSURD_MEMORY_BYTES if "absurd" in faults else level.memory_bytes,
            host_busy_s=None if level.host_cores is None else (host_s - host_before_s) / len(job.gpu_ids),
        )

    def _device_sample(self, gpu_id: str, now_s: float) -> DeviceSample:
        faults = self._faults(gpu_id, now_s, None)
        if "lost" in faults:
            return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=True, note="the GPU is lost")
        if "hang" in faults:
            silent_s = now_s - faults["hang"].at_s
            note = f"the driver has not answered for {silent_s:.1f} s"
            return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=silent_s > SILENT_LOST_S, note=note)
        if "absurd" in faults:
            return DeviceSample(gpu_id, ABSURD_UTIL, ABSURD_MEMORY_BYTES)
        levels = self._device_levels(gpu_id, now_s)
        return DeviceSample(gpu_id, levels.util, levels.memory_bytes, activity=levels.activity)

    def _device_levels(self, gpu_id: str, now_s: float) -> Levels:
        """What the recording says of the device, else what its jobs add up to (unknown when one of them is)."""
        samples = self._recording.samples
        into_s = now_s % self._recording.period_s if self._recording.period_s else now_s
        sample = samples[bisect.bisect_right(samples, into_s, key=lambda sample: sample.at_s) - 1]
        if sample.devices:
            return sample.devices[self._index[gpu_id]] or _SILENT
        on_it = [job.track.at(now_s - job.since_s)[0] for job in self._jobs.values() if gpu_id in job.gpu_ids]
        return Levels(_total([level.util for level in on_it]), _total([level.memory_bytes for level in on_it]))

    def _faults(self, gpu_id: str, now_s: float, job_id: str | None) -> dict[FaultKind, Fault]:
        """The faults that are on now for a job on a GPU, or (job None) for the GPU."""
        return {
            fault.kind: fault
            for fault in self._recording.faults
            if fault.holds(now_s) and self._hits(fault, gpu_id, job_id)
        }

    def _hits(self, fault: Fault, gpu_id: str, job_id: str | None) -> bool:
        hits_job = fault.job == "*" if job_id is None else fnmatchcase(job_id, fault.job)
        return hits_job and fault.gpu in (None, self._index[gpu_id])

    def _counting_since(self, job_id: str, job: _Watched, now_s: float) -> float:
        """When the job's counters last began at 0."""
        reused = [
            fault.at_s
            for fault in self._recording.faults
            if fault.kind == "pid_reuse" and job.since_s < fault.at_s <= now_s and fnmatchcase(job_id, fault.job)
        ]
        return max(reused, default=job.since_s)

    def _absurd_s(self, job_id: str, gpu_id: str, begin_s: float, now_s: float) -> float:
        """Seconds of the interval during which the job's counter ran absurdly fast."""
        spans = (
            min(now_s, fault.at_s + (math.inf if fault.for_s is None else fault.for_s)) - max(begin_s, fault.at_s)
            for fault in self._recording.faults
            if fault.kind == "absurd" and self._hits(fault, gpu_id, job_id)
        )
        return sum(max(0.0, span) for span in spans)


def _total(readings: Sequence[Reading]) -> Reading:
    known = [reading for reading in readings if reading is not None]
    return sum(known) if len(known) == len(readings) else None
