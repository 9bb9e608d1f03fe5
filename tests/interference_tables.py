"""A small made-up world of pairs for tests of the interference model."""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.table import BANDWIDTH, UTIL, Jobs, PairTable
from cotenant.forecasting.types import DemandProfile

FAMILIES = ("conv", "attention", "agent", "gan")
PER_FAMILY = 3


def truth(u: float, v: float, m: float, w: float) -> float:
    """The made-up law: half of the excess, a cost of shared bandwidth, and a little for any neighbour."""
    return float(np.clip(1.0 - 0.5 * max(0.0, u + v - 1.0) - 0.12 * m * w - 0.05 * v, 0.05, 1.0))


def features() -> np.ndarray:
    """Utilisation and bandwidth use of every job, spread over [0.1, 1]."""
    rng = np.random.default_rng(3)
    util = rng.permutation(np.linspace(0.1, 1.0, len(FAMILIES) * PER_FAMILY))
    return np.stack([util, np.clip(0.8 * util + rng.normal(0.0, 0.1, len(util)), 0.0, 1.0)], axis=1)


def world() -> PairTable:
    """All ordered pairs of twelve jobs of four families, with a job's own offset and noise of 0.01."""
    rng = np.random.default_rng(4)
    values = features()
    count = len(values)
    names = tuple(f"{FAMILIES[k // PER_FAMILY]}-{k}" for k in range(count))
    focal, other = (axis.ravel() for axis in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    offset = rng.normal(0.0, 0.01, count)
    exact = np.array(
        [truth(values[a, 0], values[b, 0], values[a, 1], values[b, 1]) for a, b in zip(focal, other, strict=True)]
    )
    measured = np.clip(exact + offset[focal] + rng.normal(0.0, 0.01, len(focal)), 0.05, 1.0)
    families = tuple(name.split("-")[0] for name in names)
    return PairTable((UTIL, BANDWIDTH), Jobs(names, families, values), focal, other, measured)


def profiles() -> list[DemandProfile]:
    """The world's jobs as profiles."""
    table = world()
    return [
        DemandProfile(
            float(u),
            float(u),
            1 << 30,
            source="history",
            observed_s=60.0,
            membw_util=float(m),
            fingerprint=name,
            family=family,
        )
        for (u, m), name, family in zip(table.jobs.features, table.jobs.ids, table.jobs.families, strict=True)
    ]


def measured(gpu_type: str = "a", half_width: float = 0.01) -> list[Observation]:
    """The world's pairs as observations."""
    table, jobs = world(), profiles()
    rows = zip(table.focal, table.other, table.throughput, strict=True)
    return [
        Observation(gpu_type, jobs[a], (jobs[b],), float(n), max(0.01, float(n) - half_width), float(n) + half_width)
        for a, b, n in rows
    ]
