"""Keeps Ray's autoscaler told of the size the cluster should have."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.scaling import ScalingMemory, Size, asks_of, decide, loads_of

EVERY_S = 5.0


class Scaler:
    """Looks at what waits and what is idle, every few seconds. Not thread-safe.

    Args:
        resize: Tells Ray.
        clock: Seconds, never going backwards.
    """

    def __init__(self, resize: Callable[[Size], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._resize, self._clock = resize, clock
        self._memory = ScalingMemory()
        self._looked_at: float | None = None

    def look(self, lock: AbstractContextManager[Any], core: Core, now: float) -> None:
        """Tell Ray the size the cluster should have, news or not: nobody answers, and a host agent that is started anew
        holds its GPUs again.

        Args:
            lock: Guards the core.
            core: The core.
            now: Unix seconds.
        """
        settings, at = core.state.configured.scaling, self._clock()
        if not settings.enabled or (self._looked_at is not None and at - self._looked_at < EVERY_S):
            return
        self._looked_at = at
        with lock:
            asks, loads = asks_of(core.state, settings, now), loads_of(core.state)
        size, self._memory = decide(asks, loads, self._memory, settings, now)
        self._resize(size)
