"""What must be remembered of moving and suspending jobs, from one look at the cluster to the next."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from cotenant.scheduler.core.model import Job, JobState

LOOK_EVERY_S = 5.0
PATIENCE_S = 30.0  # what has lasted for so long is worth a move


@dataclass(frozen=True, slots=True)
class Claim:
    """GPUs that take nobody else for a while: kept for a job that moves there, or that others make room for.

    Attributes:
        gpu_ids: The GPUs.
        until: Unix seconds; later anybody may have them.
    """

    gpu_ids: tuple[str, ...]
    until: float


@dataclass(slots=True)
class Moves:
    """The part of a state that rebalancing works with.

    Attributes:
        claims: GPUs kept for a job, by its id.
        looked_at: When rebalancing last looked at the cluster, Unix seconds.
        due_at: When it is to look again; infinity when nothing has changed.
        hurt_since: Since when a running job has been measured to be slowed down more than it accepts.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    looked_at: float = 0.0
    due_at: float = math.inf
    hurt_since: dict[str, float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        """Have rebalancing look at the cluster at that time at the latest."""
        self.due_at = min(self.due_at, at)

    @property
    def next_look_at(self) -> float:
        """When rebalancing looks again, Unix seconds: not all the time."""
        return max(self.due_at, self.looked_at + LOOK_EVERY_S)

    def claim(self, job_id: str, gpu_ids: Iterable[str], until: float) -> None:
        """Keep these GPUs for the job until then."""
        self.claims[job_id] = Claim(tuple(gpu_ids), until)

    def follow(self, job: Job) -> None:
        """Forget what no longer holds for a job that has changed."""
        if job.lease is None:
            self.hurt_since.pop(job.spec.job_id, None)
        if job.state not in (JobState.QUEUED, JobState.STOPPING):
            self.claims.pop(job.spec.job_id, None)

    def expire(self, now: float) -> list[str]:
        """Forget claims that are over, and return the ids of their GPUs."""
        over = [job_id for job_id, claim in self.claims.items() if claim.until <= now]
        return [gpu_id for job_id in over for gpu_id in self.claims.pop(job_id).gpu_ids]

    def claimed(self) -> dict[str, str]:
        """Return for whom GPUs are kept: job id by GPU id."""
        return {gpu_id: job_id for job_id, claim in self.claims.items() for gpu_id in claim.gpu_ids}
