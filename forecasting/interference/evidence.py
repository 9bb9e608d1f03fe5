"""What was measured on a cluster, one line per job and set: bounded, and the newest counts most."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from cotenant.forecasting.interference.observations import MOST_THROUGHPUT, Observation, Program, SetKey

KEPT_SETS = 1000  # (job, set) pairs; the least recently measured are forgotten
THREE_ERRORS = 2.34  # three standard errors, in halves of an 80 % interval (1.28 standard errors each)
LEAST_LOW = 1e-3  # a throughput is above 0
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

    def of(self, key: SetKey) -> Observation | None:
        """Return what is known of a job in a set; None when nothing is."""
        return self._sets.get(key)

    def take(self, known: Observation) -> None:
        """Take over what another book knows of a set, unless more was measured here: the same twice changes nothing."""
        key = known.key
        mine = None if key is None else self._sets.get(key)
        if key is not None and (mine is None or known.seconds > mine.seconds):
            self._sets.pop(key, None)
            self._put(key, known)

    def add(self, new: Observation) -> None:
        """Take in one measurement. Without a fingerprint of every member it could never be found again: ignored."""
        key = new.key
        if key is None:
            return
        old = self._sets.pop(key, None)
        self._put(key, new if old is None else _together(old, new))

    def withdraw(self, programs: Collection[Program]) -> bool:
        """Forget how fast these programs were beside others; returns whether anything was known of that.

        For those that are found to go through phases: their rates beside others were compared with that of whichever
        phase they were in when they were alone. What their neighbours did beside them stays: these were compared with
        rates of their own, and go on being measured, so that what one phase did to them is soon outweighed.
        """
        gone = [key for key, each in self._sets.items() if each.program in programs]
        for key in gone:
            del self._sets[key]
        return bool(gone)

    def _put(self, key: SetKey, observation: Observation) -> None:
        self._sets[key] = observation
        if len(self._sets) > KEPT_SETS:
            del self._sets[next(iter(self._sets))]


def _together(old: Observation, new: Observation) -> Observation:
    """One observation of both, weighted by time.

    The ends of the interval are those of a weighted mean of independent measurements, so they come closer with every
    measurement that agrees. Two that differ by more than three standard errors contradict each other: then the interval
    spans both, as nobody knows which of them holds.
    """
    past, now = min(old.seconds, REMEMBERED_S), max(1.0, new.seconds)
    weight = now / (past + now)
    throughput = (1.0 - weight) * old.throughput + weight * new.throughput
    below = math.hypot(old.throughput - old.low, new.throughput - new.low)
    above = math.hypot(old.high - old.throughput, new.high - new.throughput)
    if abs(new.throughput - old.throughput) > THREE_ERRORS * max(below, above):
        low, high = min(old.low, new.low), max(old.high, new.high)
    else:
        low = throughput - math.hypot((1.0 - weight) * (old.throughput - old.low), weight * (new.throughput - new.low))
        high = throughput + math.hypot(
            (1.0 - weight) * (old.high - old.throughput), weight * (new.high - new.throughput)
        )
    low, high = max(LEAST_LOW, min(low, throughput)), min(MOST_THROUGHPUT, max(high, throughput))
    return replace(new, throughput=throughput, low=low, high=high, seconds=past + new.seconds)
