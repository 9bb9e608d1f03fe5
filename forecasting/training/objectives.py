"""How good a way of training is, on groups that it has not seen: for ``cotenant evaluate`` and ``cotenant tune``.

Never a random split: pairs of one model family, and series of one recording, resemble each other, and whoever trains on
one and tests on the other measures how well a model remembers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.demand.engine import Expert, MixtureSettings
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.observations import Observation, merged
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.training.demand_artefact import DemandArtefact, Kind
from cotenant.forecasting.training.demand_fit import WARM_UP, Examples, collect, unbroken
from cotenant.forecasting.training.demand_replay import Floats, Replayed, ewma, memory_units, replay
from cotenant.forecasting.training.scores import RMSE, FoldScore
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, predict_sets

Groups = Literal["family", "job"]
FitPairs = Callable[[Sequence[Observation]], InterferenceModels]
FitDemand = Callable[[Examples], Mapping[Kind, DemandArtefact]]

MAE, COVERAGE, WIDTH = "MAE", "coverage of the 80 % interval", "width of the 80 % interval"
RELATIVE = "MAE / persistence"
CONSTANT, RULE, EXCESS = "constant mean", "utilisation rule", "half of the excess"
TRAINED, PERSISTENCE, EWMA, UNTRAINED = "trained mixture", "persistence", "EWMA", "untrained mixture"
NO_LOSS = 0.0005  # of the largest value (memory: of a unit): added to both errors of a ratio, below it nobody cares
_GAINS: tuple[float, ...] = tuple(np.arange(0.05, 1.01, 0.05).tolist())
_BEYOND = 5  # values a series must have beyond what one forecast needs, to be scored


# ---------------------------------------- interference


def interference_folds(
    observations: Sequence[Observation], fit: FitPairs, *, groups: Groups = "family", seed: int = 0
) -> Iterator[FoldScore]:
    """Hold out one family or job after the other: every set that touches it leaves training and is scored, both ways.

    Args:
        observations: What was measured; jobs without fingerprint are left out, larger sets are not scored.
        fit: Trains on what it is given.
        groups: What is held out; a job of no known family is a family of its own.
        seed: Of the order of the groups; nothing else is random.

    Raises:
        ValueError: There are fewer than two groups, or too little is left to train on without one.
    """
    members = group_names(observations, groups)
    order = shuffled(sorted(set(members.values())), seed)
    if len(order) < 2:
        raise ValueError(
            f"observations: {len(order)} {groups} in them is not accepted; give at least 2 to hold one out"
        )
    for held in order:
        outside, inside = without_group(observations, members, {held})
        pairs = scored_pairs(inside)
        if not pairs:
            continue
        if not outside:
            raise ValueError(f"without {groups} {held!r} no measured pair is left to train on")
        try:
            models = fit(outside)
        except ValueError as error:
            raise ValueError(f"without {groups} {held!r}: {error}") from error
        yield judge_pairs(held, pairs, answers_to(pairs, models.predictor()), outside)


def group_names(observations: Sequence[Observation], groups: Groups) -> dict[str, str]:
    """The group of every job, by fingerprint."""
    found: dict[str, str] = {}
    for each in observations:
        for job in (each.focal, *each.others):
            if job.fingerprint:
                alone = f"only {job.fingerprint}"
                found[job.fingerprint] = job.fingerprint if groups == "job" else job.family or alone
    return found


def without_group(
    observations: Sequence[Observation], members: Mapping[str, str], held: Container[str]
) -> tuple[list[Observation], list[Observation]]:
    """Part the observations into those that touch no held-out group and those that do; unnamed jobs are left out."""
    outside: list[Observation] = []
    inside: list[Observation] = []
    for each in observations:
        if each.key is not None:
            names = [members[job.fingerprint] for job in (each.focal, *each.others)]
            (inside if any(name in held for name in names) else outside).append(each)
    return outside, inside


def scored_pairs(observations: Sequence[Observation]) -> list[Observation]:
    """The ordered pairs among the observations, each once: repeated measurements are put together."""
    found: dict[object, list[Observation]] = {}
    for each in observations:
        if len(each.others) == 1:
            found.setdefault(each.key, []).append(each)
    return [
        Observation(same[0].gpu_type, same[0].focal, same[0].others, one.throughput, one.low, one.high, one.seconds)
        for same in found.values()
        for one in (merged(same),)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PairAnswers:
    """What was predicted for a list of measured pairs, and what was measured; all of shape (pairs,)."""

    low: Floats
    mid: Floats
    high: Floats
    truth: Floats

    @property
    def errors(self) -> Floats:
        """How far off every prediction is."""
        return np.abs(self.truth - self.mid)


def answers_to(pairs: Sequence[Observation], predictor: InterferencePredictor) -> PairAnswers:
    """Predict every measured pair."""
    said = predict_sets(predictor, [(each.gpu_type, (each.focal, each.others[0])) for each in pairs])
    low, mid, high = (np.array([getattr(answer, name) for answer, _ in said]) for name in ("low", "mid", "high"))
    truth = np.array([min(1.0, each.throughput) for each in pairs])
    return PairAnswers(low, mid, high, truth)


def judge_pairs(
    group: str, pairs: Sequence[Observation], answers: PairAnswers, trained_on: Sequence[Observation]
) -> FoldScore:
    """Score predictions, and what is simpler, on measured pairs that the models have not seen.

    Args:
        group: What is held out.
        pairs: What is predicted.
        answers: The predictions.
        trained_on: What the constant baseline is learnt from.
    """
    seen = np.array([min(1.0, each.throughput) for each in scored_pairs(trained_on)])
    excess = np.array([1.0 - _excess(each.focal, each.others[0]) / 2.0 for each in pairs])
    inside = (answers.low - 1e-9 <= answers.truth) & (answers.truth <= answers.high + 1e-9)
    metrics = {
        MAE: float(np.mean(answers.errors)),
        RMSE: float(np.sqrt(np.mean(answers.errors**2))),
        COVERAGE: float(np.mean(inside)),
        WIDTH: float(np.mean(answers.high - answers.low)),
    }
    baselines = {
        CONSTANT: float(np.mean(np.abs(answers.truth - (seen.mean() if len(seen) else 1.0)))),
        RULE: float(np.mean(answers_to(pairs, UtilisationRule()).errors)),
        EXCESS: float(np.mean(np.abs(answers.truth - excess))),
    }
    return FoldScore(group, len(pairs), metrics, baselines)


def _excess(job: DemandProfile, other: DemandProfile) -> float:
    """What both want beyond the GPU, in [0, 1]; a job nothing is known of wants all of it."""
    return min(1.0, max(0.0, job.util_mean + other.util_mean - 1.0))


# ---------------------------------------- demand


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """An uninterrupted stretch of a series, with what does not depend on training."""

    series: int
    values: Floats
    units: Floats
    untrained: Replayed


class DemandHoldOut:
    """Recorded series made ready for being held out: what no training changes is computed once.

    Attributes:
        groups: The groups that can be scored, in order of name.
        examples: What experts learn from, of all series.
    """

    def __init__(self, series: Sequence[ValueSeries], settings: MixtureSettings, *, memory: bool = False) -> None:
        """Run the untrained mixture over the series.

        Args:
            series: Recorded series; those with the same ``source`` stay together. NaN is a gap.
            settings: Of the mixture that is trained for.
            memory: Whether they are memory in bytes, which the mixture sees in units of how a job begins.

        Raises:
            ValueError: No series is long enough to learn from, or fewer than two groups are.
        """
        self._series, self._settings, self._memory = tuple(series), settings, memory
        pieces = [(i, piece) for i, each in enumerate(series) for piece in unbroken(each.values)]
        units = [memory_units(piece) if memory else np.ones(len(piece)) for _, piece in pieces]
        found = collect([piece for _, piece in pieces], settings, units)
        self.examples = replace(found, origins=[pieces[i][0] for i in found.origins])
        said = replay([piece for _, piece in pieces], settings, units=units)
        self._parts = [_Part(i, piece, unit, each) for (i, piece), unit, each in zip(pieces, units, said, strict=True)]
        shortest = WARM_UP + max(settings.horizons) + _BEYOND
        self.groups = sorted({series[part.series].source for part in self._parts if len(part.values) >= shortest})
        if len(self.groups) < 2:
            raise ValueError(
                f"series: {len(self.groups)} of their sources with {shortest} values in a row is not accepted; "
                "give at least 2 to hold one out"
            )

    def folds(self, train: FitDemand, *, seed: int = 0) -> Iterator[FoldScore]:
        """Hold out one group after the other, in an order drawn by the seed.

        Raises:
            ValueError: Nothing is left to train on without one.
        """
        for held in shuffled(self.groups, seed):
            yield self.score({held}, train)

    def score(self, held: Container[str], train: FitDemand, among: Container[str] | None = None) -> FoldScore:
        """Train without some groups and score what comes out of it on them, taken together.

        Args:
            held: The groups to score on.
            train: Trains experts on what it is given.
            among: The groups that may be trained on, as far as they are not held out; None = all.

        Raises:
            ValueError: Nothing is left to train on.
        """
        names = [each.source for each in self._series]
        inside = {i for i, name in enumerate(names) if name in held}
        outside = {i for i, name in enumerate(names) if name not in held and (among is None or name in among)}
        title = ", ".join(name for name in self.groups if name in held)
        try:
            artefacts = train(self.examples.of(outside))
        except ValueError as error:
            raise ValueError(f"without {title!r}: {error}") from error
        parts = [part for part in self._parts if part.series in inside]
        horizons = self._settings.horizons

        def experts(rows: int) -> list[Expert]:
            return [each.expert(horizons, rows) for each in artefacts.values()]

        said = replay([part.values for part in parts], self._settings, experts, [part.units for part in parts])
        learnt_from = [part for part in self._parts if part.series in outside]
        return _judge(title, horizons, list(zip(parts, said, strict=True)), learnt_from)


def demand_folds(
    series: Sequence[ValueSeries],
    settings: MixtureSettings,
    train: FitDemand,
    *,
    memory: bool = False,
    seed: int = 0,
) -> Iterator[FoldScore]:
    """Leave one recording out after the other: all series of the same ``source`` (file, host, job) together.

    Scored are the gated mixture with the experts that were trained, against the untrained mixture, persistence (the
    last value) and an exponentially weighted average whose gain is the best on the training series. Metrics per
    horizon: MAE in the unit of the series, the ratio to persistence of the series where that is worst, and coverage of
    the 95th percentile; over all horizons ``MAE / persistence``.

    Args:
        series: Recorded series at the mixture's ticks: utilisation in [0, 1], or memory in bytes.
        settings: Of the mixture.
        train: Trains experts: ``lambda examples: fit_demand(examples, settings, kinds, options)``.
        memory: Whether the series are memory.
        seed: Of the order of the groups.

    Raises:
        ValueError: Fewer than two sources have a series long enough.
    """
    yield from DemandHoldOut(series, settings, memory=memory).folds(train, seed=seed)


def _judge(
    title: str, horizons: Sequence[int], parts: Sequence[tuple[_Part, Replayed]], learnt_from: Sequence[_Part]
) -> FoldScore:
    metrics: dict[str, float] = {}
    baselines: dict[str, float] = {}
    relative: dict[str, list[float]] = {}
    rows = 0
    for j, ahead in enumerate(horizons):
        found = _at_horizon(parts, j, ahead, _best_gain(learnt_from, ahead))
        rows += found.rows
        metrics[f"{MAE}, {ahead} ahead"] = found.mae[TRAINED]
        metrics[f"worst series / persistence, {ahead} ahead"] = found.worst_series
        metrics[f"p95 coverage, {ahead} ahead"] = found.coverage
        for name, mae in found.mae.items():
            if name != TRAINED:
                baselines[f"{name}, {ahead} ahead"] = mae
            relative.setdefault(name, []).append((mae + found.no_loss) / (found.mae[PERSISTENCE] + found.no_loss))
    metrics[RELATIVE] = float(np.mean(relative[TRAINED]))
    for name in (EWMA, UNTRAINED):
        baselines[f"{name}, {RELATIVE}"] = float(np.mean(relative[name]))
    return FoldScore(title, rows, metrics, baselines)


@dataclass(frozen=True, slots=True)
class _Horizon:
    """Errors at one horizon: mean absolute ones by method, and what else is told of the trained mixture."""

    rows: int
    mae: Mapping[str, float]
    worst_series: float
    coverage: float
    no_loss: float


def _at_horizon(parts: Sequence[tuple[_Part, Replayed]], j: int, ahead: int, gain: float) -> _Horizon:
    errors: dict[str, dict[int, list[Floats]]] = {}
    covered, no_loss = [np.zeros(0, dtype=np.bool_)], 0.0
    for part, said in parts:
        if len(part.values) < WARM_UP + ahead + _BEYOND:
            continue
        ticks = slice(WARM_UP - 1, len(part.values) - ahead)
        truth = part.values[WARM_UP - 1 + ahead :]
        guesses = {
            TRAINED: said.points[ticks, j],
            PERSISTENCE: part.values[ticks],
            EWMA: ewma(part.values, gain)[ticks],
            UNTRAINED: part.untrained.points[ticks, j],
        }
        for name, guess in guesses.items():
            errors.setdefault(name, {}).setdefault(part.series, []).append(np.abs(guess - truth))
        covered.append(truth <= said.p95[ticks, j])
        no_loss = max(no_loss, NO_LOSS * float(part.units.max()))
    series = {name: {number: np.concatenate(each) for number, each in found.items()} for name, found in errors.items()}
    ratios = [
        (float(series[TRAINED][number].mean()) + no_loss) / (float(stayed.mean()) + no_loss)
        for number, stayed in series[PERSISTENCE].items()
    ]
    hits = np.concatenate(covered)
    mae = {name: float(np.concatenate(list(found.values())).mean()) for name, found in series.items()}
    return _Horizon(len(hits), mae, max(ratios), float(hits.mean()), no_loss)


def _best_gain(parts: Sequence[_Part], ahead: int) -> float:
    """The gain of an exponentially weighted average that misses least on these series."""

    def missed(gain: float) -> float:
        errors = (
            np.abs(ewma(part.values, gain)[:-ahead] - part.values[ahead:])[WARM_UP - 1 :]
            for part in parts
            if len(part.values) > WARM_UP + ahead
        )
        return math.fsum(float(each.sum()) for each in errors)

    return min(_GAINS, key=missed)


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """The names in an order drawn by the seed."""
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
