"""A set of three or more jobs from its pairs, and what the pairs cannot show: all of them together want too much.

With s = 1/n of the pairs, ``s(i | J) = 1 + Σ (s(i | j) − 1) + t``, ``t = h(Σ u_j) − Σ h(u_j)``, where
``h(d) = max(0, u_i + d − 1)`` is the excess over the GPU: three jobs of 0.4 fit in pairs but not together. As h is
convex, neither more demand nor a further neighbour ever predicts less slowdown.

``t`` slows all down alike. Where a GPU divides its time by max-min fairness, a light job is not slowed down at all and
a heavy one pays for it, which is what the measured triples of the ``cpu`` device show in both directions. So what is
expected is the mean of that and of what the utilisation rule says of such a division, never more than beside one of the
neighbours alone, nor more than the high end. At the ends ``t`` counts for nothing at best and twice at worst, within
what the band of the rule allows: between all slowed down alike and max-min fairness, its error on either side. All are
means, largest and smallest values of terms that never rise with the neighbours' demands, so neither do they.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.forecasting.interference.model import LEAST
from cotenant.forecasting.interference.rule import ERROR, divided
from cotenant.forecasting.types import ThroughputPrediction

AT_WORST = 2.0  # times t


@dataclass(frozen=True, slots=True)
class Wanted:
    """What jobs want of a GPU, fractions in [0, 1]; for a job nothing is known of, the most and the least it may want.

    Attributes:
        most: Utilisations that the prediction and its low end assume.
        least: Those that the high end assumes.
    """

    most: float
    least: float


def composed(
    focal: Wanted, others: Sequence[Wanted], each_pair: Sequence[ThroughputPrediction]
) -> ThroughputPrediction:
    """Predict one job of a set of three or more.

    Args:
        focal: What the job wants.
        others: What its neighbours want.
        each_pair: The job's prediction beside each of them alone, in the same order.
    """
    most, least = [focal.most, *(each.most for each in others)], [focal.least, *(each.least for each in others)]
    lows, mids, highs = ([getattr(each, end) for each in each_pair] for end in ("low", "mid", "high"))
    excess = _excess(most)
    alike, fair = divided(most)[0]
    worst, best = max(LEAST, min(alike, fair) - ERROR), min(1.0, max(divided(least, free=True)[0]) + ERROR)
    low = min(_throughput(lows, excess), max(_throughput(lows, AT_WORST * excess), worst))
    high = max(_throughput(highs, excess), min(_throughput(highs, 0.0), best))
    mid = max(LEAST, min(*mids, high, (_throughput(mids, excess) + fair) / 2.0))
    return ThroughputPrediction(min(low, mid), mid, high, _reason(excess, most, each_pair))


def _excess(utils: Sequence[float]) -> float:
    """What the pairs of the first job do not show of its slowdown: t."""
    own, *others = utils

    def over(demand: float) -> float:
        return max(0.0, own + demand - 1.0)

    return max(0.0, over(math.fsum(others)) - math.fsum(map(over, others)))


def _throughput(pairs: Sequence[float], together: float) -> float:
    return max(LEAST, 1.0 / (1.0 + math.fsum(1.0 / n - 1.0 for n in pairs) + together))


def _reason(excess: float, utils: Sequence[float], each_pair: Sequence[ThroughputPrediction]) -> str:
    """Say what slows the job down most: one of its neighbours, or that all together want too much."""
    worst = min(each_pair, key=lambda each: each.mid)
    if excess > 1.0 / worst.mid - 1.0:
        return (
            f"with its {len(each_pair)} neighbours together it wants {math.fsum(utils):.0%} of the GPU; "
            f"beside the worst of them alone: {worst.reason}"
        )
    return f"{len(each_pair)} neighbours, the worst: {worst.reason}"
