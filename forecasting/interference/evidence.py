"""What was measured on a cluster, one line per job and set: bounded, and the newest counts most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cotenant.forecasting.interference.observations import Observation, SetKey

KEPT_SETS = 1000  # (job, set) pairs; the least recently measured are forgotten
REMEMBERED_S = 600.0  # of earlier measurement of a set; programs and machines change


class EvidenceBook:
    """Measurements by job and set, the most recently measured last."""

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self._sets: dict[SetKey, Observation] = {}
        for each in observations:
            self.add(each)

    def __len__(self) -> int:
        return len(self._sets)

    def observations(self) -> tuple[Observation, ...]:
        """One observation per job and set."""
        return tuple(self._sets.values())

    def add(self, new: Observation) -> None:
        """Take in one measurement. Without a fingerprint of every member it could never be found again: ignored."""
        key = new.key
        if key is None:
            return
        old = self._sets.pop(key, None)
        self._sets[key] = new if old is None else _together(old, new)
        if len(self._sets) > KEPT_SETS:
            del self._sets[next(iter(self._sets))]


def _together(old: Observation, new: Observation) -> Observation:
    """One observation of both, weighted by time. Measurements that contradict each other span their intervals."""
    past, now = min(old.seconds, REMEMBERED_S), max(1.0, new.seconds)
    weight = now / (past + now)

    def mean(before: float, after: float) -> float:
        return (1.0 - weight) * before + weight * after

    throughput = mean(old.throughput, new.throughput)
    if old.high < new.low or new.high < old.low:
        low, high = min(old.low, new.low), max(old.high, new.high)
    else:
        low, high = mean(old.low, new.low), mean(old.high, new.high)
    low, high = min(low, throughput), max(high, throughput)
    return replace(new, throughput=throughput, low=low, high=high, seconds=past + new.seconds)
