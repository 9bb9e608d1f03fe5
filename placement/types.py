"""The words of placement: shares, what a GPU already carries, what is asked, and why something does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cotenant.forecasting.types import DemandProfile, ThroughputPrediction

MIG_PREFIX = "MIG-"  # of the UUIDs of MIG instances


@dataclass(frozen=True, slots=True)
class Share:
    """A grant on one GPU: ``memory_bytes`` and ``compute``, a fraction in (0, 1] of the GPU's compute time."""

    gpu_id: str
    memory_bytes: int
    compute: float


@dataclass(frozen=True, slots=True)
class Resident:
    """A job that already holds a share of a GPU, as placement sees it; the fields are those of ``Request``."""

    job_id: str
    share: Share
    profile: DemandProfile
    max_slowdown: float
    exclusive: bool = False
    min_compute: float = 0.0
    weight: float = 1.0
    labels: frozenset[str] = frozenset()
    anti_affinity: frozenset[str] = frozenset()
    least_memory: int = 0
    most_memory: int | None = None
    most_compute: float | None = None
    shares_instance: bool = False
    cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU with its residents.

    ``memory_bytes`` is the usable memory; a GPU with ``schedulable=False`` gets nothing new, ``note`` says why.
    ``island``: GPUs of one host with the same name here are linked faster than the others (NVLink); "" = not known.
    ``host_cpus``: Processor cores of its host, the same for all of its GPUs; None = not known, so nothing is limited.
    """

    gpu_id: str
    host_id: str
    gpu_type: str
    memory_bytes: int
    residents: tuple[Resident, ...] = ()
    schedulable: bool = True
    note: str = ""
    island: str = ""
    host_cpus: float | None = None

    @property
    def instance(self) -> bool:
        """Whether it is a MIG instance: of those CUDA shows a process one at most."""
        return self.gpu_id.startswith(MIG_PREFIX)

    def carrying(self, residents: tuple[Resident, ...]) -> GpuView:
        """Return the same GPU with these residents (several times as fast as ``replace``, and asked for often)."""
        return GpuView(
            self.gpu_id, self.host_id, self.gpu_type, self.memory_bytes, residents, self.schedulable, self.note,
            self.island, self.host_cpus,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks of placement.

    Attributes:
        job_id: The job.
        gpus: Number of GPUs, all or nothing.
        memory_bytes: Memory to reserve per GPU; None = forecast or, when nothing is known, the whole GPU.
        compute: Compute to guarantee per GPU in (0, 1]; None = forecast.
        profile: The demand profile (``source`` "unknown" when nothing is known: such a job is placed alone).
        max_slowdown: Hard limit on the job's own predicted slowdown (>= 1).
        exclusive: Never share.
        shares_instance: Share a MIG instance, whose hardware keeps nobody apart, with jobs that do so too.
        one_host: All GPUs on one host.
        weight: Priority weight (> 0).
        labels: What it belongs to, as "tenant:ml".
        anti_affinity: Labels of jobs that it shares no GPU with; holds both ways.
        profiles: The demand profile by GPU type, where it was measured on several.
        speeds: How fast the job is alone by GPU type, relative to its fastest; empty = as the settings say.
        least_memory: Memory it has asked for while it runs: kept per GPU, used or not.
        most_memory: What its reservation per GPU never grows beyond; None = no limit.
        most_compute: What its share per GPU never grows beyond; None = no limit.
        cpus: Processor cores it takes of a host for each of its GPUs there; 0 = they are not counted.
    """

    job_id: str
    gpus: int
    memory_bytes: int | None
    compute: float | None
    profile: DemandProfile
    max_slowdown: float
    exclusive: bool = False
    one_host: bool = True
    weight: float = 1.0
    labels: frozenset[str] = frozenset()
    anti_affinity: frozenset[str] = frozenset()
    profiles: Mapping[str, DemandProfile] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    least_memory: int = 0
    most_memory: int | None = None
    most_compute: float | None = None
    shares_instance: bool = False
    cpus: float = 0.0

    def on(self, gpu_type: str) -> DemandProfile:
        """Return the demand profile on a GPU of this type."""
        return self.profiles.get(gpu_type, self.profile)


FitErrorKind = Literal[
    "memory_short",
    "memory_never",
    "cpus_short",
    "cpus_never",
    "compute_short",
    "slowdown_self",
    "slowdown_neighbour",
    "no_saving",
    "exclusive_resident",
    "exclusive_wanted",
    "anti_affinity",
    "instance",
    "instance_wanted",
    "unprofiled_resident",
    "unprofiled_self",
    "share_limit",
    "not_schedulable",
    "held",
    "not_tried",
    "too_few_gpus",
    "too_few_on_host",
    "gpus_never",
    "gpus_to_come",
    "kind_to_come",
    "quota_gpus",
    "quota_whole",
    "quota_jobs",
    "quota_closed",
]


@dataclass(frozen=True, slots=True)
class FitError:
    """Why GPUs (or, with ``gpu_id`` None, the cluster) cannot take a job. ``never`` = waiting will not help.

    Attributes:
        kind: What is in the way.
        gpu_id: The GPU, of several with the same reason the one nearest to fitting; None = the cluster. Where
            processors are in the way, a GPU of that host.
        needed: What the job needs there.
        available: What there is.
        never: Waiting will not help.
        detail: What the numbers do not say, for people.
        count: Number of GPUs it stands for; where processors are in the way, of hosts.
        varies: Their numbers differ.
    """

    kind: FitErrorKind
    gpu_id: str | None
    needed: float | None = None
    available: float | None = None
    never: bool = False
    detail: str = ""
    count: int = 1
    varies: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's shares with the prediction they rest on.

    ``predicted`` maps every affected job (the new one and its neighbours) to its normalised throughput after the
    placement; ``saving`` is the predicted packing saving 1 - 1/sum(n) of the worst shared GPU (0 when alone).
    ``squeezed`` lists the new shares of neighbours that have to give way, as (job id, share): they are to be resized
    together with the placement so that the compute shares of every GPU keep adding up to at most 1.
    """

    job_id: str
    shares: tuple[Share, ...]
    predicted: Mapping[str, ThroughputPrediction]
    saving: float
    score: float
    reason: str
    squeezed: tuple[tuple[str, Share], ...] = ()


@dataclass(frozen=True, slots=True)
class NoFit:
    """Nothing fits now; ``never`` is True when it would not fit an empty cluster of these hosts either."""

    job_id: str
    errors: tuple[FitError, ...]
    never: bool
