"""What trees and nets are fed: the last values and the built-in experts' predictions, relative to the last value."""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import FAR, Array
from cotenant.forecasting.demand.engine import Moment

FEATURES_VERSION = 1  # changes whenever the meaning or the order of a feature does
LAGS = 20
_LOW = 0.05  # below this of its unit a series counts as idle


def features(moment: Moment) -> Array:
    """Return the features of shape (n, F): differences are to the last value, unknown ones 0.

    In order: the last value; the ``LAGS`` values before it; mean of the last five, mean, deviation, largest and
    smallest of the last ``LAGS`` + 1, and the share of them that was idle; how many values there were, as a logarithm;
    the averages, the sliding median and the mean of the whole past; per horizon the analogues.
    """
    now = moment.history[:, :1]
    window = moment.history[:, : LAGS + 1]
    window = np.where(window < FAR / 2, window - now, 0.0)
    statistics = (
        window[:, :5].mean(axis=1),
        window.mean(axis=1),
        window.std(axis=1),
        window.max(axis=1),
        window.min(axis=1),
        (window + now < _LOW).mean(axis=1),
        np.log1p(moment.counts) / 5.0,
    )
    relative = moment.simple - now[:, :, None]
    common, analogues = relative[:, 0, 1 : moment.common], relative[:, :, moment.common :]
    parts = [now, window[:, 1:], np.stack(statistics, axis=1), common, analogues.reshape(len(now), -1)]
    return np.concatenate(parts, axis=1, dtype=np.float32)
