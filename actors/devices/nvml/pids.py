"""Whose number a process number of NVML is.

The driver counts processes as the host does. In a container with process numbers of its own that is somebody else's
number, or nobody's; some drivers translate the process lists into the container's numbers and not the utilisation
(HAMi-core issue 112). Where the host's ``/proc`` is mounted into the container, ``NSpid`` there translates.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from cotenant.actors.devices.procfs import parse_stat

HOST_PROC = Path("/host/proc")
_PROC = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel


class PidMap:
    """From NVML's process numbers to ours.

    Args:
        proc: This process's ``/proc``.
        host_proc: Where the host's is mounted, if it is.
    """

    def __init__(self, proc: Path = _PROC, host_proc: Path = HOST_PROC) -> None:
        self._proc = proc
        self._host_proc = host_proc
        self.same = (proc / "self/ns/pid").readlink().name == _FIRST_NAMESPACE
        self._depth: int | None = None if self.same else self._own_depth()
        self._known: dict[int, int | None] = {}

    @property
    def translates(self) -> bool:
        """Whether every number can be told."""
        return self.same or self._depth is not None

    def ours(self, pid: int, members: Container[int]) -> int | None:
        """Return our number of a process that NVML names; None when it is nobody's we know.

        Args:
            pid: NVML's number.
            members: Our numbers of the processes that may be meant.
        """
        if self.same:
            return pid if pid in members else None
        if self._depth is not None:
            translated = self._translate(pid, self._depth)
            if translated is not None and translated in members:
                return translated
        return pid if pid in members else None

    def forget(self, still_named: Container[int]) -> None:
        """Forget the processes that NVML does not name any more: their numbers may be given again."""
        self._known = {pid: ours for pid, ours in self._known.items() if pid in still_named}

    def _own_depth(self) -> int | None:
        """How many namespaces deep we are, as the host sees it."""
        numbers = _namespace_pids(self._host_proc / "self/status")
        return len(numbers) - 1 if len(numbers) > 1 else None

    def _translate(self, pid: int, depth: int) -> int | None:
        if pid not in self._known:
            self._known[pid] = self._look_up(pid, depth)
        return self._known[pid]

    def _look_up(self, pid: int, depth: int) -> int | None:
        numbers = _namespace_pids(self._host_proc / str(pid) / "status")
        if len(numbers) <= depth:
            return None
        # Other containers of the same depth have the same numbers: it is ours if it began at the same moment.
        ours = numbers[depth]
        began = [_start_ticks(folder) for folder in (self._host_proc / str(pid), self._proc / str(ours))]
        return ours if began[0] is not None and began[0] == began[1] else None


def _namespace_pids(status: Path) -> list[int]:
    """The process's numbers, from the outermost namespace to its own; empty when it is gone."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return next(([int(number) for number in line.split()[1:]] for line in lines if line.startswith("NSpid:")), [])


def _start_ticks(process: Path) -> int | None:
    try:
        return parse_stat((process / "stat").read_bytes()).start_ticks
    except (OSError, ValueError):
        return None
