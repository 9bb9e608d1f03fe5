"""The devices that can be measured: one core of this machine (``cpu``) or one NVIDIA GPU (``cuda``)."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.colocation.readings import Device, DeviceError, MemberReadings, Readings, Ticker, peak

DeviceName = Literal["cpu", "cuda"]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def open_device(name: str, dry_run: bool = False) -> Device:
    """Open a device.

    Args:
        name: ``"cpu"`` or ``"cuda"``.
        dry_run: For cuda: go through everything with tensors on the CPU, with whatever NVML is found.

    Raises:
        DeviceError: Another name, or no such device here.
    """
    if name == "cpu":
        return CpuDevice(dry_run)
    if name == "cuda":
        from benchmarks.colocation.gpu import CudaDevice  # noqa: PLC0415 (nothing of it is needed on cpu)

        return CudaDevice(dry_run)
    raise DeviceError(f"--device: {name!r} is not accepted; give cpu or cuda")


def host_identity() -> dict[str, Any]:
    """The host's part of a data card: host_cores, host_memory_bytes, processor, system."""
    return {
        "host_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES"),
        "processor": _processor(),
        "system": platform.platform(),
    }


class MemberClock:
    """CPU time and resident memory of a living process, through descriptors that stay open.

    Raises:
        ProcessLookupError: The process has ended; from the constructor and from ``read``.
    """

    __slots__ = ("_clock", "_statm")

    def __init__(self, pid: int) -> None:
        # The CPU clock of another process (clock_getcpuclockid(3)): nanoseconds, all its threads.
        self._clock = (~pid << 3) | 2
        try:
            self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ProcessLookupError(pid) from error

    def read(self) -> tuple[int, int]:
        """CPU time in ns and resident memory in bytes."""
        try:
            cpu_ns = time.clock_gettime_ns(self._clock)
        except OSError as error:
            raise ProcessLookupError(str(error)) from error
        # The descriptor is bound to the process, not to its number: reading it last proves whose clock it was.
        resident = int(os.pread(self._statm, 256, 0).split(maxsplit=2)[1])
        return cpu_ns, resident * _PAGE_BYTES

    def close(self) -> None:
        """Close the descriptor. Call once."""
        os.close(self._statm)


class CpuDevice:
    """One core: the first that this process may use. Its helpers use the others."""

    name = "cpu"

    def __init__(self, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.core = min(os.sched_getaffinity(0))
        self._others = os.sched_getaffinity(0) - {self.core}
        self._sampling: _CpuSampling | None = None

    def identity(self) -> dict[str, Any]:
        """See ``Device.identity``; the memory is the host's."""
        host = host_identity()
        return {
            "gpu_type": "cpu-core",
            "gpu_uuid": f"cpu-core-{self.core}",
            "memory_bytes": host["host_memory_bytes"],
            "driver": None,
            "cuda": None,
            **host,
        }

    def member_env(self) -> dict[str, str]:
        """See ``Device.member_env``: no GPU, and one thread in every library."""
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start_sampling(self, pids: Mapping[str, int]) -> None:
        """See ``Device.start_sampling``."""
        if self._sampling is not None:
            raise RuntimeError("sampling has been started already; stop it first")
        self._sampling = _CpuSampling(pids, self.core, self._others)

    def stop_sampling(self) -> Readings:
        """See ``Device.stop_sampling``."""
        if self._sampling is None:
            raise RuntimeError("sampling has not been started")
        sampling, self._sampling = self._sampling, None
        return sampling.end()

    def close(self) -> None:
        """See ``Device.close``."""
        if self._sampling is not None:
            self.stop_sampling()


class _CpuSampling:
    """The readings of one window."""

    def __init__(self, pids: Mapping[str, int], core: int, others: set[int]) -> None:
        self._core = core
        self._others = others
        self._notes: list[str] = []
        self._names = tuple(pids)
        self._clocks: dict[str, MemberClock] = {}
        for name, pid in pids.items():
            try:
                self._clocks[name] = MemberClock(pid)
            except ProcessLookupError:
                self._notes.append(f"{name}: its process had ended before the window")
        self._first: dict[str, tuple[int, int]] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self._utils: dict[str, list[float | None]] = {name: [] for name in pids}
        self._memory: dict[str, int] = {}
        self._idle = core_idle_s(core)
        self._began = time.monotonic()
        self._ticker = Ticker(self._tick, self._leave_core)

    def _leave_core(self) -> None:
        """Keep the sampling thread off the device: it would count as a stranger there."""
        if self._others:
            os.sched_setaffinity(0, self._others)  # 0 = this thread alone

    def _tick(self) -> None:
        for name in tuple(self._clocks):
            try:
                cpu_ns, memory = self._clocks[name].read()
            except ProcessLookupError:
                self._clocks.pop(name).close()
                self._notes.append(f"{name}: its process ended during the window")
                continue
            at_ns = time.monotonic_ns()
            if name in self._last:
                then_ns, cpu_then_ns = self._last[name]
                # 1 ms: two ticks that close say nothing about a share.
                if at_ns - then_ns > 1_000_000:
                    self._utils[name].append((cpu_ns - cpu_then_ns) / (at_ns - then_ns))
            self._first.setdefault(name, (at_ns, cpu_ns))
            self._last[name] = (at_ns, cpu_ns)
            self._memory[name] = max(memory, self._memory.get(name, 0))

    def end(self) -> Readings:
        if not self._ticker.stop():
            raise RuntimeError("the sampler of the cpu device did not stop")
        self._tick()  # the counters at the very end; exact where the tick before was up to a tenth of a second ago
        seconds = time.monotonic() - self._began
        idle_s = core_idle_s(self._core) - self._idle
        for clock in self._clocks.values():
            clock.close()
        used_s = sum((self._last[name][1] - self._first[name][1]) / 1e9 for name in self._last)
        busy_s = max(0.0, seconds - idle_s)
        return Readings(
            members={name: self._member(name) for name in self._names},
            seconds=seconds,
            ticks=self._ticker.ticks,
            cost_s=self._ticker.cost_s,
            device_util=min(1.0, busy_s / seconds),
            foreign_s=max(0.0, busy_s - used_s),
            notes=tuple(self._notes),
        )

    def _member(self, name: str) -> MemberReadings:
        if name not in self._clocks or self._last[name][0] == self._first[name][0]:
            return MemberReadings()
        (began_ns, cpu_began_ns), (ended_ns, cpu_ended_ns) = self._first[name], self._last[name]
        return MemberReadings(
            util_mean=(cpu_ended_ns - cpu_began_ns) / (ended_ns - began_ns),
            util_peak=peak(self._utils[name]),
            memory_bytes=self._memory[name],
            util_age_s=0.0,
        )


def core_idle_s(core: int) -> float:
    """Seconds that a core has been idle since boot, in steps of 10 ms; waiting for input counts as idle."""
    head = f"cpu{core} "
    with Path("/proc/stat").open(encoding="ascii") as file:
        for line in file:
            if line.startswith(head):
                fields = line.split(maxsplit=6)
                return (int(fields[4]) + int(fields[5])) / _TICKS_PER_S
    raise DeviceError(f"core {core}: not in /proc/stat; it may have been taken offline")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
