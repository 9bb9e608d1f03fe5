"""The last word when a trained expert has joined: persistence, the gated mixture, the expert itself, or a median.

Which of them is best depends on the series more than on the moment, so each is weighed by what it lost lately, in
absolute terms: that what one of them gains in a busy phase is not outvoted by what it loses in a quiet one.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Rows, grown

MEMORY = 0.99  # of losses, per tick
ETA = 1.0  # per usual loss
PRIOR_TICKS = 30.0  # what was found in training counts as so many ticks
_NEGLIGIBLE = 30.0  # exponents beyond which a weight is nothing


class Choice:
    """Weights of a few candidates per series and horizon: exponential in their discounted losses."""

    def __init__(self, rows: int, expected: Array) -> None:
        """Make the state; ``expected`` are the candidates' losses in training, shape (candidates, horizons)."""
        self._prior: Array = (PRIOR_TICKS * expected).astype(np.float32)
        self._lost: Array = np.zeros((rows, expected.shape[1], len(expected)), dtype=np.float32)
        self._ticks: Array = np.zeros((rows, expected.shape[1]), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        self._lost, self._ticks = grown(self._lost, 0, rows, 0.0), grown(self._ticks, 0, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._lost[row] = self._ticks[row] = 0.0

    def learn(self, rows: Rows, horizon: int, losses: Array) -> None:
        """Take in the absolute errors (n, candidates) of what had been said for now, in the measure of training."""
        self._lost[rows, horizon] = MEMORY * self._lost[rows, horizon] + losses
        self._ticks[rows, horizon] = MEMORY * self._ticks[rows, horizon] + 1.0

    def point(self, rows: Rows, candidates: Array) -> Array:
        """Return the weighted mean, shape (n, horizons), of candidates (n, horizons, candidates)."""
        lost = self._lost[rows] + self._prior.T
        usual = lost.mean(axis=2) / (self._ticks[rows] + np.float32(PRIOR_TICKS))
        away = (lost - lost.min(axis=2, keepdims=True)) / np.maximum(usual, 1e-9)[:, :, None]
        weights = np.exp(-np.minimum(ETA * away, _NEGLIGIBLE))
        mixed: Array = (weights * candidates).sum(axis=2) / weights.sum(axis=2)
        return mixed
