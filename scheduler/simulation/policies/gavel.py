"""Rounds whose time is divided by a linear program over jobs, pairs of jobs and GPU types (Gavel, OSDI '20)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from cotenant.scheduler.simulation.desk import Desk, Entry, Key, Knows
from cotenant.scheduler.simulation.truth import NoInterference, Truth

_GAIN = 1.05  # sum of a pair's normalised throughputs, below which packing it is not considered
_REST = 1e-3  # weight of the sum of throughputs beside the smallest one
_SOME = 1e-6  # a fraction of time below this is none


@dataclass(frozen=True, slots=True)
class Choice:
    """One or two equally large jobs on a GPU type: their speeds, and what part of the time they are to run so."""

    jobs: tuple[int, ...]
    gpu_type: str
    speeds: tuple[float, ...]
    gpus: int
    part: float = 0.0


class Gavel:
    """Max-min fairness over GPU types with packing, in rounds.

    After arrivals, ends and losses of hosts a linear program says what part of the time each job, and each pair of
    equally large jobs, is to run on each GPU type, so that the smallest throughput, relative to an equal part of the
    cluster, is as large as can be. In every round the choices that are furthest behind their part run, as far as GPUs
    last. A job that keeps its GPU type and its neighbour is not disturbed. An instance serves one simulation.

    Args:
        rates: The throughputs it is told: with the truth it is the oracle that its authors compare with.
        round_s: Length of a round.
        packed: Whether pairs may share.
    """

    name = "gavel"
    knows: Knows = "nothing"

    def __init__(self, rates: Truth | None = None, round_s: float = 360.0, *, packed: bool = True) -> None:
        self.rates: Truth = rates or NoInterference()
        self.round_s, self.packed = round_s, packed
        self._choices: list[Choice] = []
        self._planned: tuple[frozenset[int], dict[str, int]] = (frozenset(), {})
        self._had: dict[tuple[tuple[int, ...], str], float] = {}
        self._running: list[Choice] = []
        self._round_at = -1.0

    def key(self, entry: Entry, desk: Desk) -> Key:
        """See ``BaselinePolicy.key``."""
        return (entry.submit_s,)

    def schedule(self, desk: Desk) -> None:
        """See ``BaselinePolicy.schedule``."""
        if not desk.waiting and not desk.running:
            return
        if desk.now % self.round_s == 0.0 and desk.now != self._round_at:
            self._round_at = desk.now
            self._round(desk)
        desk.wake((desk.now // self.round_s + 1.0) * self.round_s)

    def _round(self, desk: Desk) -> None:
        jobs = {entry.index: entry for entry in (*desk.running.values(), *desk.waiting)}
        for choice in self._running:
            key = (choice.jobs, choice.gpu_type)
            self._had[key] = self._had.get(key, 0.0) + self.round_s
        plan = (frozenset(jobs), workers_of(desk))
        if plan != self._planned:
            self._planned, self._had = plan, {}
            memory = memory_of(desk)
            self._choices = divide_time(list(jobs.values()), plan[1], self.rates, packed=self.packed, memory=memory)
        self._running = self._pick(desk)
        _move(desk, jobs, self._running)

    def _pick(self, desk: Desk) -> list[Choice]:
        """Return what runs in this round: first whoever has had the smallest part of what it is to have."""
        left = workers_of(desk)
        total = {kind: sum(self._had[key] for key in self._had if key[1] == kind) or 1.0 for kind in left}

        def urgency(choice: Choice) -> tuple[float, float]:
            had = self._had.get((choice.jobs, choice.gpu_type), 0.0) / total[choice.gpu_type]
            return (-choice.part / had if had else -np.inf, -choice.part)

        taken: set[int] = set()
        chosen: list[Choice] = []
        for choice in sorted(self._choices, key=urgency):
            if taken.isdisjoint(choice.jobs) and choice.gpus <= left[choice.gpu_type]:
                taken.update(choice.jobs)
                left[choice.gpu_type] -= choice.gpus
                chosen.append(choice)
        return chosen


def divide_time(
    jobs: Sequence[Entry],
    workers: dict[str, int],
    rates: Truth,
    *,
    packed: bool = True,
    memory: Mapping[str, int] | None = None,
) -> list[Choice]:
    """Solve the linear program; return the choices that are to run for some of the time.

    Maximise z + small * mean_j T_j, with T_j = sum of x * speed over the choices with j, divided by what j would do on
    an equal part of the cluster, times its GPUs and divided by its weight; T_j >= z; a job runs at most all the time;
    the GPUs of a type are not used more than all the time.
    """
    choices = possible(jobs, workers, rates, packed=packed, memory=memory)
    if not choices:
        return []
    row_of = {entry.index: row for row, entry in enumerate(jobs)}
    total = sum(workers.values())
    fair = [sum(rates.alone(e.workload, kind, e.gpus) * count / total for kind, count in workers.items()) for e in jobs]
    scale = [entry.gpus / (entry.weight * max(norm, _SOME)) for entry, norm in zip(jobs, fair, strict=True)]
    n, m, kinds = len(choices), len(jobs), list(workers)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    worth = np.zeros(n + 1)
    worth[n] = 1.0
    for column, choice in enumerate(choices):
        for index, speed in zip(choice.jobs, choice.speeds, strict=True):
            row = row_of[index]
            rows += [row, m + row]
            columns += [column, column]
            values += [-speed * scale[row], 1.0]
            worth[column] += _REST * speed * scale[row] / m
        rows.append(2 * m + kinds.index(choice.gpu_type))
        columns.append(column)
        values.append(float(choice.gpus))
    rows += range(m)
    columns += [n] * m
    values += [1.0] * m
    matrix = coo_array((values, (rows, columns)), shape=(2 * m + len(kinds), n + 1))
    limits = np.concatenate([np.zeros(m), np.ones(m), [float(workers[kind]) for kind in kinds]])
    solved = linprog(-worth, A_ub=matrix.tocsr(), b_ub=limits, bounds=(0.0, None), method="highs")
    if solved.x is None:
        raise ValueError(f"gavel: the linear program for {m} jobs has no solution: {solved.message}")
    return [
        Choice(c.jobs, c.gpu_type, c.speeds, c.gpus, float(part))
        for c, part in zip(choices, solved.x[:n], strict=True)
        if part > _SOME
    ]


def possible(
    jobs: Sequence[Entry],
    workers: dict[str, int],
    rates: Truth,
    *,
    packed: bool,
    memory: Mapping[str, int] | None = None,
) -> list[Choice]:
    """Return what may run: each job, and each pair that is worth it, on each GPU type whose ``memory`` suffices."""
    found: list[Choice] = []
    for kind, count in workers.items():
        room = (memory or {}).get(kind, math.inf)
        small = [e for e in jobs if e.gpus <= count and e.memory_bytes <= room]
        fits = [e for e in small if rates.alone(e.workload, kind, e.gpus) > 0.0]
        alone = {e.index: rates.alone(e.workload, kind, e.gpus) for e in fits}
        found += [Choice((e.index,), kind, (alone[e.index],), e.gpus) for e in fits]
        for place, one in enumerate(fits if packed else ()):
            for other in fits[place + 1 :]:
                if one.gpus != other.gpus or one.memory_bytes + other.memory_bytes > room:
                    continue
                try:
                    n = rates.together((one.workload, other.workload), kind)
                except KeyError:
                    continue
                if sum(n) > _GAIN:
                    speeds = (n[0] * alone[one.index], n[1] * alone[other.index])
                    found.append(Choice((one.index, other.index), kind, speeds, one.gpus))
    return found


def workers_of(desk: Desk) -> dict[str, int]:
    """Return the number of GPUs of each type on nodes that are up."""
    counts: dict[str, int] = {}
    for node in range(desk.node_count):
        if not desk.is_lost(node):
            for gpu in desk.gpus_of(node):
                counts[desk.gpu_type(gpu)] = counts.get(desk.gpu_type(gpu), 0) + 1
    return counts


def memory_of(desk: Desk) -> dict[str, int]:
    """Return the memory that every GPU of a type has."""
    least: dict[str, int] = {}
    for node in range(desk.node_count):
        for gpu in desk.gpus_of(node):
            kind = desk.gpu_type(gpu)
            least[kind] = min(least.get(kind, desk.memory_bytes(gpu)), desk.memory_bytes(gpu))
    return least


def _move(desk: Desk, jobs: dict[int, Entry], chosen: Sequence[Choice]) -> None:
    """Suspend whoever does not go on as it is, then start the choices; a gang may lie on any GPUs of its type."""
    staying: set[int] = set()
    for choice in chosen:
        held = {jobs[index].held for index in choice.jobs}
        gpus = next(iter(held))
        if len(held) == 1 and gpus and desk.gpu_type(gpus[0]) == choice.gpu_type:
            present = {entry.index for gpu in gpus for entry in desk.residents(gpu)}
            if present == set(choice.jobs):
                staying |= present
    for entry in [entry for entry in desk.running.values() if entry.index not in staying]:
        desk.suspend(entry)
    for choice in chosen:
        if staying.issuperset(choice.jobs):
            continue
        free = [gpu for gpus in desk.free for gpu in gpus if desk.gpu_type(gpu) == choice.gpu_type]
        for index in choice.jobs:
            desk.start(jobs[index], free[: choice.gpus])
