"""What holds while cotenant goes down: nothing new starts, and what only waits is kept for the next start."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.scheduler.core.events import Event, HostJoined, HostUnreachable
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.core.state import State
from cotenant.scheduler.errors import GoingDown

WAITING = frozenset({JobState.PENDING, JobState.QUEUED, JobState.SUSPENDED})


def to_end(state: State) -> list[str]:
    """Return the jobs that cannot be kept: they have GPUs, frozen processes on a host, or a client that waits."""
    active = (job for job in state.jobs.values() if not job.state.terminal)
    return [
        job.spec.job_id for job in active if job.state not in WAITING or job.frozen is not None or job.spec.attached
    ]


def kept_off(events: Sequence[Event]) -> list[Event]:
    """Have a host that joins count as one that does not answer, so that nothing is placed there."""
    reason = str(GoingDown())
    return [HostUnreachable(event.host.host_id, reason) if isinstance(event, HostJoined) else event for event in events]
