"""What of a report can be true at all. Whatever cannot is ignored and counted: one broken sensor must stop nobody.

The comparisons take every number Python knows: NaN and infinities fail them, integers of any size do no harm.
"""

from __future__ import annotations

from dataclasses import replace

from cotenant.forecasting.types import DemandProfile, JobMeasurement, Quantiles, Signature
from cotenant.forecasting.windows import MOST_BYTES, MOST_UTIL
from cotenant.scheduler.core.model import Gpu, Host

_MOST_RATE = 1e9  # steps per second
_LEAST_RATE = 1e-9  # slower than a step in thirty years
_MOST_CORES = 1e6
_MOST_SECONDS = 1e12


def plausible(measurement: JobMeasurement) -> bool:
    """Return whether every number can be true; what was not measured (None) is fine."""
    forecast = measurement.forecast
    quantiles = [
        *((each, MOST_UTIL) for each in forecast.util.values()),
        *((each, MOST_BYTES) for each in forecast.memory.values()),
    ]
    return (
        _plausible_window(measurement.signature)
        and _plausible_profile(measurement.profile)
        and all(_plausible_quantiles(each, most) for each, most in quantiles)
    )


def plausible_bytes(count: float) -> bool:
    """Return whether this can be an amount of memory that something uses."""
    return 0 <= count <= MOST_BYTES


def sound(gpu: Gpu) -> Gpu:
    """Return the GPU; one that names no possible amount of memory counts as not healthy and has none."""
    if plausible_bytes(gpu.memory_bytes) and gpu.memory_bytes > 0:
        return gpu
    return replace(gpu, memory_bytes=0, healthy=False)


def sound_host(host: Host) -> Host:
    """Return the host; one that names no possible number of processors does not say how many it has."""
    return host if host.cpus is None or 0.0 < host.cpus <= _MOST_CORES else replace(host, cpus=None)


def _plausible_window(signature: Signature) -> bool:
    readings = (
        (signature.util_mean, MOST_UTIL),
        (signature.util_peak, MOST_UTIL),
        (signature.throttled_fraction, MOST_UTIL),
        (signature.compute_share, MOST_UTIL),
        (signature.memory_bytes, MOST_BYTES),
        (signature.memory_peak_bytes, MOST_BYTES),
        (signature.host_cores, _MOST_CORES),
        (signature.window_s, _MOST_SECONDS),
        (signature.start_s, _MOST_SECONDS),
    )
    return _plausible_rate(signature.step_rate) and all(
        reading is None or 0.0 <= reading <= most for reading, most in readings
    )


def _plausible_profile(profile: DemandProfile) -> bool:
    return (
        0.0 <= profile.util_mean <= MOST_UTIL
        and 0.0 <= profile.util_p95 <= MOST_UTIL
        and (profile.memory_bytes is None or plausible_bytes(profile.memory_bytes))
        and 0.0 <= profile.observed_s <= _MOST_SECONDS
        and _plausible_rate(profile.solo_step_rate)
    )


def _plausible_quantiles(each: Quantiles, most: float) -> bool:
    return all(0.0 <= level <= most for level in (each.p10, each.p50, each.p90, each.p95, each.p99))


def _plausible_rate(rate: float | None) -> bool:
    return rate is None or rate == 0.0 or _LEAST_RATE <= rate <= _MOST_RATE
