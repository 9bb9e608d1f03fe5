"""What somebody asks of a job that is there: to end, to leave its GPUs, to come back; and leases given back."""

from __future__ import annotations

from dataclasses import replace

from cotenant.scheduler.core.events import (
    ClientLost,
    LeaseReturned,
    MoveRequested,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
)
from cotenant.scheduler.core.model import Ending, Interruption, JobState
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn


def stop_requested(turn: Turn, event: StopRequested) -> None:
    """Cancel a waiting job at once; have a running one stopped first."""
    job = turn.state.jobs.get(event.job_id)
    if job is None or job.state.terminal:
        turn.state.ignore("stop of a job that is not there")
        return
    ending = Ending(JobState.CANCELLED, event.reason)
    if job.state is JobState.STOPPING:
        if job.ending is None or not job.ending.state.terminal:
            turn.stop_anyway(job, ending)
    elif job.lease is None:
        turn.end_frozen(job, event.reason)
        turn.state.put(advance(replace(job, frozen=None), JobState.CANCELLED, turn.now, event.reason))
        turn.dirty = True
    else:
        turn.stop(job, ending)


def suspend_requested(turn: Turn, event: SuspendRequested) -> None:
    """Hold a waiting job back at once; have a running one stopped first. It keeps the time it has waited."""
    job = turn.state.jobs.get(event.job_id)
    if job is None or job.state.terminal or job.state is JobState.SUSPENDED or job.stays:
        turn.state.ignore("suspension of a job that cannot be suspended")
        return
    ending = Ending(JobState.SUSPENDED, event.reason, interruption=Interruption("asked", turn.now))
    if job.state is JobState.STOPPING:
        if job.ending is None or not job.ending.state.terminal:
            turn.state.put(replace(job, ending=ending))
    elif job.lease is None:
        turn.state.put(replace(advance(job, JobState.SUSPENDED, turn.now, event.reason), not_before=0.0))
        turn.dirty = True
    else:
        turn.stop(job, ending)


def resume_requested(turn: Turn, event: ResumeRequested) -> None:
    """Let a suspended job wait for a place again; one that is only about to be suspended goes straight back."""
    job, state = turn.state.jobs.get(event.job_id), turn.state
    if job is not None and job.ending is not None and job.ending.state is JobState.SUSPENDED:
        state.put(replace(job, ending=replace(job.ending, state=JobState.QUEUED, reason=event.reason)))
    elif job is not None and job.state is JobState.SUSPENDED:
        away_s = turn.now - job.history[-1].at
        job = advance(job, JobState.QUEUED if state.hosts else JobState.PENDING, turn.now, event.reason)
        state.put(replace(job, queued_at=job.queued_at + away_s))
        turn.came.append(event.job_id)
        turn.dirty = True
    else:
        state.ignore("resumption of a job that is not suspended")


def move_requested(turn: Turn, event: MoveRequested) -> None:
    """Have a running job moved, once it is known where to (see ``rebalancing``)."""
    job = turn.state.jobs.get(event.job_id)
    if job is None or job.state is not JobState.RUNNING or job.stays:
        turn.state.ignore("move of a job that does not run")
    else:
        turn.moves_wanted.append(event)


def client_lost(turn: Turn, event: ClientLost) -> None:
    """A job whose client is gone is stopped as if somebody had asked for it; nobody gives its lease back."""
    stop_requested(turn, StopRequested(event.job_id, "its client is gone: no renewal in time"))
    job = turn.state.jobs.get(event.job_id)
    if job is not None and job.state is JobState.STOPPING and job.owed:
        turn.take_back(job)


def lease_returned(turn: Turn, event: LeaseReturned) -> None:
    """What is left of the processes under the lease ends; then it goes where it was to go."""
    job = turn.state.jobs.get(event.job_id)
    if job is not None and job.state is JobState.STOPPING and job.epoch == event.epoch and job.owed:
        turn.take_back(job)
    else:
        turn.state.ignore("return of a lease that nobody waits for")
