"""Analogues at the host: likeness is sought in the samples between the windows, which the windows no longer show.

The host agent samples ten times a second and sends a window a second. What followed like moments in the samples is
forecast here, as the means of the windows to come, and goes with the window as predictions from outside.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.analogues import Analogues
from cotenant.forecasting.demand.arrays import FAR, Array, Indexes, span

GAINS = (0.2, 0.05, 0.015)


class HostAnalogues:
    """Analogues of a few series in samples, forecasting means over windows. Not thread-safe.

    Attributes:
        width: Predictions per horizon.
    """

    def __init__(self, rows: int, horizons: tuple[int, ...], *, per_window: int = 10, last: int = 600) -> None:
        """Make the state of ``rows`` series.

        Args:
            rows: Number of series.
            horizons: Windows ahead.
            per_window: Samples in a window.
            last: How many samples back likeness is sought.
        """
        self._per_window = per_window
        ahead = tuple(horizon * per_window for horizon in horizons)
        self._analogues = Analogues(rows, ahead, last=last, gains=GAINS)
        self.width = self._analogues.width
        self._samples: Array = np.full((rows, last + 1), FAR, dtype=np.float32)
        self._means: Array = np.full((rows, last + 1), FAR, dtype=np.float32)
        self._counts: Indexes = np.zeros(rows, dtype=np.intp)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._analogues.clear(row)
        self._samples[row] = self._means[row] = FAR
        self._counts[row] = 0

    def step(self, rows: Indexes, samples: Array) -> Array:
        """Take in one sample per series, shape (n,).

        Returns:
            Means of the windows that end ``horizons`` windows from now, shape (n, horizons, width).
        """
        where = span(rows)
        counts = self._counts[where]
        known = np.concatenate([samples[:, None], self._samples[where, :-1]], axis=1, dtype=np.float32)
        self._samples[where] = known
        inside = known[:, : self._per_window]
        there = np.arange(inside.shape[1]) <= counts[:, None]
        mean = np.where(there, inside, 0.0).sum(axis=1) / there.sum(axis=1)
        means = np.concatenate([mean[:, None], self._means[where, :-1]], axis=1, dtype=np.float32)
        self._means[where] = means
        predictions = self._analogues.step(where, known, means, counts, rows)
        self._counts[where] += 1
        return predictions
