"""From data to a model with a card: fitted on everything, judged on groups that it had not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from cotenant.forecasting.datasets.interference_models import save_models
from cotenant.forecasting.datasets.model_card import Card, DataSource, Kind
from cotenant.forecasting.datasets.pair_sources import Mode, PairData
from cotenant.forecasting.datasets.registry import FEATURES, INTERFERENCE_FILE
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.datasets.series_sources import SeriesData
from cotenant.forecasting.demand.engine import MixtureSettings
from cotenant.forecasting.demand.mixture import MEMORY_SCALES, UTIL_SCALES
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.table import UTIL
from cotenant.forecasting.training.demand_artefact import KINDS, DemandArtefact, save_artefact
from cotenant.forecasting.training.demand_artefact import Kind as ExpertKind
from cotenant.forecasting.training.demand_fit import WARM_UP, Examples, TrainingOptions, fit_demand
from cotenant.forecasting.training.interference import (
    LEAST_ROWS,
    USUAL_OPTIONS,
    InterferenceOptions,
    fit_interference,
)
from cotenant.forecasting.training.objectives import (
    DemandHoldOut,
    FitPairs,
    Groups,
    group_names,
    interference_folds,
    scored_pairs,
    shuffled,
)
from cotenant.forecasting.training.scores import FoldScore, combined

Progress = Callable[[str, int, int], None]  # what, done, of how many
Quantity = str  # "util" or "memory"
GROUPS: tuple[Groups, ...] = get_args(Groups)

MEMORY_EXPERTS: tuple[ExpertKind, ...] = ("trees",)  # memory moves in steps, which nets smooth away
MOST_FOLDS = 5  # of demand: a training each
SETTINGS: Mapping[Quantity, MixtureSettings] = {"util": UTIL_SCALES[0][1], "memory": MEMORY_SCALES[0][1]}


def silent(_what: str, _done: int, _of: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A model ready for the registry.

    Attributes:
        card: Its card, version and files not yet known.
        write: Writes its files into a folder.
        folds: How it was judged, a score per held-out group.
    """

    card: Card
    write: Callable[[Path], None]
    folds: tuple[FoldScore, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a card says of the run that made it.

    Attributes:
        made_at: ISO 8601, UTC.
        program: Version of cotenant.
    """

    made_at: str
    program: str


# ---------------------------------------- interference


def train_interference(
    data: Sequence[PairData],
    origin: Origin,
    *,
    groups: Groups = "family",
    seed: int = 0,
    options: InterferenceOptions = USUAL_OPTIONS,
    progress: Progress = silent,
) -> Trained:
    """Fit interference models on all data, and judge the recipe by group hold-out.

    Args:
        data: Measured pairs, all of one sharing mode.
        origin: For the card.
        groups: What is held out; where there are too few families, jobs are.
        seed: Of the order of the groups; the fit draws nothing.
        options: Of the fit.
        progress: Told after every held-out group and the fit.

    Raises:
        DataError: There is too little, no job has a utilisation, or the data are of several modes.
    """
    observations, mode = pooled(data)
    folds, held = judged_interference(observations, recipe(mode, options), groups, seed, progress)
    progress("fitting on everything", 0, 1)
    sources = [each.source for each in data]
    models = fit_interference(
        observations,
        "; ".join(each.source for each in sources),
        "; ".join(sorted({each.licence for each in sources})),
        mode,
        options,
    )
    progress("fitting on everything", 1, 1)
    protocol = (
        f"leave one {held} out ({len(folds)} of them), each ordered pair that touches it predicted; errors of the "
        "normalised throughput"
    )
    chosen = {"mode": mode, "held_out": held, **asdict(options)}
    return interference_trained(models, sources, origin, folds=folds, protocol=protocol, options=chosen)


def interference_trained(
    models: InterferenceModels,
    data: Sequence[DataSource],
    origin: Origin,
    *,
    folds: Sequence[FoldScore],
    protocol: str,
    options: Mapping[str, object],
) -> Trained:
    """Put fitted interference models and their scores together."""
    whole = combined(folds)
    card = _card(
        "interference",
        origin,
        data,
        metrics=whole.metrics,
        baselines=whole.baselines,
        protocol=protocol,
        seed=None,
        options=options,
    )
    return Trained(card, lambda folder: save_models(folder / INTERFERENCE_FILE, models), tuple(folds))


def recipe(mode: Mode | None, options: InterferenceOptions = USUAL_OPTIONS) -> FitPairs:
    """Return the fit as the hold-outs want it; see ``fit_pairs`` for the mode."""
    return lambda observations: fit_interference(observations, "hold-out", "none", mode, options)


def pooled(data: Sequence[PairData]) -> tuple[list[Observation], Mode]:
    """Put the observations of all data together.

    Raises:
        DataError: There are too few, no job has a utilisation, or they are of several modes.
    """
    modes = sorted({each.mode for each in data})
    if len(modes) != 1:
        raise DataError(
            f"mode: {' and '.join(modes) or 'none'} together are not accepted; train one model per sharing mode"
        )
    for each in data:
        if all(job.focal.source == "unknown" for job in each.observations):
            raise DataError(
                f"{each.source.source}: no job in it has a utilisation ({UTIL}), which every interference model needs "
                "to serve jobs it has never met; measure the jobs alone too"
            )
    observations = [observation for each in data for observation in each.observations]
    pairs = len(scored_pairs([each for each in observations if each.key is not None]))
    if pairs < LEAST_ROWS:
        raise DataError(
            f"{pairs} ordered pairs of jobs are too few to train on; give at least {LEAST_ROWS}, of several families"
        )
    return observations, modes[0]


def judged_interference(
    observations: Sequence[Observation], fit: FitPairs, groups: Groups, seed: int, progress: Progress = silent
) -> tuple[tuple[FoldScore, ...], Groups]:
    """Score a recipe by group hold-out; jobs are held out where families are too few.

    Returns:
        A score per group, and what the groups were.

    Raises:
        DataError: Neither can be held out.
    """
    tries: tuple[Groups, ...] = ("family", "job") if groups == "family" else ("job",)
    why = ""
    for held in tries:
        count = len(set(group_names(observations, held).values()))
        folds: list[FoldScore] = []
        try:
            for fold in interference_folds(observations, fit, groups=held, seed=seed):
                folds.append(fold)
                progress(f"holding out every {held}", len(folds), count)
        except ValueError as error:
            why = str(error)
            continue
        if folds:
            progress(f"holding out every {held}", count, count)
            return tuple(folds), held
    raise DataError(
        f"there is too little to hold a group out and train on the rest ({why}); at least {LEAST_ROWS} ordered pairs "
        "must be left without any one job"
    )


# ---------------------------------------- demand


def train_demand_experts(
    data: Sequence[SeriesData],
    origin: Origin,
    *,
    experts: Sequence[ExpertKind] = KINDS,
    options: TrainingOptions | None = None,
    progress: Progress = silent,
) -> Trained:
    """Train demand experts on all data, and judge the recipe by group hold-out.

    Args:
        data: Recorded series.
        origin: For the card.
        experts: Which experts; for memory only ``MEMORY_EXPERTS`` of them.
        options: Of the training.
        progress: Told after every step of the work.

    Raises:
        DataError: There is too little.
    """
    options = TrainingOptions() if options is None else options
    artefacts: dict[tuple[Quantity, ExpertKind], DemandArtefact] = {}
    folds: dict[Quantity, Sequence[FoldScore]] = {}
    series = by_quantity(data)
    for quantity, kinds in expert_kinds(experts).items():
        if not series[quantity] or not kinds:
            continue
        hold = held_out(quantity, series[quantity])
        folds[quantity] = judged_demand(quantity, hold, kinds, options, progress)
        told = _told(f"{quantity}, everything", progress)
        fitted = fit_demand(hold.examples, SETTINGS[quantity], kinds, options, told)
        artefacts |= {(quantity, kind): artefact for kind, artefact in fitted.items()}

    return demand_trained(
        artefacts,
        [each.source for each in data],
        origin,
        folds=folds,
        protocol=f"sources dealt into at most {MOST_FOLDS} parts, each forecast by what was trained on the others",
        options={
            "tick_s": data[0].tick_s,
            "groups": sorted({each.source for found in series.values() for each in found}),
            **asdict(options),
        },
    )


def demand_trained(
    artefacts: Mapping[tuple[Quantity, ExpertKind], DemandArtefact],
    data: Sequence[DataSource],
    origin: Origin,
    *,
    folds: Mapping[Quantity, Sequence[FoldScore]],
    protocol: str,
    options: Mapping[str, object],
) -> Trained:
    """Put trained demand experts and their scores together; ``options`` holds the seed."""
    metrics: dict[str, float] = {}
    baselines: dict[str, float] = {}
    for quantity, found in folds.items():
        whole = combined(found)
        metrics |= {f"{quantity}: {name}": value for name, value in whole.metrics.items()}
        baselines |= {f"{quantity}: {name}": value for name, value in whole.baselines.items()}

    def write(folder: Path) -> None:
        for (quantity, kind), artefact in artefacts.items():
            save_artefact(artefact, folder / f"{quantity}-{kind}.npz")

    seed = options.get("seed")
    card = _card(
        "demand",
        origin,
        data,
        metrics=metrics,
        baselines=baselines,
        protocol=protocol,
        seed=seed if isinstance(seed, int) else None,
        options={"experts": [f"{quantity}-{kind}" for quantity, kind in artefacts], **options},
    )
    return Trained(card, write, tuple(fold for found in folds.values() for fold in found))


def by_quantity(data: Sequence[SeriesData]) -> dict[Quantity, list[ValueSeries]]:
    """Return the series of all data by what they are of.

    Raises:
        DataError: The data tick differently.
    """
    ticks = sorted({each.tick_s for each in data})
    if len(ticks) > 1:
        raise DataError(
            f"data: ticks of {ticks[0]:g} and {ticks[1]:g} s together are not accepted; train one at a time"
        )
    return {
        "util": [series for each in data for series in each.util],
        "memory": [series for each in data for series in each.memory],
    }


def expert_kinds(experts: Sequence[ExpertKind]) -> dict[Quantity, tuple[ExpertKind, ...]]:
    """Return which of the experts are trained for what."""
    return {"util": tuple(experts), "memory": tuple(kind for kind in experts if kind in MEMORY_EXPERTS)}


def held_out(quantity: Quantity, series: Sequence[ValueSeries]) -> DemandHoldOut:
    """Make series ready for hold-outs.

    Raises:
        DataError: There is too little.
    """
    try:
        return DemandHoldOut(series, SETTINGS[quantity], memory=quantity == "memory")
    except ValueError as error:
        longest = WARM_UP + max(SETTINGS[quantity].horizons)
        raise DataError(
            f"{quantity}: too little to train on: {error}; needed are two sources (programs, files) with more than "
            f"{longest} values in a row"
        ) from error


def judged_demand(
    quantity: Quantity,
    hold: DemandHoldOut,
    kinds: Sequence[ExpertKind],
    options: TrainingOptions,
    progress: Progress = silent,
) -> tuple[FoldScore, ...]:
    """Score a recipe: groups are dealt into at most ``MOST_FOLDS`` parts, each held out in turn."""
    groups = shuffled(hold.groups, options.seed)
    parts = [set(groups[start::MOST_FOLDS]) for start in range(min(MOST_FOLDS, len(groups)))]
    folds = []
    for number, part in enumerate(parts, 1):
        told = _told(f"{quantity}, without part {number} of {len(parts)}", progress)

        def train(examples: Examples, told: Progress = told) -> Mapping[ExpertKind, DemandArtefact]:
            return fit_demand(examples, SETTINGS[quantity], kinds, options, told)

        try:
            folds.append(hold.score(part, train))
        except ValueError as error:
            raise DataError(f"{quantity}: too little to train on: {error}") from error
    return tuple(folds)


def _told(what: str, progress: Progress) -> Progress:
    return lambda step, done, of: progress(f"{what}: {step}", done, of)


def _card(
    kind: Kind,
    origin: Origin,
    data: Sequence[DataSource],
    *,
    metrics: Mapping[str, float],
    baselines: Mapping[str, float],
    protocol: str,
    seed: int | None,
    options: Mapping[str, object],
) -> Card:
    return Card(
        kind=kind,
        version="",
        made_at=origin.made_at,
        program=origin.program,
        features_version=FEATURES[kind],
        data=tuple(data),
        metrics=metrics,
        baselines=baselines,
        protocol=protocol,
        seed=seed,
        options=dict(options),
    )


__all__ = [
    "GROUPS",
    "MOST_FOLDS",
    "SETTINGS",
    "Origin",
    "Progress",
    "Trained",
    "by_quantity",
    "demand_trained",
    "expert_kinds",
    "held_out",
    "interference_trained",
    "judged_demand",
    "judged_interference",
    "pooled",
    "recipe",
    "silent",
    "train_demand_experts",
    "train_interference",
]
