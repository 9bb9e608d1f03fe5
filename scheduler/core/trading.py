"""Jobs that change places, and make room for others, so that all together get on best.

A job is placed when GPUs are free, and later comers find the fast ones taken. So now and then all movable jobs, and
those that wait, are assigned anew, by an integer program over choices (one job alone, or two side by side, on the GPUs
of one type on a host; where there are many hosts, on those of a type)::

    maximise    sum over choices c of  x[c] sum over jobs j in c of  w_j (speed_j[c] - moved_j[c] cost / soon_j)
    subject to  every job in one choice at most, and no part of the cluster used beyond the GPUs that these jobs have
                or that are free

with ``speed`` against alone on the job's fastest type, ``cost`` that of a move, ``WORTH`` times, and ``soon`` what the
job has left, at most ``HORIZON_S``: until then everything will have been assigned anew. The weight ``w`` follows from
what the administrator aims at:

* completion: weight of the job's share over the root of what it has left (an hour at least, where nobody knows). What
  counts is how fast work gets done now, and not what each job saves until it ends: that would keep the fast GPUs for
  the longest jobs, though these get them anyway once the shorter ones are through.
* makespan: weight of the share times what a second of its work is worth for the end of all (``prices``).

Somebody may be suspended by it, but nobody of a higher class than those who wait, and nobody who has waited for longer
than it has run (unless the last end is aimed at). Nobody starves: who waits comes first in the end (``priority``), and
then has its GPUs for ``board.REST`` times the cost of a move at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from cotenant.placement.fleet import Flags, Fleet, Floats, Integers
from cotenant.scheduler.core.board import WORTH, Board
from cotenant.scheduler.core.choices import Choices, possible
from cotenant.scheduler.core.deadlines import attained_s
from cotenant.scheduler.core.model import Interruption, InterruptionKind, Job
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.preemption import is_patient
from cotenant.scheduler.core.prices import prices_of_work
from cotenant.scheduler.core.priority import CLASS_POINTS, SIZE_SCALE_S

MOST_JOBS = 128  # that run, and as many that wait
MOST_HOSTS = 16  # that are told apart
MOST_CHOICES = 10_000  # beyond, nobody is put beside another anew
MOST_TRIES = 4  # a choice for which there turns out to be no place is struck out, and all are assigned once more
MOST_NODES = 200  # of the search
HORIZON_S: Mapping[str, float] = {"completion": 900.0, "makespan": 1800.0}
LEAST_LEFT_S = 60.0
LEAST_PRICE = 0.02  # of the mean: who has time is not left aside for ever
_GAP = 1e-4  # relative, to the best assignment
_NOWHERE, _NOBODY = -1, -1


def trade(board: Board) -> None:
    """Have jobs change places, start and make room where that is worth well above the cost of the moves."""
    fleet, aim = board.statement.fleet, board.state.settings.scheduling.aim
    if len(fleet.kinds) < 2 and aim == "completion":
        return
    board.look_when_rested()
    movable = {job.spec.job_id for job in board.movable()}
    if not movable:
        return
    savers = board.state.savers  # those that may not move yet count for what work is worth
    running = [board.state.jobs[job_id] for job_id in savers.ids(savers.running()[:MOST_JOBS])]
    crew = _Crew(board, running, _waiting(board), movable)
    choices, worth = crew.offered()
    for _ in range(MOST_TRIES):
        chosen = _assigned(choices, worth, crew.gpus, crew.limits(), crew.must_run)
        if chosen is None:
            return
        stuck = _bring_about(board, crew, [(choices.members(each), int(choices.part[each])) for each in chosen])
        if stuck is None:
            return
        worth[chosen[stuck]] = -np.inf


def _waiting(board: Board) -> list[Job]:
    """Return the jobs that have waited for some time, may start and fit nowhere: those of the highest class."""
    state, line = board.state, board.state.line
    rows = line.refused_rows()
    rows = rows[line.waiting_since(rows) + PATIENCE_S <= board.now]
    rows = rows[line.order(rows, line.scores(rows, board.now, board.standing))]
    jobs = [state.jobs[line.job_id(row)] for row in rows.tolist()]
    jobs = [
        job
        for job in jobs
        if job.spec.job_id not in state.moves.claims and job.not_before <= board.now and not job.frozen
    ]
    jobs = board.startable(jobs)
    highest = max((CLASS_POINTS[job.spec.hints.priority] for job in jobs), default=0.0)
    return [job for job in jobs if CLASS_POINTS[job.spec.hints.priority] >= highest][:MOST_JOBS]


class _Crew:
    """The jobs that are assigned, those that run first, and where they are; arrays have an entry for each job."""

    def __init__(self, board: Board, running: Sequence[Job], waiting: Sequence[Job], movable: Set[str]) -> None:
        self.board, self.jobs = board, [*running, *waiting]
        self.ids = [job.spec.job_id for job in self.jobs]
        self.fleet: Fleet = board.statement.fleet
        self.part_of, self.kind_of = _parts(self.fleet)
        self.requests = [board.state.request_of(job) for job in self.jobs]
        self.gpus = np.array([request.gpus for request in self.requests])
        self.left_s = np.array([_left_s(board, job) for job in self.jobs])
        self.at = np.full(len(self.jobs), _NOWHERE)
        self.beside = np.full(len(self.jobs), _NOBODY)
        self.takes_part = np.ones(len(self.jobs), dtype=np.bool_)
        index = {job_id: number for number, job_id in enumerate(self.ids) if job_id in movable}
        for number in range(len(running)):
            self._find(number, index)
        left_alone = np.array([mate != _NOBODY and not self.takes_part[mate] for mate in self.beside], dtype=np.bool_)
        self.takes_part[left_alone], self.at[left_alone] = False, _NOWHERE
        self.must_run = self._must_run(waiting)

    def _find(self, number: int, index: dict[str, int]) -> None:
        """Note where a running job is, and whether it can be assigned: alone, or beside one other that can."""
        board, job, places = self.board, self.jobs[number], self.board.places(self.ids[number])
        there, mates = (
            board.positions(places),
            [other for other in board.residents(places) if other != self.ids[number]],
        )
        together = all(other in index and set(board.places(other)) == set(places) for other in mates)
        parts = np.unique(self.part_of[there])
        apart = (
            self.ids[number] not in index or job.only_host is not None or job.freezes or bool(board.closed[there].any())
        )
        apart = apart or board.over_limit(job) is not None  # it could not come back
        if apart or len(parts) != 1 or len(mates) > 1 or not together:
            self.takes_part[number] = False
            return
        self.at[number] = parts[0]
        self.beside[number] = index[mates[0]] if mates else _NOBODY

    def _must_run(self, waiting: Sequence[Job]) -> Flags:
        """Return who must not be suspended for those who wait: who is of a higher class, or was held up for long.

        Where the last end of all is aimed at, being held up is no reason: there short jobs have time.
        """
        least = CLASS_POINTS[waiting[0].spec.hints.priority] if waiting else -1.0
        points = np.array([CLASS_POINTS[job.spec.hints.priority] for job in self.jobs])
        spared = points > least
        if self.board.state.settings.scheduling.aim == "completion":
            savers = self.board.state.savers
            rows = savers.running()
            spared |= np.isin(self.ids, savers.ids(rows[~is_patient(savers, rows, self.board.now)]))
        must: Flags = (self.at != _NOWHERE) & spared
        return must

    def limits(self) -> Floats:
        """Return how many GPUs of each part these jobs have, or are free."""
        mine = {
            gpu_id for number in np.flatnonzero(self.at != _NOWHERE) for gpu_id in self.board.places(self.ids[number])
        }
        usable = np.concatenate([self.board.empty(), self.board.positions(mine)])
        return np.bincount(self.part_of[usable], minlength=len(self.kind_of)).astype(np.float64)

    def offered(self) -> tuple[Choices, Floats]:
        """Return what can be chosen, and what each choice is worth."""
        board = self.board
        choices = possible(self.requests, self.fleet, board.predictor, board.packing)
        weight = self._weights(choices)
        choices = choices.among(self.takes_part).spread(self.kind_of)
        if len(choices) > MOST_CHOICES:
            stay = self._as_now(choices)
            others = np.flatnonzero(~choices.paired & ~stay)[:MOST_CHOICES]
            choices = choices.only(np.sort(np.concatenate([np.flatnonzero(stay), others])))
        lost = (
            WORTH
            * board.rules.move_cost_s
            / np.minimum(self.left_s, HORIZON_S[board.state.settings.scheduling.aim])
            * weight
        )
        runs = self.at != _NOWHERE
        moved = np.where(runs, lost, 0.0)
        worth = choices.total(weight, by_speed=True)
        # Who is suspended pays for a move as well: that is counted for who goes on in place of it.
        worth = worth + choices.total(moved, by_speed=False) - self._moves(choices, moved)
        return choices, worth

    def _as_now(self, choices: Choices) -> Flags:
        """Return which choices leave everything as it is: without these, jobs would have to leave for nothing."""
        first, second = choices.first, choices.second
        flags: Flags = (self.at[first] == choices.part) & (self.beside[first] == second)
        return flags

    def _moves(self, choices: Choices, lost: Floats) -> Floats:
        """Return what the moves of each choice cost: of those elsewhere, and of one of two that come together."""
        first, second, part = choices.first, choices.second, choices.part
        paired, away = choices.paired, np.where(self.at[first] == part, 0.0, lost[first])
        away = away + np.where(paired & (self.at[second] != part), lost[second], 0.0)
        meet = paired & (self.at[first] == part) & (self.at[second] == part) & (self.beside[first] != second)
        return np.asarray(away + np.where(meet, np.minimum(lost[first], lost[second]), 0.0))

    def _weights(self, choices: Choices) -> Floats:
        share = np.array([request.weight for request in self.requests])
        if self.board.state.settings.scheduling.aim == "completion":
            known = np.array([job.spec.hints.expected_duration_s is not None for job in self.jobs])
            return np.asarray(share / np.sqrt(np.where(known, self.left_s, SIZE_SCALE_S)))
        there = np.bincount(self.fleet.kind[self.fleet.schedulable], minlength=len(self.fleet.kinds))
        price = prices_of_work(choices, self.left_s, self.gpus, there)
        return np.asarray(share * (price + LEAST_PRICE * price.mean()))


def _parts(fleet: Fleet) -> tuple[Integers, Integers]:
    """Return in which part of the cluster each GPU is, and of which GPU type each part."""
    whole = np.zeros(len(fleet), dtype=np.int64) if len(np.unique(fleet.host)) > MOST_HOSTS else fleet.host
    keys, part_of = np.unique(whole * len(fleet.kinds) + fleet.kind, return_inverse=True)
    return part_of, keys % len(fleet.kinds)


def _left_s(board: Board, job: Job) -> float:
    """Return what a job has left, seconds alone on its fastest type.

    Who runs on beyond what it said is expected to end soon: after as much again as it is beyond.
    """
    done, expected_s = (
        attained_s(job, board.state.progress.get(job.spec.job_id), board.now),
        job.spec.hints.expected_duration_s,
    )
    return max(LEAST_LEFT_S, done if expected_s is None else abs(expected_s - done))


def _assigned(choices: Choices, worth: Floats, gpus: Integers, limits: Floats, must: Flags) -> Integers | None:
    """Return the choices with which all together gain most; None where nothing was found.

    Args:
        choices: What can be chosen.
        worth: What each is worth.
        gpus: GPUs of each job.
        limits: GPUs of each part of the cluster.
        must: Jobs that must be in one of the choices.
    """
    offered = np.flatnonzero(worth > 0.0)
    if not len(offered):
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - takes long, and few clusters need it
    from scipy.sparse import coo_array  # noqa: PLC0415

    some, count = choices.only(offered), len(offered)
    each, pairs = np.arange(count), np.flatnonzero(some.paired)
    rows, columns = np.concatenate([some.first, some.second[pairs]]), np.concatenate([each, pairs])
    once = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(gpus), count))
    used = coo_array((gpus[some.first].astype(np.float64), (some.part, each)), shape=(len(limits), count))
    found = milp(
        -worth[offered] / worth[offered].max(),
        constraints=[
            LinearConstraint(once.tocsr(), must.astype(np.float64), 1.0),
            LinearConstraint(used.tocsr(), ub=limits),
        ],
        bounds=Bounds(0.0, 1.0),
        integrality=np.ones(count),
        options={"mip_rel_gap": _GAP, "node_limit": MOST_NODES},
    )
    return None if found.x is None else offered[found.x > 0.5]


@dataclass(frozen=True, slots=True)
class _Step:
    """A choice to be brought about: its jobs, the part of the cluster, the GPUs of one that stays (none: others)."""

    number: int
    jobs: Sequence[int]
    part: int
    home: tuple[str, ...] = ()


def _steps(crew: _Crew, chosen: Sequence[tuple[list[int], int]]) -> list[_Step]:
    """Return what is to be done, those first whose GPUs are known, then the largest."""
    taken: set[str] = set()
    steps: list[_Step] = []
    for number, (jobs, part) in enumerate(chosen):
        step = _Step(number, jobs, part)
        for job in jobs:
            places = crew.board.places(crew.ids[job])
            if crew.at[job] == part and not step.home and taken.isdisjoint(places):
                step = replace(step, home=places)
                taken.update(places)
        steps.append(step)
    return sorted(steps, key=lambda step: (not step.home, -int(crew.gpus[step.jobs[0]])))


def _bring_about(board: Board, crew: _Crew, chosen: Sequence[tuple[list[int], int]]) -> int | None:
    """Have jobs leave and keep the places they are given; the number of a choice that has no place, or None."""
    steps, mark = _steps(crew, chosen), board.statement.checkpoint()
    stay = {
        job for step in steps for job in step.jobs if step.home and set(board.places(crew.ids[job])) == set(step.home)
    }
    stay = {job for job in stay if crew.at[job] != _NOWHERE}
    movers = [job for job in np.flatnonzero(crew.at != _NOWHERE).tolist() if job not in stay]
    before = {job: board.slower(crew.ids[job]) for job in movers}
    for job in movers:
        board.evict(crew.ids[job])
    placed: list[int] = []
    for step in steps:
        places = board.positions(step.home) if step.home else _empty_of(crew, step.part)
        for job in [each for each in step.jobs if each not in stay]:
            placed.append(job)
            near = board.within_reach(crew.jobs[job], places) if job in before else places
            if board.place(crew.jobs[job], near) is None:
                for each in placed:
                    board.take_back(mark, crew.ids[each])
                return step.number
            places = board.positions(board.places(crew.ids[job]))
    leaving, aim = [crew.jobs[job] for job in movers], board.state.settings.scheduling.aim
    for job in movers:
        goes = job in placed
        saved_s = crew.left_s[job] * (before[job] - board.slower(crew.ids[job])) if goes else None
        kind: InterruptionKind = "trade" if aim == "completion" and goes else "yield"
        board.leave(crew.jobs[job], Interruption(kind, board.now, None, saved_s, board.rules.move_cost_s))
    for job in placed:
        board.keep(crew.ids[job], leaving)
    return None


def _empty_of(crew: _Crew, part: int) -> Integers:
    """Return the GPUs of a part of the cluster that carry nobody on the board."""
    fleet = crew.fleet
    return np.flatnonzero((crew.part_of == part) & (fleet.crowd == 0) & fleet.schedulable)
