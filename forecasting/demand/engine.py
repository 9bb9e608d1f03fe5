"""The mixture of experts over many series at once: one state per series, stepped once per tick, never re-run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cotenant.forecasting.demand.analogues import YOUNG, Analogues
from cotenant.forecasting.demand.arrays import FAR, Array, Flags, Indexes, Rows, grown, span
from cotenant.forecasting.demand.calibration import Calibration, Said, surprised
from cotenant.forecasting.demand.choice import Choice
from cotenant.forecasting.demand.mixing import Gate, Hedge
from cotenant.forecasting.demand.restraint import Restraint
from cotenant.forecasting.types import LEVELS

_MEDIAN_OF = 30
_MEDIAN_EVERY = 4  # the series taking turns
_NOTES = 6
_TRUST = 0.5  # of the first weight goes to a trained expert that was the best in training
_MARGIN = 0.95  # what speaks first unless training says otherwise must have lost more than another by so much
_ANCHOR_TICKS = 10.0  # what is known beforehand counts as so many ticks in the mean of the whole past


@dataclass(frozen=True, slots=True)
class MixtureSettings:
    """What one mixture looks at.

    Attributes:
        horizons: Ticks ahead.
        last: Largest lag of the analogues, in ticks.
        gains: One kind of analogues per gain.
        averages: Gains of the exponentially weighted averages.
        first_span: How far a series may move before anything is known of its errors, in its units.
        gate_prior: How readily the gate opens: variance of its coefficients before anything was seen.
        most: The largest value possible.
        steps: Whether the series stands still between steps: then medians have no word of their own.
        resolution: Of the readings, in sizes of the series (see ``Moment``): less than that is no move.
    """

    horizons: tuple[int, ...]
    last: int = 128
    gains: tuple[float, ...] = (0.5, 0.3, 0.15)
    averages: tuple[float, ...] = (0.3, 0.1)
    first_span: float = 0.5
    gate_prior: float = 3.0
    most: float = 1.0
    steps: bool = False
    resolution: float = 0.01


@dataclass(frozen=True, slots=True)
class Moment:
    """What an expert is told at one tick about n series.

    Attributes:
        rows: Their numbers.
        history: Their values, newest first, shape (n, last + 1); ``FAR`` where there was none.
        counts: Values each had before this one, shape (n,).
        ages: Ticks since each began, shape (n,): more than ``counts`` once its unit was changed, or while it was still.
        simple: Predictions of the built-in experts, shape (n, horizons, simple experts): persistence, the averages,
            the sliding median, the mean of the whole past, then the analogues (weighted median and mean per gain).
        common: How many of these come before the analogues; they are the same for all horizons.
        sizes: What the unit of each series is worth, shape (n,): in it the level of a series says something.
    """

    rows: Indexes
    history: Array
    counts: Indexes
    ages: Indexes
    simple: Array
    common: int
    sizes: Array


class Expert(Protocol):
    """A further expert: trees, a recurrent net, or whatever has a state per series and is stepped once per tick.

    Attributes:
        name: For reports.
        width: Predictions per horizon.
        expected: Mean absolute errors in training on series it had not seen, in sizes, shape (4, horizons): its own,
            persistence's, the untrained mixture's, the sliding median's. None where that was not found out.
    """

    name: str
    width: int
    expected: Array | None

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series; those there already keep their state."""
        ...

    def clear(self, row: int) -> None:
        """Forget one series."""
        ...

    def step(self, moment: Moment) -> Array:
        """Take in one tick and return predictions of shape (n, horizons, width)."""
        ...


class SeriesMixture:
    """Experts, Hedge, gate, last word, restraint and calibration over the rows of one table. Not thread-safe.

    Built-in experts: persistence, exponentially weighted averages, sliding median, mean of the whole past, analogues.
    """

    def __init__(self, settings: MixtureSettings, rows: int, experts: Sequence[Expert] = (), outside: int = 0) -> None:
        """Make the state.

        Args:
            settings: What to look at.
            rows: Number of series.
            experts: Further experts, stepped with the built-in ones' predictions.
            outside: Number of predictions per horizon that a ``step`` may be given from elsewhere.
        """
        self.settings = settings
        self._experts = tuple(experts)
        horizons = len(settings.horizons)
        self._analogues = Analogues(rows, settings.horizons, last=settings.last, gains=settings.gains)
        self._simple = 3 + len(settings.averages) + self._analogues.width
        self.width = self._simple + sum(expert.width for expert in experts) + outside
        self._history: Array = np.full((rows, settings.last + 1), FAR, dtype=np.float32)
        self._averages: Array = np.zeros((rows, len(settings.averages)), dtype=np.float32)
        self._median: Array = np.zeros(rows, dtype=np.float32)
        self._past: Array = np.zeros((rows, 2), dtype=np.float32)  # sum and weight of the whole past
        self._counts: Indexes = np.zeros(rows, dtype=np.intp)
        self._since: Indexes = np.zeros(rows, dtype=np.intp)
        self._ages: Indexes = np.zeros(rows, dtype=np.intp)
        self._outside = outside
        self._sizes: Array = np.ones(rows, dtype=np.float32)
        self._known = next((i for i, expert in enumerate(self._experts) if expert.expected is not None), None)
        self._hedge = Hedge(rows, horizons, self.width, absentees=outside, trust=self._trust())
        self._choice = self._make_choice(rows)
        self._gate = Gate(rows, horizons, settings.gate_prior)
        self._restraint = Restraint(rows, horizons, settings.steps)
        self._calibration = Calibration(rows, horizons, settings.first_span)
        # What was said for each horizon, until its moment comes: experts, value, mean, median, gated, point, state, q.
        self._said = [
            np.zeros((rows, ahead, self.width + _NOTES + len(LEVELS) - 1), dtype=np.float32)
            for ahead in settings.horizons
        ]
        self._quantiles: Array = np.zeros((rows, horizons, len(LEVELS)), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series; those there already keep their state."""
        self._history = grown(self._history, 0, rows, FAR)
        for name in ("_averages", "_median", "_past", "_quantiles"):
            setattr(self, name, grown(getattr(self, name), 0, rows, 0.0))
        more = np.zeros(rows - len(self._counts), dtype=np.intp)
        for name in ("_counts", "_since", "_ages"):
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self._said = [grown(said, 0, rows, 0.0) for said in self._said]
        self._sizes = grown(self._sizes, 0, rows, 1.0)
        self._choice.resize(rows)
        self._restraint.resize(rows)
        self._analogues.resize(rows)
        self._hedge.resize(rows)
        self._gate.resize(rows)
        self._calibration.resize(rows)
        for expert in self._experts:
            expert.resize(rows)

    def clear(self, row: int, expected: float | None = None, first_span: float | None = None) -> None:
        """Forget one series. What is known of the next one in its place: its usual value and how far it moves."""
        self._history[row] = FAR
        self._averages[row] = self._median[row] = 0.0
        self._past[row] = 0.0 if expected is None else (expected * _ANCHOR_TICKS, _ANCHOR_TICKS)
        self._counts[row] = self._since[row] = self._ages[row] = 0
        self._analogues.clear(row)
        self._hedge.clear(row)
        self._gate.clear(row)
        self._choice.clear(row)
        self._restraint.clear(row)
        for expert in self._experts:
            expert.clear(row)
        self._calibration.clear(row, first_span)

    def measure(self, row: int, size: float) -> None:
        """Tell what the unit of a series is worth; 1 unless told. Stays so until told otherwise."""
        self._sizes[row] = size

    def rescale(self, row: int, size: float) -> None:
        """Forget all of a series but its age: its values come in another unit from now on."""
        age = self._ages[row]
        self.clear(row)
        self._ages[row] = age
        self.measure(row, size)

    def rest(self, rows: Indexes) -> None:
        """A tick passed in which these series had nothing new to say."""
        self._ages[rows] += 1

    def interrupt(self, rows: Indexes) -> None:
        """Time was skipped in these series: what was said before is not judged."""
        self._since[rows] = 0
        self._restraint.interrupt(rows)

    def counts(self, rows: Indexes) -> Indexes:
        """Return how many values each series has had."""
        return self._counts[rows]

    def doubted(self, rows: Indexes) -> Indexes:
        """Return those of the rows whose behaviour may have changed."""
        return self._calibration.doubted(rows)

    def jumps(self, rows: Indexes) -> Array:
        """Return by how much each of the rows last moved as it never had."""
        return self._calibration.jumps(rows)

    def doubt(self, rows: Indexes, jumps: Array) -> None:
        """Tell that these series moved by ``jumps`` as they never had: their intervals are wide for some ticks."""
        self._calibration.doubt(rows, jumps)

    def quantiles(self, rows: Indexes) -> Array:
        """Return the last forecasts, shape (n, horizons, levels): ordered, within [0, most]."""
        return self._quantiles[rows]

    def step(self, rows: Indexes, values: Array, truth: Array | None = None, outside: Array | None = None) -> Array:
        """Take in one value per series and forecast.

        Args:
            rows: Distinct row numbers, n of them.
            values: Their values, shape (n,), finite.
            truth: What forecasts are judged by and what persistence repeats, shape (n,); ``values`` unless these are
                means over a tick while single readings are to be forecast.
            outside: Predictions from elsewhere, shape (n, horizons, outside), NaN where there are none; None = none.

        Returns:
            The point forecasts, shape (n, horizons).
        """
        where = span(rows)
        truth = values if truth is None else truth
        counts = self._counts[where].copy()
        history = np.concatenate([values[:, None], self._history[where, :-1]], axis=1)
        self._history[where] = history
        self._wonder(rows, where, truth)
        self._judge(rows, where, truth)
        simple = self._simple_experts(rows, where, history, truth)
        common = self._simple - self._analogues.width
        moment = Moment(rows, history, counts, self._ages[where].copy(), simple, common, self._sizes[where])
        parts = [simple, *(self._possible(expert.step(moment), truth) for expert in self._experts)]
        if outside is not None:
            parts.append(outside.astype(np.float32))
        predictions = np.concatenate(parts, axis=2) if len(parts) > 1 else simple
        heard = self._hedge.heard(where, predictions)
        mean, median = heard.mean(), heard.median()
        gated = np.clip(self._gate.point(where, truth, mean, median), 0.0, self.settings.most)
        candidates = self._candidates(predictions, gated, median)
        wanted = np.clip(self._choice.point(where, candidates), 0.0, self.settings.most)
        resolution = np.float32(self.settings.resolution) / self._sizes[where]
        self._restraint.watch(where, truth, resolution)
        point = self._restraint.point(where, truth, resolution, wanted)
        states = self._calibration.states(truth, heard.spread(point))
        around = self._around(rows, states, point, truth)
        for j, ahead in enumerate(self.settings.horizons):
            said = np.full((len(rows), self._said[j].shape[2]), np.nan, dtype=np.float32)  # NaN: nothing from outside
            said[:, : predictions.shape[2]] = predictions[:, j]
            for i, note in enumerate((truth, mean[:, j], median[:, j], gated[:, j], point[:, j])):
                said[:, self.width + i] = note
            said[:, self.width + _NOTES - 1] = states[:, j]
            said[:, self.width + _NOTES :] = around[:, j]
            self._said[j][rows, counts % ahead] = said
        self._write(where, point, around)
        self._counts[where] += 1
        self._since[where] += 1
        self._ages[where] += 1
        return point

    def _possible(self, said: Array, truth: Array) -> Array:
        """Return what an expert said within what can be; what is no number, as if it had said that all stays.

        Weights and gates would never forget it otherwise, and no forecast of the series could be used any more.
        """
        heard = np.where(np.isfinite(said), said, truth[:, None, None])
        possible: Array = np.clip(heard, 0.0, self.settings.most).astype(np.float32)
        return possible

    def glance(self, rows: Indexes, truth: Array) -> None:
        """Put the intervals last forecast anew around what is read now (n,), between two ticks."""
        states = np.empty((len(rows), len(self._said)), dtype=np.intp)
        point = np.empty(states.shape, dtype=np.float32)
        for j, ahead in enumerate(self.settings.horizons):
            said = self._said[j][rows, (self._counts[rows] - 1) % ahead, self.width : self.width + _NOTES]
            point[:, j], states[:, j] = said[:, -2], said[:, -1]
        self._write(rows, point, self._around(rows, states, point, truth))

    def _around(self, rows: Indexes, states: Indexes, point: Array, truth: Array) -> Array:
        around = np.clip(self._calibration.quantiles(rows, states, point, truth), 0.0, self.settings.most)
        if self.settings.steps:  # what is held may stay, however surely an expert foresees that it goes
            np.maximum(around[:, :, 1:], truth[:, None, None], out=around[:, :, 1:])
        return around

    def _write(self, where: Rows, point: Array, around: Array) -> None:
        self._quantiles[where, :, 0], self._quantiles[where, :, 1] = around[:, :, 0], point
        self._quantiles[where, :, 2:] = around[:, :, 1:]

    def _wonder(self, rows: Indexes, where: Rows, truth: Array) -> None:
        """Doubt the series that are far from where they were expected, be it after a hole."""
        self._calibration.settle(where)
        if self.settings.horizons[0] == 1:
            said = self._said[0][where, 0]
            point, quantiles = said[:, self.width + _NOTES - 2], said[:, self.width + _NOTES :]
            odd = surprised(point, quantiles, truth) & (self._counts[where] > 0)
            self._calibration.doubt(rows[odd], np.abs(truth - point)[odd])

    def _judge(self, rows: Indexes, where: Rows, truth: Array) -> None:
        counts, since = self._counts[where], self._since[where]
        for j, ahead in enumerate(self.settings.horizons):
            ripe: Flags = since >= ahead
            if not ripe.any():
                continue
            whole = bool(ripe.all())
            numbers = rows if whole else rows[ripe]
            place: Rows = where if whole else numbers
            now = truth if whole else truth[ripe]
            said = self._said[j][numbers, (counts if whole else counts[ripe]) % ahead]
            experts = said[:, : self.width]
            then, mean, median, gated, point, states = said[:, self.width : self.width + _NOTES].T
            self._hedge.learn(place, j, np.abs(experts - now[:, None]))
            self._gate.learn(place, j, then=then, mean=mean, median=median, now=now)
            candidates = self._candidates(experts[:, None], gated[:, None], median[:, None])[:, 0]
            self._choice.learn(place, j, np.abs(candidates - now[:, None]))
            self._restraint.learn(place, j, said=point, then=then, now=now)
            quantiles = said[:, self.width + _NOTES :]
            self._calibration.learn(numbers, j, Said(states.astype(np.intp), point, quantiles), now)

    def _trust(self) -> Array | None:
        """Return how much of the first weight goes to the known expert, (horizons, experts): where it was the best."""
        if self._known is None:
            return None
        trust = np.zeros((len(self.settings.horizons), self.width), dtype=np.float32)
        own, *others = self._expected()
        trust[:, self._place()] = np.where(own < _MARGIN * np.minimum.reduce(others), _TRUST, 0.0)
        return trust

    def _make_choice(self, rows: int) -> Choice:
        horizons, steps = self.settings.horizons, self.settings.steps
        usual = 0 if steps else 1  # between steps nothing beats the last value
        count = (2 if steps else 4) + (self._known is not None)
        incumbents = np.full(len(horizons), usual, dtype=np.intp)
        if self._known is not None:
            own, persistence, mixture, sliding = self._expected()
            # In the order of the candidates. What the experts' median loses was not found out.
            losses = (
                [persistence, mixture, own]
                if steps
                else [persistence, mixture, np.full_like(own, np.inf), sliding, own]
            )
            lost = np.stack(losses)
            lost[usual] *= _MARGIN
            incumbents = lost.argmin(axis=0)
        return Choice(rows, horizons, count, incumbents, steps)

    def _expected(self) -> Array:
        expected = None if self._known is None else self._experts[self._known].expected
        if expected is None:
            raise ValueError("expected: None is not accepted; nothing is known of the expert from training")
        return expected

    def _place(self) -> int:
        """Return the place of the known expert among all predictions."""
        return self._simple + sum(expert.width for expert in self._experts[: self._known])

    def _candidates(self, predictions: Array, gated: Array, median: Array) -> Array:
        """Return what may have the last word, shape (n, horizons, candidates)."""
        candidates = [predictions[:, :, 0], gated]
        if not self.settings.steps:
            candidates += [median, predictions[:, :, 1 + len(self.settings.averages)]]
        if self._known is not None:
            candidates.append(predictions[:, :, self._place()])
        return np.stack(candidates, axis=2)

    def _simple_experts(self, rows: Indexes, where: Rows, history: Array, truth: Array) -> Array:
        n, horizons, counts = len(rows), len(self.settings.horizons), self._counts[where]
        values = history[:, 0]
        gains = np.maximum(np.array(self.settings.averages, dtype=np.float32), 1.0 / (counts[:, None] + 1.0))
        averages = self._averages[where] + gains.astype(np.float32) * (values[:, None] - self._averages[where])
        self._averages[where] = averages
        self._past[where, 0] += values
        self._past[where, 1] += 1.0
        self._refresh_median(rows, history, counts)
        simple = np.empty((n, horizons, self._simple), dtype=np.float32)
        simple[:, :, 0] = truth[:, None]
        simple[:, :, 1 : 1 + averages.shape[1]] = averages[:, None, :]
        simple[:, :, 1 + averages.shape[1]] = self._median[where][:, None]
        simple[:, :, 2 + averages.shape[1]] = (self._past[where, 0] / self._past[where, 1])[:, None]
        simple[:, :, 3 + averages.shape[1] :] = self._analogues.step(where, history, history, counts, rows)
        return simple

    def _refresh_median(self, rows: Indexes, history: Array, counts: Indexes) -> None:
        due = ((counts + rows) % _MEDIAN_EVERY == 0) | (counts < YOUNG)
        if not due.any():
            return
        width = min(_MEDIAN_OF, history.shape[1])
        ranked = np.sort(history[due, :width], axis=1)  # what is not known yet is FAR and comes last
        middle = (np.minimum(counts[due] + 1, width) - 1) // 2
        self._median[rows[due]] = ranked[np.arange(len(ranked)), middle]
