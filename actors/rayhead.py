"""Notices the end of the Ray head that this process has joined."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cotenant.scheduler.errors import CotenantError


@contextmanager
def watched(pid: int, log: str, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While this lasts, end this process with a message should the Ray head end.

    Ray itself waits for the head for a minute and then ends the process without a word that users understand.

    Args:
        pid: The Ray head's.
        log: Where it says why it has ended.
        clean_up: Removes what is left of it.

    Raises:
        CotenantError: It has ended already.
    """
    try:
        head = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise CotenantError(_ended(pid, log)) from error
    over = os.eventfd(0)
    thread = threading.Thread(target=_watch, args=(head, over, _ended(pid, log), clean_up), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(over, 1)
        thread.join()
        os.close(over)
        os.close(head)


def _watch(head: int, over: int, message: str, clean_up: Callable[[], None]) -> None:
    ready, _, _ = select.select([head, over], [], [])
    if over in ready:
        return
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    clean_up()
    os._exit(1)  # the main thread waits for Ray


def _ended(pid: int, log: str) -> str:
    return f"the Ray head (process {pid}) has ended: see {log}; 'cotenant up --local' starts another"
