"""The MPS control program of one private daemon: starting it, asking it, ending it. Standard library only.

A daemon has a folder of its own with ``pipe`` and ``log`` in it. Everybody who knows the folder can speak with the
daemon: the host agent, the supervisor of a job (which loads this file by its path), the measurement suite.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # importing typing would take a tenth of the time a launch takes
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
ASK_S = 15.0
START_S = 20.0
QUIT_S = 10.0
_KILL_S = 1.0  # until a process that was killed is gone
_POLL_S = 0.02


class MpsError(RuntimeError):
    """The MPS daemon could not be started or does not answer; says what was tried and what it said."""


class MpsSilent(MpsError):
    """It did not answer in time. Whoever asks it again waits again."""


def environment(folder: str) -> dict[str, str]:
    """Where daemon and clients in this folder meet."""
    return {PIPE_VARIABLE: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}


def start_daemon(folder: str, gpu: str | None, start_s: float) -> None:
    """Start a daemon in a folder and wait until it answers.

    Args:
        folder: Its folder; the sockets lie in it, whose paths may have 107 characters.
        gpu: UUID of the GPU it shall serve; None = whatever the environment shows.
        start_s: Longest time for both together.

    Raises:
        MpsError: It cannot be started. What there is of it must be ended with ``end_daemon``.
    """
    for part in ("pipe", "log"):
        os.makedirs(f"{folder}/{part}", mode=0o700, exist_ok=True)
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    said = f"{folder}/said"
    deadline = time.monotonic() + start_s
    # Into a file: a daemon that keeps its output open would hold a pipe open for ever.
    with _running(f"{CONTROL} -d did not return within {start_s:g} s"), open(said, "wb") as output:
        done = subprocess.run(
            [CONTROL, "-d"],
            env={**os.environ, **environment(folder), **visible},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=start_s,
            check=False,
        )
    if done.returncode != 0:
        with open(said, encoding="utf-8", errors="replace") as file:
            words = file.read().strip()
        raise MpsError(f"{CONTROL} -d failed ({done.returncode}): {words or log_end(folder)}")
    while True:
        try:
            ask(folder, "get_server_list", _left_s(deadline))
            return
        except MpsError as error:
            if time.monotonic() > deadline:
                raise type(error)(f"{CONTROL} started, but does not answer: {error}; {log_end(folder)}") from error
            time.sleep(_POLL_S)  # there is nothing to wait on before its socket exists


@contextmanager
def _running(too_late: str) -> Iterator[None]:
    """Say in an ``MpsError`` why the control program did not run, or ``too_late``."""
    try:
        yield
    except FileNotFoundError as error:
        raise MpsError(f"{CONTROL} is not on PATH") from error
    except OSError as error:
        raise MpsError(f"{CONTROL} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise MpsSilent(too_late) from error


def ask(folder: str, command: str, timeout_s: float = ASK_S) -> str:
    """Give the daemon one command and return its answer.

    Raises:
        MpsError: There is no daemon, it does not answer in time (``MpsSilent``), or it refuses the command.
    """
    with _running(f"{CONTROL}: no answer to {command!r} within {timeout_s:g} s"):
        done = subprocess.run(
            [CONTROL],
            input=command + "\n",
            env={**os.environ, **environment(folder)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode != 0:
        raise MpsError(f"{CONTROL}: {command!r} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def servers(folder: str, timeout_s: float = ASK_S) -> tuple[int, ...]:
    """Process numbers of the servers; none before the first client. Raises ``MpsError`` as ``ask`` does."""
    return _numbers(ask(folder, "get_server_list", timeout_s))


def clients(folder: str, server: int, timeout_s: float = ASK_S) -> tuple[int, ...]:
    """Process numbers of a server's clients. Raises ``MpsError`` as ``ask`` does."""
    return _numbers(ask(folder, f"get_client_list {server}", timeout_s))


def fault(folder: str, timeout_s: float = ASK_S) -> str:
    """Say which server refuses clients because of a fault of one of them; empty when none does.

    Raises:
        MpsError: The daemon does not answer, or not within ``timeout_s`` altogether.
    """
    deadline = time.monotonic() + timeout_s
    for server in servers(folder, timeout_s):
        status = ask(folder, f"get_server_status {server}", _left_s(deadline))
        if "FAULT" in status.upper():
            return f"MPS server {server} is in state {status}: it refuses clients"
    return ""


def terminate_clients(folder: str, pids: Collection[int], timeout_s: float = ASK_S) -> dict[int, str]:
    """End the GPU work of clients in good order, so that their processes can be killed without harm to the others.

    Returns:
        What the daemon says about each of ``pids`` that was a client.

    Raises:
        MpsError: The daemon does not answer, or not within ``timeout_s`` altogether.
    """
    deadline = time.monotonic() + timeout_s
    said = {}
    for server in servers(folder, timeout_s):
        for pid in clients(folder, server, _left_s(deadline)):
            if pid not in pids:
                continue
            try:
                said[pid] = ask(folder, f"terminate_client {server} {pid}", _left_s(deadline))
            except MpsSilent:
                raise
            except MpsError as error:  # it has ended by itself; the others shall be ended in good order all the same
                said[pid] = str(error)
    return said


def end_daemon(folder: str, quit_s: float = QUIT_S) -> None:
    """Ask the daemon of this folder to quit, kill what is left of it by number, and remove the folder.

    Args:
        folder: Its folder.
        quit_s: Longest time for it to end by itself; 0 = it is not asked, but killed.
    """
    deadline = time.monotonic() + quit_s
    asks = quit_s > 0 and daemon_process(folder) is not None
    told: tuple[int, ...] = ()
    with suppress(MpsError):
        told = servers(folder, quit_s) if asks else ()
    processes = daemon_processes(folder, told)
    if not asks or not _quits(folder, _left_s(deadline)):
        deadline = time.monotonic()  # there is nothing to wait for
    for pid in processes:
        if not _gone(pid, deadline) and _is_ours(pid, folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    killed = time.monotonic() + _KILL_S
    for pid in processes:
        _gone(pid, killed)
    shutil.rmtree(folder, ignore_errors=True)


def _quits(folder: str, timeout_s: float) -> bool:
    try:
        ask(folder, "quit", timeout_s)
    except MpsError:
        return False
    return True


def daemon_processes(folder: str, told: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Process numbers of what runs for this folder, the daemon last; asks nobody.

    Servers may have outlived their daemon, and a start that was cut short may have left a daemon behind that no file
    tells of.

    Args:
        folder: Its folder.
        told: Servers that the daemon told of.
    """
    daemon = daemon_process(folder)
    found = [int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_part(name)]
    found += [pid for pid in told if pid not in found]
    ours = tuple(pid for pid in found if pid != daemon and _is_ours(pid, folder))
    return ours if daemon is None else (*ours, daemon)


def daemon_process(folder: str) -> int | None:
    """Process number of the daemon of this folder; None when it does not run. Asks nobody."""
    try:
        with open(f"{folder}/pipe/{CONTROL}.pid", encoding="ascii") as file:
            (pid,) = _numbers(file.read())
    except (OSError, ValueError):
        return None
    return pid if _is_ours(pid, folder) else None


def log_end(folder: str) -> str:
    """The last lines of the daemon's logs, for people."""
    lines: list[str] = []
    with suppress(OSError):
        for name in sorted(name for name in os.listdir(f"{folder}/log") if name.endswith(".log")):
            with open(f"{folder}/log/{name}", encoding="utf-8", errors="replace") as file:
                lines += file.read().splitlines()[-3:]
    return "its log ends: " + " / ".join(lines) if lines else "it wrote no log"


def _left_s(deadline: float) -> float:
    """Seconds until then; a moment at least, in which whoever does not answer is found out."""
    return max(_POLL_S, deadline - time.monotonic())


def _is_part(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.path.basename(os.fsdecode(file.read().split(b"\0")[0])) in (CONTROL, SERVER)
    except OSError:
        return False


def _is_ours(pid: int, folder: str) -> bool:
    """Whether a process was started for this folder: a number alone may have been given to another."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fsencode(f"={folder}/pipe") in file.read()
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


def _numbers(answer: str) -> tuple[int, ...]:
    return tuple(int(word) for word in answer.split() if word.isdecimal())
