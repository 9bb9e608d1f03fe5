"""The GPUs as placement sees them, kept in line with the records one GPU at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from cotenant.placement.fleet import Fleet, Floats
from cotenant.placement.types import GpuView, Resident
from cotenant.scheduler.core.model import Gpu, Host, Job

Build = Callable[[str], GpuView]
"""Makes the view of a GPU from the records."""
Ends = Callable[[str], tuple[float, float, float]]
"""When the jobs on a GPU end: the first and the last of those that run (Unix seconds; no such job: infinity and minus
infinity; nobody knows: the last is infinity), and how long those take that start now (minus infinity: no such job)."""


def view_of(gpu: Gpu, host: Host, residents: tuple[Resident, ...]) -> GpuView:
    """Return a GPU of a host with its residents, as placement sees it."""
    note = "" if host.reachable else f"host {host.name} does not answer"
    return GpuView(
        gpu_id=gpu.gpu_id,
        host_id=gpu.host_id,
        gpu_type=gpu.gpu_type,
        memory_bytes=gpu.memory_bytes,
        residents=residents,
        schedulable=host.reachable and gpu.healthy,
        note=note if gpu.healthy else gpu.fault or "the GPU is lost or not healthy",
        island=gpu.island,
        host_cpus=host.cpus,
    )


def mixed_places(jobs: Iterable[Job], fingerprint: str, gpus: Mapping[str, Gpu]) -> Iterator[str]:
    """Yield the ids of the GPUs of those jobs of a program that have some of several types, or had some that are gone.

    There a job is as its program was last found on that type, whatever the job itself shows on the first of its GPUs.

    Args:
        jobs: All jobs that hold a lease.
        fingerprint: The program.
        gpus: All GPUs by id.
    """
    for lease in (job.lease for job in jobs if job.spec.fingerprint == fingerprint):
        shares = lease.shares if lease else ()
        held = [share.gpu_id for share in shares if share.gpu_id in gpus]
        if len(held) < len(shares) or len({gpus[gpu_id].gpu_type for gpu_id in held}) > 1:
            yield from held


class Floor:
    """Views of GPUs that are made anew only when something about their GPU has changed.

    Attributes:
        changed: Ids of the GPUs that have changed since the last scheduling cycle.
    """

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self._views: dict[str, GpuView] = {}
        self._fleet = Fleet()
        self._stale: set[str] = set()  # the fleet has an older view of them
        self._in_order = True  # the fleet has all GPUs, in the order of the records
        self._ends: Floats = np.zeros((0, 3))
        self._mistimed: set[str] = set()

    def view(self, gpu_id: str, build: Build) -> GpuView:
        """Return the GPU with its residents."""
        view = self._views.get(gpu_id)
        if view is None:
            view = self._views[gpu_id] = build(gpu_id)
        return view

    def touch(self, gpu_ids: Iterable[str]) -> None:
        """Note that something about these GPUs has changed."""
        for gpu_id in gpu_ids:
            self.changed.add(gpu_id)
            self._stale.add(gpu_id)
            self._mistimed.add(gpu_id)
            self._views.pop(gpu_id, None)

    def retime(self, gpu_ids: Iterable[str]) -> None:
        """Note that jobs on these GPUs are expected to end at other times."""
        self._mistimed.update(gpu_ids)

    def forget(self, gpu_id: str) -> None:
        """Note that there is no such GPU any more."""
        for noted in (self.changed, self._stale, self._mistimed):
            noted.discard(gpu_id)
        self._views.pop(gpu_id, None)
        self._in_order = False

    def renew(self) -> None:
        """Note that everything may have changed, which GPUs there are and their order included."""
        self._views.clear()
        self._in_order = False

    def fleet(self, gpu_ids: Iterable[str], build: Build) -> Fleet:
        """Return all GPUs as they are now.

        Args:
            gpu_ids: All GPUs, in order.
            build: Makes views.
        """
        if not self._in_order:
            self._fleet = Fleet(self.view(gpu_id, build) for gpu_id in gpu_ids)
            self._in_order = True
            self._ends = np.zeros((0, 3))
        else:
            for gpu_id in self._stale:
                self._fleet.put(self.view(gpu_id, build))
        self._stale.clear()
        return self._fleet

    def free_at(self, fleet: Fleet, ends: Ends, now: float) -> Floats:
        """Return when each GPU is expected to be empty, Unix seconds; infinity when nobody knows.

        A job that was expected to be gone by now has an unknown time left.

        Args:
            fleet: What ``fleet`` returned.
            ends: When the jobs on a GPU end.
            now: Unix seconds.
        """
        if len(self._ends) != len(fleet):
            self._ends = np.array([ends(gpu.gpu_id) for gpu in fleet]).reshape(-1, 3)
        else:
            for gpu_id in filter(fleet.has, self._mistimed):
                self._ends[fleet.position(gpu_id)] = ends(gpu_id)
        self._mistimed.clear()
        first, last, starting = self._ends.T
        free: Floats = np.where(first <= now, np.inf, np.maximum(np.maximum(last, now), now + starting))
        return free
