"""Trains models again in the background, in a process of its own that takes only idle time of the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600.0
LEAST_NICE = 19
MODULE = "cotenant.forecasting.training.retrain"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended.

    Attributes:
        kind: What was trained.
        at: When it ended, Unix seconds.
        version: The new version in the registry; None when none came of it.
        adopted: Whether the new version is active now.
        reason: Why, or what went wrong, in words.
        candidate: Metrics of the new model.
        active: Metrics of the one that was active, on the same data.
    """

    kind: str
    at: float
    version: str | None
    adopted: bool
    reason: str
    candidate: Mapping[str, float]
    active: Mapping[str, float]


@dataclass(slots=True)
class _Running:
    kind: str
    why: str
    process: subprocess.Popen[bytes]
    output: Path
    until: float


class Retrainer:
    """Runs one training at a time. Not thread-safe; nothing here ever waits.

    Args:
        every_s: A kind is not trained sooner than this after the start and after the last time.
        folder: Where logs go.
        program: The command before ``--kind``.
        clock: Seconds, for time-outs.
    """

    def __init__(
        self,
        every_s: float,
        folder: Path,
        program: Sequence[str] = (sys.executable, "-m", MODULE),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._folder = folder
        self._program = tuple(program)
        self._clock = clock
        self._running: _Running | None = None
        self._unstarted: Outcome | None = None
        self._begun = clock()
        self._started: dict[str, float] = {}

    @property
    def running(self) -> str:
        """What is being trained and why; empty when nothing is."""
        return f"{self._running.kind}: {self._running.why}" if self._running else ""

    def may_start(self, kind: str) -> bool:
        """Whether nothing is being trained and the last training of this kind began long enough ago."""
        began = self._started.get(kind, self._begun)
        free = self._running is None and self._unstarted is None
        return free and self._clock() - began >= self._every_s

    def start(self, kind: str, why: str, arguments: Sequence[str]) -> None:
        """Start a training; ``may_start`` must hold. What keeps it from being started shows in ``poll``."""
        self._started[kind] = self._clock()
        output = self._folder / f"retrain-{kind}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        parent = ("--parent", str(os.getpid()))  # it ends with this process, however that ends
        command = ("nice", "-n", str(LEAST_NICE), *self._program, "--kind", kind, *parent, *arguments)
        try:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
                )
        except OSError as error:  # no folder, no room, no further process: what serves goes on serving
            self._unstarted = _failed(kind, f"it could not be started: {error}")
            return
        self._running = _Running(kind, why, process, output, self._clock() + TIMEOUT_S)

    def poll(self) -> Outcome | None:
        """Return how the training ended, once; None while it runs and when there is none."""
        unstarted, self._unstarted = self._unstarted, None
        running = self._running
        if running is None:
            return unstarted
        code = running.process.poll()
        if code is None:
            if self._clock() < running.until:
                return None
            self.close()
            return _failed(running.kind, f"ended after {TIMEOUT_S:.0f} s: it took too long")
        self._running = None
        return _outcome(running, code)

    def close(self) -> None:
        """End the training that runs, if any."""
        running, self._running = self._running, None
        if running is not None and running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()


def _outcome(running: _Running, code: int) -> Outcome:
    try:
        lines = running.output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return _failed(running.kind, f"exit code {code}: what it said cannot be read: {error}")
    last = lines[-1] if lines else "it said nothing"
    try:
        told: Any = json.loads(last)
        return Outcome(
            kind=running.kind,
            at=time.time(),
            version=told["version"],
            adopted=bool(told["adopted"]),
            reason=str(told["reason"]),
            candidate={str(name): float(value) for name, value in told["candidate"].items()},
            active={str(name): float(value) for name, value in told["active"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _failed(running.kind, f"exit code {code}: {last} (its log: {running.output})")


def _failed(kind: str, reason: str) -> Outcome:
    return Outcome(kind, time.time(), None, False, f"training failed: {reason}", {}, {})
