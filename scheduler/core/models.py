"""The models in force. The core knows them by version; where they come from is its shell's business."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import floor, isfinite, log10
from struct import Struct
from typing import Protocol, runtime_checkable

import numpy as np

from cotenant.forecasting.characterisation.coldstart import ColdStart
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.throughputs import Throughputs, answers_in_arrays, as_arrays, predict_arrays
from cotenant.forecasting.types import (
    DemandProfile,
    ExplainingInterferencePredictor,
    InterferencePredictor,
    ThroughputPrediction,
    predict_sets,
)
from cotenant.forecasting.windows import MOST_BYTES

REMEMBERED = 100_000  # answers, and profiles
_FIRST_SIZE = 64
MOST_ROUNDED = 1e300  # rounding may make more than there is of what is larger

_Question = bytes  # numbers of profiles; of bytes alone a dict holds nothing that the collector need look at


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """What predicts.

    Attributes:
        interference: How jobs on one GPU slow each other down.
        cold_start: What to expect of a job that was never measured; None = nothing.
        serving: By kind, what serves, in words.
        warnings: What an administrator should know: which model could not be used, and why.
    """

    interference: InterferencePredictor = field(default_factory=UtilisationRule)
    cold_start: ColdStart | None = None
    serving: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


# From versions by kind to models. Never raises: what cannot be loaded is replaced by something simpler, with a warning.
ModelSource = Callable[[Mapping[str, str]], Models]


@runtime_checkable
class Informable(Protocol):
    """An interference predictor that can take into account what was measured on this cluster."""

    def with_evidence(self, observations: Sequence[Observation]) -> InterferencePredictor:
        """Return the predictor after these measurements; itself unchanged."""
        ...


def first_models(_versions: Mapping[str, str]) -> Models:
    """The models that need no file."""
    return Models()


def only(predictor: InterferencePredictor) -> ModelSource:
    """A source of this one interference predictor, whatever the versions."""
    return lambda _versions: Models(interference=predictor)


class ProfileNumbers:
    """Numbers for profiles, by which answers are remembered: those that round to the same share one.

    Measured numbers move a little every second; without rounding no answer would ever be asked for again. The steps are
    far below what is known of any job.
    """

    def __init__(self) -> None:
        self._numbers: dict[DemandProfile, int] = {}
        self._same: dict[int, tuple[DemandProfile, int]] = {}  # by identity, of objects that are kept here for it
        self._places: dict[DemandProfile, int] = {}  # of rounded profiles
        self._rounded: list[DemandProfile] = []

    def __len__(self) -> int:
        return len(self._same)

    def clear(self) -> None:
        """Forget all of them; the numbers start anew."""
        self._numbers.clear()
        self._same.clear()
        self._places.clear()
        self._rounded.clear()

    def of(self, profile: DemandProfile) -> int:
        """Return the number of a profile."""
        same = self._same.get(id(profile))
        if same is not None:
            return same[1]
        number = self._numbers.get(profile)
        if number is None:
            rounded = _rounded(profile)
            number = self._numbers[profile] = self._places.setdefault(rounded, len(self._places))
            if number == len(self._rounded):
                self._rounded.append(rounded)
        self._same[id(profile)] = profile, number
        return number

    def of_sets(self, sets: Sequence[Sequence[DemandProfile]]) -> list[_Question]:
        """Return the numbers of the members of each set, equally many; a call for each profile would cost much."""
        same, of, pack = self._same, self.of, _packed(len(sets[0])).pack
        return [
            pack(*[known[1] if (known := same.get(id(each))) is not None else of(each) for each in members])
            for members in sets
        ]

    def profiles(self, question: _Question, members: int) -> tuple[DemandProfile, ...]:
        """Return the rounded profiles of a set, by what ``of_sets`` said of it."""
        return tuple([self._rounded[number] for number in _packed(members).unpack(question)])


class _Answers:
    """Answers to questions about sets of so many members on a type of GPUs, as rows of arrays."""

    def __init__(self, members: int) -> None:
        self.rows: dict[_Question, int] = {}
        self._numbers = np.zeros((3, _FIRST_SIZE, members))
        self._from: list[Throughputs] = []  # where the reasons are
        self._first: list[int] = []  # row of each of those

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, questions: Sequence[_Question], answers: Throughputs) -> None:
        """Remember answers to new questions."""
        first, end = len(self), len(self) + len(questions)
        while end > self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._numbers[:, first:end] = answers.low, answers.mid, answers.high
        self.rows.update(zip(questions, range(first, end), strict=True))
        self._from.append(answers)
        self._first.append(first)

    def of(self, questions: Sequence[_Question]) -> Throughputs:
        """Return the answers to known questions."""
        rows, sources, firsts = [self.rows[question] for question in questions], self._from, self._first
        low, mid, high = self._numbers[:, rows]

        def reason(place: int, member: int) -> str:
            source = bisect_right(firsts, rows[place]) - 1
            return sources[source].reason(rows[place] - firsts[source], member)

        return Throughputs(low, mid, high, reason)


class GuardedInterference:
    """An interference predictor that cannot stop the core: whatever it fails at, the utilisation rule answers.

    Profiles are rounded before they are asked about, and answers are remembered.

    Args:
        primary: The predictor.
        numbers: Of profiles, as another one that is used no longer has left them; None = new ones.
    """

    def __init__(self, primary: InterferencePredictor, numbers: ProfileNumbers | None = None) -> None:
        self.name = primary.name
        self.fault = ""
        self._primary = primary
        self._rule = UtilisationRule()
        self._answers: dict[tuple[str, int], _Answers] = {}  # by GPU type and number of members
        self._numbers = ProfileNumbers() if numbers is None else numbers

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """See ``InterferencePredictor``."""
        return self.predict_many([members], gpu_type)[0]

    def predict_many(
        self, candidates: Sequence[Sequence[DemandProfile]], gpu_type: str
    ) -> list[Sequence[ThroughputPrediction]]:
        """See ``BatchInterferencePredictor``."""
        found: list[Sequence[ThroughputPrediction]] = [()] * len(candidates)
        for size in {len(members) for members in candidates} - {0}:
            places = [place for place, members in enumerate(candidates) if len(members) == size]
            said = self.predict_arrays([candidates[place] for place in places], gpu_type)
            for row, place in enumerate(places):
                found[place] = said.of(row)
        return found

    def predict_arrays(self, sets: Sequence[Sequence[DemandProfile]], gpu_type: str) -> Throughputs:
        """See ``ArrayInterferencePredictor``. What was answered before is not asked again."""
        if len(self._numbers) > REMEMBERED or sum(map(len, self._answers.values())) > REMEMBERED:
            self._numbers.clear()
            self._answers.clear()
        size = len(sets[0])
        known = self._answers.get((gpu_type, size))
        if known is None:
            known = self._answers[gpu_type, size] = _Answers(size)
        questions = self._numbers.of_sets(sets)
        new = list(dict.fromkeys([question for question in questions if question not in known.rows]))
        if new:
            known.put(new, self._ask([self._numbers.profiles(question, size) for question in new], gpu_type))
        return known.of(questions)

    def explain(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[Mapping[str, float]]:
        """See ``ExplainingInterferencePredictor``; of the same rounded profiles that are predicted for."""
        nothing: list[Mapping[str, float]] = [{} for _ in members]
        if not isinstance(self._primary, ExplainingInterferencePredictor):
            return nothing
        asked = self._numbers.profiles(self._numbers.of_sets([members])[0], len(members))
        try:
            found = self._primary.explain(asked, gpu_type)
            causes = [{str(name): float(lost) for name, lost in each.items()} for each in found]
        except Exception:  # noqa: BLE001 - a fault of a model's can be of any kind; the rest can be told without reasons
            return nothing
        sound = len(causes) == len(members) and all(isfinite(lost) for each in causes for lost in each.values())
        return causes if sound else nothing

    def _ask(self, sets: Sequence[tuple[DemandProfile, ...]], gpu_type: str) -> Throughputs:
        try:
            found = self._asked(sets, gpu_type)
        except Exception as error:  # noqa: BLE001 - a fault of a model's can be of any kind; jobs must be placed all the same
            self.fault = f"{type(error).__name__}: {error}"
            return predict_arrays(self._rule, sets, gpu_type)
        if isinstance(found, Throughputs):
            return found
        return as_arrays(
            [
                answer if self._sound(answer, len(members)) else self._rule.predict(members, gpu_type)
                for members, answer in zip(sets, found, strict=True)
            ]
        )

    def _asked(
        self, sets: Sequence[tuple[DemandProfile, ...]], gpu_type: str
    ) -> Throughputs | Sequence[Sequence[ThroughputPrediction]]:
        """Return what the predictor says: arrays only if all of it makes sense."""
        if not answers_in_arrays(type(self._primary)):
            return predict_sets(self._primary, [(gpu_type, members) for members in sets])
        found = predict_arrays(self._primary, sets, gpu_type)
        asked = len(sets), len(sets[0])
        if found.low.shape == found.mid.shape == found.high.shape == asked and found.sound().all():
            return found
        return [found.of(row) for row in range(len(sets))]

    def _sound(self, answer: Sequence[ThroughputPrediction], members: int) -> bool:
        try:
            if len(answer) == members and not [p for p in answer if not 0.0 < p.low <= p.mid <= p.high <= 1.0]:
                return True
        except (TypeError, AttributeError):
            pass  # no predictions at all
        self.fault = f"it predicted {answer!r:.200} for {members} jobs"
        return False


def informed(
    predictor: InterferencePredictor, evidence: Sequence[Observation], numbers: ProfileNumbers | None = None
) -> GuardedInterference:
    """The predictor after what was measured on this cluster; as it is when it cannot learn, or fails at it.

    Args:
        predictor: The predictor.
        evidence: What was measured.
        numbers: See ``GuardedInterference``.
    """
    if not evidence or not isinstance(predictor, Informable):
        return GuardedInterference(predictor, numbers)
    try:
        return GuardedInterference(predictor.with_evidence(evidence), numbers)
    except Exception as error:  # noqa: BLE001 - as above: without the evidence it still predicts
        guarded = GuardedInterference(predictor, numbers)
        guarded.fault = f"what was measured here could not be taken in: {type(error).__name__}: {error}"
        return guarded


@cache
def _packed(members: int) -> Struct:
    return Struct(f"{members}q")


def _rounded(profile: DemandProfile) -> DemandProfile:
    memory = profile.memory_bytes
    return replace(
        profile,
        util_mean=_decimals(profile.util_mean),
        util_p95=_decimals(profile.util_p95),
        membw_util=None if profile.membw_util is None else _decimals(profile.membw_util),
        memory_bytes=int(_digits(float(memory))) if memory is not None and 0 < memory <= MOST_BYTES else memory,
        solo_step_rate=None if profile.solo_step_rate is None else _digits(profile.solo_step_rate),
        observed_s=0.0,
    )


def _decimals(value: float) -> float:
    """Two decimals; what is no number stays as it is."""
    return round(value, 2) if isfinite(value) else value


def _digits(value: float) -> float:
    """Two significant digits; what cannot have any stays as it is."""
    return round(value, 1 - floor(log10(value))) if 0.0 < value <= MOST_ROUNDED else value
