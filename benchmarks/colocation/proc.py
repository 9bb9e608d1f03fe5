"""What the kernel tells about processes and memory; a reading that it does not give is None."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def process_cpu_s(pid: int) -> float | None:
    """CPU time of a process with all its threads, in seconds; None when it has ended.

    The clock's number is the one that ``clock_getcpuclockid`` of the C library makes from the process number.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def cpu_clock_s(pids: Iterable[int]) -> float | None:
    """Summed CPU time of several processes in seconds; None when one of them has ended."""
    times = [process_cpu_s(pid) for pid in pids]
    known = [seconds for seconds in times if seconds is not None]
    return sum(known) if len(known) == len(times) else None


def run_delay_s() -> float | None:
    """How long the threads of this process were ready to run while their core was taken, in seconds."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return None
    return total * 1e-9


def available_memory_bytes() -> int:
    """Memory that programs can still get without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/meminfo does not say MemAvailable")
