"""Hosts that have left the cluster: where it may grow, such may come again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cotenant.placement.constraints import could_take
from cotenant.placement.types import GpuView, Request
from cotenant.scheduler.core.floor import view_of
from cotenant.scheduler.core.model import Host

KEPT = 64  # hosts: those of a kind of which there are several are forgotten first


def remember(gone: Mapping[str, Host], host: Host) -> dict[str, Host]:
    """Return the hosts that have left with one more, as it was when it worked."""
    gpus = tuple(replace(gpu, healthy=True, fault="") for gpu in host.gpus)
    known = {host_id: other for host_id, other in gone.items() if host_id != host.host_id}
    known[host.host_id] = replace(host, gpus=gpus, reachable=True)
    if len(known) > KEPT:
        kinds = [_kind(other) for other in known.values()]
        several = (host_id for host_id, kind in zip(known, kinds, strict=True) if kinds.count(kind) > 1)
        del known[next(several, next(iter(known)))]
    return known


def empty_views(host: Host) -> list[GpuView]:
    """Return the GPUs of a host as they would be if it came again."""
    return [view_of(gpu, host, ()) for gpu in host.gpus]


def kinds_of(gone: Mapping[str, Host]) -> list[Host]:
    """Return one host of each kind, those that left last first."""
    return list({_kind(host): host for host in reversed(list(gone.values()))}.values())


def suiting(gone: Mapping[str, Host], request: Request, margin: float) -> list[Host]:
    """Return the hosts that could take the job, or one share of one that may lie on several, if they came again."""
    least = request.gpus if request.one_host else 1
    return [
        host for host in gone.values() if sum(could_take(request, each, margin) for each in empty_views(host)) >= least
    ]


def _kind(host: Host) -> tuple[object, ...]:
    return host.cpus, tuple((gpu.gpu_type, gpu.memory_bytes) for gpu in host.gpus)
