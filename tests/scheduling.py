"""Short ways to make the records the scheduling core works on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cotenant.configs.settings import LeaseSettings, PlacementSettings, Settings
from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile, Forecast, JobMeasurement, Quantiles, Signature
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted, MeasurementsReported
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.model import Gpu, Hints, Host, Job, JobSpec

GIB = 1 << 30


def settings(**placement: Any) -> Settings:
    """Settings with short time-outs; keywords change the placement section."""
    lease = LeaseSettings(start_timeout_s=30.0, stop_grace_s=2.0, max_restarts=2)
    return Settings(placement=PlacementSettings(**placement), lease=lease)


def spec(job_id: str, **hints: Any) -> JobSpec:
    """A command job; keywords are hints."""
    return JobSpec(
        job_id=job_id,
        name=job_id,
        kind="command",
        command=("python", "train.py"),
        cwd="/home/somebody",
        env={"A": "1"},
        hints=Hints(**hints),
        fingerprint=f"fp-{job_id}",
        submitted_at=0.0,
    )


def half(job_id: str, **hints: Any) -> JobSpec:
    """A job that asks for two fifths of a GPU of ``host`` and may share it."""
    return spec(job_id, **({"gpu_memory": 3 * GIB, "compute": 0.4} | hints))


def host(
    host_id: str = "h1", gpus: int = 1, memory: int = 8 * GIB, cpus: float | None = None, *, checkpoints: bool = False
) -> Host:
    """A host with GPUs ``<host>-0``, ``<host>-1``, …"""
    found = tuple(
        Gpu(f"{host_id}-{index}", host_id, "cpu-1", index, memory, checkpoints=checkpoints) for index in range(gpus)
    )
    return Host(host_id, f"{host_id}.example", found, joined_at=0.0, cpus=cpus)


def profile(util: float = 0.4, memory: int = 2 * GIB, seconds: float = 60.0, rate: float = 10.0) -> DemandProfile:
    """What a job would do alone, as learnt from measurements."""
    return DemandProfile(util, min(1.0, util * 1.1), memory, rate, seconds, "history")


def measurement(job_id: str, gpu_id: str, known: DemandProfile | None = None, **window: Any) -> JobMeasurement:
    """One second of a job; keywords change the signature."""
    known = known or profile()
    signature = Signature(
        job_id=job_id,
        gpu_id=gpu_id,
        start_s=0.0,
        window_s=1.0,
        samples=10,
        util_mean=known.util_mean,
        util_peak=known.util_p95,
        memory_bytes=float(known.memory_bytes or 0),
        memory_peak_bytes=float(known.memory_bytes or 0),
        step_rate=8.0,
        throttled_fraction=0.0,
        host_cores=0.1,
        neighbours=0,
        compute_share=1.0,
    )
    util = Quantiles(0.0, known.util_mean, known.util_p95, known.util_p95, known.util_p95)
    memory = Quantiles(*[float(known.memory_bytes or 0)] * 5)
    forecast = Forecast(job_id, {1: util, 5: util}, {1: memory, 60: memory}, float(known.memory_bytes or 0), 60)
    return JobMeasurement(job_id, f"fp-{job_id}", replace(signature, **window), forecast, known)


def without(seen: JobMeasurement, missing: str) -> JobMeasurement:
    """The measurement on a device that never told "util", "memory" or both: None of it is known, nothing forecast."""
    signature, forecast, known = seen.signature, seen.forecast, seen.profile
    if "util" in missing:
        signature = replace(signature, util_mean=None, util_peak=None, util_source=None)
        forecast = replace(forecast, util={})
        known = replace(UNKNOWN_PROFILE, memory_bytes=known.memory_bytes, solo_step_rate=known.solo_step_rate)
    if "memory" in missing:
        signature = replace(signature, memory_bytes=None, memory_peak_bytes=None, memory_source=None)
        forecast = replace(forecast, memory={}, peak_memory_bytes=0.0)
        known = replace(known, memory_bytes=None)
    return replace(seen, signature=signature, forecast=forecast, profile=known)


def report(host_id: str, *measurements: JobMeasurement) -> MeasurementsReported:
    """A host's report of these measurements."""
    return MeasurementsReported(host_id, measurements)


class Driver:
    """A core with a clock, checked after every step."""

    def __init__(self, *hosts: Host, configured: Settings | None = None) -> None:
        self.core = Core(configured or settings())
        self.now = 1000.0
        self.commands: list[Command] = []
        if hosts:
            self.do(*(HostJoined(one) for one in hosts))

    def do(self, *events: Event, after_s: float = 1.0) -> list[Command]:
        """Let time pass, hand over the events, check all invariants; returns the commands."""
        self.now += after_s
        self.commands = self.core.handle(events, self.now)
        check(self.core.state)
        return self.commands

    def submit(self, *specs: JobSpec) -> list[Command]:
        """Submit the jobs in one batch."""
        return self.do(*(JobSubmitted(one) for one in specs))

    def run(self, *specs: JobSpec) -> None:
        """Submit the jobs and let the agents start those that were placed."""
        self.start_all(self.submit(*specs))

    def start_all(self, commands: list[Command]) -> None:
        """Answer every start command as an agent would."""
        started = [JobStarted(c.job_id, c.epoch, c.host_id) for c in commands if isinstance(c, StartJob)]
        if started:
            self.do(*started)

    def job(self, job_id: str) -> Job:
        """The job now."""
        return self.core.state.jobs[job_id]

    def state(self, job_id: str) -> str:
        """The job's state now."""
        return str(self.job(job_id).state)

    def kinds(self) -> list[tuple[str, str]]:
        """(kind, job id) of the last commands, in order."""
        return [(command.kind, command.job_id) for command in self.commands]

    def resizes(self) -> list[ResizeShares]:
        """The resize commands among the last commands."""
        return [command for command in self.commands if isinstance(command, ResizeShares)]

    def stops(self) -> list[StopJob]:
        """The stop commands among the last commands."""
        return [command for command in self.commands if isinstance(command, StopJob)]


def saver(job_id: str, **hints: Any) -> JobSpec:
    """A job that fills a GPU of ``host`` and continues from its checkpoint."""
    return spec(job_id, **({"gpu_memory": 8 * GIB, "compute": 1.0, "checkpoint": "own"} | hints))


def sharer(job_id: str, **hints: Any) -> JobSpec:
    """A saver that shares: two of them on a GPU run at 0.6 or so each."""
    return saver(job_id, **({"gpu_memory": 3 * GIB, "compute": 0.5, "max_slowdown": 4.0} | hints))


def gone(driver: Driver, job_id: str, code: int = -15, *, stopped: bool = True) -> Event:
    """All processes of the job are gone."""
    job = driver.job(job_id)
    return JobExited(job_id, job.epoch, job.hosts[0], code, stopped=stopped)


def on(driver: Driver, job_id: str) -> list[str]:
    """The GPUs of a job."""
    lease = driver.job(job_id).lease
    return [share.gpu_id for share in lease.shares] if lease else []
