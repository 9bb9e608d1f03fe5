"""A wall clock that never jumps."""

from __future__ import annotations

import time

SLEW = 0.1  # the clock goes at most this much faster or slower than time passes, until it agrees with the system's


class SteadyClock:
    """Unix time that goes on at the pace of the monotonic clock, whatever is done to the system's clock.

    Time-outs, back-offs and fences are counted on it: a jump must neither fire them all nor freeze them. A difference
    from the system's clock is made up for slowly. Not thread-safe.

    Args:
        not_before: Unix seconds the clock starts at when the system's clock is behind that.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._monotonic = time.monotonic()
        self._now = max(time.time(), not_before)

    def now(self) -> float:
        """Return the time, Unix seconds."""
        monotonic = time.monotonic()
        passed = monotonic - self._monotonic
        behind = time.time() - (self._now + passed)
        self._now += passed + max(-SLEW * passed, min(SLEW * passed, behind))
        self._monotonic = monotonic
        return self._now
