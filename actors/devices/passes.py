"""When what is read of the processes of jobs, so that ten times a second costs little."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.actors.devices.tree import SCAN_MAX_S, JobTree, Trees

MAX_PASS_S = 0.005
QUIET_PASSES = 5  # without a scan, whatever the kernel says of new processes
IO_PERIOD_S = 0.5  # often enough for a window of a second, seldom enough to cost nothing


class TreePasses:
    """Reads the process trees of a host's jobs: clocks every time, new processes and file I/O when they are due.

    Args:
        trees: The trees.
        clock: Monotonic seconds.
        period_s: Nothing is read more often than this; 0 = the clocks in every pass.

    Attributes:
        counted: Whether the clocks were read in the present pass.
    """

    def __init__(self, trees: Trees, clock: Callable[[], float], period_s: float = 0.0) -> None:
        self.counted = False
        self._trees = trees
        self._clock = clock
        self._period_s = period_s
        self._next_read_s = 0.0
        self._next_scan_s = 0.0
        self._scan_by_s = 0.0
        self._next_io_s = 0.0
        self._io_read = False  # in the present pass

    def read(self) -> float:
        """Bring all counters up to date; returns the moment they are true of."""
        before = self._clock()
        self.counted = before >= self._next_read_s
        if not self.counted:
            self._io_read = False
            return before
        self._next_read_s = before + self._period_s * 0.9  # passes come a little early or late
        if before >= self._next_scan_s and (before >= self._scan_by_s or not self._trees.quiet()):
            self._next_scan_s = before + self._trees.scan()
            self._scan_by_s = before + max(SCAN_MAX_S, QUIET_PASSES * self._period_s)
            before = self._clock()
        self._io_read = before >= self._next_io_s
        if self._io_read:
            self._next_io_s = before + max(IO_PERIOD_S, 0.9 * self._period_s)
            self._trees.see_io()
            before = self._clock()
        self._trees.read()
        after = self._clock()
        if after - before > MAX_PASS_S:
            # Interrupted while reading, so the moment is uncertain. Counters may be read again without harm.
            before = after
            self._trees.read()
            after = self._clock()
        return (before + after) / 2

    def io_bytes(self, tree: JobTree) -> tuple[float | None, float | None]:
        """Return what a job has read and written, an equal part for each of its devices; None = not in this pass."""
        if not self._io_read or tree.io_bytes is None:
            return None, None
        devices = len(tree.slices)
        return tree.io_bytes[0] / devices, tree.io_bytes[1] / devices
