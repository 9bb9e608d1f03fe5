"""Interference of pairs: individual slowdown and packing saving, within clusters and across them.

From seconds: slowdown = T/S − 1 and saving = 1 − max(T₁, T₂)/(S₁ + S₂), S alone and T together. Two things hide in
these. The saving of jobs of unequal length is bounded by the shorter one's part, min(S)/(S₁ + S₂), however well they
get along. And the longer job runs alone once the shorter one has ended, which flatters its slowdown. So the normalised
throughput n of both is also worked out for the time of the overlap, and from it the saving 1 − 1/(n₁ + n₂) that two
jobs of such kinds would have while both run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[np.float64]

MEASURES: Mapping[str, str] = {
    "saving": "packing saving",
    "saving_of_bound": "part of the possible saving",
    "rate_saving": "saving while both run",
    "slowdown": "individual slowdown, mean of the two",
    "overlap_slowdown": "slowdown while both run, mean of the two",
}


@dataclass(frozen=True, slots=True)
class Contrast:
    """Pairs across clusters against pairs within one.

    Attributes:
        across: Mean over the pairs of different clusters.
        within: Mean over the pairs of one cluster.
        across_median: Their medians: the means of so few pairs hang on single ones.
        within_median: See ``across_median``.
        pairs_across: Number of pairs.
        pairs_within: Number of pairs.
        p: Part of the relabellings of the tasks that give at least this difference of the means, either sign: pairs
            share tasks, so a test that shuffles pairs would be far too sure. 1 means: no difference at all.
        chances: How many relabellings were tried.
    """

    across: float
    within: float
    across_median: float
    within_median: float
    pairs_across: int
    pairs_within: int
    p: float
    chances: int


def measured(pairs: pd.DataFrame) -> pd.DataFrame:
    """Add slowdowns, savings and their bound to pairs given in seconds.

    Args:
        pairs: ``PAIR_COLUMNS``; and optionally ``n_a`` and ``n_b``, normalised throughputs measured as rates.

    Returns:
        The table with ``slowdown_a``, ``slowdown_b``, ``slowdown`` (mean), ``saving``, ``bound``, ``saving_of_bound``,
        ``n_a``, ``n_b``, ``overlap_slowdown`` and ``rate_saving``, all fractions.
    """
    solo = pairs[["solo_a_s", "solo_b_s"]].to_numpy(dtype=float)
    packed = pairs[["packed_a_s", "packed_b_s"]].to_numpy(dtype=float)
    done = pairs.copy()
    slowdown = packed / solo - 1.0
    done["slowdown_a"], done["slowdown_b"], done["slowdown"] = slowdown[:, 0], slowdown[:, 1], slowdown.mean(axis=1)
    done["saving"] = 1.0 - packed.max(axis=1) / solo.sum(axis=1)
    done["bound"] = solo.min(axis=1) / solo.sum(axis=1)
    done["saving_of_bound"] = done["saving"] / done["bound"]
    if "n_a" not in pairs:
        overlap = packed.min(axis=1, keepdims=True)
        rates = np.clip((solo - (packed - overlap)) / overlap, 1e-3, None)
        done["n_a"], done["n_b"] = rates[:, 0], rates[:, 1]
    rates = done[["n_a", "n_b"]].to_numpy(dtype=float)
    done["overlap_slowdown"] = (1.0 / rates - 1.0).mean(axis=1)
    done["rate_saving"] = 1.0 - 1.0 / rates.sum(axis=1)
    return done


def from_rates(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return ``measured`` rows for pairs known only by ``n_a`` and ``n_b``, as if equally long."""
    unit = pairs.assign(solo_a_s=1.0, solo_b_s=1.0, packed_a_s=1.0 / pairs["n_a"], packed_b_s=1.0 / pairs["n_b"])
    return measured(unit)


def contradictions(pairs: pd.DataFrame, tolerance: float = 0.01) -> pd.DataFrame:
    """Return the rows whose reported figures contradict their own times by more than ``tolerance`` (a fraction).

    Args:
        pairs: ``measured`` rows with any of ``reported_slowdown_a``, ``reported_slowdown_b``, ``reported_saving``.
    """
    wrong = np.zeros(len(pairs), dtype=bool)
    for name in ("slowdown_a", "slowdown_b", "saving"):
        if f"reported_{name}" in pairs:
            wrong |= (pairs[f"reported_{name}"] - pairs[name]).abs().to_numpy(dtype=float) > tolerance
    return pairs[wrong]


def contrast(
    pairs: pd.DataFrame, labels: Mapping[Hashable, int], measure: str, shuffles: int = 2000, seed: int = 0
) -> Contrast:
    """Compare pairs across clusters with pairs within one.

    Args:
        pairs: ``measured`` rows; the tasks are ``a`` and ``b``.
        labels: Task → cluster.
        measure: A column of ``measured``.
        shuffles: How many random relabellings of the tasks.
        seed: Their seed.

    Raises:
        ValueError: All pairs are of one sort, so there is nothing to compare; or a task has no label.
    """
    tasks = sorted({*pairs["a"], *pairs["b"]}, key=str)
    if missing := [task for task in tasks if task not in labels]:
        raise ValueError(f"labels has no cluster for {', '.join(map(str, missing))}")
    place = {task: index for index, task in enumerate(tasks)}
    first, second = pairs["a"].map(place).to_numpy(dtype=int), pairs["b"].map(place).to_numpy(dtype=int)
    values, own = pairs[measure].to_numpy(dtype=float), np.array([labels[task] for task in tasks])
    across = own[first] != own[second]
    if across.all() or not across.any():
        raise ValueError("all pairs are across clusters or all are within one: nothing to compare")
    difference = _difference(values, across)
    rng, found = np.random.default_rng(seed), []
    for _ in range(shuffles):
        shuffled = rng.permutation(own)
        other = shuffled[first] != shuffled[second]
        if other.any() and not other.all():
            found.append(_difference(values, other))
    extreme = int(np.sum(np.abs(found) >= abs(difference) - 1e-12))
    return Contrast(
        float(values[across].mean()),
        float(values[~across].mean()),
        float(np.median(values[across])),
        float(np.median(values[~across])),
        int(across.sum()),
        int((~across).sum()),
        (extreme + 1) / (len(found) + 1),
        len(found),
    )


def by_cluster_pair(pairs: pd.DataFrame, labels: Mapping[Hashable, int]) -> list[dict[str, float | str]]:
    """Return the mean of every measure per pair of clusters, unordered."""
    names = ["–".join(map(str, sorted((labels[a], labels[b])))) for a, b in zip(pairs["a"], pairs["b"], strict=True)]
    rows: list[dict[str, float | str]] = []
    for name, part in pairs.groupby(np.array(names)):
        means = {measure: float(part[measure].mean()) for measure in MEASURES}
        rows.append({"clusters": str(name), "pairs": len(part), **means})
    return rows


def directions(pairs: pd.DataFrame, util: Mapping[Hashable, float]) -> pd.DataFrame:
    """Return both directions of every pair whose tasks have one: util, peer_util (percent), slowdown."""
    rows = []
    for row in pairs.itertuples():
        for mine, other, rate in ((row.a, row.b, row.n_a), (row.b, row.a, row.n_b)):
            if mine in util and other in util:
                rows.append((util[mine], util[other], 1.0 / float(str(rate))))
    return pd.DataFrame(rows, columns=["util", "peer_util", "slowdown"])


def threshold_table(directed: pd.DataFrame, thresholds: Sequence[float] = (70.0,)) -> list[dict[str, float | str]]:
    """Return the slowdown (1 = none) of directed pairs by which of the two is below a utilisation.

    Args:
        directed: Columns ``util``, ``peer_util`` (percent, alone) and ``slowdown``.
        thresholds: Utilisations in percent.

    Returns:
        Rows threshold, group ("both below", "one below", "none below"; the first also split by the sum of both at 100),
        pairs, mean, median, p90, worst and over_10 (the part slowed down by more than a tenth).
    """
    low = np.minimum(directed["util"], directed["peer_util"])
    high = np.maximum(directed["util"], directed["peer_util"])
    total = directed["util"] + directed["peer_util"]
    rows: list[dict[str, float | str]] = []
    for threshold in thresholds:
        both = high < threshold
        groups = {
            "both below": both,
            "both below, sum up to 100": both & (total <= 100.0),
            "both below, sum over 100": both & (total > 100.0),
            "one below": (low < threshold) & ~both,
            "none below": low >= threshold,
        }
        for name, mask in groups.items():
            values = directed.loc[mask, "slowdown"].to_numpy(dtype=float)
            if len(values):
                rows.append({"threshold": threshold, "group": name, **_spread(values)})
    return rows


def _spread(values: Array) -> dict[str, float]:
    return {
        "pairs": len(values),
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p90": float(np.quantile(values, 0.9)),
        "worst": float(values.max()),
        "over_10": float(np.mean(values > 1.1)),
    }


def _difference(values: Array, across: npt.NDArray[np.bool_]) -> float:
    return float(values[across].mean() - values[~across].mean())
