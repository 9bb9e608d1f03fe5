"""The ``nvml`` backend: NVIDIA GPUs and MIG instances.

One thread per GPU talks to the driver, so that a call that hangs, or a GPU that is lost, holds up no other. ``sample``
asks every GPU for a pass and takes what has come in; ``docs/devices.md`` says what is read, how often and how exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from cotenant.actors.devices.base import SILENT_LOST_S, DeviceSample, GpuInfo, JobSample, Sample
from cotenant.actors.devices.nvml.attribution import Told, Use, attribute
from cotenant.actors.devices.nvml.board import Board, Pass, Readings
from cotenant.actors.devices.nvml.discovery import FoundBoard, find_boards
from cotenant.actors.devices.nvml.library import Library, NvmlFailure, NvmlUnavailable
from cotenant.actors.devices.nvml.pids import PidMap
from cotenant.actors.devices.nvml.processes import named
from cotenant.actors.devices.passes import TreePasses
from cotenant.actors.devices.procfs import ProcessTable
from cotenant.actors.devices.tree import JobTree, Trees
from cotenant.configs.settings import DeviceSettings
from cotenant.forecasting.types import Reading

WAIT_S = 0.003  # for the passes asked for; what comes later is taken in by the next sample
SILENT_S = 1.0  # from here on there is no reading any more
REOPEN_S = 1.0  # a GPU that is lost is looked for this often
_NOTHING = Readings(answered=False)
_ON_NO_CORE: frozenset[int] = frozenset()  # every process of a job is host work; what it does on the GPU, NVML says


class _Station:
    """A GPU, the thread that reads it and what it said last."""

    def __init__(self, board: Board, found: FoundBoard, now_s: float) -> None:
        self.board = board
        self.gpus = found.gpus
        self._watchdog = found.watchdog
        self._pending: Future[Pass] | None = None
        self._asked_s = now_s
        self._newest: Pass | None = None
        self._answered_s = now_s  # when every device last told its memory, or the GPU was first asked
        self.fresh = False

    def ask(self, now_s: float) -> Future[Pass] | None:
        """Have a pass made; None when the last one is still under way, or it is too early."""
        if self._pending is not None:
            return None
        if self._newest is not None and not self._newest.devices and now_s - self._asked_s < REOPEN_S:
            return None
        self._asked_s = now_s
        self._pending = self._watchdog.submit(self.board.read)
        return self._pending

    def take(self) -> None:
        """Take in the pass if it is done; ``fresh`` tells whether it was."""
        self.fresh = self._pending is not None and self._pending.done()
        if self._pending is not None and self.fresh:
            self._newest, self._pending = self._pending.result(), None
            if self._newest.devices and all(each.answered for each in self._newest.devices.values()):
                self._answered_s = self._newest.at_s

    def readings(self, gpu_id: str, now_s: float) -> Readings:
        """Return what the device said last, as far as it is of use."""
        if self._newest is None or now_s - self._newest.at_s > SILENT_S:
            return _NOTHING
        return self._newest.devices.get(gpu_id, _NOTHING)

    def trouble(self, now_s: float) -> tuple[bool, str]:
        """Return whether the GPU must be drained, and what is wrong with it."""
        if self._newest is not None and self._newest.fault:
            return True, self._newest.fault
        silent_s = now_s - self._answered_s
        if silent_s <= SILENT_S:
            return False, ""
        return silent_s > SILENT_LOST_S, f"the driver has not answered for {silent_s:.1f} s"

    def close(self) -> bool:
        """Let go of the GPU; False when its thread is stuck."""
        if self._pending is None or self._pending.done():
            self._pending = self._watchdog.submit(self._close)
            self._watchdog.close()
            wait([self._pending], WAIT_S)
        return self._pending.done()

    def _close(self) -> Pass:
        self.board.close()
        return Pass(self._asked_s)


class NvmlBackend:
    """NVIDIA GPUs. See ``DeviceBackend``.

    Args:
        settings: ``count`` (GPUs to manage) and ``memory_bytes`` (of each device).
        count: GPUs that Ray counts on this host; the first of them are managed. None = ``settings.count``.
        library: NVML, started; None = start it.
        visible: Value of ``CUDA_VISIBLE_DEVICES``: which GPUs, and in which order Ray counts them. None = not set.
        processes: The processes of this machine.
        pids: Whose NVML's process numbers are.
        clock: Monotonic seconds.

    Attributes:
        notes: What is worth knowing of GPUs that were left out.

    Raises:
        ValueError: No GPU can be used, or fewer than the setting says; the message names the setting and says why.
    """

    name = "nvml"

    def __init__(
        self,
        settings: DeviceSettings,
        count: int | None = None,
        *,
        library: Library | None = None,
        visible: str | None = None,
        processes: ProcessTable | None = None,
        pids: PidMap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        try:
            self._library = library or Library()
            wanted = settings.count if count is None else count
            found, notes = find_boards(self._library, visible, wanted, settings.memory_bytes)
        except (NvmlUnavailable, NvmlFailure) as error:
            raise ValueError(f"device.backend: 'nvml' is not accepted on this host: {error}") from error
        if not found or (settings.count is not None and settings.count > len(found)):
            why = "; ".join(notes) or f"CUDA_VISIBLE_DEVICES is {visible!r}"
            raise ValueError(f"device.count: {settings.count} is not accepted; this host has {len(found)} GPUs ({why})")
        self.notes: Sequence[str] = tuple(notes)
        now_s = clock()
        self._stations = [_Station(Board(self._library, each.uuid, each.parts, clock), each, now_s) for each in found]
        self._at = {gpu.gpu_id: station for station in self._stations for gpu in station.gpus}
        self._gpus = tuple(sorted((gpu for each in found for gpu in each.gpus), key=lambda gpu: gpu.index))
        self._trees = Trees(processes or ProcessTable())
        self._passes = TreePasses(self._trees, clock)
        self._pids = pids or PidMap()
        self._closed = False

    def discover(self) -> Sequence[GpuInfo]:
        """See ``DeviceBackend.discover``."""
        self._trees.scan()
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
        asked = self._clock()
        wait([pending for station in self._stations if (pending := station.ask(asked)) is not None], WAIT_S)
        for station in self._stations:
            station.take()
        now = self._passes.read()
        readings = {gpu.gpu_id: self._at[gpu.gpu_id].readings(gpu.gpu_id, now) for gpu in self._gpus}
        self._pids.forget({pid for each in readings.values() for pid in named(each.memory, each.shares or {})})
        devices = tuple(self._device_sample(gpu.gpu_id, readings[gpu.gpu_id], now) for gpu in self._gpus)
        return Sample(now, devices, self._job_samples(readings))

    def close(self) -> None:
        """See ``DeviceBackend.close``."""
        for job_id in list(self._trees.jobs):
            self._trees.unwatch(job_id)
        if self._closed:
            return
        self._closed = True
        closed = [station.close() for station in self._stations]
        if all(closed):
            self._library.close()

    def _device_sample(self, gpu_id: str, readings: Readings, now_s: float) -> DeviceSample:
        station = self._at[gpu_id]
        lost, trouble = station.trouble(now_s)
        if lost or trouble:
            return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=lost, note=trouble)
        return DeviceSample(
            gpu_id=gpu_id,
            util=readings.util,
            memory_bytes=readings.memory_bytes,
            note="; ".join(readings.notes),
            activity=readings.activity if station.fresh else None,  # a mean of the time before it counts once
        )

    def _job_samples(self, readings: dict[str, Readings]) -> tuple[JobSample, ...]:
        on: dict[str, list[JobTree]] = {}
        for tree in self._trees.jobs.values():
            for gpu_id in tree.slices:
                on.setdefault(gpu_id, []).append(tree)
        uses = {gpu_id: self._uses(trees, readings[gpu_id]) for gpu_id, trees in on.items()}
        return tuple(
            self._job_sample(tree, gpu_id, uses[gpu_id].get(tree.job_id, Use()))
            for tree in self._trees.jobs.values()
            for gpu_id in tree.slices
        )

    def _uses(self, trees: Sequence[JobTree], readings: Readings) -> dict[str, Use]:
        readable = [tree for tree in trees if tree.readable]
        if not readings.answered or not readable:
            return {}

        def owner(pid: int) -> str | None:
            return next((tree.job_id for tree in trees if self._pids.ours(pid, tree.members) is not None), None)

        told = Told(readings.util, readings.memory_bytes, readings.shares, readings.memory)
        return attribute([tree.job_id for tree in readable], told, owner, self._pids.translates)

    def _job_sample(self, tree: JobTree, gpu_id: str, use: Use) -> JobSample:
        host_s: Reading = tree.host_ns / 1e9 / len(tree.slices) if tree.readable else None
        read_bytes, write_bytes = self._passes.io_bytes(tree) if tree.readable else (None, None)
        return JobSample(
            job_id=tree.job_id,
            gpu_id=gpu_id,
            busy_s=None,
            util=use.util,
            memory_bytes=use.memory_bytes,
            host_busy_s=host_s,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            util_age_s=use.age_s,
            util_source=use.source,
        )
