"""What packing is worth: the saving it brings against the slowdown it costs."""

from __future__ import annotations

from collections.abc import Sequence


def packing_saving(throughputs: Sequence[float]) -> float:
    """Return 1 - 1/sum(n): the fraction of GPU time saved by running these jobs together instead of in turn."""
    return 1.0 - 1.0 / sum(throughputs)


def mean_slowdown(throughputs: Sequence[float]) -> float:
    """Return the mean of s - 1 = 1/n - 1 over the jobs (0 = nobody is slowed down)."""
    return sum(1.0 / n - 1.0 for n in throughputs) / len(throughputs)


def score(throughputs: Sequence[float], bias: float) -> float:
    """Return ``bias * saving - (1 - bias) * mean slowdown``; 0 for a job alone at full speed."""
    return bias * packing_saving(throughputs) - (1.0 - bias) * mean_slowdown(throughputs)
