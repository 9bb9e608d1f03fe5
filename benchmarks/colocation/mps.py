"""A private MPS daemon: its own pipe and log folders, and nothing of it left behind however this program ends.

The daemon detaches itself, so it would outlive a controller that is killed. A watcher process, blocked on a pipe whose
other end only the controller has, ends it then.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
ROOT = Path(__file__).parents[2]
_ASK_S = 15.0
_START_S = 20.0
_QUIT_S = 10.0
# The daemon's sockets lie in the pipe folder; a socket's path may have 107 characters.
_LONGEST_TEMP = 60
_POLL_S = 0.02


class MpsError(RuntimeError):
    """The MPS daemon could not be started or does not answer; says what was tried and what it said."""


class MpsRefused(RuntimeError):
    """The MPS server refuses clients: a fault of one of them is not over until all that share the GPU have ended."""


class MpsDaemon:
    """One control daemon for one GPU.

    Args:
        gpu: UUID of the GPU; None = whatever the environment shows.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu
        self._folder: Path | None = None
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
            [sys.executable, "-m", "benchmarks.colocation.mps", str(self._folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.stop)
        try:
            self._launch(self._folder)
        except BaseException:
            self.stop()
            raise

    def _launch(self, folder: Path) -> None:
        visible = {} if self._gpu is None else {"CUDA_VISIBLE_DEVICES": self._gpu}
        said = folder / "said"
        try:
            # Into a file: a daemon that keeps its output open would hold a pipe open for ever.
            with said.open("wb") as output:
                done = subprocess.run(
                    [CONTROL, "-d"],
                    env={**os.environ, **environment(folder), **visible},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=_START_S,
                    check=False,
                )
        except FileNotFoundError as error:
            raise MpsError(f"{CONTROL} is not on PATH") from error
        except subprocess.TimeoutExpired as error:
            raise MpsError(f"{CONTROL} -d did not return within {_START_S:g} s") from error
        if done.returncode != 0:
            words = said.read_text(encoding="utf-8", errors="replace").strip()
            raise MpsError(f"{CONTROL} -d failed ({done.returncode}): {words or _log(folder)}")
        deadline = time.monotonic() + _START_S
        while True:
            try:
                ask(folder, "get_server_list")
                return
            except MpsError as error:
                if time.monotonic() > deadline:
                    raise MpsError(f"{CONTROL} started, but does not answer: {error}; {_log(folder)}") from error
                time.sleep(_POLL_S)  # there is nothing to wait on before its socket exists

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process a client of this daemon.

        Raises:
            RuntimeError: The daemon has not been started.
        """
        return environment(self._running())

    def servers(self) -> tuple[int, ...]:
        """Process numbers of the servers; none before the first client."""
        return _numbers(ask(self._running(), "get_server_list"))

    def clients(self, server: int) -> tuple[int, ...]:
        """Process numbers of a server's clients."""
        return _numbers(ask(self._running(), f"get_client_list {server}"))

    def check(self) -> None:
        """See whether clients are accepted.

        Raises:
            MpsRefused: A server is in state FAULT.
            MpsError: The daemon does not answer.
        """
        for server in self.servers():
            status = ask(self._running(), f"get_server_status {server}")
            if "FAULT" in status.upper():
                raise MpsRefused(f"MPS server {server} is in state {status}: it refuses clients; {self.log()}")

    def terminate_client(self, pid: int) -> str | None:
        """End a client's GPU work in good order, so that its process can be killed without harm to the others.

        Returns:
            What the daemon says about it; None when ``pid`` is no client.
        """
        for server in self.servers():
            if pid in self.clients(server):
                return ask(self._running(), f"terminate_client {server} {pid}")
        return None

    def log(self) -> str:
        """The last lines of the daemon's logs."""
        return _log(self._running())

    def stop(self) -> None:
        """End the daemon and its servers and remove its folders. May be called at any time, more than once."""
        atexit.unregister(self.stop)
        folder, self._folder = self._folder, None
        if folder is not None:
            end_daemon(folder)
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.stdin is not None:
            watcher.stdin.close()
            watcher.wait()

    def _running(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the MPS daemon has not been started")
        return self._folder


def environment(folder: Path) -> dict[str, str]:
    """Where daemon and clients in this folder meet."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def ask(folder: Path, command: str, timeout_s: float = _ASK_S) -> str:
    """Give the daemon one command and return its answer.

    Raises:
        MpsError: There is no daemon, it does not answer in time, or it refuses the command.
    """
    try:
        done = subprocess.run(
            [CONTROL],
            input=command + "\n",
            env={**os.environ, **environment(folder)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise MpsError(f"{CONTROL} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"{CONTROL}: no answer to {command!r} within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise MpsError(f"{CONTROL}: {command!r} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def end_daemon(folder: Path) -> None:
    """Ask the daemon of this folder to quit, kill what is left of it by number, and remove the folder."""
    processes = _processes(folder)
    if processes:
        with suppress(MpsError):  # killed below if it cannot be asked
            ask(folder, "quit", _QUIT_S)
        deadline = time.monotonic() + _QUIT_S
        for pid in processes:
            if not _gone(pid, deadline) and _is_ours(pid, folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: Path) -> tuple[int, ...]:
    """The daemon and its servers, the daemon last."""
    file = folder / "pipe" / f"{CONTROL}.pid"
    control = _numbers(file.read_text(encoding="ascii")) if file.exists() else ()
    servers: tuple[int, ...] = ()
    with suppress(MpsError):
        servers = _numbers(ask(folder, "get_server_list", 5.0))
    return tuple(pid for pid in (*servers, *control) if _is_ours(pid, folder))


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether a process was started for this folder: a number alone may have been given to another."""
    try:
        return os.fsencode(f"={folder}/pipe") in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _gone(pid: int, deadline: float) -> bool:
    """Wait until a process has ended; False when it has not by the deadline."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(handle)


def _make_folder() -> Path:
    temp = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="ct-mps-", dir=temp if len(temp) <= _LONGEST_TEMP else "/tmp"))
    (folder / "pipe").mkdir()
    (folder / "log").mkdir()
    return folder


def _numbers(answer: str) -> tuple[int, ...]:
    return tuple(int(word) for word in answer.split() if word.isdecimal())


def _log(folder: Path) -> str:
    lines = [
        line
        for file in sorted((folder / "log").glob("*.log"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    ]
    return "its log ends: " + " / ".join(lines) if lines else "it wrote no log"


def main() -> None:
    """Watch over the daemon of the folder that is named: when the pipe closes, end it if it is still there."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the controller's end, however it comes, closes the pipe
    sys.stdin.read()
    folder = Path(sys.argv[1])
    if folder.exists():
        end_daemon(folder)


if __name__ == "__main__":
    main()
