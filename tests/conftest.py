"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Have SIGINT work in the processes that tests start, also where a shell started the tests in the background.

    Such a shell has it ignored, and what is ignored stays so in every child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
