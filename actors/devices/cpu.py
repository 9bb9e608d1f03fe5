"""The ``cpu`` backend: a "GPU" is a slice of real cores and a memory budget; everything is measured, nothing simulated.

A job's processes that are pinned inside the slice are on the device, all others of its process tree are host work.
``docs/devices.md`` says what is measured, how exactly, and where it ends.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cotenant.actors.devices.base import Contexts, DeviceSample, GpuInfo, JobSample, Sample
from cotenant.actors.devices.passes import TreePasses
from cotenant.actors.devices.procfs import (
    CoreClocks,
    ProcessTable,
    memory_limit_bytes,
    memory_total_bytes,
)
from cotenant.actors.devices.tree import JobTree, Trees
from cotenant.configs.settings import DeviceSettings

GPU_TYPE = "cpu-core"
MEMORY_FRACTION = 0.80  # of the host, when no budget is set: the rest is for the system, Ray and helper processes
FOREIGN_PERIOD_S = 1.0
FOREIGN_NOTE_CORES = 0.10  # the clock behind it is exact to 0.03 over a second
_MIN_INTERVAL_S = 0.001


def cpu_gpus(settings: DeviceSettings, host_name: str, count: int | None, cores: Sequence[int]) -> tuple[GpuInfo, ...]:
    """Cut a host's cores and memory into devices.

    Args:
        settings: ``cores_per_gpu`` and ``memory_bytes`` (per device; None = an equal part of 80 % of the host's).
        host_name: Unique per Ray node.
        count: Number of devices; None = as many as the cores give.
        cores: The cores that may be used, in order. Device i takes the i-th slice, counted round and round.

    Raises:
        ValueError: A device larger than the host, or a host name without a letter or digit.
    """
    size = settings.cores_per_gpu
    if size > len(cores):
        raise ValueError(
            f"device.cores_per_gpu: {size} is not accepted; give 1 to {len(cores)}, the cores of this host"
        )
    host = re.sub(r"[^A-Za-z0-9-]+", "-", host_name).strip("-")
    if not host:
        raise ValueError(f"host name: {host_name!r} is not accepted; give one with letters or digits")
    number = count or len(cores) // size
    total = memory_total_bytes()
    usable = min(total, memory_limit_bytes() or total)
    if settings.memory_bytes is not None and settings.memory_bytes > usable:
        raise ValueError(
            f"device.memory_bytes: {settings.memory_bytes} is not accepted; give 1 to {usable}, the memory of this host"
        )
    return tuple(
        GpuInfo(
            gpu_id=f"cpu-{host}-{index}",
            gpu_type=GPU_TYPE,
            index=index,
            memory_bytes=settings.memory_bytes or int(usable * MEMORY_FRACTION) // number,
            visible_env={"CUDA_VISIBLE_DEVICES": ""},
            cores=tuple(sorted(cores[(index * size + k) % len(cores)] for k in range(size))),
            physical_memory_bytes=total,
        )
        for index in range(number)
    )


@dataclass(frozen=True, slots=True)
class _CoreUse:
    """What the cores and the jobs on them had done by ``at_s``."""

    at_s: float
    used_ns: dict[str, int]
    idle_s: dict[int, float]


class CpuBackend:
    """Devices made of this host's cores. See ``DeviceBackend``."""

    name = "cpu"
    notes: Sequence[str] = ()

    def __init__(
        self,
        settings: DeviceSettings,
        host_name: str,
        count: int | None = None,
        *,
        processes: ProcessTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = cpu_gpus(settings, host_name, count, sorted(os.sched_getaffinity(0)))
        self._by_id = {gpu.gpu_id: gpu for gpu in self._gpus}
        self._trees = Trees(processes or ProcessTable())
        self._trees.scan()
        self._passes = TreePasses(self._trees, clock)
        self._core_clocks: CoreClocks | None = CoreClocks()
        self._reused = _reuse_notes(self._gpus)
        self._last: tuple[float, dict[str, int]] | None = None
        self._util: dict[str, float | None] = {gpu.gpu_id: None for gpu in self._gpus}
        self._base: _CoreUse | None = None
        self._foreign: dict[str, str] = {}

    def discover(self) -> Sequence[GpuInfo]:
        """See ``DeviceBackend.discover``."""
        return self._gpus

    def watch(self, job_id: str, gpu_ids: Sequence[str], root_pid: int) -> None:
        """See ``DeviceBackend.watch``."""
        slices = {gpu_id: frozenset(self._by_id[gpu_id].cores) for gpu_id in gpu_ids}
        self._trees.watch(job_id, slices, root_pid)

    def unwatch(self, job_id: str) -> None:
        """See ``DeviceBackend.unwatch``."""
        self._trees.unwatch(job_id)

    def sample(self) -> Sample:
        """See ``DeviceBackend.sample``."""
        now = self._passes.read()
        self._update_devices(now)
        jobs = tuple(self._job_sample(tree, gpu_id) for tree in self._trees.jobs.values() for gpu_id in tree.slices)
        return Sample(now, tuple(self._device_sample(gpu) for gpu in self._gpus), jobs)

    def contexts(self, gpu_ids: Sequence[str], pids: Collection[int]) -> Contexts | None:
        """See ``DeviceBackend.contexts``: such a device has no memory of its own."""
        del gpu_ids, pids
        return None

    def close(self) -> None:
        """See ``DeviceBackend.close``."""
        for job_id in list(self._trees.jobs):
            self._trees.unwatch(job_id)
        if self._core_clocks is not None:
            self._core_clocks.close()
            self._core_clocks = None

    def _update_devices(self, now: float) -> None:
        if self._last is not None and now - self._last[0] < _MIN_INTERVAL_S:
            return
        used = {gpu.gpu_id: self._trees.used_ns(gpu.gpu_id) for gpu in self._gpus}
        if self._last is not None:
            then, used_then = self._last
            for gpu in self._gpus:
                busy_s = (used[gpu.gpu_id] - used_then[gpu.gpu_id]) / 1e9
                self._util[gpu.gpu_id] = busy_s / (len(gpu.cores) * (now - then))
        self._last = (now, used)
        if self._core_clocks is not None and (self._base is None or now - self._base.at_s >= FOREIGN_PERIOD_S):
            self._look_for_foreign_load(_CoreUse(now, used, self._core_clocks.idle_s()))

    def _look_for_foreign_load(self, use: _CoreUse) -> None:
        """Compare what the cores did with what the watched jobs did on them."""
        base, self._base, self._foreign = self._base, use, {}
        if base is None:
            return
        for gpu in self._gpus:
            # A core taken offline has no clock: the comparison below is then false.
            idle_s = sum(use.idle_s.get(core, math.nan) - base.idle_s.get(core, math.nan) for core in gpu.cores)
            # Devices may lie on the same cores: their jobs are no strangers to each other.
            sharing = [other.gpu_id for other in self._gpus if set(other.cores) & set(gpu.cores)]
            own_s = sum(use.used_ns[gpu_id] - base.used_ns[gpu_id] for gpu_id in sharing) / 1e9
            other_cores = len(gpu.cores) - (idle_s + own_s) / (use.at_s - base.at_s)
            if other_cores >= FOREIGN_NOTE_CORES:
                self._foreign[gpu.gpu_id] = f"other work uses {other_cores:.2f} cores of it"

    def _device_sample(self, gpu: GpuInfo) -> DeviceSample:
        notes = [self._reused.get(gpu.gpu_id), self._foreign.get(gpu.gpu_id)]
        return DeviceSample(
            gpu_id=gpu.gpu_id,
            util=self._util[gpu.gpu_id],
            memory_bytes=float(sum(tree.memory_bytes(gpu.gpu_id) for tree in self._trees.jobs.values())),
            note="; ".join(note for note in notes if note),
        )

    def _job_sample(self, tree: JobTree, gpu_id: str) -> JobSample:
        if not tree.readable:
            return JobSample(tree.job_id, gpu_id, busy_s=None, util=None, memory_bytes=None, host_busy_s=None)
        read_bytes, write_bytes = self._passes.io_bytes(tree)
        return JobSample(
            job_id=tree.job_id,
            gpu_id=gpu_id,
            busy_s=tree.device_ns[gpu_id] / 1e9 / len(self._by_id[gpu_id].cores),
            util=None,
            memory_bytes=float(tree.memory_bytes(gpu_id)),
            host_busy_s=tree.host_ns / 1e9 / len(tree.slices),
            read_bytes=read_bytes,
            write_bytes=write_bytes,
        )


def _reuse_notes(gpus: Sequence[GpuInfo]) -> dict[str, str]:
    notes = {}
    for gpu in gpus:
        others = [other.index for other in gpus if other is not gpu and set(other.cores) & set(gpu.cores)]
        if others:
            notes[gpu.gpu_id] = "shares cores with device " + ", ".join(map(str, others))
    return notes
