"""Analogues at the host: likeness is sought in the samples between the windows, which the windows no longer show.

The host agent samples ten times a second and sends a window a second. What followed like moments in the samples is
forecast here, as the means of the windows to come, and goes with the window as predictions from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cotenant.forecasting.demand.analogues import Analogues
from cotenant.forecasting.demand.arrays import FAR, Array, Indexes, grown, span

HORIZONS = (1, 2, 5)  # windows ahead
GAINS = (0.2, 0.05, 0.015)
WIDTH = len(GAINS)  # predictions per horizon: the medians, which alone do as well as with the means

# What hosts say of the streams (job, GPU) they could foresee: mean utilisation of the windows to come, by horizon and
# then by expert; None where one is not known. A stream that is not there was not foreseen.
Foreseen = Mapping[tuple[str, str], Sequence[float | None]]


class HostAnalogues:
    """Analogues of a few series in samples, forecasting means over windows. Not thread-safe."""

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
        self._samples: Array = np.full((rows, last + 1), FAR, dtype=np.float32)
        self._means: Array = np.full((rows, last + 1), FAR, dtype=np.float32)
        self._counts: Indexes = np.zeros(rows, dtype=np.intp)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series; those there already keep their state."""
        self._analogues.resize(rows)
        self._samples = grown(self._samples, 0, rows, FAR)
        self._means = grown(self._means, 0, rows, FAR)
        self._counts = np.concatenate([self._counts, np.zeros(rows - len(self._counts), dtype=np.intp)])

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._analogues.clear(row)
        self._samples[row] = self._means[row] = FAR
        self._counts[row] = 0

    def take(self, rows: Indexes, samples: Array) -> None:
        """Take in further samples of some series, as one after the other would be: the same number of each.

        Args:
            rows: The series, n of them.
            samples: Shape (n, samples), the oldest first.
        """
        where, ticks, kept = span(rows), samples.shape[1], self._samples.shape[1]
        counts = self._counts[where]
        known = np.concatenate([samples[:, ::-1], self._samples[where]], axis=1, dtype=np.float32)
        self._samples[where] = known[:, :kept]
        inside = sliding_window_view(known, self._per_window, axis=1)[:, :ticks]
        there = np.arange(self._per_window) <= (counts[:, None] + np.arange(ticks - 1, -1, -1))[..., None]
        means = np.where(there, inside, 0.0).sum(axis=2) / there.sum(axis=2)
        self._means[where] = np.concatenate([means, self._means[where]], axis=1, dtype=np.float32)[:, :kept]
        self._analogues.learn(where, known, counts, rows, ticks)
        self._counts[where] += ticks

    def predict(self, rows: Indexes) -> Array:
        """Return the means of the windows that end ``horizons`` windows from now, shape (n, horizons, ``WIDTH``)."""
        where = span(rows)
        return self._analogues.predict(where, self._means[where])[:, :, ::2]
