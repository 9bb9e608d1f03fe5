"""What is simulated: the jobs of a trace and the GPUs they run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

GIB = 1 << 30
MOST_GPUS = 1_000_000  # of a cluster, and of a job


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job as it was submitted, with what only the simulator may know of it.

    Attributes:
        job_id: Unique in its trace.
        submit_s: Seconds after the start of the trace, >= 0.
        gpus: GPUs it needs, all or nothing.
        duration_s: Run time alone on GPUs of the reference type, > 0. Only policies that are told durations see it.
        workload: What runs, the key of the co-location truth; jobs of one workload behave alike.
        memory_bytes: Device memory it uses on each GPU; 0 = the trace does not say.
        util: GPU utilisation alone, fraction in [0, 1]; None = the trace does not say.
        membw_util: Share of the time the device's memory is busy, fraction in [0, 1]; None = not known.
        estimate_s: The run time that somebody expected beforehand; None = nobody did.
        user: Who submitted it.
        weight: Importance against other jobs (> 0).
        max_slowdown: Largest slowdown the job accepts; None = the cluster's default.
        cpus: Processor cores of the host it needs for each GPU (> 0); None = the trace does not say.
    """

    job_id: str
    submit_s: float
    gpus: int
    duration_s: float
    workload: str = ""
    memory_bytes: int = 0
    util: float | None = None
    membw_util: float | None = None
    estimate_s: float | None = None
    user: str = ""
    weight: float = 1.0
    max_slowdown: float | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission.

    Attributes:
        name: For people.
        jobs: The jobs.
        left_out: Rows of the file that are no jobs, by what they are.
        counts: What ``duration_s`` counts: "steps" until a truth has turned them into seconds.
    """

    name: str
    jobs: tuple[TraceJob, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    counts: Literal["seconds", "steps"] = "seconds"


@dataclass(frozen=True, slots=True)
class Node:
    """A host with equal GPUs.

    ``memory_bytes`` is what jobs may use of each, ``cpus`` its processor cores (None = more than enough).
    """

    name: str
    gpus: int
    gpu_type: str = "gpu"
    memory_bytes: int = 24 * GIB
    cpus: float | None = None

    def could_have(self, job: TraceJob) -> bool:
        """Whether all of the job could be on this host, were it empty."""
        enough = self.cpus is None or (job.cpus or 0.0) * job.gpus <= self.cpus
        return enough and job.gpus <= self.gpus and job.memory_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts, in the order in which policies look at them."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(node.gpus for node in self.nodes)


def trace_of(name: str, jobs: Iterable[TraceJob]) -> Trace:
    """Return the jobs as a trace, by time of submission and then in the order given."""
    return Trace(name, tuple(sorted(jobs, key=lambda job: job.submit_s)))


def even_cluster(gpus: int, per_node: int = 8, gpu_type: str = "gpu", memory_bytes: int = 24 * GIB) -> Cluster:
    """Return equal hosts with ``gpus`` GPUs in all; the last host has what is left over.

    Raises:
        ValueError: Fewer than one GPU.
    """
    if gpus < 1 or per_node < 1:
        raise ValueError(f"gpus: {gpus} in hosts of {per_node} is not accepted; give 1 or more of each")
    sizes = [per_node] * (gpus // per_node) + ([gpus % per_node] if gpus % per_node else [])
    return Cluster(tuple(Node(f"node-{i}", size, gpu_type, memory_bytes) for i, size in enumerate(sizes)))


def mixed_cluster(counts: Sequence[tuple[str, int]], per_node: int = 8, memory_bytes: int = 24 * GIB) -> Cluster:
    """Return hosts of several GPU types, each type a ``(name, number of GPUs)``."""
    nodes: list[Node] = []
    for gpu_type, gpus in counts:
        alike = even_cluster(gpus, per_node, gpu_type, memory_bytes).nodes
        nodes.extend(Node(f"{gpu_type}-{node.name}", node.gpus, gpu_type, memory_bytes) for node in alike)
    return Cluster(tuple(nodes))
