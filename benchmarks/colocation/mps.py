"""A private MPS daemon for a measurement: nothing of it is left behind however this program ends.

The daemon detaches itself, so it would outlive a controller that is killed. A watcher process, blocked on a pipe whose
other end only the controller has, ends it then. How one speaks with a daemon is the product's own business.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cotenant.actors.enforcement import mpscontrol
from cotenant.actors.enforcement.mpscontrol import CONTROL, MpsError

ROOT = Path(__file__).parents[2]
_START_S = mpscontrol.START_S
_QUIT_S = mpscontrol.QUIT_S
# The daemon's sockets lie in the pipe folder; a socket's path may have 107 characters.
_LONGEST_TEMP = 60

__all__ = ["CONTROL", "MpsDaemon", "MpsError", "MpsRefused"]


class MpsRefused(RuntimeError):
    """The MPS server refuses clients: a fault of one of them is not over until all that share the GPU have ended."""


class MpsDaemon:
    """One control daemon for one GPU.

    Args:
        gpu: UUID of the GPU; None = whatever the environment shows.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu
        self._folder: str | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            MpsError: It cannot be started; nothing is left of it.
        """
        if self._folder is not None:
            raise RuntimeError("the MPS daemon has been started already")
        self._folder = _make_folder()
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.colocation.mps", self._folder],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.stop)
        try:
            mpscontrol.start_daemon(self._folder, self._gpu, _START_S)
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process a client of this daemon.

        Raises:
            RuntimeError: The daemon has not been started.
        """
        return mpscontrol.environment(self._running())

    def servers(self) -> tuple[int, ...]:
        """Process numbers of the servers; none before the first client."""
        return mpscontrol.servers(self._running())

    def clients(self, server: int) -> tuple[int, ...]:
        """Process numbers of a server's clients."""
        return mpscontrol.clients(self._running(), server)

    def check(self) -> None:
        """See whether clients are accepted.

        Raises:
            MpsRefused: A server is in state FAULT.
            MpsError: The daemon does not answer.
        """
        fault = mpscontrol.fault(self._running())
        if fault:
            raise MpsRefused(f"{fault}; {self.log()}")

    def terminate_client(self, pid: int) -> str | None:
        """End a client's GPU work in good order, so that its process can be killed without harm to the others.

        Returns:
            What the daemon says about it; None when ``pid`` is no client.
        """
        return mpscontrol.terminate_clients(self._running(), (pid,)).get(pid)

    def log(self) -> str:
        """The last lines of the daemon's logs."""
        return mpscontrol.log_end(self._running())

    def stop(self) -> None:
        """End the daemon and its servers and remove its folders. May be called at any time, more than once."""
        atexit.unregister(self.stop)
        folder, self._folder = self._folder, None
        if folder is not None:
            mpscontrol.end_daemon(folder, _QUIT_S)
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.stdin is not None:
            watcher.stdin.close()
            watcher.wait()

    def _running(self) -> str:
        if self._folder is None:
            raise RuntimeError("the MPS daemon has not been started")
        return self._folder


def _make_folder() -> str:
    temp = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ct-mps-", dir=temp if len(temp) <= _LONGEST_TEMP else "/tmp")


def main() -> None:
    """Watch over the daemon of the folder that is named: when the pipe closes, end it if it is still there."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the controller's end, however it comes, closes the pipe
    sys.stdin.read()
    if Path(sys.argv[1]).exists():
        mpscontrol.end_daemon(sys.argv[1], _QUIT_S)


if __name__ == "__main__":
    main()
