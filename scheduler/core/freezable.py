"""Where the driver can freeze a job, and where a frozen one can go on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cotenant.placement.fleet import Fleet, Integers
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Gpu, Job
from cotenant.scheduler.core.state import State

STUCK_S = 1800.0  # for a GPU on which a frozen job can go on to work again: it may be reset, or its host looked at
_ASK = "'cotenant doctor --cluster' says what is missing"


def why_not(state: State, job: Job, shares: Sequence[Share]) -> str:
    """Say why the driver cannot freeze the job on these GPUs, in words; empty when it can, or nobody asked for it.

    Args:
        state: The state.
        job: The job.
        shares: What it has, or is about to be granted.
    """
    if job.spec.hints.checkpoint != "driver":
        return ""
    if job.spec.kind != "command":
        return "its processes are its program's own"
    if job.unfreezable:
        return job.unfreezable
    gpus = [state.gpus[share.gpu_id] for share in shares if share.gpu_id in state.gpus]
    if len({gpu.host_id for gpu in gpus}) > 1:
        return "it is on several hosts"
    if len({gpu.gpu_type for gpu in gpus}) > 1:
        return "its GPUs are of several types"
    return _unable(state, [gpu for gpu in gpus if not gpu.checkpoints])


def doubt(state: State, job: Job) -> str:
    """Say why the hint ``checkpoint: driver`` counts as none where the job is or, while it waits, wherever it could be.

    Args:
        state: The state.
        job: A job that has not ended.

    Returns:
        Words; empty when it can be frozen, when nobody asked for it, or when no host is known yet.
    """
    if job.lease is not None or job.unfreezable:
        return why_not(state, job, job.lease.shares if job.lease else ())
    if job.spec.hints.checkpoint != "driver" or job.frozen is not None or not state.hosts:
        return ""
    homes = Counter((gpu.host_id, gpu.gpu_type) for gpu in state.gpus.values() if gpu.checkpoints)
    gpus, most = job.spec.hints.gpus, max(homes.values(), default=0)
    if not most:
        return f"the driver can freeze processes on no GPU of this cluster, as far as its hosts have told: {_ASK}"
    if most < gpus:
        return f"a frozen job is on one host, and none has {gpus} GPUs of one type that the driver can freeze: {_ASK}"
    if job.spec.hints.gang == "cluster" and gpus > 1:
        return "gang cluster: where its GPUs lie on several hosts it cannot be frozen; give gang host"
    return ""


def _unable(state: State, gpus: Sequence[Gpu]) -> str:
    """Name the GPUs of one host on which nothing can be frozen, and where to find out why: only that host knows."""
    if not gpus:
        return ""
    names, host = ", ".join(gpu.gpu_id for gpu in gpus), state.hosts[gpus[0].host_id].name
    return f"the driver cannot freeze processes on {names}: 'cotenant doctor' on host {host} says what is missing"


def can_freeze(state: State, job: Job, shares: Sequence[Share]) -> bool:
    """Whether the driver can freeze the job on these GPUs, and may."""
    return job.spec.hints.checkpoint == "driver" and not why_not(state, job, shares)


def can_thaw(state: State, job: Job, *, working: bool = False) -> bool:
    """Whether a frozen job's host has enough GPUs on which it could go on, be they free or not.

    Args:
        state: The state.
        job: The job.
        working: Only those count on which something can run.
    """
    host = state.hosts.get(job.frozen.host_id) if job.frozen else None
    if job.frozen is None or host is None:
        return False
    needed, home = max((share.memory_bytes for share in job.frozen.shares), default=0), _home(state, job)
    there = [state.gpus[gpu.gpu_id] for gpu in host.gpus if gpu.gpu_id in state.gpus]
    able = [gpu for gpu in there if _takes(home, gpu) and gpu.memory_bytes >= needed and not (working and gpu.fault)]
    return len(able) >= job.spec.hints.gpus


def places_of(state: State, fleet: Fleet, job: Job) -> Integers | None:
    """Return the positions of the only GPUs that a waiting job may have; None = all."""
    if job.only_host is None:
        return None
    places = fleet.of_host(job.only_host)
    if job.frozen is not None and job.frozen.ends:
        return places[:0]
    return _within(state, fleet, job, places) if job.frozen else places


def reach(state: State, fleet: Fleet, job: Job) -> Integers:
    """Return the positions of the GPUs on which a job that is frozen where it runs now can go on."""
    near = [fleet.of_host(host_id) for host_id in job.hosts]
    return _within(state, fleet, job, np.concatenate(near)) if near else fleet.everywhere[:0]


def _within(state: State, fleet: Fleet, job: Job, places: Integers) -> Integers:
    home = _home(state, job)
    return np.array([at for at in places.tolist() if _takes(home, state.gpus[fleet[at].gpu_id])], dtype=np.int64)


def _home(state: State, job: Job) -> tuple[str, str] | None:
    """Return the host, and the type of its GPUs, that the job's processes can go on on."""
    if job.frozen is not None:
        return job.frozen.host_id, job.frozen.gpu_type
    gpu = state.gpus.get(job.lease.shares[0].gpu_id) if job.lease else None
    return None if gpu is None else (gpu.host_id, gpu.gpu_type)


def _takes(home: tuple[str, str] | None, gpu: Gpu) -> bool:
    return gpu.checkpoints and (gpu.host_id, gpu.gpu_type) == home
