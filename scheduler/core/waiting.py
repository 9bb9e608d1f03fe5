"""Two guards against waiting for ever: GPUs held for a job that has waited too long, and idle GPUs that fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.placement.shares import memory_need
from cotenant.placement.types import GpuView, Request
from cotenant.scheduler.core.model import Job

RESERVE_AFTER_S = 600.0


def has_waited_long(job: Job, now: float) -> bool:
    """Whether the job has waited so long that GPUs are to be held for it."""
    return now - job.queued_at >= RESERVE_AFTER_S


def held_for(job: Job, request: Request, gpus: Sequence[GpuView], margin: float, now: float) -> Mapping[str, str]:
    """Return the GPUs to hold for a job that has waited long, each with the reason; none when too few could take it.

    Smaller jobs would otherwise slip past a large one for ever. Of the GPUs that could take the job once empty, those
    with the fewest residents are held: they are free soonest.

    Args:
        job: The refused job, first in the queue of those refused.
        request: What it asks.
        gpus: All GPUs as they would be now.
        margin: Fraction added to forecast memory.
        now: Unix seconds.
    """
    groups: dict[str, list[GpuView]] = {}
    for gpu in gpus:
        if gpu.schedulable and memory_need(request, gpu, margin) <= gpu.memory_bytes:
            groups.setdefault(gpu.host_id if request.one_host else "", []).append(gpu)
    sets = [
        sorted(group, key=lambda gpu: len(gpu.residents))[: request.gpus]
        for group in groups.values()
        if len(group) >= request.gpus
    ]
    if not sets:
        return {}
    best = min(sets, key=lambda group: sum(len(gpu.residents) for gpu in group))
    note = f"held for job {job.spec.job_id}, which has waited {now - job.queued_at:.0f} s"
    return {gpu.gpu_id: note for gpu in best}


def idle_gpus(gpus: Sequence[GpuView], held: Mapping[str, str]) -> list[GpuView]:
    """Return the GPUs that carry nothing and would take something."""
    return [gpu for gpu in gpus if gpu.schedulable and not gpu.residents and gpu.gpu_id not in held]


def fits_idle(request: Request, idle: Sequence[GpuView], margin: float) -> bool:
    """Whether the job fits these idle GPUs: a question without any doubt, whatever the policy predicts."""
    count: dict[str, int] = {}
    for gpu in idle:
        if memory_need(request, gpu, margin) <= gpu.memory_bytes:
            host = gpu.host_id if request.one_host else ""
            count[host] = count.get(host, 0) + 1
    return max(count.values(), default=0) >= request.gpus
