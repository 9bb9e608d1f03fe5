"""Predicted throughputs of many sets of jobs as arrays: one call for one question about many GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction, predict_sets

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Throughputs:
    """What is predicted for sets of equally many jobs; the arrays have the shape (sets, members).

    Attributes:
        low: Low ends of the intervals (see ``ThroughputPrediction``).
        mid: Normalised throughputs.
        high: High ends of the intervals.
        reason: Says why, by set and member; asked for the few that are told to people.
    """

    low: Floats
    mid: Floats
    high: Floats
    reason: Callable[[int, int], str]

    def of(self, row: int) -> list[ThroughputPrediction]:
        """Return the predictions of one set."""
        ends = zip(self.low[row].tolist(), self.mid[row].tolist(), self.high[row].tolist(), strict=True)
        return [ThroughputPrediction(*each, self.reason(row, member)) for member, each in enumerate(ends)]

    def sound(self) -> Flags:
        """Return for which sets these are throughputs and intervals at all, shape (sets,)."""
        ordered = (self.low > 0.0) & (self.low <= self.mid) & (self.mid <= self.high) & (self.high <= 1.0)
        return np.asarray(ordered.all(axis=1))


@runtime_checkable
class ArrayInterferencePredictor(Protocol):
    """An interference predictor that answers in arrays; ``predict`` is the answer for one set."""

    def predict_arrays(self, sets: Sequence[Sequence[DemandProfile]], gpu_type: str) -> Throughputs:
        """Return what ``predict`` returns for each of these sets of equally many members, at least one set."""
        ...


def predict_arrays(
    predictor: InterferencePredictor, sets: Sequence[Sequence[DemandProfile]], gpu_type: str
) -> Throughputs:
    """Predict many sets of equally many jobs, in arrays where the predictor can.

    Args:
        predictor: The predictor.
        sets: The members of each, at least one set.
        gpu_type: The GPU type of all of them.
    """
    if answers_in_arrays(type(predictor)):
        return cast(ArrayInterferencePredictor, predictor).predict_arrays(sets, gpu_type)
    return as_arrays(predict_sets(predictor, [(gpu_type, members) for members in sets]))


def mids(predictor: InterferencePredictor, sets: Sequence[tuple[str, Sequence[DemandProfile]]]) -> list[list[float]]:
    """Return the normalised throughputs in many sets of jobs, whatever their sizes.

    Args:
        predictor: The predictor.
        sets: GPU type and members of each.

    Returns:
        Per set one number per member, in order; nothing for an empty set.
    """
    found: list[list[float]] = [[] for _ in sets]
    alike: dict[tuple[str, int], list[int]] = {}
    for place, (gpu_type, members) in enumerate(sets):
        if members:
            alike.setdefault((gpu_type, len(members)), []).append(place)
    for (gpu_type, _), places in alike.items():
        said = predict_arrays(predictor, [sets[place][1] for place in places], gpu_type).mid.tolist()
        for place, n in zip(places, said, strict=True):
            found[place] = n
    return found


def as_arrays(answers: Sequence[Sequence[ThroughputPrediction]]) -> Throughputs:
    """Return predictions for sets of equally many jobs as arrays."""
    numbers = np.array([[(each.low, each.mid, each.high) for each in answer] for answer in answers], dtype=np.float64)
    low, mid, high = np.moveaxis(numbers.reshape(len(answers), -1, 3), 2, 0)
    return Throughputs(low, mid, high, lambda row, member: answers[row][member].reason)


def fsums(terms: Floats) -> Floats:
    """Return ``math.fsum`` along the last axis, so that no order of the terms changes a decision."""
    if terms.shape[-1] == 1:
        return terms[..., 0]
    if terms.shape[-1] == 2:  # one sum of two is rounded correctly as it is
        return np.asarray(terms[..., 0] + terms[..., 1])
    flat = terms.reshape(-1, terms.shape[-1]).tolist()
    return np.array([math.fsum(each) for each in flat], dtype=np.float64).reshape(terms.shape[:-1])


@lru_cache(maxsize=64)
def answers_in_arrays(kind: type) -> bool:
    """Whether predictors of this class are ``ArrayInterferencePredictor``s."""
    return issubclass(kind, ArrayInterferencePredictor)  # far too slow to be asked for every prediction
