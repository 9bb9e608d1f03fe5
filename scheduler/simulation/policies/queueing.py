"""Policies that give every job whole GPUs and differ in whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from cotenant.scheduler.simulation.desk import Desk, Entry, Key, Knows
from cotenant.scheduler.simulation.placing import whole_gpus


class Fifo:
    """First come, first served, whole GPUs; nobody overtakes the first in the queue."""

    name = "fifo"
    knows: Knows = "nothing"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (entry.submit_s,)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        while desk.waiting:
            gpus = whole_gpus(desk, desk.waiting[0])
            if gpus is None:
                return
            desk.start(desk.waiting[0], gpus)


class Sjf(Fifo):
    """Shortest job first by true run time, without preemption; nobody overtakes the first in the queue."""

    name = "sjf"
    knows: Knows = "durations"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (size_of(entry),)


class Qssf(Fifo):
    """Quasi-shortest service first (Helios, SC '21): estimated run time times GPUs, without preemption."""

    name = "qssf"
    knows: Knows = "estimates"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (size_of(entry) * entry.gpus,)


class Srtf:
    """Shortest remaining time first by true run times, preemptive."""

    name = "srtf"
    knows: Knows = "durations"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (desk.remaining_s(entry),)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        running = sorted((desk.remaining_s(entry), entry.index, entry) for entry in desk.running.values())
        waiting = ((entry.key[0], entry.index, entry) for entry in desk.waiting)
        order = list(by_quota(desk, (entry for _, _, entry in merge(waiting, running))))
        overtake = _next_overtaking(desk, {entry.index for entry in order}, running)
        admit(desk, order)
        if overtake is not None:
            desk.wake(overtake)


class Tiresias:
    """Least attained service in two queues (Tiresias-L, NSDI '19): GPU-seconds so far against a threshold, then FIFO.

    The threshold of 18,000 GPU-seconds and the round of 60 s are those that Lucid's authors compare with.
    """

    name = "tiresias"
    knows: Knows = "nothing"

    def __init__(self, threshold_gpu_s: float = 18_000.0, round_s: float = 60.0) -> None:
        self.threshold_gpu_s, self.round_s = threshold_gpu_s, round_s

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return self._level(entry, desk)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        if not desk.waiting:
            return
        if desk.now % self.round_s == 0.0:
            running = sorted((self._level(entry, desk), entry.index, entry) for entry in desk.running.values())
            waiting = ((entry.key, entry.index, entry) for entry in desk.waiting)
            admit(desk, list(by_quota(desk, (entry for _, _, entry in merge(waiting, running)))))
        if desk.waiting:
            desk.wake((desk.now // self.round_s + 1.0) * self.round_s)

    def _level(self, entry: Entry, desk: Desk) -> Key:
        return (float(entry.service(desk.now) > self.threshold_gpu_s), entry.submit_s)


def by_quota(desk: Desk, order: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the jobs that may run if GPUs were only counted: in this order, skipping whoever is too large."""
    quota = desk.total_gpus
    for entry in order:
        if entry.gpus <= quota:
            quota -= entry.gpus
            yield entry
        if quota == 0:
            return


def admit(desk: Desk, order: list[Entry]) -> None:
    """Suspend every running job that is not in ``order``, then start those of it that wait where they can be placed."""
    chosen = {entry.index for entry in order}
    for entry in [entry for entry in desk.running.values() if entry.index not in chosen]:
        desk.suspend(entry)
    for entry in order:
        if not entry.held:
            gpus = whole_gpus(desk, entry)
            if gpus is not None:
                desk.start(entry, gpus)


def size_of(entry: Entry) -> float:
    """Return the run time the policy was told; without one the job counts as endless and goes last."""
    return float("inf") if entry.size_s is None else entry.size_s


def _next_overtaking(desk: Desk, chosen: set[int], running: list[tuple[float, int, Entry]]) -> float | None:
    """Return when a running job will next have less left than a waiting one that is now before it; None = never."""
    waiting = desk.waiting
    gap: float | None = None
    place = 0
    for left, index, _ in running:
        if index not in chosen:
            continue
        while place < len(waiting) and waiting[place].key[0] <= left:
            place += 1
        if place:
            behind = left - waiting[place - 1].key[0]
            gap = behind if gap is None else min(gap, behind)
    return None if gap is None else desk.now + gap + 1.0
