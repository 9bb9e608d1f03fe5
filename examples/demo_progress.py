"""Whether the demo's jobs still progress: a slow machine may take as long as it needs, one that hangs may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PATIENCE_S = 300.0


class NoProgressError(Exception):
    """Nothing has progressed for so long that the demo gives up."""


class Standing:
    """Jobs progress when one changes its state, starts anew, or makes steps in a window measured since."""

    def __init__(self, mode: str, now: float) -> None:
        self._mode = mode
        self._states: dict[str, tuple[str, int]] = {}
        self._stepped: dict[str, float] = {}
        self._since = now

    def look(self, views: Sequence[Any], now: float) -> None:
        """Take in the jobs as they are.

        Args:
            views: The jobs of the mode.
            now: Seconds on a clock that never jumps.

        Raises:
            NoProgressError: None has progressed for ``PATIENCE_S`` seconds.
        """
        for view in views:
            usage, state = view.usage, (str(view.state), view.epoch)
            stepped = usage.measured_at if usage and usage.step_rate else 0.0
            if state != self._states.get(view.job_id) or stepped > self._stepped.get(view.job_id, 0.0):
                self._since = now
            self._states[view.job_id] = state
            self._stepped[view.job_id] = max(stepped, self._stepped.get(view.job_id, 0.0))
        if now - self._since > PATIENCE_S:
            left = ", ".join(f"{view.name} {view.state}" for view in views if not view.state.terminal)
            raise NoProgressError(f"mode {self._mode}: no job has progressed for {PATIENCE_S:g} s ({left})")
