"""What is measured, and what is predicted from it.

A missing reading is ``None`` everywhere (the field's NA): it is never replaced by 0, and arithmetic on it raises, so
a device that does not say cannot be mistaken for an idle one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reading = float | None

SIGNATURE_VERSION = 0
HORIZONS_S: tuple[int, ...] = (1, 2, 5, 60, 300, 900)
LEVELS: tuple[float, ...] = (0.10, 0.50, 0.90, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Signature:
    """The behaviour of one job on one GPU over one window.

    Attributes:
        job_id: The job.
        gpu_id: The GPU the window was measured on.
        start_s: Start of the window, Unix seconds.
        window_s: Length of the window in seconds.
        samples: Number of device samples inside it.
        util_mean: Mean GPU utilisation, fraction of the device in [0, 1].
        util_peak: Largest sample of the utilisation in the window, in [0, 1].
        memory_bytes: Device memory at the end of the window.
        memory_peak_bytes: Largest device memory in the window.
        step_rate: Optimizer steps per second.
        throttled_fraction: Fraction of the window the job was held back by its own share, in [0, 1].
        host_cores: CPU cores used by the job's helper processes outside the device.
        neighbours: Number of other jobs that were on the same GPU.
        compute_share: The compute share in force at the end of the window, in (0, 1].
    """

    job_id: str
    gpu_id: str
    start_s: float
    window_s: float
    samples: int
    util_mean: Reading
    util_peak: Reading
    memory_bytes: Reading
    memory_peak_bytes: Reading
    step_rate: Reading
    throttled_fraction: Reading
    host_cores: Reading
    neighbours: int
    compute_share: Reading
    schema_version: int = SIGNATURE_VERSION


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Predicted quantiles of one quantity, non-decreasing from p10 to p99."""

    p10: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one job is expected to demand.

    Attributes:
        job_id: The job.
        util: Quantiles of GPU utilisation in [0, 1], by horizon in seconds (keys: ``HORIZONS_S``).
        memory: Quantiles of device memory in bytes, by horizon in seconds.
        peak_memory_bytes: Expected largest memory until the job ends.
        windows: Number of windows the forecast rests on.
    """

    job_id: str
    util: Mapping[int, Quantiles]
    memory: Mapping[int, Quantiles]
    peak_memory_bytes: float
    windows: int


ProfileSource = Literal["history", "hints", "unknown"]


@dataclass(frozen=True, slots=True)
class DemandProfile:
    """The few numbers placement needs of one job, whatever they come from.

    Attributes:
        util_mean: Utilisation the job would have alone on the GPU, fraction in [0, 1].
        util_p95: Its 95th percentile.
        memory_bytes: Memory to reserve (forecast peak or hint); None when nothing is known.
        solo_step_rate: Steps per second alone on a GPU; None when never measured.
        observed_s: Seconds of measurement behind it (0 for hints and unknown).
        source: Where the numbers come from. "unknown" means: nothing known, assume the worst.
        from_shared: The utilisation was only ever measured beside other jobs or while held back: less certain.
        membw_util: Share of the time the device's memory was read or written, fraction in [0, 1]; None when the device
            does not say.
        fingerprint: Key of the job's class of runs, by which measured pairs are found again; "" when not known.
        family: The model family ("resnet", "bert"); "" when not known.
    """

    util_mean: float
    util_p95: float
    memory_bytes: int | None
    solo_step_rate: float | None = None
    observed_s: float = 0.0
    source: ProfileSource = "unknown"
    from_shared: bool = False
    membw_util: Reading = None
    fingerprint: str = ""
    family: str = ""


UNKNOWN_PROFILE = DemandProfile(util_mean=1.0, util_p95=1.0, memory_bytes=None)


@dataclass(frozen=True, slots=True)
class ThroughputPrediction:
    """Predicted normalised throughput n of one member of a set of jobs sharing a GPU, 0 < low <= mid <= high <= 1.

    Individual slowdown is ``s = 1 / n``.
    """

    low: float
    mid: float
    high: float
    reason: str = ""

    @property
    def slowdown(self) -> float:
        """Predicted individual slowdown, 1 / mid (1.0 = as fast as alone)."""
        return 1.0 / self.mid


@dataclass(frozen=True, slots=True)
class JobMeasurement:
    """What the profiler and the manager say about one running job, once a second.

    Attributes:
        job_id: The job.
        fingerprint: Key of the job's class of runs (same program, same arguments).
        signature: The last window.
        forecast: The demand forecast made from all windows so far.
        profile: What the job (or its fingerprint) would do alone.
    """

    job_id: str
    fingerprint: str
    signature: Signature
    forecast: Forecast
    profile: DemandProfile


class InterferencePredictor(Protocol):
    """Predicts how the members of a candidate set slow each other down."""

    name: str

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """Return one prediction per member, in order. Pure: same input, same output."""
        ...


class DemandForecaster(Protocol):
    """Keeps a state per job, stepped once per window, and forecasts from it."""

    name: str

    def observe(self, signature: Signature) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored, never fatal."""
        ...

    def forecast(self, job_id: str) -> Forecast | None:
        """Return the forecast of a job, or None when nothing usable was observed yet."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended."""
        ...


__all__ = [
    "HORIZONS_S",
    "LEVELS",
    "SIGNATURE_VERSION",
    "UNKNOWN_PROFILE",
    "DemandForecaster",
    "DemandProfile",
    "Forecast",
    "InterferencePredictor",
    "JobMeasurement",
    "ProfileSource",
    "Quantiles",
    "Reading",
    "Signature",
    "ThroughputPrediction",
]
