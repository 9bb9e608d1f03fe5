"""Everything that can happen to the core.

Each event is its own small record; the union ``Event`` is what is journaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from cotenant.configs.settings import PlacementSettings, RebalanceSettings, ResizeSettings, SchedulingSettings
from cotenant.forecasting.interference.observations import Observation, Program
from cotenant.forecasting.types import JobMeasurement
from cotenant.scheduler.core.model import UNBOUND, AllocationAction, Bounds, Host, JobSpec, Resource


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A client submitted a job. The same job id twice is one job."""

    spec: JobSpec
    kind: Literal["job_submitted"] = "job_submitted"


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the job to end (``reason`` says who and why)."""

    job_id: str
    reason: str
    kind: Literal["stop_requested"] = "stop_requested"


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """Somebody wants the job off its GPUs until it is resumed (``reason`` says who and why)."""

    job_id: str
    reason: str
    kind: Literal["suspend_requested"] = "suspend_requested"


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Somebody wants a suspended job to go on."""

    job_id: str
    reason: str
    kind: Literal["resume_requested"] = "resume_requested"


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """Somebody wants the job on other GPUs; ``gpu_ids``: some of these, empty = wherever it fits elsewhere."""

    job_id: str
    reason: str
    gpu_ids: tuple[str, ...] = ()
    kind: Literal["move_requested"] = "move_requested"


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """The program of a lease that saves has saved, and gives back the GPUs it was asked for."""

    job_id: str
    epoch: int
    kind: Literal["lease_returned"] = "lease_returned"


@dataclass(frozen=True, slots=True)
class ClientLost:
    """The client of an attached job or of a lease has not renewed in time."""

    job_id: str
    kind: Literal["client_lost"] = "client_lost"


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A host agent announced itself and its GPUs (again, after a restart: then the GPUs may have changed)."""

    host: Host
    kind: Literal["host_joined"] = "host_joined"


@dataclass(frozen=True, slots=True)
class HostUnreachable:
    """The host does not answer: place nothing there, but its jobs may still run."""

    host_id: str
    reason: str
    kind: Literal["host_unreachable"] = "host_unreachable"


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host is gone and its leases have expired: its jobs certainly no longer run."""

    host_id: str
    reason: str
    kind: Literal["host_lost"] = "host_lost"


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A host agent started its part of the job (a lease job: prepared the shares)."""

    job_id: str
    epoch: int
    host_id: str
    pid: int | None = None
    ceiling: Bounds = UNBOUND
    kind: Literal["job_started"] = "job_started"


@dataclass(frozen=True, slots=True)
class ResourcesAsked:
    """A job asks something of its own lease (``allocations``). The same ``request_id`` twice is one request."""

    job_id: str
    epoch: int
    request_id: str
    action: AllocationAction
    resource: Resource
    amount: float | None
    kind: Literal["resources_asked"] = "resources_asked"


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A host agent could not start the job; ``retry`` says whether another try makes sense.

    ``retry_after_s``: What serves the host's GPUs let it down, and may be there after so many seconds.
    """

    job_id: str
    epoch: int
    host_id: str
    reason: str
    exit_code: int = 1
    retry: bool = False
    retry_after_s: float | None = None
    kind: Literal["start_failed"] = "start_failed"


@dataclass(frozen=True, slots=True)
class JobExited:
    """All processes of the job on the host are gone. ``exit_code`` is negative for a signal, as in ``subprocess``.

    ``lost``: the host let the job down (its lease expired, its record is damaged); it counts as lost with its node.
    ``stopped``: it had been asked to end. Exit code 0 without that says that it is done.
    ``out_of_memory``: one of its processes has ended since an allocation failed.
    """

    job_id: str
    epoch: int
    host_id: str
    exit_code: int
    reason: str = ""
    lost: bool = False
    stopped: bool = False
    out_of_memory: bool = False
    kind: Literal["job_exited"] = "job_exited"


@dataclass(frozen=True, slots=True)
class JobFrozen:
    """The job's processes are frozen, and its GPUs are free (``StopJob.freezes``).

    ``revision``: newest of its lease that the host knew. ``memory_bytes``: host memory that its device memory takes.
    """

    host_id: str
    job_id: str
    epoch: int
    revision: int
    memory_bytes: int
    kind: Literal["job_frozen"] = "job_frozen"


@dataclass(frozen=True, slots=True)
class FreezeFailed:
    """The job's processes could not be frozen, and go on as they were.

    ``again``: it was too early, or cut short by what has nothing to do with them, and may be tried again.
    """

    host_id: str
    job_id: str
    epoch: int
    revision: int
    reason: str
    again: bool = False
    kind: Literal["freeze_failed"] = "freeze_failed"


@dataclass(frozen=True, slots=True)
class JobMissing:
    """A reachable host agent does not know a job that should run there: it died without a word."""

    job_id: str
    epoch: int
    host_id: str
    kind: Literal["job_missing"] = "job_missing"


@dataclass(frozen=True, slots=True)
class MemoryOverrun:
    """A job used more memory than its share for longer than the agent tolerates.

    ``estimated``: it may have, since that much is in use on its GPU; others may have a part of it.
    """

    job_id: str
    epoch: int
    host_id: str
    used_bytes: int
    estimated: bool = False
    kind: Literal["memory_overrun"] = "memory_overrun"


@dataclass(frozen=True, slots=True)
class JobHeldBack:
    """A job has begun to be held back by its share, for this fraction of the last moments: its window ends later."""

    job_id: str
    epoch: int
    host_id: str
    throttled_fraction: float
    kind: Literal["job_held_back"] = "job_held_back"


@dataclass(frozen=True, slots=True)
class MeasurementsReported:
    """One host's measurements and forecasts for the last window, batched."""

    host_id: str
    measurements: tuple[JobMeasurement, ...]
    kind: Literal["measurements_reported"] = "measurements_reported"


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """An administrator changed how jobs are packed, resized, ordered or moved; None = that stays as it is."""

    placement: PlacementSettings
    resize: ResizeSettings
    scheduling: SchedulingSettings | None = None
    rebalance: RebalanceSettings | None = None
    kind: Literal["settings_changed"] = "settings_changed"


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """Other models are to predict from now on.

    Attributes:
        versions: Version by kind of model; a kind that is not named has none, and the simple predictor serves.
    """

    versions: dict[str, str]
    kind: Literal["models_changed"] = "models_changed"


@dataclass(frozen=True, slots=True)
class EvidenceGathered:
    """How fast jobs were that shared a GPU, measured against what they do alone.

    Attributes:
        observations: What was measured.
        complete: Each is all that is known of its job and set, so hearing it again changes nothing; else it adds to
            what was told before.
        withdrawn: Programs that were found to go through phases: what was told of their speed before this event counts
            no more.
    """

    observations: tuple[Observation, ...]
    complete: bool = False
    withdrawn: tuple[Program, ...] = ()
    kind: Literal["evidence_gathered"] = "evidence_gathered"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent by the shell so that time-outs and patience are noticed."""

    kind: Literal["tick"] = "tick"


Event = Annotated[
    JobSubmitted
    | StopRequested
    | SuspendRequested
    | ResumeRequested
    | MoveRequested
    | LeaseReturned
    | ClientLost
    | HostJoined
    | HostUnreachable
    | HostLost
    | JobStarted
    | ResourcesAsked
    | StartFailed
    | JobExited
    | JobFrozen
    | FreezeFailed
    | JobMissing
    | MemoryOverrun
    | JobHeldBack
    | MeasurementsReported
    | SettingsChanged
    | ModelsChanged
    | EvidenceGathered
    | Tick,
    Field(discriminator="kind"),
]
