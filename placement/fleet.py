"""The GPUs of a cluster as arrays, so that a decision over ten thousand of them looks at few objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from cotenant.placement.prospects import Prospects
from cotenant.placement.shares import free_memory, reservable_compute, thousandths
from cotenant.placement.types import GpuView, Request, Resident

if TYPE_CHECKING:
    from cotenant.placement.mix import Demand

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NEVER_MEASURED = -1.0
_NO_LIMIT = 1 << 60  # of processors


class Fleet(Sequence[GpuView]):
    """GPUs in order, each with one row of numbers; changed one GPU at a time.

    Every array has one entry per GPU, in order.

    Attributes:
        views: The GPUs.
        capacity: Usable memory in bytes.
        free: Memory that no resident has reserved, in bytes.
        crowd: Number of residents.
        reservable: Compute that can still be promised, fraction of the GPU.
        util: Sum of the residents' mean utilisations alone.
        engaged: Processors of its host that its residents hold, in thousandths; 0 where the host does not say.
        observed_s: Seconds the least known resident was measured for; infinite when all are known well enough.
        schedulable: The GPU takes newcomers.
        exclusive: A resident does not share it.
        particular: A resident shares with some jobs only.
        instance: It is a MIG instance.
        host: Number of the host.
        island: Number of the host's group of linked GPUs.
        kind: Number of the GPU type, an index of ``kinds``.
        kinds: The GPU types.
        idle: By number of the host, how many of its GPUs carry nobody and take newcomers.
        limit: By number of the host, its processors in thousandths; one that does not say has more than enough.
        kept: By number of the host, processors that newcomers must leave to somebody, in thousandths.
        everywhere: All positions.
        prospects: What is predicted for jobs on shared GPUs.
        demand: What jobs typically ask for; None = not known.
    """

    def __init__(self, views: Iterable[GpuView] = ()) -> None:
        self.demand: Demand | None = None
        self._load(list(views))

    def __len__(self) -> int:
        """Return the number of GPUs."""
        return len(self.views)

    @overload
    def __getitem__(self, index: int) -> GpuView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[GpuView]: ...

    def __getitem__(self, index: int | slice) -> GpuView | Sequence[GpuView]:
        """Return the GPU at this position."""
        return self.views[index]

    def __iter__(self) -> Iterator[GpuView]:
        """Iterate over the GPUs in order."""
        return iter(self.views)

    def has(self, gpu_id: str) -> bool:
        """Whether there is a GPU of that id."""
        return gpu_id in self._places

    def position(self, gpu_id: str) -> int:
        """Return where the GPU is.

        Raises:
            KeyError: There is no such GPU.
        """
        return self._places[gpu_id]

    def put(self, view: GpuView) -> None:
        """Replace the GPU of that id.

        Raises:
            KeyError: There is no such GPU.
        """
        place = self._places[view.gpu_id]
        old = self.views[place]
        if old is view:
            return
        self.views[place] = view
        if view.residents is old.residents and _same_device(view, old):
            self._open(place, view.schedulable)
        else:
            self._fill(place, view)

    def bring_to(self, views: Sequence[GpuView]) -> Fleet:
        """Make this fleet hold these GPUs; rows of GPUs that are the same objects as before are kept.

        Returns:
            The fleet itself.
        """
        if len(views) != len(self.views) or any(
            old.gpu_id != new.gpu_id for old, new in zip(self.views, views, strict=True) if old is not new
        ):
            self._load(list(views))
            return self
        for old, new in zip(self.views, views, strict=True):
            if old is not new:
                self.put(new)
        return self

    def of_host(self, host_id: str) -> Integers:
        """Return the positions of the GPUs of a host; none when it is not known."""
        return np.flatnonzero(self.host == self._hosts.get(host_id, -1))

    def on_hosts(self, hosts: Integers) -> Integers:
        """Return the positions of all GPUs of these hosts, given by number; ascending."""
        among = np.zeros(len(self.idle), dtype=np.bool_)
        among[hosts] = True
        return np.flatnonzero(among[self.host])  # far faster than isin()

    def number_of(self, host_id: str) -> int:
        """Return the number of a host.

        Raises:
            KeyError: None of the GPUs is on it.
        """
        return self._hosts[host_id]

    def spare(self) -> Integers:
        """Return by number of the host the processors for newcomers, in thousandths; negative: too many are held."""
        return self.limit - self._taken - self.kept

    def _load(self, views: list[GpuView]) -> None:
        size = len(views)
        self.views = views
        self.prospects = Prospects()
        self._places = {view.gpu_id: place for place, view in enumerate(views)}
        self._hosts: dict[str, int] = {}
        self._islands: dict[tuple[str, str], int] = {}
        self._kinds: dict[str, int] = {}
        self.capacity: Integers = np.zeros(size, dtype=np.int64)
        self.free: Integers = np.zeros(size, dtype=np.int64)
        self.crowd: Integers = np.zeros(size, dtype=np.int64)
        self.host: Integers = np.zeros(size, dtype=np.int64)
        self.island: Integers = np.zeros(size, dtype=np.int64)
        self.kind: Integers = np.zeros(size, dtype=np.int64)
        self.reservable: Floats = np.zeros(size)
        self.util: Floats = np.zeros(size)
        self.observed_s: Floats = np.zeros(size)
        self.schedulable: Flags = np.zeros(size, dtype=np.bool_)
        self.exclusive: Flags = np.zeros(size, dtype=np.bool_)
        self.particular: Flags = np.zeros(size, dtype=np.bool_)
        self.instance: Flags = np.zeros(size, dtype=np.bool_)
        self.engaged: Integers = np.zeros(size, dtype=np.int64)
        self.idle: Integers = np.zeros(size, dtype=np.int64)
        self.limit: Integers = np.full(size, _NO_LIMIT, dtype=np.int64)
        self.kept: Integers = np.zeros(size, dtype=np.int64)
        self._taken: Integers = np.zeros(size, dtype=np.int64)  # by number of the host, what residents hold
        self.everywhere: Integers = np.arange(size)
        for place, view in enumerate(views):
            self.host[place] = self._hosts.setdefault(view.host_id, len(self._hosts))
            self._fill(place, view)

    def _open(self, place: int, schedulable: bool) -> None:
        """Note that a GPU takes newcomers, or takes none, and is otherwise as it was: far cheaper than all of it."""
        if not self.crowd[place]:
            self.idle[self.host[place]] += int(schedulable) - int(self.schedulable[place])
        self.schedulable[place] = schedulable

    def _fill(self, place: int, view: GpuView) -> None:
        residents = view.residents
        host, was_idle = self._hosts.get(view.host_id), self.schedulable[place] and not self.crowd[place]
        if host is None:
            host = self._hosts[view.host_id] = len(self._hosts)
            if host >= len(self.idle):
                more = np.zeros(len(self.idle) + 1, dtype=np.int64)
                self.idle, self.kept = np.append(self.idle, more), np.append(self.kept, more)
                self.limit, self._taken = np.append(self.limit, more + _NO_LIMIT), np.append(self._taken, more)
        self.idle[self.host[place]] -= was_idle
        self.idle[host] += view.schedulable and not residents
        if view.host_cpus is not None or self.limit[host] != _NO_LIMIT:
            self._taken[self.host[place]] -= self.engaged[place]
            self.engaged[place] = sum(thousandths(resident.cpus) for resident in residents)
            self._taken[host] += self.engaged[place]
            self.limit[host] = _NO_LIMIT if view.host_cpus is None else thousandths(view.host_cpus)
        self.host[place] = host
        self.capacity[place] = view.memory_bytes
        self.crowd[place] = len(residents)
        self.island[place] = self._islands.setdefault((view.host_id, view.island), len(self._islands))
        self.kind[place] = self._kinds.setdefault(view.gpu_type, len(self._kinds))
        self.schedulable[place] = view.schedulable
        self.instance[place] = view.instance
        if residents:
            self.free[place] = free_memory(view)
            self.reservable[place] = reservable_compute(view)
            self.util[place] = math.fsum(resident.profile.util_mean for resident in residents)
            self.observed_s[place] = min(map(_observed_s, residents))
            self.exclusive[place] = any(does_not_share(resident, view) for resident in residents)
            self.particular[place] = any(resident.anti_affinity for resident in residents)
        else:  # what the above come to: gangs that are imagined away leave many such
            self.free[place], self.reservable[place], self.util[place] = view.memory_bytes, 1.0, 0.0
            self.observed_s[place], self.exclusive[place], self.particular[place] = math.inf, False, False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The GPU types, by their number."""
        return tuple(self._kinds)


def does_not_share(who: Request | Resident, view: GpuView) -> bool:
    """Whether a job keeps this GPU to itself: a MIG instance holds its jobs apart from others', not from each other."""
    return who.exclusive or (view.instance and not who.shares_instance)


def _same_device(one: GpuView, other: GpuView) -> bool:
    return (
        one.host_id == other.host_id
        and one.gpu_type == other.gpu_type
        and one.memory_bytes == other.memory_bytes
        and one.island == other.island
        and one.host_cpus == other.host_cpus
    )


def fleet_of(gpus: Sequence[GpuView]) -> Fleet:
    """Return the GPUs as a fleet: themselves when they are one."""
    return gpus if isinstance(gpus, Fleet) else Fleet(gpus)


def _observed_s(resident: Resident) -> float:
    profile = resident.profile
    if profile.source == "unknown":
        return _NEVER_MEASURED
    return profile.observed_s if profile.source == "history" else math.inf


@dataclass(frozen=True, slots=True)
class Part(Sequence[GpuView]):
    """Some GPUs of a fleet: the only ones that are asked about.

    Attributes:
        fleet: All GPUs.
        places: Positions of those asked about, ascending.
        why: Whoever asks wants to know why a job fits nowhere.
    """

    fleet: Fleet
    places: Integers
    why: bool = True

    @property
    def rows(self) -> Integers | slice:
        """What an array of the fleet is indexed with; indexing it with everything makes no copy."""
        return slice(None) if len(self.places) == len(self.fleet) else self.places

    def __len__(self) -> int:
        """Return the number of GPUs asked about."""
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> GpuView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[GpuView]: ...

    def __getitem__(self, index: int | slice) -> GpuView | Sequence[GpuView]:
        """Return the GPU at this position among those asked about."""
        if isinstance(index, slice):
            return [self.fleet.views[place] for place in self.places[index]]
        return self.fleet.views[int(self.places[index])]


def part_of(gpus: Sequence[GpuView]) -> Part:
    """Return the GPUs as part of a fleet: all of it, unless they are a part already."""
    if isinstance(gpus, Part):
        return gpus
    fleet = fleet_of(gpus)
    return Part(fleet, fleet.everywhere)
