"""Interference predictors for the shipped core in a simulation: what it may know of how jobs get along."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.throughputs import Floats, Throughputs, fsums, predict_arrays
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

    def with_evidence(self, observations: Sequence[Observation]) -> TablePredictor:
        """See ``Informable``."""
        if self._error == 0.0:
            return self
        return TablePredictor(self._table, self._error, learn(observations, self._pair))

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """See ``InferencePredictor.predict``."""
        return self.predict_arrays([members], gpu_type).of(0) if members else []

    def predict_arrays(self, sets: Sequence[Sequence[DemandProfile]], gpu_type: str) -> Throughputs:
        """See ``ArrayInterferencePredictor``."""
        if len(sets[0]) < 2:
            return predict_arrays(self._rule, sets, gpu_type)
        names = [tuple([member.fingerprint for member in members]) for members in sets]
        tabled: list[Sequence[float]] = []
        strangers: dict[int, Sequence[ThroughputPrediction]] = {}
        for row, each in enumerate(names):
            try:
                tabled.append(self._table.together(each, gpu_type))
            except KeyError:
                strangers[row] = self._rule.predict(sets[row], gpu_type)
                tabled.append([prediction.mid for prediction in strangers[row]])
        found = self._corrected(np.array(tabled), names, gpu_type)
        for row, answer in strangers.items():
            ends = zip(*((each.low, each.mid, each.high) for each in answer), strict=True)
            found.low[row], found.mid[row], found.high[row] = ends

        def reason(row: int, member: int) -> str:
            return strangers[row][member].reason if row in strangers else found.reason(row, member)

        return replace(found, reason=reason)

    def _corrected(self, n: Floats, names: Sequence[tuple[str, ...]], gpu_type: str) -> Throughputs:
        """Return what the table says of each set, shape (sets, members), corrected by what was measured."""
        learnt, error = self._learnt, self._error
        if learnt is None:
            low, high = np.maximum(_LEAST, n - error), np.minimum(1.0, n + error)
            return Throughputs(low, n, high, lambda _row, _member: "from the table of pairs")
        own, caused = (
            np.array([[effect.get((gpu_type, name), 0.0) for name in each] for each in names])
            for effect in (learnt.own, learnt.caused)
        )
        members = range(n.shape[1])
        others = [[other for other in members if other != member] for member in members]
        # how far n of each beside each of the others is off the table
        shift = fsums(own[:, :, None] + caused[:, others])
        mid = np.minimum(1.0, np.maximum(_LEAST, n + shift))
        low, high = np.maximum(_LEAST, mid - error), np.minimum(1.0, mid + error)
        measured: set[tuple[int, int]] = set()
        for row, each in enumerate(names):
            if (gpu_type, tuple(sorted(each))) not in learnt.crowds:
                continue
            for member, one in enumerate(each):
                known = learnt.sets.get((gpu_type, one, tuple(sorted(each[:member] + each[member + 1 :]))))
                if known is not None:
                    low[row, member], mid[row, member], high[row, member] = known
                    measured.add((row, member))

        def reason(row: int, member: int) -> str:
            if (row, member) in measured:
                return "measured together"
            return f"from the table of pairs, corrected by {shift[row, member]:+.2f}"

        return Throughputs(low, mid, high, reason)

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
    crowds: Collection[tuple[str, tuple[str, ...]]]  # GPU type and all members of those sets, sorted
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
    crowds = {(gpu_type, tuple(sorted((one, *others)))) for gpu_type, one, others in sets}
    return _Learnt(sets, crowds, own, caused)


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
