"""Training of demand experts from recorded series: boosted trees, a recurrent unit, a causal convolution.

Every net and tree learns from what the untrained mixture would have seen at each tick, the analogues included; the
examples are made by running that very mixture over the series.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from cotenant.forecasting.demand.arrays import Array
from cotenant.forecasting.demand.engine import MixtureSettings, Moment, SeriesMixture
from cotenant.forecasting.demand.features import FEATURES_VERSION, features
from cotenant.forecasting.demand.nets import INPUT_LIMIT
from cotenant.forecasting.training.demand_artefact import KINDS, DemandArtefact, Kind
from cotenant.forecasting.training.demand_nets import GruNet, TcnNet

UNTIE = 1e-3  # of the usual move
WARM_UP = 20  # ticks at the beginning of a series, and of a piece of one, that are not learnt from
PIECE = 84  # ticks of one training sequence
BATCH = 32
ROOM = 1.1  # readings up to so many times the largest value possible are taken for it

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How long and how fast to train.

    Attributes:
        seed: Of everything random.
        updates: Of the nets' weights.
        learning_rate: Of the nets.
        trees: Per horizon.
        leaves: Of a tree, at most.
        tree_rate: Learning rate of the trees.
        most_examples: Trees learn from at most so many, drawn at random.
    """

    seed: int = 0
    updates: int = 400
    learning_rate: float = 3e-3
    trees: int = 150
    leaves: int = 31
    tree_rate: float = 0.05
    most_examples: int = 40_000

    def __post_init__(self) -> None:
        """Raise ValueError where a value makes no sense."""
        for name, least in (("seed", 0), ("updates", 1), ("trees", 1), ("leaves", 2), ("most_examples", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: {value} is not accepted; give at least {least}")
        for name in ("learning_rate", "tree_rate"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name}: {value:g} is not accepted; give more than 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Examples:
    """What was known at each tick of each series, and what came.

    Attributes:
        inputs: Per series features of shape (ticks, F).
        moves: Per series the change until each horizon in sizes, shape (ticks, horizons); NaN beyond the end.
        origins: Which of the series given to ``collect`` each comes from: a series with gaps makes several.
        untrained: Per series what the untrained mixture and the sliding median missed, as ``moves`` with a last axis.
    """

    inputs: list[Array]
    moves: list[Array]
    origins: list[int]
    untrained: list[Array]

    def of(self, series: Container[int]) -> Examples:
        """Those that come from these series, in the same order."""
        picked = [i for i, origin in enumerate(self.origins) if origin in series]
        return Examples(
            [self.inputs[i] for i in picked],
            [self.moves[i] for i in picked],
            [self.origins[i] for i in picked],
            [self.untrained[i] for i in picked],
        )


def train_demand(
    series: Sequence[Floats],
    settings: MixtureSettings,
    kinds: Sequence[Kind] = KINDS,
    options: TrainingOptions | None = None,
    progress: Progress | None = None,
) -> dict[Kind, DemandArtefact]:
    """Train further experts for a mixture.

    Args:
        series: Recorded series at the mixture's ticks, in its units; gaps (NaN) end a series.
        settings: Of the mixture the experts are for.
        kinds: Which experts to train.
        options: How; the defaults suit a few thousand ticks.
        progress: Told after every step of the work.

    Returns:
        One artefact per kind.

    Raises:
        ValueError: No series is long enough to learn from.
    """
    return fit_demand(collect(series, settings), settings, kinds, options, progress)


def fit_demand(
    examples: Examples,
    settings: MixtureSettings,
    kinds: Sequence[Kind] = KINDS,
    options: TrainingOptions | None = None,
    progress: Progress | None = None,
) -> dict[Kind, DemandArtefact]:
    """Do what ``train_demand`` does from what ``collect`` found: for whoever trains more than once on the same series.

    Raises:
        ValueError: There is nothing to learn from.
    """
    if not examples.inputs:
        raise ValueError("examples: none is not accepted; give at least one series to learn from")
    options = TrainingOptions() if options is None else options
    ticks = sum(len(inputs) for inputs in examples.inputs)
    card = {"series": len(examples.inputs), "ticks": ticks, "seed": options.seed}
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"kinds: {unknown[0]!r} is not accepted; give some of {', '.join(KINDS)}")
    trained: dict[Kind, DemandArtefact] = {}
    for kind in kinds:
        if kind == "trees":
            arrays = _fit_trees(examples, options, progress)
        else:
            arrays = _fit_net(kind, examples, options, progress)
        arrays["horizons"] = np.array(settings.horizons)
        arrays["features_version"] = np.array([FEATURES_VERSION])
        trained[kind] = DemandArtefact(kind, settings.horizons, arrays, card)
    return trained


def collect(series: Sequence[Floats], settings: MixtureSettings, units: Sequence[Floats] | None = None) -> Examples:
    """Run the untrained mixture over the series and keep what an expert would have been told.

    Args:
        series: Their values at the mixture's ticks; gaps (NaN) end a series.
        settings: Of the mixture.
        units: What each value is divided by before the mixture sees it, shapes as of ``series``; where it changes, the
            mixture starts afresh, and what it is told of the level goes on (see ``memory_units``). None = 1.

    Raises:
        ValueError: No series has more than ``WARM_UP`` + longest horizon values in a row, or one holds what cannot be a
            value in its units.
    """
    units = [np.ones(len(each)) for each in series] if units is None else units
    series = [np.asarray(each, dtype=np.float64) for each in series]
    scaled = [_checked(each / unit, i, settings.most) for i, (each, unit) in enumerate(zip(series, units, strict=True))]
    shortest = WARM_UP + max(settings.horizons)
    places = [unbroken(np.where(np.isfinite(each), np.arange(len(each)), np.nan)) for each in scaled]
    found = [(part.astype(np.intp), i) for i, parts in enumerate(places) for part in parts if len(part) > shortest]
    if not found:
        raise ValueError(f"none of {len(series)} series has more than {shortest} values in a row; give longer ones")
    found.sort(key=lambda each: len(each[0]), reverse=True)
    lengths = np.array([len(part) for part, _ in found])
    values, sizes = np.zeros((lengths[0], len(found))), np.ones((lengths[0], len(found)))
    for row, (part, i) in enumerate(found):
        values[: len(part), row], sizes[: len(part), row] = scaled[i][part], units[i][part]
    recorder = _Recorder(len(found))
    mixture = SeriesMixture(settings, len(found), (recorder,))
    points = np.full((lengths[0], len(found), len(settings.horizons)), np.nan)
    for tick in range(lengths[0]):
        rows = np.arange(int((lengths > tick).sum()))
        for row in np.flatnonzero(sizes[tick, rows] != sizes[tick - 1, rows]).tolist() if tick else rows.tolist():
            mixture.rescale(row, sizes[tick, row])
        said = mixture.step(rows, values[tick, rows].astype(np.float32))
        points[tick, rows] = said * sizes[tick, rows, None]
    moves, untrained = [], []
    for row, length in enumerate(lengths.tolist()):
        part = values[:length, row] * sizes[:length, row]
        ahead = np.full((length, len(settings.horizons)), np.nan, dtype=np.float32)
        for j, horizon in enumerate(settings.horizons):
            ahead[:-horizon, j] = part[horizon:] - part[:-horizon]
        median = np.array(recorder.medians[row])[:, None].repeat(len(settings.horizons), axis=1)
        said = np.stack([points[:length, row], median], axis=2)
        moves.append(ahead)
        untrained.append(((part[:, None] + ahead)[:, :, None] - said).astype(np.float32))
    return Examples([np.stack(told) for told in recorder.told], moves, [origin for _, origin in found], untrained)


def _checked(series: Floats, place: int, most: float) -> Floats:
    values = np.asarray(series, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"series {place}: shape {values.shape} is not accepted; give one value per tick")
    absurd = np.flatnonzero(np.isfinite(values) & ((values < 0.0) | (values > ROOM * most)))
    if len(absurd):
        at = int(absurd[0])
        raise ValueError(
            f"series {place}: {values[at]:g} at tick {at} is not accepted; give 0 to {most:g}, NaN where not known"
        )
    return np.where(np.isfinite(values), np.minimum(values, most), np.nan)


class _Recorder:
    """An expert that says nothing and remembers what it was told."""

    name = "recorder"
    width = 0
    expected: Array | None = None

    def __init__(self, rows: int) -> None:
        self.told: list[list[Array]] = [[] for _ in range(rows)]
        self.medians: list[list[float]] = [[] for _ in range(rows)]

    def resize(self, rows: int) -> None:
        self.told += [[] for _ in range(rows - len(self.told))]
        self.medians += [[] for _ in range(rows - len(self.medians))]

    def clear(self, row: int) -> None:
        """What was told stays told."""

    def step(self, moment: Moment) -> Array:
        for row, inputs in zip(moment.rows.tolist(), features(moment), strict=True):
            self.told[row].append(inputs)
        medians = moment.simple[:, 0, moment.common - 2] * moment.sizes
        for row, median in zip(moment.rows.tolist(), medians.tolist(), strict=True):
            self.medians[row].append(median)
        return np.empty((len(moment.rows), moment.simple.shape[1], 0), dtype=np.float32)


def unbroken(values: Floats) -> list[Floats]:
    """Cut a series at its gaps (NaN) and return what is between them."""
    known = np.isfinite(values)
    breaks = np.flatnonzero(np.diff(known.astype(np.int8))) + 1
    return [part for part in np.split(values, breaks) if len(part) and np.isfinite(part[0])]


def _fit_trees(
    examples: Examples, options: TrainingOptions, progress: Progress | None
) -> dict[str, npt.NDArray[np.generic]]:
    horizons = examples.moves[0].shape[1]
    models = []
    for j in range(horizons):
        models.append(_fit_horizon(examples, j, options))
        if progress is not None:
            progress("trees", j + 1, horizons)
    expected = _expected(examples, options)
    return flatten_trees(models) | ({} if expected is None else {"expected": expected})


def _fit_horizon(examples: Examples, j: int, options: TrainingOptions) -> HistGradientBoostingRegressor:
    inputs = np.concatenate([each[WARM_UP:] for each in examples.inputs])
    moves = np.concatenate([each[WARM_UP:, j] for each in examples.moves])
    known = np.flatnonzero(np.isfinite(moves))
    if len(known) > options.most_examples:
        known = np.random.default_rng([options.seed, j]).choice(known, options.most_examples, replace=False)
    model = HistGradientBoostingRegressor(
        loss="absolute_error",
        max_iter=options.trees,
        max_leaf_nodes=options.leaves,
        learning_rate=options.tree_rate,
        min_samples_leaf=20,
        early_stopping=False,
        random_state=options.seed,
    )
    return model.fit(inputs[known], untied(moves[known], np.random.default_rng([options.seed, j])))


def untied(moves: npt.NDArray[np.floating], rng: np.random.Generator) -> Floats:
    """Return moves with a little noise, for boosted trees that minimise the absolute error; same shape.

    To the library, a move that is exactly what was predicted is one that was underestimated: where most moves are 0,
    all examples pull the same way and a tree finds nothing to split. With noise half of them pull either way.
    """
    little = UNTIE * float(np.abs(moves).mean())
    return np.asarray(moves + rng.uniform(-little, little, moves.shape), dtype=np.float64)


def _expected(examples: Examples, options: TrainingOptions) -> Array | None:
    """Return what to expect on new series, as ``Expert.expected``: half of the series foretold from the other half.

    The series are halved as they came, so that those of one source mostly stay together. None with a single series.
    """
    origins = sorted(set(examples.origins))
    middle = len(origins) // 2
    if not middle:
        return None
    losses: list[list[Floats]] = [[] for _ in examples.moves[0].T]
    for fitted, held in ((origins[:middle], origins[middle:]), (origins[middle:], origins[:middle])):
        seen, new = examples.of(set(fitted)), examples.of(set(held))
        inputs, moves, missed = (
            np.concatenate([each[WARM_UP:] for each in part]) for part in (new.inputs, new.moves, new.untrained)
        )
        for j, found in enumerate(losses):
            known = np.isfinite(moves[:, j])
            own = _fit_horizon(seen, j, options).predict(inputs[known]) - moves[known, j]
            found.append(np.abs(np.stack([own, moves[known, j], *missed[known, j].T])))
    return np.stack([np.concatenate(each, axis=1).mean(axis=1) for each in losses], axis=1).astype(np.float32)


def flatten_trees(models: Sequence[HistGradientBoostingRegressor]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the nodes of fitted models, one per horizon, as the arrays that ``TreesExpert`` reads.

    The library has no public way to the nodes; a test compares the result with its own predictions.
    """
    columns: dict[str, list[npt.NDArray[np.generic]]] = {
        n: [] for n in ("feature", "threshold", "left", "right", "value")
    }
    starts, depth, offset = [], 0, 0
    for model in models:
        roots = []
        for (tree,) in model._predictors:
            nodes = tree.nodes
            leaf = nodes["is_leaf"].astype(bool)
            columns["feature"].append(np.where(leaf, -1, nodes["feature_idx"].astype(np.int64)).astype(np.int32))
            columns["threshold"].append(_single(nodes["num_threshold"]))
            columns["left"].append((np.where(leaf, 0, nodes["left"]) + offset).astype(np.int32))
            columns["right"].append((np.where(leaf, 0, nodes["right"]) + offset).astype(np.int32))
            columns["value"].append(np.where(leaf, nodes["value"], 0.0).astype(np.float32))
            roots.append(offset)
            depth = max(depth, int(nodes["depth"].max()))
            offset += len(nodes)
        starts.append(roots)
    arrays: dict[str, npt.NDArray[np.generic]] = {name: np.concatenate(parts) for name, parts in columns.items()}
    base = [float(np.ravel(model._baseline_prediction)[0]) for model in models]
    return arrays | {"start": np.array(starts), "base": np.array(base, dtype=np.float32), "depth": np.array(depth)}


def _single(thresholds: Floats) -> npt.NDArray[np.float32]:
    """Return thresholds in single precision, rounded down: a single-precision value is on the same side of both."""
    near = np.clip(thresholds, -3e38, 3e38).astype(np.float32)
    return np.where(near.astype(np.float64) > thresholds, np.nextafter(near, np.float32(-np.inf)), near)


def _fit_net(
    kind: Kind, examples: Examples, options: TrainingOptions, progress: Progress | None
) -> dict[str, npt.NDArray[np.generic]]:
    every = np.concatenate([each[WARM_UP:] for each in examples.inputs])
    mean, scale = every.mean(axis=0), every.std(axis=0) + np.float32(1e-3)
    known = np.concatenate([each[WARM_UP:] for each in examples.moves])
    usual = np.nanmean(np.abs(known), axis=0) + 1e-4  # every horizon counts the same
    pieces = [
        (np.clip((inputs[at : at + PIECE] - mean) / scale, -INPUT_LIMIT, INPUT_LIMIT), moves[at : at + PIECE])
        for inputs, moves in zip(examples.inputs, examples.moves, strict=True)
        for at in range(0, max(1, len(inputs) - WARM_UP), PIECE - WARM_UP)
    ]
    sources = torch.zeros(len(pieces), PIECE, every.shape[1])
    targets = torch.full((len(pieces), PIECE, known.shape[1]), torch.nan)
    for i, (inputs, moves) in enumerate(pieces):
        sources[i, : len(inputs)], targets[i, : len(moves)] = torch.from_numpy(inputs), torch.from_numpy(moves)
    targets[:, :WARM_UP] = torch.nan
    weights = torch.tensor(1.0 / usual, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        net = GruNet(every.shape[1], known.shape[1]) if kind == "gru" else TcnNet(every.shape[1], known.shape[1])
        _descend(net, _Lesson(sources, targets, weights), options, progress)
    arrays = net.arrays()
    arrays["input.mean"], arrays["input.scale"] = mean.astype(np.float32), scale.astype(np.float32)
    return arrays


@dataclass(frozen=True, slots=True)
class _Lesson:
    """Pieces of series: (pieces, ticks, F) and (pieces, ticks, horizons); weights of the horizons."""

    sources: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def _descend(net: GruNet | TcnNet, lesson: _Lesson, options: TrainingOptions, progress: Progress | None) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.updates + 1)
    order = torch.empty(0, dtype=torch.long)
    for update in range(options.updates):
        if not len(order):
            order = torch.randperm(len(lesson.sources))
        rows, order = order[:BATCH], order[BATCH:]
        wanted = lesson.targets[rows]
        known = torch.isfinite(wanted)
        errors = (net(lesson.sources[rows]) - torch.nan_to_num(wanted)).abs() * lesson.weights
        optimizer.zero_grad()
        (errors[known].sum() / known.sum().clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(type(net).__name__, update + 1, options.updates)
