"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right. And a gate gives the same
# answer twice.
settings.register_profile(
    "cotenant", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cotenant")


def pytest_configure() -> None:
    """Have SIGINT and SIGHUP work in the processes that tests start, whatever started the tests.

    A shell that starts something in the background has SIGINT ignored, ``nohup`` has SIGHUP ignored, and what is
    ignored stays so in every child. What is handled here is not.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
