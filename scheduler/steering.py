"""What users ask for a job that is there: suspend it, resume it, move it. Refused in words where it makes no sense."""

from __future__ import annotations

from typing import Literal

from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import MoveRequested, ResumeRequested, SuspendRequested
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.rebalancing import why_not_moved
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import Turn
from cotenant.scheduler.errors import JobNotFound, NotAccepted

Steering = Literal["suspend", "resume", "move"]
PROMISE = 'a command, or a lease whose Ray program promises to save (checkpoint="own"), which this one does not'
_MOST_NAMED = 8


def order(
    state: State, job_id: str, what: Steering, to: str | None, reason: str
) -> SuspendRequested | ResumeRequested | MoveRequested:
    """Return the event that asks for it.

    Args:
        state: The state.
        job_id: The job.
        what: What is asked.
        to: Where to move: a GPU, a host by id or by name; None = anywhere else.
        reason: Who wants it and why.

    Raises:
        JobNotFound: There is no such job.
        NotAccepted: The job is not where this can be done to it, or ``to`` names nothing.
    """
    job = state.jobs.get(job_id)
    if job is None:
        raise JobNotFound(job_id)
    if job.stays:
        raise NotAccepted("job", job_id, PROMISE)
    if what == "resume":
        suspending = job.ending is not None and job.ending.state is JobState.SUSPENDED
        if job.state is not JobState.SUSPENDED and not suspending:
            raise _not(job, "a job that is suspended")
        return ResumeRequested(job_id, reason)
    if job.state.terminal or (job.ending is not None and job.ending.state.terminal):
        raise _not(job, "a job that has not ended and is not about to")
    if what == "suspend":
        return SuspendRequested(job_id, reason)
    if job.state is not JobState.RUNNING:
        raise _not(job, "a job that is running")
    return MoveRequested(job_id, reason, () if to is None else _targets(state, job, to))


def check_moved(core: Core, ordered: SuspendRequested | ResumeRequested | MoveRequested, to: str | None) -> None:
    """Make sure that the job is moving, if that was ordered.

    Raises:
        NotAccepted: The job stays where it is, since there is no room; says why, GPU by GPU where those are few.
    """
    state = core.state
    if isinstance(ordered, MoveRequested) and state.jobs[ordered.job_id].state is JobState.RUNNING:
        why = why_not_moved(Turn(state, state.now), core.policy, core.predictor, ordered)
        if to is None:
            raise NotAccepted("job", ordered.job_id, f"a job that other GPUs have room for: {why}")
        raise NotAccepted("to", to, f"GPUs with room for the job: {why}")


def _targets(state: State, job: Job, to: str) -> tuple[str, ...]:
    named = [gpu for gpu in state.gpus.values() if to in (gpu.gpu_id, gpu.host_id, state.hosts[gpu.host_id].name)]
    if not named:
        known = [*state.gpus, *(host.name for host in state.hosts.values())][:_MOST_NAMED]
        raise NotAccepted("to", to, f"the id of a GPU or the name of a host, as {', '.join(known)}")
    if len(named) < job.spec.hints.gpus:
        raise NotAccepted("to", to, f"a place with {job.spec.hints.gpus} GPUs, as many as the job has")
    own = {share.gpu_id for share in job.lease.shares} if job.lease else set()
    if {gpu.gpu_id for gpu in named} <= own:
        raise NotAccepted("to", to, "other GPUs than those the job has")
    return tuple(gpu.gpu_id for gpu in named)


def _not(job: Job, accepted: str) -> NotAccepted:
    return NotAccepted("job", job.spec.job_id, f"{accepted}; this one is {job.state}")
