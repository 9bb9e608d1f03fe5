"""Having less important jobs make room for those that wait.

Who is less important: whose value is lower by ``priority_factor``; or who is of no higher class and has so much more
left to do, in GPU-seconds, than a waiting job, and has waited for less than it has run. (Shortest remaining time first,
Schrage 1968, but no long job is held up to more than about twice its time by that. Less than twice as much, and wrong
estimates would have jobs make room for each other in turn.)

Of whom nobody knows how long it runs, as much is expected as it has done. So among such jobs those go first that have
had least of the GPUs (least attained service: Nuyens and Wierman 2008; Tiresias, Gu et al. 2019). That is best where
few jobs are much longer than most, and bad where all are alike and only take turns. So it takes more there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.configs.settings import RebalanceSettings
from cotenant.placement.fleet import Flags, Floats, Integers
from cotenant.placement.types import Placement
from cotenant.scheduler.core.board import REST, Board
from cotenant.scheduler.core.deadlines import left_of
from cotenant.scheduler.core.model import Interruption, InterruptionKind, Job
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.priority import CLASS_POINTS, Standing, importance
from cotenant.scheduler.core.savers import Savers

MOST_CLAIMANTS = 8  # waiting jobs that are looked at, of those that have waited long enough
MUCH_MORE, UNSURE = 2.0, 4.0  # times the GPU-seconds; where nobody knows how long the job that waits runs
TRIAL_S = 1800.0  # a job that nobody knows anything of is expected to run so long: moves for less are not worth it
BEFORE_SHORTER = 2.0  # times the cost of a move
HELD_UP = 1.0  # of the time it has run, beyond which a job makes no more room for shorter ones
MOST_TRIED = 16  # GPUs or hosts, and jobs on them, that are tried for one of them

_Valued = tuple[float, Job]


def make_room(board: Board) -> bool:
    """Have less important jobs leave for waiting jobs that fit nowhere; say whether anybody waits who may start."""
    state, line = board.state, board.state.line
    rows = line.refused_rows()
    if not len(rows):
        return False
    waits_since = line.waiting_since(rows)
    patient_at = waits_since + PATIENCE_S
    turns = np.concatenate([patient_at, waits_since + before_shorter_s(board.rules)])
    if len(not_yet := turns[turns > board.now]):
        state.moves.look(float(not_yet.min()))
    claimants = [line.row(job_id) for job_id in state.moves.claims if job_id in line]
    patient = np.setdiff1d(rows[patient_at <= board.now], claimants, assume_unique=True)
    if len(patient):
        first = line.order(patient, line.scores(patient, board.now, board.standing))[:MOST_CLAIMANTS]
        jobs, movers = [state.jobs[line.job_id(row)] for row in patient[first].tolist()], _movers(board)
        waited = board.now - line.waiting_since(patient[first]) >= before_shorter_s(board.rules)
        for job, shorter in zip(jobs, waited.tolist(), strict=True):
            _make_room_for(board, job, movers, shorter=shorter)
        _look_when_more_may_be_asked(board, jobs)
    return True


def before_shorter_s(rules: RebalanceSettings) -> float:
    """Return how long a job waits before others make room because it is shorter: a place may come free for nothing."""
    return BEFORE_SHORTER * rules.move_cost_s


def _look_when_more_may_be_asked(board: Board, jobs: Sequence[Job]) -> None:
    """Have rebalancing look again when the next running job has had its rest, or has had so much that it makes room."""
    savers, now = board.state.savers, board.now
    rows = savers.running()
    least = min(_much_more(job, board.standing) for job in jobs)
    had_s, gpus = savers.attained_s(rows, now), savers.gpus(rows)
    enough = gpus * savers.left_s(rows, now) >= least
    needs_s = np.where(savers.is_open_ended(rows, now), least / gpus, np.where(enough, 0.0, np.inf))
    needs_s = np.maximum(needs_s, savers.waited_s(rows) / HELD_UP)
    rested_at = savers.granted_at(rows) + REST * board.rules.move_cost_s
    times = np.concatenate([rested_at, np.maximum(rested_at, now + needs_s - had_s)])
    if len(times := times[(times > now) & np.isfinite(times)]):
        board.state.moves.look(float(times.min()))


@dataclass(frozen=True, slots=True)
class Movers:
    """The jobs that may be asked to leave, least valued first; the arrays have an entry for each.

    Attributes:
        job_ids: Their ids.
        value: Their priority values.
        points: Of their priority class.
        work_s: GPU-seconds that each is expected to have left, alone.
        patient: See ``is_patient``.
    """

    job_ids: Sequence[str]
    value: Floats
    points: Floats
    work_s: Floats
    patient: Flags


def _movers(board: Board) -> Movers:
    savers, rows = board.state.savers, board.movable_rows()
    # Whoever ends soon anyway need not be asked.
    rows = rows[savers.left_s(rows, board.now) > 2.0 * board.rules.move_cost_s]
    value = board.values(rows)
    order = np.lexsort((-savers.seqs(rows), value))
    return movers_of(savers, rows[order], value[order], board.now)


def movers_of(savers: Savers, rows: Integers, value: Floats, now: float) -> Movers:
    """Return what decides which of these jobs make room.

    Args:
        savers: The jobs on GPUs that save.
        rows: Those that may be asked.
        value: Their priority values.
        now: Unix seconds.
    """
    return Movers(
        job_ids=savers.ids(rows),
        value=value,
        points=savers.points(rows),
        work_s=savers.gpus(rows) * savers.left_s(rows, now),
        patient=is_patient(savers, rows, now),
    )


def is_patient(savers: Savers, rows: Integers, now: float) -> Flags:
    """Return which jobs have waited for less than ``HELD_UP`` of the time they have run: they make room for others."""
    flags: Flags = savers.waited_s(rows) <= HELD_UP * savers.attained_s(rows, now)
    return flags


def may_be_asked(movers: Movers, job: Job, standing: Standing, most: float, *, shorter: bool) -> Flags:
    """Return which of these jobs make room for a waiting one.

    Args:
        movers: The jobs.
        job: The one that waits.
        standing: What the order of the queue rests on.
        most: The value up to which jobs are less important.
        shorter: Those make room as well that only have much more left.
    """
    asked = movers.value <= most
    return asked | _have_much_more_left(movers, job, standing) if shorter else asked


def most_valued(worth: float, rules: RebalanceSettings) -> float:
    """Return the value up to which jobs are less important than one of this worth: for equals nobody makes room."""
    return min(worth / rules.priority_factor, math.nextafter(worth, -math.inf))


def _make_room_for(board: Board, job: Job, movers: Movers, *, shorter: bool) -> None:
    if board.over_limit(job) is not None:
        return  # others of its tenant or queue, for whom somebody makes room already, will hold all that it may
    worth = importance(job, board.now, board.standing)
    most = most_valued(worth, board.rules)
    may = may_be_asked(movers, job, board.standing, most, shorter=shorter)
    found = ((float(movers.value[place]), movers.job_ids[place]) for place in np.flatnonzero(may).tolist())
    victims = [(value, board.state.jobs[job_id]) for value, job_id in found if job_id not in board.taken]
    request, attempts = replace(board.state.request_of(job), job_id=""), board.state.line.attempts
    for places, group in _groups(board, job, victims):
        attempt = board.attempt(request, job, places, (other.spec.job_id for _, other in group))
        if attempt is not None and attempts.failed(attempt):
            continue
        leaving = _place_without(board, job, places, group)
        if leaving is None:
            if attempt is not None:
                attempts.note_failed(attempt)
            continue
        for value, other in leaving:
            kind: InterruptionKind = "priority" if value <= most else "shorter"
            board.leave(other, Interruption(kind, board.now, job.spec.job_id, value=value, against=worth))
        board.keep(job.spec.job_id, [other for _, other in leaving])
        return


def would_leave(board: Board, job: Job, may: Sequence[Job]) -> list[Job]:
    """Return those of these jobs that would have to leave for a waiting one to fit; none when that is not enough."""
    mark, valued = board.statement.checkpoint(), sorted((board.value(each), each.seq, each) for each in may)
    for places, group in _groups(board, job, [(value, each) for value, _, each in valued]):
        leaving = _place_without(board, job, places, group)
        if leaving is not None:
            board.take_back(mark, job.spec.job_id)
            return [each for _, each in leaving]
    return []


def _have_much_more_left(movers: Movers, job: Job, standing: Standing) -> Flags:
    """Which running jobs have ``MUCH_MORE`` times left what a waiting one wants, and have waited little."""
    more = _much_more(job, standing) <= movers.work_s
    return movers.patient & more & (movers.points <= CLASS_POINTS[job.spec.hints.priority])


def _much_more(job: Job, standing: Standing) -> float:
    """Return how many GPU-seconds another must have left to make room for a waiting job: so many times its own.

    Infinitely many where the last end of all is aimed at: there short jobs have time.
    """
    if standing.settings.aim == "makespan":
        return math.inf
    gpus, left_s = job.spec.hints.gpus, left_of(job.spec.hints, job.done_s)
    return UNSURE * gpus * max(TRIAL_S, job.done_s) if left_s is None else MUCH_MORE * gpus * left_s


def _groups(board: Board, job: Job, victims: Sequence[_Valued]) -> Iterator[tuple[Integers, list[_Valued]]]:
    """Yield GPUs with the jobs that could leave them, least valued first: single ones, those of a host, or all."""
    hints, gpus, fleet = job.spec.hints, board.state.gpus, board.statement.fleet
    groups: dict[str, dict[str, _Valued]] = {}
    for value, other in victims:
        for gpu_id in board.places(other.spec.job_id):
            where = gpu_id if hints.gpus == 1 else gpus[gpu_id].host_id if hints.gang == "host" else ""
            groups.setdefault(where, {})[other.spec.job_id] = (value, other)
    for where, group in list(groups.items())[:MOST_TRIED]:
        if hints.gpus == 1:
            places = board.positions((where,))
        elif hints.gang == "host":
            places = fleet.of_host(where)
        else:
            places = fleet.everywhere
        if len(places) >= hints.gpus:
            yield places, list(group.values())


def _may_suffice(board: Board, job: Job, places: Integers, group: Sequence[_Valued]) -> bool:
    """Whether enough of these GPUs are open to the job, and empty once all of the group have left, if it wants many."""
    gpus = job.spec.hints.gpus
    if len(board.open_to(job, places)) < gpus:
        return False
    if gpus == 1:
        return True
    stay = board.statement.fleet.crowd.copy()
    for _, other in group:
        stay[board.positions(board.places(other.spec.job_id))] -= 1
    return int(np.count_nonzero(stay[places] == 0)) >= gpus


def _place_without(board: Board, job: Job, places: Integers, group: Sequence[_Valued]) -> list[_Valued] | None:
    """Place the job on some of these GPUs once enough of the group have left; None, and nothing changed, if it cannot.

    Returns:
        Those who have to leave, without those who would leave for nothing.
    """
    job_id, mark = job.spec.job_id, board.statement.checkpoint()
    group = group[: max(MOST_TRIED, 2 * job.spec.hints.gpus)]
    gone: list[_Valued] = []
    placement: Placement | None = None
    for each in group if _may_suffice(board, job, places, group) else ():
        board.evict(each[1].spec.job_id)
        gone.append(each)
        free = int(np.count_nonzero(board.statement.fleet.crowd[places] == 0))
        # With many GPUs asked for, only those that can be had count: shared ones are left to the placement of one.
        placement = board.place(job, places) if free >= job.spec.hints.gpus or job.spec.hints.gpus == 1 else None
        if placement is not None:
            break
    if placement is None:
        board.take_back(mark, job_id)
        return None
    used = {share.gpu_id for share in placement.shares}
    needed = [each for each in gone if used.intersection(board.places(each[1].spec.job_id))]
    if len(needed) == len(gone):
        return gone
    board.take_back(mark, job_id)
    for _, other in needed:
        board.evict(other.spec.job_id)
    if board.place(job, board.positions(used)) is not None:
        return needed
    board.take_back(mark, job_id)
    return None
