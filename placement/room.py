"""What a job takes away from the jobs that typically come: the worth of a part of a GPU, and room on hosts.

Where a job goes it costs what the free part of the GPU was worth less what is still worth something (``mix``). Among
places where it costs the same, that one is best where fewest of the typical jobs lose a place: for each kind the number
a host could still take, by its GPUs and its processors, under a square root, since the last place of a host counts
more than one of many. This is what FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023) measures as a
fragmentation gradient, with processors, and with places counted instead of free GPUs.
"""

from __future__ import annotations

import numpy as np

from cotenant.placement.fleet import Fleet, Floats, Integers
from cotenant.placement.mix import CPUS_STEP, WHOLE, Demand, Kind
from cotenant.placement.shares import thousandths
from cotenant.placement.types import Request

_TINY = 1e-6  # rounding errors of sums of fractions


def kind_of(request: Request, capacity: int) -> Kind:
    """Return which jobs a job is like.

    Args:
        request: What it asks.
        capacity: Memory of a typical GPU, bytes.
    """
    memory = request.profile.memory_bytes if request.memory_bytes is None else request.memory_bytes
    part = int(parts_of(request, np.array([capacity if memory is None else memory]), np.array([capacity]))[0])
    return Kind(request.gpus, part, -(-thousandths(request.cpus) // CPUS_STEP) * CPUS_STEP)


def parts_of(request: Request, needs: Integers, capacity: Integers) -> Integers:
    """Return the part of each GPU that a job would take, hundredths: of its compute or memory, whichever is more.

    Args:
        request: What it asks.
        needs: Memory it would reserve on each GPU, bytes, shape (GPUs,).
        capacity: Memory of each, bytes.
    """
    if request.gpus > 1 or request.exclusive or (request.profile.source == "unknown" and request.compute is None):
        return np.full(len(needs), WHOLE, dtype=np.int64)
    memory = needs / np.maximum(capacity, 1)
    asked = np.maximum(memory, max(request.compute or 0.0, request.profile.util_mean))
    return np.clip(np.ceil(asked * WHOLE - _TINY), 1, WHOLE).astype(np.int64)


def free_parts(fleet: Fleet) -> Integers:
    """Return the part of each GPU that is free, hundredths, shape (GPUs,)."""
    compute = np.minimum(fleet.reservable, 1.0 - fleet.util)
    free = np.minimum(compute, fleet.free / np.maximum(fleet.capacity, 1))
    free = np.where(fleet.schedulable & ~fleet.exclusive, np.where(fleet.crowd == 0, 1.0, free), 0.0)
    return np.floor(np.maximum(free, 0.0) * WHOLE + _TINY).astype(np.int64)


def cost(demand: Demand, free: Integers, parts: Integers) -> Floats:
    """Return what parts of GPUs cost, in GPUs: what is free there is worth so much less afterwards.

    Args:
        demand: What is typically asked for.
        free: What is free of each GPU, hundredths, shape (GPUs,).
        parts: What the job takes of each, hundredths.
    """
    lost: Floats = demand.worth[free] - demand.worth[np.maximum(free - parts, 0)]
    return lost


def room_lost(fleet: Fleet, demand: Demand, request: Request, places: Integers, parts: Integers) -> Floats:
    """Return how much less room hosts have for typical jobs once a share of the job is on each of these GPUs.

    A job of several GPUs is looked at as a whole on each host, and an equal part counts for each of its GPUs.

    Args:
        fleet: All GPUs.
        demand: What is typically asked for.
        request: The job.
        places: Positions of the GPUs asked about, shape (GPUs,).
        parts: What it takes of each, hundredths, same shape.
    """
    free = free_parts(fleet)
    hosts, near = np.unique(fleet.host[places], return_inverse=True)
    there = fleet.everywhere if len(hosts) == len(np.unique(fleet.host)) else fleet.on_hosts(hosts)
    levels = np.searchsorted(hosts, fleet.host[there]) * (WHOLE + 1) + free[there]
    gpus = np.bincount(levels, minlength=len(hosts) * (WHOLE + 1)).reshape(len(hosts), WHOLE + 1)
    fitting = np.floor(np.arange(WHOLE + 1) / demand.part[:, None])  # jobs of each kind, on a GPU with so much left
    held = fitting @ gpus.T.astype(np.float64)
    cpus = fleet.spare()[hosts].astype(np.float64)
    before = _room(demand, held, cpus)
    if request.gpus > 1:
        left = np.maximum(held - fitting[:, [WHOLE]] * request.gpus, 0.0)
        after = _room(demand, left, cpus - thousandths(request.cpus) * request.gpus)
        return np.round((before - after)[near] / request.gpus, 9)
    # GPUs of one host with as much left are alike.
    alike, which = np.unique((near * (WHOLE + 1) + free[places]) * (WHOLE + 1) + parts, return_inverse=True)
    host, now, part = alike // (WHOLE + 1) ** 2, alike // (WHOLE + 1) % (WHOLE + 1), alike % (WHOLE + 1)
    left = held[:, host] - fitting[:, now] + fitting[:, np.maximum(now - part, 0)]
    after = _room(demand, left, cpus[host] - thousandths(request.cpus))
    lost: Floats = np.round(before[host] - after, 9)[which]
    return lost


def _room(demand: Demand, held: Floats, cpus: Floats) -> Floats:
    """Return the room for typical jobs.

    Args:
        demand: What is typically asked for.
        held: Places on the GPUs by kind of job, idle GPUs for those of several, shape (kinds, hosts).
        cpus: Processors that are left, thousandths, shape (hosts,).
    """
    needed = (demand.cpus * demand.gpus).astype(np.float64)
    by_cpus = np.maximum(cpus, 0.0) / np.where(needed > 0.0, needed, np.nan)[:, None]
    jobs = np.floor(np.fmin(held / demand.gpus[:, None], by_cpus))  # the smaller; where none are needed, the first
    size = demand.gpus * demand.part / WHOLE
    found: Floats = demand.common @ np.sqrt(jobs * size[:, None])
    return found
