"""What trees and nets are fed: the last values and the built-in experts' predictions, in sizes of the series."""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import FAR, Array
from cotenant.forecasting.demand.engine import Moment

FEATURES_VERSION = 3  # changes whenever the meaning or the order of a feature does
LAGS = 20
_YOUNG = 256  # more values than these say nothing further
_LOW = 0.05  # below this of its unit a series counts as idle


def features(moment: Moment) -> Array:
    """Return the features of shape (n, F): differences are to the last value, unknown ones 0.

    In order: the last value; the ``LAGS`` values before it; mean of the last five, mean, deviation, largest and
    smallest of the last ``LAGS`` + 1, and the share of them that was idle; how many values there were up to 256, and
    the age, as logarithms; the averages, the sliding median and the mean of the whole past; per horizon the analogues;
    then, not as differences, the ``LAGS`` + 1 values, the largest and the smallest of them. All but the share, the
    number of values and the age are in sizes: trees know the next step of a loading job by its age and by how much
    memory it holds.
    """
    now = moment.history[:, :1]
    window = moment.history[:, : LAGS + 1]
    window = np.where(window < FAR / 2, window - now, 0.0)
    size = moment.sizes[:, None]
    idle = (window + now < _LOW).mean(axis=1)
    now, window = now * size, window * size
    largest, smallest = window.max(axis=1), window.min(axis=1)
    statistics = (
        window[:, :5].mean(axis=1),
        window.mean(axis=1),
        window.std(axis=1),
        largest,
        smallest,
        idle,
        np.log1p(np.minimum(moment.counts, _YOUNG)) / 5.0,
        np.log1p(moment.ages) / 5.0,
    )
    relative = moment.simple * size[:, :, None] - now[:, :, None]
    common, analogues = relative[:, 0, 1 : moment.common], relative[:, :, moment.common :]
    levels = (now + window, now + largest[:, None], now + smallest[:, None])
    parts = [now, window[:, 1:], np.stack(statistics, axis=1), common, analogues.reshape(len(now), -1), *levels]
    return np.concatenate(parts, axis=1, dtype=np.float32)
