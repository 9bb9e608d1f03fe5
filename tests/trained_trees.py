"""A trained demand expert for a registry: small, and soon made."""

from __future__ import annotations

import numpy as np
from registering import card

from cotenant.forecasting.datasets.registry import Registry
from cotenant.forecasting.demand.mixture import UTIL_SCALES
from cotenant.forecasting.training.demand_artefact import save_artefact
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand


def add_trees(registry: Registry) -> str:
    """Add trees that were trained on a demand that goes up for seven windows and begins again; returns the version."""
    series = [np.array([0.2 + 0.1 * (second % 7) for second in range(120)])]
    trained = train_demand(series, UTIL_SCALES[0][1], ("trees",), TrainingOptions(trees=20, leaves=5))["trees"]
    return registry.add("demand", card(kind="demand"), lambda folder: save_artefact(trained, folder / "util-trees.npz"))
