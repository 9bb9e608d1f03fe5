"""Whose utilisation and memory it is: from what NVML says of processes and of the device to what each job uses.

Pure. What the driver tells by process is taken as it is. What it tells of the device only, and a part of which is given
to a job, is an estimate and labelled so (``source`` or ``memory_source`` "device").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.actors.devices.nvml.processes import Held, named
from cotenant.forecasting.types import MemorySource, Reading, UtilSource

EXPLAINED = 0.05  # of the device: what processes add up to differs from what the device says by this much


@dataclass(frozen=True, slots=True)
class Use:
    """What one job uses of one device. ``came_s`` is when the driver said what is behind ``util``; None = just now."""

    util: Reading = None
    came_s: Reading = None
    source: UtilSource | None = None
    memory_bytes: Reading = None
    memory_source: MemorySource | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a device (see ``board.Readings``)."""

    util: Reading
    memory_bytes: Reading
    shares: Mapping[int, Held] | None
    memory: Mapping[int, int | None] | None


def attribute(
    jobs: Sequence[str], told: Told, owner: Callable[[int], str | None], all_numbers_known: bool
) -> dict[str, Use]:
    """Divide what a device does among its jobs.

    Args:
        jobs: The jobs with a share of the device whose processes are known.
        told: What NVML says.
        owner: From NVML's process number to a job; None = no job's.
        all_numbers_known: Whether ``owner`` can recognise every process of the jobs. In a container it may not.

    Returns:
        By job; a job of which nothing can be said has None everywhere.
    """
    owners = {pid: owner(pid) for pid in named(told.memory, told.shares or {})}
    utils = _utils(jobs, told, owners, all_numbers_known)
    memory = _memory(jobs, told, owners, all_numbers_known)
    return {job: Use(*utils[job], *memory[job]) for job in jobs}


_Util = tuple[Reading, Reading, UtilSource | None]
_UNKNOWN: _Util = (None, None, None)
_Memory = tuple[Reading, MemorySource | None]


def _utils(
    jobs: Sequence[str], told: Told, owners: Mapping[int, str | None], all_numbers_known: bool
) -> dict[str, _Util]:
    shares = told.shares or {}
    found: dict[str, _Util] = {}
    for job in jobs:
        own = [held for pid, held in shares.items() if owners[pid] == job]
        if own and told.util != 0.0:
            found[job] = (min(1.0, sum(h.util for h in own)), min(h.came_s for h in own), "process")
    silent = [job for job in jobs if job not in found]
    if told.shares is None:
        left = told.util  # the driver says nothing of processes
    elif not all_numbers_known:
        left = None if told.util is None else max(0.0, told.util - sum(_used(found)))
    else:
        left = _unexplained(told.util, shares)
    return found | _parts(silent, left, told, owners, all_numbers_known)


def _used(found: Mapping[str, _Util]) -> list[float]:
    return [util for util, _, _ in found.values() if util is not None]


def _unexplained(util: Reading, shares: Mapping[int, Held]) -> Reading:
    """How busy the device is beyond what processes were said to do: the driver names those only that did something."""
    if util is None:
        return 0.0 if shares else None  # the others did nothing in the driver's last sample
    left = util - sum(held.util for held in shares.values())
    return left if left > EXPLAINED else 0.0


def _parts(
    silent: Sequence[str], left: Reading, told: Told, owners: Mapping[int, str | None], all_numbers_known: bool
) -> dict[str, _Util]:
    """Divide what is left evenly among those that may have caused it."""
    if left is None:
        return dict.fromkeys(silent, _UNKNOWN)
    if left == 0.0:
        return dict.fromkeys(silent, (0.0, None, "process" if told.shares is not None else "device"))
    on_it = set(owners.values()) if told.memory is not None and all_numbers_known else set(silent)
    candidates = [job for job in silent if job in on_it]
    # Processes that are no job's and of which nothing is said may have caused it as well.
    strangers = [pid for pid, job in owners.items() if job is None and pid not in (told.shares or {})]
    others = len(strangers) if all_numbers_known else 0
    parts: dict[str, _Util] = dict.fromkeys(silent, (0.0, None, "process"))
    for job in candidates:
        parts[job] = (min(1.0, left / (len(candidates) + others)), None, "device")
    return parts


def _memory(
    jobs: Sequence[str], told: Told, owners: Mapping[int, str | None], all_numbers_known: bool
) -> dict[str, _Memory]:
    found: dict[str, _Memory] = {}
    for job in jobs:
        own = [used for pid, used in (told.memory or {}).items() if owners[pid] == job]
        known = [used for used in own if used is not None]
        if told.memory is None or len(known) < len(own) or (not own and not all_numbers_known):
            found[job] = (None, None)
        else:
            found[job] = (float(sum(known)), "process")
    # A job that has the device to itself has what is in use there; an estimate, the driver's own memory is in it.
    alone = _alone(jobs, owners, all_numbers_known)
    if alone and found[jobs[0]] == (None, None) and told.memory_bytes is not None:
        found[jobs[0]] = (told.memory_bytes, "device")
    return found


def _alone(jobs: Sequence[str], owners: Mapping[int, str | None], all_numbers_known: bool) -> bool:
    """Whether nobody else is known to be on the device: no job, and no process that is no job's."""
    return len(jobs) == 1 and not (all_numbers_known and None in owners.values())
