"""How large the cluster should be: from what waits, what it is forecast to need, and which hosts carry nothing.

Wanted are the hosts that carry jobs and, for those that have waited ``wait_s`` and do not fit, GPUs in bundles: a job
of several GPUs on one host asks for them together; single jobs ask for the part of a GPU they are forecast to use, and
their parts are packed to ``FILL`` of a GPU. A host that has carried nothing for ``idle_s`` may go when the others
suffice. So the cluster grows once waiting shows that it is too small, and shrinks only after a pause that is longer
than starting a host should take: that is all the hysteresis there is.

Pure; nothing here decides which jobs run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cotenant.configs.settings import ScalingSettings
from cotenant.placement.types import Request
from cotenant.scheduler.core.quotas import QUOTA_KINDS
from cotenant.scheduler.core.state import State

FILL = 0.8  # of a GPU: parts of jobs do not fill one exactly


@dataclass(frozen=True, slots=True)
class Ask:
    """What a job that does not fit wants: whole GPUs together on a host, or ``part`` of one."""

    gpus: int
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """A host: its GPUs, and whether any job holds one of them."""

    host_id: str
    gpus: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Size:
    """What the cluster should become.

    Attributes:
        bundles: GPUs that are to be on one host together, by bundle: of the hosts that stay, then of those to come.
        spare: Hosts that may go.
        to_come: Those of the bundles that no host has yet.
    """

    bundles: tuple[int, ...]
    spare: tuple[str, ...]
    to_come: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What must be remembered from one look to the next: since when hosts have carried nothing, Unix seconds."""

    idle_since: Mapping[str, float] = field(default_factory=dict)


def loads_of(state: State) -> list[Load]:
    """Return all hosts that answer. One on which processes are frozen is busy: they can go on nowhere else."""
    with_frozen = {job.frozen.host_id for job in map(state.jobs.__getitem__, state.frozen) if job.frozen}
    return [
        Load(
            host.host_id,
            len(host.gpus),
            host.host_id in with_frozen or any(state.on_gpu.get(gpu.gpu_id) for gpu in host.gpus),
        )
        for host in state.hosts.values()
        if host.reachable
    ]


def asks_of(state: State, settings: ScalingSettings, now: float) -> list[Ask]:
    """Return what the jobs want that have waited long and that more GPUs would help, in order of submission."""
    asks: list[Ask] = []
    for job in state.in_order(state.queued | state.pending):
        errors = state.refused.get(job.spec.job_id, ())
        limited = any(error.kind in QUOTA_KINDS for error in errors)
        # Some GPUs may be too small for it; where all are, more of them would not help.
        hopeless = bool(errors) and all(error.never for error in errors)
        waits = job.not_before <= now and now - job.queued_at >= settings.wait_s
        if waits and not limited and not hopeless and job.spec.pinned_host is None and job.frozen is None:
            asks.extend(_asks(state.request_of(job), state))
    return asks


def _asks(request: Request, state: State) -> list[Ask]:
    if request.gpus > 1:
        return [Ask(request.gpus)] if request.one_host else [Ask(1)] * request.gpus
    if request.exclusive or (request.profile.source == "unknown" and request.compute is None):
        return [Ask(1)]
    memory = request.memory_bytes or request.profile.memory_bytes
    largest = max((gpu.memory_bytes for gpu in state.gpus.values()), default=0)
    reserved = memory / largest if memory is not None and largest > 0 else 0.0
    return [Ask(1, min(1.0, max(request.compute or request.profile.util_p95, reserved)))]


def decide(
    asks: Sequence[Ask], hosts: Sequence[Load], memory: ScalingMemory, settings: ScalingSettings, now: float
) -> tuple[Size, ScalingMemory]:
    """Return how large the cluster should be, and what to remember.

    Args:
        asks: What waits and does not fit.
        hosts: The hosts there are.
        memory: What the last call returned (``ScalingMemory()`` at first).
        settings: Limits and pauses.
        now: Unix seconds.
    """
    idle_since = {host.host_id: memory.idle_since.get(host.host_id, now) for host in hosts if not host.busy}
    wanted = [ask.gpus for ask in asks if ask.gpus > 1 or ask.part >= FILL]
    wanted += [1] * math.ceil(math.fsum(ask.part for ask in asks if ask.gpus == 1 and ask.part < FILL) / FILL)
    there = sum(host.gpus for host in hosts)
    needed = max(settings.least_gpus, sum(host.gpus for host in hosts if host.busy) + sum(wanted))
    spare: list[str] = []
    kept = there
    for host in sorted((host for host in hosts if not host.busy), key=lambda host: idle_since[host.host_id]):
        if now - idle_since[host.host_id] >= settings.idle_s and kept - host.gpus >= needed:
            spare.append(host.host_id)
            kept -= host.gpus
    stay = [host.gpus for host in hosts if host.host_id not in spare]
    most = math.inf if settings.most_gpus is None else settings.most_gpus
    to_come: list[int] = []
    for gpus in sorted(wanted, reverse=True):
        if sum(stay) + sum(to_come) + gpus <= most:
            to_come.append(gpus)
    to_come += [1] * max(0, settings.least_gpus - sum(stay) - sum(to_come))
    return Size((*stay, *to_come), tuple(spare), tuple(to_come)), ScalingMemory(idle_since)
