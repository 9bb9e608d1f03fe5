"""Which of the windows of a stream are news: the one rule for late windows, duplicates and clocks that jump."""

from __future__ import annotations

import math
from dataclasses import dataclass

RESTART_AFTER = 10  # so many advancing windows from "the past" in a row: the host's clock was set back


@dataclass(slots=True)
class WindowClock:
    """The last accepted window of one stream, and the windows refused as old since then.

    Attributes:
        last_s: Start of the last accepted window, Unix seconds; minus infinity before the first.
        refused: Windows refused in a row since then.
    """

    last_s: float = -math.inf
    _refused_s: float = -math.inf
    refused: int = 0

    def advance(self, start_s: float) -> float | None:
        """Accept what is newer, and a run of advancing windows from the past: there the clock was set back.

        Args:
            start_s: Start of the window, Unix seconds, finite.

        Returns:
            Seconds since the last accepted window: infinite for the first one, negative after a clock was set back;
            None when the window is refused.
        """
        if start_s <= self.last_s:
            self.refused = self.refused + 1 if start_s > self._refused_s else 1
            self._refused_s = start_s
            if self.refused < RESTART_AFTER:
                return None
        elapsed = start_s - self.last_s
        self.last_s, self._refused_s, self.refused = start_s, -math.inf, 0
        return elapsed
