"""What the shipped core gets to see of a simulated cluster: the measurements its host agents and the PRM would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.forecasting.interference.observations import MOST_THROUGHPUT, Observation
from cotenant.forecasting.types import DemandProfile, Forecast, JobMeasurement, Quantiles, Signature
from cotenant.scheduler.simulation.workload import TraceJob
from cotenant.scheduler.simulation.world import Run, World

_P95 = 1.05  # of the mean utilisation
_LEAST = 0.01
_EARLIER_S = 3600.0  # how long an earlier run of a program was measured


@dataclass(frozen=True, slots=True)
class Sensing:
    """How well and how late the cluster is measured.

    Attributes:
        noise: Relative standard deviation of a measured utilisation or throughput.
        delay_s: From a measurement to its arrival at the core.
        looks_s: When a GPU is measured after every change of its jobs: twice, since the core believes that a demand has
            fallen only once it has lasted.
        again_s: Time between further measurements; None = no more.
        evidence_s: How long a set runs together before its throughputs are told as evidence; None = never.
        seed: Of the noise.
    """

    noise: float = 0.03
    delay_s: float = 1.0
    looks_s: tuple[float, ...] = (6.0, 12.0)
    again_s: float | None = None
    evidence_s: float | None = 60.0
    seed: int = 0


class Sensor:
    """Makes measurements of a world."""

    def __init__(self, world: World, sensing: Sensing, gpu_ids: Sequence[str]) -> None:
        self._world, self.sensing, self._gpu_ids = world, sensing, gpu_ids
        self._rng = np.random.default_rng((sensing.seed, 3))

    def profile(self, run: Run) -> DemandProfile:
        """Return what it would be found to do alone on such GPUs; a utilisation the trace does not say counts as 1."""
        shared = all(len(self._world.residents[gpu]) > 1 for gpu in run.gpus)
        return replace(
            _alone(run.job, self._noisy(_util(run.job))),
            solo_step_rate=self._speed_alone(run),  # from so many windows that noise does not count
            observed_s=run.run_s + self._world.now - run.updated,
            from_shared=shared and run.starts == 1 and run.run_s == 0.0,
        )

    def earlier_runs(self, run: Run) -> list[tuple[str, DemandProfile]]:
        """Return what earlier runs of the job's program, alone, would have shown, by GPU type it runs on."""
        job, truth = run.job, self._world.truth
        known = replace(_alone(job, _util(job)), observed_s=_EARLIER_S)
        speeds = {kind: truth.alone(job.workload, kind, job.gpus) for kind in dict.fromkeys(self._world.gpu_type)}
        return [(kind, replace(known, solo_step_rate=speed)) for kind, speed in speeds.items() if speed > 0.0]

    def measure(self, run: Run, gpu: int) -> JobMeasurement:
        """Return one window of the job on one of its GPUs."""
        job, profile = run.job, self.profile(run)
        busy = min(1.0, profile.util_mean * run.speed)
        signature = Signature(
            job_id=job.job_id,
            gpu_id=self._gpu_ids[gpu],
            start_s=self._world.now - 1.0,
            window_s=1.0,
            samples=10,
            util_mean=busy,
            util_peak=busy,
            memory_bytes=float(job.memory_bytes),
            memory_peak_bytes=float(job.memory_bytes),
            step_rate=self._noisy(run.speed),
            throttled_fraction=0.0,
            host_cores=None,
            neighbours=len(self._world.residents[gpu]) - 1,
            compute_share=None,
        )
        util = Quantiles(profile.util_mean, profile.util_mean, profile.util_p95, profile.util_p95, profile.util_p95)
        memory = Quantiles(*[float(job.memory_bytes)] * 5)
        forecast = Forecast(job.job_id, {1: util, 5: util}, {1: memory, 60: memory}, float(job.memory_bytes), 60)
        return JobMeasurement(job.job_id, fingerprint_of(run), signature, forecast, profile)

    def evidence(self, gpu: int, seconds: float) -> list[Observation]:
        """Return the measured throughput of everybody on the GPU beside the others, where one GPU tells it.

        The speed of a job on several GPUs is that of its slowest: it says nothing about this one.
        """
        present = self._world.residents[gpu]
        if len(present) < 2:
            return []
        profiles = [self.profile(run) for run in present]
        found: list[Observation] = []
        for place, run in enumerate(present):
            if run.job.gpus > 1:
                continue
            n = min(MOST_THROUGHPUT, max(_LEAST, self._noisy(run.speed / self._speed_alone(run))))
            others = tuple(profile for other, profile in enumerate(profiles) if other != place)
            low, high = max(_LEAST / 2, n * (1.0 - self.sensing.noise)), n * (1.0 + self.sensing.noise)
            kind = self._world.gpu_type[gpu]
            found.append(
                Observation(kind, profiles[place], others, n, min(n, low), min(MOST_THROUGHPUT, high), seconds)
            )
        return found

    def _speed_alone(self, run: Run) -> float:
        truth, kinds = self._world.truth, self._world.gpu_type
        return min(truth.alone(run.job.workload, kinds[gpu], run.job.gpus) for gpu in run.gpus)

    def _noisy(self, value: float) -> float:
        return max(_LEAST, value * (1.0 + self.sensing.noise * float(self._rng.standard_normal())))


def fingerprint_of(run: Run) -> str:
    """Return the key of the job's class of runs: its workload, or the job itself where the trace does not say."""
    return _program(run.job)


def _program(job: TraceJob) -> str:
    return job.workload or job.job_id


def _util(job: TraceJob) -> float:
    return 1.0 if job.util is None else job.util


def _alone(job: TraceJob, util: float) -> DemandProfile:
    """What is found of a job alone, where its utilisation is measured so."""
    util = min(1.0, util)
    return DemandProfile(
        util_mean=util,
        util_p95=min(1.0, util * _P95),
        memory_bytes=job.memory_bytes,
        source="history",
        membw_util=job.membw_util,
        fingerprint=_program(job),
        family=job.workload.partition("/")[0],
    )
