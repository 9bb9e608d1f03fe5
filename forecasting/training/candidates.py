"""Candidates from what a cluster has measured, each compared with the active model on groups that neither has seen.

The newest fifth of the groups (jobs, or programs) is held out; of fewer than five groups each in turn. The candidate is
trained without them, the active interference model is freed of them by the block inverse, and both are told what else
the cluster has measured, as they would be when serving. A candidate that is not worse is trained again on everything.

Of pairs, being worse must exceed the noise of the comparison, a standard error (after Diebold and Mariano 1995): where
the models are as good as each other chance alone would turn away every second candidate, and a candidate knows more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from cotenant.forecasting.datasets.model_card import Card, DataSource
from cotenant.forecasting.datasets.pair_sources import Mode, observations_of, pairs_fingerprint
from cotenant.forecasting.datasets.registry import DemandExperts
from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.datasets.series_sources import newest, series_fingerprint
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.evidence import EvidenceBook
from cotenant.forecasting.interference.model import PairModel
from cotenant.forecasting.interference.observations import Observation, Program
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.interference.table import Floats
from cotenant.forecasting.training.demand_artefact import DemandArtefact
from cotenant.forecasting.training.demand_artefact import Kind as ExpertKind
from cotenant.forecasting.training.demand_fit import Examples, TrainingOptions, fit_demand
from cotenant.forecasting.training.objectives import (
    MAE,
    RELATIVE,
    UNTRAINED,
    answers_to,
    group_names,
    judge_pairs,
    scored_pairs,
    without_group,
)
from cotenant.forecasting.training.recipes import (
    SETTINGS,
    Origin,
    Quantity,
    Trained,
    demand_trained,
    expert_kinds,
    held_out,
    interference_trained,
    recipe,
)
from cotenant.forecasting.training.scores import FoldScore, combined

NEWEST = 5  # one of so many groups is held out
LEAST_GROUPS = 3  # of this cluster's, before a candidate can be judged at all
MOST_TICKS = 60_000  # of the newest windows of a quantity; more cost hours and change little
SAME = 1e-6  # errors that differ by less do not differ
SURE = 1.0  # standard errors by which a candidate for pairs has to be worse
OWN_DATA = "this cluster's own measurements"


class TooLittle(ValueError):
    """Too little was measured so far; the message says how much is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A candidate beside what is active.

    Attributes:
        reason: Why it is to be adopted or not, in words.
        candidate: Its errors on the held-out groups, by name.
        active: Those of what is active, on the same groups; of demand, of the untrained mixture where that is better.
        trained: The candidate, trained on everything; None when it is worse or there is nothing new.
    """

    reason: str
    candidate: Mapping[str, float]
    active: Mapping[str, float]
    trained: Trained | None


@dataclass(frozen=True, slots=True, eq=False)
class ActivePairs:
    """The active interference models and their card."""

    models: InterferenceModels
    card: Card


@dataclass(frozen=True, slots=True, eq=False)
class ActiveExperts:
    """The active demand experts and their card."""

    experts: DemandExperts
    card: Card


def newest_groups(names: Sequence[str]) -> list[set[str]]:
    """Return what is held out, one set after the other; ``names`` come in order of their first appearance."""
    if len(names) < NEWEST:
        return [{name} for name in names]
    return [set(names[-(len(names) // NEWEST) :])]


# ---------------------------------------- interference


def compare_interference(
    measured: Sequence[Observation],
    active: ActivePairs | None,
    origin: Origin,
    mode: Mode | None = None,
    *,
    withdrawn: Collection[Program] = (),
) -> Comparison:
    """Fit interference models to the pairs of the active ones and to what the cluster has measured.

    What was measured anew of a pair takes the place of what the active models know of it.

    Args:
        measured: Of the cluster, the oldest first.
        active: What is active; None = the utilisation rule.
        origin: For the card of a candidate.
        mode: How GPUs are shared; None: which mean fits better is found out, since hosts and jobs may differ in it.
        withdrawn: Programs of whose speed only what is in ``measured`` counts, not what the active models know.

    Raises:
        TooLittle: Too little was measured.
    """
    mine = [each for each in EvidenceBook(measured).observations() if len(each.others) == 1]
    order = [name for name in group_names(measured, "job") if name in group_names(mine, "job")]
    if len(order) < LEAST_GROUPS:
        raise TooLittle(f"{len(order)} jobs were measured in pairs; needed are at least {LEAST_GROUPS}")
    own = DataSource(OWN_DATA, OWN_DATA, pairs_fingerprint(mine), len(mine))
    if active is not None and own.fingerprint in {each.fingerprint for each in active.card.data}:
        return Comparison(f"nothing was measured since {active.card.version}", {}, {}, None)
    new = {each.key for each in mine}
    known = [] if active is None else _known_pairs(active.models)
    every = [*(each for each in known if each.key not in new and each.program not in withdrawn), *mine]
    every_round = (_round(held, mine, every, active, mode) for held in newest_groups(order))
    rounds = [each for each in every_round if each is not None]
    if not rounds:
        raise TooLittle("no pair of the newest jobs can be scored; needed are jobs measured beside others")
    scored = [pair for each in rounds for pair in each.pairs]
    ours, theirs = (np.concatenate([getattr(each, name) for each in rounds]) for name in ("ours", "theirs"))
    found = {MAE: float(np.mean(ours))}, {MAE: float(np.mean(theirs))}
    title = "the utilisation rule" if active is None else active.card.version
    if surely_worse(ours - theirs, scored):
        return Comparison(f"worse than {title} on the newest jobs", *found, None)
    inherited = [] if active is None else [each for each in active.card.data if each.source != OWN_DATA]
    trained = interference_trained(
        recipe(mode)(every),
        [*inherited, own],
        origin,
        folds=[each.score for each in rounds],
        protocol=f"{len(scored)} ordered pairs measured on this cluster, each predicted without its newest job; errors "
        "of the normalised throughput",
        options={"mode": mode or "found out", "held_out": "newest jobs"},
    )
    return Comparison(f"not worse than {title} on the newest jobs", *found, trained)


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """What a candidate and what is active make of the same pairs, which neither has seen.

    Attributes:
        pairs: The ordered pairs.
        score: The candidate's.
        ours: The candidate's absolute errors, shape (pairs,).
        theirs: Those of what is active.
    """

    pairs: Sequence[Observation]
    score: FoldScore
    ours: Floats
    theirs: Floats


def _round(
    held: set[str],
    mine: Sequence[Observation],
    every: Sequence[Observation],
    active: ActivePairs | None,
    mode: Mode | None,
) -> _Round | None:
    """Hold some jobs out; None where none of their pairs can be scored."""
    names = {name: name for name in group_names(every, "job")}
    outside, _ = without_group(every, names, held)
    evidence, inside = without_group(mine, names, held)
    pairs, title = scored_pairs(inside), ", ".join(sorted(held))
    if not pairs:
        return None
    try:
        candidate = recipe(mode)(outside)
    except ValueError as error:
        raise TooLittle(f"without {title}: {error}") from error
    serving = UtilisationRule() if active is None else _freed(active.models, held).predictor(evidence)
    answers = answers_to(pairs, candidate.predictor(evidence))
    score = judge_pairs(title, pairs, answers, outside)
    return _Round(pairs, score, answers.errors, answers_to(pairs, serving).errors)


def surely_worse(excess: Floats, pairs: Sequence[Observation]) -> bool:
    """Whether errors exceed others by more than a standard error, in the mean.

    Jobs that ran together gave both ordered pairs, so what is drawn is pairs of jobs, not rows: the error is that of a
    ratio of sums over clusters. A single pair of jobs tells nothing of the noise, which then counts as none.

    Args:
        excess: By how much, shape (rows,).
        pairs: The ordered pair of every row.
    """
    jobs = [[each.gpu_type, *sorted((each.focal.fingerprint, each.others[0].fingerprint))] for each in pairs]
    _, cluster = np.unique(jobs, axis=0, return_inverse=True)
    mean = float(np.mean(excess))
    sums = np.bincount(cluster.ravel(), excess - mean)
    count = len(sums)
    error = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(excess) if count > 1 else 0.0
    return not mean <= SURE * error + SAME


def _known_pairs(models: InterferenceModels) -> list[Observation]:
    """The pairs that models rest on."""
    found = [each for gpu_type, model in models.models.items() for each in observations_of(model.table, gpu_type)]
    if models.pooled is None:
        return found
    for each in observations_of(models.pooled.table, ""):  # types with too few pairs for a model of their own
        named = [_on_type(job.fingerprint) for job in (each.focal, *each.others)]
        gpu_type = named[0][1]
        if gpu_type and gpu_type not in models.models:
            focal, other = (
                replace(job, fingerprint=name) for job, (name, _) in zip((each.focal, *each.others), named, strict=True)
            )
            found.append(replace(each, gpu_type=gpu_type, focal=focal, others=(other,)))
    return found


def _on_type(name: str) -> tuple[str, str]:
    """Part the name that the pooled model gives to a job: the job and the GPU type."""
    job, _, gpu_type = name.rpartition(" on ")
    return job, gpu_type


def _freed(bundle: InterferenceModels, held: set[str]) -> InterferenceModels:
    """The models as they would be had they never met some jobs, by the block inverse."""

    def without(model: PairModel, names: Sequence[str]) -> PairModel | None:
        met = np.array([name in held for name in names])
        rows = np.flatnonzero(met[model.table.focal] | met[model.table.other])
        if len(rows) == len(model.table):
            return None
        return model.without(rows, model.posterior()) if len(rows) else model

    own = {key: without(model, model.table.jobs.ids) for key, model in bundle.models.items()}
    pooled = bundle.pooled and without(bundle.pooled, [_on_type(name)[0] for name in bundle.pooled.table.jobs.ids])
    return replace(bundle, models={key: model for key, model in own.items() if model is not None}, pooled=pooled)


# ---------------------------------------- demand


def compare_demand(
    series: Mapping[Quantity, Sequence[ValueSeries]],
    active: ActiveExperts | None,
    origin: Origin,
    options: TrainingOptions,
    experts: Sequence[ExpertKind],
) -> Comparison:
    """Train demand experts on what the cluster has recorded.

    Args:
        series: Utilisation and memory, the newest programs last.
        active: What is active; None = the untrained mixture, which is to be beaten in any case.
        origin: For the card of a candidate.
        options: Of the training.
        experts: Which experts.

    Raises:
        TooLittle: Too little was recorded.
    """
    recent = {quantity: newest(found, MOST_TICKS) for quantity, found in series.items()}
    order = list(dict.fromkeys(each.source for found in recent.values() for each in found))
    if len(order) < LEAST_GROUPS:
        raise TooLittle(f"{len(order)} programs were recorded long enough; needed are at least {LEAST_GROUPS}")
    ticks = sum(len(each.values) for each in recent["util"] or recent["memory"])
    every = [each for found in recent.values() for each in found]
    own = DataSource(OWN_DATA, OWN_DATA, series_fingerprint(every), ticks)
    if active is not None and own.fingerprint in {each.fingerprint for each in active.card.data}:
        return Comparison(f"nothing was recorded since {active.card.version}", {}, {}, None)
    held = newest_groups(order)
    candidate: dict[str, float] = {}
    before: dict[str, float] = {}
    plain: dict[str, float] = {}
    folds: dict[Quantity, list[FoldScore]] = {}
    artefacts: dict[tuple[Quantity, ExpertKind], DemandArtefact] = {}
    for quantity, kinds in expert_kinds(experts).items():
        if not recent[quantity] or not kinds:
            continue
        try:
            hold = held_out(quantity, recent[quantity])
            parts = [part & set(hold.groups) for part in held if part & set(hold.groups)]
            fit = _Fit(quantity, kinds, options)
            folds[quantity] = [hold.score(part, fit) for part in parts]
            artefacts |= {(quantity, kind): each for kind, each in fit(hold.examples).items()}
        except ValueError as error:
            raise TooLittle(str(error)) from error
        if not parts:
            raise TooLittle(f"{quantity}: no recording of the newest programs is long enough")
        whole, name = combined(folds[quantity]), f"{quantity}: {RELATIVE}"
        candidate[name], plain[name] = whole.metrics[RELATIVE], whole.baselines[f"{UNTRAINED}, {RELATIVE}"]
        if active is not None:
            frozen = _Frozen(active.experts.util if quantity == "util" else active.experts.memory)
            before[name] = combined([hold.score(part, frozen) for part in parts]).metrics[RELATIVE]
    rivals = {"the untrained mixture": plain} | ({} if active is None else {active.card.version: before})
    title, best = min(rivals.items(), key=lambda rival: sum(rival[1].values()))
    if not no_worse(candidate, best):
        return Comparison(f"worse than {title} on the newest programs", candidate, best, None)
    trained = demand_trained(
        artefacts,
        [own],
        origin,
        folds=folds,
        protocol="the newest programs of this cluster, forecast by what was trained on the others",
        options={"tick_s": 1.0, "groups": order, **asdict(options)},
    )
    return Comparison(f"not worse than {title} on the newest programs", candidate, best, trained)


def no_worse(candidate: Mapping[str, float], rival: Mapping[str, float]) -> bool:
    """Whether the errors of a candidate, utilisation and memory together, do not exceed another's."""
    return sum(candidate.values()) <= sum(rival.values()) + SAME


@dataclass(frozen=True, slots=True)
class _Fit:
    """Trains the experts of one quantity."""

    quantity: Quantity
    kinds: tuple[ExpertKind, ...]
    options: TrainingOptions

    def __call__(self, examples: Examples) -> Mapping[ExpertKind, DemandArtefact]:
        return fit_demand(examples, SETTINGS[self.quantity], self.kinds, self.options)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """Trains nothing: the experts there are."""

    artefacts: tuple[DemandArtefact, ...]

    def __call__(self, _examples: Examples) -> Mapping[ExpertKind, DemandArtefact]:
        return {each.kind: each for each in self.artefacts}


__all__ = [
    "LEAST_GROUPS",
    "MOST_TICKS",
    "OWN_DATA",
    "ActiveExperts",
    "ActivePairs",
    "Comparison",
    "TooLittle",
    "compare_demand",
    "compare_interference",
    "newest_groups",
    "surely_worse",
]
