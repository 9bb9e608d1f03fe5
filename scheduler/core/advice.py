"""What would help a job, beside what its refusal says: time, others that may make room, GPUs held for another."""

from __future__ import annotations

import numpy as np

from cotenant.placement.fleet import Integers
from cotenant.scheduler.core.board import REST
from cotenant.scheduler.core.deadlines import Outlook, running_outlook, span, waiting_outlook
from cotenant.scheduler.core.model import Job, JobState, Reservation
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.preemption import Movers, before_shorter_s, may_be_asked, most_valued, movers_of
from cotenant.scheduler.core.priority import CLASS_POINTS, importance, ordered, score
from cotenant.scheduler.core.quotas import QUOTA_KINDS
from cotenant.scheduler.core.state import State


def outlook_of(state: State, job: Job, now: float) -> Outlook | None:
    """Return whether the job makes its deadline; None without one."""
    if job.lease is None:
        return waiting_outlook(job.spec.hints, now, job.done_s)
    return running_outlook(job, state.progress.get(job.spec.job_id), now)


def more_help(state: State, job: Job, now: float, *, crowded: bool) -> list[str]:
    """Return what could be changed beside what the refusal says.

    Args:
        state: The state.
        job: A job that has not ended.
        now: Unix seconds.
        crowded: Others are on its GPUs.
    """
    waits = job.state is JobState.QUEUED
    helps = [*(_sharing(state, job) if waits else ()), *_deadline(state, job, now, crowded)]
    helps += _room(state, job, now) if waits else ()
    held = state.reservation
    may_backfill = held is not None and held.job_id != job.spec.job_id and _lets_some_in(state, held, now)
    if job.lease is None and may_backfill and job.spec.hints.expected_duration_s is None:
        helps.append("give expected_duration: a job known to be gone in time may use held GPUs")
    return helps


def _lets_some_in(state: State, held: Reservation, now: float) -> bool:
    """Whether on one of the held GPUs all residents are gone by the promised time, at the latest: see ``waiting``."""
    by = held.starts_by
    if by is None or now >= by:
        return False
    ends = ([state.end_of(job.spec.job_id) for job in state.residents(gpu_id)] for gpu_id in held.gpu_ids)
    return any(all(end is not None and end[1] <= by for end in of_gpu) for of_gpu in ends)


def _sharing(state: State, job: Job) -> list[str]:
    """Say what else it takes of a job that wants GPUs of its own, which is what its refusal suggests to give up."""
    wants_its_own = any(error.kind == "exclusive_wanted" for error in state.line.why(job.spec.job_id))
    lacks_hints = None in (job.spec.hints.gpu_memory, job.spec.hints.compute)
    if wants_its_own and lacks_hints and state.request_of(job).profile.source == "unknown":
        return ["to share, give gpu_memory and compute as well: the job was never measured"]
    return []


def _deadline(state: State, job: Job, now: float, crowded: bool) -> list[str]:
    outlook = outlook_of(state, job, now)
    if outlook is None or outlook.alone_s is None:
        return []
    if outlook.lost and outlook.left_s > 0.0:
        return [f"a deadline at least {span(outlook.alone_s - outlook.left_s)} later"]
    if not outlook.at_risk:
        return []
    if job.lease is None:
        return ["a higher priority"] if _rises(state, job, now) else []
    if crowded:
        return [f"fewer neighbours: alone it needs {span(outlook.alone_s)}"]
    return ["a later deadline: it has its GPUs to itself already"]


def _rises(state: State, job: Job, now: float) -> bool:
    """Whether in a higher class the job would overtake another in the queue, or more jobs might make room for it."""
    rise = CLASS_POINTS["high"] - CLASS_POINTS[job.spec.hints.priority]
    if rise <= 0.0 or job.state is not JobState.QUEUED or _barred(state, job):
        return False
    standing, rules, savers = state.standing(), state.settings.rebalance, state.savers
    queue = ordered(map(state.jobs.__getitem__, state.queued), now, standing)
    place = queue.index(job)
    if place > 0 and score(job, now, standing) + rise > score(queue[place - 1], now, standing):
        return True
    (rows, movers), worth = _movers(state, now), importance(job, now, standing)
    at = np.maximum(job.queued_at + PATIENCE_S, savers.granted_at(rows) + REST * rules.move_cost_s)
    in_time = np.array([not too_late(job, now, each - now) for each in at.tolist()], dtype=np.bool_)
    now_asked, then_asked = (
        may_be_asked(movers, job, standing, most_valued(value, rules), shorter=True) for value in (worth, worth + rise)
    )
    return rules.enabled and bool((then_asked & ~now_asked & in_time).any())


def too_late(job: Job, now: float, wait_s: float) -> bool:
    """Whether a waiting job that can still make its deadline no longer could once it has waited so much longer."""
    outlook = waiting_outlook(job.spec.hints, now, job.done_s)
    if outlook is None or outlook.lost:
        return False
    return max(0.0, wait_s) + (outlook.alone_s or 0.0) > outlook.left_s


def _barred(state: State, job: Job) -> bool:
    """Whether nobody who makes room would help the job, as far as is known."""
    errors = state.line.why(job.spec.job_id)
    return not errors or any(error.kind in QUOTA_KINDS for error in errors) or all(error.never for error in errors)


def _movers(state: State, now: float) -> tuple[Integers, Movers]:
    """Return the jobs that run and may be asked to make room for a more important one: their rows, what decides it."""
    savers, rules = state.savers, state.settings.rebalance
    rows = savers.running()
    # Whoever ends soon anyway need not be asked; of those that just started nobody knows yet.
    new = now - savers.granted_at(rows) < REST * rules.move_cost_s
    rows = rows[(savers.left_s(rows, now) > 2.0 * rules.move_cost_s) | new]
    if state.settings.checkpoints.directory is None:
        rows = rows[savers.on_one_host(rows)]
    return rows, movers_of(savers, rows, savers.values(rows, now, state.standing()), now)


def _room(state: State, job: Job, now: float) -> list[str]:
    """Say that less important jobs may be asked to make room, and from when on; see ``preemption``."""
    if job.spec.job_id in state.moves.claims:
        return ["nothing need be done: GPUs are kept for it, and it starts once those on them have left"]
    wait_s, jobs = room_in(state, job, now)
    if not jobs:
        return []
    who = "1 job that can save and is" if len(jobs) == 1 else f"{len(jobs)} jobs that can save and are"
    when = f"in {span(wait_s)} at the earliest" if wait_s > 0.0 else "where that gives it a place"
    late = ", which is too late for its deadline" if too_late(job, now, wait_s) else ""
    told = f"wait: {who} less important, or expected to have much more to do, may be asked to make room, {when}{late}"
    if late and wait_s > job.queued_at + PATIENCE_S - now:
        told += f": whoever has just started is left alone for {span(REST * state.settings.rebalance.move_cost_s)}"
    return [told]


def room_in(state: State, job: Job, now: float) -> tuple[float, list[str]]:
    """Return in how many seconds others may be asked to make room for a waiting job, and the ids of these."""
    rules, standing = state.settings.rebalance, state.standing()
    if _barred(state, job) or not rules.enabled:
        return 0.0, []
    rows, movers = _movers(state, now)
    most = most_valued(importance(job, now, standing), rules)
    important = may_be_asked(movers, job, standing, most, shorter=False)
    rows = rows[may_be_asked(movers, job, standing, most, shorter=True)]
    if not len(rows):
        return 0.0, []
    patience_s = PATIENCE_S if important.any() else before_shorter_s(rules)
    rested = float(np.min(state.savers.granted_at(rows))) + REST * rules.move_cost_s
    return max(job.queued_at + patience_s, rested) - now, state.savers.ids(rows)
