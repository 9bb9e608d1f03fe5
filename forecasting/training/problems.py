"""What ``cotenant tune`` can tune: the options, how they are scored, and the groups that the study never sees.

A problem parts its groups (model families, recordings) in two by its seed: about four fifths the study works on, each
held out in turn; the rest it never sees. The best of many trials is partly lucky, and how much shows on those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, Literal, Protocol

import optuna

from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.demand.engine import MixtureSettings
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.kernel import MIXES
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.training.demand_artefact import KINDS, DemandArtefact, Kind
from cotenant.forecasting.training.demand_fit import Examples, TrainingOptions, fit_demand
from cotenant.forecasting.training.interference import InterferenceOptions, fit_interference
from cotenant.forecasting.training.objectives import (
    MAE,
    RELATIVE,
    DemandHoldOut,
    answers_to,
    group_names,
    interference_folds,
    judge_pairs,
    scored_pairs,
    shuffled,
    without_group,
)
from cotenant.forecasting.training.recipes import MOST_FOLDS, SETTINGS, Quantity
from cotenant.forecasting.training.scores import FoldScore

Options = Mapping[str, str | int | float]

LEAST_GROUPS = 3  # one that the study never sees, and two to hold out in turn
AUTO = "by error inside the data"  # the mix of effects that every fit chooses for itself
_UNSEEN = 0.2


class Problem(Protocol):
    """Something that can be tuned.

    Attributes:
        kind: What is predicted.
        objective: Name of the metric that is to be small.
        inner: The groups that the study works on.
        outer: Those that it never sees.
        steps: How many times ``folds`` trains and scores: once per inner group, or per part of them.
        identity: What makes a study another one: data, how they are parted, what is tuned. Plain JSON values.
    """

    kind: Literal["interference", "demand"]
    objective: str
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    steps: int
    identity: Mapping[str, str | int]

    def default(self) -> Options:
        """The options that are used without tuning."""
        ...

    def suggest(self, trial: optuna.Trial) -> Options:
        """Draw options."""
        ...

    def folds(self, options: Options) -> Iterator[FoldScore]:
        """Score options on the inner groups, each held out once, always in the same order."""
        ...

    def unseen(self, options: Options) -> FoldScore:
        """Train on the inner groups and score on the outer ones."""
        ...


class PairProblem:
    """The choices before an interference model is fitted, scored with model families held out."""

    kind: Literal["interference", "demand"] = "interference"
    objective = MAE

    def __init__(self, observations: Sequence[Observation], mode: str | None, fingerprint: str, seed: int = 0) -> None:
        """Part the families.

        Args:
            observations: Measured pairs.
            mode: How the GPU was shared, see ``fit_pairs``.
            fingerprint: Of the data.
            seed: Decides which families the study never sees.

        Raises:
            ValueError: There are fewer than three families.
        """
        self._mode, self._seed = mode, seed
        members = group_names(observations, "family")
        self.inner, self.outer = parted(sorted(set(members.values())), seed, "families of jobs")
        self.steps = len(self.inner)
        self._inside, self._outside = without_group(observations, members, set(self.outer))
        self.identity: Mapping[str, str | int] = {
            "kind": self.kind,
            "data": fingerprint,
            "mode": mode or "either",
            "seed": seed,
            "never seen": ", ".join(self.outer),
            "objective": self.objective,
        }

    def default(self) -> Options:
        """The options that are used without tuning."""
        options = {name: value for name, value in asdict(InterferenceOptions()).items() if name in self._tuned()}
        return options | {"mix": options["mix"] or AUTO}

    def suggest(self, trial: optuna.Trial) -> Options:
        """Draw options: everything but the mix on logarithmic scales, around what was chosen by hand."""
        ranges = {"near": (0.2, 4.0), "far": (0.5, 12.0), "noise": (0.003, 0.3), "tails": (2.0, 32.0)}
        ranges["prior_pull"] = (0.01, 2.0)
        found: dict[str, str | int | float] = {
            name: trial.suggest_float(name, *ranges[name], log=True) for name in self._tuned() if name in ranges
        }
        found["mix"] = trial.suggest_categorical("mix", [AUTO, *MIXES])
        return found

    def folds(self, options: Options) -> Iterator[FoldScore]:
        """Score options on each of the inner families."""
        return interference_folds(self._inside, self._fit(options), seed=self._seed)

    def unseen(self, options: Options) -> FoldScore:
        """Train on the inner families and score on the pairs that have a job of an outer one."""
        models, pairs = self._fit(options)(self._inside), scored_pairs(self._outside)
        return judge_pairs(", ".join(self.outer), pairs, answers_to(pairs, models.predictor()), self._inside)

    def _tuned(self) -> tuple[str, ...]:
        shares = self._mode != "timeslice"  # else the pull has nothing to pull at
        return (
            ("near", "far", "noise", "tails", "prior_pull", "mix")
            if shares
            else ("near", "far", "noise", "tails", "mix")
        )

    def _fit(self, options: Options) -> Callable[[Sequence[Observation]], InterferenceModels]:
        chosen = interference_options(options)
        return lambda observations: fit_interference(observations, "", "", self._mode, chosen)


class SeriesProblem:
    """How demand experts are trained and which, scored with recordings held out."""

    kind: Literal["interference", "demand"] = "demand"
    objective = RELATIVE

    def __init__(
        self,
        series: Sequence[ValueSeries],
        quantity: Quantity,
        fingerprint: str,
        *,
        settings: MixtureSettings | None = None,
        kinds: Sequence[Kind] = KINDS,
        seed: int = 0,
    ) -> None:
        """Part the recordings and run the untrained mixture over them, once for all trials.

        Args:
            series: Recorded series; those of one ``source`` stay together.
            quantity: What they are: "util", or "memory" in bytes.
            fingerprint: Of the data.
            settings: Of the mixture that is trained for; None = those that serve the quantity.
            kinds: The experts to choose from.
            seed: Decides which sources the study never sees, and everything random in training.

        Raises:
            ValueError: Fewer than three sources have a series long enough.
        """
        self._settings, self._kinds, self._seed = settings or SETTINGS[quantity], tuple(kinds), seed
        self._data = DemandHoldOut(series, self._settings, memory=quantity == "memory")
        self.inner, self.outer = parted(self._data.groups, seed, "sources with series long enough")
        order = shuffled(self.inner, seed)
        self._parts = [frozenset(order[start::MOST_FOLDS]) for start in range(min(MOST_FOLDS, len(order)))]
        self.steps = len(self._parts)
        self.identity: Mapping[str, str | int] = {
            "kind": self.kind,
            "data": fingerprint,
            "quantity": quantity,
            "experts": "+".join(self._kinds),
            "seed": seed,
            "never seen": ", ".join(self.outer),
            "objective": self.objective,
        }

    def default(self) -> Options:
        """The options that are used without tuning."""
        usual = {name: value for name, value in asdict(TrainingOptions()).items() if name in _numbers(self._kinds)}
        return {"experts": "+".join(self._kinds), **usual}

    def suggest(self, trial: optuna.Trial) -> Options:
        """Draw options: which experts, and of each how long and how fast it learns."""
        choices = ["+".join(some) for n in range(len(self._kinds), 0, -1) for some in combinations(self._kinds, n)]
        found: dict[str, str | int | float] = {"experts": trial.suggest_categorical("experts", choices)}
        for name in _numbers(str(found["experts"]).split("+")):
            low, high = _RANGES[name]
            found[name] = (
                trial.suggest_int(name, int(low), int(high), log=True)
                if isinstance(low, int)
                else trial.suggest_float(name, low, high, log=True)
            )
        return found

    def folds(self, options: Options) -> Iterator[FoldScore]:
        """Score options on the inner sources, dealt into at most ``MOST_FOLDS`` parts: a training each."""
        return (self._data.score(part, self._train(options), self.inner) for part in self._parts)

    def unseen(self, options: Options) -> FoldScore:
        """Train on the inner sources and score on the outer ones."""
        return self._data.score(self.outer, self._train(options), self.inner)

    def _train(self, options: Options) -> Callable[[Examples], Mapping[Kind, DemandArtefact]]:
        kinds, chosen = demand_options(options, self._seed)
        return lambda examples: fit_demand(examples, self._settings, kinds, chosen)


_RANGES: Mapping[str, tuple[float, float]] = {
    "trees": (20, 400),
    "leaves": (4, 63),
    "tree_rate": (0.01, 0.3),
    "updates": (50, 1200),
    "learning_rate": (3e-4, 3e-2),
}


def _numbers(kinds: Sequence[str]) -> tuple[str, ...]:
    """What can be tuned of these experts besides their choice."""
    trees = ("trees", "leaves", "tree_rate") if "trees" in kinds else ()
    nets = ("updates", "learning_rate") if {"gru", "tcn"} & set(kinds) else ()
    return (*trees, *nets)


def interference_options(options: Options) -> InterferenceOptions:
    """From what a study chose to what a fit takes."""
    numbers = {name: float(value) for name, value in options.items() if name != "mix"}
    mix = str(options.get("mix", AUTO))
    return InterferenceOptions(**numbers, mix=None if mix == AUTO else mix)


def demand_options(options: Options, seed: int) -> tuple[tuple[Kind, ...], TrainingOptions]:
    """From what a study chose to what training takes: which experts, and how."""
    names = str(options["experts"]).split("+")
    numbers: dict[str, Any] = {name: value for name, value in options.items() if name != "experts"}
    return tuple(kind for kind in KINDS if kind in names), TrainingOptions(seed=seed, **numbers)


def parted(groups: Sequence[str], seed: int, what: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the groups to work on and those to keep unseen, about a fifth and at least one, drawn by the seed.

    Raises:
        ValueError: There are fewer than three.
    """
    if len(groups) < LEAST_GROUPS:
        names = f" ({', '.join(groups)})" if groups else ""
        raise ValueError(
            f"data: {len(groups)} {what}{names} are not enough; at least {LEAST_GROUPS} are needed, "
            "two to hold out in turn and one that the study never sees"
        )
    order = shuffled(groups, seed)
    unseen = max(1, round(_UNSEEN * len(groups)))
    return tuple(sorted(order[unseen:])), tuple(sorted(order[:unseen]))


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """Return one fingerprint for several sources of data, whatever their order."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("\n".join(sorted(fingerprints)).encode()).hexdigest()
