"""The learned interference predictor: one model per GPU type, what was measured on this cluster, and fallbacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from cotenant.forecasting.interference.composition import Wanted, composed
from cotenant.forecasting.interference.lessons import lessons
from cotenant.forecasting.interference.model import LEAST, PairModel, PairPrediction
from cotenant.forecasting.interference.observations import (
    INTERVAL_SIGMAS,
    REPLACES_AFTER_S,
    Measured,
    Observation,
    SetKey,
    features,
    jobs_of,
    merged,
    most_informative,
    pairs_of,
    set_key,
)
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.interference.table import BANDWIDTH, UTIL
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction

OTHER_TYPE_WIDENS = 1.5  # the interval, on a GPU type without measurements; an assumption
MOST_EVIDENCE = 400  # measured pairs that the model of a type learns from: a solve costs their number cubed
ENOUGH_OF_A_TYPE = 12  # measured pairs, after which a type counts as measured
LEAST_HALF_WIDTH = 0.01  # of the interval around a measured throughput
PREDICTION_ERROR = (
    0.08  # standard deviation of a predicted n, a family unseen (benchmarks/interference.py: own, one fold)
)
RUN_ERROR = 0.05  # of n measured for seconds, against the same set in another run
REMEMBERED = 4096  # answers
UNKNOWN_AT_BEST = 0.1  # utilisation that a job nothing is known of has at best; at worst it is 1
Member = TypeVar("Member")
_ALONE = ThroughputPrediction(1.0, 1.0, 1.0, "alone on the GPU")


class LearnedInterference:
    """Predicts n from models fitted to measured pairs (see ``InterferencePredictor``). Immutable; pure.

    What is used, best first: the very set measured together for 60 s; the pairs measured on this cluster, in closed
    form; the model of the GPU type; the model of all types, with a wider interval; the utilisation rule.

    More than two jobs are composed of their pairs (``composition``): neither more demand nor a further neighbour ever
    predicts less slowdown.

    Args:
        models: One model per GPU type, over features that profiles have.
        pooled: One model over all types, for types that have none; None falls back to the utilisation rule.
        evidence: What was measured on this cluster.

    Raises:
        ValueError: A model does not know utilisations.
    """

    name = "learned-interference"

    def __init__(
        self,
        models: Mapping[str, PairModel],
        pooled: PairModel | None = None,
        evidence: Sequence[Observation] = (),
    ) -> None:
        for model in (*models.values(), *([pooled] if pooled else [])):
            if UTIL not in model.table.names:
                raise ValueError(f"models: one without {UTIL!r} is not accepted; it has {', '.join(model.table.names)}")
        self.models = dict(models)
        self.pooled = pooled
        self.evidence = tuple(evidence)
        self._rule = UtilisationRule()
        self._measured = _by_set(self.evidence)
        self._counts: dict[str, int] = {}
        self._answers: dict[tuple[str | DemandProfile, ...], tuple[ThroughputPrediction, ...]] = {}
        self._informed = {
            gpu_type: self._inform(gpu_type) for gpu_type in {*self.models, *(each.gpu_type for each in self.evidence)}
        }

    def with_evidence(self, observations: Sequence[Observation]) -> LearnedInterference:
        """The predictor after further measurements: one solve, tens of milliseconds for hundreds of pairs.

        Of more than ``MOST_EVIDENCE`` pairs of a GPU type the most informative teach the model; the others still
        replace the prediction of the very set they were measured in.
        """
        return LearnedInterference(self.models, self.pooled, (*self.evidence, *observations))

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """Return one prediction per member, in order. Pure: same input, same output.

        The last few thousand answers are remembered: placement asks for the same sets again and again.
        """
        question: tuple[str | DemandProfile, ...] = (gpu_type, *members)
        answer = self._answers.get(question)
        if answer is None:
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            answer = self._answers[question] = tuple(self.predict_many([members], gpu_type)[0])
        return answer

    def predict_many(
        self, candidates: Sequence[Sequence[DemandProfile]], gpu_type: str
    ) -> list[list[ThroughputPrediction]]:
        """Predict many candidate sets at once, which costs far less per set than one by one.

        Args:
            candidates: Sets of jobs; a set may be empty or of one member.
            gpu_type: The GPU type of all of them.

        Returns:
            Per set one prediction per member, in order.
        """
        model = self._informed.get(gpu_type) or self.pooled
        if model is None:
            return [self._by_rule(members, gpu_type) for members in candidates]
        batch = self._batch(model, candidates, gpu_type)
        return [[self._member(batch, members, row) for row in range(len(members))] for members in batch.sets]

    def explain(self, members: Sequence[DemandProfile], gpu_type: str) -> list[dict[str, float]]:
        """What drives each member's slowdown: throughput lost to each cause (negative: won).

        ``neighbours' util``, ``neighbours' membw_util``: what would be won if the neighbours had none of it; ``own``
        and ``neighbour``: known effects of this very job and of these very neighbours. Counterfactuals overlap: they
        need not add up. Empty where nothing learnt applies.
        """
        model = self._informed.get(gpu_type) or self.pooled
        if model is None or len(members) < 2:
            return [{} for _ in members]
        # All counterfactuals are predicted at once: users wait for the answer, and the scheduler with them.
        others = [_others(members, row) for row in range(len(members))]
        known = [name for name in (UTIL, BANDWIDTH) if name in model.table.names]
        changed = [
            [member, *(change(each) for each in beside)]
            for member, beside in zip(members, others, strict=True)
            for change in (_nameless, *(_WITHOUT[name] for name in known))
        ]
        base, *found = self.predict_many([members, *changed], gpu_type)
        mids = np.array([each[0].mid for each in found]).reshape(len(members), 1 + len(known))
        causes: list[dict[str, float]] = []
        for row, member in enumerate(members):
            gains = mids[row, 1:] - mids[row, 0]
            lost = {f"neighbours' {name}": float(gain) for name, gain in zip(known, gains, strict=True)}
            pairs = model.predict(
                jobs_of([member, *others[row]], model.table.names),
                np.zeros(len(others[row]), dtype=np.intp),
                np.arange(1, len(members), dtype=np.intp),
            )
            lost["own"] = -float(np.mean(pairs.parts["own"]))
            lost["neighbour"] = -float(np.sum(pairs.parts["neighbour"]))
            lost["total"] = 1.0 - base[row].mid
            causes.append(lost)
        return causes

    def _inform(self, gpu_type: str) -> PairModel | None:
        """The model of this type after this cluster's measured pairs."""
        model = self.models.get(gpu_type, self.pooled)
        if model is None:
            return None
        names = model.table.names
        here = [each for each in self.evidence if each.gpu_type == gpu_type]
        rows = pairs_of(here, names)
        self._counts[gpu_type] = len(rows)
        informed = model.with_evidence(most_informative(rows, MOST_EVIDENCE)) if len(rows) else model
        taught = self._lessons(informed, [each for each in here if len(each.others) > 1 and each.key], gpu_type)
        if not taught:
            return informed
        return model.with_evidence(most_informative(pairs_of([*here, *taught], names), MOST_EVIDENCE))

    def _lessons(self, model: PairModel, sets: Sequence[Observation], gpu_type: str) -> list[Observation]:
        """What larger sets teach of pairs that were not measured."""
        ids, table = model.table.jobs.ids, model.table
        known = {(ids[focal], ids[other]) for focal, other in zip(table.focal, table.other, strict=True)}
        batch = self._batch(model, [[each.focal, *each.others] for each in sets], gpu_type)
        found: list[Observation] = []
        for each, members in zip(sets, batch.sets, strict=True):
            pairs = self._beside_each(batch, members, 0)
            expected = composed(_wanted(each.focal), [_wanted(other) for other in each.others], pairs)
            found += lessons(each, expected, pairs, known)
        return found

    def _by_rule(self, members: Sequence[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        usable = [each if math.isfinite(features(each)[UTIL]) else replace(each, source="unknown") for each in members]
        predictions = (
            [
                replace(each, reason=f"{each.reason}; no model for GPU type {gpu_type!r}") if len(members) > 1 else each
                for each in self._rule.predict(usable, gpu_type)
            ]
            if members
            else []
        )
        return [
            self._after_measurement(each, members[row], _others(members, row), gpu_type)
            for row, each in enumerate(predictions)
        ]

    def _batch(self, model: PairModel, candidates: Iterable[Sequence[DemandProfile]], gpu_type: str) -> _Batch:
        """Predict all pairs of many sets."""
        place: dict[DemandProfile, int] = {}
        pairs: dict[tuple[int, int], int] = {}
        sets = [[place.setdefault(each, len(place)) for each in members] for members in candidates]
        for members in sets:
            for pair in itertools.permutations(members, 2):
                pairs.setdefault(pair, len(pairs))
        profiles = list(place)
        return _Batch(profiles, sets, pairs, self._pairs(model, profiles, list(pairs), gpu_type), gpu_type)

    def _pairs(
        self, model: PairModel, profiles: list[DemandProfile], pairs: list[tuple[int, int]], gpu_type: str
    ) -> PairPrediction:
        focal = np.array([each for each, _ in pairs], dtype=np.intp)
        other = np.array([each for _, each in pairs], dtype=np.intp)
        jobs = jobs_of(profiles, model.table.names)
        found = model.predict(jobs, focal, other)
        low, high = found.low.copy(), found.high.copy()
        column = model.table.names.index(UTIL)
        blind = np.asarray(np.isnan(jobs.features[:, column]), dtype=np.bool_)
        if blind.any():  # predicted for the worst: the high end is what would be if they hardly did anything
            hopeful = np.array(jobs.features)
            hopeful[blind, column] = UNKNOWN_AT_BEST
            rows = np.logical_or(blind[focal], blind[other])
            best = model.predict(replace(jobs, features=hopeful), focal, other)
            high[rows] = np.maximum(high, best.high)[rows]
        if gpu_type not in self.models and self._counts.get(gpu_type, 0) < ENOUGH_OF_A_TYPE:
            low = np.maximum(LEAST, found.mid - OTHER_TYPE_WIDENS * (found.mid - low))
            high = np.minimum(1.0, found.mid + OTHER_TYPE_WIDENS * (high - found.mid))
        return replace(found, low=low, high=high)

    def _member(self, batch: _Batch, members: Sequence[int], row: int) -> ThroughputPrediction:
        if len(members) == 1:
            return _ALONE
        gpu_type, each_pair = batch.gpu_type, self._beside_each(batch, members, row)
        if len(each_pair) == 1:
            result = each_pair[0]
        else:
            focal, *others = batch.of(members, row)
            prior = composed(_wanted(focal), [_wanted(each) for each in others], each_pair)
            result = self._after_measurement(prior, focal, others, gpu_type)
        if gpu_type not in self.models:
            result = replace(
                result, reason=f"{result.reason}; nothing shipped for GPU type {gpu_type!r}, all types pooled"
            )
        return result

    def _beside_each(self, batch: _Batch, members: Sequence[int], row: int) -> list[ThroughputPrediction]:
        """What is predicted of one member of a set beside each of the others alone, in order."""
        found, focal, each_pair = batch.found, members[row], []
        for column, other in enumerate(members):
            if column == row:
                continue
            k = batch.pairs[focal, other]
            plain = ThroughputPrediction(
                float(found.low[k]), float(found.mid[k]), float(found.high[k]), _reason(found, k)
            )
            profiles = batch.profiles
            each_pair.append(self._after_measurement(plain, profiles[focal], [profiles[other]], batch.gpu_type))
        return each_pair

    def _after_measurement(
        self, prior: ThroughputPrediction, focal: DemandProfile, others: Sequence[DemandProfile], gpu_type: str
    ) -> ThroughputPrediction:
        """Let what was measured of this very set replace the prediction, all of it after ``REPLACES_AFTER_S``."""
        key = set_key(gpu_type, focal, others)
        measured = self._measured.get(key) if key else None
        if measured is None:
            return prior
        n = min(1.0, measured.throughput)
        trust, half = _trust(measured)
        low, high = min(measured.low, n - half), max(measured.high, n + half)
        mid = max(LEAST, trust * n + (1.0 - trust) * prior.mid)
        low = min(mid, max(LEAST, trust * low + (1.0 - trust) * prior.low))
        high = max(mid, min(1.0, trust * high + (1.0 - trust) * prior.high))
        reason = f"measured together for {measured.seconds:.0f} s: {n:.2f} of its speed alone"
        if measured.contradictory:
            reason += ", measurements contradict each other"
        return ThroughputPrediction(low, mid, high, reason if trust >= 1.0 else f"{reason}; before that {prior.reason}")


@dataclass(frozen=True, slots=True)
class _Batch:
    """All ordered pairs of many candidate sets, predicted at once; jobs are places in ``profiles``."""

    profiles: Sequence[DemandProfile]
    sets: Sequence[Sequence[int]]
    pairs: Mapping[tuple[int, int], int]  # to where its prediction is
    found: PairPrediction
    gpu_type: str

    def of(self, members: Sequence[int], row: int) -> list[DemandProfile]:
        """The member in that place, then the others in order."""
        return [self.profiles[each] for each in (members[row], *_others(members, row))]


def _trust(measured: Measured) -> tuple[float, float]:
    """How much a set's measurement counts against its prediction, and half the width its interval has at least.

    By their variances, as two estimates of the same are weighted; all of it after ``REPLACES_AFTER_S``. Another run of
    the same set differs by more than its own windows show, until then.
    """
    lasted = min(1.0, measured.seconds / REPLACES_AFTER_S)
    other_run = RUN_ERROR * (1.0 - lasted)
    error = math.hypot((measured.high - measured.low) / INTERVAL_SIGMAS, other_run)
    trust = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + error**2)
    return max(lasted, trust), max(LEAST_HALF_WIDTH, other_run * INTERVAL_SIGMAS / 2.0)


def _by_set(evidence: Sequence[Observation]) -> dict[SetKey, Measured]:
    groups: dict[SetKey, list[Observation]] = {}
    for each in evidence:
        if each.key is not None and each.seconds > 0.0:
            groups.setdefault(each.key, []).append(each)
    return {key: merged(group) for key, group in groups.items()}


def _wanted(profile: DemandProfile) -> Wanted:
    util = features(profile)[UTIL]
    return Wanted(1.0, UNKNOWN_AT_BEST) if math.isnan(util) else Wanted(util, util)


def _nameless(profile: DemandProfile) -> DemandProfile:
    """The same job as if it had never been measured beside others."""
    return replace(profile, fingerprint="")


_WITHOUT: Mapping[str, Callable[[DemandProfile], DemandProfile]] = {
    UTIL: lambda each: replace(each, util_mean=0.0, util_p95=0.0, source="history", fingerprint=""),
    BANDWIDTH: lambda each: replace(each, membw_util=0.0, fingerprint=""),
}


def _others(members: Sequence[Member], row: int) -> list[Member]:
    return [each for column, each in enumerate(members) if column != row]


def _reason(found: PairPrediction, k: int) -> str:
    """The parts of a prediction, the ones that matter."""
    physics, own, neighbour = (float(found.parts[name][k]) for name in ("physics", "own", "neighbour"))
    similar = float(found.mid[k]) - physics - own - neighbour
    causes = ((own, "this job"), (neighbour, "this neighbour"), (similar, "similar pairs"))
    known = [f"{cause} {value:+.2f}" for value, cause in causes if abs(value) >= 0.005]
    reason = f"utilisations alone give {physics:.2f} of its speed"
    return f"{reason}, what is known of {', '.join(known)}" if known else reason
