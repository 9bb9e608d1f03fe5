"""What NVML says of single processes: utilisation that comes slowly and is held, memory from two lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from cotenant.actors.devices.nvml.bounds import fraction, used_bytes
from cotenant.actors.devices.nvml.library import (
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    Asker,
    columns_of,
)

HOLD_S = 1.0  # the driver's longest sampling period: an older value tells nothing about now
UTILISATION = "nvmlDeviceGetProcessUtilization"
# No process had anything to do; processes appeared between nvidia-ml-py's two calls; its way to say "no process".
NOTHING_NEW = frozenset({NOT_FOUND, INSUFFICIENT_SIZE, SUCCESS})
_PLAIN, _CLIENTS = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"
_NO_SUCH_LIST = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})  # then nobody is in it


class Held(NamedTuple):
    """A process's part of the device's time, in [0, 1], and when (monotonic clock) the driver said so."""

    util: float
    came_s: float


class UtilisationHold:
    """Utilisation by process. The driver samples every 1/6 to 1 s, and names only processes that did something.

    Args:
        module: nvidia-ml-py.
        unix: The wall clock, which the driver's time stamps are of: the first answer may have samples of long ago.
    """

    def __init__(self, module: Any, unix: Callable[[], float] = time.time) -> None:
        self._samples = columns_of(module.c_nvmlProcessUtilizationSample_t, "pid", "timeStamp", "smUtil")
        self._unix = unix
        self._seen_us = self._from_now_us(-HOLD_S)
        self._held: dict[int, Held] = {}

    def update(self, asker: Asker, handle: Any, now_s: float) -> None:
        """Ask for what is new."""
        self._follow_clock()
        samples = asker.ask(UTILISATION, handle, self._seen_us, usual=NOTHING_NEW)
        self.take(self._samples(samples or ()), now_s)

    def take(self, samples: Iterable[tuple[Any, ...]], now_s: float) -> None:
        """Take in samples: process, the driver's time stamp in microseconds, per cent of the multiprocessors' time."""
        held = {pid: each for pid, each in self._held.items() if now_s - each.came_s <= HOLD_S}
        changed = len(held) != len(self._held)
        self._follow_clock()
        seen_us, latest_us = self._seen_us, self._from_now_us(HOLD_S)
        for pid, stamp_us, percent in sorted(samples, key=itemgetter(1, 2)):
            # One of later than now cannot be true, and nothing would be new after it.
            if seen_us < stamp_us <= latest_us:
                util = fraction(percent)
                if util is not None:
                    held[pid] = Held(util, now_s)
                    self._seen_us, changed = stamp_us, True
        if changed:  # else the same object: nothing has to be worked out anew
            self._held = held

    def held(self) -> dict[int, Held]:
        """Return what is still of use, by process; not to be changed."""
        return self._held

    def _follow_clock(self) -> None:
        """The wall clock may be set back: what was seen before would be newer than all that comes."""
        if self._seen_us > self._from_now_us(HOLD_S):
            self._seen_us = self._from_now_us(-HOLD_S)

    def _from_now_us(self, seconds: float) -> int:
        return int((self._unix() + seconds) * 1e6)


def utilisation_is_told(asker: Asker) -> bool:
    """Whether the driver tells utilisation by process at all (not with MIG, not to everybody)."""
    return asker.can(UTILISATION)


def read_memory(asker: Asker, handle: Any, total_bytes: int | None) -> dict[int, int | None] | None:
    """Return the device memory of every process on it; None when the lists cannot be read.

    Nor when one of them cannot: who is not in the other may be in that one, which is no 0.
    """
    plain, clients = asker.ask(_PLAIN, handle), asker.ask(_CLIENTS, handle)
    if clients is None and asker.failures[_CLIENTS].code in _NO_SUCH_LIST:
        clients = []
    if plain is None or clients is None:
        return None
    return union(((each.pid, each.usedGpuMemory) for each in (*plain, *clients)), total_bytes)


def union(listed: Iterable[tuple[int, int | None]], total_bytes: int | None) -> dict[int, int | None]:
    """Unite what the lists of plain processes and of MPS clients say: a client may be in either, or in both.

    Args:
        listed: Process and its bytes, None = the driver does not say.
        total_bytes: The device's memory; a process that is said to have more has an unknown amount.
    """
    memory: dict[int, int | None] = {}
    for pid, said in listed:
        known, used = memory.get(pid), used_bytes(said, total_bytes)
        memory[pid] = used if known is None else max(known, used or 0)
    return memory


def named(memory: Mapping[int, int | None] | None, held: Mapping[int, Held]) -> set[int]:
    """Return all processes that NVML names."""
    return {*(memory or ()), *held}
