"""Processors of hosts: how many shares of a job those of each host suffice for.

Cores are counted in thousandths, as whole numbers: what is added and taken away again leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cotenant.placement.fleet import Flags, Fleet, Integers
from cotenant.placement.shares import thousandths
from cotenant.placement.types import Request


def rooms(fleet: Fleet, request: Request, *, empty: bool = False) -> Integers | None:
    """Return for how many shares of the job each host has processors, by its number; None when it asks for none.

    Args:
        fleet: All GPUs.
        request: What is asked. All on one host: a host without enough for all of its GPUs has room for none.
        empty: As if the hosts carried nothing.
    """
    each = thousandths(request.cpus)
    if not each:
        return None
    found: Integers = np.maximum(fleet.limit if empty else fleet.spare(), 0) // each
    if request.one_host:
        found[found < request.gpus] = 0
    return found


def most_of(hosts: Integers, room: Integers | None) -> Integers:
    """Return those of these GPUs, given by host, for which the hosts have processors together."""
    return hosts if room is None else hosts[first_of(hosts, room, np.arange(len(hosts)))]


def first_of(hosts: Integers, room: Integers, order: Integers) -> Flags:
    """Return which GPUs stay when each host keeps as many as it has room for.

    Args:
        hosts: Number of the host of each GPU, shape (GPUs,).
        room: By number of the host, how many it has room for.
        order: How to sort the GPUs: those that come first stay.
    """
    by_host = order[np.argsort(hosts[order], kind="stable")]
    starts = np.searchsorted(hosts[by_host], hosts[by_host])
    keep = np.zeros(len(hosts), dtype=np.bool_)
    keep[by_host] = np.arange(len(hosts)) - starts < room[hosts[by_host]]
    return keep


def wait_for_others(fleet: Fleet, request: Request, sets: Integers) -> Flags:
    """Return which sets of GPUs do not suffice once they are empty: others on their hosts hold processors it needs.

    Args:
        fleet: All GPUs.
        request: What is asked.
        sets: Positions of GPUs, shape (sets, GPUs).
    """
    each = thousandths(request.cpus)
    if not each:
        return np.zeros(len(sets), dtype=np.bool_)
    room, hosts = fleet.spare(), fleet.host[sets]
    together = hosts[:, :, None] == hosts[:, None, :]  # shape (sets, GPUs, GPUs)
    needed, freed = together.sum(axis=2) * each, (together * fleet.engaged[sets][:, None, :]).sum(axis=2)
    short: Flags = (room[hosts] + freed < needed).any(axis=1)
    return short


def keep_for(fleet: Fleet, wishes: Iterable[tuple[float, Sequence[str]]]) -> None:
    """Have newcomers leave processors to jobs that wait for GPUs, beyond those which the jobs there will give back.

    Args:
        fleet: The GPUs; what was kept before is kept no longer.
        wishes: For each such job the processors it takes for each GPU, and the ids of the GPUs.
    """
    fleet.kept[:] = 0
    for cpus, gpu_ids in wishes:
        places = np.array([fleet.position(gpu_id) for gpu_id in gpu_ids if fleet.has(gpu_id)], dtype=np.int64)
        for host in np.unique(fleet.host[places]).tolist() if cpus else ():
            mine = places[fleet.host[places] == host]
            fleet.kept[host] += max(0, thousandths(cpus) * len(mine) - int(fleet.engaged[mine].sum()))
