"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right. And a gate gives the same
# answer twice.
settings.register_profile(
    "cotenant", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cotenant")


# Files that take longest, first: begun last, one would keep one core busy while the other has nothing left to do.
LONGEST = (
    "test_retrain",
    "test_tune",
    "test_train_cli",
    "test_starvation",
    "test_guarded",
    "test_demand_mixture",
    "test_demand_experts",
    "test_colocation_workloads",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; the others keep their order. Names that no two processes agree on are refused."""
    unstable = [item.nodeid for item in items if " object at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"the address of an object is no name for a case, give it an id: {unstable[0]}")
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_configure() -> None:
    """Have SIGINT and SIGHUP work in the processes that tests start, whatever started the tests.

    A shell that starts something in the background has SIGINT ignored, ``nohup`` has SIGHUP ignored, and what is
    ignored stays so in every child. What is handled here is not.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
