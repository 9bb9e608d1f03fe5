"""Names and small helpers of the vectorised parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.intp]
Rows = Indexes | slice

FAR = 1e18  # "never seen", in histories and distances: finite, so that arithmetic on it stays finite


def span(rows: Indexes) -> Rows:
    """Return increasing consecutive row numbers as a slice, which numpy handles without copying."""
    if len(rows) > 1 and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def grown(old: npt.NDArray[np.float32], axis: int, size: int, fill: float) -> npt.NDArray[np.float32]:
    """Return ``old`` lengthened along ``axis`` to ``size``, the new places filled with ``fill``."""
    shape = list(old.shape)
    shape[axis] = size - shape[axis]
    return np.concatenate([old, np.full(shape, fill, dtype=old.dtype)], axis=axis)


def weighted_median(values: Array, weights: Array) -> Array:
    """Return the smallest value that has at least half of the weight at or below it, along the last, short axis.

    Compares all pairs: for a dozen values that is several times quicker than sorting them with their weights.
    """
    v, w = np.ascontiguousarray(np.moveaxis(values, -1, 0)), np.ascontiguousarray(np.moveaxis(weights, -1, 0))
    below = w.copy()
    lower, part = np.empty_like(v[0]), np.empty_like(w[0])  # as numbers: mixing types costs numpy a conversion each
    for i in range(len(v)):
        for j in range(i):
            np.copyto(lower, v[j] <= v[i])  # of equal values one gets the weight of both, which suffices
            below[i] += np.multiply(w[j], lower, out=part)
            np.subtract(np.float32(1.0), lower, out=lower)
            below[j] += np.multiply(w[i], lower, out=part)
    half = np.float32(0.5 - 1e-6) * weights.sum(axis=-1)
    middle: Array = np.where(below >= half, v, np.float32(np.inf)).min(axis=0)
    return middle


def sorted_four(values: Sequence[Array], weights: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Sort four arrays place by place, weights alongside, by a network of five comparators."""
    v, w = list(values), list(weights)
    for i, j in ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)):
        swap = v[i] > v[j]
        v[i], v[j] = np.minimum(v[i], v[j]), np.maximum(v[i], v[j])
        w[i], w[j] = np.where(swap, w[j], w[i]), np.where(swap, w[i], w[j])
    return v, w


def median_of_four(values: Sequence[Array], weights: Sequence[Array]) -> Array:
    """Return the ``weighted_median`` of four arrays place by place, several times quicker."""
    v, w = sorted_four(values, weights)
    two = w[0] + w[1]
    half = np.float32(0.5 - 1e-6) * (two + w[2] + w[3])
    middle: Array = np.where(w[0] >= half, v[0], np.where(two >= half, v[1], np.where(two + w[2] >= half, v[2], v[3])))
    return middle
