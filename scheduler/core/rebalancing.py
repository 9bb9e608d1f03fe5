"""Taking running jobs from their GPUs, where that is worth what it costs.

Only jobs that save their state and continue from it (hint ``checkpoint: own``) are ever taken; anybody can ask for any
job to be moved. What pays, in this order:

1. **asked**: somebody wants a job elsewhere.
2. **priority** (``preemption``): a job that has waited for some time and fits nowhere takes the place of jobs whose
   value is lower by ``priority_factor``. Its importance counts (its value without waiting) against their values with
   the time they have waited, so nobody gains by waiting, and who was interrupted often is left alone in the end.
   So does one that is expected to have much less to do (**shorter**).
3. **apart** (``separation``): a job is slowed down more than it accepts, as measured for some time or as predicted: it
   or a neighbour moves to where all get along.
4. **unshare** (``separation``): GPUs are free and nobody waits for them: a job that shares, or has
   slower ones, moves there.
5. **trade**, **yield** (``trading``): GPUs are of several types, or the end of all jobs is aimed at: jobs change
   places and make room for others, so that all together get on best.

3 to 5 only when the time that all jobs concerned are expected to save (``placement.moving``) is well above the cost of
a move. Nobody thrashes: a job is left alone for ``board.REST`` times the cost of a move after it got its GPUs, so moves
cost it at most one part in ``REST + 1`` of its time, whatever is predicted. While a job leaves, the GPUs it goes to, or
leaves to another, are kept (``Claim``).
"""

from __future__ import annotations

import math

import numpy as np

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.explain import about_one
from cotenant.placement.explain import explain as fold
from cotenant.placement.fleet import Integers
from cotenant.scheduler.core.board import Board
from cotenant.scheduler.core.events import MoveRequested
from cotenant.scheduler.core.model import Interruption, Job, JobState
from cotenant.scheduler.core.preemption import make_room
from cotenant.scheduler.core.separation import part, unshare
from cotenant.scheduler.core.trading import trade
from cotenant.scheduler.core.turn import Turn

MOST_NAMED = 8  # GPUs of which a refusal tells one by one


def rebalance(turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
    """Move what was asked to be moved, and now and then suspend and move what it is worth to suspend and move."""
    moves, state = turn.state.moves, turn.state
    due = state.settings.rebalance.enabled and turn.now >= moves.next_look_at
    if due:
        moves.due_at, moves.looked_at = math.inf, turn.now
    if not turn.moves_wanted and not (due and state.savers):
        return
    board = Board(turn, policy, predictor)
    for wanted in turn.moves_wanted:
        _move(board, wanted)
    if due and state.savers:
        somebody_waits = make_room(board)
        if policy.exchanges:  # the others do not predict
            part(board)
            if not somebody_waits:
                unshare(board)
            trade(board)
    board.close()


def why_not_moved(turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor, wanted: MoveRequested) -> str:
    """Say why a job that was to be moved stays where it is, GPU by GPU where those are few. Changes nothing."""
    board = Board(turn, policy, predictor)
    try:
        job, fleet = board.state.jobs[wanted.job_id], board.statement.fleet
        own = board.positions(board.places(wanted.job_id))
        board.evict(wanted.job_id)
        places = np.setdiff1d(_wanted_places(board, job, wanted), own)
        usable = board.open_to(job, places)
        kept = len(places) - len(usable)
        told = [f"{kept} kept for other jobs, or on hosts the job is not allowed on"] if kept else []
        if job.spec.hints.gpus == 1 and len(usable) <= MOST_NAMED:
            for place in usable.tolist():
                errors = board.why_not(job, np.array([place]))
                told += [f"{fleet[place].gpu_id}: {about_one(errors)}"] if errors else []
        elif errors := board.why_not(job, usable):
            told.append(fold(errors))
        return "; ".join(told) or "there are no other GPUs"
    finally:
        board.close()


def _move(board: Board, wanted: MoveRequested) -> None:
    """Move a job to some of these GPUs, or anywhere else when none are named; it stays when it does not fit there."""
    job = board.state.jobs[wanted.job_id]
    if job.state is not JobState.RUNNING:
        return
    own, mark = board.places(wanted.job_id), board.statement.checkpoint()
    board.evict(wanted.job_id)
    placement = board.place(job, _wanted_places(board, job, wanted))
    if placement is None or set(board.places(wanted.job_id)) == set(own):
        board.take_back(mark, wanted.job_id)
        board.state.ignore("move to where there is no room")
        return
    starts_over = job.saves and not board.finds_checkpoint(job, [share.gpu_id for share in placement.shares])
    board.leave(job, Interruption("asked", board.now, starts_over=starts_over), wanted.reason)


def _wanted_places(board: Board, job: Job, wanted: MoveRequested) -> Integers:
    """Return the positions of the GPUs that are meant. Nobody who names none wants to lose what the job has done."""
    fleet = board.statement.fleet
    if wanted.gpu_ids:
        return board.positions(filter(fleet.has, set(wanted.gpu_ids)))
    others = np.setdiff1d(fleet.everywhere, board.positions(board.places(wanted.job_id)))
    return board.within_reach(job, others) if job.saves else others
