"""Policies that put several jobs on one GPU without predicting how they get along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.scheduler.simulation.desk import UNKNOWN_UTIL, Desk, Entry, Key, Knows
from cotenant.scheduler.simulation.placing import whole_gpus
from cotenant.scheduler.simulation.policies.queueing import size_of

Floats = NDArray[np.float64]


class _Packing:
    """First come, first served, but whoever does not fit is overtaken; subclasses say which GPUs may be shared.

    All GPUs of a job lie on one node when it fits one. A job larger than a node gets empty GPUs only.
    """

    name = ""
    knows: Knows = "nothing"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (entry.submit_s,)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``.

        Between two calls without an end GPUs only fill up, and so they do within one: who asks for what was refused
        before is refused again.
        """
        refused: set[tuple[int, int, float | None]] = set()
        for entry in list(desk.waiting) if desk.freed else desk.arrived:
            ask = (entry.gpus, entry.memory_bytes, entry.util)
            if ask in refused:
                continue
            gpus = self.place(desk, entry)
            if gpus is None:
                refused.add(ask)
            else:
                desk.start(entry, gpus)

    def place(self, desk: Desk, entry: Entry) -> list[int] | None:
        """Return GPUs for the job, or None: on the node where the ranks of the chosen GPUs add up to the least."""
        if entry.gpus > desk.largest_node:
            return whole_gpus(desk, entry)
        ranks = self.ranks(desk, entry)
        if entry.gpus == 1:
            best = int(np.argmin(ranks))
            return [best] if ranks[best] < np.inf else None
        usable = np.flatnonzero(ranks < np.inf)
        counts = np.bincount(desk.nodes[usable], minlength=desk.node_count)
        chosen: tuple[float, list[int]] | None = None
        for node in np.flatnonzero(counts >= entry.gpus):
            mine = usable[desk.nodes[usable] == node]
            first = mine[np.argsort(ranks[mine], kind="stable")[: entry.gpus]]
            total = float(ranks[first].sum())
            if chosen is None or total < chosen[0]:
                chosen = (total, [int(gpu) for gpu in first])
        return None if chosen is None else chosen[1]

    def ranks(self, desk: Desk, entry: Entry) -> Floats:
        """Return how well each GPU suits the job, shape (GPUs,): smallest best, infinite where it may not go."""
        raise NotImplementedError


class FirstFit(_Packing):
    """The first GPUs with enough free memory, at most ``most`` jobs on each."""

    name = "first-fit"

    def __init__(self, most: int = 4) -> None:
        self.most = most

    def ranks(self, desk: Desk, entry: Entry) -> Floats:
        """See ``_Packing.ranks``."""
        order = np.arange(len(desk.crowds), dtype=np.float64)
        return np.where(self._fits(desk, entry), order, np.inf)

    def _fits(self, desk: Desk, entry: Entry) -> NDArray[np.bool_]:
        return (desk.crowds < self.most) & (desk.memory_left >= entry.memory_bytes)


class BestFit(FirstFit):
    """The GPUs whose free memory fits tightest, at most ``most`` jobs on each."""

    name = "best-fit"

    def ranks(self, desk: Desk, entry: Entry) -> Floats:
        """See ``_Packing.ranks``."""
        return np.where(self._fits(desk, entry), desk.memory_left.astype(np.float64), np.inf)


class Threshold(FirstFit):
    """Pairs whose utilisations add up to at most ``limit`` (as Horus does), the fullest such GPU first."""

    name = "threshold"

    def __init__(self, limit: float = 1.0, most: int = 2) -> None:
        super().__init__(most)
        self.limit = limit

    def ranks(self, desk: Desk, entry: Entry) -> Floats:
        """See ``_Packing.ranks``."""
        fits = self._fits(desk, entry) & ((desk.crowds == 0) | (desk.utils + _util(entry) <= self.limit))
        return np.where(fits, -desk.utils, np.inf)


class Static(_Packing):
    """Equal fractions fixed beforehand: ``slots`` slots a GPU, first fit. Who needs more memory gets the whole GPU."""

    name = "static"

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots

    def ranks(self, desk: Desk, entry: Entry) -> Floats:
        """See ``_Packing.ranks``."""
        order = np.arange(len(desk.crowds), dtype=np.float64)
        slot = desk.slot_bytes(self.slots)
        alone = (desk.crowds == 0) & (desk.memory_left >= entry.memory_bytes)
        # Who is in slots leaves the others' slots free; who needed the whole GPU does not.
        room = (desk.crowds < self.slots) & (desk.memory_left >= (self.slots - desk.crowds) * slot)
        return np.where(np.where(entry.memory_bytes > slot, alone, room), order, np.inf)


class Lucid:
    """Pairs of equally large jobs whose sharing scores add up to at most 2 (Lucid, ASPLOS '23), by estimated service.

    A job up to one node joins the first running job that is alone, has as many GPUs, leaves enough memory, whose score
    (0 light, 1 medium, 2 heavy) fits and that is not expected to end much earlier; else it gets empty GPUs.
    Nobody is suspended.

    Args:
        scores: Score by workload. Without one the score follows the utilisation: 0 below .25, 1 below .65, else 2.
        most_score: Largest sum of scores of a pair.
    """

    name = "lucid"
    knows: Knows = "estimates"

    def __init__(self, scores: Mapping[str, int] | None = None, most_score: int = 2) -> None:
        self.scores, self.most_score = scores or {}, most_score

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (size_of(entry) * entry.gpus,)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        if not desk.waiting:
            return
        alone = [entry for entry in desk.running.values() if all(desk.crowds[gpu] == 1 for gpu in entry.held)]
        table = self._table(desk, alone)
        no_room = 1 << 30
        for entry in list(desk.waiting):
            place = self._partner(entry, table) if entry.gpus <= desk.largest_node else None
            if place is not None:
                desk.start(entry, alone[place].held)
                table[0, place] = -1.0  # no longer alone
                continue
            gpus = whole_gpus(desk, entry) if entry.gpus < no_room else None
            if gpus is None:
                no_room = min(no_room, entry.gpus)
                continue
            desk.start(entry, gpus)
            alone.append(entry)
            table = np.concatenate([table, self._table(desk, [entry])], axis=1)

    def _table(self, desk: Desk, alone: Sequence[Entry]) -> Floats:
        """Return what decides about partners, shape (4, jobs): GPUs, score, expected service, memory left."""
        rows = [
            (e.gpus, self._score(e), size_of(e) * e.gpus, min(desk.memory_left[gpu] for gpu in e.held)) for e in alone
        ]
        return np.array(rows, dtype=np.float64).reshape(len(alone), 4).T

    def _partner(self, entry: Entry, table: Floats) -> int | None:
        suits = (
            (table[0] == entry.gpus)
            & (table[1] + self._score(entry) <= self.most_score)
            & (table[2] * 2.0 >= size_of(entry) * entry.gpus)
            & (table[3] >= entry.memory_bytes)
        )
        place = int(np.argmax(suits)) if len(suits) else 0
        return place if len(suits) and suits[place] else None

    def _score(self, entry: Entry) -> int:
        known = self.scores.get(entry.workload)
        if known is not None:
            return known
        util = _util(entry)
        return 0 if util < 0.25 else 1 if util < 0.65 else 2


def _util(entry: Entry) -> float:
    return UNKNOWN_UTIL if entry.util is None else entry.util
