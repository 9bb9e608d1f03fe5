"""Mixing experts: Hedge weights by recent loss, then a gate that trusts the mixture only as far as it has earned.

Both learn from losses that arrive when the forecast moment comes, so nothing here sees the future.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Rows, grown, weighted_median

ETA = 0.7
LOSS_CAP = 3.0  # in mean losses of the experts: one surprise must not rule for long
FIXED_SHARE = 0.01  # weight that returns to the prior at every tick, so that an expert can come back (Herbster 1998)
PRIOR_PERSISTENCE = 0.5
LOSS_MEMORY = 0.98
COUNTS = 0.03  # an expert with less weight says nothing about how uncertain the mixture is

GATE_MEMORY = 0.98
GATE_CLIP = 1.0  # errors beyond so many usual ones count less (Huber 1964)


@dataclass(frozen=True, slots=True)
class Heard:
    """What those experts said that said something, and their weights, summing to one: (n, horizons, experts)."""

    weights: Array
    said: Array

    def mean(self) -> Array:
        """Return the weighted mean, shape (n, horizons)."""
        mean: Array = (self.weights * self.said).sum(axis=2)
        return mean

    def median(self) -> Array:
        """Return the weighted median, shape (n, horizons)."""
        return weighted_median(self.said, self.weights)

    def spread(self, point: Array) -> Array:
        """Return how far the experts that count are from the point forecast at most, shape (n, horizons)."""
        away: Array = np.where(self.weights > COUNTS, np.abs(self.said - point[:, :, None]), 0.0).max(axis=2)
        return away


class Hedge:
    """Weights of the experts per series and horizon (Freund and Schapire 1997), expert 0 being persistence.

    The last ``absentees`` experts may say nothing (NaN). The others then share their weight, and what they lose
    is shared among the present alone (sleeping experts, Freund et al. 1997): a series for which they never say
    anything is mixed as if there were none of them.
    """

    def __init__(self, rows: int, horizons: int, experts: int, absentees: int = 0, trust: Array | None = None) -> None:
        """Make the state; ``trust`` is how much of the weight goes to chosen experts at first, (horizons, experts)."""
        always = experts - absentees
        each = (1.0 - PRIOR_PERSISTENCE) / max(1, always - 1)
        plain = np.full((horizons, experts), each, dtype=np.float32)
        plain[:, 0] = PRIOR_PERSISTENCE
        plain /= plain.sum(axis=1, keepdims=True)
        trust = np.zeros_like(plain) if trust is None else trust
        self._prior: Array = trust + (1.0 - trust.sum(axis=1, keepdims=True)) * plain
        self._always = always
        self._weights: Array = np.tile(self._prior, (rows, 1, 1))
        self._loss: Array = np.zeros((2, rows, horizons), dtype=np.float32)  # discounted sums of losses and of ones

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        more = rows - len(self._weights)
        self._weights = np.concatenate([self._weights, np.tile(self._prior, (more, 1, 1))])
        self._loss = grown(self._loss, 1, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._weights[row] = self._prior
        self._loss[:, row] = 0.0

    def learn(self, rows: Rows, horizon: int, losses: Array) -> None:
        """Take in absolute errors of shape (n, experts) of the forecasts that were for now; NaN of who was absent."""
        usual = losses[:, : self._always].mean(axis=1)
        self._loss[0, rows, horizon] = LOSS_MEMORY * self._loss[0, rows, horizon] + usual
        self._loss[1, rows, horizon] = LOSS_MEMORY * self._loss[1, rows, horizon] + 1.0
        usual = self._loss[0, rows, horizon] / self._loss[1, rows, horizon] + np.float32(1e-6)
        before = self._weights[rows, horizon]
        weights = before * np.exp(-ETA * np.minimum(losses / usual[:, None], LOSS_CAP))
        absent = np.isnan(losses)
        kept = np.where(absent, before, 0.0).sum(axis=1, keepdims=True)
        np.copyto(weights, 0.0, where=absent)
        weights *= (1.0 - FIXED_SHARE) * (1.0 - kept) / weights.sum(axis=1, keepdims=True)
        weights += np.where(absent, (1.0 - FIXED_SHARE) * before, 0.0)
        self._weights[rows, horizon] = weights + FIXED_SHARE * self._prior[horizon]

    def heard(self, rows: Rows, predictions: Array) -> Heard:
        """Return what was said with what it weighs, of predictions (n, horizons, experts).

        NaN is the prediction of an absent expert; when all of them are absent their columns may be left out.
        """
        said = predictions.shape[2]
        weights = self._weights[rows]
        absent = np.isnan(predictions[:, :, self._always :])
        if said == weights.shape[2] and not absent.any():
            return Heard(weights, predictions)
        weights = weights[:, :, :said].copy()
        weights[:, :, self._always :][absent] = 0.0
        weights /= weights.sum(axis=2, keepdims=True)
        return Heard(weights, np.nan_to_num(predictions) if said > self._always else predictions)


class Gate:
    """How far to move from persistence towards the mixture: point = x + b·(mean − x) + c·(median − x).

    b and c start at 0 (persistence) and are learnt per series and horizon by recursive least squares with forgetting
    and clipped errors, in absolute units: what the mixture gains or loses in busy phases decides, not in quiet ones.
    A series on which the mixture is no better than its last value therefore stays with its last value.
    """

    def __init__(self, rows: int, horizons: int, prior: float) -> None:
        """Make the state; ``prior`` is the variance of b and c before anything was seen: how readily they move."""
        self._prior = prior
        self._b: Array = np.zeros((2, rows, horizons), dtype=np.float32)
        self._p: Array = np.zeros((3, rows, horizons), dtype=np.float32)  # covariance: bb, bc, cc
        self._p[0], self._p[2] = self._prior, self._prior
        self._usual: Array = np.full((rows, horizons), 0.05, dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        there = len(self._usual)
        self._b = grown(self._b, 1, rows, 0.0)
        self._p = grown(self._p, 1, rows, self._prior)
        self._p[1, there:] = 0.0
        self._usual = grown(self._usual, 0, rows, 0.05)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._b[:, row] = 0.0
        self._p[0, row], self._p[1, row], self._p[2, row] = self._prior, 0.0, self._prior
        self._usual[row] = 0.05

    def learn(self, rows: Rows, horizon: int, *, then: Array, mean: Array, median: Array, now: Array) -> None:
        """Take in what the forecasts for now had been: the value ``then``, the two mixtures, and the value ``now``."""
        f, g = mean - then, median - then
        (b, c), (bb, bc, cc) = self._b[:, rows, horizon], self._p[:, rows, horizon]
        error = now - then - b * f - c * g
        usual = 0.98 * self._usual[rows, horizon] + 0.02 * np.abs(error)
        self._usual[rows, horizon] = usual
        trust = np.maximum(np.minimum(1.0, GATE_CLIP * usual / np.maximum(np.abs(error), 1e-9)), 1e-3)
        pf, pg = bb * f + bc * g, bc * f + cc * g
        norm = GATE_MEMORY / trust + f * pf + g * pg
        kf, kg = pf / norm, pg / norm
        self._b[0, rows, horizon], self._b[1, rows, horizon] = b + kf * error, c + kg * error
        bb, bc, cc = (bb - kf * pf) / GATE_MEMORY, (bc - kf * pg) / GATE_MEMORY, (cc - kg * pg) / GATE_MEMORY
        shrink = np.minimum(1.0, 20.0 * self._prior / np.maximum(bb + cc, 1e-9))  # what is never excited must not grow
        self._p[0, rows, horizon], self._p[1, rows, horizon] = bb * shrink, bc * shrink
        self._p[2, rows, horizon] = cc * shrink

    def point(self, rows: Rows, now: Array, mean: Array, median: Array) -> Array:
        """Return the gated point forecast, shape (n, horizons), from the present value (n,) and the mixtures."""
        b, c = self._b[:, rows]
        present = now[:, None]
        moved: Array = present + b * (mean - present) + c * (median - present)
        return moved
