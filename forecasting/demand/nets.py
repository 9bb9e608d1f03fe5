"""Recurrent experts served with plain numpy: one step per window, the state of every series kept, torch not needed.

The weights come from ``cotenant.forecasting.training`` as named arrays. Both nets read the features of ``features.py``
and say for each horizon how far the series will have moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.demand.arrays import Array, grown
from cotenant.forecasting.demand.engine import Moment
from cotenant.forecasting.demand.features import FEATURES_VERSION, features

Arrays = Mapping[str, npt.NDArray[np.generic]]

INPUT_LIMIT = 5.0  # deviations: no input seen in training lies much beyond


class _NetExpert:
    """What the nets share: inputs in deviations from the mean of training, outputs as moves from the last value."""

    name = "net"
    width = 1
    expected: Array | None = None

    def __init__(self, arrays: Arrays, horizons: Sequence[int], rows: int) -> None:
        check_fit(arrays, horizons)
        self._mean, self._scale = self._array(arrays, "input.mean", 1), self._array(arrays, "input.scale", 1)
        self._head, self._head_bias = self._array(arrays, "head.weight", 2), self._array(arrays, "head.bias", 1)
        if self._head.shape[0] != len(horizons):
            raise ValueError(f"head.weight has {self._head.shape[0]} rows; {len(horizons)} horizons need as many")
        self._state: Array = np.zeros((rows, self._width_of_state(arrays)), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series; those there already keep their state."""
        self._state = grown(self._state, 0, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._state[row] = 0.0

    def step(self, moment: Moment) -> Array:
        """Take in one tick and return predictions of shape (n, horizons, 1)."""
        inputs = (features(moment) - self._mean) / self._scale
        outputs = self._advance(moment, np.clip(inputs, -INPUT_LIMIT, INPUT_LIMIT).astype(np.float32))
        moves = (outputs @ self._head.T + self._head_bias) / moment.sizes[:, None]
        predictions: Array = np.maximum(moment.history[:, :1] + moves, 0.0)[:, :, None]
        return predictions

    def _width_of_state(self, arrays: Arrays) -> int:
        raise NotImplementedError

    def _advance(self, moment: Moment, inputs: Array) -> Array:
        raise NotImplementedError

    @staticmethod
    def _array(arrays: Arrays, name: str, dimensions: int) -> Array:
        if name not in arrays:
            raise ValueError(f"weights lack {name!r}; found {', '.join(sorted(arrays))}")
        array = np.asarray(arrays[name])
        if array.ndim != dimensions or array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"weights {name!r} must be {dimensions}-dimensional finite numbers; got {array.dtype}")
        return np.ascontiguousarray(array, dtype=np.float32)


class GruExpert(_NetExpert):
    """A gated recurrent unit (Cho et al. 2014) with a hidden state per series, in the convention of torch."""

    name = "gru"

    def __init__(self, arrays: Arrays, horizons: Sequence[int], rows: int) -> None:
        """Take the weights.

        Args:
            arrays: ``input.mean``, ``input.scale`` (F,), ``gru.weight_ih`` (3H, F), ``gru.weight_hh`` (3H, H),
                ``gru.bias_ih``, ``gru.bias_hh`` (3H,), ``head.weight`` (horizons, H), ``head.bias`` (horizons,),
                ``horizons`` and ``features_version``.
            horizons: Ticks ahead that are asked for; must be those of training.
            rows: Number of series.

        Raises:
            ValueError: Weights are missing, not finite, or made for other horizons or features.
        """
        self._input, self._input_bias = self._array(arrays, "gru.weight_ih", 2), self._array(arrays, "gru.bias_ih", 1)
        self._hidden = self._array(arrays, "gru.weight_hh", 2)
        self._hidden_bias = self._array(arrays, "gru.bias_hh", 1)
        super().__init__(arrays, horizons, rows)

    def _width_of_state(self, arrays: Arrays) -> int:
        return int(self._hidden.shape[1])

    def _advance(self, moment: Moment, inputs: Array) -> Array:
        before = self._state[moment.rows]
        size = before.shape[1]
        new = inputs @ self._input.T + self._input_bias
        old = before @ self._hidden.T + self._hidden_bias
        gates = _sigmoid(new[:, : 2 * size] + old[:, : 2 * size])
        reset, keep = gates[:, :size], gates[:, size:]
        candidate = np.tanh(new[:, 2 * size :] + reset * old[:, 2 * size :])
        after: Array = candidate + keep * (before - candidate)
        self._state[moment.rows] = after
        return after


class TcnExpert(_NetExpert):
    """A causal convolution over time, two taps per layer at distances 1, 2, 4 …, with residual connections.

    Each layer keeps the inputs of its last ``distance`` ticks, so that a step costs two products per layer and the
    past is never gone through again (Paine et al. 2016).
    """

    name = "tcn"

    def __init__(self, arrays: Arrays, horizons: Sequence[int], rows: int) -> None:
        """Take the weights.

        Args:
            arrays: As for ``GruExpert``, with ``entry.weight`` (C, F), ``entry.bias`` (C,) and per layer i
                ``layer{i}.weight`` (C, C, 2: distant tap first) and ``layer{i}.bias`` (C,) in place of the unit's.
            horizons: Ticks ahead that are asked for; must be those of training.
            rows: Number of series.

        Raises:
            ValueError: Weights are missing, not finite, or made for other horizons or features.
        """
        self._entry, self._entry_bias = self._array(arrays, "entry.weight", 2), self._array(arrays, "entry.bias", 1)
        count = sum(1 for name in arrays if name.startswith("layer") and name.endswith(".weight"))
        self._layers = [
            (self._array(arrays, f"layer{i}.weight", 3), self._array(arrays, f"layer{i}.bias", 1)) for i in range(count)
        ]
        super().__init__(arrays, horizons, rows)

    def _width_of_state(self, arrays: Arrays) -> int:
        return len(self._entry) * (int(2 ** len(self._layers)) - 1)  # 1 + 2 + 4 … past inputs

    def _advance(self, moment: Moment, inputs: Array) -> Array:
        values = np.maximum(inputs @ self._entry.T + self._entry_bias, 0.0)
        channels, start = values.shape[1], 0
        for i, (weight, bias) in enumerate(self._layers):
            distance = 2**i
            place = start + channels * (moment.counts % distance)
            columns = place[:, None] + np.arange(channels)
            rows = moment.rows[:, None]
            distant = self._state[rows, columns]
            self._state[rows, columns] = values
            values = values + np.maximum(distant @ weight[:, :, 0].T + values @ weight[:, :, 1].T + bias, 0.0)
            start += channels * distance
        result: Array = values
        return result


def check_fit(arrays: Arrays, horizons: Sequence[int]) -> None:
    """Raise ValueError unless the arrays were made for these horizons and for the present features."""
    for name, wanted in (("horizons", list(horizons)), ("features_version", [FEATURES_VERSION])):
        if name not in arrays:
            raise ValueError(f"weights lack {name!r}; found {', '.join(sorted(arrays))}")
        found = np.asarray(arrays[name]).ravel().tolist()
        if found != wanted:
            raise ValueError(f"weights were made for {name} {found}; {wanted} is accepted: train anew")


def _sigmoid(values: Array) -> Array:
    result: Array = 0.5 * np.tanh(0.5 * values) + np.float32(0.5)
    return result
