"""How far a job is that has just started on its GPUs, and how fast it is going there."""

from __future__ import annotations

from cotenant.placement.objective import slowness
from cotenant.scheduler.core.model import Job, Progress
from cotenant.scheduler.core.state import State


def begun(state: State, job: Job) -> Progress:
    """Return the progress of a job all of whose processes run since now."""
    types = {state.gpus[share.gpu_id].gpu_type for share in (job.lease.shares if job.lease else ())}
    request, packing = state.request_of(job), state.settings.placement
    slower = max((slowness(each, request, packing) for each in types), default=1.0)
    return Progress(job.done_s, state.now, job.predicted or 1.0, 1.0 / slower)
