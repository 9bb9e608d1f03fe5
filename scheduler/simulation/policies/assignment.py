"""Who runs where, alone or in pairs, as an integer program over jobs, pairs of jobs and GPU types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from cotenant.scheduler.simulation.desk import Desk, Entry, Key, Knows
from cotenant.scheduler.simulation.policies.gavel import Choice, memory_of, possible, workers_of
from cotenant.scheduler.simulation.truth import NoInterference, Truth

_HORIZON_S = 900.0  # over which the work that a move costs is spread
_GAP = 1e-3  # relative, to the best solution
_LIMIT_S = 10.0  # of one solve; what is best until then is taken


class Assignment:
    """After every arrival and end: as much weighted progress as possible, and few moves.

    The speed of a job counts relative to that on its fastest GPU type, so that a type is given to those who gain most
    by it. The weight is 1 / remaining ** gamma: with gamma 0 nothing is known of run times, above it shorter jobs come
    first, below it longer ones (for the makespan). An instance serves one simulation.

    Args:
        rates: The throughputs it is told.
        gamma: The exponent.
        packed: Whether pairs may share.
        move_s: Work that a move costs, in seconds.
    """

    name = "assignment"

    def __init__(
        self, rates: Truth | None = None, gamma: float = 0.0, *, packed: bool = True, move_s: float = 60.0
    ) -> None:
        self.rates: Truth = rates or NoInterference()
        self.gamma, self.packed, self.move_s = gamma, packed, move_s
        self.knows: Knows = "durations" if gamma else "nothing"

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (entry.submit_s,)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        if not desk.arrived and not desk.freed:
            return
        jobs = [*desk.running.values(), *desk.waiting]
        if jobs:
            _bring_to(desk, {entry.index: entry for entry in jobs}, self._best(desk, jobs))

    def _best(self, desk: Desk, jobs: Sequence[Entry]) -> list[Choice]:
        workers = workers_of(desk)
        choices = possible(jobs, workers, self.rates, packed=self.packed, memory=memory_of(desk))
        fastest = {e.index: max(self.rates.alone(e.workload, kind, e.gpus) for kind in workers) for e in jobs}
        weight = {e.index: self._weight(desk, e) for e in jobs}
        stays = {e.index: desk.gpu_type(e.held[0]) for e in jobs if e.held}
        by_index = {e.index: e for e in jobs}
        worth = [
            sum(weight[job] * speed / fastest[job] for job, speed in zip(choice.jobs, choice.speeds, strict=True))
            - self.move_s / _HORIZON_S * sum(weight[job] for job in _movers(choice, by_index, stays))
            for choice in choices
        ]
        return _solve(choices, np.array(worth), {e.index: row for row, e in enumerate(jobs)}, workers)

    def _weight(self, desk: Desk, entry: Entry) -> float:
        return entry.weight if not self.gamma else entry.weight / max(1.0, desk.remaining_s(entry)) ** self.gamma


def _movers(choice: Choice, jobs: Mapping[int, Entry], stays: Mapping[int, str]) -> list[int]:
    """Return the running jobs of a choice that would have to be moved for it."""
    elsewhere = [job for job in choice.jobs if job in stays and stays[job] != choice.gpu_type]
    here = [job for job in choice.jobs if stays.get(job) == choice.gpu_type]
    apart = here[1:] if len(here) == 2 and jobs[here[0]].held != jobs[here[1]].held else []
    return elsewhere + apart


def _solve(
    choices: Sequence[Choice], worth: np.ndarray, row_of: Mapping[int, int], workers: Mapping[str, int]
) -> list[Choice]:
    """Every job in one choice at most, no type used beyond its GPUs; the largest sum of what choices are worth."""
    kinds, count = list(workers), len(row_of)
    entries = [(row_of[job], column, 1.0) for column, choice in enumerate(choices) for job in choice.jobs]
    entries += [(count + kinds.index(c.gpu_type), column, float(c.gpus)) for column, c in enumerate(choices)]
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(count + len(kinds), len(choices))).tocsr()
    limits = [1.0] * count + [float(workers[kind]) for kind in kinds]
    found = milp(
        -worth / max(float(np.abs(worth).max()), 1e-12),
        constraints=LinearConstraint(matrix, ub=limits),
        bounds=Bounds(0.0, 1.0),
        integrality=np.ones(len(choices)),
        options={"mip_rel_gap": _GAP, "time_limit": _LIMIT_S},
    )
    if found.x is None:
        raise ValueError(f"assignment: the integer program for {count} jobs has no solution: {found.message}")
    return [choice for choice, part in zip(choices, found.x, strict=True) if part > 0.5]


def _bring_to(desk: Desk, jobs: Mapping[int, Entry], chosen: Sequence[Choice]) -> None:
    """Suspend whoever cannot stay, and start the others; a gang may lie on any GPUs of its type."""
    homes: dict[int, tuple[int, ...]] = {}  # by choice: GPUs on which one of its jobs stays
    taken: set[int] = set()
    for number, choice in enumerate(chosen):
        for job in choice.jobs:
            held = jobs[job].held
            if held and number not in homes and desk.gpu_type(held[0]) == choice.gpu_type and taken.isdisjoint(held):
                homes[number] = held
                taken.update(held)
    staying = {
        job for number, choice in enumerate(chosen) for job in choice.jobs if jobs[job].held == homes.get(number, ())
    }
    for entry in [entry for entry in desk.running.values() if entry.index not in staying]:
        desk.suspend(entry)
    for number, choice in enumerate(chosen):
        if number not in homes:
            free = [gpu for gpus in desk.free for gpu in gpus if desk.gpu_type(gpu) == choice.gpu_type]
            homes[number] = tuple(free[: choice.gpus])
        for job in choice.jobs:
            if not jobs[job].held:
                desk.start(jobs[job], homes[number])
