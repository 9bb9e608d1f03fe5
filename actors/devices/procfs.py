"""Reading processes, cores and memory limits from Linux, as cheaply as ten times a second needs.

A process is read through file descriptors that stay open. The kernel binds them to the process and not to its number,
so they fail once the process has been reaped, even when the number was given to another: reading one of them after
the CPU clock (which goes by number) proves whose clock it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 1_000_000_000 // TICKS_PER_S
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_READ_BYTES = 4096


class ProcessStat(NamedTuple):
    """Some fields of ``/proc/PID/stat``.

    ``reaped_ns`` is the CPU time of the children (and theirs) the process has waited for, in steps of 10 ms;
    ``start_ticks`` (since boot) tells two processes with the same number apart.
    """

    parent_pid: int
    session: int
    reaped_ns: int
    start_ticks: int


def parse_stat(raw: bytes) -> ProcessStat:
    """Parse one ``/proc/PID/stat``. The command name may hold blanks and brackets, so count from the last bracket."""
    fields = raw[raw.rindex(b")") + 2 :].split(None, 20)
    return ProcessStat(
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        reaped_ns=(int(fields[13]) + int(fields[14])) * _NS_PER_TICK,
        start_ticks=int(fields[19]),
    )


class Reading(NamedTuple):
    """CPU time since the process started, the cores its main thread may run on, its resident memory (zombie: None)."""

    cpu_ns: int
    cores: set[int]
    rss_bytes: int | None


class Process:
    """One process, held open. Every method but ``close`` raises ``ProcessLookupError`` once it has ended."""

    __slots__ = ("_clock", "_io_fd", "_stat_fd", "_statm_fd", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._io_fd: int | None = None  # opened when it is first asked for
        # The process's CPU clock (CPUCLOCK_SCHED of another process), see clock_getcpuclockid(3): nanoseconds, all
        # threads, including those that have ended.
        self._clock = (~pid << 3) | 2
        try:
            self._statm_fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ProcessLookupError(pid) from error
        try:
            self._stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._statm_fd)
            if isinstance(error, FileNotFoundError):
                raise ProcessLookupError(pid) from error
            raise

    def read(self) -> Reading:
        """Read clock, affinity and memory of the living process or zombie."""
        try:
            cpu_ns = time.clock_gettime_ns(self._clock)
        except OSError as error:
            raise ProcessLookupError(self.pid) from error
        cores = os.sched_getaffinity(self.pid)
        size, resident, _ = os.pread(self._statm_fd, 256, 0).split(maxsplit=2)  # last: it proves the two above
        return Reading(cpu_ns, cores, int(resident) * PAGE_BYTES if int(size) else None)

    def stat(self) -> ProcessStat:
        """Read the process's stat line."""
        return parse_stat(os.pread(self._stat_fd, _READ_BYTES, 0))

    def io_bytes(self) -> tuple[int, int] | None:
        """Return the bytes read and written by system calls, children it has waited for included.

        None when the kernel does not let this process look, as for one that has changed its user, or no descriptor is
        left.
        """
        try:
            if self._io_fd is None:
                self._io_fd = os.open(f"/proc/{self.pid}/io", os.O_RDONLY | os.O_CLOEXEC)
            fields = os.pread(self._io_fd, _READ_BYTES, 0).split(maxsplit=4)
        except FileNotFoundError as error:
            raise ProcessLookupError(self.pid) from error
        except ProcessLookupError:
            raise
        except OSError:  # not permitted, or out of file descriptors
            return None
        return int(fields[1]), int(fields[3])

    def close(self) -> None:
        """Close the descriptors. Call once."""
        os.close(self._statm_fd)
        os.close(self._stat_fd)
        if self._io_fd is not None:
            os.close(self._io_fd)


class ProcessTable:
    """The processes of this machine."""

    def pids(self) -> set[int]:
        """Return the numbers of all processes."""
        return {int(name) for name in os.listdir(_PROC) if name.isdecimal()}  # noqa: PTH208 (five times faster)

    def newest(self) -> int:
        """Return the number that was given last, to a process or a thread; another one: somebody has come."""
        with open("/proc/loadavg", "rb", buffering=0) as file:  # noqa: PTH123 (in every sample)
            return int(file.read(_READ_BYTES).rpartition(b" ")[2])

    def stat(self, pid: int) -> ProcessStat:
        """Read one stat line without keeping the process open; ``ProcessLookupError`` when it is gone."""
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 (on the scan's path)
                return parse_stat(file.read(_READ_BYTES))
        except FileNotFoundError as error:
            raise ProcessLookupError(pid) from error

    def open(self, pid: int) -> Process:
        """Hold a process open; ``ProcessLookupError`` when it is gone."""
        return Process(pid)


class CoreClocks:
    """Busy time of each core from ``/proc/stat``. Counted in steps of 10 ms: good over a second, not over a tenth."""

    def __init__(self) -> None:
        self._fd = os.open(_PROC / "stat", os.O_RDONLY | os.O_CLOEXEC)

    def idle_s(self) -> dict[int, float]:
        """Return the seconds each core has been idle since boot (waiting for input counts as idle)."""
        idle = {}
        for line in self._lines():
            name, *fields = line.split(maxsplit=6)
            idle[int(name[3:])] = (int(fields[3]) + int(fields[4])) / TICKS_PER_S
        return idle

    def _lines(self) -> Iterator[bytes]:
        offset, rest = 0, b""
        while chunk := os.pread(self._fd, _READ_BYTES, offset):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"cpu"):
                    return  # the cores come first
                if not line.startswith(b"cpu "):
                    yield line

    def close(self) -> None:
        """Close the descriptor. Call once."""
        os.close(self._fd)


def memory_total_bytes() -> int:
    """Return the memory of this machine."""
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def memory_limit_bytes(cgroups: Path = _CGROUPS, own: Path = _PROC / "self/cgroup") -> int | None:
    """Return the tightest cgroup memory limit (version 1 or 2) this process is under, None when there is none.

    Args:
        cgroups: Where the cgroup file systems are mounted.
        own: The file that names this process's cgroups.
    """
    limits = []
    for line in own.read_text(encoding="ascii").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # A limit anywhere above holds too. Inside a container the path may not exist: then the mount is the group.
        for folder in (group, *group.parents):
            file = folder / name
            if folder.is_relative_to(root) and file.is_file():
                text = file.read_text(encoding="ascii").strip()
                limits += [int(text)] if text.isdecimal() else []
    # Version 1 says "no limit" by a number larger than any memory.
    return min((limit for limit in limits if limit < memory_total_bytes()), default=None)
