"""Which of the GPUs that may take a job it gets: the gain first, then what keeps the cluster whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.placement.constraints import Candidates
from cotenant.placement.fleet import Fleet, Floats, Integers
from cotenant.placement.fragmentation import fragments_made
from cotenant.placement.processors import first_of, rooms
from cotenant.placement.room import parts_of, room_lost
from cotenant.placement.shares import TOLERANCE
from cotenant.placement.types import Request

# Slowdown counted for links between the GPUs of one job. Assumptions: what matters is their order.
FURTHER_HOST_COSTS = 0.10
NO_ISLAND_COSTS = 0.05


@dataclass(frozen=True, slots=True)
class _Choice:
    """GPUs for a job, with what they are ranked by: the smaller, the better."""

    key: tuple[float, ...]
    places: list[int]


def choose(candidates: Candidates, request: Request, value: Floats, protect: bool, bias: float) -> list[int] | None:
    """Return the positions of the best ``request.gpus`` candidates, all on one host if asked; None when too few.

    Ranked by: value (less what links between hosts cost), number of residents, fragments made, memory left, position.
    Where it is known what jobs typically ask for, room lost counts instead of the residents and the fragments.

    Args:
        candidates: The GPUs that may take it.
        request: What the job asks.
        value: What each candidate is worth, in order.
        protect: Of equally good GPUs the one with fewer residents, instead of more.
        bias: Packing bias: how little slow links count.
    """
    fleet = candidates.fleet
    if len(candidates.places) < request.gpus:
        return None
    first = -np.rint(value / TOLERANCE)  # equal up to rounding errors counts as equal
    if request.gpus == 1:
        best = first == first.min()
        candidates, first = candidates.only(best), first[best]
    places = candidates.places
    if request.gpus == len(places) == 1:
        return [int(places[0])]
    table = np.stack(
        [
            first,
            *_whole(candidates, request, protect),
            (fleet.free[places] - candidates.needs).astype(np.float64),
        ]
    )
    if request.gpus == 1:
        return [int(places[_least(table)])]
    room = rooms(fleet, request)
    if room is not None and not request.one_host:  # else every host that is a candidate has enough
        keep = first_of(fleet.host[places], room, np.lexsort(table[::-1]))
        places, table = places[keep], table[:, keep]
        if len(places) < request.gpus:
            return None
    slower = (1.0 - bias) * request.gpus / TOLERANCE
    choices = [
        _within(fleet.island[places], places, table, request.gpus),
        _within(fleet.host[places], places, table, request.gpus, NO_ISLAND_COSTS * slower if _linked(fleet) else 0.0),
    ]
    if not request.one_host:
        choices.append(_spread(fleet, places, table, request.gpus, FURTHER_HOST_COSTS * slower))
    found = [choice for choice in choices if choice is not None]
    return sorted(min(found, key=lambda choice: choice.key).places) if found else None


def _whole(candidates: Candidates, request: Request, protect: bool) -> tuple[Floats, Floats]:
    """Return what keeps the cluster whole, two rows for the candidates: the smaller, the better."""
    fleet, places, needs = candidates.fleet, candidates.places, candidates.needs
    crowd = fleet.crowd[places].astype(np.float64)
    if fleet.demand is None:
        return crowd if protect else -crowd, fragments_made(fleet, places, needs)
    lost = room_lost(fleet, fleet.demand, request, places, parts_of(request, needs, fleet.capacity[places]))
    return crowd if protect else np.zeros(len(places)), lost


def _least(table: Floats) -> int:
    """Return the column that comes first when columns are compared row by row."""
    columns = np.arange(table.shape[1])
    for row in table:
        columns = columns[row[columns] == row[columns].min()]
        if len(columns) == 1:
            break
    return int(columns[0])


def _linked(fleet: Fleet) -> bool:
    """Whether any host says how its GPUs are linked."""
    return len(np.unique(fleet.island)) > len(np.unique(fleet.host))


def _within(groups: Integers, places: Integers, table: Floats, wanted: int, penalty: float = 0.0) -> _Choice | None:
    """Return the best GPUs within one group, by the sums of what they are ranked by."""
    order = np.lexsort((*table[::-1], groups))
    sorted_groups = groups[order]
    starts = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    sizes = np.diff(np.r_[starts, len(order)])
    enough = starts[sizes >= wanted]
    if not len(enough):
        return None
    chosen = order[enough[:, None] + np.arange(wanted)]  # shape (groups, wanted)
    sums = table[:, chosen].sum(axis=2)
    first = places[chosen].min(axis=1).astype(np.float64)
    best = _least(np.vstack([sums, first]))
    return _choice(places, table, chosen[best], penalty, 1)


def _spread(fleet: Fleet, places: Integers, table: Floats, wanted: int, per_host: float) -> _Choice:
    """Return GPUs on few hosts: those with most candidates, and last the one whose candidates suffice most tightly."""
    hosts = fleet.host[places]
    counts = np.bincount(hosts)
    chosen: list[int] = []
    used = 0
    fullest_first = np.argsort(-counts, kind="stable")
    while len(chosen) < wanted:
        left = wanted - len(chosen)
        rest = fullest_first[used:]
        suffice = rest[counts[rest] >= left]  # the last of them suffices most tightly
        mine = np.flatnonzero(hosts == (suffice[-1] if len(suffice) else rest[0]))
        ranked = mine[np.lexsort(table[::-1, mine])]
        chosen.extend(ranked[:left].tolist())
        used += 1
    few = _choice(places, table, np.array(chosen, dtype=np.int64), per_host * (used - 1), used)
    best = np.lexsort(table[::-1])[:wanted]
    scattered = len(np.unique(hosts[best]))
    return min(few, _choice(places, table, best, per_host * (scattered - 1), scattered), key=lambda choice: choice.key)


def _choice(places: Integers, table: Floats, chosen: Integers, penalty: float, hosts: int) -> _Choice:
    sums = table[:, chosen].sum(axis=1).tolist()
    mine: Sequence[int] = places[chosen].tolist()
    return _Choice((sums[0] + penalty, float(hosts), *sums[1:], float(min(mine))), list(mine))
