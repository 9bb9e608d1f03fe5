"""What whoever reads a simulation's figures must know of its input."""

from __future__ import annotations

from cotenant.scheduler.simulation.truth import NoInterference, Truth
from cotenant.scheduler.simulation.workload import Cluster, Trace


def remarks(trace: Trace, cluster: Cluster, truth: Truth) -> list[str]:
    """Return what the input leaves out, one text each: rows that are no jobs, and what nobody said and is assumed."""
    found = [f"left out of the trace: {what} ({count:,})" for what, count in trace.left_out.items()]
    types = sorted({node.gpu_type for node in cluster.nodes})
    jobs = {(job.workload, job.gpus) for job in trace.jobs}
    if len(types) > 1 and all(len({truth.alone(name, each, gpus) for each in types}) == 1 for name, gpus in jobs):
        found.append(f"all GPU types run alike ({', '.join(types)}): nothing was said of their speeds")
    if isinstance(truth, NoInterference):
        found.append("jobs that share a GPU do not slow each other down: nothing was said of pairs")
    return found
