"""What a measured set of three or more jobs teaches of its pairs.

A model of pairs cannot take in the throughput of a larger set as it is. But where a set was slower than its pairs let
expect, some of its pairs are likely to be slower than expected, too. With s = 1/n, the difference is shared evenly:
``s*(i | j) = s(i | j) + (s measured − s composed) / (k − 1)`` for each of the k − 1 neighbours j of i.

Such a lesson is worth far less than the pair itself. Its standard error counts what was measured, what composing errs
by, and that nobody knows which neighbour it was: ``√(k − 1) · √(σ² + COMPOSING_ERROR²)``. Pairs that were measured are
not taught.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from cotenant.forecasting.interference.model import LEAST
from cotenant.forecasting.interference.observations import INTERVAL_SIGMAS, MOST_THROUGHPUT, Observation
from cotenant.forecasting.types import ThroughputPrediction

# Standard deviation of n composed of measured pairs; its mean error is .065 (benchmarks/interference.py).
COMPOSING_ERROR = 0.08

Pair = tuple[str, str]  # fingerprints: whose throughput it is, and its neighbour


def lessons(
    measured: Observation,
    composed: ThroughputPrediction,
    each_pair: Sequence[ThroughputPrediction],
    known: Collection[Pair],
) -> list[Observation]:
    """Return what one job's throughput in a larger set teaches of its pairs.

    Args:
        measured: The job's throughput beside two or more others.
        composed: What was to be expected of it.
        each_pair: The job's prediction beside each of the others alone, in the order of ``measured.others``.
        known: Pairs that were measured themselves.
    """
    count = len(measured.others)
    slower = (1.0 / min(1.0, measured.throughput) - 1.0 / composed.mid) / count
    error = math.hypot((measured.high - measured.low) / INTERVAL_SIGMAS, COMPOSING_ERROR) * math.sqrt(count)
    half = error * INTERVAL_SIGMAS / 2.0
    found = []
    for other, pair in zip(measured.others, each_pair, strict=True):
        if (measured.focal.fingerprint, other.fingerprint) in known:
            continue
        n = 1.0 / max(1.0, 1.0 / pair.mid + slower)
        low, high = max(LEAST, n - half), min(MOST_THROUGHPUT, n + half)
        found.append(replace(measured, others=(other,), throughput=n, low=min(low, n), high=max(high, n)))
    return found
