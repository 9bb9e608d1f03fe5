"""Making room for a job that outgrows its memory share, or soon will: no innocent neighbour runs out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from cotenant.placement.shares import free_memory
from cotenant.scheduler.core.board import has_rested, loses_nothing
from cotenant.scheduler.core.interruptions import tell
from cotenant.scheduler.core.model import Ending, Interruption, Job, JobState
from cotenant.scheduler.core.priority import held_value
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import Turn

OVERRUN_MARGIN = 1.2  # memory given after an overrun, relative to what was used
_TAKEN = ("priority", "shorter", "trade", "yield")  # interruptions of jobs whose places others are to have


def foresee(turn: Turn, gpu_ids: Iterable[str]) -> None:
    """Make room for the jobs that will outgrow their shares of these GPUs more likely than not.

    A share grows towards the 99th percentile of its forecast for as long as there is room, which costs nobody anything.
    To have a neighbour leave costs it something: for that the median has to be above the share, and the neighbour must
    have had its rest. If nobody can leave, the job runs on, since a forecast may be wrong. A forecast is a reason to
    grow only where it rests on an estimate, be it on another of its GPUs, or where nothing is read here now.
    """
    state = turn.state
    if state.settings.placement.policy == "static":
        return
    for gpu_id in gpu_ids:
        ids = [job.spec.job_id for job in state.residents(gpu_id)] if gpu_id in state.gpus else []
        for job in (state.jobs[job_id] for job_id in ids):  # as it is now: one before it may have had it leave
            share = next(share for share in job.lease.shares if share.gpu_id == gpu_id) if job.lease else None
            used = state.usage.get(job.spec.job_id, {})
            usage = used.get(gpu_id)
            if share is None or usage is None or not usage.signal.measured or job.state is not JobState.RUNNING:
                continue
            if any(each.signature.memory_estimated for each in used.values()):
                continue  # others may have a part of it
            if usage.signature.memory_peak_bytes is None:
                continue  # what is forecast is old, what earlier runs needed, or another GPU's
            expected = usage.signal.memory_p50_bytes or 0.0
            bounds = (state.gpus[gpu_id].memory_bytes, job.limits.memory_bytes, job.ceiling.memory_bytes)
            most = min(bound for bound in bounds if bound is not None)
            if not share.memory_bytes < expected <= most:
                continue
            if make_memory(turn, job, gpu_id, math.ceil(expected) - share.memory_bytes, foreseen=expected):
                wanted = min(with_margin(state, job, math.ceil(expected), expected * OVERRUN_MARGIN), most)
                corrected = max(wanted, job.memory_hint_corrected or 0)
                state.put(replace(job, memory_hint_corrected=corrected, awaits_memory=True))


def with_margin(state: State, job: Job, least_bytes: int, wanted_bytes: float) -> int:
    """Return the bytes to reserve per GPU from now on: a GPU that holds what a job needs is not too small by a margin.

    Args:
        state: The state.
        job: A job that holds a lease.
        least_bytes: What it needs at least.
        wanted_bytes: That with a margin.
    """
    shares = job.lease.shares if job.lease else ()
    own = [state.gpus[share.gpu_id].memory_bytes for share in shares if share.gpu_id in state.gpus]
    largest = max((gpu.memory_bytes for gpu in state.gpus.values()), default=0)
    most = next((bytes_ for bytes_ in (min(own, default=0), largest) if least_bytes <= bytes_), math.inf)
    return math.ceil(min(wanted_bytes, most))


def make_memory(turn: Turn, job: Job, gpu_id: str, short_bytes: int, *, foreseen: float | None = None) -> bool:
    """Have the least important neighbours leave that lose nothing by it; False when that is not enough, or not fair.

    A neighbour that is more important than the job stays when the job would lose nothing itself, and in any case when
    it is more important by the factor of the settings. What they leave goes to the job at once (``Turn``). For what it
    needs already, what others leave that nobody else is to have counts too; a job it is returned True for is to be put
    down as one that awaits memory, which ``hand_on`` then gives it.

    Args:
        turn: The turn.
        job: The job that has outgrown its share.
        gpu_id: The GPU.
        short_bytes: How much is missing there.
        foreseen: The bytes it is forecast to need; None = it needs them already.
    """
    state = turn.state
    standing, rules = state.standing(), state.settings.rebalance

    def value(other: Job) -> float:
        return held_value(other, state.progress.get(other.spec.job_id), turn.now, standing)

    neighbours = [other for other in state.residents(gpu_id) if other.spec.job_id != job.spec.job_id]
    coming = sum(_size(other, gpu_id) for other in neighbours if _leaves_for(other, job))
    if foreseen is None:
        left = sum(_size(other, gpu_id) for other in neighbours if _leaves_memory(other))
        coming = max(coming, left - sum(_awaited(other, gpu_id) for other in neighbours))
    if coming >= short_bytes:
        return True  # they are on their way
    elsewhere = foreseen is not None and any(other.state is JobState.STOPPING for other in neighbours)
    if not rules.enabled or elsewhere:
        return False  # what one that leaves for another reason has is not known to be too little
    loses = not job.saves or job.freezes  # one that has outgrown its share is not frozen, but starts over
    most = value(job) * (rules.priority_factor if loses else 1.0)
    able = sorted(
        (value(other), -other.seq, other)
        for other in neighbours
        if other.saves
        and other.state is JobState.RUNNING
        and loses_nothing(other, state.settings)
        and (foreseen is None or has_rested(other, turn.now, rules))
    )
    leaving: list[Job] = []
    for worth, _, other in able:
        if worth > most or coming >= short_bytes:
            break
        leaving.append(other)
        coming += _size(other, gpu_id)
    if coming < short_bytes:
        return False
    for other in leaving:
        why = Interruption("memory", turn.now, job.spec.job_id, cost_s=rules.move_cost_s, against=foreseen)
        turn.stop(other, Ending(JobState.QUEUED, tell(why), interruption=why))
    return True


def hand_on(turn: Turn, gpu_ids: Iterable[str]) -> None:
    """Give what is free on these GPUs to the jobs there that await memory, before one that waits for a place gets it.

    Who left for one of them has left its memory to that one already (``Turn``): this is the rest, and what others left.
    """
    state = turn.state
    for gpu_id in gpu_ids:
        residents = state.residents(gpu_id) if gpu_id in state.gpus else []
        leaving = any(map(_leaves_memory, residents))
        for job in (job for job in residents if job.awaits_memory):
            short = _awaited(job, gpu_id)
            more = min(short, max(0, free_memory(state.view(gpu_id))))
            shares = [share for share in job.lease.shares if share.gpu_id == gpu_id] if job.lease else []
            larger = {share.gpu_id: replace(share, memory_bytes=share.memory_bytes + more) for share in shares}
            turn.resize(job, larger, "has what others have left, for what it uses")
            if more == short or not leaving:
                state.put(replace(state.jobs[job.spec.job_id], awaits_memory=False))


def _size(job: Job, gpu_id: str) -> int:
    shares = job.lease.shares if job.lease else ()
    return sum(share.memory_bytes for share in shares if share.gpu_id == gpu_id)


def _awaited(job: Job, gpu_id: str) -> int:
    """Return how much a job is still to have of what becomes free on a GPU."""
    if not job.awaits_memory or job.state is JobState.STOPPING:
        return 0
    bounds = (job.memory_hint_corrected or 0, job.limits.memory_bytes, job.ceiling.memory_bytes)
    return max(0, min(bound for bound in bounds if bound is not None) - _size(job, gpu_id))


def _leaves_memory(other: Job) -> bool:
    """Whether a job leaves, and no job that waits is to have its place."""
    why = other.ending.interruption if other.ending else None
    return other.state is JobState.STOPPING and (why is None or why.kind not in _TAKEN)


def _leaves_for(other: Job, job: Job) -> bool:
    why = other.ending.interruption if other.ending else None
    return why is not None and why.kind == "memory" and why.for_job == job.spec.job_id
