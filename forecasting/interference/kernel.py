"""Which pairs of jobs resemble each other: the covariance of the mixed-effects Gaussian process.

The residual of a measured pair (i beside j) is a sum of effects, each a product of what matters of i and what matters
of j: ``K = Σ w · A(i, i') · B(j, j')`` with A and B among: everything alike (``one``), the same job, the same
family, and closeness of features: of all at once (``near``), or of one after the other (``far``), so that a job of an
unseen family inherits from those that resemble it in some features only. ``job × one`` is a known job's own offset
(its solo rate was measured a little wrong), ``one × job`` is the aggressiveness of a known neighbour, ``job × near`` a
known job's sensitivity to a kind of neighbour, and so on. The weights are shares of the variance of the residual.

Two jobs contest for one GPU: what a job wins over its neighbours, they lose. So its effect on its own throughput and
that on its neighbours' are correlated, and a pair tells of both jobs in both roles:
``K += COUPLING · Σ w(A, one) · (A(i, j') + A(j, i'))``, a valid covariance as both roles weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.interference.table import Floats, Ints, Jobs

ONE, JOB, FAMILY, NEAR, FAR = "one", "job", "family", "near", "far"
SIDES: tuple[str, ...] = (ONE, JOB, FAMILY, NEAR, FAR)
NEAR_SCALE, FAR_SCALE = 1.0, 2.0  # length scales, in standard deviations of a feature (near: times √features)
COUPLING = -0.5  # correlation of a job's effects on itself and on its neighbours; -1: one's gain is the other's loss

Weights = Mapping[tuple[str, str], float]


def _weights(
    *, job: float, family: float, feature: float, feature_pair: float, job_feature: float, family_feature: float
) -> Weights:
    """Spread the six kinds of effects over the components; a job weighs as much in either role."""
    weights = {(FAMILY, FAMILY): 0.02}
    for side, weight in ((JOB, job), (FAMILY, family)):
        weights[side, ONE] = weights[ONE, side] = weight
    for scale in (NEAR, FAR):
        weights[scale, ONE] = weights[ONE, scale] = feature / 2
        weights[scale, scale] = feature_pair / 2
        weights[JOB, scale] = weights[scale, JOB] = job_feature / 2
        weights[FAMILY, scale] = weights[scale, FAMILY] = family_feature / 2
    return weights


# Two mixes of effects, chosen between by leave-family-out error inside the training data. The first is for residuals of
# a mean that already knows the utilisations; the second for features that have to explain everything themselves.
MIXES: Mapping[str, Weights] = {
    "effects of jobs": _weights(
        job=0.1, family=0.5, feature=0.03, feature_pair=0.05, job_feature=0.15, family_feature=0.3
    ),
    "effects of features": _weights(
        job=0.03, family=0.1, feature=0.5, feature_pair=0.5, job_feature=0.03, family_feature=0.1
    ),
}
NOISE = 0.03  # of one measurement, as a share of the variance of the residual


@dataclass(frozen=True, slots=True)
class Scales:
    """What of the kernel is chosen beforehand, not fitted; a fitted model carries its own.

    Attributes:
        near: Length scale of ``near``, in standard deviations of a feature times √features.
        far: Length scale of ``far``, in standard deviations of a feature.
        noise: Of one measurement, as a share of the variance of the residual.
    """

    near: float = NEAR_SCALE
    far: float = FAR_SCALE
    noise: float = NOISE

    def __post_init__(self) -> None:
        for name in ("near", "far", "noise"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}: {value} is not accepted; give a finite number above 0")


USUAL_SCALES = Scales()


def closeness(left: Floats, right: Floats, features: int, scales: Scales = USUAL_SCALES) -> dict[str, Floats]:
    """Closeness over some of the ``features``, standardised: (left, some) and (right, some) give (left, right).

    Of several parts of the features ``near`` multiplies to the whole's, and ``far`` adds up to it.
    """
    squared = (left[:, None, :] - right[None, :, :]) ** 2
    count = max(1, features)
    return {
        NEAR: np.exp(np.sum(squared, axis=-1) * (-0.5 / (scales.near**2 * count))),
        FAR: np.sum(np.exp(squared * (-0.5 / scales.far**2)), axis=-1) / count,
    }


def same(left: Sequence[str], right: Sequence[str]) -> Floats:
    """1 where the names are equal and not empty, shape (left, right)."""
    numbers = {name: k for k, name in enumerate({*left, *right} - {""})}
    a = np.array([numbers.get(name, -1) for name in left], dtype=np.intp).reshape(-1, 1)
    b = np.array([numbers.get(name, -2) for name in right], dtype=np.intp).reshape(1, -1)
    return np.asarray(a == b, dtype=np.float64)


def sides(left: Jobs, right: Jobs, scales: Scales = USUAL_SCALES) -> dict[str, Floats]:
    """The five resemblances between two lists of jobs with standardised features, each of shape (left, right)."""
    return {
        ONE: np.ones((len(left), len(right))),
        JOB: same(left.ids, right.ids),
        FAMILY: same(left.families, right.families),
        **closeness(left.features, right.features, left.features.shape[1], scales),
    }


def by_neighbour(weights: Weights, resemblance: Mapping[str, Floats]) -> dict[str, Floats]:
    """Σ over A of w(A, B) · A, for every B: ``K = Σ_B by_neighbour[B] · B`` takes five products, not fourteen."""
    sums: dict[str, Floats] = {}
    for (focal, other), weight in weights.items():
        term = weight * resemblance[focal]
        sums[other] = sums[other] + term if other in sums else term
    return sums


def coupling(weights: Weights) -> dict[str, float]:
    """Per resemblance, by how much a job as focal and a job as neighbour share their effects."""
    return {side: COUPLING * weights[side, ONE] for side in SIDES if side != ONE}


def covariance(weights: Weights, jobs: Jobs, focal: Ints, other: Ints, scales: Scales = USUAL_SCALES) -> Floats:
    """Covariance of rows (focal, other) of these jobs, shape (rows, rows), in units of the residual's variance."""
    resemblance = sides(jobs, jobs, scales)
    total = np.zeros((len(focal), len(focal)))
    for side, sums in by_neighbour(weights, resemblance).items():
        total += sums[np.ix_(focal, focal)] * resemblance[side][np.ix_(other, other)]
    contest = np.zeros((len(jobs), len(jobs)))
    for side, weight in coupling(weights).items():
        contest += weight * resemblance[side]
    roles = contest[np.ix_(focal, other)]
    total += roles
    total += roles.T
    return total
