"""Holding a process to a fraction of its device: a budget of CPU time, settled at step boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable

CREDIT_S = 0.25
MAX_DEBT_S = 5.0


class Throttle:
    """A budget of device time that fills at the rate of the share and empties with the CPU time used.

    It caps what is used, not how fast steps follow each other: a process that waits for its input anyway and stays
    below its share is never delayed, and one that prefetches is held to its share exactly (sleeping in proportion to
    the length of a step overshoots there, because the input is ready when the sleep ends).

    The budget is bounded on both sides: at most ``CREDIT_S`` seconds of device time are saved up while a process idles
    (so that it cannot burst for long at its neighbours' expense), and at most ``MAX_DEBT_S`` are owed after a long
    phase without a step boundary, such as an evaluation (so that it is never stalled for minutes). A process whose
    single steps overdraw by more than ``MAX_DEBT_S`` gets more than its share.
    """

    __slots__ = ("_balance_s", "_clock", "_cpu_at", "_cpu_clock", "_wall_at")

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.restart()

    def restart(self) -> None:
        """Forget credit and debt and count from now on."""
        self._balance_s = 0.0
        self._wall_at = self._clock()
        self._cpu_at = self._cpu_clock()

    def exempt(self, cpu_s: float) -> None:
        """Leave CPU time that was just used out of the account: what holding costs is not the program's to pay.

        Without this a share that is smaller than the cost of looking at the share word would never be balanced.
        """
        self._cpu_at += cpu_s

    def skip(self, wall_s: float, cpu_s: float) -> None:
        """Leave time out of the account in which the process was held still: it neither filled the budget nor used it.

        Args:
            wall_s: Seconds that have passed.
            cpu_s: What of them the device's clock counted all the same.
        """
        self._wall_at += wall_s
        self._cpu_at += cpu_s

    def settle(self, rate: float) -> float:
        """Account for the time since the last call.

        Args:
            rate: CPU seconds per second this process may use: compute share times cores of the device, over the number
                of processes that use the share; > 0.

        Returns:
            Seconds of doing nothing until the budget is balanced; 0 when the process may go on.
        """
        wall, cpu = self._clock(), self._cpu_clock()
        balance = self._balance_s + rate * (wall - self._wall_at) - (cpu - self._cpu_at)
        self._balance_s = min(max(balance, -MAX_DEBT_S), CREDIT_S)
        self._wall_at, self._cpu_at = wall, cpu
        return 0.0 if self._balance_s >= 0.0 else -self._balance_s / rate
