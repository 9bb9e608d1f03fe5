"""Guards against waiting for ever: GPUs held for a job that has waited too long, and idle GPUs that fit it.

The first job in the queue that has waited for ``RESERVE_AFTER_S`` and does not fit gets a reservation: of the GPUs that
could take it once empty, those that are expected to be empty soonest (when nobody knows, those with the fewest
residents). They are held until the job starts, leaves the queue or can no longer have them; they are exchanged only for
others with fewer residents that are not expected to be empty later: so what the job waits for only ever becomes less.

Others may use held GPUs before (backfill) when they are expected to be gone by the time promised to the job: a job
that says how long it runs, at the largest slowdown it accepts, beside residents that will also be gone by then at the
largest slowdown they accept. Nothing is backfilled when the promise cannot be made because a resident says nothing, or
once the promised time is over. A promise only ever moves to an earlier time. So whatever the hints are worth, the job
starts at the latest when those are gone that were there when its promised time came. (This is EASY backfilling, Lifka
1995, with a promise that is kept from cycle to cycle.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.placement.constraints import could_take
from cotenant.placement.fleet import Floats, Part, part_of
from cotenant.placement.processors import first_of, most_of, rooms, wait_for_others
from cotenant.placement.shares import memory_needs
from cotenant.placement.types import GpuView, Request
from cotenant.scheduler.core.model import Job, Reservation

RESERVE_AFTER_S = 600.0
EndOf = Callable[[str], tuple[float, float] | None]
"""By job id: when a running job is expected to end, and the latest time it is (Unix seconds); None = nobody knows."""


@dataclass(frozen=True, slots=True)
class Held:
    """The GPUs held during one proposal.

    Attributes:
        reservation: The reservation; None = nothing is held.
        note: Why its GPUs take nobody.
        open_until: By GPU id the time until which a held GPU may be used by others; one that is not named may not.
        claimed: By GPU id the job it is kept for since that one is being moved there, or others make room for it.
    """

    reservation: Reservation | None = None
    note: str = ""
    open_until: Mapping[str, float] = field(default_factory=dict)
    claimed: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, gpu_id: object) -> bool:
        return gpu_id in self.claimed or (self.reservation is not None and gpu_id in self.reservation.gpu_ids)

    def lets_in(self, gpu_id: str, leaves_at: float | None = None) -> bool:
        """Whether a job that is gone at that time (None = nobody knows when) may use the GPU."""
        if gpu_id not in self:
            return True
        until = -math.inf if gpu_id in self.claimed else self.open_until.get(gpu_id, -math.inf)
        return leaves_at is not None and leaves_at <= until

    def closed(self, view: GpuView) -> GpuView:
        """Return a held GPU as those see it that may not use it."""
        claimant = self.claimed.get(view.gpu_id)
        return replace(view, schedulable=False, note=self.note if claimant is None else f"kept for job {claimant}")


NOTHING_HELD = Held()


def has_waited_long(job: Job, now: float) -> bool:
    """Whether the job has waited so long that GPUs are to be held for it."""
    return now - job.queued_at >= RESERVE_AFTER_S


@dataclass(frozen=True, slots=True)
class Wish:
    """What GPUs are to be held for: a job, what it asks, and the fraction added to forecast memory."""

    job_id: str
    request: Request
    margin: float

    def could_have(self, gpu: GpuView) -> bool:
        """Whether the job could have the GPU once it is empty."""
        return gpu.schedulable and could_take(self.request, gpu, self.margin)


def reserve(
    wish: Wish, gpus: Sequence[GpuView], end_of: EndOf, now: float, free: Floats | None = None
) -> Reservation | None:
    """Return GPUs to hold for a job that has waited long; None when too few could take it.

    Args:
        wish: The refused job, first in the queue of those refused.
        gpus: All GPUs it may use, as they would be now.
        end_of: When running jobs will end.
        now: Unix seconds.
        free: When each GPU of the fleet is expected to be empty; None = as ``end_of`` says.
    """
    part, request = part_of(gpus), wish.request
    fleet, rows = part.fleet, part.rows
    if free is None:
        free = np.array([free_at(gpu, end_of, now) for gpu in fleet])
    could = fleet.schedulable[rows] & (memory_needs(request, fleet.capacity[rows], wish.margin) <= fleet.capacity[rows])
    if request.gpus > 1:
        could &= ~fleet.instance[rows]
    places, room = part.places[could], rooms(fleet, request, empty=True)
    if room is not None:
        places = places[first_of(fleet.host[places], room, np.lexsort((fleet.crowd[places], free[places])))]
    if len(places) < request.gpus:
        return None
    hosts = fleet.host[places] if request.one_host else np.zeros(len(places), dtype=np.int64)
    order = np.lexsort((fleet.crowd[places], free[places], hosts))
    starts = np.flatnonzero(np.r_[True, np.diff(hosts[order]) != 0])
    sizes = np.diff(np.r_[starts, len(order)])
    enough = starts[sizes >= request.gpus]
    if not len(enough):
        return None
    sets = places[order[enough[:, None] + np.arange(request.gpus)]]  # shape (hosts, GPUs)
    until = np.where(wait_for_others(fleet, request, sets), np.inf, free[sets].max(axis=1))
    best = np.lexsort((sets.min(axis=1), fleet.crowd[sets].sum(axis=1), until))[0]
    return Reservation(wish.job_id, tuple(fleet.views[place].gpu_id for place in sets[best].tolist()))


def renewed(  # noqa: PLR0917 - the arguments of ``reserve``, and what is renewed
    old: Reservation, wish: Wish, gpus: Sequence[GpuView], end_of: EndOf, now: float, free: Floats | None = None
) -> Reservation | None:
    """Return the reservation a job has from now on; None when it can have none any more.

    Args:
        old: The one it had.
        wish: As for ``reserve``.
        gpus: As for ``reserve``.
        end_of: As for ``reserve``.
        now: Unix seconds.
        free: As for ``reserve``.
    """
    new = reserve(wish, gpus, end_of, now, free)
    kept = [gpu for gpu in named(gpus, old.gpu_ids) if wish.could_have(gpu)]
    if new is None or len(kept) < wish.request.gpus:
        return new
    (end, residents), (other_end, others) = rank(kept, end_of, now), rank(named(gpus, new.gpu_ids), end_of, now)
    return replace(new, starts_by=old.starts_by) if others < residents and other_end <= end else old


def named(gpus: Sequence[GpuView], gpu_ids: Collection[str]) -> list[GpuView]:
    """Return those of the GPUs that are named, in order."""
    part = part_of(gpus)
    places = sorted(part.fleet.position(gpu_id) for gpu_id in gpu_ids if part.fleet.has(gpu_id))
    return [part.fleet.views[place] for place in places]


def rank(gpus: Sequence[GpuView], end_of: EndOf, now: float) -> tuple[float, int]:
    """Return when these GPUs are expected to be empty, and how many jobs are on them."""
    return max(free_at(gpu, end_of, now) for gpu in gpus), sum(len(gpu.residents) for gpu in gpus)


def hold(
    reservation: Reservation, job: Job, gpus: Sequence[GpuView], end_of: EndOf, now: float, *, suffices: bool = True
) -> Held:
    """Return what is held for the job now, with what it is promised.

    Args:
        reservation: The GPUs.
        job: The job.
        gpus: As for ``reserve``.
        end_of: As for ``reserve``.
        now: Unix seconds.
        suffices: It can start once these GPUs are empty.
    """
    views = named(gpus, reservation.gpu_ids)
    expected = max(free_at(gpu, end_of, now) for gpu in views) if suffices else math.inf
    promised = min(expected, math.inf if reservation.starts_by is None else reservation.starts_by)
    note = f"held for job {job.spec.job_id}, which has waited {now - job.queued_at:.0f} s"
    if math.isinf(promised):
        return Held(reservation, note)
    gone = {gpu.gpu_id: max((_latest(r.job_id, end_of) for r in gpu.residents), default=now) for gpu in views}
    open_until = {gpu_id: promised for gpu_id, at in gone.items() if at <= promised and now < promised}
    return Held(replace(reservation, starts_by=promised), note, open_until)


def free_at(gpu: GpuView, end_of: EndOf, now: float) -> float:
    """Return when the GPU is expected to be empty, Unix seconds; infinity when nobody knows."""
    ends = [end_of(resident.job_id) for resident in gpu.residents]
    return max((math.inf if end is None else end[0] for end in ends), default=now)


def _latest(job_id: str, end_of: EndOf) -> float:
    end = end_of(job_id)
    return math.inf if end is None else end[1]


def fits_idle(request: Request, idle: Part, margin: float) -> bool:
    """Whether the job fits these idle GPUs: a question without any doubt, whatever the policy predicts."""
    capacity = idle.fleet.capacity[idle.places]
    able = memory_needs(request, capacity, margin) <= capacity
    if request.gpus > 1:
        able &= ~idle.fleet.instance[idle.places]
    hosts = most_of(idle.fleet.host[idle.places[able]], rooms(idle.fleet, request))
    most = int(np.bincount(hosts).max(initial=0)) if request.one_host else len(hosts)
    return most >= request.gpus
