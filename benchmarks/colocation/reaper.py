"""Kills what the controller started when the controller itself is killed.

A small process of its own, blocked on a pipe whose other end only the controller has. The controller names the process
groups it starts and those that are gone. When the pipe closes, what is left is killed; no signal handler can do that
after SIGKILL. Processes that die with their parent would not be enough: the helpers of a member have another parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress


class Reaper:
    """The controller's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def watch(self, group: int) -> None:
        """Kill this process group if the controller ends before it says otherwise."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This group is gone."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the reaper; what it still watches is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed; members still end with the controller
            self._process.stdin.write(line.encode("ascii"))


def main() -> None:
    """Watch until the pipe closes, then kill."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
