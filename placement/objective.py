"""What packing is worth: the saving it brings against the slowdown it costs.

A job alone runs at rate 1 (normalised); packed with others it runs at its normalised throughput n <= 1. In one unit of
time a GPU that carries jobs with n_1 … n_k does sum(n) units of work. Done in turn, each alone, the same work takes
sum(n) units of time. So packing saves the fraction 1 - 1/sum(n) of the GPU's time: 0 for a job alone, 1/2 for two jobs
that do not notice each other, negative for jobs that get in each other's way more than they gain.

What it costs is each job's individual slowdown, s - 1 = 1/n - 1. ``score`` weighs the two with the ``packing_bias``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def packing_saving(throughputs: Sequence[float]) -> float:
    """Return 1 - 1/sum(n): the fraction of GPU time saved by running these jobs together instead of in turn.

    Args:
        throughputs: Normalised throughput n > 0 of every job on the GPU.

    Returns:
        The saving, below 1; 0.0 for no job.
    """
    return 1.0 - 1.0 / math.fsum(throughputs) if throughputs else 0.0


def mean_slowdown(throughputs: Sequence[float]) -> float:
    """Return the mean of s - 1 = 1/n - 1 over the jobs (0 = nobody is slowed down; 0.0 for no job)."""
    if not throughputs:
        return 0.0
    return math.fsum(1.0 / n - 1.0 for n in throughputs) / len(throughputs)


def score(throughputs: Sequence[float], bias: float) -> float:
    """Return ``bias * saving - (1 - bias) * mean slowdown``; 0 for a job alone at full speed and for an empty GPU."""
    return bias * packing_saving(throughputs) - (1.0 - bias) * mean_slowdown(throughputs)
