"""What the checks of a GPU share: the NVML reader, MPS for the length of a check, memory of a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.colocation.facts.checks import Context, Unknown
from benchmarks.colocation.gpu import CudaDevice
from benchmarks.colocation.modes import NO_MPS, Mode, MpsMode, modes_for
from benchmarks.colocation.mps import MpsDaemon
from benchmarks.colocation.nvml import GpuReader

PLAIN = dict(NO_MPS)  # the environment of a process that shares the GPU by time-slicing


def opened_device(context: Context) -> CudaDevice:
    """The device that is tested, closed at the end of the check."""
    device = CudaDevice(context.dry_run, context.identity or None)
    context.stack.callback(device.close)
    return device


def opened_reader(context: Context) -> GpuReader:
    """NVML on the device that is tested; ``Unknown`` where there is none."""
    device = opened_device(context)
    if device.reader is None:
        raise Unknown("; ".join(device.notes))
    return device.reader


@contextmanager
def mps_mode(context: Context, name: str = "mps") -> Iterator[tuple[Mode, MpsDaemon]]:
    """A private daemon, ended after all loads of the check; ``Unknown`` where there is no MPS."""
    mode = modes_for(opened_device(context))[name]
    assert isinstance(mode, MpsMode)
    usable, why = mode.available()
    if not usable:
        raise Unknown(why)
    mode.start()
    try:
        yield mode, mode.daemon
    finally:
        context.end_loads()
        mode.stop()


def as_client(mode: Mode, share: float | None = None, memory_bytes: int | None = None) -> dict[str, str]:
    """The environment of a client."""
    return mode.member_env(share, memory_bytes)


def process_bytes(reader: GpuReader, pid: int) -> int | None:
    """Device memory of a process as NVML tells it; None when it does not."""
    return (reader.process_memory() or {}).get(pid)


def context_bytes(total: int | None, reserved: int | None) -> int | None:
    """Device memory of a process beyond what its allocator has."""
    return None if total is None or reserved is None else total - reserved
