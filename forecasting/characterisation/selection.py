"""Which features go with a target: Pearson, Spearman and Kendall coefficients, and their average rank."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

Array = npt.NDArray[np.float64]

COEFFICIENTS: tuple[str, ...] = ("pearson", "spearman", "kendall")
MIN_ROWS = 3
IDENTITY_SHARE = 0.9  # of the rows: published tables have typing errors
IDENTITY_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class FeatureScore:
    """How strongly one feature goes with the target.

    Attributes:
        name: The feature.
        rows: Rows in which both the feature and the target are known.
        pearson: Pearson's r; None when the feature is constant or has fewer than three rows.
        spearman: Spearman's rho.
        kendall: Kendall's tau-b, which allows for ties.
        average_rank: Mean of the three ranks by absolute coefficient (1 = strongest; ties share their mean rank).
        rank_low: Lowest place by average rank when one group is left out.
        rank_high: Highest such place: a wide span means that one group makes the rank.
    """

    name: str
    rows: int
    pearson: float | None
    spearman: float | None
    kendall: float | None
    average_rank: float | None
    rank_low: float | None = None
    rank_high: float | None = None


def rank_features(
    table: pd.DataFrame, target: str, features: Sequence[str], groups: Sequence[Hashable] | None = None
) -> tuple[FeatureScore, ...]:
    """Rank features by how strongly they go with a target, strongest first.

    Rows where either is missing are left out for that feature. A constant feature has no coefficient and no rank; such
    features come last, in the order given.

    Args:
        table: One row per run.
        target: Column of the target.
        features: Numeric columns.
        groups: One label per row; when given, the ranking is repeated without each group.

    Raises:
        ValueError: The target or a feature is not a numeric column, or the target is constant.
    """
    for name in (target, *features):
        if name not in table or not pd.api.types.is_numeric_dtype(table[name]):
            raise ValueError(f"column {name!r} is not a numeric column of the table")
    values = table[target].to_numpy(dtype=float)
    if _is_constant(values):
        raise ValueError(f"target {target!r} is constant or has fewer than {MIN_ROWS} rows: nothing can go with it")
    coefficients, ranks = _ranks(table, values, features)
    spans = _spans(table, values, features, groups) if groups is not None else {}
    rows = table[list(features)].notna().to_numpy() & np.isfinite(values)[:, None]
    scores = []
    for index, name in enumerate(features):
        rank = _known(ranks[index])
        low, high = spans.get(name, (None, None)) if rank is not None else (None, None)
        pearson, spearman, kendall = map(_known, coefficients[index])
        known = int(rows[:, index].sum())
        scores.append(FeatureScore(name, known, pearson, spearman, kendall, rank, low, high))
    return tuple(sorted(scores, key=lambda score: float("inf") if score.average_rank is None else score.average_rank))


def identities(table: pd.DataFrame, target: str, features: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of features whose sum is the target in nearly all rows: they contain it by definition."""
    values = table[target].to_numpy(dtype=float)
    columns = {name: table[name].to_numpy(dtype=float) for name in features}
    return tuple(
        (first, second)
        for first, second in itertools.combinations(features, 2)
        if not _is_constant(columns[first])
        and not _is_constant(columns[second])
        and np.mean(np.abs(columns[first] + columns[second] - values) <= IDENTITY_TOLERANCE) >= IDENTITY_SHARE
    )


def _ranks(table: pd.DataFrame, target: Array, features: Sequence[str]) -> tuple[Array, Array]:
    """Return (coefficients, features x 3) and (average ranks, features); NaN where there is none."""
    coefficients = np.array([_coefficients(table[name].to_numpy(dtype=float), target) for name in features])
    coefficients = coefficients.reshape(len(features), len(COEFFICIENTS))
    ranks = np.column_stack([stats.rankdata(-np.abs(column), nan_policy="omit") for column in coefficients.T])
    return coefficients, ranks.mean(axis=1)


def _coefficients(feature: Array, target: Array) -> tuple[float, float, float]:
    known = np.isfinite(feature) & np.isfinite(target)
    x, y = feature[known], target[known]
    if _is_constant(x) or _is_constant(y):
        return (np.nan, np.nan, np.nan)
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()  # counters of 1e11 bytes would lose their digits
    return (
        float(stats.pearsonr(x, y).statistic),
        float(stats.spearmanr(x, y).statistic),
        float(stats.kendalltau(x, y).statistic),
    )


def _spans(
    table: pd.DataFrame, target: Array, features: Sequence[str], groups: Sequence[Hashable]
) -> dict[str, tuple[float | None, float | None]]:
    labels = pd.Series(list(groups))
    places = []
    for group in labels.unique():
        kept = (labels != group).to_numpy()
        if kept.sum() >= MIN_ROWS and not _is_constant(target[kept]):
            _, ranks = _ranks(table[kept], target[kept], features)
            places.append(stats.rankdata(ranks, nan_policy="omit"))
    spans: dict[str, tuple[float | None, float | None]] = {}
    for index, name in enumerate(features):
        known = [place[index] for place in places if np.isfinite(place[index])]
        spans[name] = (float(min(known)), float(max(known))) if known else (None, None)
    return spans


def _is_constant(values: Array) -> bool:
    known = values[np.isfinite(values)]
    return known.size < MIN_ROWS or bool(np.ptp(known) <= 1e-12 * max(1.0, float(np.abs(known).max())))


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
