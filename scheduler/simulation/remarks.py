"""What whoever reads a simulation's figures must know of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cotenant.scheduler.simulation.errors import counted
from cotenant.scheduler.simulation.truth import NoInterference, Truth
from cotenant.scheduler.simulation.workload import GIB, Cluster, Trace, TraceJob

CORE = "cotenant"  # the name of the shipped core among the policies
_NAMED = 5  # jobs in one remark


def remarks(trace: Trace, cluster: Cluster, truth: Truth) -> list[str]:
    """Return what the input leaves out, one text each: rows that are no jobs, and what nobody said and is assumed."""
    found = [f"left out of the trace: {what} ({count:,})" for what, count in trace.left_out.items()]
    found += too_large(trace, cluster, truth)
    found += _of_types(trace, cluster, truth)
    if isinstance(truth, NoInterference):
        found.append("jobs that share a GPU do not slow each other down: nothing was said of pairs")
    return found


def too_large(trace: Trace, cluster: Cluster, truth: Truth) -> list[str]:
    """Name jobs that the cluster could never take, and what is too little for them."""
    enough: dict[int, int] = {}  # GPUs by the memory that they have at least
    found: list[str] = []
    for job in trace.jobs:
        if job.memory_bytes not in enough:
            has = sum(node.gpus for node in cluster.nodes if node.memory_bytes >= job.memory_bytes)
            enough[job.memory_bytes] = has
        if enough[job.memory_bytes] < job.gpus:
            found.append(f"{job.job_id} ({_lack(job, cluster, truth, enough[job.memory_bytes])})")
    if not found:
        return []
    some = ", ".join(found[:_NAMED]) + (" …" if len(found) > _NAMED else "")
    need, run = ("needs", "runs") if len(found) == 1 else ("need", "run")
    gpus = counted(cluster.gpus, "GPU")
    return [f"{counted(len(found), 'job')} {need} more than this cluster of {gpus} has, and never {run}: {some}"]


def _lack(job: TraceJob, cluster: Cluster, truth: Truth, enough: int) -> str:
    gpus = counted(job.gpus, "GPU")
    if cluster.gpus < job.gpus:
        return gpus
    types = dict.fromkeys(node.gpu_type for node in cluster.nodes)
    if all(truth.alone(job.workload, each, job.gpus) <= 0.0 for each in types):
        return f"does not run on {' or '.join(types)}"
    return f"{gpus} with {job.memory_bytes / GIB:,.1f} GiB, {enough:,} such here"


def remarks_on(policy: str, trace: Trace) -> list[str]:
    """Return what the trace leaves out that this policy goes by."""
    found: list[str] = []
    for gap in _GAPS:
        lacking = sum(gap.lacks(job) for job in trace.jobs)
        if policy in gap.then and lacking:
            every = lacking == len(trace.jobs)
            who = gap.none if every else f"{lacking:,} of {len(trace.jobs):,} jobs do not {gap.some}"
            found.append(f"{who}: {policy} {gap.then[policy].format(each='each' if every else 'each of these')}")
    return found


@dataclass(frozen=True, slots=True)
class _Gap:
    """What jobs of a trace may not say: whether one does not, in words, and what policies that go by it do then."""

    lacks: Callable[[TraceJob], bool]
    none: str
    some: str
    then: Mapping[str, str]


_FULL = "takes {each} for one that fills its GPUs"
_LAST = "takes {each} for endless: those come last, in order of arrival"
_GAPS = (
    _Gap(
        lambda job: not job.workload,
        "no job names a workload",
        "name a workload",
        {CORE: "takes {each} for a program that it has never seen, and starts it alone on its GPUs"},
    ),
    _Gap(
        lambda job: job.util is None,
        "no job says its utilisation",
        "say their utilisation",
        dict.fromkeys((CORE, "threshold", "lucid"), _FULL),
    ),
    _Gap(
        lambda job: job.estimate_s is None,
        "no job says its estimated run time",
        "say their estimated run time",
        dict.fromkeys(("qssf", "lucid"), _LAST),
    ),
)


def _of_types(trace: Trace, cluster: Cluster, truth: Truth) -> list[str]:
    """Say that GPU types run alike where nobody said otherwise, and what figures compare with where they do not."""
    types = sorted({node.gpu_type for node in cluster.nodes})
    jobs = {(job.workload, job.gpus) for job in trace.jobs}
    speeds = {each: {truth.alone(name, each, gpus) for name, gpus in jobs} for each in types}
    if len(types) > 1 and all(len({truth.alone(name, each, gpus) for each in types}) == 1 for name, gpus in jobs):
        found = [f"all GPU types run alike ({', '.join(types)}): nothing was said of their speeds"]
    else:
        found = []
    if any(each - {1.0} for each in speeds.values()):
        full = [each for each in types if not speeds[each] - {1.0}]
        what = f"GPUs of the speed 1 ({', '.join(full) or 'none is here'})"
        found.append(f"run times of the trace, and so run/duration and GPU time saved, are those on {what}")
    return found
