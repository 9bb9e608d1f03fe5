"""K-means over utilisation and memory: how many clusters there are, how sharp and how stable they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

SCALINGS: tuple[str, ...] = ("none", "min-max", "standard")
SUBSAMPLE = 0.8
RESTARTS = 10


@dataclass(frozen=True, slots=True)
class ClusterCount:
    """What K-means finds with one number of clusters.

    Attributes:
        k: Number of clusters.
        inertia: Sum of squared distances to the own centre, scaled units.
        distortion: Mean distance to the own centre.
        silhouette: Mean silhouette in [-1, 1]; None for one cluster.
        gap: Gap statistic: log inertia of uniform points in the same box minus that of these points.
        gap_spread: Its standard error.
        seed_agreement: Mean adjusted Rand index between single starts with different seeds (1 = always the same).
        subsample_agreement: Mean adjusted Rand index between the clusters of all points and of 80 % of them.
    """

    k: int
    inertia: float
    distortion: float
    silhouette: float | None
    gap: float
    gap_spread: float
    seed_agreement: float
    subsample_agreement: float


def scaled(points: Array, how: str) -> Array:
    """Return the points with every column scaled; a constant column becomes 0.

    Args:
        points: Shape (n, d).
        how: "none", "min-max" (to [0, 1]) or "standard" (mean 0, deviation 1).

    Raises:
        ValueError: Unknown scaling, or a value is not finite.
    """
    if not np.isfinite(points).all():
        raise ValueError("points has values that are not finite; leave out rows without a reading")
    if how == "none":
        return points.astype(float)
    if how == "min-max":
        centre, width = points.min(axis=0), np.ptp(points, axis=0)
    elif how == "standard":
        centre, width = points.mean(axis=0), points.std(axis=0)
    else:
        raise ValueError(f"scaling {how!r} is not accepted; give one of {', '.join(SCALINGS)}")
    result: Array = (points - centre) / np.where(width > 0, width, 1.0)
    return result


def sweep(points: Array, largest: int = 10, seeds: int = 20) -> tuple[ClusterCount, ...]:
    """Cluster scaled points into 1 … ``largest`` clusters (at most one less than there are different points).

    Args:
        points: Scaled points, shape (n, d).
        largest: The largest number of clusters.
        seeds: How many seeds, subsamples and uniform references.

    Raises:
        ValueError: Fewer than three different points.
    """
    different = len(np.unique(points, axis=0))
    if different < 3:
        raise ValueError(f"there are {different} different points; at least 3 are needed to look for clusters")
    return tuple(_count(points, k, seeds) for k in range(1, min(largest, different - 1) + 1))


def elbow(values: Sequence[float]) -> int:
    """Return the number of clusters (from 1) at the elbow of a falling curve: farthest below its chord."""
    y = np.asarray(values, dtype=float)
    if len(y) < 3 or y[0] == y[-1]:
        return 1
    x, height = np.linspace(0.0, 1.0, len(y)), (y - y[-1]) / (y[0] - y[-1])
    return int(np.argmax(1.0 - x - height)) + 1


def by_gap(counts: Sequence[ClusterCount]) -> int:
    """Return the number of clusters by the gap statistic: the first k with gap(k) ≥ gap(k+1) − its standard error.

    Source: Tibshirani, Walther and Hastie, "Estimating the number of clusters in a data set via the gap statistic",
    J. R. Statist. Soc. B 63 (2001). 1 means: no clusters beyond what uniform points would show.
    """
    for here, following in itertools.pairwise(counts):
        if here.gap >= following.gap - following.gap_spread:
            return here.k
    return counts[-1].k


def by_silhouette(counts: Sequence[ClusterCount]) -> int:
    """Return the number of clusters with the largest mean silhouette."""
    known = [(count.silhouette, -count.k) for count in counts if count.silhouette is not None]
    return -max(known)[1]


def clustered(points: Array, k: int, seed: int = 0) -> Labels:
    """Return one label per point, 0 … k − 1 in the order of the centres' first column, so that labels are stable."""
    model = _fit(points, k, seed, RESTARTS)
    order = np.argsort(model.cluster_centers_[:, 0], kind="stable")
    ranks: Labels = np.argsort(order)[model.labels_].astype(np.int64)
    return ranks


def agreement(labels: Sequence[int] | Labels, others: Sequence[int] | Labels) -> float:
    """Return the adjusted Rand index of two clusterings of the same points (1 = the same, 0 = by chance)."""
    return float(adjusted_rand_score(labels, others))


def summary(labels: Labels, columns: Mapping[str, Array]) -> list[dict[str, float]]:
    """Return size and mean of every column, per cluster."""
    found = []
    for label in range(int(labels.max()) + 1):
        mine = labels == label
        means = {name: float(values[mine].mean()) for name, values in columns.items()}
        found.append({"cluster": label, "runs": int(mine.sum()), **means})
    return found


def _fit(points: Array, k: int, seed: int, restarts: int) -> KMeans:
    return KMeans(n_clusters=k, n_init=restarts, random_state=seed).fit(points)


def _count(points: Array, k: int, seeds: int) -> ClusterCount:
    model = _fit(points, k, 0, RESTARTS)
    labels = model.labels_
    distances = np.linalg.norm(points - model.cluster_centers_[labels], axis=1)
    gap, gap_spread = _gap(points, k, float(model.inertia_), seeds)
    return ClusterCount(
        k,
        float(model.inertia_),
        float(distances.mean()),
        float(silhouette_score(points, labels)) if k > 1 else None,
        gap,
        gap_spread,
        float(np.mean([agreement(labels, _fit(points, k, seed, 1).labels_) for seed in range(seeds)])),
        float(np.mean([_subsample_agreement(points, labels, k, seed) for seed in range(seeds)])),
    )


def _gap(points: Array, k: int, inertia: float, references: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    low, high = points.min(axis=0), points.max(axis=0)
    logs = [
        np.log(max(float(_fit(rng.uniform(low, high, points.shape), k, 0, 3).inertia_), 1e-12))
        for _ in range(references)
    ]
    return float(np.mean(logs) - np.log(max(inertia, 1e-12))), float(np.std(logs) * np.sqrt(1 + 1 / references))


def _subsample_agreement(points: Array, labels: Labels, k: int, seed: int) -> float:
    chosen = np.random.default_rng(seed).permutation(len(points))[: max(k + 1, round(SUBSAMPLE * len(points)))]
    return agreement(labels[chosen], _fit(points[chosen], k, 0, 3).labels_)
