"""Running the mixture over recorded series as it would have run live, and the simple forecasters beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from cotenant.forecasting.demand.engine import Expert, MixtureSettings, SeriesMixture
from cotenant.forecasting.demand.mixture import LEAST_UNIT, MEMORY_ROOM
from cotenant.forecasting.types import LEVELS

Floats = npt.NDArray[np.float64]
_P95 = LEVELS.index(0.95)
_ABOVE = LEVELS.index(0.5) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What was forecast at every tick of one series, in its own units.

    Attributes:
        points: Shape (ticks, horizons).
        quantiles: At ``LEVELS``, shape (ticks, horizons, levels).
    """

    points: Floats
    quantiles: Floats

    @property
    def p95(self) -> Floats:
        """The 95th percentiles, shape (ticks, horizons)."""
        return self.quantiles[:, :, _P95]


def _no_experts(rows: int) -> Sequence[Expert]:
    return ()


def replay(
    series: Sequence[Floats],
    settings: MixtureSettings,
    experts: Callable[[int], Sequence[Expert]] = _no_experts,
    units: Sequence[Floats] | None = None,
    outside: Sequence[Floats] | None = None,
) -> list[Replayed]:
    """Run one mixture over series, all at once, tick by tick. The series do not influence each other.

    Args:
        series: Their values, shape (ticks,) each; finite, at least one value.
        settings: Of the mixture.
        experts: Makes the further experts for a number of series.
        units: What each value of each series is divided by before the mixture sees it, shape (ticks,) each; where it
            changes, the series starts afresh (see ``memory_units``). None: 1.
        outside: What hosts foresaw at every tick of each series, shape (ticks, horizons, width) each. None: nothing.

    Returns:
        What was said of every series, in their order.
    """
    order = sorted(range(len(series)), key=lambda i: -len(series[i]))
    lengths = np.array([len(series[i]) for i in order], dtype=np.intp)
    longest = int(lengths.max(initial=0))
    values, unit = np.zeros((len(order), longest)), np.ones((len(order), longest))
    for row, i in enumerate(order):
        values[row, : lengths[row]] = series[i]
        if units is not None:
            unit[row, : lengths[row]] = units[i]
    width = 0 if not outside else outside[0].shape[2]
    mixture = SeriesMixture(settings, len(order), experts(len(order)), width)
    for row in range(len(order) if longest else 0):
        mixture.measure(row, unit[row, 0])
    points = np.full((len(order), longest, len(settings.horizons)), np.nan)
    quantiles = np.full((*points.shape, len(LEVELS)), np.nan)
    for tick in range(longest):
        rows = np.arange(int((lengths > tick).sum()))
        if tick:
            for row in np.flatnonzero(unit[rows, tick] != unit[rows, tick - 1]).tolist():
                mixture.rescale(row, unit[row, tick])
        now = unit[rows, tick]
        told = np.stack([outside[order[row]][tick] for row in rows.tolist()]) if outside else None
        said = mixture.step(rows, (values[rows, tick] / now).astype(np.float32), outside=told)
        points[rows, tick] = said * now[:, None]
        quantiles[rows, tick] = mixture.quantiles(rows) * now[:, None, None]
        if settings.steps:  # as live, once more in full precision: what is held, rounded, may be less than it
            held = values[rows, tick][:, None, None]
            quantiles[rows, tick, :, _ABOVE:] = np.maximum(quantiles[rows, tick, :, _ABOVE:], held)
    place = {i: row for row, i in enumerate(order)}
    return [Replayed(points[place[i], : len(each)], quantiles[place[i], : len(each)]) for i, each in enumerate(series)]


def memory_units(values: Floats, least: float = LEAST_UNIT) -> Floats:
    """Return the unit of a series of memory at every tick, as the forecaster finds it by how the series begins.

    Args:
        values: Memory, shape (ticks,).
        least: The first reading counts as at least so much; in the units of ``values`` (bytes by default).
    """
    found = np.empty(len(values))
    unit = MEMORY_ROOM * max(least, float(values[0])) if len(values) else 0.0
    for tick, value in enumerate(values.tolist()):
        if value > MEMORY_ROOM * unit:
            unit = MEMORY_ROOM * value
        found[tick] = unit
    return found


def ewma(values: Floats, gain: float) -> Floats:
    """Return the exponentially weighted average at every tick, begun with the first value; shape (ticks,)."""
    smoothed, _ = lfilter([gain], [1.0, gain - 1.0], values, zi=[(1.0 - gain) * values[0]])
    return np.asarray(smoothed, dtype=np.float64)
