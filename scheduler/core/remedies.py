"""What becomes of a job that runs beside others and is slowed down too much, or whose deadline is at risk by that.

Said is what the scheduler may do about it by itself and when, or why it does nothing, and what would help. Every way is
tried on a board as rebalancing tries it, and taken back: what its rules do not confirm is not promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.scheduler.core import separation
from cotenant.scheduler.core.advice import room_in, too_late
from cotenant.scheduler.core.board import REST, Board, loses_nothing
from cotenant.scheduler.core.deadlines import MARGIN, Outlook, running_outlook, span
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.preemption import would_leave
from cotenant.scheduler.core.priority import CLASS_POINTS, ordered
from cotenant.scheduler.core.slowdowns import measured
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import Turn

MOST_NEAR = 8  # jobs on the same GPUs that are tried
MOST_NAMED = 3  # of each kind of help
SLACK = 0.005  # of a throughput: alone is alone
_OWN, _DIRECTORY = "checkpoint: own", "checkpoints.directory"


@dataclass(frozen=True, slots=True)
class Remedies:
    """What the scheduler does about it or why it does not, and what would help, in words."""

    told: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """A job that others slow down too much.

    Attributes:
        board: The cluster, to try things on.
        hurt: The job.
        near: Itself and those on its GPUs, who lose nothing by leaving them first; not too many.
        limit: The slowdown it accepts.
        slow: It is slowed down so much more that the scheduler parts them.
        need: The largest slowdown that would do.
        outlook: What is expected of its deadline.
    """

    board: Board
    hurt: Job
    near: Sequence[Job]
    limit: float
    slow: bool
    need: float
    outlook: Outlook | None

    @property
    def at_risk(self) -> bool:
        """Its deadline is at risk."""
        return self.outlook is not None and self.outlook.at_risk


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of parting them: who goes where, or makes room (no GPUs), when at the earliest, and what that lacks."""

    job: Job
    gpu_ids: tuple[str, ...]
    at: float
    lacks: tuple[str, ...]


def remedies(state: State, job: Job, now: float, policy: PlacementPolicy, predictor: InterferencePredictor) -> Remedies:
    """Return what can be said of a job; nothing of one that is alone or gets on as well as it wants.

    Of one that waits: who could be suspended for it where the scheduler itself would be too late for its deadline.

    Args:
        state: The state; tried on, and left as it is.
        job: The job.
        now: Unix seconds.
        policy: The placement policy in force.
        predictor: The predictor in force.
    """
    dated = job.state is JobState.QUEUED and job.spec.hints.deadline_s is not None
    if job.state is not JobState.RUNNING and not dated:
        return Remedies()
    board = Board(Turn(state, now), policy, predictor)
    try:
        if dated:
            return Remedies(helps=_in_time(board, job))
        case = _case(board, job)
        return Remedies() if case is None else _remedies(case, policy)
    finally:
        board.close()


def _in_time(board: Board, job: Job) -> tuple[str, ...]:
    """Return the commands that make room for the first in the queue before it is too late for its deadline."""
    state, now = board.state, board.now
    wait_s, jobs = room_in(state, job, now)
    if not jobs or not too_late(job, now, wait_s) or too_late(job, now, 0.0):
        return ()
    if ordered((state.jobs[job_id] for job_id in state.queued), now, board.standing)[0] is not job:
        return ()
    leaving = would_leave(board, job, [state.jobs[job_id] for job_id in jobs])
    return tuple(f"'cotenant suspend {each.spec.job_id}' to make room in time: it loses nothing" for each in leaving)


def _case(board: Board, job: Job) -> _Case | None:
    """Return what there is to mend; None when nothing is, or nobody else is on its GPUs."""
    state, job_id = board.state, job.spec.job_id
    others = [each for each in state.in_order(board.residents(board.places(job_id))) if each is not job]
    near = [job, *sorted(others, key=lambda each: len(_lacks(board, each)))][:MOST_NEAR]  # the sort is stable
    limit, outlook = separation.accepted(board, job), running_outlook(job, state.progress.get(job_id), board.now)
    seen, at_risk = measured(state, job), outlook is not None and outlook.at_risk
    expected = 1.0 / job.predicted if seen is None and job.predicted else 0.0
    slow = job_id in state.moves.hurt_since or separation.is_foreseen(board, job)
    too_slow = slow or round(max(seen or 0.0, expected), 2) > limit
    if len(near) < 2 or not (too_slow or at_risk):
        return None
    need = limit if too_slow else float("inf")
    if at_risk and outlook is not None and outlook.alone_s:
        need = min(need, max(1.0, outlook.left_s / (outlook.alone_s * (1.0 + MARGIN))))
    return _Case(board, job, near, limit, slow, need, outlook)


def _remedies(case: _Case, policy: PlacementPolicy) -> Remedies:
    leaves = [job.spec.job_id for job in case.near if job.state is JobState.STOPPING]
    if leaves:
        return Remedies(helps=(f"nothing need be done: job {leaves[0]} leaves its GPUs already",))
    ways = _ways(case)
    own = [way for way in ways if not way.lacks]
    off = _off(case.board, policy)
    if own and not off:
        first = min(own, key=lambda way: way.at)
        soon = first.at <= case.board.now
        return Remedies(helps=(f"wait: {_may(case, first)}, {_when(case, first)}", *(() if soon else _commands(case))))
    helps = [f"set rebalance.enabled: then {_may(case, own[0])}"] if own and policy.exchanges else []
    if not own:
        helps = [*_hints(case, ways), *_rise(case)] if not off else []
    return Remedies((f"nobody is moved: {off or _why_not(case)}",), (*helps, *_commands(case)))


def _off(board: Board, policy: PlacementPolicy) -> str:
    """Say why the scheduler parts nobody at all; empty when it may."""
    if not policy.exchanges:
        return f"the placement policy {policy.name} parts no jobs (setting placement.policy)"
    return "" if board.rules.enabled else "rebalancing is switched off (setting rebalance.enabled)"


# -- what the scheduler may do by itself ------------------------------------------------------------------------------


def _ways(case: _Case) -> list[_Way]:
    """Return the ways in which the scheduler would part them, those first that lack nothing; as ``part`` decides."""
    moves = [way for job in case.near if (way := _move(case, job))]
    if any(not way.lacks for way in moves):
        return [way for way in moves if not way.lacks]
    rooms = [_Way(job, (), _at(case, job), _lacks(case.board, job)) for job in case.near if _makes_room(case, job)]
    rooms = [way for way in rooms if way.job not in [move.job for move in moves]] if moves else rooms
    return sorted([*moves, *rooms], key=lambda way: len(way.lacks))


def _move(case: _Case, job: Job) -> _Way | None:
    """Return the move of one of the jobs that parts them and is worth its cost, whatever the job may lack for it."""
    board, state = case.board, case.board.state
    everywhere, lacks = board.statement.fleet.everywhere, _lacks(board, job)
    if not case.slow:  # only GPUs that are free and that nobody waits for are given to those that share
        everywhere = board.empty() if not len(state.line.refused_rows()) else everywhere[:0]
    if not len(everywhere):
        return None
    known = separation.known_pace(board, case.hurt)
    accepts = (case.hurt.spec.job_id, case.need)
    move = separation.worked_out(board, job, everywhere, known, accepts)
    if move is None and state.settings.checkpoints.directory is None and not job.freezes:
        move = separation.worked_out(board, job, everywhere, known, accepts, wherever=True)
        lacks = tuple(dict.fromkeys((*lacks, _DIRECTORY)))
    return None if move is None else _Way(job, move.gpu_ids, _at(case, job), lacks)


def _makes_room(case: _Case, job: Job, rise: float = 0.0) -> bool:
    """Whether a neighbour that could leave would make room for the job, were this more important by so much."""
    board, worth = case.board, case.board.value(case.hurt) + rise
    important = separation.is_less_important(board, board.value(job), worth)
    return case.slow and job is not case.hurt and important and _room_pays(case)


def _room_pays(case: _Case) -> bool:
    """Whether the job has so much left that it is worth it to have a neighbour make room."""
    gain_s = separation.saves_s(case.board, case.hurt, separation.throughput(case.board, case.hurt))
    return separation.is_worth_it(case.board, gain_s)


def _lacks(board: Board, job: Job) -> tuple[str, ...]:
    """Return what it takes for the job to lose nothing when it leaves its GPUs."""
    saves = () if job.saves else (_OWN,)
    return saves if loses_nothing(job, board.state.settings) else (*saves, _DIRECTORY)


def _at(case: _Case, job: Job) -> float:
    """Return when the job may leave its GPUs at the earliest: it has its rest first, and what hurts has to last."""
    board = case.board
    rested_at = (job.lease.granted_at if job.lease else board.now) + REST * board.rules.move_cost_s
    since = board.state.moves.hurt_since.get(case.hurt.spec.job_id)
    if since is None or separation.is_foreseen(board, case.hurt):
        return rested_at
    return max(rested_at, since + PATIENCE_S)


def _when(case: _Case, way: _Way) -> str:
    left_s, outlook = way.at - case.board.now, case.outlook
    when = f"in {span(left_s)} at the earliest" if left_s > 0.0 else "within seconds if that still pays"
    late = case.at_risk and outlook is not None and max(0.0, left_s) + (outlook.alone_s or 0.0) > outlook.left_s
    return f"{when}, which is too late for its deadline" if late else when


def _may(case: _Case, way: _Way) -> str:
    who = "it" if way.job is case.hurt else f"job {way.job.spec.job_id}"
    if way.gpu_ids:
        return f"{who} may be moved to {', '.join(way.gpu_ids)}"
    return f"{who}, which is less important, may be asked to make room"


def _why_not(case: _Case) -> str:
    """Say why the scheduler parts nobody although it may."""
    if not case.slow and case.at_risk:
        return (
            "a deadline at risk has its share weigh more; jobs are parted where one is slowed down more than it "
            f"accepts ({case.limit:.2f}), or where free GPUs that nobody waits for make that worth it"
        )
    if not case.slow:
        return "a predicted slowdown that is less than a tenth beyond the accepted one is left as it is"
    able = [job for job in case.near if not _lacks(case.board, job)]
    if not able:
        return "neither it nor its neighbours can leave their GPUs without losing what they have done (hint checkpoint)"
    names = " or ".join("it" if job is case.hurt else f"job {job.spec.job_id}" for job in able)
    return f"{names} would not be better off, all counted, on any other GPU where they get along, and {_stays(case)}"


def _stays(case: _Case) -> str:
    """Say why no neighbour makes room."""
    if not _room_pays(case):
        return "what it has left is too little for a neighbour to make room (rebalance.move_cost_s)"
    if all(_lacks(case.board, job) for job in case.near if job is not case.hurt):
        return "no neighbour can leave without losing what it has done (hint checkpoint)"
    factor = case.board.rules.priority_factor
    return f"no neighbour that saves is less important by the factor {factor:g} (rebalance.priority_factor)"


# -- what would help --------------------------------------------------------------------------------------------------


def _hints(case: _Case, ways: Sequence[_Way]) -> list[str]:
    """Return what has to be given or set so that the scheduler itself would part them."""
    told: list[str] = []
    for way in ways[:MOST_NAMED]:
        gives = _LACKING[way.lacks].format(job=way.job.spec.job_id)
        told.append(f"{gives}: {_may(case, way).replace(' may ', ' could then ')}")
    return told


_LACKING: Mapping[tuple[str, ...], str] = {
    (_OWN,): "give job {job} the hint checkpoint: own, if its program saves and continues",
    (_DIRECTORY,): "set checkpoints.directory, so that job {job} can continue on other hosts",
    (_OWN, _DIRECTORY): (
        "give job {job} the hint checkpoint: own, if its program saves and continues, and set checkpoints.directory"
    ),
}


def _rise(case: _Case) -> list[str]:
    """Return that a higher priority would have a neighbour make room, where it would."""
    rise = CLASS_POINTS["high"] - CLASS_POINTS[case.hurt.spec.hints.priority]
    able = [job for job in case.near if not _lacks(case.board, job) and _makes_room(case, job, rise)]
    return [f"a higher priority: job {able[0].spec.job_id} could then be asked to make room"] if able else []


def _commands(case: _Case) -> tuple[str, ...]:
    """Return what somebody can order now: who loses nothing by it comes first, then who is least important."""
    board = case.board
    order = sorted(case.near, key=lambda job: (bool(_lacks(board, job)), board.value(job), job.seq))
    may = [job for job in order if job.state is JobState.RUNNING and not job.stays]
    moves = [told for job in may if (told := _ordered_move(case, job))]
    rooms = [told for job in may if job is not case.hurt and (told := _ordered_room(case, job))]
    return tuple(chain(moves[:MOST_NAMED], rooms[:MOST_NAMED]))


def _ordered_move(case: _Case, job: Job) -> str:
    """Return the command that moves one of them to where it no longer matters, if there is room; empty if not."""
    board, over = case.board, bool(_lacks(case.board, job))
    if job is case.hurt and over and case.at_risk:
        return ""  # it would start over
    move = separation.worked_out(
        board,
        job,
        board.statement.fleet.everywhere,
        accepts=(case.hurt.spec.job_id, case.need + SLACK),
        whatever_it_saves=True,
        wherever=not job.saves,
    )
    return "" if move is None else f"'cotenant move {job.spec.job_id}' to {', '.join(move.gpu_ids)}: {_keeps(over)}"


def _ordered_room(case: _Case, job: Job) -> str:
    """Return the command that suspends a neighbour, if that is enough; empty if not."""
    board, hurt, mark = case.board, case.hurt.spec.job_id, case.board.statement.checkpoint()
    board.evict(job.spec.job_id)
    after = board.paces([hurt])[hurt].n
    board.take_back(mark, job.spec.job_id)
    if after * (case.need + SLACK) < 1.0:
        return ""
    return f"'cotenant suspend {job.spec.job_id}' until this job has ended: {_keeps(bool(_lacks(board, job)))}"


def _keeps(over: bool) -> str:
    return "it starts over then, since it does not save" if over else "it loses nothing"
