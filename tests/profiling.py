"""A profiler on clocks and readings that a test sets."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.actors.devices.base import DeviceSample, GpuInfo, JobSample, Sample
from cotenant.actors.profiler import Profiler
from cotenant.actors.reports import JobReport
from cotenant.configs.settings import ProfilerSettings
from cotenant.forecasting.types import Signature
from cotenant.placement.types import Share

GIB = 1 << 30
UNIX_S = 1_700_000_000.0


class ScriptedBackend:
    """A backend that says what a test put into ``jobs`` and ``devices``."""

    name = "scripted"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def discover(self) -> Sequence[GpuInfo]:
        return (GpuInfo("g0", "A", 0, GIB, {}, physical_memory_bytes=16 * GIB), GpuInfo("g1", "A", 1, GIB, {}))

    def sample(self) -> Sample:
        return Sample(self.machine.now, tuple(self.machine.devices), tuple(self.machine.jobs))

    def watch(self, job_id: str, gpu_ids: Sequence[str], root_pid: int) -> None: ...

    def unwatch(self, job_id: str) -> None: ...

    def close(self) -> None: ...


class Machine:
    """A profiler on clocks that the test moves, sampling at 10 Hz."""

    def __init__(self) -> None:
        self.now = 50.0
        self.wall_offset = UNIX_S - 50.0
        self.jobs: list[JobSample] = []
        self.devices: list[DeviceSample] = []
        self.shares: dict[str, list[Share]] = {"job": [Share("g0", GIB, 0.5)]}
        self.profiler = Profiler(
            ScriptedBackend(self),
            ProfilerSettings(),
            clock=lambda: self.now + self.wall_offset,
            monotonic=lambda: self.now,
        )

    def tick(self, *jobs: JobSample, after_s: float = 0.1) -> None:
        self.now += after_s
        self.jobs = list(jobs)
        self.profiler.tick()

    def play(self, *readings: float | None, memory: float | None = 1e9) -> None:
        """One tick per value of the job's busy counter."""
        for busy_s in readings:
            self.tick(job(busy_s, memory))

    def collect(self, report: JobReport | None = None) -> list[Signature]:
        return self.profiler.collect({} if report is None else {"job": report}, self.shares)

    def window(self, *readings: float | None, memory: float | None = 1e9) -> Signature:
        self.play(*readings, memory=memory)
        (signature,) = self.collect()
        return signature


def job(
    busy_s: float | None,
    memory: float | None = 1e9,
    host_s: float | None = None,
    *,
    util: float | None = None,
    name: str = "job",
    gpu: str = "g0",
) -> JobSample:
    return JobSample(name, gpu, busy_s=busy_s, util=util, memory_bytes=memory, host_busy_s=host_s)
