"""Policies that put several jobs on one GPU without predicting how they get along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.scheduler.simulation.desk import Desk, Entry, Key, Knows
from cotenant.scheduler.simulation.placing import whole_gpus
from cotenant.scheduler.simulation.policies.queueing import size_of

_UNKNOWN_UTIL = 1.0  # a job nobody knows the utilisation of counts as one that fills the GPU


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

        Within one pass GPUs only fill up: who asks for what was refused before is refused again.
        """
        refused: set[tuple[int, int, float | None]] = set()
        for entry in list(desk.waiting):
            ask = (entry.gpus, entry.memory_bytes, entry.util)
            if ask in refused:
                continue
            gpus = self.place(desk, entry)
            if gpus is None:
                refused.add(ask)
            else:
                desk.start(entry, gpus)

    def place(self, desk: Desk, entry: Entry) -> list[int] | None:
        """Return GPUs for the job, or None."""
        best: tuple[tuple[float, ...], list[int]] | None = None
        large = True
        for node in desk.nodes_up():
            gpus = desk.gpus_of(node)
            if len(gpus) < entry.gpus:
                continue
            large = False
            ranked = sorted((rank, gpu) for gpu in gpus if (rank := self.rank(desk, entry, gpu)) is not None)
            if len(ranked) < entry.gpus:
                continue
            chosen = ranked[: entry.gpus]
            total = tuple(sum(part) for part in zip(*(rank for rank, _ in chosen), strict=True))
            if best is None or total < best[0]:
                best = (total, [gpu for _, gpu in chosen])
        if large:
            return whole_gpus(desk, entry)
        return None if best is None else best[1]

    def rank(self, desk: Desk, entry: Entry, gpu: int) -> tuple[float, ...] | None:
        """Return how well the GPU suits the job, smallest best; None = it may not go there."""
        raise NotImplementedError


class Static(_Packing):
    """Equal fractions fixed beforehand: ``slots`` slots a GPU, first fit. Who needs more memory gets the whole GPU."""

    name = "static"

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots

    def rank(self, desk: Desk, entry: Entry, gpu: int) -> tuple[float, ...] | None:
        """See ``_Packing.rank``."""
        crowd, slot = desk.crowd(gpu), desk.memory_bytes(gpu) // self.slots
        if entry.memory_bytes > slot:
            return (gpu,) if crowd == 0 and entry.memory_bytes <= desk.memory_bytes(gpu) else None
        if crowd >= self.slots or any(other.memory_bytes > slot for other in desk.residents(gpu)):
            return None
        return (gpu,)


class FirstFit(_Packing):
    """The first GPUs with enough free memory, at most ``most`` jobs on each."""

    name = "first-fit"

    def __init__(self, most: int = 4) -> None:
        self.most = most

    def rank(self, desk: Desk, entry: Entry, gpu: int) -> tuple[float, ...] | None:
        """See ``_Packing.rank``."""
        if desk.crowd(gpu) >= self.most or entry.memory_bytes > desk.memory_free(gpu):
            return None
        return (gpu,)


class BestFit(FirstFit):
    """The GPUs whose free memory fits tightest, at most ``most`` jobs on each."""

    name = "best-fit"

    def rank(self, desk: Desk, entry: Entry, gpu: int) -> tuple[float, ...] | None:
        """See ``_Packing.rank``."""
        if super().rank(desk, entry, gpu) is None:
            return None
        return (float(desk.memory_free(gpu) - entry.memory_bytes), gpu)


class Threshold(_Packing):
    """Pairs whose utilisations add up to at most ``limit`` (as Horus does), the fullest such GPU first."""

    name = "threshold"

    def __init__(self, limit: float = 1.0, most: int = 2) -> None:
        self.limit, self.most = limit, most

    def rank(self, desk: Desk, entry: Entry, gpu: int) -> tuple[float, ...] | None:
        """See ``_Packing.rank``."""
        if desk.crowd(gpu) >= self.most or entry.memory_bytes > desk.memory_free(gpu):
            return None
        others = _utils(desk.residents(gpu))
        if others and others + _utils([entry]) > self.limit:
            return None
        return (-others, gpu)


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
        alone = {index: e for index, e in desk.running.items() if all(desk.crowd(gpu) == 1 for gpu in e.held)}
        no_room = 1 << 30
        for entry in list(desk.waiting):
            partner = None
            if entry.gpus <= max(len(desk.gpus_of(node)) for node in desk.nodes_up()):
                partner = next((other for other in alone.values() if self._suits(desk, entry, other)), None)
            gpus = list(partner.held) if partner else whole_gpus(desk, entry) if entry.gpus < no_room else None
            if gpus is None:
                no_room = min(no_room, entry.gpus)
                continue
            desk.start(entry, gpus)
            if partner:
                del alone[partner.index]
            else:
                alone[entry.index] = entry

    def _suits(self, desk: Desk, entry: Entry, other: Entry) -> bool:
        return (
            entry.gpus == other.gpus
            and self._score(entry) + self._score(other) <= self.most_score
            and size_of(entry) <= size_of(other) * 2.0
            and all(entry.memory_bytes <= desk.memory_free(gpu) for gpu in other.held)
        )

    def _score(self, entry: Entry) -> int:
        known = self.scores.get(entry.workload)
        if known is not None:
            return known
        util = _utils([entry])
        return 0 if util < 0.25 else 1 if util < 0.65 else 2


def _utils(entries: Iterable[Entry]) -> float:
    return sum(_UNKNOWN_UTIL if entry.util is None else entry.util for entry in entries)
