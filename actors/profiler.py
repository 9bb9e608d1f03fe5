"""GBP, the GPU behavioral profiler: from samples of devices and jobs to one signature per job, GPU and window.

Not a thread: the host agent's device loop calls ``tick`` at the sampling rate and ``collect`` once per window. What
cannot be believed is dropped and counted, and a window without anything to go by says None, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cotenant.actors.devices.base import DeviceBackend, DeviceSample, JobSample, Sample
from cotenant.actors.likeness import Likeness
from cotenant.actors.reports import NO_HINTS, Descriptors, JobReport
from cotenant.actors.tracks import DeviceTrack, Progress, Told, Track
from cotenant.configs.settings import ProfilerSettings
from cotenant.forecasting.types import Signature
from cotenant.placement.types import Share

ABSURD_UTIL = 1.5  # of the device
ABSURD_MEMORY = 2.0  # times what the hardware has
LEAST_SAMPLES = 4  # in a window; with fewer they show no more than the windows do
_SILENT = JobReport(None, None, None, controls="", processes=0)


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
        self._memory_limit: dict[str, float] = {}
        per_window = round(settings.window_s * settings.sample_hz)
        self._likeness = Likeness(self._period_s, per_window) if per_window >= LEAST_SAMPLES else None
        self._window_began_s = monotonic()
        self._sampled_s: float | None = None
        self._tracks: dict[tuple[str, str], Track] = {}
        self.newest: Sample | None = None
        self._present: frozenset[tuple[str, str]] = frozenset()  # in the last sample
        self._progress: dict[str, Progress] = {}
        self._devices: dict[str, DeviceTrack] = {}
        self._know_gpus()

    def _know_gpus(self) -> None:
        """Keep track of all GPUs, those too that have come later."""
        for gpu in (gpu for gpu in self._backend.discover() if gpu.gpu_id not in self._devices):
            self._memory_limit[gpu.gpu_id] = ABSURD_MEMORY * (gpu.physical_memory_bytes or gpu.memory_bytes)
            self._devices[gpu.gpu_id] = DeviceTrack()

    def tick(self) -> None:
        """Take one sample."""
        self.newest = sample = self._backend.sample()
        if len(sample.devices) > len(self._devices):
            self._know_gpus()
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
        if self._likeness is not None:
            self._likeness.take(sample.monotonic_s, {key: self._tracks[key].newest() for key in self._present})

    def collect(
        self,
        reports: Mapping[str, JobReport],
        shares: Mapping[str, Sequence[Share]],
        hints: Mapping[str, Descriptors] | None = None,
    ) -> list[Signature]:
        """End the window.

        Args:
            reports: What the jobs' shims say now, by job id; a job that says nothing is absent.
            shares: The shares of every job of this host now, by job id.
            hints: What the jobs' hints say of them, by job id.

        Returns:
            One signature per job and GPU: for every job that was sampled in the window, and for every job that was
            sampled earlier and still has its share. In order of job and GPU.
        """
        now = self._monotonic()
        window_s, self._window_began_s = now - self._window_began_s, now
        start_s = self._clock() - window_s
        granted = {(job_id, share.gpu_id): share for job_id, held in shares.items() for share in held}
        progress = {job_id: self._advance(job_id, report, now) for job_id, report in reports.items()}
        activities = {gpu_id: track.activity() for gpu_id, track in self._devices.items()}
        signatures = []
        for key, track in sorted(self._tracks.items()):
            if track.samples == 0 and key not in granted:
                continue
            job_id, gpu_id = key
            told, report = progress.get(job_id, Told()), reports.get(job_id, _SILENT)
            hint = NO_HINTS if hints is None else hints.get(job_id, NO_HINTS)
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
                    step_rate=told.rate,
                    throttled_fraction=told.throttled,
                    host_cores=track.host.mean(),
                    neighbours=sum(other[1] == gpu_id and other[0] != job_id for other in granted),
                    compute_share=None if share is None else share.compute,
                    memory_growth_bytes_s=track.memory_growth(),
                    step_time_p50_s=told.step_p50_s,
                    step_time_p95_s=told.step_p95_s,
                    read_bytes_s=track.read.mean(),
                    write_bytes_s=track.written.mean(),
                    batch_size=hint.batch_size or report.batch_size,
                    framework=hint.framework or report.framework,
                    device=activities[gpu_id],
                    mix=report.mix,
                    util_age_s=track.age.mean(),
                    util_source=track.util_source(),
                    memory_source=track.memory_source(),
                )
            )
        self._begin_window(granted.keys() | self._present, shares.keys() | reports.keys())
        return signatures

    def foreseen(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Return what the samples let foresee, by job and GPU (see ``Likeness``); to be asked right after ``collect``.

        A job of which too little is known is not there.
        """
        if self._likeness is None or self._sampled_s is None:
            return {}
        return self._likeness.foreseen(self._sampled_s)

    def device_readings(self) -> tuple[DeviceSample, ...]:
        """Return every GPU's last full window (mean utilisation, last memory), with its newest state and note."""
        return tuple(track.reading() for track in self._devices.values() if track.newest is not None)

    def _take_device(self, device: DeviceSample, interval_s: float) -> None:
        track = self._devices[device.gpu_id]
        track.newest = device
        self._reject_unless(track.util.add(device.util, interval_s, ABSURD_UTIL))
        self._reject_unless(track.memory.add(device.memory_bytes, interval_s, self._memory_limit[device.gpu_id]))
        if device.activity is not None:
            self.rejected += track.add_activity(device.activity, interval_s)

    def _take_job(self, job: JobSample, at_s: float, interval_s: float) -> None:
        track = self._tracks.setdefault((job.job_id, job.gpu_id), Track())
        track.samples += 1
        self._reject_unless(track.busy.add(job.busy_s, at_s, ABSURD_UTIL))
        if self._reject_unless(track.util.add(job.util, interval_s, ABSURD_UTIL)) and job.util is not None:
            track.note_source(job.util_source, job.util_age_s, interval_s)
        most = self._memory_limit[job.gpu_id]
        self._reject_unless(track.add_memory(job.memory_bytes, job.memory_source, at_s, interval_s, most))
        # Read now and then only: a sample without them is no gap, unless nothing is known of the job.
        if job.host_busy_s is not None or (job.busy_s, job.util, job.memory_bytes) == (None, None, None):
            self._reject_unless(track.host.add(job.host_busy_s, at_s, None))
        if job.read_bytes is not None:
            self._reject_unless(track.read.add(job.read_bytes, at_s, None))
        if job.write_bytes is not None:
            self._reject_unless(track.written.add(job.write_bytes, at_s, None))

    def _reject_unless(self, believable: bool) -> bool:
        if not believable:
            self.rejected += 1
        return believable

    def _forget_counters(self) -> None:
        for track in self._tracks.values():
            track.forget_counters()

    def _begin_window(self, keep: set[tuple[str, str]], jobs: set[str]) -> None:
        self._tracks = {key: track.next() for key, track in self._tracks.items() if key in keep}
        if self._likeness is not None:
            self._likeness.keep(self._tracks.keys())
        self._progress = {job_id: last for job_id, last in self._progress.items() if job_id in jobs}
        for device in self._devices.values():
            device.close()

    def _advance(self, job_id: str, report: JobReport, now: float) -> Told:
        """Take in a job's report; returns what it says of the window."""
        last = self._progress.get(job_id)
        self._progress[job_id] = new = Progress.of(report, now)
        return Told() if last is None or now <= last.at_s else new.since(last)
