"""Demand forecasters: what a job will want of its GPU, from what it did so far. See ``docs/forecasting.md``."""

from cotenant.forecasting.demand.ewquantile import EwQuantileForecaster
from cotenant.forecasting.demand.guarded import GuardedForecaster
from cotenant.forecasting.demand.mixture import MixtureForecaster

__all__ = ["EwQuantileForecaster", "GuardedForecaster", "MixtureForecaster"]
