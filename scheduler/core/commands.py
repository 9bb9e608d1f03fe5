"""Everything the core can ask of a host agent.

A plan is a tuple of these; each carries its reason and its fencing token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import JobSpec


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start the job's part on this host with these shares (a lease job: prepare the shares).

    ``planned`` is what it was placed with: its hints and cold-start class, or earlier runs.
    ``thaws``: The host has its processes frozen under this epoch and lets them go on, on these GPUs; when it has them
    no longer, or cannot, it reports the end of that epoch (``JobExited.lost``).
    """

    host_id: str
    spec: JobSpec
    epoch: int
    revision: int
    shares: tuple[Share, ...]
    reason: str
    planned: DemandProfile | None = None
    thaws: bool = False
    kind: Literal["start"] = "start"

    @property
    def job_id(self) -> str:
        """The job."""
        return self.spec.job_id


@dataclass(frozen=True, slots=True)
class ResizeShares:
    """Hold the job to these shares from now on. Refused by the agent when (epoch, revision) is not newer."""

    host_id: str
    job_id: str
    epoch: int
    revision: int
    shares: tuple[Share, ...]
    reason: str
    kind: Literal["resize"] = "resize"


@dataclass(frozen=True, slots=True)
class StopJob:
    """End the job: SIGTERM to its process group, SIGKILL to all that is left after ``grace_s``.

    ``asks``: it is a lease whose program gives it back itself (then comes another of these): nobody is signalled.
    ``freezes``: its processes stay, held still by the driver under the same epoch, with their device memory in the
    host's, and its GPUs are free; the answer is ``JobFrozen`` or ``FreezeFailed``. Refused by an agent that knows a
    newer ``revision`` of that epoch: the job was thawed meanwhile.
    """

    host_id: str
    job_id: str
    epoch: int
    grace_s: float
    reason: str
    asks: bool = False
    freezes: bool = False
    revision: int = 0
    kind: Literal["stop"] = "stop"


Command = StartJob | ResizeShares | StopJob
