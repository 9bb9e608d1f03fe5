"""80 % intervals around the prediction, from the errors on groups of jobs that were held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.interference.table import Floats, Ints

COVERAGE = 0.8
SLOPE_DAMPING = 0.25  # errors grow with the slowdown predicted, but unseen families that look harmless need room too
PAIR, JOB_FOCAL, JOB_OTHER, FAMILY_FOCAL, FAMILY_OTHER = range(5)
SITUATIONS: tuple[str, ...] = ("pair", "job focal", "job other", "family focal", "family other")
BOTH_NEW = 1.2  # both jobs of unseen families: wider than one of them alone; an assumption
_LEAST_SPREAD = 0.004  # of a measured throughput
_ENOUGH = 10  # residuals, below which a situation borrows the next harder one's band


@dataclass(frozen=True, slots=True)
class Band:
    """Errors (measured − predicted) lie in ``[-below, above] · (base + slope · (1 − predicted))`` for 80 %.

    The width depends on nothing but the prediction, and grows slower than it falls. So the ends of the interval are
    as monotone as the prediction itself.
    """

    base: float
    slope: float
    below: float
    above: float

    def ends(self, mid: Floats) -> tuple[Floats, Floats]:
        """Low and high ends around predictions, before they are cut to [0, 1]."""
        spread = self.base + self.slope * (1.0 - mid)
        return mid - self.below * spread, mid + self.above * spread


UNCALIBRATED = Band(0.1, 0.8, 1.0, 1.0)


def calibrate(mid: Floats, measured: Floats, groups: Ints) -> Band:
    """Fit a band to held-out predictions.

    Args:
        mid: Predictions, made without the row's group.
        measured: What was measured.
        groups: The held-out group of each row. Rows count half by number and half by group, so that a large family
            does not decide alone.
    """
    error = measured - mid
    design = np.stack([np.ones_like(mid), 1.0 - mid], axis=1)
    weights = _weights(groups)
    root = np.sqrt(weights)
    base, slope = _nonnegative(design * root[:, None], np.abs(error) * root)
    slope *= SLOPE_DAMPING
    spread = base + slope * (1.0 - mid)
    relative = error / spread
    tail = (1.0 - COVERAGE) / 2.0 * (1.0 - 1.0 / len(np.unique(groups)))  # few groups: a new one may be further off
    below = max(0.0, -_quantile(relative, weights, tail))
    above = max(0.0, _quantile(relative, weights, 1.0 - tail))
    steepest = max(above * slope, 1e-12)
    if steepest > 1.0:  # keep the upper end from rising while the prediction falls
        slope, base = slope / steepest, base + (slope - slope / steepest) * float(np.mean(1.0 - mid))
    return Band(float(base), float(slope), float(below), float(above))


def fill(bands: Mapping[int, Band]) -> tuple[Band, ...]:
    """One band per situation; a missing one is that of the next harder situation on the same side."""
    harder = {PAIR: JOB_OTHER, JOB_OTHER: FAMILY_OTHER, FAMILY_OTHER: FAMILY_FOCAL, JOB_FOCAL: FAMILY_FOCAL}

    def band(situation: int) -> Band:
        if situation in bands:
            return bands[situation]
        return band(harder[situation]) if situation in harder else UNCALIBRATED

    return tuple(band(situation) for situation in range(len(SITUATIONS)))


def enough(groups: Ints) -> bool:
    """Whether there are enough held-out rows and groups to speak of an interval."""
    return len(groups) >= _ENOUGH and len(np.unique(groups)) >= 2


def _weights(groups: Ints) -> Floats:
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    by_group = 1.0 / (len(counts) * counts[index])
    return np.asarray(0.5 / len(groups) + 0.5 * by_group, dtype=np.float64)


def _nonnegative(design: Floats, target: Floats) -> tuple[float, float]:
    base, slope = np.linalg.lstsq(design, target, rcond=None)[0]
    if slope < 0.0:
        base, slope = float(target @ design[:, 0] / (design[:, 0] @ design[:, 0])), 0.0
    if base < _LEAST_SPREAD:
        base = _LEAST_SPREAD
        steep = (target - base * design[:, 0]) @ design[:, 1] / (design[:, 1] @ design[:, 1] + 1e-12)
        slope = max(0.0, float(steep))
    return float(base), float(slope)


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / np.sum(weights)
    return float(values[order][min(len(values) - 1, int(np.searchsorted(reached, level)))])
