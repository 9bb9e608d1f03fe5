"""Analogues: what followed the moments of a series' own past that looked like the present.

For every lag a the distance ``D[a] <- D[a] + g·(|x_i − x_(i−a)| − D[a])`` says how well the series repeats itself
after a ticks. The lags with the smallest distances are the analogues; what followed them is the forecast. Several
gains g look back over different spans: large ones follow a change of phase, small ones find the period in noise.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cotenant.forecasting.demand.arrays import FAR, Array, Indexes, Rows, median_of_four

TAKE = 4  # analogues that make one forecast
BUSY = 1000  # a table of more series than this chooses its lags in turns, which costs 1-3 % of accuracy
PATIENCE = 0.6  # ticks between choices then, times gain
YOUNG = 8  # series with fewer values choose at every tick
TOLERANCE = 0.002  # distances below this, times √gain, are equally good: 0.2 % of the unit of the series


class Analogues:
    """Distances and chosen lags of many series. Not thread-safe.

    Attributes:
        width: Predictions per horizon: weighted median and mean for each gain.
    """

    def __init__(self, rows: int, horizons: tuple[int, ...], *, last: int, gains: tuple[float, ...]) -> None:
        """Make the state of ``rows`` series.

        Args:
            rows: Number of series.
            horizons: Ticks ahead. A horizon uses lags from its own length on, so that what followed is known.
            last: The largest lag; at least the longest horizon plus ``TAKE``.
            gains: One forecast per gain, in (0, 1).
        """
        if last < max(horizons) + TAKE:
            raise ValueError(f"last is {last}; {TAKE} analogues {max(horizons)} ticks ahead need more lags than that")
        self.width = 2 * len(gains)
        self._horizons, self._last, self._gains = horizons, last, gains
        self._settled = last + 1.0 / min(gains)
        self._rates = _rates(gains, math.ceil(self._settled) + last, last)
        self._ahead = np.repeat(np.array(horizons, dtype=np.intp)[None], len(gains), axis=0)
        self._distances: Array = np.full((len(gains), rows, last), FAR, dtype=np.float32)
        self._chosen: Indexes = np.full((rows, len(gains), len(horizons), TAKE), last, dtype=np.intp)
        self._weights: Array = np.zeros((rows, len(gains), len(horizons), TAKE), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series; those there already keep their state."""
        more = rows - len(self._weights)
        gains, span = len(self._gains), self._last
        shape = (more, *self._weights.shape[1:])
        fresh = np.full((gains, more, span), FAR, dtype=np.float32)
        self._distances = np.concatenate([self._distances, fresh], axis=1)
        self._chosen = np.concatenate([self._chosen, np.full(shape, span, dtype=np.intp)])
        self._weights = np.concatenate([self._weights, np.zeros(shape, dtype=np.float32)])

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._distances[:, row] = FAR
        self._chosen[row] = self._last
        self._weights[row] = 0.0

    def step(self, rows: Rows, history: Array, outcomes: Array, counts: Indexes, numbers: Indexes) -> Array:
        """Take in one tick and forecast.

        Args:
            rows: The series that ticked, n of them.
            history: Their values in which likeness is sought, newest first, shape (n, > last); unknown ones ``FAR``.
            outcomes: The values to forecast, in the same places; the same array unless they are means of the others.
            counts: Values each had before this tick, shape (n,).
            numbers: The series' row numbers, shape (n,).

        Returns:
            Predictions of shape (n, horizons, width); the present value where nothing is known to look alike.
        """
        self.learn(rows, history, counts, numbers)
        for k, gain in enumerate(self._gains):
            # What a small gain finds changes slowly: in a large table its lags are chosen anew every few ticks only.
            every = max(1, int(PATIENCE / gain)) if len(self._weights) > BUSY else 1
            due = ((counts + numbers) % every == 0) | (counts < YOUNG)
            if due.any():
                self._choose(rows if due.all() else numbers[due], slice(k, k + 1))
        return self._predict(rows, outcomes)

    def learn(self, rows: Rows, history: Array, counts: Indexes, numbers: Indexes, ticks: int = 1) -> None:
        """Take in ticks without forecasting, as one after the other would be.

        Args:
            rows: As of ``step``, and so are ``counts``, those before the first of the ticks, and ``numbers``.
            history: As of ``step`` at the last tick, shape (n, >= last + ticks).
            ticks: How many.
        """
        young = np.flatnonzero(counts < self._settled)
        distances, settled = self._distances[:, rows], len(young) < len(counts)
        infants = None
        if len(young):
            infants = _Young(self._distances[:, numbers[young]], self._rates, counts[young], ticks)
        nearer = np.empty_like(distances[0])
        for newest in range(ticks - 1, -1, -1):
            gaps = history[:, newest + 1 : newest + 1 + self._last] - history[:, newest : newest + 1]
            np.abs(gaps, out=gaps)
            for k, gain in enumerate(self._gains) if settled else ():
                np.subtract(gaps, distances[k], out=nearer)
                nearer *= np.float32(gain)
                distances[k] += nearer
            if infants is not None:
                infants.follow(gaps[young] if settled else gaps, newest)
        if not isinstance(rows, slice):  # else they were changed in place
            self._distances[:, rows] = distances
        if infants is not None:
            self._distances[:, numbers[young]] = infants.distances

    def predict(self, rows: Rows, outcomes: Array) -> Array:
        """Forecast from what was taken in, every lag chosen anew; argument and result as of ``step``."""
        self._choose(rows, slice(None))
        return self._predict(rows, outcomes)

    def _choose(self, rows: Rows, gains: slice) -> None:
        by_gain = self._distances[gains, rows]
        distances = by_gain.reshape(-1, self._last)  # each gain's series are like further series
        slacks = np.array([TOLERANCE * gain**0.5 for gain in self._gains[gains]], dtype=np.float32)
        slack = np.repeat(slacks, by_gain.shape[1])[:, None]
        best: Indexes | None = None
        scores: Array | None = None
        longer = self._last + 1
        for j in sorted(range(len(self._horizons)), key=lambda j: -self._horizons[j]):
            # A shorter horizon only adds lags below the longer one's: its best are among those and the longer's.
            first = self._horizons[j]
            more, distance = _smallest(distances[:, first - 1 : longer - 1], first)
            if best is not None and scores is not None:
                more, distance = np.concatenate([best, more], axis=1), np.concatenate([scores, distance], axis=1)
                kept = np.argpartition(distance, TAKE - 1, axis=1)[:, :TAKE]
                kept += (np.arange(len(distance)) * distance.shape[1])[:, None]
                more, distance = more.take(kept), distance.take(kept)
            best, scores, longer = more, distance, first
            least = np.minimum(np.minimum(*scores[:, :2].T), np.minimum(*scores[:, 2:].T))[:, None]
            likeness = np.square((least + slack) / (scores + slack))
            shape = (*by_gain.shape[:2], TAKE)
            self._chosen[rows, gains, j] = best.reshape(shape).swapaxes(0, 1)
            self._weights[rows, gains, j] = np.where(scores < FAR / 2, likeness, 0.0).reshape(shape).swapaxes(0, 1)

    def _predict(self, rows: Rows, outcomes: Array) -> Array:
        n = len(outcomes)
        # One array per analogue: numpy is quick along a long last axis, and slow along a short one.
        first = np.arange(0, n * outcomes.shape[1], outcomes.shape[1])[:, None, None]
        lags, weights = self._chosen[rows], self._weights[rows]
        flat, from_now = outcomes.ravel(), first - self._ahead
        after = [flat.take(lags[..., i] + from_now) for i in range(TAKE)]
        heavy = [np.ascontiguousarray(weights[..., i]) for i in range(TAKE)]
        total = heavy[0] + heavy[1] + heavy[2] + heavy[3]
        blind = total <= 0.0
        both = np.empty((*total.shape, 2), dtype=np.float32)
        mean = sum((value * weight for value, weight in zip(after, heavy, strict=True)), start=np.float32(0.0))
        both[..., 1] = mean / np.where(blind, np.float32(1.0), total)
        both[..., 0] = median_of_four(after, heavy)
        both[blind] = outcomes[:, :1][np.nonzero(blind)[0]]
        return np.ascontiguousarray(both.transpose(0, 2, 1, 3)).reshape(n, len(self._horizons), self.width)


class _Young:
    """Distances of young series over some ticks. At lags with few comparisons a distance is their plain mean.

    Attributes:
        distances: Shape (gains, n, lags).
    """

    def __init__(self, distances: Array, rates: Array, counts: Indexes, ticks: int) -> None:
        """Begin.

        Args:
            distances: Those of the series now.
            rates: See ``_rates``.
            counts: Values each had before the first tick.
            ticks: How many are to come.
        """
        self.distances = distances
        lags = distances.shape[2]
        # Lags that are compared for the first time: from 0 on, a step at rate 1 leads to the gap itself.
        for new in range(ticks):
            known = np.flatnonzero((counts + new > 0) & (counts + new <= lags))
            self.distances[:, known, counts[known] + new - 1] = 0.0
        first = rates.shape[1] - lags - counts - ticks + 1
        self._rates = sliding_window_view(rates, lags + ticks - 1, axis=1)[:, first]
        self._nearer = np.empty_like(distances)

    def follow(self, gaps: Array, newest: int) -> None:
        """Take in a tick: gaps of shape (n, lags); so many ticks follow."""
        np.subtract(gaps, self.distances, out=self._nearer)
        self._nearer *= self._rates[:, :, newest : newest + gaps.shape[1]]
        self.distances += self._nearer


def _rates(gains: tuple[float, ...], most: int, lags: int) -> Array:
    """Return how far each comparison moves a distance: a gain or, while there are few, 1 / their number.

    Args:
        gains: The gains.
        most: Largest number of comparisons made before.
        lags: How many lags there are, as many of which nothing may be known.

    Returns:
        Shape (gains, most + 1 + lags): for ``most`` comparisons made before down to none; then 0, for lags at which
        there is nothing to compare with.
    """
    share = 1.0 / np.arange(most + 1, 0, -1).astype(np.float32)
    known = np.maximum(np.array(gains, dtype=np.float32)[:, None], share)
    return np.concatenate([known, np.zeros((len(gains), lags), dtype=np.float32)], axis=1)


def _smallest(distances: Array, first: int) -> tuple[Indexes, Array]:
    """Return lags and values of the (up to) four smallest distances of lags from ``first`` on; quicker than sorting."""
    if distances.shape[1] <= TAKE:
        lags = np.arange(first, first + distances.shape[1])
        return np.tile(lags, (len(distances), 1)), distances.copy()
    left, line = distances.copy(), np.arange(len(distances))
    chosen = np.empty((len(distances), TAKE), dtype=np.intp)
    scores = np.empty((len(distances), TAKE), dtype=np.float32)
    for rank in range(TAKE):
        best = left.argmin(axis=1)
        chosen[:, rank], scores[:, rank] = best + first, left[line, best]
        left[line, best] = 2.0 * FAR
    return chosen, scores
