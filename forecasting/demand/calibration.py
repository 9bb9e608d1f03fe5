"""Quantiles around a point forecast from the errors made so far, corrected until each level covers what it says.

Errors are kept in exponentially weighted histograms per series, horizon and state (how high the last value was, how
much the experts disagreed), with a share of the histogram of all states. On top comes an online correction in the
manner of adaptive conformal inference (Gibbs and Candès 2021): a level that is exceeded too often moves outwards.

A reading far outside its own interval throws doubt on all that was learnt of a series: it may have changed for good,
or return. The doubt is a share of the weight for errors of any size up to that of the jump; it fades with the ticks,
while the errors seen meanwhile count as ever, and a series that returns has its old intervals back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Flags, Indexes, Rows, grown
from cotenant.forecasting.types import LEVELS

MEMORY = 0.995  # of the histograms, per error
POOLED = 0.1  # weight of the errors of all states beside those of the present one
PRIOR_ERRORS = 3.0  # a series starts as if it had made so many errors, evenly spread over its first span
STEP = 0.005  # of the correction, in recent largest errors
MOST = 0.3  # the correction in units of the series
SURPRISE = 2.0  # times its whole interval a reading has to be away from its forecast …
LEAST_SURPRISE = 0.05  # … and so many units of the series
DOUBT = 0.5  # of the weight at first, …
DOUBT_LEFT = 0.8  # … so much of it after every further tick, …
LEAST_DOUBT = 0.005  # … and none any more below this: no level reaches that far
DOUBT_ROOM = 2.0  # the errors in doubt go so many times as far as the reading is from the point

_HEIGHTS = np.array([0.05, 0.5, 0.95], dtype=np.float32)  # limits of the states: of the value …
_SPREADS = np.array([0.02, 0.2], dtype=np.float32)  # … and of the disagreement
STATES = (len(_HEIGHTS) + 1) * (len(_SPREADS) + 1)

_EDGES = np.array([0, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0])
_SAME = 0.0005  # errors up to here are none
EDGES = np.concatenate([-_EDGES[::-1] - _SAME, _EDGES + _SAME]).astype(np.float32)
BINS = len(EDGES) - 1
_WIDTHS = np.diff(EDGES)
_ZERO_BIN = BINS // 2
_FIRST_LARGEST = 0.1
_RESCALE_ABOVE = 1e6  # float32 keeps 7 digits
_TAUS = np.array([level for level in LEVELS if level != 0.5], dtype=np.float32)
_UPPER = _TAUS > 0.5


@dataclass(frozen=True, slots=True)
class Said:
    """What had been said of n series for now: states (n,), points (n,) and quantiles (n, levels)."""

    states: Indexes
    point: Array
    quantiles: Array


class Calibration:
    """Error histograms and corrections of many series. Levels are ``LEVELS`` without the median.

    New errors weigh more than old ones, instead of all old ones being made lighter: that touches one bin per error.
    """

    def __init__(self, rows: int, horizons: int, first_span: float) -> None:
        """Make the state; ``first_span`` is how far a series may move before any of its errors is known."""
        self._prior = _prior(first_span)
        self._states: Array = np.zeros((rows, horizons, STATES, BINS), dtype=np.float32)
        self._pooled: Array = np.tile(self._prior, (rows, horizons, 1))
        self._weight: Array = np.ones((rows, horizons), dtype=np.float32)
        self._correction: Array = np.zeros((rows, horizons, len(_TAUS)), dtype=np.float32)
        self._largest: Array = np.full((rows, horizons), _FIRST_LARGEST, dtype=np.float32)
        self._doubt: Array = np.zeros(rows, dtype=np.float32)
        self._jump: Array = np.zeros(rows, dtype=np.float32)
        self._line = np.arange(horizons)[None, :]

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        more, horizons = rows - len(self._pooled), self._pooled.shape[1]
        self._states = grown(self._states, 0, rows, 0.0)
        self._pooled = np.concatenate([self._pooled, np.tile(self._prior, (more, horizons, 1))])
        self._weight = grown(self._weight, 0, rows, 1.0)
        self._correction = grown(self._correction, 0, rows, 0.0)
        self._largest = grown(self._largest, 0, rows, _FIRST_LARGEST)
        self._doubt = grown(self._doubt, 0, rows, 0.0)
        self._jump = grown(self._jump, 0, rows, 0.0)

    def clear(self, row: int, first_span: float | None = None) -> None:
        """Forget one series; ``first_span`` is how far it may move at first, where more than usual is known of it."""
        self._states[row] = 0.0
        self._pooled[row] = self._prior if first_span is None else _prior(first_span)
        self._weight[row] = 1.0
        self._correction[row] = 0.0
        self._largest[row] = _FIRST_LARGEST
        self._doubt[row] = self._jump[row] = 0.0

    def doubt(self, rows: Indexes, jumps: Array) -> None:
        """Have wide intervals for a while: these series have moved by ``jumps``, as they never did."""
        self._doubt[rows], self._jump[rows] = DOUBT, jumps

    def settle(self, rows: Rows) -> None:
        """A tick passed."""
        left = np.float32(DOUBT_LEFT) * self._doubt[rows]
        self._doubt[rows] = np.where(left < LEAST_DOUBT, np.float32(0.0), left)

    def doubted(self, rows: Indexes) -> Indexes:
        """Return those of the rows that are in doubt."""
        return rows[self._doubt[rows] > 0.0]

    def jumps(self, rows: Indexes) -> Array:
        """Return by how much each series last moved as it never had."""
        return self._jump[rows]

    def states(self, now: Array, spread: Array) -> Indexes:
        """Return the state numbers (n, horizons) for present values (n,) and disagreements (n, horizons)."""
        height = np.searchsorted(_HEIGHTS, now)[:, None] * (len(_SPREADS) + 1)
        return height + np.searchsorted(_SPREADS, spread)

    def learn(self, rows: Indexes, horizon: int, said: Said, now: Array) -> None:
        """Take in what came, ``now`` of shape (n,), of what had been said of it."""
        error = now - said.point
        bins = np.clip(np.searchsorted(EDGES, error, side="right") - 1, 0, BINS - 1)
        weight = self._weight[rows, horizon] / np.float32(MEMORY)
        self._weight[rows, horizon] = weight
        # One index is several times quicker than four. The table is contiguous: this is a view of it.
        self._states.reshape(-1)[((rows * len(self._line[0]) + horizon) * STATES + said.states) * BINS + bins] += weight
        self._pooled[rows, horizon, bins] += weight
        heavy = rows[weight > _RESCALE_ABOVE]
        if len(heavy):
            factor = 1.0 / self._weight[heavy, horizon]
            self._states[heavy, horizon] *= factor[:, None, None]
            self._pooled[heavy, horizon] *= factor[:, None]
            self._weight[heavy, horizon] = 1.0
        largest = np.maximum(0.95 * self._largest[rows, horizon], np.abs(error))
        self._largest[rows, horizon] = largest
        missed = (now[:, None] > said.quantiles).astype(np.float32)
        moved = self._correction[rows, horizon] + STEP * largest[:, None] * (missed - (1.0 - _TAUS))
        self._correction[rows, horizon] = np.clip(moved, -MOST, MOST)

    def quantiles(self, rows: Indexes, states: Indexes, point: Array, now: Array) -> Array:
        """Return the quantiles (n, horizons, levels) around the points (n, horizons), p10 below and the rest above."""
        places = (rows[:, None] * len(self._line[0]) + self._line) * STATES + states
        weights = self._states.reshape(-1, BINS).take(places, axis=0)
        weights += np.float32(POOLED) * self._pooled[rows]
        doubted = np.flatnonzero(self._doubt[rows])
        if len(doubted):
            away = np.abs(point[doubted] - now[doubted, None])
            reach = np.float32(DOUBT_ROOM) * np.maximum(away, self._jump[rows[doubted], None])
            doubt = self._doubt[rows[doubted], None, None]
            known = weights[doubted].sum(axis=2, keepdims=True)
            weights[doubted] += doubt / (1.0 - doubt) * known * _even(reach)
        # Bins first: numpy is quick along a long last axis, and slow along a short one.
        sums = np.ascontiguousarray(weights.reshape(-1, BINS).T)
        for i in range(1, BINS):
            sums[i] += sums[i - 1]
        each, flat = np.arange(sums.shape[1]), sums.reshape(-1)
        offsets = np.empty((len(_TAUS), sums.shape[1]), dtype=np.float32)
        for i, tau in enumerate(_TAUS):
            wanted = tau * sums[-1]
            index = np.minimum((sums < wanted).view(np.int8).sum(axis=0, dtype=np.int8).astype(np.intp), BINS - 1)
            place = index * len(each) + each
            below = np.where(index > 0, flat.take(place - len(each), mode="wrap"), 0.0)
            part = (wanted - below) / np.maximum(flat.take(place) - below, 1e-12)
            offset = EDGES.take(index) + np.minimum(part, 1.0) * _WIDTHS.take(index)
            offsets[i] = np.where(index == _ZERO_BIN, _SAME if tau > 0.5 else -_SAME, offset)
        around = offsets.T.reshape(*point.shape, len(_TAUS)) + self._correction[rows]
        around = np.where(_UPPER, np.maximum(around, 0.0), np.minimum(around, 0.0))
        for i in range(2, len(_TAUS)):
            np.maximum(around[:, :, i], around[:, :, i - 1], out=around[:, :, i])
        ordered: Array = (point[:, :, None] + around).astype(np.float32)
        return ordered


def surprised(point: Array, quantiles: Array, now: Array) -> Flags:
    """Return which of n series are far from the points (n,) and quantiles (n, levels) that were forecast for now."""
    interval = quantiles[:, -1] - quantiles[:, 0]
    odd: Flags = np.abs(now - point) > np.maximum(SURPRISE * interval, LEAST_SURPRISE)
    return odd


def _even(span: Array) -> Array:
    """Return the weight 1 spread evenly over errors up to ``span`` (...) either way, shape (..., bins)."""
    reach = span[..., None]
    inside = np.clip(np.minimum(EDGES[1:], reach) - np.maximum(EDGES[:-1], -reach), 0.0, None)
    even: Array = (inside / inside.sum(axis=-1, keepdims=True)).astype(np.float32)
    return even


def _prior(span: float) -> Array:
    return np.float32(PRIOR_ERRORS) * _even(np.array(span))
