"""Holding a process to a memory share on the ``cpu`` device: the soft limit on its data segment (``RLIMIT_DATA``).

The device memory of a process is its resident set, as the profiler measures it. The kernel limits no resident set, but
it refuses to let private writable memory (``VmData``) grow beyond ``RLIMIT_DATA``. So the limit is set to what the
process has now plus what is left of its share; an allocation that does not fit fails in the process that makes it
(MemoryError, or torch's RuntimeError) and nobody else notices.

The limit is a guard against a runaway, not an exact measure: private writable memory is more than what is resident
(memory mapped but not touched yet, blocks an allocator holds for a moment within a step), so it leaves some slack on
top of the share. Whoever stays above the share within the slack is noticed by the host agent, which has the share grown
where there is room.
"""

from __future__ import annotations

import os
import resource

ORIGINAL = "COTENANT_DATA_LIMIT"
SLACK = 0.25  # of the share
SLACK_BYTES = 256 << 20  # but at least this much


class MemoryLimit:
    """The memory limit of this process.

    The soft limit is inherited by child processes, which must not mistake it for the user's own: the one that was there
    before is handed down in the environment.
    """

    __slots__ = ("_hard", "_original", "_set")

    def __init__(self) -> None:
        soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        self._original = int(os.environ.setdefault(ORIGINAL, str(soft)))
        self._set = soft

    def apply(self, share_bytes: int) -> None:
        """Let the process grow until its resident set has ``share_bytes`` and some slack; never below what it has now.

        Raises:
            OSError: The kernel does not tell or does not accept.
        """
        data, resident = _usage()
        slack = max(SLACK_BYTES, int(SLACK * share_bytes))
        wanted = data + max(share_bytes + slack - resident, 0)
        if self._original != resource.RLIM_INFINITY:
            wanted = min(wanted, self._original)
        if wanted != self._set:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, self._hard))
            self._set = wanted


def lift() -> None:
    """In a helper process: put back the limit that was there before the shim set one."""
    original = os.environ.get(ORIGINAL)
    if original is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(original), hard))


def _usage() -> tuple[int, int]:
    data = resident = 0
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmData:"):
                data = int(line.split()[1]) * 1024
            elif line.startswith(b"VmRSS:"):
                resident = int(line.split()[1]) * 1024
    return data, resident
