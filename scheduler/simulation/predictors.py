"""Interference predictors for the shipped core in a simulation: what it may know of how jobs get along."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.scheduler.simulation.truth import Truth

ERROR = 0.07  # half-width of the band around a tabled value: the mean error of leave-one-family-out predictions
_LEAST = 0.01
_WORTH = 3.0  # measured pairs after which half of what they deviate by on average is believed of a workload
_Pair = tuple[str, str, str]  # GPU type, workload, neighbour


class TablePredictor:
    """Answers from a table of pairs, found by the members' fingerprints; the utilisation rule where it has none.

    With the truth as its table it is an oracle; with predictions made without a job's family it is what a scheduler may
    know before it has seen the pair. What was measured replaces the table for the very set, and moves what the table
    says of other pairs of the same workloads (see ``_Learnt``).

    Args:
        table: Answers for a set of workloads.
        error: Half-width of the interval around its answers; 0 for an oracle, which has nothing to learn.
    """

    def __init__(self, table: Truth, error: float = ERROR, learnt: _Learnt | None = None) -> None:
        self.name = "table-of-pairs"
        self._table, self._error = table, error
        self._rule = UtilisationRule()
        self._learnt = learnt
        self._answers: dict[tuple[str, tuple[str, ...]], Sequence[ThroughputPrediction]] = {}

    def with_evidence(self, observations: Sequence[Observation]) -> TablePredictor:
        """See ``Informable``."""
        if self._error == 0.0:
            return self
        return TablePredictor(self._table, self._error, learn(observations, self._pair))

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """See ``InferencePredictor.predict``."""
        if not members:
            return []
        if len(members) == 1:
            return self._rule.predict(members, gpu_type)
        names = tuple([member.fingerprint for member in members])
        known = self._answers.get((gpu_type, names))
        if known is not None:
            return known
        try:
            together = self._table.together(names, gpu_type)
        except KeyError:
            return self._rule.predict(members, gpu_type)
        answer = [self._of_one(names, place, n, gpu_type) for place, n in enumerate(together)]
        self._answers[gpu_type, names] = answer
        return answer

    def _of_one(self, names: tuple[str, ...], place: int, n: float, gpu_type: str) -> ThroughputPrediction:
        learnt, error = self._learnt, self._error
        if learnt is None:
            return ThroughputPrediction(max(_LEAST, n - error), n, min(1.0, n + error), "from the table of pairs")
        one, others = names[place], names[:place] + names[place + 1 :]
        if len(others) > 1:
            others = tuple(sorted(others))
        measured = learnt.sets.get((gpu_type, one, others))
        if measured is not None:
            low, mid, high = measured
            return ThroughputPrediction(low, mid, high, "measured together")
        own, caused = learnt.own.get((gpu_type, one), 0.0), learnt.caused
        # how far n of ``one`` beside each of the others is off the table
        shift = math.fsum([own + caused.get((gpu_type, other), 0.0) for other in others])
        mid = min(1.0, max(_LEAST, n + shift))
        return ThroughputPrediction(
            max(_LEAST, mid - error), mid, min(1.0, mid + error), f"from the table of pairs, corrected by {shift:+.2f}"
        )

    def _pair(self, gpu_type: str, one: str, other: str) -> float | None:
        try:
            return self._table.together((one, other), gpu_type)[0]
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What was measured: sets as they are, and how far each workload is off what the table says of it.

    The deviation of a pair is that of the first workload (sensitivity) plus that of the second (aggressiveness), both
    shrunk towards 0 as their measurements are few: a mixed model with crossed random effects.
    """

    sets: Mapping[tuple[str, str, tuple[str, ...]], tuple[float, float, float]]
    own: Mapping[tuple[str, str], float]
    caused: Mapping[tuple[str, str], float]


def learn(observations: Sequence[Observation], table: Callable[[str, str, str], float | None]) -> _Learnt:
    """Return what measurements show beyond the table (its n by GPU type, workload and neighbour; None = unknown)."""
    sets: dict[tuple[str, str, tuple[str, ...]], tuple[float, float, float]] = {}
    rows: list[tuple[tuple[str, str], tuple[str, str], float]] = []
    for each in observations:
        key = each.key
        if key is None:
            continue
        n = min(1.0, each.throughput)
        sets[key] = (max(_LEAST, min(n, each.low)), n, min(1.0, max(n, each.high)))
        gpu_type, one, others = key
        known = table(gpu_type, one, others[0]) if len(others) == 1 else None
        if known is not None:
            rows.append(((gpu_type, one), (gpu_type, others[0]), n - known))
    own, caused = _effects(rows)
    return _Learnt(sets, own, caused)


def _effects(
    rows: Sequence[tuple[tuple[str, str], tuple[str, str], float]],
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Ridge regression of the deviations on who it is and who is beside it."""
    ones = {name: k for k, name in enumerate(dict.fromkeys(one for one, _, _ in rows))}
    others = {name: len(ones) + k for k, name in enumerate(dict.fromkeys(other for _, other, _ in rows))}
    normal = np.eye(len(ones) + len(others)) * _WORTH
    right = np.zeros(len(normal))
    for one, other, deviation in rows:
        i, j = ones[one], others[other]
        normal[i, i] += 1.0
        normal[j, j] += 1.0
        normal[i, j] += 1.0
        normal[j, i] += 1.0
        right[i] += deviation
        right[j] += deviation
    found = np.linalg.solve(normal, right) if rows else right
    return {name: float(found[k]) for name, k in ones.items()}, {name: float(found[k]) for name, k in others.items()}
