"""Which state a job may go to from which, and the one function that moves it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.scheduler.core.model import Job, JobState, StateChange
from cotenant.scheduler.core.records import replace

HISTORY_LENGTH = 50

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset(
        {
            JobState.QUEUED,  # a GPU host is known: the job may be placed
            JobState.SUSPENDED,  # held back before it was ever queued
            JobState.CANCELLED,  # stopped before it was ever queued
        }
    ),
    JobState.QUEUED: frozenset(
        {
            JobState.STARTING,  # placed: the job holds a lease
            JobState.SUSPENDED,  # held back while it waits
            JobState.SUCCEEDED,  # it was done when it was frozen
            JobState.FAILED,  # no device could ever take it
            JobState.CANCELLED,  # stopped while waiting
        }
    ),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,  # every host has started its part
            JobState.STOPPING,  # stopped, suspended, timed out, or one of several hosts let go of it
            JobState.QUEUED,  # its only host failed to start it or was lost: another try; or froze it late
            JobState.SUCCEEDED,  # ended so quickly that the exit overtook the start
            JobState.FAILED,  # could not be started, or ended badly at once
        }
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.STOPPING,  # stopped, suspended, moved, evicted, or one of several hosts let go of it
            JobState.QUEUED,  # host lost or failed, and the restart policy allows another try; or it was frozen late
            JobState.SUCCEEDED,  # exit code 0
            JobState.FAILED,  # any other end without another try
        }
    ),
    JobState.SUSPENDED: frozenset(
        {
            JobState.QUEUED,  # resumed: it waits for a place
            JobState.PENDING,  # resumed before any GPU host is known
            JobState.SUCCEEDED,  # it was done when it was frozen
            JobState.CANCELLED,  # stopped while suspended: it holds nothing
        }
    ),
    JobState.STOPPING: frozenset(
        {
            JobState.CANCELLED,  # stopped on request, all processes gone
            JobState.RUNNING,  # it was to be frozen, and that failed
            JobState.QUEUED,  # moved, made room, evicted or host lost: another try
            JobState.SUSPENDED,  # suspended on request, all processes gone or frozen, its GPUs are free
            JobState.SUCCEEDED,  # it ended well by itself, before it was stopped or on one of several hosts
            JobState.FAILED,  # ended badly, all processes gone
        }
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class InvalidTransition(Exception):
    """A job was to go where it cannot go: a bug in the core. The message tells the job's story."""

    def __init__(self, job: Job, state: JobState, reason: str) -> None:
        self.job = job
        self.state = state
        self.reason = reason
        super().__init__(job.spec.job_id, state, reason)

    def __str__(self) -> str:
        accepted = ", ".join(sorted(TRANSITIONS[self.job.state])) or "nothing, it has ended"
        return (
            f"job {self.job.spec.job_id!r} cannot go from {self.job.state} to {self.state} ({self.reason}); "
            f"possible: {accepted}. Its history:\n{story(self.job)}"
        )


def advance(job: Job, state: JobState, now: float, reason: str) -> Job:
    """Return the job in its next state, with the change in its history.

    Args:
        job: The job.
        state: The next state.
        now: Unix seconds.
        reason: Why, for people.

    Raises:
        InvalidTransition: The transition table has no such edge.
    """
    if state not in TRANSITIONS[job.state]:
        raise InvalidTransition(job, state, reason)
    return replace(
        job,
        state=state,
        reason=reason,
        history=(*job.history[1 - HISTORY_LENGTH :], StateChange(now, state, reason)),
        ended_at=now if state.terminal else None,
    )


def story(job: Job) -> str:
    """Return the job's history, one change per line."""
    return "\n".join(f"  {change.at:.3f} {change.state}: {change.reason}" for change in job.history)


def standing_of(job: Job) -> tuple[object, ...]:
    """Return what decides in which of the state's indices a job is."""
    return job.state, job.lease is None, job.not_before > 0.0, job.freezing, job.frozen is None


def goes_back(job: Job, old: Job) -> bool:
    """Whether what entitles a job's processes is not newer than what did before: by epoch or, in one, by revision."""
    if job.lease is None or job.epoch > old.epoch:
        return False
    before = old.lease.revision if old.lease else old.frozen.revision + 1 if old.frozen else math.inf
    return job.lease.revision < before
