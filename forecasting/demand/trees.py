"""Boosted trees served from plain arrays: all trees of all horizons are walked together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotenant.forecasting.demand.arrays import Array
from cotenant.forecasting.demand.engine import Moment
from cotenant.forecasting.demand.features import features
from cotenant.forecasting.demand.nets import Arrays, check_fit

_NAMES = ("feature", "threshold", "left", "right", "value", "start")


class TreesExpert:
    """Sums of regression trees that say how far a series will have moved. Has no state per series.

    Walking a hundred trees costs more than everything else together, so at most ``most`` series are asked per tick,
    those on which the built-in experts disagree most; of the others the trees say what persistence says.
    """

    name = "trees"
    width = 1
    expected: Array | None = None

    def __init__(self, arrays: Arrays, horizons: Sequence[int], most: int = 800) -> None:
        """Take the trees.

        Args:
            arrays: Nodes of all trees one after the other: ``feature`` (a leaf has −1), ``threshold`` (go left if the
                feature is at most that), ``left``, ``right`` (node numbers), ``value`` (of leaves); ``start`` of shape
                (horizons, trees): the roots; ``base`` (horizons,); ``depth``; ``horizons``; ``features_version``;
                perhaps ``expected`` (see ``Expert``).
            horizons: Ticks ahead that are asked for; must be those of training.
            most: How many series are asked per tick.

        Raises:
            ValueError: Arrays are missing, or made for other horizons or features.
        """
        check_fit(arrays, horizons)
        missing = [name for name in (*_NAMES, "base", "depth") if name not in arrays]
        if missing:
            raise ValueError(f"trees lack {', '.join(missing)}; found {', '.join(sorted(arrays))}")
        self._most = most
        self._feature = np.asarray(arrays["feature"]).astype(np.intp)
        self._threshold = np.asarray(arrays["threshold"]).astype(np.float32)
        self._next = np.stack([np.asarray(arrays["right"]), np.asarray(arrays["left"])]).astype(np.intp)
        self._value = np.asarray(arrays["value"]).astype(np.float32)
        self._start = np.asarray(arrays["start"]).astype(np.intp)
        self._base = np.asarray(arrays["base"]).astype(np.float32)
        if "expected" in arrays:
            self.expected = np.asarray(arrays["expected"]).astype(np.float32)
            if self.expected.shape != (4, len(horizons)) or not (self.expected >= 0.0).all():
                raise ValueError(f"expected: {self.expected.tolist()} is not accepted; give 4 losses per horizon")
        nodes = len(self._value)
        inside = all(((a >= 0) & (a < nodes)).all() for a in (self._next, self._start))
        if not inside or self._start.ndim != 2 or self._start.shape[0] != len(horizons):
            raise ValueError(f"trees point outside their {nodes} nodes or are not {len(horizons)} rows of roots")
        self._check_nodes(nodes)
        self._depth = self._deepest(arrays["depth"])
        self._widest = int(self._feature.max(initial=-1))

    def _check_nodes(self, nodes: int) -> None:
        for name, array in (("feature", self._feature), ("threshold", self._threshold), ("value", self._value)):
            if array.shape != (nodes,):
                raise ValueError(
                    f"trees: {name} has the shape {array.shape}; expected one number for each of {nodes} nodes"
                )
        if self._base.shape != self._start.shape[:1]:
            raise ValueError(f"trees: base has the shape {self._base.shape}; expected one number for each horizon")
        for name, array in (("threshold", self._threshold), ("value", self._value), ("base", self._base)):
            if not np.isfinite(array).all():
                raise ValueError(f"trees: {name} must be finite numbers")
        if (self._feature < -1).any():
            raise ValueError("trees: a feature below -1")

    def _deepest(self, said: object) -> int:
        """Return how many steps it is to the deepest leaf; ValueError when that is not what the file says."""
        depth = np.asarray(said)
        nodes = np.unique(self._start)
        for steps in range(len(self._value)):
            nodes = nodes[self._feature[nodes] >= 0]
            if not len(nodes):
                if depth.shape != () or depth.dtype.kind not in "iu" or depth < steps:
                    raise ValueError(f"trees: a depth of {depth} is not accepted; they are {steps} deep")
                return steps
            nodes = np.unique(self._next[:, nodes])
        raise ValueError("trees: a node that comes after itself")

    def resize(self, rows: int) -> None:
        """There is no state to make room for."""

    def clear(self, row: int) -> None:
        """There is nothing to forget."""

    def step(self, moment: Moment) -> Array:
        """Return predictions of shape (n, horizons, 1)."""
        now = moment.history[:, 0]
        moves = np.zeros((len(now), len(self._base)), dtype=np.float32)
        if len(now) <= self._most:
            moves[:] = self.moves(features(moment))
        else:
            apart = np.ptp(moment.simple[:, 0], axis=1)
            asked = np.argpartition(-apart, self._most)[: self._most]
            few = Moment(
                moment.rows[asked],
                moment.history[asked],
                moment.counts[asked],
                moment.ages[asked],
                moment.simple[asked],
                moment.common,
                moment.sizes[asked],
            )
            moves[asked] = self.moves(features(few))
        predictions: Array = np.maximum(now[:, None] + moves / moment.sizes[:, None], 0.0)[:, :, None]
        return predictions

    def moves(self, inputs: Array) -> Array:
        """Return how far the series will have moved in sizes, shape (n, horizons), from features of shape (n, F)."""
        n = len(inputs)
        if inputs.shape[1] <= self._widest:
            raise ValueError(f"trees ask for feature {self._widest} of {inputs.shape[1]}")
        nodes = np.broadcast_to(self._start.ravel(), (n, self._start.size)).copy()
        line = np.arange(n)[:, None]
        for _ in range(self._depth):
            feature = self._feature[nodes]
            left = inputs[line, np.maximum(feature, 0)] <= self._threshold[nodes]
            onward = self._next[left.astype(np.intp), nodes]
            nodes = np.where(feature < 0, nodes, onward)
        sums: Array = self._value[nodes].reshape(n, *self._start.shape).sum(axis=2) + self._base
        return sums
