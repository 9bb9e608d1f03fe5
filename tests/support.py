"""Helpers shared by the tests."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, poll_s: float = 0.02) -> None:
    """Wait until ``condition()`` is true; fail the test with ``what`` when it is not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)


def started_by(action: Callable[[], object], name: str) -> list[threading.Thread]:
    """Do something and return the threads of this name that it has started and left: other tests may leave some too."""
    before = set(threading.enumerate())
    action()
    return [thread for thread in set(threading.enumerate()) - before if thread.name == name]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has asked about yet does not.

    A process that was killed by others than its parent ends a moment later: wait for it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def is_locked(folder: str | Path) -> bool:
    """Whether systemd-tmpfiles passes the folder over: it tries to lock it before it looks at what is old there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
