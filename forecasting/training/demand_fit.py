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
    trees: int = 100
    leaves: int = 15
    tree_rate: float = 0.08
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
        moves: Per series the change until each horizon, shape (ticks, horizons); NaN beyond the end.
        origins: Which of the series given to ``collect`` each comes from: a series with gaps makes several.
    """

    inputs: list[Array]
    moves: list[Array]
    origins: list[int]

    def of(self, series: Container[int]) -> Examples:
        """Those that come from these series, in the same order."""
        picked = [i for i, origin in enumerate(self.origins) if origin in series]
        return Examples(
            [self.inputs[i] for i in picked], [self.moves[i] for i in picked], [self.origins[i] for i in picked]
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


def collect(series: Sequence[Floats], settings: MixtureSettings) -> Examples:
    """Run the untrained mixture over the series and keep what an expert would have been told.

    Raises:
        ValueError: No series has more than ``WARM_UP`` + longest horizon values in a row, or one holds what cannot be a
            value in its units.
    """
    series = [_checked(each, i, settings.most) for i, each in enumerate(series)]
    shortest = WARM_UP + max(settings.horizons)
    found = [(part, i) for i, each in enumerate(series) for part in unbroken(each) if len(part) > shortest]
    if not found:
        raise ValueError(f"none of {len(series)} series has more than {shortest} values in a row; give longer ones")
    found.sort(key=lambda each: len(each[0]), reverse=True)
    parts = [part for part, _ in found]
    recorder = _Recorder(len(parts))
    mixture = SeriesMixture(settings, len(parts), (recorder,))
    lengths = np.array([len(part) for part in parts])
    for tick in range(lengths[0]):
        rows = np.arange(int((lengths > tick).sum()))
        mixture.step(rows, np.array([parts[row][tick] for row in rows], dtype=np.float32))
    moves = []
    for part in parts:
        ahead = np.full((len(part), len(settings.horizons)), np.nan, dtype=np.float32)
        for j, horizon in enumerate(settings.horizons):
            ahead[:-horizon, j] = part[horizon:] - part[:-horizon]
        moves.append(ahead)
    return Examples([np.stack(told) for told in recorder.told], moves, [origin for _, origin in found])


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

    def __init__(self, rows: int) -> None:
        self.told: list[list[Array]] = [[] for _ in range(rows)]

    def resize(self, rows: int) -> None:
        self.told += [[] for _ in range(rows - len(self.told))]

    def clear(self, row: int) -> None:
        self.told[row] = []

    def step(self, moment: Moment) -> Array:
        for row, inputs in zip(moment.rows.tolist(), features(moment), strict=True):
            self.told[row].append(inputs)
        return np.empty((len(moment.rows), moment.simple.shape[1], 0), dtype=np.float32)


def unbroken(values: Floats) -> list[Floats]:
    """Cut a series at its gaps (NaN) and return what is between them."""
    known = np.isfinite(values)
    breaks = np.flatnonzero(np.diff(known.astype(np.int8))) + 1
    return [part for part in np.split(values, breaks) if len(part) and np.isfinite(part[0])]


def _fit_trees(
    examples: Examples, options: TrainingOptions, progress: Progress | None
) -> dict[str, npt.NDArray[np.generic]]:
    inputs = np.concatenate([each[WARM_UP:] for each in examples.inputs])
    moves = np.concatenate([each[WARM_UP:] for each in examples.moves])
    rng = np.random.default_rng(options.seed)
    models = []
    for j in range(moves.shape[1]):
        known = np.flatnonzero(np.isfinite(moves[:, j]))
        if len(known) > options.most_examples:
            known = rng.choice(known, options.most_examples, replace=False)
        model = HistGradientBoostingRegressor(
            loss="absolute_error",
            max_iter=options.trees,
            max_leaf_nodes=options.leaves,
            learning_rate=options.tree_rate,
            min_samples_leaf=20,
            early_stopping=False,
            random_state=options.seed,
        )
        models.append(model.fit(inputs[known], moves[known, j]))
        if progress is not None:
            progress("trees", j + 1, moves.shape[1])
    return flatten_trees(models)


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
