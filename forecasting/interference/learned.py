"""The learned interference predictor: one model per GPU type, what was measured on this cluster, and fallbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.forecasting.interference.composition import Wanted, composed
from cotenant.forecasting.interference.model import LEAST, PairModel, PairPrediction
from cotenant.forecasting.interference.observations import (
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
REMEMBERED = 4096  # answers
UNKNOWN_AT_BEST = 0.1  # utilisation that a job nothing is known of has at best; at worst it is 1
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
        place: dict[DemandProfile, int] = {}
        pairs: dict[tuple[int, int], int] = {}
        numbered = [[place.setdefault(each, len(place)) for each in members] for members in candidates]
        for members in numbered:
            for row, focal in enumerate(members):
                for column, other in enumerate(members):
                    if row != column:
                        pairs.setdefault((focal, other), len(pairs))
        batch = _Batch(list(place), pairs, self._pairs(model, list(place), list(pairs), gpu_type), gpu_type)
        return [[self._member(batch, members, row) for row in range(len(members))] for members in numbered]

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
        rows = pairs_of([each for each in self.evidence if each.gpu_type == gpu_type], model.table.names)
        self._counts[gpu_type] = len(rows)
        return model.with_evidence(most_informative(rows, MOST_EVIDENCE)) if len(rows) else model

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

    def _member(self, batch: _Batch, members: list[int], row: int) -> ThroughputPrediction:
        if len(members) == 1:
            return _ALONE
        profiles, found, gpu_type = batch.profiles, batch.found, batch.gpu_type
        focal = profiles[members[row]]
        each_pair: list[ThroughputPrediction] = []
        for column, other in enumerate(members):
            if column == row:
                continue
            k = batch.place[members[row], other]
            plain = ThroughputPrediction(
                float(found.low[k]), float(found.mid[k]), float(found.high[k]), _reason(found, k)
            )
            each_pair.append(self._after_measurement(plain, focal, [profiles[other]], gpu_type))
        if len(each_pair) == 1:
            result = each_pair[0]
        else:
            others = _others([profiles[k] for k in members], row)
            prior = composed(_wanted(focal), [_wanted(each) for each in others], each_pair)
            result = self._after_measurement(prior, focal, others, gpu_type)
        if gpu_type not in self.models:
            result = replace(
                result, reason=f"{result.reason}; nothing shipped for GPU type {gpu_type!r}, all types pooled"
            )
        return result

    def _after_measurement(
        self, prior: ThroughputPrediction, focal: DemandProfile, others: Sequence[DemandProfile], gpu_type: str
    ) -> ThroughputPrediction:
        """Let what was measured of this very set replace the prediction, all of it after ``REPLACES_AFTER_S``."""
        key = set_key(gpu_type, focal, others)
        measured = self._measured.get(key) if key else None
        if measured is None:
            return prior
        trust = min(1.0, measured.seconds / REPLACES_AFTER_S)
        n = min(1.0, measured.throughput)
        low = min(measured.low, n - LEAST_HALF_WIDTH)
        high = max(measured.high, n + LEAST_HALF_WIDTH)
        mid = max(LEAST, trust * n + (1.0 - trust) * prior.mid)
        low = min(mid, max(LEAST, trust * low + (1.0 - trust) * prior.low))
        high = max(mid, min(1.0, trust * high + (1.0 - trust) * prior.high))
        reason = f"measured together for {measured.seconds:.0f} s: {n:.2f} of its speed alone"
        if measured.contradictory:
            reason += ", measurements contradict each other"
        return ThroughputPrediction(low, mid, high, reason if trust >= 1.0 else f"{reason}; before that {prior.reason}")


@dataclass(frozen=True, slots=True)
class _Batch:
    """All pairs of many candidate sets, predicted at once: the different profiles, and where each pair's result is."""

    profiles: list[DemandProfile]
    place: Mapping[tuple[int, int], int]
    found: PairPrediction
    gpu_type: str


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


def _others(members: Sequence[DemandProfile], row: int) -> list[DemandProfile]:
    return [each for column, each in enumerate(members) if column != row]


def _reason(found: PairPrediction, k: int) -> str:
    """The parts of a prediction, the ones that matter."""
    physics, own, neighbour = (float(found.parts[name][k]) for name in ("physics", "own", "neighbour"))
    similar = float(found.mid[k]) - physics - own - neighbour
    parts = [f"utilisations alone give {physics:.2f}"]
    for value, cause in ((own, "this job"), (neighbour, "this neighbour"), (similar, "similar pairs")):
        if abs(value) >= 0.005:
            parts.append(f"{cause} {value:+.2f}")
    return ", ".join(parts)
