"""The ``nvml`` backend: NVIDIA GPUs and MIG instances.

Other threads talk to the driver (``crew``), so that a call that hangs, or a GPU that is lost, holds up no other.
``sample`` asks every GPU for a pass and takes what has come in; ``docs/devices.md`` says what is read, how often and
how exactly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from cotenant.actors.devices.base import Contexts, DeviceSample, GpuInfo, JobSample, Sample
from cotenant.actors.devices.nvml.attribution import Told, Use, attribute
from cotenant.actors.devices.nvml.board import Board, Readings
from cotenant.actors.devices.nvml.crew import Crew, Station
from cotenant.actors.devices.nvml.discovery import Finder, FoundBoard, Silence
from cotenant.actors.devices.nvml.library import Library, NvmlFailure, NvmlUnavailable
from cotenant.actors.devices.nvml.pids import PidMap
from cotenant.actors.devices.nvml.processes import named
from cotenant.actors.devices.passes import TreePasses
from cotenant.actors.devices.procfs import ProcessTable
from cotenant.actors.devices.tree import JobTree, Trees
from cotenant.configs.settings import DeviceSettings
from cotenant.forecasting.types import Reading

AGAIN_S = 30.0  # GPUs that were left out, and new MIG instances, are looked for this often
TREES_S = 1.0  # for the processes' host work and file I/O; what they do on the GPU, NVML says
_UNKNOWN = Use()
_ON_NO_CORE: frozenset[int] = frozenset()  # every process of a job is host work; what it does on the GPU, NVML says


class NvmlBackend:
    """NVIDIA GPUs. See ``DeviceBackend``.

    Args:
        settings: ``count`` (GPUs to manage) and ``memory_bytes`` (of each device).
        count: GPUs that Ray counts on this host; the first of them are managed. None = ``settings.count``.
        library: NVML, started; None = start it.
        visible: Value of ``CUDA_VISIBLE_DEVICES``: which GPUs, and in which order Ray counts them. None = not set.
        silent: The driver does not answer: its GPUs are taken in when it does. None = it does.
        processes: The processes of this machine.
        pids: Whose NVML's process numbers are.
        clock: Monotonic seconds.

    Attributes:
        notes: What is worth knowing of GPUs that were left out.

    Raises:
        ValueError: No GPU can be used, or fewer than the setting says, and none that does not answer may be used later;
            the message names the setting and says why.
    """

    name = "nvml"

    def __init__(
        self,
        settings: DeviceSettings,
        count: int | None = None,
        *,
        library: Library | None = None,
        visible: str | None = None,
        silent: Silence | None = None,
        processes: ProcessTable | None = None,
        pids: PidMap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        wanted = settings.count if count is None else count
        search = partial(Finder, visible=visible, count=wanted, memory_bytes=settings.memory_bytes)
        finder, found, notes = _waiting(search, silent) if silent else _first_look(search, library, settings.count)
        self._library = None if finder is None else finder.library
        self.notes: Sequence[str] = tuple(notes)
        self._crew = Crew([self._station(each) for each in found])
        self._at = {gpu.gpu_id: station for station in self._crew.stations for gpu in station.gpus}
        self._gpus = tuple(sorted((gpu for each in found for gpu in each.gpus), key=lambda gpu: gpu.index))
        self._found_later: SimpleQueue[tuple[list[FoundBoard], list[str]]] = SimpleQueue()
        self._closing = threading.Event()
        if finder is None or finder.may_find_more:
            start = silent.call if silent else None
            look = partial(self._look_again, search, finder, start)
            threading.Thread(target=look, name="GPUs to come", daemon=True).start()
        self._trees = Trees(processes or ProcessTable())
        self._trees.scan()
        self._passes = TreePasses(self._trees, clock, TREES_S)
        self._pids = pids or PidMap()
        self._owners: dict[int, str | None] = {}  # NVML's process → job, while the jobs' processes stay the same
        self._owners_of = -1  # the version of the trees they were found in
        self._uses_of: dict[str, tuple[object, ...]] = {}  # GPU → what its uses were worked out from
        self._uses: dict[str, dict[str, Use]] = {}

    @property
    def cost_s(self) -> float:
        """CPU time of all calls to NVML so far."""
        return self._crew.cost_s

    def discover(self) -> Sequence[GpuInfo]:
        """See ``DeviceBackend.discover``."""
        return self._gpus

    def watch(self, job_id: str, gpu_ids: Sequence[str], root_pid: int) -> None:
        """See ``DeviceBackend.watch``."""
        for gpu_id in gpu_ids:
            if gpu_id not in self._at:
                raise KeyError(gpu_id)
        self._trees.watch(job_id, dict.fromkeys(gpu_ids, _ON_NO_CORE), root_pid)

    def unwatch(self, job_id: str) -> None:
        """See ``DeviceBackend.unwatch``."""
        self._trees.unwatch(job_id)

    def sample(self) -> Sample:
        """See ``DeviceBackend.sample``."""
        self._take_in_found()
        self._crew.look(self._clock())
        now = self._passes.read()
        readings = {gpu.gpu_id: self._at[gpu.gpu_id].readings(gpu.gpu_id, now) for gpu in self._gpus}
        if self._owners_of != self._trees.version:
            self._owners_of = self._trees.version
            self._owners.clear()
            carrying = {gpu_id for tree in self._trees.jobs.values() for gpu_id in tree.slices}
            for station in self._crew.stations:
                station.busy = not carrying.isdisjoint(gpu.gpu_id for gpu in station.gpus)
            self._pids.forget({pid for each in readings.values() for pid in named(each.memory, each.shares or {})})
        devices = tuple(self._device_sample(gpu.gpu_id, readings[gpu.gpu_id], now) for gpu in self._gpus)
        return Sample(now, devices, self._job_samples(readings, now))

    def contexts(self, gpu_ids: Sequence[str], pids: Collection[int]) -> Contexts | None:
        """See ``DeviceBackend.contexts``."""
        now = self._clock()
        on = [self._at[gpu_id].readings(gpu_id, now) for gpu_id in gpu_ids if gpu_id in self._at]
        if len(on) < len(gpu_ids) or any(each.memory is None for each in on):
            return None
        memory: dict[int, int | None] = {}
        for pid, used in (held for each in on for held in (each.memory or {}).items()):
            ours = self._pids.ours(pid, pids)
            if ours is not None:
                known = memory.get(ours, 0)
                memory[ours] = None if used is None or known is None else known + used
        times = min(each.read_s for each in on), min(each.listed_s for each in on)
        return Contexts(memory, self._pids.translates, *times)

    def close(self) -> None:
        """See ``DeviceBackend.close``."""
        for job_id in list(self._trees.jobs):
            self._trees.unwatch(job_id)
        if self._closing.is_set():
            return
        self._closing.set()
        if self._crew.close() and self._library is not None:
            self._library.close()

    def _station(self, found: FoundBoard) -> Station:
        return Station(Board(found.library, found.uuid, found.parts, self._clock), found.gpus, self._clock())

    def _look_again(
        self, search: Callable[[Library], Finder], finder: Finder | None, start: Future[Any] | None
    ) -> None:
        """Look for GPUs that were left out and for new MIG instances; in a thread of its own, since calls may hang.

        Without a finder the driver has not started yet: ``start`` is waited for, which is starting it.
        """
        wait_s = 0.0 if finder is None else AGAIN_S
        while (finder is None or finder.may_find_more) and not self._closing.wait(wait_s):
            wait_s = AGAIN_S
            try:
                if finder is None:
                    under_way, start = start, None
                    self._library = Library(timeout_s=None, start=under_way)
                    finder = search(self._library)
                self._found_later.put(finder.find())
            except NvmlFailure:
                continue  # the next look may tell more
            except (NvmlUnavailable, ValueError) as error:  # the driver is no good now; a new instance is too small
                self._found_later.put(([], [str(error)]))

    def _take_in_found(self) -> None:
        """Manage the devices as well that have come since the last sample; they follow those that are known."""
        while not self._found_later.empty():
            found, notes = self._found_later.get()
            self.notes = tuple(notes)
            for board in found:
                self._take_in(board)

    def _take_in(self, found: FoundBoard) -> None:
        """Manage a GPU's new devices: they are read apart from those that are known, which nothing is to disturb."""
        mig = found.parts[0].mig
        if any(each.board.uuid == found.uuid and each.board.parts[0].mig != mig for each in self._crew.stations):
            return  # MIG was switched on or off: what is known of it goes on, or is lost
        parts = tuple(part for part in found.parts if part.uuid not in self._at)
        if not parts:
            return
        count = len(self._gpus)
        new = (gpu for gpu in found.gpus if gpu.gpu_id not in self._at)
        gpus = tuple(replace(gpu, index=count + number) for number, gpu in enumerate(new))
        station = self._station(replace(found, parts=parts, gpus=gpus))
        self._crew.add(station)
        self._at |= dict.fromkeys((gpu.gpu_id for gpu in gpus), station)
        self._gpus = (*self._gpus, *gpus)

    def _device_sample(self, gpu_id: str, readings: Readings, now_s: float) -> DeviceSample:
        station = self._at[gpu_id]
        lost, trouble = station.trouble(gpu_id, now_s)
        if lost or trouble:
            return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=lost, note=trouble)
        return DeviceSample(
            gpu_id=gpu_id,
            util=readings.util,
            memory_bytes=readings.memory_bytes,
            note="; ".join(readings.notes),
            activity=readings.activity if station.fresh else None,  # a mean of the time before it counts once
        )

    def _job_samples(self, readings: dict[str, Readings], now_s: float) -> tuple[JobSample, ...]:
        on: dict[str, list[JobTree]] = {}
        for tree in self._trees.jobs.values():
            for gpu_id in tree.slices:
                on.setdefault(gpu_id, []).append(tree)
        for gpu_id, trees in on.items():
            self._attribute(gpu_id, trees, readings[gpu_id])
        found: list[JobSample] = []
        for tree in self._trees.jobs.values():
            if not tree.slices:  # frozen, so on no GPU
                continue
            readable, parts = tree.readable, len(tree.slices)
            host_s = tree.host_ns / 1e9 / parts if readable and self._passes.counted else None
            files = self._passes.io_bytes(tree) if readable else (None, None)
            for gpu_id in tree.slices:
                use = self._uses[gpu_id].get(tree.job_id, _UNKNOWN)
                age_s = _age_s(use, now_s)
                levels = (None, use.util, use.memory_bytes, host_s)
                found.append(JobSample(tree.job_id, gpu_id, *levels, *files, age_s, use.source, use.memory_source))
        return tuple(found)

    def _attribute(self, gpu_id: str, trees: Sequence[JobTree], readings: Readings) -> None:
        """Bring what the jobs use of a GPU in line with what it says."""
        known = (readings.util, readings.memory_bytes, readings.shares, readings.memory, readings.answered)
        basis = (*map(id, known[2:4]), *known, self._trees.version)
        if self._uses_of.get(gpu_id) == basis:
            return
        self._uses_of[gpu_id] = basis
        jobs = [tree.job_id for tree in trees if tree.readable]
        if not readings.answered or not jobs:
            self._uses[gpu_id] = {}
            return
        told = Told(readings.util, readings.memory_bytes, readings.shares, readings.memory)
        self._uses[gpu_id] = attribute(jobs, told, self._owner, self._pids.translates)

    def _owner(self, pid: int) -> str | None:
        if pid not in self._owners:
            trees = self._trees.jobs.values()
            mine = (tree.job_id for tree in trees if self._pids.ours(pid, tree.members) is not None)
            self._owners[pid] = next(mine, None)
        return self._owners[pid]


def _waiting(search: Callable[..., Finder], silent: Silence) -> tuple[Finder | None, list[FoundBoard], list[str]]:
    """What there is while the driver does not answer: a finder that knows of the call, once NVML has started."""
    finder = None if silent.library is None else search(silent.library, counting=silent.call)
    return finder, [], [silent.reason]


def _first_look(
    search: Callable[[Library], Finder], library: Library | None, least: int | None
) -> tuple[Finder, list[FoundBoard], list[str]]:
    """Look for the GPUs of the host; ``least`` are to be there. See ``NvmlBackend`` for what it raises."""
    try:
        finder = search(library or Library())
        found, notes = finder.find()
    except (NvmlUnavailable, NvmlFailure) as error:
        raise ValueError(f"device.backend: 'nvml' is not accepted on this host: {error}") from error
    if (not found or len(found) < (least or 0)) and not finder.silent:
        why = "; ".join(notes) or f"CUDA_VISIBLE_DEVICES is {finder.visible!r}"
        raise ValueError(f"device.count: {least} is not accepted; this host has {len(found)} GPUs ({why})")
    return finder, found, notes


def _age_s(use: Use, now_s: float) -> Reading:
    if use.util is None:
        return None
    return 0.0 if use.came_s is None else max(0.0, now_s - use.came_s)
