"""What a share is a share of: CPU cores, or a CUDA device. How a process gets onto it, what it uses, how it is limited.

torch is never imported here: a process that has a CUDA device has it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .memory import MemoryLimit, lift


class CpuDevice:
    """The cores of a share: threads are pinned to them, time is CPU time, memory is the resident set."""

    __slots__ = ("_cores", "_host_cores", "_memory", "pinned", "width")

    # What the process uses, and what the thread that calls uses meanwhile: holding back is not the program's to pay.
    clock: Callable[[], float] = staticmethod(time.process_time)
    own_clock: Callable[[], float] = staticmethod(time.thread_time)
    limits_early = False  # what led up to the first step is not limited

    def __init__(self, cores: frozenset[int], host_cores: frozenset[int]) -> None:
        self._cores = cores
        self._host_cores = host_cores
        self._memory = MemoryLimit()
        self.pinned = False
        self.width = len(cores)

    def enter(self) -> None:
        """Move every thread onto the device's cores, unless they are there."""
        if os.sched_getaffinity(0) <= self._cores and self.pinned:
            return
        _move_threads(self._cores)
        self.pinned = True

    def limit_memory(self, share_bytes: int) -> bool:
        """Hold the process to this much memory from now on; False when that cannot be done."""
        try:
            self._memory.apply(share_bytes)
        except (OSError, ValueError):
            return False
        return True

    def drain(self) -> None:
        """Wait until the device has nothing more to do for this process: there is nothing to wait for."""

    def leave(self) -> None:
        """Off the device: every thread may run where helpers may, and memory is not limited any more."""
        _move_threads(self._host_cores)
        lift()


class CudaDevice:
    """One GPU of those a process sees: a step is device time as long as it lasts, memory is that of torch's allocator.

    Kernels run behind the program, so before a process is held back its queue is let run empty; otherwise the GPU would
    go on with it. The allocator's limit holds for memory it asks the driver for from now on: what is in use stays, what
    lies idle in its cache is given back first. The CUDA context, and what other libraries allocate, is not in it.
    """

    __slots__ = ("_index", "_total", "_waiting", "_wanted", "pinned", "width")

    clock: Callable[[], float] = staticmethod(time.monotonic)
    own_clock: Callable[[], float] = staticmethod(time.monotonic)
    limits_early = True

    def __init__(self, index: int) -> None:
        self._index = index
        self._total = 0
        self._wanted = 0
        self._waiting = False
        self.pinned = False
        self.width = 1

    def enter(self) -> None:
        """A process is where its ``CUDA_VISIBLE_DEVICES`` puts it."""

    def limit_memory(self, share_bytes: int) -> bool:
        """Hold torch's allocator to this much memory as soon as CUDA is in use; False while it is not."""
        cuda: Any = sys.modules.get("torch.cuda")
        self._wanted = share_bytes
        if cuda is None:
            return False
        if cuda.is_initialized():
            return self._limit(cuda)
        if not self._waiting:
            # Asking it now would make a context, on whatever device; torch calls this when the program makes its own.
            self._waiting = True
            cuda._lazy_call(lambda: self._limit(cuda))
        return False

    def _limit(self, cuda: Any) -> bool:
        try:
            if not self._total:
                self._total = int(cuda.get_device_properties(self._index).total_memory)
            if cuda.memory_reserved(self._index) > self._wanted:
                cuda.empty_cache()
            held = int(cuda.memory_reserved(self._index))
            cuda.set_per_process_memory_fraction(min(1.0, max(self._wanted, held) / self._total), self._index)
        except Exception:  # noqa: BLE001 - another allocator, a device that is not there: the program must not notice
            return False
        return held <= self._wanted

    def drain(self) -> None:
        """Wait until the device has nothing more to do for this process."""
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
            cuda.current_stream().synchronize()

    def leave(self) -> None:
        """Off the share: memory is not limited any more."""
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is not None and cuda.is_initialized() and self._total:
            cuda.set_per_process_memory_fraction(1.0, self._index)


def _move_threads(cores: frozenset[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:
            continue  # the thread has ended meanwhile
