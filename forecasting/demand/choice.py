"""The last word: the incumbent, until what happened to this very series speaks for another candidate.

Candidates are persistence, the gated mixture, medians, and the trained expert. Who is the incumbent is known
beforehand: from training, or by default. Of each other candidate the absolute errors are compared with the
incumbent's, forecast by forecast (after Diebold and Mariano 1995): it takes over only while what it would have saved
exceeds a standard error.

Where a series stands still between steps, what was before a step tells little, and is forgotten sooner.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Indexes, Rows, grown

MEMORY = 0.998  # of what would have been saved, per tick: rare events, a checkpoint for example, must not be forgotten
MEMORY_OF_STEPS = 0.98
SURE = 1.0  # standard errors
_NOTHING = 1e-9  # saved, in units of the series


class Choice:
    """Which of a few candidates speaks for each series and horizon. Not thread-safe."""

    def __init__(self, rows: int, horizons: tuple[int, ...], candidates: int, incumbents: Indexes, steps: bool) -> None:
        """Make the state.

        Args:
            rows: Number of series.
            horizons: Ticks ahead. So many neighbouring forecasts err together and tell as much as one.
            candidates: How many there are.
            incumbents: Number of the candidate that speaks at first, shape (horizons,).
            steps: Whether the series stand still between steps.
        """
        self._memory = np.float32(MEMORY_OF_STEPS if steps else MEMORY)
        self._horizons = horizons
        self._incumbents = incumbents
        # What each candidate would have saved, discounted, and its squares.
        self._saved: Array = np.zeros((2, rows, len(horizons), candidates), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        self._saved = grown(self._saved, 1, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._saved[:, row] = 0.0

    def learn(self, rows: Rows, horizon: int, losses: Array) -> None:
        """Take in the absolute errors (n, candidates) of what had been said for now."""
        incumbent = self._incumbents[horizon]
        saved = losses[:, incumbent : incumbent + 1] - losses
        self._saved[0, rows, horizon] = self._memory * self._saved[0, rows, horizon] + saved
        apart = np.float32(self._horizons[horizon]) * np.square(saved)
        self._saved[1, rows, horizon] = self._memory * self._saved[1, rows, horizon] + apart

    def point(self, rows: Rows, candidates: Array) -> Array:
        """Return what the chosen ones of the candidates (n, horizons, candidates) say, shape (n, horizons)."""
        saved = self._saved[:, rows]
        worth = np.where(saved[0] > SURE * np.sqrt(saved[1]), saved[0], 0.0)
        each = np.arange(len(self._horizons))
        worth[:, each, self._incumbents] = _NOTHING
        best = worth.argmax(axis=2)
        said: Array = candidates[np.arange(len(candidates))[:, None], each, best]
        return said
