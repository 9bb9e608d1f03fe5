"""Threads without which an actor is of no use."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable


def start_vital_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Run a loop in a thread. When it fails, the process ends with a traceback, and Ray starts the actor anew.

    An actor that went on without its loop would answer, and look well, but do nothing.
    """

    def run() -> None:
        try:
            target()
        except BaseException:  # noqa: BLE001 - whatever it is, the loop must not end silently
            traceback.print_exc()
            sys.stderr.write(f"cotenant: the {name} thread failed; the process ends and is started anew\n")
            sys.stderr.flush()
            os._exit(1)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
