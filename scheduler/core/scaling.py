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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.configs.settings import ScalingSettings
from cotenant.placement.types import FitError, Request
from cotenant.scheduler.core.gone import suiting
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.quotas import QUOTA_KINDS
from cotenant.scheduler.core.state import State

FILL = 0.8  # of a GPU: parts of jobs do not fill one exactly


@dataclass(frozen=True, slots=True)
class Ask:
    """What a job that does not fit wants: whole GPUs together on a host, or ``part`` of one.

    ``such_as``: hosts that have left, one of which, or one like it, has to come, since all others are too small.
    """

    gpus: int
    part: float = 1.0
    such_as: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A host: its GPUs, whether any job holds one of them, and since when it is there, Unix seconds."""

    host_id: str
    gpus: int
    busy: bool
    joined_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Size:
    """What the cluster should become.

    Attributes:
        bundles: GPUs that are to be on one host together, by bundle: of the hosts that stay, then of those to come.
        spare: Hosts that may go.
        to_come: Those of the bundles that no host has yet.
        particular: What is to come besides, of certain kinds.
        unsure: Ray is not to be asked for that now: it may just have added hosts of another kind.
    """

    bundles: tuple[int, ...]
    spare: tuple[str, ...]
    to_come: tuple[int, ...] = ()
    particular: tuple[Ask, ...] = ()
    unsure: bool = False


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
            host.joined_at,
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
            request = state.request_of(job)
            hosts = _only_such(state, request, errors)
            largest = (gpu.memory_bytes for host in hosts or state.hosts.values() for gpu in host.gpus)
            such_as = tuple(host.host_id for host in hosts)
            asks += [replace(ask, such_as=such_as) for ask in _asks(request, max(largest, default=0))]
    return asks


def _only_such(state: State, request: Request, errors: Sequence[FitError]) -> list[Host]:
    """Return the hosts that have left, one of which, or one like it, has to come; none where any other will do."""
    if state.hosts and not any(error.kind == "kind_to_come" for error in errors):
        return []
    hosts = suiting(state.gone, request, state.settings.placement.memory_margin)
    return hosts if state.hosts or len(hosts) < len(state.gone) else []


def _asks(request: Request, largest: int) -> list[Ask]:
    """Return what a job asks for where the largest GPU has so much memory, bytes."""
    if request.gpus > 1:
        return [Ask(request.gpus)] if request.one_host else [Ask(1)] * request.gpus
    if request.exclusive or (request.profile.source == "unknown" and request.compute is None):
        return [Ask(1)]
    memory = request.memory_bytes or request.profile.memory_bytes
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
    wanted = _bundles(ask for ask in asks if not ask.such_as)
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
    particular: list[Ask] = []
    for ask in _particular(asks):
        if sum(stay) + sum(to_come) + sum(other.gpus for other in particular) + ask.gpus <= most:
            particular.append(ask)
    # Where Ray cannot tell the kinds apart, it would go on adding hosts of another.
    new = any(not host.busy and now - host.joined_at < settings.idle_s for host in hosts)
    unsure = new and bool(particular)
    size = Size((*stay, *to_come), tuple(spare), tuple(to_come), tuple(particular), unsure)
    return size, ScalingMemory(idle_since)


def _bundles(asks: Iterable[Ask]) -> list[int]:
    """Return the GPUs that are to be on one host together; parts are packed."""
    known = list(asks)
    wanted = [ask.gpus for ask in known if ask.gpus > 1 or ask.part >= FILL]
    return wanted + [1] * math.ceil(math.fsum(ask.part for ask in known if ask.gpus == 1 and ask.part < FILL) / FILL)


def _particular(asks: Sequence[Ask]) -> list[Ask]:
    """Return what is to come of certain kinds, the largest first, parts packed."""
    kinds = dict.fromkeys(ask.such_as for ask in asks if ask.such_as)
    found = [Ask(gpus, such_as=kind) for kind in kinds for gpus in _bundles(a for a in asks if a.such_as == kind)]
    return sorted(found, key=lambda ask: -ask.gpus)
