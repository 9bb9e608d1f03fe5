"""Fits ``ColdStartClasses`` on single runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from cotenant.forecasting.characterisation.clusters import clustered, scaled
from cotenant.forecasting.characterisation.coldstart import (
    HIGHEST,
    LEVELS,
    LINES,
    QUANTILES,
    QUANTITIES,
    ColdStartClasses,
    CurvePoints,
    Descriptors,
    curve_at,
    curve_key,
    normalised,
)
from cotenant.forecasting.characterisation.tables import MEMORY, UTIL, Runs

Array = npt.NDArray[np.float64]
Lines = dict[str, dict[str, tuple[float, float, float]]]

_MIN_FAMILIES = 3
_MIN_RESIDUALS = 8


@dataclass(frozen=True, slots=True)
class Residuals:
    """Quantity → actual − predicted of the runs of one family that were left out together, shape (runs,) each."""

    family: str
    errors: Mapping[str, Array]


def fit(runs: Runs, classes: int = 3, seed: int = 0) -> ColdStartClasses:
    """Fit classes and priors on single runs.

    Args:
        runs: The runs; ``device_memory_bytes`` must be known. Where there is no column ``util_mean`` (percent) the
            maximum stands in for it: too high, which is the safe side.
        classes: Number of classes.
        seed: Of K-means.

    Raises:
        ValueError: The device's memory is not known, or there are too few different runs for so many classes.
    """
    if runs.device_memory_bytes is None:
        raise ValueError("device_memory_bytes is not known: memory in percent cannot become bytes without it")
    table = _fractions(runs.table)
    points = table[["util_p95", "memory"]].to_numpy(dtype=float)
    different = len(np.unique(points, axis=0))
    if different < classes:
        raise ValueError(f"classes={classes} is not accepted: there are {different} different runs")
    errors, tested = _errors(table)
    labels = clustered(scaled(points, "standard"), classes, seed)
    centres = [points[labels == label].mean(axis=0) for label in range(classes)]
    widths = [width if width > 0 else 1.0 for width in points.std(axis=0).tolist()]
    lines = _fit_lines(table)
    return ColdStartClasses(
        device_memory_bytes=float(runs.device_memory_bytes),
        architectures={key: _curve(rows) for key, rows in _by_architecture(table)},
        families=_means(table),
        offsets=_offsets(table, lines),
        lines=lines,
        errors=errors,
        centres=tuple((float(util), float(memory)) for util, memory in centres),
        scale=(widths[0], widths[1]),
        trained_on=runs.source,
        gpu_types=runs.gpu_types,
        tested=tested,
    )


def _fractions(table: pd.DataFrame) -> pd.DataFrame:
    mean = table["util_mean"].fillna(table[UTIL]) if "util_mean" in table else table[UTIL]
    return pd.DataFrame(
        {
            "family": table["family"].astype(str),
            "architecture": table["architecture"].astype(str),
            "kind": table["kind"].astype(str),
            "batch": np.log2(table["batch"].to_numpy(dtype=float)),
            "size": np.log2(table["parameters"].to_numpy(dtype=float)) if "parameters" in table else np.nan,
            "util_mean": mean / 100.0,
            "util_p95": table[UTIL] / 100.0,
            "memory": table[MEMORY] / 100.0,
        }
    )


def _by_architecture(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    keys = [curve_key(a, k) for a, k in zip(table["architecture"], table["kind"], strict=True)]
    for key, rows in table.groupby(np.array(keys), sort=False):
        yield str(key), rows


def _curve(rows: pd.DataFrame) -> CurvePoints:
    means = rows.groupby("batch")[list(QUANTITIES)].mean()
    first = rows.iloc[0]
    values = {name: tuple(means[name].tolist()) for name in QUANTITIES}
    return CurvePoints(str(first["family"]), str(first["kind"]), tuple(map(float, means.index)), values)


def _fit_lines(table: pd.DataFrame) -> Lines:
    lines: Lines = {"population": {name: (float(table[name].mean()), 0.0, 0.0) for name in QUANTITIES}}
    sized = table[table["size"].notna()]
    if sized["family"].nunique() >= _MIN_FAMILIES - 1:  # one less while a family is left out
        lines["general"] = {}
        for name in QUANTITIES:
            base, per_batch, per_size = _ridge(sized, name, ["batch", "size"])
            lines["general"][name] = (base, per_batch, per_size)
    return lines


def _ridge(table: pd.DataFrame, target: str, features: list[str]) -> tuple[float, ...]:
    """Return (intercept, slopes) with a penalty of one run's weight on the slopes of the standardised features."""
    x, y = table[features].to_numpy(dtype=float), table[target].to_numpy(dtype=float)
    centre, width = x.mean(axis=0), x.std(axis=0)
    width = np.where(width > 0, width, 1.0)
    z = (x - centre) / width
    slopes = np.linalg.solve(z.T @ z + np.eye(len(features)), z.T @ (y - y.mean())) / width
    return (float(y.mean() - slopes @ centre), *map(float, slopes))


def _along(lines: Lines, level: str, name: str, table: pd.DataFrame) -> Array:
    base, per_batch, per_size = lines[level][name]
    size = table["size"].fillna(0.0).to_numpy(dtype=float)
    return np.asarray(base + per_batch * table["batch"].to_numpy(dtype=float) + per_size * size)


def _means(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return each family's means, every architecture alike."""
    found = {}
    for family, rows in table.groupby("family", sort=False):
        means = rows.groupby("architecture")[list(QUANTITIES)].mean()
        found[normalised(str(family))] = {name: float(means[name].mean()) for name in QUANTITIES}
    return found


def _offsets(table: pd.DataFrame, lines: Lines) -> dict[str, dict[str, float]]:
    """Return each family's mean error under the general line; none where sizes are not known."""
    found = {}
    sized = table[table["size"].notna()] if "general" in lines else table.iloc[:0]
    for family, rows in sized.groupby("family", sort=False):
        found[normalised(str(family))] = {
            name: float(np.mean(rows[name] - _along(lines, "general", name, rows))) for name in QUANTITIES
        }
    return found


def _errors(table: pd.DataFrame) -> tuple[dict[str, dict[str, tuple[float, ...]]], dict[str, str]]:
    """Return the error quantiles of every level, and which level's they are.

    A level that cannot be tested on enough runs of enough families has those of the next wider one: what it knows more
    can hardly make it worse, and by how much it is better nobody knows.
    """
    tests: dict[str, list[Residuals]] = _line_residuals(table) | {
        "family": list(_family_residuals(table)),
        "beyond": list(_curve_residuals(table, inside=False)),
        "architecture": list(_curve_residuals(table, inside=True)),
    }
    errors: dict[str, dict[str, tuple[float, ...]]] = {}
    tested: dict[str, str] = {}
    wider = {name: tuple(-1.0 if q < 0.5 else (0.0 if q == 0.5 else 1.0) for q in QUANTILES) for name in QUANTITIES}
    by = ""
    for level in reversed(LEVELS):
        parts = tests[level]
        pooled = {name: np.concatenate([part.errors[name] for part in parts]) for name in QUANTITIES if parts}
        families = {part.family for part in parts}
        if len(families) >= _MIN_FAMILIES and len(pooled["memory"]) >= _MIN_RESIDUALS:
            counts = [len(part.errors["memory"]) for part in parts]
            weights = np.concatenate([np.full(count, 1 / count) for count in counts])
            wider, by = {name: _quantiles(pooled[name], weights, len(parts)) for name in QUANTITIES}, level
        errors[level] = wider
        if by:
            tested[level] = by
    return errors, tested


def _line_residuals(table: pd.DataFrame) -> dict[str, list[Residuals]]:
    """Leave one family out; the general line is tested on runs whose size is known."""
    found: dict[str, list[Residuals]] = {level: [] for level in LINES}
    families = table["family"].unique()
    for family in families if len(families) >= _MIN_FAMILIES else ():
        held, rest = table[table["family"] == family], table[table["family"] != family]
        lines = _fit_lines(rest)
        for level in lines:
            tested = held[held["size"].notna()] if level == "general" else held
            if len(tested):
                errors = {name: _residual(tested[name], _along(lines, level, name, tested)) for name in QUANTITIES}
                found[level].append(Residuals(str(family), errors))
    return found


def _family_residuals(table: pd.DataFrame) -> Iterator[Residuals]:
    """Leave one architecture of a family with several out."""
    for family, rows in table.groupby("family", sort=False):
        names = rows["architecture"].unique()
        for name in names if len(names) > 1 else ():
            held = rows[rows["architecture"] == name]
            rest = table[(table["family"] != family) | (table["architecture"] != name)]
            lines, key, others = _fit_lines(rest), normalised(str(family)), rows[rows["architecture"] != name]
            offsets, means = _offsets(others, lines), _means(others)[key]
            known = key in offsets and bool(held["size"].notna().all())
            errors = {
                quantity: _residual(
                    held[quantity],
                    _along(lines, "general", quantity, held) + offsets[key][quantity]
                    if known
                    else np.full(len(held), means[quantity]),
                )
                for quantity in QUANTITIES
            }
            yield Residuals(str(family), errors)


def _curve_residuals(table: pd.DataFrame, inside: bool) -> Iterator[Residuals]:
    """Leave one batch size of an architecture with several out: those inside its curve, or its two ends."""
    for _, rows in _by_architecture(table):
        known = np.unique(rows["batch"])
        sizes = known[1:-1] if inside else known[[0, -1]]
        if len(known) < 2 or not len(sizes):
            continue
        parts: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        for size in sizes:
            held, rest = rows[rows["batch"] == size], _curve(rows[rows["batch"] != size])
            predicted = curve_at(rest, float(size))
            for name in QUANTITIES:
                parts[name] += (held[name] - predicted[name]).tolist()
        errors = {name: np.array(values) for name, values in parts.items()}
        yield Residuals(str(rows["family"].iloc[0]), errors)


def _residual(actual: pd.Series[float], predicted: Array) -> Array:
    return np.asarray(actual.to_numpy(dtype=float) - np.clip(predicted, 0.0, 1.0))


def _quantiles(residuals: Array, weights: Array, groups: int) -> tuple[float, ...]:
    """Return weighted quantiles (every group weighs the same), taken further out because the groups are few.

    With g groups a level q is replaced by q + (q − ½)/g, the correction of split conformal prediction with a group in
    the place of a point; beyond the last residual it stays there. The middle is 0, the estimate itself, where the
    outer quantiles allow it: a few groups cannot say by how much it is biased.
    """
    order = np.argsort(residuals)
    places = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    levels = np.clip([q + (q - 0.5) / groups for q in QUANTILES], 0.0, 1.0)
    found = np.interp(levels, places, residuals[order])
    middle = QUANTILES.index(0.5)
    found[middle] = np.clip(0.0, found[middle - 1], found[middle + 1])
    return tuple(found.tolist())


@dataclass(frozen=True, slots=True)
class ColdStartScore:
    """How good the priors are for runs that the model had not seen.

    Attributes:
        runs: Number of runs.
        mae: Quantity → mean absolute error of the middle, in percentage points.
        coverage: Quantity → part of the runs inside the 80 % interval.
        width: Quantity → mean width of that interval, in percentage points.
        reserved: Part of the runs whose memory is within what ``prior`` would reserve.
        classes: Part of the runs whose class is the one that their measured values belong to.
    """

    runs: int
    mae: Mapping[str, float]
    coverage: Mapping[str, float]
    width: Mapping[str, float]
    reserved: float
    classes: float


def unseen_families(runs: Runs, classes: int = 3) -> ColdStartScore:
    """Score priors of families that were left out of the fit, one family at a time.

    Raises:
        ValueError: There are fewer than four families: what is left cannot say how wrong it is.
    """
    families = list(dict.fromkeys(runs.table["family"]))
    if len(families) <= _MIN_FAMILIES:
        raise ValueError(f"there are {len(families)} families; more than {_MIN_FAMILIES} are needed to leave one out")
    folds = [(runs.table["family"] == family).to_numpy() for family in families]
    return _score(runs, folds, classes)


def unseen_family(runs: Runs, family: str, classes: int, seed: int = 0) -> ColdStartScore:
    """Score priors of one family that was left out of the fit.

    Raises:
        ValueError: Too little is left.
    """
    return _score(runs, [(runs.table["family"] == family).to_numpy()], classes, seed)


def unseen_batches(runs: Runs, classes: int = 3) -> ColdStartScore:
    """Score priors of batch sizes inside a measured architecture's curve, left out of the fit one at a time.

    Raises:
        ValueError: No architecture has three batch sizes.
    """
    folds = []
    keys = [curve_key(a, k) for a, k in zip(runs.table["architecture"], runs.table["kind"], strict=True)]
    for key in dict.fromkeys(keys):
        own = np.array([other == key for other in keys])
        inner = np.unique(runs.table["batch"][own])[1:-1]
        folds += [own & (runs.table["batch"] == batch).to_numpy() for batch in inner]
    if not folds:
        raise ValueError("no architecture has three batch sizes, so none can be left out between two others")
    return _score(runs, folds, classes)


def _score(runs: Runs, folds: Sequence[npt.NDArray[np.bool_]], classes: int, seed: int = 0) -> ColdStartScore:
    gaps: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    inside: dict[str, list[bool]] = {name: [] for name in QUANTITIES}
    widths: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    reserved, right = [], []
    for held in folds:
        model = fit(replace(runs, table=runs.table[~held].reset_index(drop=True)), classes, seed)
        for row, actual in zip(
            runs.table[held].itertuples(), _fractions(runs.table[held]).to_dict("records"), strict=True
        ):
            size = getattr(row, "parameters", None)
            job = Descriptors(str(row.family), str(row.architecture), str(row.kind), float(str(row.batch)), size)
            found = model.describe(job)
            memory = tuple(value / model.device_memory_bytes for value in found.memory_bytes)
            quantiles = {"util_mean": found.util_mean, "util_p95": found.util_p95, "memory": memory}
            for name, values in quantiles.items():
                low, middle, high = values[1], values[2], values[3]
                gaps[name].append(abs(middle - actual[name]) * 100)
                inside[name].append(low - 1e-9 <= actual[name] <= high + 1e-9)
                widths[name].append((high - low) * 100)
            reserved.append(actual["memory"] <= memory[HIGHEST] + 1e-9)
            right.append(found.class_id == model.nearest(actual["util_p95"], actual["memory"]))
    return ColdStartScore(
        len(reserved),
        {name: float(np.mean(values)) for name, values in gaps.items()},
        {name: float(np.mean(values)) for name, values in inside.items()},
        {name: float(np.mean(values)) for name, values in widths.items()},
        float(np.mean(reserved)),
        float(np.mean(right)),
    )
