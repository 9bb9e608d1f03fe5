"""The supervisor of one job's command on a host: ``python -I -S runner.py JOB_DIR``. Standard library only.

It outlives the host agent that started it. It is a session leader and a child subreaper, so every descendant of the
command stays within its reach, daemons included; and the kernel kills the command when the supervisor is killed.

Files in the job directory:
    launch.json   what to run (written by the launcher, readable by the owner only)
    output.log    stdout and stderr of the command, merged, and the supervisor's own last words
    runner.json   pid and start time of the supervisor
    stop.json     grace and reason of a stop request; SIGTERM to the supervisor says that it is there
    exit.json.N   room on the disk for exit.json; N is the pid of the supervisor
    exit.json     exit code and reason, written when no process of the job is left but what is another user's; "lost":
                  the host let the job down

It ends the job when the command ends, when it gets SIGTERM, and when the host agent has not renewed the leases of the
host in time (the file ``renewal`` beside the job directory).
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # importing typing would take a tenth of the time a launch takes
if TYPE_CHECKING:
    from typing import Any

LAUNCH = "launch.json"
OUTPUT = "output.log"
RUNNER = "runner.json"
STOP = "stop.json"  # the shim knows it too
EXIT = "exit.json"
RENEWAL = "renewal"
RENEWAL_LAYOUT = struct.Struct("@d")
LEASE_EXPIRED = (
    "lease expired: not renewed in time, since the host heard nothing from the scheduler for lease.ttl_s, or its agent "
    "did not run; that is no fault of the job"
)
EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 1.0  # longest time between two looks at the renewal
_KILL_AGAIN_S = 0.02
_CONFIRM_EXPIRY = 3
_RESULT_BYTES = 4096  # more than an exit code and a reason take
_TERMINATE_S = 1.0  # an MPS daemon that takes longer is asked no more; what is due then waits for no longer


class Process:
    """A line of the process table. ``start_ticks`` tells a process from a later one with the same pid."""

    __slots__ = ("parent", "pid", "session", "start_ticks", "state")

    def __init__(self, pid: int, parent: int, session: int, state: str, start_ticks: int) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.state = state
        self.start_ticks = start_ticks


def process(pid: int | str) -> Process | None:
    """Return a process, or None when there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(int(pid), int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def process_table() -> list[Process]:
    """Return all processes."""
    found = (process(name) for name in os.listdir("/proc") if name.isdecimal())
    return [entry for entry in found if entry is not None]


def descendants(root: int) -> list[Process]:
    """Return the living processes below ``root``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for entry in process_table():
        children.setdefault(entry.parent, []).append(entry)
    found: list[Process] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += [entry.pid for entry in below]
    return [entry for entry in found if entry.state not in "ZX"]


def send(target: Process, number: int) -> bool:
    """Send a signal to exactly this process; False when it is gone (a reused pid is never hit), or another user's."""
    try:
        descriptor = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    try:
        now = process(target.pid)
        if now is None or now.start_ticks != target.start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write a file that readers see complete or not at all; readable by the owner only."""
    temporary = f"{path}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: str) -> dict[str, Any] | None:
    """Return the content of a JSON file, None when there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return content


class StartError(Exception):
    """The command could not be started; carries the exit code a shell would give."""

    def __init__(self, exit_code: int, reason: str) -> None:
        self.exit_code = exit_code
        super().__init__(reason)


class Supervisor:
    """Runs one command to its end."""

    def __init__(self, job_dir: str) -> None:
        self._dir = job_dir
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._command_pid = 0
        self._exit_code: int | None = None
        self._reason = ""
        self._deadline: float | None = None  # set once the job is ending: when to kill what is left
        self._stopping = False
        self._stopped = False  # asked to end before the command had ended by itself
        self._lost = False  # the host let the job down
        self._out_of_reach = False  # the command has ended, and all that is left is another user's
        self._asked_leftovers = False
        self._mps_folder = ""
        self._detached: set[int] = set()  # processes whose GPU work has been ended

    def run(self, ready: int) -> None:
        """Start the command, tell ``ready`` that the supervisor is up, and stay until nothing of the job is left."""
        launch = self._prepare()
        os.write(ready, b"1")
        os.close(ready)
        try:
            self._command_pid = self._spawn(launch)
        except StartError as error:
            self._finish(error.exit_code, str(error))
            return
        self._grace_s = float(launch["grace_s"])
        self._mps_folder = _mps_folder(launch["env"])
        while self._reap() and not self._out_of_reach:
            self._advance()
            self._await_news()
        exit_code = -signal.SIGKILL if self._exit_code is None else self._exit_code
        self._finish(exit_code, self._reason or _describe(exit_code))

    def _prepare(self) -> dict[str, Any]:
        signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNALS)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # an ignored one would be lost, or take the exit codes with it
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        launch = read_json(f"{self._dir}/{LAUNCH}")
        if launch is None:
            raise FileNotFoundError(f"{self._dir}/{LAUNCH}")
        with open(f"{os.path.dirname(self._dir)}/{RENEWAL}", "rb") as file:
            self._renewal = mmap.mmap(file.fileno(), RENEWAL_LAYOUT.size, access=mmap.ACCESS_READ)
        own = process(os.getpid())
        self._result = _reserve(f"{self._dir}/{EXIT}.{os.getpid()}")
        write_json(f"{self._dir}/{RUNNER}", {"pid": os.getpid(), "start_ticks": own.start_ticks if own else 0})
        _redirect(f"{self._dir}/{OUTPUT}")  # last: what goes wrong before is told to the launcher
        return launch

    # -- starting ---------------------------------------------------------------------------------------------------

    def _spawn(self, launch: dict[str, Any]) -> int:
        """Fork and execute the command.

        Raises:
            StartError: It cannot be executed; nothing runs.
        """
        failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._execute(launch, supervisor)
            except StartError as error:
                os.write(failure_write, json.dumps([error.exit_code, str(error)]).encode())
            except OSError as error:
                os.write(failure_write, json.dumps([EXIT_NOT_EXECUTABLE, f"cannot start: {error}"]).encode())
            finally:
                os._exit(EXIT_NOT_EXECUTABLE)
        os.close(failure_write)
        with os.fdopen(failure_read, "rb") as file:
            failure = file.read()  # ends when the command's image replaces ours
        if failure:
            os.waitpid(pid, 0)
            raise StartError(*json.loads(failure))
        return pid

    def _execute(self, launch: dict[str, Any], supervisor: int) -> None:
        """In the child: become the command."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(EXIT_NOT_EXECUTABLE)  # the supervisor was killed before the kernel knew what to do then
        os.setpgid(0, 0)
        os.sched_setaffinity(0, _device_cores(launch))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them; the command shall not inherit that
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        command, env, cwd = launch["command"], launch["env"], launch["cwd"]
        try:
            os.chdir(cwd)
        except OSError as error:
            raise StartError(EXIT_NOT_EXECUTABLE, f"working directory {cwd!r}: {error.strerror}") from None
        try:
            os.execve(_find(command[0], env), command, env)
        except OSError as error:
            raise StartError(EXIT_NOT_EXECUTABLE, _exec_failure(command[0], error)) from None

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _reap(self) -> bool:
        """Collect what has ended; False when no process of the job is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._command_pid:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _advance(self) -> None:
        """Do what is due now."""
        now = time.monotonic()
        if self._deadline is None and self._exit_code is not None:
            self._deadline = now + self._grace_s
        if self._exit_code is not None and not self._asked_leftovers:
            self._asked_leftovers = True
            self._signal_all(signal.SIGTERM)
        if self._expired(now):
            self._give_up(now, LEASE_EXPIRED)
        elif not os.path.exists(f"{self._dir}/{LAUNCH}"):
            self._give_up(now, "its directory on the host was removed")
        if self._deadline is not None and now >= self._deadline:
            left = self._signal_all(signal.SIGKILL)
            self._out_of_reach = self._exit_code is not None and bool(left) and all(map(_is_anothers, left))

    def _give_up(self, now: float, reason: str) -> None:
        """Kill the job, which has done nothing wrong."""
        self._lost = self._lost or (self._exit_code is None and not self._stopping)
        self._reason = self._reason or reason
        self._deadline = now

    def _await_news(self) -> None:
        """Sleep until a child ends, somebody wants the job to stop, or something is due."""
        now = time.monotonic()
        due = now + _LOOK_S
        if self._deadline is not None:
            due = min(due, max(self._deadline, now + _KILL_AGAIN_S))
        else:
            due = min(due, max(self._valid_until(), now + _KILL_AGAIN_S))
        news = signal.sigtimedwait(_SIGNALS, due - now)
        if news is not None and news.si_signo != signal.SIGCHLD:
            self._stop(news.si_signo)

    def _stop(self, number: int) -> None:
        """Somebody wants the job to end. A second request can only shorten the time that is left."""
        request = read_json(f"{self._dir}/{STOP}") or {}
        deadline = time.monotonic() + float(request.get("grace_s", self._grace_s))
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        if not self._stopping:
            self._stopping = True
            self._reason = self._reason or request.get("reason") or f"stopped by {signal.Signals(number).name}"
            self._lost = self._lost or (self._exit_code is None and bool(request.get("lost")))
            if self._exit_code is None:
                self._stopped = True
                self._detach(signal.SIGTERM)
                self._signal_command(signal.SIGTERM)
                if self._deadline > time.monotonic():
                    self._signal_command(signal.SIGCONT)  # a stopped process takes no SIGTERM

    def _signal_command(self, number: int) -> None:
        try:
            os.killpg(self._command_pid, number)
        except ProcessLookupError:
            os.kill(self._command_pid, number)  # it has made itself a process group of its own
        except PermissionError:
            return  # it has made itself another user's: it is waited for

    def _valid_until(self) -> float:
        return float(RENEWAL_LAYOUT.unpack_from(self._renewal, 0)[0])

    def _expired(self, now: float) -> bool:
        """True when the lease is over; looks again before it says so, as the number might be half written."""
        if now < self._valid_until():
            return False
        for _ in range(_CONFIRM_EXPIRY):
            time.sleep(0.01)
            if now < self._valid_until():
                return False
        return True

    def _detach(self, number: int) -> None:
        """Under MPS, end the GPU work of the processes that this signal will end: what dies with work in flight takes
        its neighbours along.
        """
        if not self._mps_folder:
            return
        dying = {entry.pid for entry in descendants(os.getpid()) if number == signal.SIGKILL or _dies_of(entry, number)}
        if dying <= self._detached:
            return
        self._detached |= dying
        try:
            # Here: a job that is not under MPS does not pay for it. The folder of this file is not on the path.
            sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "enforcement"))
            import mpscontrol  # type: ignore[import-not-found]  # noqa: PLC0415

            mpscontrol.terminate_clients(self._mps_folder, dying, _TERMINATE_S)
        except Exception as error:  # noqa: BLE001 - it ends all the same
            self._mps_folder = ""  # it is not asked again: what is due does not wait twice
            _say(f"its GPU work was not ended in good order: {error}")

    def _signal_all(self, number: int) -> list[Process]:
        self._detach(number)
        found = descendants(os.getpid())
        for entry in found:
            send(entry, number)
            if number == signal.SIGTERM:
                send(entry, signal.SIGCONT)
        return found

    def _finish(self, exit_code: int, reason: str) -> None:
        if exit_code in (EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE) and self._command_pid == 0:
            _say(reason)
        content = {
            "exit_code": int(exit_code),
            "reason": reason,
            "ended_at": time.time(),
            "lost": self._lost,
            "stopped": self._stopped,
        }
        text = json.dumps(content).encode()
        os.pwrite(self._result, text, 0)
        os.ftruncate(self._result, len(text))
        os.replace(f"{self._dir}/{EXIT}.{os.getpid()}", f"{self._dir}/{EXIT}")


def _is_anothers(entry: Process) -> bool:
    """Whether the process lives and takes no signal of ours, as what ``sudo`` has started."""
    try:
        os.kill(entry.pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def _say(text: str) -> None:
    """Add a line to the job's output, if there is room for it on the disk: what is due does not depend on it."""
    try:
        os.write(2, f"cotenant: {text}\n".encode())
    except OSError:
        return


def _reserve(path: str) -> int:
    """Open a file that has its room on the disk already: how a job ends is told even if it has filled the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.posix_fallocate(descriptor, 0, _RESULT_BYTES)
    return descriptor


def _redirect(output: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in {null, log} - {0, 1, 2}:
        os.close(descriptor)


def _device_cores(launch: dict[str, Any]) -> set[int]:
    """Where the command starts: on its devices, whatever program it is; the shim lets helper processes off them."""
    cores = launch["env"].get("COTENANT_CORES", "")
    return {int(core) for part in cores.split(";") for core in part.split(",") if core} or set(launch["host_cores"])


def _mps_folder(env: dict[str, str]) -> str:
    """The folder of the MPS daemon that the job runs under, empty when it does not. Has its control program found."""
    pipe = env.get("CUDA_MPS_PIPE_DIRECTORY", "")
    if not os.path.isdir(pipe):
        return ""
    os.environ["PATH"] = env.get("PATH", "") + os.pathsep + os.defpath
    return os.path.dirname(pipe)


def _dies_of(entry: Process, number: int) -> bool:
    """True unless the process catches or ignores the signal."""
    try:
        with open(f"/proc/{entry.pid}/status", "rb") as file:
            masks = dict(line.split(b":") for line in file if line.startswith((b"SigCgt", b"SigIgn")))
    except OSError:
        return True
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def _find(name: str, env: dict[str, str]) -> str:
    """Find a program as a shell does.

    Raises:
        StartError: There is none, or none that may be executed.
    """
    if not name:
        raise StartError(EXIT_NOT_FOUND, "command: '' is not accepted; give the name of a program")
    if "/" in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder, name) for folder in env.get("PATH", os.defpath).split(os.pathsep)]
    existing = [path for path in candidates if os.path.isfile(path)]
    for path in existing:
        if os.access(path, os.X_OK):
            return path
    if existing:
        raise StartError(EXIT_NOT_EXECUTABLE, f"{existing[0]!r} is not executable")
    if "/" in name and os.path.isdir(name):
        raise StartError(EXIT_NOT_EXECUTABLE, f"{name!r} is a directory")
    where = "" if "/" in name else " in the job's PATH"
    raise StartError(EXIT_NOT_FOUND, f"command not found: {name!r}{where}")


def _exec_failure(name: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"{name!r}: the interpreter its first line names does not exist"
    if error.errno == errno.ENOEXEC:
        return f"{name!r} is neither a program nor a script with an interpreter in its first line"
    return f"{name!r} cannot be executed: {error.strerror}"


def _describe(exit_code: int) -> str:
    if exit_code == 0:
        return ""
    if exit_code > 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def main(job_dir: str) -> int:
    """Leave a supervisor behind that is nobody's child, and return when it is up (0) or has failed (1)."""
    up, ready = os.pipe()
    if os.fork():
        os.close(ready)
        return 0 if os.read(up, 1) else 1
    os.close(up)
    os.setsid()
    Supervisor(job_dir).run(ready)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
