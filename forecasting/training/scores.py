"""What was found on held-out groups, one by one and put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RMSE = "RMSE"


@dataclass(frozen=True, slots=True)
class FoldScore:
    """What was found on one held-out group.

    Attributes:
        group: Its name.
        rows: How much was predicted: ordered pairs, or ticks of series.
        metrics: Of the trained model, by name.
        baselines: The error of simpler predictors on the same rows, by name; ``MAE`` or what the name says.
    """

    group: str
    rows: int
    metrics: Mapping[str, float]
    baselines: Mapping[str, float]


def combined(folds: Sequence[FoldScore]) -> FoldScore:
    """Put the folds together: means weighted by rows (of the squares for ``RMSE``; the largest of ratios of the worst).

    For every metric there are further ``NAME, spread`` (standard deviation between groups) and ``NAME, worst group``
    (the largest; of a coverage the smallest).

    Raises:
        ValueError: There is no fold.
    """
    if not folds:
        raise ValueError("folds: none is not accepted; give at least one")
    metrics: dict[str, float] = {}
    for name in folds[0].metrics:
        values = np.array([fold.metrics[name] for fold in folds])
        metrics[name] = _mean(name, values, folds)
        metrics[f"{name}, spread"] = float(values.std(ddof=1)) if len(folds) > 1 else 0.0
        metrics[f"{name}, worst group"] = float(values.min() if "coverage" in name else values.max())
    baselines = {
        name: _mean(name, np.array([fold.baselines[name] for fold in folds]), folds) for name in folds[0].baselines
    }
    return FoldScore(f"all {len(folds)} groups", sum(fold.rows for fold in folds), metrics, baselines)


def _mean(name: str, values: NDArray[np.float64], folds: Sequence[FoldScore]) -> float:
    rows = np.array([fold.rows for fold in folds], dtype=np.float64)
    if name.startswith("worst series"):
        return float(values.max())
    if name == RMSE:
        return math.sqrt(float(rows @ values**2) / float(rows.sum()))
    return float(rows @ values) / float(rows.sum())
