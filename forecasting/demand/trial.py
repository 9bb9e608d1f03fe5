"""Whether a trained expert can serve at all: it is stepped a few times as the mixture will step it.

What is wrong with weights beyond the names and the numbers of dimensions shows nowhere but in the arithmetic.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import Array
from cotenant.forecasting.demand.engine import Expert, MixtureSettings, Moment, SeriesMixture

SERIES = 3
TICKS = 40  # more than what experts look back


class UnfitExpert(ValueError):
    """An expert that fails at what it will be asked, or answers with something else than numbers."""


class _Watched:
    """An expert whose answers are looked at."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self.name, self.width, self.expected = expert.name, expert.width, expert.expected

    def resize(self, rows: int) -> None:
        """See ``Expert``."""
        self._expert.resize(rows)

    def clear(self, row: int) -> None:
        """See ``Expert``."""
        self._expert.clear(row)

    def step(self, moment: Moment) -> Array:
        """See ``Expert``."""
        said = self._expert.step(moment)
        wanted = (*moment.simple.shape[:2], self.width)
        if said.shape != wanted:
            raise UnfitExpert(f"it answers with arrays of shape {said.shape}; expected {wanted}")
        if not np.isfinite(said).all():
            raise UnfitExpert("it answers with something else than finite numbers")
        return said


def check_serves(expert: Expert, settings: MixtureSettings) -> None:
    """Step an expert through a busy, a constant and a growing series, the first few ticks of each in turn.

    Args:
        expert: Made for ``SERIES`` series; not to be used afterwards.
        settings: Of the mixture it is to join.

    Raises:
        UnfitExpert: It cannot serve.
    """
    mixture = SeriesMixture(settings, SERIES, [_Watched(expert)])
    ticks = np.arange(TICKS, dtype=np.float32)
    series = np.stack([0.5 + 0.4 * np.sin(ticks), np.full(TICKS, 0.3, dtype=np.float32), ticks / TICKS])
    with np.errstate(all="ignore"):
        try:
            for tick in range(TICKS):
                rows = np.arange(min(SERIES, 1 + tick // 5))
                mixture.step(rows, series[rows, tick])
        except (ValueError, IndexError, TypeError) as error:
            raise UnfitExpert(f"it cannot be asked: {error}") from error


__all__ = ["SERIES", "UnfitExpert", "check_serves"]
