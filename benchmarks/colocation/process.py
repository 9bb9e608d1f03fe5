"""A member process as the controller sees it: started, told what to do, listened to, killed with all its helpers."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.colocation.reaper import Reaper

KILL_S = 30.0  # a process that lives so long after SIGKILL is stuck in the kernel
ROOT = Path(__file__).resolve().parents[2]

Failing = Literal["does_not_fit", "hung", "died", "mps_refused"]


@dataclass(frozen=True, slots=True)
class MemberKey:
    """What tells one member process from another.

    Attributes:
        workload: The workload's name.
        instance: 0, or 1, 2 … where a set has the same workload several times.
        environment: What the sharing mode adds to its environment, as sorted pairs.
    """

    workload: str
    instance: int
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.workload if self.instance == 0 else f"{self.workload}.{self.instance}"


class MemberFailure(RuntimeError):
    """A member did not do what it was told.

    Attributes:
        member: The member that failed.
        kind: How it failed.
        message: Its own words, or what was waited for.
    """

    def __init__(self, member: MemberKey, kind: Failing, message: str) -> None:
        super().__init__(f"{member}: {kind}: {message}")
        self.member = member
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Launch:
    """What all members have in common.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        torch_device: Where tensors are, for example ``"cuda:0"``.
        core: The core that is shared, on ``cpu``.
        module: Where the workloads' ``build`` is.
        logs: The folder of their log files.
    """

    device: str
    torch_device: str
    core: int | None
    module: str
    logs: Path

    def command(self, workload: str) -> list[str]:
        """The command line of a member."""
        command = [sys.executable, "-m", "benchmarks.colocation.member", "--workload", workload]
        command += ["--module", self.module, "--device", self.device, "--torch-device", self.torch_device]
        command += ["--parent", str(os.getpid())]
        return command if self.core is None else [*command, "--core", str(self.core)]

    def environment(self, added: Mapping[str, str]) -> dict[str, str]:
        """The environment of a member: ours, one thread for mathematics, this checkout importable."""
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), **added}


class Member:
    """A running member process, in a session of its own so that it can be killed with all its helpers."""

    def __init__(self, key: MemberKey, launch: Launch, reaper: Reaper) -> None:
        self.key = key
        self.ready: dict[str, Any] = {}
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._reaper = reaper
        self.log = launch.logs / f"{key}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command(key.workload),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=launch.environment(dict(key.environment)),
                cwd=ROOT,
                start_new_session=True,
                bufsize=0,
            )
        reaper.watch(self.pid)
        assert self._process.stdout is not None
        self.answers = self._process.stdout.fileno()
        os.set_blocking(self.answers, False)
        self.end = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """The process, which is also its group."""
        return self._process.pid

    def tell(self, **command: Any) -> None:
        """Send a command.

        Raises:
            MemberFailure: It has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode("utf-8") + b"\n")
        except BrokenPipeError:
            raise self.died() from None

    def answer(self) -> dict[str, Any] | None:
        """What it has said, without waiting; None when it has said nothing yet.

        Raises:
            MemberFailure: It reports a failure, has ended, or says what cannot be understood.
        """
        ended = self._ended()  # before reading, so that its last words are heard
        while not self._lines:
            try:
                data = os.read(self.answers, 1 << 16)
            except BlockingIOError:
                if ended:
                    raise self.died() from None
                return None
            if not data:
                raise self.died()
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(whole)
        line = self._lines.popleft()
        try:
            answer: dict[str, Any] = json.loads(line)
            failed = answer["event"] == "error"
        except (ValueError, KeyError, TypeError):
            raise MemberFailure(self.key, "died", f"it said {line[:200]!r}, which is not an answer") from None
        if failed:
            raise MemberFailure(self.key, _failing(answer["kind"], answer["message"]), answer["message"])
        return answer

    def died(self) -> MemberFailure:
        """The failure of a member that ends without saying why, with the last line of its log."""
        self._kill_group()
        if not self._ended(KILL_S):
            return MemberFailure(self.key, "died", "it closed its output and cannot be killed")
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        killed = end.si_code != os.CLD_EXITED
        how = f"signal {signal.Signals(end.si_status).name}" if killed else f"exit code {end.si_status}"
        lines = self.log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
        words = f"; the last line of {self.log.name}: {lines[-1].strip()}" if lines else ""
        return MemberFailure(self.key, "died", f"it ended with {how}{words}")

    def kill(self) -> bool:
        """Kill it with all its helpers and wait until it is gone.

        Returns:
            Whether it is gone. One that is stuck in a driver is not; the reaper goes on watching it.
        """
        self._kill_group()
        gone = self._ended(KILL_S)
        # A helper that was just being started has joined the group by now. The number is not free before the wait.
        self._kill_group()
        if gone:
            self._process.wait()
            self._reaper.forget(self.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        os.close(self.end)
        return gone

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self.end], [], [], within_s)[0])


def wait_for_any(members: Collection[Member], until: float) -> None:
    """Sleep until a member says something or ends, or until a moment of the monotonic clock."""
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.answers, selectors.EVENT_READ)
            selector.register(member.end, selectors.EVENT_READ)
        selector.select(max(0.0, until - time.monotonic()))


def collect(members: Sequence[Member], event: str, deadline: float) -> list[dict[str, Any]]:
    """Wait for one answer of every member.

    Args:
        members: Whom to wait for.
        event: The answer's ``event``.
        deadline: Until when, seconds of the monotonic clock.

    Returns:
        The answers, in the order of the members.

    Raises:
        MemberFailure: One of them failed, or did not answer in time. The others may still be at work.
    """
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(members):
        late = time.monotonic() > deadline
        for index, member in enumerate(members):
            if index in answers or (answer := member.answer()) is None:
                continue
            if answer["event"] != event:
                raise MemberFailure(member.key, "died", f"it said {answer['event']!r} where {event!r} was expected")
            answers[index] = answer
        waiting = [member for index, member in enumerate(members) if index not in answers]
        if waiting and late:
            raise MemberFailure(waiting[0].key, "hung", f"no {event!r} within its time")
        if waiting:
            wait_for_any(waiting, deadline)
    return [answers[index] for index in range(len(members))]


def _failing(kind: str, message: str) -> Failing:
    if kind == "out_of_memory":
        return "does_not_fit"
    return "mps_refused" if "MPS" in message else "died"
