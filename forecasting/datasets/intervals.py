"""Median and 80 % interval of ratios measured in few windows on few occasions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.80


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and how well it is known.

    Attributes:
        median: Median over the windows; None without any.
        low: Lower end of the 80 % interval; None with fewer than two windows.
        high: Upper end.
        windows: Number of windows behind it.
        occasions: Number of occasions they were measured on.
    """

    median: float | None
    low: float | None
    high: float | None
    windows: int
    occasions: int


def estimate(values: Sequence[float], occasions: Sequence[int], level: float = LEVEL) -> Estimate:
    """The median of positive ratios and an interval for their typical value.

    With x = log value, N windows on m occasions, t(d) the Student quantile of (1 + level) / 2 with d degrees of
    freedom::

        h_within  = t(N - m) * sqrt(S / (N - m)) / sqrt(N)      S = sum of squares about the means of the occasions
        h_between = t(m - 1) * sd(means of the occasions) / sqrt(m)     needs m >= 2
        interval  = exp(mean of the means of the occasions -+ max(h_within, h_between))

    Windows of one occasion are alike: what differs between two occasions (the state of the machine, where memory
    landed) is the same in all of them. So the means of the occasions count as the observations as soon as there are
    two. Two means can agree by luck; then the spread of the windows is the floor. With one occasion the interval
    says nothing of other occasions. It is stretched to hold the median where it would not.

    Args:
        values: The ratios, all > 0.
        occasions: The occasion of each.
        level: Probability that the interval is to hold.

    Raises:
        ValueError: The two differ in length, or a value is not a positive number.
    """
    if len(values) != len(occasions):
        raise ValueError(f"occasions: {len(occasions)} entries are not accepted; give {len(values)}, one per value")
    x = np.asarray(values, dtype=float)
    if not np.all(np.isfinite(x) & (x > 0.0)):
        raise ValueError(f"values: {list(values)} is not accepted; give numbers above 0")
    groups = np.asarray(occasions)
    distinct = np.unique(groups)
    if x.size == 0:
        return Estimate(None, None, None, 0, 0)
    x = np.log(x)
    median = float(np.median(x))
    if x.size == 1:
        return Estimate(math.exp(median), None, None, 1, 1)
    means = np.array([x[groups == group].mean() for group in distinct])
    half = max(_within(x, groups, level), _between(means, level))
    centre = float(means.mean())
    low, high = min(centre - half, median), max(centre + half, median)
    return Estimate(math.exp(median), math.exp(low), math.exp(high), x.size, distinct.size)


def _within(x: np.ndarray, groups: np.ndarray, level: float) -> float:
    squares = math.fsum(
        float(((x[groups == group] - x[groups == group].mean()) ** 2).sum()) for group in np.unique(groups)
    )
    freedom = x.size - np.unique(groups).size
    if freedom < 1:
        return 0.0
    return _quantile(level, freedom) * math.sqrt(squares / freedom / x.size)


def _between(means: np.ndarray, level: float) -> float:
    if means.size < 2:
        return 0.0
    return _quantile(level, means.size - 1) * float(means.std(ddof=1)) / math.sqrt(means.size)


def _quantile(level: float, freedom: int) -> float:
    return float(stats.t.ppf((1.0 + level) / 2.0, freedom))


__all__ = ["LEVEL", "Estimate", "estimate"]
