"""How often somebody may ask: a token bucket for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cotenant.scheduler.errors import TooManyRequests

KEPT = 10_000


class RateLimiter:
    """Lets everybody ask ``burst`` times at once, and ``rate`` times a second in the long run. Thread-safe.

    Args:
        rate: Requests per second.
        burst: Requests at once.
        clock: Seconds, monotonic.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # who -> (tokens, when)

    def take(self, who: str) -> None:
        """Count a request.

        Raises:
            TooManyRequests: Not yet; says when.
        """
        now = self._clock()
        with self._lock:
            tokens, at = self._buckets.pop(who, (self._burst, now))
            tokens = min(self._burst, tokens + (now - at) * self._rate)
            allowed = tokens >= 1.0
            self._buckets[who] = (tokens - 1.0 if allowed else tokens, now)  # whoever asked last is last
            while len(self._buckets) > KEPT:
                del self._buckets[next(iter(self._buckets))]
        if not allowed:
            wait_s = (1.0 - tokens) / self._rate
            raise TooManyRequests(f"{who} asks too often: at most {self._rate:g} requests a second", wait_s)
