"""Taking running jobs from their GPUs, where that is worth what it costs.

Only jobs that save their state and continue from it (hint ``checkpoint: own``) are ever taken; anybody can ask for any
job to be moved. What pays, in this order:

1. **asked**: somebody wants a job elsewhere.
2. **priority** (``preemption``): a job that has waited for some time and fits nowhere takes the place of jobs whose
   value is lower by ``priority_factor``. Its importance counts (its value without waiting) against their values with
   the time they have waited, so nobody gains by waiting, and who was interrupted often is left alone in the end.
3. **apart** (``separation``): a job is slowed down more than it accepts, as measured for some time or as predicted: it
   or a neighbour moves to where all get along.
4. **unshare** (``separation``): GPUs are free and nobody waits for them: a job that shares, or has
   slower ones, moves there.

3 and 4 only when the time that all jobs concerned are expected to save (``placement.moving``) is well above the cost of
a move. Nobody thrashes: a job is left alone for ``board.REST`` times the cost of a move after it got its GPUs, so moves
cost it at most one part in ``REST + 1`` of its time, whatever is predicted. While a job leaves, the GPUs it goes to, or
leaves to another, are kept (``Claim``).
"""

from __future__ import annotations

import math

import numpy as np

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.scheduler.core.board import Board
from cotenant.scheduler.core.events import MoveRequested
from cotenant.scheduler.core.model import Interruption, JobState
from cotenant.scheduler.core.preemption import make_room
from cotenant.scheduler.core.separation import part, unshare
from cotenant.scheduler.core.turn import Turn


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
    board.close()


def _move(board: Board, wanted: MoveRequested) -> None:
    """Move a job to some of these GPUs, or anywhere else when none are named; it stays when it does not fit there."""
    job = board.state.jobs[wanted.job_id]
    if job.state is not JobState.RUNNING:
        return
    own, mark, fleet = board.places(wanted.job_id), board.statement.checkpoint(), board.statement.fleet
    board.evict(wanted.job_id)
    if wanted.gpu_ids:
        places = board.positions(filter(fleet.has, set(wanted.gpu_ids)))
    else:
        places = np.setdiff1d(fleet.everywhere, board.positions(own))
    if board.place(job, places) is None or set(board.places(wanted.job_id)) == set(own):
        board.take_back(mark, wanted.job_id)
        board.state.ignore("move to where there is no room")
        return
    board.leave(job, Interruption("asked", board.now), wanted.reason)
