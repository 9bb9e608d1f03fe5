"""Pausing a job's processes and letting them go on: by signals, or by the CUDA driver's checkpoints.

A pause belongs to nobody: another instance, after a restart of the host agent, lets the processes go on just as well,
because what is paused is a property of the processes. Both ways are reversible, keep the program unaware and are
undone when they fail half way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from cotenant.actors import runner
from cotenant.actors.enforcement.checkpoint import ASKED_BY

STOP_TIMEOUT_S = 5.0
CHECKPOINT_TIMEOUT_S = 120.0  # tens of gigabytes go to the host's memory, and a loaded host takes its time
KILLED_S = 5.0  # for a call that was given up to be gone
_POLL_S = 0.01

PauseName = Literal["signal", "checkpoint"]


class PauseError(RuntimeError):
    """The processes could not be paused or let go on; says what failed. They run again where that was possible."""


class TooEarlyError(PauseError):
    """Nothing was tried: the processes cannot be paused yet, but may be later."""


class BrokenError(PauseError):
    """The processes could be neither paused nor brought back: they do not go on by themselves."""


class Pause(Protocol):
    """A way to hold a job's processes still.

    Attributes:
        name: As in ``choice.choose_pause``.
        frees_memory: Whether a paused process gives its device memory back.
    """

    name: PauseName
    frees_memory: bool

    def pause(self, root_pid: int, device_pids: Sequence[int]) -> None:
        """Hold the descendants of ``root_pid`` (its supervisor, which goes on) until ``resume``.

        Args:
            root_pid: Process id of the job's supervisor.
            device_pids: Those of its processes that have a context on a GPU.

        Raises:
            PauseError: It did not work; what had been paused goes on again.
            BrokenError: It did not work, and neither did that.
        """
        ...

    def resume(self, root_pid: int, device_pids: Sequence[int], gpu_mapping: Mapping[str, str] | None = None) -> None:
        """Let the processes go on. What is not paused is left as it is.

        Args:
            root_pid: As for ``pause``.
            device_pids: As for ``pause``.
            gpu_mapping: Old to new UUID of every GPU that the host has, to go on elsewhere (checkpoints only).

        Raises:
            PauseError: A process could not be let go on.
        """
        ...


class SignalPause:
    """SIGSTOP and SIGCONT: on every device, at once, and the device memory stays where it is.

    Work that has been queued on a GPU still runs to its end after the stop.
    """

    name: PauseName = "signal"
    frees_memory = False

    def pause(self, root_pid: int, device_pids: Sequence[int] = ()) -> None:
        """See ``Pause.pause``."""
        del device_pids
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            running = [process for process in runner.descendants(root_pid) if process.state != "T"]
            if not running:
                return  # none is left that could start another
            for process in running:
                runner.send(process, signal.SIGSTOP)
            if time.monotonic() > deadline:
                self.resume(root_pid)
                raise PauseError(
                    f"processes {[p.pid for p in running]} did not stop within {STOP_TIMEOUT_S:g} s of SIGSTOP"
                )
            time.sleep(_POLL_S)

    def resume(
        self, root_pid: int, device_pids: Sequence[int] = (), gpu_mapping: Mapping[str, str] | None = None
    ) -> None:
        """See ``Pause.resume``."""
        del device_pids
        if gpu_mapping:
            raise PauseError("gpu_mapping: a process that was only stopped cannot go on on another GPU")
        for process in runner.descendants(root_pid):
            runner.send(process, signal.SIGCONT)


class CheckpointPause:
    """The driver's checkpoints: device memory moves to the host and the GPU is free of the process until it resumes.

    Not for clients of MPS, MIG instances, unified memory; NCCL often hangs (``cuda.core.checkpoint``, driver 570 and
    later). The calls are made in a process of their own: one that hangs or crashes takes nobody along, and cuda-core is
    imported only there.
    """

    name: PauseName = "checkpoint"
    frees_memory = True

    def __init__(self, timeout_s: float = CHECKPOINT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._signals = SignalPause()

    def missing(self) -> str:
        """Say what is missing for checkpoints on this host; empty when nothing is."""
        try:
            self._call("probe")
        except PauseError as error:
            return str(error)
        return ""

    def pause(self, root_pid: int, device_pids: Sequence[int]) -> None:
        """See ``Pause.pause``. On a GPU none of them runs while one is being moved: all are locked first."""
        if not device_pids:
            self._signals.pause(root_pid)
            return
        try:
            self._call("checkpoint", *device_pids)
        except PauseError as error:
            try:
                self._call("resume", *device_pids)
            except PauseError as second:
                raise BrokenError(f"{error}; the processes could not be brought back: {second}") from error
            raise
        # Last: the driver works through a thread of the process itself, which a signal would stop.
        try:
            self._signals.pause(root_pid)
        except PauseError as error:
            try:
                self.resume(root_pid, device_pids)
            except PauseError as second:
                raise BrokenError(f"{error}; the processes could not be brought back: {second}") from error
            raise

    def resume(self, root_pid: int, device_pids: Sequence[int], gpu_mapping: Mapping[str, str] | None = None) -> None:
        """See ``Pause.resume``."""
        self._signals.resume(root_pid)
        if device_pids:
            mapped = [f"{old}={new}" for old, new in (gpu_mapping or {}).items()]
            self._call("resume", *device_pids, *mapped)

    def _call(self, what: str, *arguments: int | str) -> None:
        command = [sys.executable, "-m", "cotenant.actors.enforcement.checkpoint", what, *map(str, arguments)]
        variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), ASKED_BY: str(os.getpid())}
        asked = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        try:
            _, said = asked.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired as error:
            asked.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nobody waits for that
                asked.communicate(timeout=KILLED_S)
            raise PauseError(f"{what}: the CUDA driver does not answer within {self._timeout_s:g} s") from error
        if asked.returncode != 0:
            said = said.strip().rpartition("\n")[2]
            raise PauseError(f"{what}: {said or f'ended with {asked.returncode}'}")


PAUSES: Mapping[PauseName, type[SignalPause] | type[CheckpointPause]] = {
    "signal": SignalPause,
    "checkpoint": CheckpointPause,
}
