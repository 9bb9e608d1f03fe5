"""What every check has: its statement, its time, and loads to steer."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.colocation.devices import CpuDevice

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
GIB = 1 << 30
FOREIGN_SHARE = 0.05
SHARE_ERROR = 0.02
_KILL_S = 5.0
Evidence = dict[str, Any]


class Unknown(RuntimeError):
    """A check cannot say whether its statement holds; says why, with what it has seen so far."""

    def __init__(self, why: str, **evidence: Any) -> None:
        super().__init__(why)
        self.evidence: Evidence = {"why": why, **evidence}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: whether its statement holds, and the numbers behind it."""

    holds: bool
    evidence: Evidence


@dataclass(slots=True)
class Context:
    """What a check works with.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        dry_run: Tensors are on the CPU although the device is cuda.
        deadline: When the check must be done, on the monotonic clock.
        identity: What the device said about itself.
        stack: What must be undone at the end of the check.
        loads: Every load it started.
    """

    device: str
    dry_run: bool
    deadline: float
    identity: Evidence = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    loads: list[Load] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device == "cuda" and not self.dry_run

    @property
    def core(self) -> int:
        """The core that is the device on cpu."""
        return min(os.sched_getaffinity(0))

    def needs_gpu(self) -> None:
        """``Unknown`` in a dry run: what is tested there would be the CPU."""
        if not self.on_gpu:
            raise Unknown("a dry run: tensors are on the CPU")

    def left_s(self) -> float:
        """Time left for the check."""
        return max(0.0, self.deadline - time.monotonic())

    def load(self, env: Mapping[str, str] | None = None, core: int | None = None) -> Load:
        """Start a load; it ends with the check. Ask it for ``ready`` before anything else."""
        load = self.stack.enter_context(Load(self, env or {}, core))
        self.loads.append(load)
        return load

    def end_loads(self) -> None:
        """End every load before the check itself ends."""
        for load in self.loads:
            load.kill()


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the device and how to see whether it holds.

    Attributes:
        name: The fact's id.
        statement: What is claimed, as a sentence that holds or does not.
        look: Carries it out; may raise ``Unknown``.
        limit_s: How long it may take.
    """

    name: str
    statement: str
    look: Callable[[Context], Finding]
    limit_s: float = 30.0


class Load:
    """A load process, see ``load_process.py``."""

    def __init__(self, context: Context, env: Mapping[str, str], core: int | None) -> None:
        self._context = context
        self._rest = b""
        size = ["--torch-device", "cuda", "--width", "4096", "--batch", "1024"] if context.on_gpu else []
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.colocation.facts.load_process", *size],
            cwd=ROOT,
            env={**os.environ, **environment(), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def ask(self, cmd: str, **arguments: Any) -> Evidence:
        """Give a command and wait for its answer."""
        self.tell(cmd, **arguments)
        return self.answer()

    def tell(self, cmd: str, **arguments: Any) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"cmd": cmd, **arguments}).encode() + b"\n")

    def answer(self, within_s: float = math.inf) -> Evidence:
        """Wait for one answer; the first is ``ready``.

        Raises:
            Unknown: It ended, or did not answer within the time given or the check's.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + min(within_s, self._context.left_s())
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Unknown("a load did not answer in time")
            chunk = self._process.stdout.read(65536)
            if not chunk:
                raise Unknown(f"a load ended by itself (exit status {self._process.wait()})")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Evidence = json.loads(line)
        return answer

    def ended(self) -> int | None:
        """Wait for its end: the exit status; None when it still runs as the check's time is over."""
        try:
            return self._process.wait(self._context.left_s())
        except subprocess.TimeoutExpired:
            return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL is waited for. Nothing happens when it has ended already."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            if number == signal.SIGKILL:
                with suppress(subprocess.TimeoutExpired):  # stuck in a driver: nothing ends it
                    self._process.wait(_KILL_S)


def environment() -> dict[str, str]:
    """What every process of a check needs: this checkout importable, one thread, the same sums every time."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def share_of_core(load: Load, seconds: float = 2.0, duty: float | None = None, cap: float | None = None) -> float:
    """The share of the device's core that a load uses.

    Args:
        load: The load.
        seconds: How long it is watched.
        duty: The cap it keeps by itself.
        cap: The cap it is held to by others.

    Raises:
        Unknown: Strangers used the core, and the load did not reach its cap: it cannot get more than they leave.
    """
    target = cap if duty is None else duty
    device = CpuDevice()
    device.start_sampling({"load": load.pid})
    answer = load.ask("run", seconds=seconds, duty=duty)
    readings = device.stop_sampling()
    foreign = (readings.foreign_s or 0.0) / readings.seconds
    share = float(answer["cpu_s"] / answer["seconds"])
    if foreign > FOREIGN_SHARE and (target is None or share < target - SHARE_ERROR):
        raise Unknown("strangers used the core", foreign_share=foreign, share=share, duty=duty)
    return share


def state_of(pid: int) -> str:
    """The state letter of a process, ``T`` when it is stopped."""
    return _stat(pid)[0]


def core_of(pid: int) -> int:
    """The core that a process last ran on."""
    return int(_stat(pid)[36])


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third on."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text[text.rindex(")") + 2 :].split()


def wait_for(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Watch a condition without a pause; seconds until it held, None when it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            return None
    return time.monotonic() - began
