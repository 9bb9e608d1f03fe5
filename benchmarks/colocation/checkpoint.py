"""Suspending a process and letting it go on: signals on a core, the driver's checkpoint calls on a GPU.

The driver's calls (CUDA driver API, "CUDA Checkpointing", driver 570 and later, Linux) take any process of the same
user: lock waits for its work and blocks further calls, checkpoint moves its device memory to the host and frees the
device, restore and unlock undo the two. They are not for clients of MPS.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.colocation.readings import Device

from cotenant.actors.devices.nvml.watchdog import Hung, Watchdog

LOCK_TIMEOUT_MS = 10_000
CALL_TIMEOUT_S = 60.0
_NOT_INITIALISED = 3
_STATES = ("running", "locked", "checkpointed", "failed")


class CheckpointError(RuntimeError):
    """The process could not be suspended or resumed; says which call failed and how."""


class _LockArguments(ctypes.Structure):
    """``CUcheckpointLockArgs``; what is reserved must be zero."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CudaCheckpoint:
    """The driver's checkpoint calls, through ``libcuda.so.1`` alone.

    Raises:
        CheckpointError: No driver, or one that does not have them.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise CheckpointError(f"no CUDA driver: {error}") from error
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise CheckpointError("this driver has no checkpoint calls; 570 and later have them")
        self._watchdog = Watchdog("the CUDA driver")

    def lock(self, pid: int) -> None:
        """Wait for the process's work on the device and block its further calls."""
        arguments = _LockArguments(timeout_ms=LOCK_TIMEOUT_MS)
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(arguments))

    def checkpoint(self, pid: int) -> None:
        """Move the device memory of a locked process to the host; the device is free of it afterwards."""
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> None:
        """Move it back; the process stays locked."""
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        """Let the process go on."""
        self._call("cuCheckpointProcessUnlock", pid, None)

    def state(self, pid: int) -> str:
        """running, locked, checkpointed or failed."""
        number = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(number))
        return _STATES[number.value] if number.value < len(_STATES) else f"state {number.value}"

    def recover(self, pid: int) -> None:
        """Bring a process back from wherever a failure left it, as far as the driver lets us."""
        if self.state(pid) == "checkpointed":
            self.restore(pid)
        if self.state(pid) == "locked":
            self.unlock(pid)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = self._watchdog.call(CALL_TIMEOUT_S, getattr(self._cuda, name), *arguments)
            if code == _NOT_INITIALISED:
                # Initialising makes no context: nothing of ours is on the device.
                self._watchdog.call(CALL_TIMEOUT_S, self._cuda.cuInit, 0)
                code = self._watchdog.call(CALL_TIMEOUT_S, getattr(self._cuda, name), *arguments)
        except Hung as error:
            raise CheckpointError(f"{name}: {error}") from error
        if code != 0:
            raise CheckpointError(f"{name} failed: {self._name(code)} ({code})")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(code, ctypes.byref(text)) != 0 or text.value is None:
            return "unknown error"
        return text.value.decode("ascii", "replace")


def suspend_times(pid: int, device: Device) -> dict[str, float] | None:
    """Suspend a process, let it go on at once, and say how long both took.

    Args:
        pid: The process, not a client of MPS. It may be at work or wait.
        device: What it runs on.

    Returns:
        Seconds: suspend_s and resume_s; on a GPU also lock_s, checkpoint_s, restore_s and unlock_s. None when this
        device cannot suspend a process (a dry run, or a driver without checkpoint calls).

    Raises:
        CheckpointError: It could be tried and failed; the process was brought back if the driver let us.
        ProcessLookupError: The process has ended.
    """
    if device.name == "cpu":
        return _stop_and_continue(pid)
    if device.dry_run:
        return None
    try:
        driver = CudaCheckpoint()
    except CheckpointError:
        return None
    return checkpoint_and_restore(pid, driver)


def checkpoint_and_restore(
    pid: int, driver: CudaCheckpoint, while_suspended: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The four calls on a process, timed; see ``suspend_times``."""
    times: dict[str, float] = {}
    try:
        times["lock_s"] = _timed(driver.lock, pid)
        times["checkpoint_s"] = _timed(driver.checkpoint, pid)
        while_suspended()
        times["restore_s"] = _timed(driver.restore, pid)
        times["unlock_s"] = _timed(driver.unlock, pid)
    except CheckpointError as error:
        try:
            driver.recover(pid)
        except CheckpointError as second:
            raise CheckpointError(f"{error}; the process could not be brought back: {second}") from error
        raise
    return times | {
        "suspend_s": times["lock_s"] + times["checkpoint_s"],
        "resume_s": times["restore_s"] + times["unlock_s"],
    }


def _timed(call: Callable[[int], None], pid: int) -> float:
    began = time.monotonic()
    call(pid)
    return time.monotonic() - began


def _stop_and_continue(pid: int) -> dict[str, float]:
    """SIGSTOP until the kernel shows every thread stopped, SIGCONT until none is."""
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        suspend_s = _wait_for_threads(pid, began, stopped=True)
    finally:
        resumed = time.monotonic()
        os.kill(pid, signal.SIGCONT)
    return {"suspend_s": suspend_s, "resume_s": _wait_for_threads(pid, resumed, stopped=False)}


def _wait_for_threads(pid: int, began: float, *, stopped: bool) -> float:
    """Watch without a pause: it takes less than a timer's resolution."""
    while any((state == "T") != stopped for state in _thread_states(pid)):
        if time.monotonic() - began > CALL_TIMEOUT_S:
            raise CheckpointError(f"process {pid} did not {'stop' if stopped else 'go on'} within {CALL_TIMEOUT_S:g} s")
    return time.monotonic() - began


def _thread_states(pid: int) -> list[str]:
    """State letters of all threads of a process."""
    states = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (fails at once when there is none)
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended since the folder was read
        states.append(text[text.rindex(")") + 2])
    if not states or set(states) <= {"Z", "X"}:
        raise ProcessLookupError(pid)
    return states
