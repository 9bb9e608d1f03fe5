"""What packing is worth: the saving it brings against the slowdown it costs.

A job alone runs at rate 1 (normalised); packed with others it runs at its normalised throughput n <= 1. In one unit of
time a GPU that carries jobs with n_1 … n_k does sum(n) units of work. Done in turn, each alone, the same work takes
sum(n) units of time. So packing saves the fraction 1 - 1/sum(n) of the GPU's time: 0 for a job alone, 1/2 for two jobs
that do not notice each other, negative for jobs that get in each other's way more than they gain.

What it costs is each job's individual slowdown, s - 1 = 1/n - 1, weighted by the jobs' priorities. ``score`` weighs the
two with the ``packing_bias``. Hard limits are checked against ``cautious``, a low quantile of n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.throughputs import Floats, Throughputs
from cotenant.forecasting.types import ThroughputPrediction
from cotenant.placement.types import Request

LOW_IS_EXCEEDED = 0.9  # predictions give 80 % intervals: n exceeds the low end with this probability
SLOWEST = 1e-3  # no cautious throughput is below: a slowdown stays a number


def packing_saving(throughputs: Sequence[float]) -> float:
    """Return 1 - 1/sum(n): the fraction of GPU time saved by running these jobs together instead of in turn.

    Args:
        throughputs: Normalised throughput n > 0 of every job on the GPU.

    Returns:
        The saving, below 1; 0.0 for no job.
    """
    return 1.0 - 1.0 / math.fsum(throughputs) if throughputs else 0.0


def mean_slowdown(throughputs: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean of w * (s - 1) = w * (1/n - 1) over the jobs (0 = nobody is slowed down; 0.0 for no job).

    The weights are not divided by their sum: beside an important job, what a newcomer itself loses would count less.

    Args:
        throughputs: Normalised throughput n > 0 of every job on the GPU.
        weights: Priority weight w > 0 of each, 1 for a normal job; None = 1 for all.
    """
    if not throughputs:
        return 0.0
    counted = (1.0,) * len(throughputs) if weights is None else weights
    lost = math.fsum(weight * (1.0 / n - 1.0) for n, weight in zip(throughputs, counted, strict=True))
    return lost / len(throughputs)


def score(throughputs: Sequence[float], bias: float, weights: Sequence[float] | None = None) -> float:
    """Return ``bias * saving - (1 - bias) * mean slowdown``; 0 for a job alone at full speed and for an empty GPU."""
    return bias * packing_saving(throughputs) - (1.0 - bias) * mean_slowdown(throughputs, weights)


def cautious(prediction: ThroughputPrediction, confidence: float) -> float:
    """Return the throughput that the job exceeds with this probability.

    The lower half of a prediction's interval is taken for the lower half of a normal distribution around ``mid`` whose
    10 % quantile is ``low``: ``n_c = mid - (mid - low) * z(c) / z(0.9)``, with ``z`` the standard normal quantile.

    Args:
        prediction: The prediction.
        confidence: The probability c, from 0.5 (``mid``) to below 1; 0.9 gives ``low``.

    Returns:
        The throughput in [``SLOWEST``, mid]; ``mid`` where that is smaller.
    """
    if confidence == 0.5:
        return prediction.mid
    n = prediction.mid - (prediction.mid - prediction.low) * _deviations(confidence)
    return min(prediction.mid, max(SLOWEST, n))


def cautious_array(said: Throughputs, confidence: float) -> Floats:
    """Return ``cautious`` of every prediction."""
    if confidence == 0.5:
        return said.mid
    n = said.mid - (said.mid - said.low) * _deviations(confidence)
    return np.minimum(said.mid, np.maximum(SLOWEST, n))


def slowness(gpu_type: str, request: Request, settings: PlacementSettings) -> float:
    """Return how many times longer the job takes alone on this GPU type than on its fastest (>= 1).

    Args:
        gpu_type: The type.
        request: The job, with its own speeds where they were measured.
        settings: Speeds of the types otherwise; one that is not listed has speed 1.
    """
    if request.speeds:
        return 1.0 / request.speeds.get(gpu_type, 1.0)
    speeds = settings.speeds
    return max(1.0, *speeds.values()) / speeds.get(gpu_type, 1.0) if speeds else 1.0


@lru_cache(maxsize=64)
def _deviations(confidence: float) -> float:
    """Return z(confidence) in units of the half-width of the interval."""
    normal = NormalDist()
    return normal.inv_cdf(confidence) / normal.inv_cdf(LOW_IS_EXCEEDED)
