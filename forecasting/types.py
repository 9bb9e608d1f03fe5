"""What is measured, and what is predicted from it.

A missing reading is ``None`` everywhere (the field's NA): it is never replaced by 0, and arithmetic on it raises, so
a device that does not say cannot be mistaken for an idle one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, cast, runtime_checkable

from cotenant.forecasting.versions import check_version, restorable

Reading = float | None
# Where a job's utilisation comes from: a counter of its device time; the driver, by process; or the whole device, of
# which the job was given a part, which is an estimate.
UtilSource = Literal["counter", "process", "device"]
MemorySource = Literal[
    "process", "device"
]  # the same of its memory: its processes', or the whole device's, an estimate

SIGNATURE_VERSION = 3
HORIZONS_S: tuple[int, ...] = (1, 2, 5, 60, 300, 900)
LEVELS: tuple[float, ...] = (0.10, 0.50, 0.90, 0.95, 0.99)


@restorable
@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """What a whole GPU did over one window, all its jobs together. None = the device does not say.

    Attributes:
        util: Mean utilisation, fraction of the device in [0, 1].
        membw_util: Fraction of the time its memory was read or written (of the peak bandwidth where the device counts
            bytes), in [0, 1].
        sm_active: Fraction of the multiprocessors at work, averaged over time, in [0, 1].
        tensor_active: The same for the tensor pipes.
        fp16_active: The same for the FP16 pipes.
        fp32_active: The same for the FP32 pipes.
        fp64_active: The same for the FP64 pipes.
        pcie_rx_bytes_s: Bytes per second over PCIe to the device.
        pcie_tx_bytes_s: Bytes per second over PCIe from the device.
        nvlink_rx_bytes_s: Bytes per second over NVLink to the device.
        nvlink_tx_bytes_s: Bytes per second over NVLink from the device.
        power_w: Mean power in watts.
        sm_clock_mhz: Clock of the multiprocessors in MHz.
        temperature_c: Temperature in °C.
    """

    util: Reading = None
    membw_util: Reading = None
    sm_active: Reading = None
    tensor_active: Reading = None
    fp16_active: Reading = None
    fp32_active: Reading = None
    fp64_active: Reading = None
    pcie_rx_bytes_s: Reading = None
    pcie_tx_bytes_s: Reading = None
    nvlink_rx_bytes_s: Reading = None
    nvlink_tx_bytes_s: Reading = None
    power_w: Reading = None
    sm_clock_mhz: Reading = None
    temperature_c: Reading = None


@restorable
@dataclass(frozen=True, slots=True)
class OperatorMix:
    """Where a job's device time went in a few steps, by class of operator: fractions that add up to 1.

    Attributes:
        gemm: Matrix products.
        conv: Convolutions.
        attention: Attention.
        elementwise: Element by element: activations, arithmetic, optimizers.
        normalisation: Batch, layer and group norms.
        reduce: Sums, means, maxima, softmax, losses, pooling.
        memcpy: Copies, fills, gathers.
        collective: Communication between GPUs.
        other: Everything else.
        launches_per_step: Kernels launched (``cpu`` device: operators executed) per step.
        step: The job's step at which it was measured.
    """

    gemm: float
    conv: float
    attention: float
    elementwise: float
    normalisation: float
    reduce: float
    memcpy: float
    collective: float
    other: float
    launches_per_step: Reading = None
    step: int | None = None


@restorable
@dataclass(frozen=True, slots=True)
class Signature:
    """The behaviour of one job on one GPU over one window. ``signatures.FIELDS`` is its schema.

    New fields go to the end and are None by default, so that older records can be read (``docs/signatures.md``).

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
        schema_version: The version it was written with.
        memory_growth_bytes_s: Growth of the device memory over the window, bytes per second; negative when it shrank.
        step_time_p50_s: Median time of the steps that ended in the window, seconds; time held back included.
        step_time_p95_s: Their 95th percentile.
        read_bytes_s: Bytes per second the job's processes read from files, page cache included.
        write_bytes_s: Bytes per second they wrote to files.
        batch_size: Samples per step: the hint, else what was observed.
        framework: The hint, else what was observed; None when not known.
        device: What the whole GPU did; None when the device says nothing beyond what is above.
        mix: Classes of operators, as last measured; None when never.
        util_age_s: Mean age of the readings behind ``util_mean``, seconds: drivers refresh more slowly than asked.
        util_source: "counter" of device time, the driver by "process", or "device": a part of what the whole device
            did, an estimate.
        memory_source: The job's processes ("process"), or "device": what is in use on the whole device, an estimate.
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
    memory_growth_bytes_s: Reading = None
    step_time_p50_s: Reading = None
    step_time_p95_s: Reading = None
    read_bytes_s: Reading = None
    write_bytes_s: Reading = None
    batch_size: int | None = None
    framework: str | None = None
    device: DeviceActivity | None = None
    mix: OperatorMix | None = None
    util_age_s: Reading = None
    util_source: UtilSource | None = None
    memory_source: MemorySource | None = None

    def __post_init__(self) -> None:
        """Refuse what a newer version wrote: it may mean something else by the same name."""
        check_version(self.schema_version, SIGNATURE_VERSION)

    @property
    def util_estimated(self) -> bool:
        """Whether the utilisation is a part of the whole device's that was given to the job."""
        return self.util_source == "device"

    @property
    def memory_estimated(self) -> bool:
        """Whether the memory is what is in use on the whole device."""
        return self.memory_source == "device"

    @property
    def step_time_s(self) -> Reading:
        """Mean time of a step, seconds; None when no step ended in the window or the rate is not known."""
        return 1.0 / self.step_rate if self.step_rate else None

    @property
    def launch_rate(self) -> Reading:
        """Kernel launches per second: those of a step, as last measured, times the step rate."""
        if self.mix is None or self.mix.launches_per_step is None or self.step_rate is None:
            return None
        return self.mix.launches_per_step * self.step_rate


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
        util: Quantiles of GPU utilisation in [0, 1], by horizon in seconds (keys: ``HORIZONS_S``). Empty when it was
            never read: drivers tell none of MIG instances.
        memory: Quantiles of device memory in bytes, by horizon in seconds. Empty when it was never read.
        peak_memory_bytes: Expected largest memory until the job ends; 0 when it was never read.
        windows: Number of windows the forecast rests on.
    """

    job_id: str
    util: Mapping[int, Quantiles]
    memory: Mapping[int, Quantiles]
    peak_memory_bytes: float
    windows: int

    @property
    def largest_memory_bytes(self) -> float:
        """What to expect as the largest memory until the end, in bytes: never less than at any moment until then.

        The expected peak has no level, and quantiles of memory that may still be loaded can lie above it.
        """
        return max([self.peak_memory_bytes, *(each.p99 for each in self.memory.values())])


ProfileSource = Literal["history", "hints", "class", "unknown"]


@dataclass(frozen=True, slots=True)
class DemandProfile:
    """The few numbers placement needs of one job, whatever they come from.

    Attributes:
        util_mean: Utilisation the job would have alone on the GPU, fraction in [0, 1].
        util_p95: Its 95th percentile.
        memory_bytes: Memory to reserve (forecast peak or hint); None when nothing is known.
        solo_step_rate: Steps per second alone on a GPU; None when never measured.
        observed_s: Seconds of measurement behind it (0 for hints and unknown).
        source: Where the numbers come from. "class": a cold-start class, never measured itself. "unknown" means:
            nothing known, assume the worst.
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


@runtime_checkable
class BatchInterferencePredictor(Protocol):
    """An interference predictor that answers many questions at once for far less than one after the other."""

    def predict_many(
        self, candidates: Sequence[Sequence[DemandProfile]], gpu_type: str
    ) -> Sequence[Sequence[ThroughputPrediction]]:
        """Return per set what ``predict`` returns for it."""
        ...


@runtime_checkable
class ExplainingInterferencePredictor(Protocol):
    """An interference predictor that can say what drives a slowdown."""

    def explain(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[Mapping[str, float]]:
        """Return per member the throughput lost to each cause (negative: won); empty where it cannot say."""
        ...


def predict_sets(
    predictor: InterferencePredictor, sets: Sequence[tuple[str, Sequence[DemandProfile]]]
) -> list[Sequence[ThroughputPrediction]]:
    """Predict many sets of jobs, at once where the predictor can.

    Args:
        predictor: The predictor.
        sets: GPU type and members of each.

    Returns:
        Per set one prediction per member, in order; nothing for an empty set.
    """
    if not _batches(type(predictor)):
        return [predictor.predict(members, gpu_type) if members else () for gpu_type, members in sets]
    places: dict[str, list[int]] = {}
    for place, (gpu_type, members) in enumerate(sets):
        if members:
            places.setdefault(gpu_type, []).append(place)
    found: list[Sequence[ThroughputPrediction]] = [()] * len(sets)
    for gpu_type, mine in places.items():
        answers = cast(BatchInterferencePredictor, predictor).predict_many([sets[place][1] for place in mine], gpu_type)
        for place, answer in zip(mine, answers, strict=True):
            found[place] = answer
    return found


@lru_cache(maxsize=64)
def _batches(kind: type) -> bool:
    return issubclass(kind, BatchInterferencePredictor)  # far too slow to be asked for every prediction


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
    "BatchInterferencePredictor",
    "DemandForecaster",
    "DemandProfile",
    "DeviceActivity",
    "ExplainingInterferencePredictor",
    "Forecast",
    "InterferencePredictor",
    "JobMeasurement",
    "MemorySource",
    "OperatorMix",
    "ProfileSource",
    "Quantiles",
    "Reading",
    "Signature",
    "ThroughputPrediction",
    "UtilSource",
    "predict_sets",
]
