"""Values between measured batch sizes: six interpolations over three abscissas, judged by held-out measured points.

An interpolation passes through its own points by definition, so how well it fits them says nothing. Here every measured
batch size of a curve is left out in turn and predicted from the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import interpolate

Array = npt.NDArray[np.float64]
Function = Callable[[Array], Array]

METHODS: Mapping[str, Callable[[Array, Array], Function]] = {
    "linear": lambda x, y: interpolate.make_interp_spline(x, y, k=1),
    "pchip": lambda x, y: interpolate.PchipInterpolator(x, y, extrapolate=True),
    # It takes the points in an order that is drawn, and says something else each time where it is not stable.
    "barycentric": lambda x, y: interpolate.BarycentricInterpolator(x, y, random_state=0),
    "krogh": interpolate.KroghInterpolator,
    "cubic spline": lambda x, y: interpolate.CubicSpline(x, y, extrapolate=True),
    "spline order 2": lambda x, y: interpolate.make_interp_spline(x, y, k=2),
}
ABSCISSAS: tuple[str, ...] = ("batch", "log2", "rank")
MIN_POINTS = 3  # that remain when one is held out: the spline of order 2 needs them
PERCENT = (0.0, 100.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of one architecture over the batch size.

    Attributes:
        name: The architecture (and data set).
        family: What it is held out with.
        batch: Measured batch sizes, ascending, shape (m,).
        value: The quantity there in percent, shape (m,); the mean where a batch size was measured more than once.
    """

    name: str
    family: str
    batch: Array
    value: Array


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of held-out points, in percentage points."""

    points: int
    rmse: float
    mse: float
    mae: float


def curves_of(table: pd.DataFrame, target: str) -> tuple[Curve, ...]:
    """Return one curve per (family, architecture, kind), in the order of the table."""
    found = []
    for keys, rows in table.groupby(["family", "architecture", "kind"], sort=False, dropna=False):
        points = rows.dropna(subset=["batch", target]).groupby("batch")[target].mean()
        if len(points):
            batch, value = points.index.to_numpy(dtype=float), points.to_numpy(dtype=float)
            found.append(Curve(str(keys[1]), str(keys[0]), batch, value))
    return tuple(found)


def interpolated(batch: Array, value: Array, at: Array, method: str, abscissa: str) -> Array:
    """Return the value in percent at other batch sizes, cut to [0, 100]; outside the measured ones it is extrapolated.

    Args:
        batch: Known batch sizes, ascending and different, shape (m,), m ≥ 3.
        value: The value there, shape (m,).
        at: Wanted batch sizes, shape (q,).
        method: One of ``METHODS``.
        abscissa: "batch", "log2" (of the batch size) or "rank": the number of the point, 0 … m − 1, linear between
            neighbours. The authors of the alnair data set interpolated over the last, knowingly or not.

    Raises:
        ValueError: Unknown method or abscissa, or fewer than three points.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not accepted; give one of {', '.join(METHODS)}")
    if len(batch) < MIN_POINTS:
        raise ValueError(f"batch has {len(batch)} points; at least {MIN_POINTS} are needed")
    x, q = _abscissa(batch, batch, abscissa), _abscissa(at, batch, abscissa)
    made: Array = np.clip(np.asarray(METHODS[method](x, value)(q), dtype=float), *PERCENT)
    return made


def hold_out(curves: Sequence[Curve], method: str, abscissa: str) -> pd.DataFrame:
    """Leave out every measured point of every curve with at least four and predict it from the rest of its curve.

    Returns:
        Columns curve, family, batch, actual, predicted (percent) and interior (False: the point is an end of its curve,
        so its prediction is an extrapolation).
    """
    rows = []
    for curve in curves:
        count = len(curve.batch)
        if count <= MIN_POINTS:
            continue
        for index in range(count):
            rest = np.arange(count) != index
            at = curve.batch[index : index + 1]
            predicted = interpolated(curve.batch[rest], curve.value[rest], at, method, abscissa)[0]
            interior = 0 < index < count - 1
            actual = curve.value[index]
            rows.append((curve.name, curve.family, float(at[0]), float(actual), float(predicted), interior))
    return pd.DataFrame(rows, columns=["curve", "family", "batch", "actual", "predicted", "interior"])


def errors_of(points: pd.DataFrame) -> Errors:
    """Return RMSE, MSE and MAE of held-out points; ValueError when there are none."""
    if points.empty:
        raise ValueError("no curve has enough batch sizes: at least four are needed to hold one out")
    difference = (points["predicted"] - points["actual"]).to_numpy(dtype=float)
    mse = float(np.mean(difference**2))
    return Errors(len(difference), float(np.sqrt(mse)), mse, float(np.abs(difference).mean()))


def round_trip(curves: Sequence[Curve], method: str, abscissa: str, per_gap: int = 4) -> Errors:
    """Return the self-consistency: measured points predicted from synthetic ones that were made from them.

    This is no evidence for a method: the synthetic points know the measured ones. It stands beside ``hold_out`` to
    show how much too good it looks.
    """
    rows = []
    for curve in curves:
        if len(curve.batch) <= MIN_POINTS:
            continue
        made = between(curve.batch, per_gap)
        values = interpolated(curve.batch, curve.value, made, method, abscissa)
        inner = slice(1, -1)
        again = interpolated(made, values, curve.batch[inner], method, abscissa)
        rows += list(zip(curve.value[inner].tolist(), again.tolist(), strict=True))
    return errors_of(pd.DataFrame(rows, columns=["actual", "predicted"]))


def between(batch: Array, per_gap: int) -> Array:
    """Return ``per_gap`` evenly spaced batch sizes between each two neighbours, without the known ones."""
    steps = np.arange(1, per_gap + 1) / (per_gap + 1)
    return np.concatenate([low + (high - low) * steps for low, high in itertools.pairwise(batch)])


def best_combination(curves: Sequence[Curve], leave_out: str | None = None) -> tuple[str, str]:
    """Return (method, abscissa) with the least mean absolute error on interior held-out points.

    Args:
        curves: The curves.
        leave_out: A family whose points do not count, so that the choice can be tested on it.
    """
    kept = [curve for curve in curves if curve.family != leave_out]
    tried = [(method, abscissa) for abscissa in ("log2", "batch") for method in METHODS]
    return min(tried, key=lambda choice: errors_of(hold_out(kept, *choice).query("interior")).mae)


def chosen_elsewhere(curves: Sequence[Curve]) -> pd.DataFrame:
    """Hold out interior points with the combination that was best on the other families: no choice by the test."""
    parts = []
    for family in dict.fromkeys(curve.family for curve in curves if len(curve.batch) > MIN_POINTS):
        own = [curve for curve in curves if curve.family == family]
        parts.append(hold_out(own, *best_combination(curves, family)).query("interior"))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["actual", "predicted"])


def synthesise(table: pd.DataFrame, targets: Mapping[str, tuple[str, str]], per_gap: int = 4) -> pd.DataFrame:
    """Return synthetic rows between the measured batch sizes of every curve with at least three of them.

    Args:
        table: Measured runs.
        targets: Target → (method, abscissa).
        per_gap: Synthetic batch sizes between two measured neighbours.

    Returns:
        Columns family, architecture, kind, batch and the targets.
    """
    parts = []
    for keys, rows in table.groupby(["family", "architecture", "kind"], sort=False, dropna=False):
        known = rows.groupby("batch")[list(targets)].mean()
        if len(known) < MIN_POINTS:
            continue
        batch = known.index.to_numpy(dtype=float)
        at = between(batch, per_gap)
        made = pd.DataFrame(dict(zip(("family", "architecture", "kind"), keys, strict=True)) | {"batch": at})
        for target, (method, abscissa) in targets.items():
            made[target] = interpolated(batch, known[target].to_numpy(dtype=float), at, method, abscissa)
        parts.append(made)
    columns = ["family", "architecture", "kind", "batch", *targets]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def audit(curves: Sequence[Curve], published: Mapping[str, tuple[Array, Array]]) -> pd.DataFrame:
    """Say which combination reproduces synthetic values that somebody published.

    Args:
        curves: The measured curves.
        published: Curve name → (batch sizes, published values there), also with the measured points.

    Returns:
        Columns method, abscissa, points, mae (percentage points), best first.
    """
    rows = []
    for abscissa in ABSCISSAS:
        for method in METHODS:
            gaps: list[float] = []
            for curve in curves:
                if curve.name in published and len(curve.batch) >= MIN_POINTS:
                    at, value = published[curve.name]
                    inside = (at >= curve.batch[0]) & (at <= curve.batch[-1])
                    made = interpolated(curve.batch, curve.value, at[inside], method, abscissa)
                    gaps += np.abs(made - value[inside]).tolist()
            if gaps:
                rows.append((method, abscissa, len(gaps), float(np.mean(gaps))))
    return pd.DataFrame(rows, columns=["method", "abscissa", "points", "mae"]).sort_values("mae", ignore_index=True)


def _abscissa(at: Array, batch: Array, abscissa: str) -> Array:
    if abscissa == "batch":
        return np.asarray(at, dtype=float)
    if abscissa == "log2":
        return np.log2(at)
    if abscissa == "rank":
        return np.asarray(interpolate.make_interp_spline(batch, np.arange(len(batch), dtype=float), k=1)(at))
    raise ValueError(f"abscissa {abscissa!r} is not accepted; give one of {', '.join(ABSCISSAS)}")
