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
_STEEPEST = 0.09  # above · slope; the upper end must not rise while the prediction falls, however often it is widened
_LEAST_SPREAD = 0.004  # of a measured throughput
_ENOUGH = 10  # residuals, below which a situation borrows the next harder one's band
_MOST_BATCHES = 20  # of groups left out of a calibration in turn
_MOST_WIDENING = 10.0
_NARROW = 1e-6


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


UNCALIBRATED = Band(0.3, 0.05, 1.0, 1.0)


def calibrate(mid: Floats, measured: Floats, groups: Ints) -> Band:
    """Fit a band to held-out predictions.

    Args:
        mid: Predictions, made without the row's group.
        measured: What was measured.
        groups: The held-out group of each row. Rows count half by number and half by group, so that a large family
            does not decide alone. How wide the band must be for groups it was not made from is found by leaving groups
            out of the calibration in turn; there all groups count the same.
    """
    band = _fit(mid, measured, groups)
    factor = _widening(mid, measured, groups)
    base, slope, below, above = band.base, band.slope, factor * band.below, factor * band.above
    flat = min(slope, _STEEPEST / max(above, 1e-12))
    return Band(base + (slope - flat) * float(np.mean(1.0 - mid)), flat, below, above)


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


def _fit(mid: Floats, measured: Floats, groups: Ints) -> Band:
    """The band that holds 80 % of these very rows."""
    error = measured - mid
    design = np.stack([np.ones_like(mid), 1.0 - mid], axis=1)
    weights = 0.5 / len(groups) + 0.5 * _by_group(groups)
    root = np.sqrt(weights)
    base, slope = _nonnegative(design * root[:, None], np.abs(error) * root)
    slope *= SLOPE_DAMPING
    relative = error / (base + slope * (1.0 - mid))
    tail = (1.0 - COVERAGE) / 2.0
    below, above = max(0.0, -_quantile(relative, weights, tail)), max(0.0, _quantile(relative, weights, 1.0 - tail))
    return Band(base, slope, below, above)


def _widening(mid: Floats, measured: Floats, groups: Ints) -> float:
    """By how much bands have to be widened to hold 80 % of groups they were not made from.

    Every group (or batch of groups, where there are many) is judged by the band of the others: how much wider would it
    have to be to hold the row? The answer is the 80 % quantile over all rows, every group counting the same.
    """
    numbers = np.unique(groups, return_inverse=True)[1]
    batches = numbers % _MOST_BATCHES
    needed = np.zeros(len(mid))
    for batch in range(int(batches.max()) + 1):
        out = batches == batch
        band = _fit(mid[~out], measured[~out], groups[~out])
        low, high = band.ends(mid[out])
        over, under = measured[out] - mid[out], mid[out] - measured[out]
        wide = np.where(
            over > 0.0, over / np.maximum(high - mid[out], _NARROW), under / np.maximum(mid[out] - low, _NARROW)
        )
        needed[out] = np.minimum(wide, _MOST_WIDENING)
    return _quantile(needed, _by_group(groups), COVERAGE)


def _by_group(groups: Ints) -> Floats:
    """Weights of rows under which every group counts the same; their sum is 1."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(counts) * counts[index]), dtype=np.float64)


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
