"""Starts the helper processes of a workload and talks to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.colocation.workloads import helper


class WorkloadError(RuntimeError):
    """A workload cannot go on; the message says which part failed and how."""


def helper_cores() -> set[int]:
    """The cores for helper processes: those of the process that started this one, without the device's core.

    Under the ``cpu`` device this process is pinned to the device's core and the one that started it is not. Where both
    have the same cores (a GPU is the device, or the machine has one core) the helpers get them all.
    """
    own = os.sched_getaffinity(0)
    return os.sched_getaffinity(os.getppid()) - own or own


class Helper:
    """A process that plays one role of `helper`, and dies with the thread that started it.

    Args:
        role: A name in ``helper.ROLES``.
        arguments: The role's arguments.
        inherited: File descriptors that the process keeps.
    """

    def __init__(self, role: str, arguments: dict[str, int | float], inherited: Sequence[int] = ()) -> None:
        self._role = role
        order = {"owner": os.getpid(), "cores": sorted(helper_cores()), "role": role, "arguments": arguments}
        # Isolated and without site packages: nothing of the environment slows the helper's start or changes it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", helper.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=inherited,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """What becomes readable when the helper has answered or ended; for ``select``."""
        return self._answers.fileno()

    def write(self, content: bytes) -> None:
        """Send an order; WorkloadError when the helper has ended."""
        try:
            while content:
                content = content[os.write(self._orders.fileno(), content) :]
        except BrokenPipeError:
            raise self._ended() from None

    def read(self, most: int) -> bytes:
        """Wait for an answer of 1 to ``most`` bytes; WorkloadError when the helper has ended."""
        content = os.read(self._answers.fileno(), most)
        if not content:
            raise self._ended()
        return content

    def read_exactly(self, size: int) -> bytes:
        """Wait for an answer of ``size`` bytes; WorkloadError when the helper ends before."""
        content = self.read(size)
        while len(content) < size:
            content += self.read(size - len(content))
        return content

    def close(self) -> None:
        """End the process; again is fine."""
        self._process.kill()
        self._process.wait()
        self._orders.close()
        self._answers.close()

    def _ended(self) -> WorkloadError:
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return WorkloadError(f"helper process {self.pid} ({self._role}) {how}; the workload has to be built anew")
