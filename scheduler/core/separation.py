"""Moving jobs: where one is slowed down more than it accepts by another, and where free GPUs would serve it better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import numpy as np

from cotenant.placement.fleet import Integers
from cotenant.placement.moving import Pace, ends_in_s
from cotenant.scheduler.core.board import WORTH, Board
from cotenant.scheduler.core.model import Interruption, Job, JobState
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.requests import max_slowdown

TOLERANCE = 1.1  # a slowdown that is less beyond the accepted one is left as it is
MOST_CONSIDERED = 16  # jobs that are looked at, of each kind
MOST_MOVES = 16


@dataclass(frozen=True, slots=True)
class Move:
    """A job, where it goes, and what all jobs concerned save by it, seconds, by their weight against its own."""

    job: Job
    gpu_ids: tuple[str, ...]
    gain_s: float


@dataclass(frozen=True, slots=True)
class _Stay:
    """How a job goes where it is: when it ends, in seconds, if its company stays, its throughput, and its weight."""

    ends_s: float
    n: float
    weight: float


def part(board: Board) -> None:
    """Part jobs of which one is slowed down more than it accepts.

    It or a neighbour moves to where all get along, whichever saves most; or else, when it is more important by the
    factor of the settings, a neighbour makes room.
    """
    everywhere = board.statement.fleet.everywhere
    for hurt, limit in _hurt(board)[:MOST_CONSIDERED]:
        job_id = hurt.spec.job_id
        near = board.residents(board.places(job_id))
        if not board.taken.isdisjoint((job_id, *near)):
            continue  # somebody leaves already
        n, movers = throughput(board, hurt), board.movable(near)
        known = known_pace(board, hurt)
        found = [move for job in movers if (move := worked_out(board, job, everywhere, known, (job_id, limit)))]
        if found:
            best = max(found, key=lambda move: move.gain_s)
            _go(
                board,
                best,
                Interruption("apart", board.now, job_id, best.gain_s, board.rules.move_cost_s, n, 1.0 / limit),
            )
        else:
            _send_away(board, hurt, n, [job for job in movers if job is not hurt])


def _send_away(board: Board, hurt: Job, n: float, neighbours: Sequence[Job]) -> None:
    """Have the least important neighbour make room if the job is more important by the factor of the settings."""
    value, _, job = min(((board.value(job), job.seq, job) for job in neighbours), default=(math.inf, 0, hurt))
    gain_s = saves_s(board, hurt, n)
    if is_less_important(board, value, board.value(hurt)) and is_worth_it(board, gain_s):
        why = Interruption(
            "priority", board.now, hurt.spec.job_id, gain_s, board.rules.move_cost_s, value, board.value(hurt)
        )
        board.evict(job.spec.job_id)
        board.leave(job, why)


def is_less_important(board: Board, value: float, worth: float) -> bool:
    """Whether a job of this value makes room for one of this worth that it slows down."""
    return value * board.rules.priority_factor <= worth and value < worth


def is_worth_it(board: Board, gain_s: float) -> bool:
    """Whether so many seconds are worth what a move costs."""
    return gain_s > WORTH * board.rules.move_cost_s


def saves_s(board: Board, hurt: Job, n: float) -> float:
    """Return what a job saves that goes at this throughput, once nobody slows it down, seconds."""
    return board.left_s(hurt.spec.job_id) * (1.0 / n - 1.0)


def unshare(board: Board) -> None:
    """Move jobs that share, or have GPUs of a slow type, to GPUs that are free, those first by which most is saved."""
    empty = board.empty()
    if not len(empty):
        return
    least_s, cost_s = WORTH * board.rules.move_cost_s, board.rules.move_cost_s
    # Where all GPUs are of one type, nobody gains anything but its GPU for itself.
    may = board.movable(board.sharing() if len(board.statement.fleet.kinds) < 2 else None)
    room, stay = _room(board, empty), cache(partial(_stay, board))
    bounded = [
        (bound, job)
        for job in may
        if job.spec.hints.gpus <= room[job.spec.hints.gang] and (bound := _could_save_s(board, job, stay)) > least_s
    ]
    for _, job in sorted(bounded, key=lambda each: (-each[0], each[1].seq))[:MOST_CONSIDERED]:
        if len(board.taken) >= MOST_MOVES:
            return
        move = worked_out(board, job, empty) if job.spec.hints.gpus <= room[job.spec.hints.gang] else None
        if move is not None:
            _go(board, move, Interruption("unshare", board.now, None, move.gain_s, cost_s))
            empty = board.empty()
            room = _room(board, empty)


def _go(board: Board, move: Move, why: Interruption) -> None:
    board.evict(move.job.spec.job_id)
    if board.place(move.job, board.positions(move.gpu_ids)) is not None:
        board.leave(move.job, why)


def _hurt(board: Board) -> list[tuple[Job, float]]:
    """Return the jobs beside movable ones that are slowed down more than they accept, and what they accept."""
    state = board.state
    slow: list[str] = []
    for job_id in board.sharing():
        job, since = state.jobs[job_id], state.moves.hurt_since.get(job_id)
        measured = since is not None and since + PATIENCE_S <= board.now
        if job.state is JobState.RUNNING and (measured or is_foreseen(board, job)):
            slow.append(job_id)
    return [
        (job, accepted(board, job))
        for job in state.in_order(slow)
        if board.movable(board.residents(board.places(job.spec.job_id)))
    ]


def is_foreseen(board: Board, job: Job) -> bool:
    """Whether the job is predicted to be slowed down more than it accepts by so much that it is not left as it is."""
    return job.predicted is not None and job.predicted * accepted(board, job) * TOLERANCE < 1.0


def known_pace(board: Board, job: Job) -> dict[str, float]:
    """Return the throughput of a job that is measured to be slowed down more than it accepts; empty of another."""
    return {job.spec.job_id: throughput(board, job)} if job.spec.job_id in board.state.moves.hurt_since else {}


def accepted(board: Board, job: Job) -> float:
    """Return the largest slowdown that the job accepts."""
    return max_slowdown(job.spec.hints, board.state.settings)


def throughput(board: Board, job: Job) -> float:
    """Return the throughput of a job that is hurt: the lower of predicted and measured."""
    predicted, profile = job.predicted or 1.0, job.profile
    solo = profile.solo_step_rate if profile else None
    windows = [usage.signature for usage in board.state.usage.get(job.spec.job_id, {}).values()]
    return min([predicted, *(w.step_rate / solo for w in windows if solo and w.step_rate)])


def _stay(board: Board, job_id: str) -> _Stay:
    n = board.state.jobs[job_id].predicted or 1.0
    return _Stay(board.left_s(job_id) * board.slower(job_id) / n, n, board.weight(job_id))


def _could_save_s(board: Board, job: Job, stay: Callable[[str], _Stay]) -> float:
    """Return more than any move of the job to free GPUs could save.

    That is all that those on its GPUs lose to each other, and what it loses itself on GPUs of a slower type.
    """
    job_id = job.spec.job_id
    own, lost_s = stay(job_id), board.left_s(job_id) * (board.slower(job_id) - 1.0)
    for other in map(stay, board.residents(board.places(job_id))):
        lost_s += min(other.ends_s, own.ends_s) * (1.0 - other.n) * other.weight / own.weight
    return lost_s


def _room(board: Board, empty: Integers) -> dict[str, int]:
    """Return how many free GPUs a job could have: on one host, where it needs that, and in the whole cluster."""
    hosts = board.statement.fleet.host[empty]
    return {"host": int(np.bincount(hosts).max(initial=0)), "cluster": len(empty)}


def _alone_saves_s(board: Board, job: Job, places: Integers, measured: Mapping[str, float]) -> float:
    """Return what moving the job to some of these GPUs saves at most: alone there, on the type that suits it best."""
    job_id, fleet = job.spec.job_id, board.statement.fleet
    kinds = np.unique(fleet.kind[places]).tolist()
    company = [other for other in board.residents(board.places(job_id)) if other != job_id]
    after = board.paces(company, without=job_id)
    after[job_id] = Pace(1.0, max(1.0 / board.slower_on(job_id, fleet.kinds[kind]) for kind in kinds), ())
    return _gain_s(board, job_id, _as_measured(board.paces(after), measured), after)


def _as_measured(found: dict[str, Pace], measured: Mapping[str, float]) -> dict[str, Pace]:
    """Return how jobs go, with throughputs that are known better than predicted."""
    for job_id, n in measured.items():
        found[job_id] = replace(found[job_id], n=min(n, found[job_id].n))
    return found


def worked_out(
    board: Board,
    job: Job,
    places: Integers,
    measured: Mapping[str, float] = MappingProxyType({}),
    accepts: tuple[str, float] | None = None,
    *,
    whatever_it_saves: bool = False,
    wherever: bool = False,
) -> Move | None:
    """Return the move of the job to some of these GPUs if it is worth its cost. The board stays as it is.

    Args:
        board: The board.
        job: The job.
        places: Positions of the GPUs where it may go.
        measured: Throughputs that are known better than predicted.
        accepts: A job that must be slowed down by at most this factor afterwards.
        whatever_it_saves: It need not be worth its cost.
        wherever: It need not find its checkpoint there.
    """
    job_id, least_s = job.spec.job_id, -math.inf if whatever_it_saves else WORTH * board.rules.move_cost_s
    leaves, attempts = board.places(job_id), board.state.line.attempts
    others = board.others(places, leaves)
    if not wherever:
        others = board.within_reach(job, others)
    attempt = board.attempt(replace(board.state.request_of(job), job_id=""), job, others, ())
    if attempt is not None and attempts.failed(attempt):
        return None
    if _alone_saves_s(board, job, places, measured) <= least_s:
        return None
    mark = board.statement.checkpoint()
    board.evict(job_id)
    placement = board.place(job, others)
    if placement is None:
        if attempt is not None:
            attempts.note_failed(attempt)
        board.take_back(mark, job_id)
        return None
    goes = board.places(job_id)
    concerned = list({**board.residents(leaves), **board.residents(goes)})
    after = board.paces(concerned)
    board.take_back(mark, job_id)
    before = _as_measured(board.paces(concerned), measured)
    if accepts is not None and after[accepts[0]].n * accepts[1] < 1.0:
        return None
    gain_s = _gain_s(board, job_id, before, after)
    return Move(job, goes, gain_s) if gain_s > least_s else None


def _gain_s(board: Board, job_id: str, before: Mapping[str, Pace], after: Mapping[str, Pace]) -> float:
    """Return what all jobs save together, seconds, by their weight against that of the one that moves."""
    saved_s = sum(
        (ends_in_s(each, before, board.left_s) - ends_in_s(each, after, board.left_s)) * board.weight(each)
        for each in before
    )
    return saved_s / board.weight(job_id)
