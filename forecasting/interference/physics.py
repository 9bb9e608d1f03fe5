"""What queueing says of two jobs on one GPU before anything is learnt: the mean of the interference model.

All means fall (or stay) when the neighbour's utilisation or bandwidth use rises, and lie in (0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.forecasting.interference.table import BANDWIDTH, STEP, UTIL, Floats

Kind = Literal["queue", "fair", "shares", "constant"]

QUEUE_ROUNDS = 12  # of the fixed point; the error left is below 1e-3
QUEUE_EXPONENT = 2.0  # a job seen busy u of the time keeps u² of the GPU from others
BANDWIDTH_COST = 0.1
SHARES_START = (0.85, 1.07, 0.91, 0.05)  # of κ, c, p, x below, from published measurements under MPS
PARAMS: Mapping[Kind, int] = {"queue": 0, "fair": 0, "shares": 4, "constant": 1}
_LEAST_UTIL = 0.01
_LEAST_SHARE = 1e-3
_SOFT_MAX, _SOFT_MIN = 20.0, 12.0


@dataclass(frozen=True, slots=True)
class Physics:
    """The mean of the model.

    Attributes:
        kind: "queue" and "fair" for time slicing, "shares" for kernels that run side by side, "constant" without
            utilisations.
        params: "shares": κ, c, p, x; "constant": the throughput; the others: none.
    """

    kind: Kind
    params: tuple[float, ...] = ()

    def mean(self, names: tuple[str, ...], focal: Floats, other: Floats) -> Floats:
        """Throughput of the focal jobs.

        Args:
            names: The names of the features.
            focal: Raw features without NaN, shape (…, features).
            other: The same of the neighbours; broadcasts with ``focal``.

        Returns:
            Normalised throughput in (0, 1], shape of the broadcast without its last axis.
        """
        if self.kind == "constant":
            shape = np.broadcast_shapes(focal.shape, other.shape)[:-1]
            return np.full(shape, self.params[0])
        u, v = (_column(names, UTIL, jobs) for jobs in (focal, other))
        if self.kind == "queue":
            m, w = (_column(names, BANDWIDTH, jobs) for jobs in (focal, other))
            return queue(u, v, m * w)
        if self.kind == "fair":
            return fair(u, v)
        s, t = (_column(names, STEP, jobs) for jobs in (focal, other))
        return shares(u, v, s - t, self.params)


def queue(util: Floats, other: Floats, bandwidth: Floats) -> Floats:
    """Two jobs take turns: each of a job's steps waits for the neighbour as often as it finds it busy.

    A closed queue of two customers with demands d = u²: R = d·(1 + ρ') + 0.1·m·m', ρ = R / (1 − d + R), and
    n = 1 / (1 − d + R).

    Args:
        util: Solo utilisation of the focal job.
        other: That of its neighbour.
        bandwidth: Product of the two bandwidth utilisations.
    """
    d, e = np.broadcast_arrays(np.clip(util, 0.0, 1.0) ** QUEUE_EXPONENT, np.clip(other, 0.0, 1.0) ** QUEUE_EXPONENT)
    cost = BANDWIDTH_COST * bandwidth
    own, theirs = d + cost, e + cost
    for _ in range(QUEUE_ROUNDS):
        busy, their_busy = _busy(d, own), _busy(e, theirs)
        own, theirs = d * (1.0 + their_busy) + cost, e * (1.0 + busy) + cost
    return np.asarray(np.minimum(1.0, 1.0 / (1.0 - d + own)), dtype=np.float64)


def fair(util: Floats, other: Floats) -> Floats:
    """Time is dealt out as wanted while it lasts: halfway between what is known to bound it.

    A scheduler that sees every wish divides by max-min fairness: who wants at most half gets it, and the other the
    rest. One that is blind to wishes slows both down alike, n = 1 / (u + u'). Real ones lie in between.

    Args:
        util: Solo utilisation of the focal job.
        other: That of its neighbour.
    """
    u, v = np.broadcast_arrays(np.clip(util, _LEAST_UTIL, 1.0), np.clip(other, 0.0, 1.0))
    part = np.where(u <= 0.5, u, np.maximum(np.minimum(u, 1.0 - v), 0.5))
    return np.asarray((part / u + np.minimum(1.0, 1.0 / (u + v))) / 2.0, dtype=np.float64)


def shares(util: Floats, other: Floats, log_step_ratio: Floats, params: tuple[float, ...]) -> Floats:
    """Kernels run side by side: the GPU is divided in proportion to how long the jobs' kernels hold it.

    w = σ(κ·(z − z')) with z = log(step time · u); what the job can have is the larger of c·w and c − u'^p (soft);
    n = min(1, that / u^p) (soft) · (1 − x·u').

    Args:
        util: Solo utilisation of the focal job.
        other: That of its neighbour.
        log_step_ratio: Log of (focal's solo step time / the neighbour's).
        params: κ, c, p, x; none negative.
    """
    kappa, capacity, power, cost = params
    u, v = np.clip(util, _LEAST_UTIL, 1.0), np.clip(other, _LEAST_UTIL, 1.0)
    weight = 1.0 / (1.0 + np.exp(-np.clip(kappa * (log_step_ratio + np.log(u / v)), -30.0, 30.0)))
    left = np.maximum(capacity - v**power, _LEAST_SHARE)
    most = np.logaddexp(_SOFT_MAX * capacity * weight, _SOFT_MAX * left) / _SOFT_MAX
    throughput = -np.logaddexp(-_SOFT_MIN * most / u**power, -_SOFT_MIN) / _SOFT_MIN
    return np.asarray(np.clip(throughput * (1.0 - cost * v), _LEAST_SHARE, 1.0), dtype=np.float64)


def _busy(demand: Floats, residence: Floats) -> Floats:
    return np.asarray(residence / np.maximum(1.0 - demand + residence, 1e-12), dtype=np.float64)


def _column(names: tuple[str, ...], name: str, jobs: Floats) -> Floats:
    return np.asarray(jobs[..., names.index(name)] if name in names else np.zeros(jobs.shape[:-1]), dtype=np.float64)
