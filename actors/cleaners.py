"""Cleaners of temporary files, and what they are to leave alone."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def keep_cleaners_off(folder: Path) -> int:
    """Have systemd-tmpfiles pass a folder over, with all that is in it.

    It removes what nobody has touched for days, the record of a job that still runs as well, but nothing below what
    somebody has locked.

    Returns:
        The descriptor that holds the lock, until it is closed or this process ends.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
