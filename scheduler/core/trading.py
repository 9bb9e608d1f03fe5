"""Jobs on GPUs of several types that change places: fast GPUs go to those who gain most by them.

A job is placed when GPUs are free, and later comers find the fast ones taken. So now and then all movable jobs that
have GPUs to themselves are assigned to GPU types anew, by an integer program::

    maximise    sum over jobs j, types t of  x[j, t] w_j (speed_j[t] - speed_j[now] - moved[j, t] cost / left_j)
    subject to  every job on one type, and no type used beyond the GPUs that these jobs have or that are free

with ``speed`` that on a type against the job's fastest, ``w`` its weight, ``left`` the seconds that it has left alone
on its fastest type, and ``cost`` that of a move, ``WORTH`` times. What counts is how fast work gets done now, and not
what each job saves until it ends: that would keep the fast GPUs for the longest jobs, though these get them anyway once
the shorter ones are through. (Gavel, Narayanan et al. 2020, spreads every job over types in time instead.) Nobody is
suspended for another: whoever runs goes on running.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotenant.placement.fleet import Flags, Floats, Integers
from cotenant.scheduler.core.board import WORTH, Board
from cotenant.scheduler.core.model import Interruption, Job

MOST_JOBS = 256  # that are assigned
MOST_TRIES = 4  # a job for which there turns out to be no place stays, and the others are assigned once more
MOST_NODES = 200  # of the search
_GAP = 1e-3  # relative, to the best assignment


def trade(board: Board) -> None:
    """Have jobs change places where all together save by it what is well above the cost of their moves."""
    fleet = board.statement.fleet
    if len(fleet.kinds) < 2:
        return
    board.look_when_rested()
    jobs = [job for job in board.movable() if _has_gpus_to_itself(board, job)][:MOST_JOBS]
    if not jobs:
        return
    kind = np.array([fleet.kind[fleet.position(board.places(job.spec.job_id)[0])] for job in jobs])
    left_s = np.array([board.left_s(job.spec.job_id) for job in jobs])
    slower = np.array([[board.slower_on(job.spec.job_id, name) for name in fleet.kinds] for job in jobs])
    gpus, worth = np.array([job.spec.hints.gpus for job in jobs]), _worth(board, jobs, kind, slower, left_s)
    rows = np.arange(len(jobs))
    for _ in range(MOST_TRIES):
        chosen = _assigned(worth, gpus, kind, _free(board, len(fleet.kinds)))
        movers = [(job, int(to)) for job, at, to in zip(jobs, kind, chosen, strict=True) if at != to]
        stuck = _move(board, movers)
        if stuck is None:
            saved_s = left_s * (slower[rows, kind] - slower[rows, chosen])
            _leave(board, [(jobs[row], float(saved_s[row])) for row in np.flatnonzero(chosen != kind).tolist()])
            return
        row = jobs.index(stuck)
        worth[row] = np.where(np.arange(len(fleet.kinds)) == kind[row], 0.0, -np.inf)


def _has_gpus_to_itself(board: Board, job: Job) -> bool:
    fleet = board.statement.fleet
    places = board.positions(board.places(job.spec.job_id))
    alone = len(places) > 0 and bool((fleet.crowd[places] == 1).all())
    return alone and job.only_host is None and len(np.unique(fleet.kind[places])) == 1


def _free(board: Board, kinds: int) -> Integers:
    """Return how many GPUs of each type carry nobody."""
    return np.bincount(board.statement.fleet.kind[board.empty()], minlength=kinds)


def _worth(board: Board, jobs: Sequence[Job], kind: Integers, slower: Floats, left_s: Floats) -> Floats:
    """Return by how much each job is faster on each type than where it is, less what the move costs, by its weight.

    Args:
        board: The board.
        jobs: The jobs.
        kind: Where each is, shape (jobs,).
        slower: How many times longer each takes on each type, shape (jobs, types).
        left_s: Seconds each has left alone on its fastest type.

    Returns:
        Shape (jobs, types), -inf where a job cannot run.
    """
    rows, weight = np.arange(len(jobs)), np.array([board.weight(job.spec.job_id) for job in jobs])
    speed, cost_s = 1.0 / slower, WORTH * board.rules.move_cost_s
    gained = speed - speed[rows, kind][:, None] - (cost_s / np.maximum(left_s, 1.0))[:, None]
    worth: Floats = np.where(np.isfinite(slower), weight[:, None] * gained, -np.inf)
    worth[rows, kind] = 0.0
    return worth


def _assigned(worth: Floats, gpus: Integers, kind: Integers, free: Integers) -> Integers:
    """Return the type of each job with which all together gain most."""
    rows, columns = np.nonzero(np.isfinite(worth))
    each_worth = worth[rows, columns]
    if not (each_worth > 0.0).any():
        return kind
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - takes long, and few clusters need it
    from scipy.sparse import coo_array  # noqa: PLC0415

    count, kinds = worth.shape
    each = np.arange(len(rows))
    once = coo_array((np.ones(len(rows)), (rows, each)), shape=(count, len(rows)))
    used = coo_array((gpus[rows].astype(np.float64), (columns, each)), shape=(kinds, len(rows)))
    limits = free + np.bincount(kind, weights=gpus, minlength=kinds)
    found = milp(
        -each_worth / np.abs(each_worth).max(),
        constraints=[LinearConstraint(once.tocsr(), 1.0, 1.0), LinearConstraint(used.tocsr(), ub=limits)],
        bounds=Bounds(0.0, 1.0),
        integrality=np.ones(len(rows)),
        options={"mip_rel_gap": _GAP, "node_limit": MOST_NODES},
    )
    if found.x is None:
        return kind
    chosen: Flags = found.x > 0.5
    result = kind.copy()
    result[rows[chosen]] = columns[chosen]
    return result


def _move(board: Board, movers: Sequence[tuple[Job, int]]) -> Job | None:
    """Place jobs on these types on the board; the first for which there is no place, and nothing changed, or None."""
    fleet, mark = board.statement.fleet, board.statement.checkpoint()
    for job, _ in movers:
        board.evict(job.spec.job_id)
    for job, to in sorted(movers, key=lambda each: -each[0].spec.hints.gpus):
        places = np.flatnonzero((fleet.kind == to) & (fleet.crowd == 0) & fleet.schedulable)
        if board.place(job, board.within_reach(job, places)) is None:
            for other, _ in movers:
                board.take_back(mark, other.spec.job_id)
            return job
    return None


def _leave(board: Board, movers: Sequence[tuple[Job, float]]) -> None:
    """Have jobs leave for the places they were given on the board; each is given with the seconds it saves."""
    for job, saved_s in movers:
        board.leave(job, Interruption("trade", board.now, None, saved_s, board.rules.move_cost_s))
    for job, _ in movers:
        board.keep(job.spec.job_id, [other for other, _ in movers])
