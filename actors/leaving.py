"""What holds while cotenant goes down: nothing new starts, and what only waits is kept for the next start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cotenant.actors import runner
from cotenant.scheduler.core.events import Event, HostJoined, HostUnreachable
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.core.state import State
from cotenant.scheduler.errors import GoingDown

MARK = "going-down.json"
WAITING = frozenset({JobState.PENDING, JobState.QUEUED, JobState.SUSPENDED})


class Leaving:
    """Whether a scheduler goes down; also once Ray has started it anew.

    Args:
        state_dir: Where it is written down.
        identity: What tells this scheduler from those before and after it (``Fleet.identity``): the mark of one that
            was killed on the way holds for no other.
    """

    def __init__(self, state_dir: Path, identity: str) -> None:
        self._mark, self._identity = str(state_dir / MARK), identity
        self.on = False
        with suppress(OSError, ValueError):
            self.on = (runner.read_json(self._mark) or {}).get("scheduler") == identity

    def begin(self) -> None:
        """Go down, from now on."""
        self.on = True
        with suppress(OSError):  # then it is only not remembered
            runner.write_json(self._mark, {"scheduler": self._identity})


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
