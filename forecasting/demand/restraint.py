"""Restraint: when a forecast that would move goes back to the last value after all.

* A series that stands still goes on doing so or takes a step, and hardly ever does anything between the two. While it
  stands still, a foreseen move much smaller than its usual step is none; and what readings do not resolve never is one.
* What forecasts may lose beyond persistence is a budget, as in conservative bandits (Wu et al. 2016): a small share of
  persistence's discounted absolute errors and what was saved before. A move of m loses at most m more than persistence
  does, whatever comes; so no forecast moves farther than what is left once all moves that are still out are taken for
  lost. A series starts with persistence, and what it saves it may risk. Series that stand still between steps have no
  such budget: what persistence loses it loses in a few steps, and before each of them everything else looks worse.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Indexes, Rows, grown

STILL_TICKS = 2  # without a move: then a series stands still
PART = 0.75  # of the usual step
STEP_GAIN = 0.1  # of the newest step in the usual one
MEMORY = 0.998  # of errors, per tick
MORE = 0.03  # than persistence's the errors may be: below the 5 % promised, since the next error is not known
TOLERANCE = 0.5  # resolutions: rounding to the nearest reading


class Restraint:
    """How still each series stands, and what is left of its budget per horizon. Not thread-safe."""

    def __init__(self, rows: int, horizons: int, steps: bool) -> None:
        """Make the state; ``steps`` says whether the series stand still between steps."""
        self._budgeted = not steps
        self._last: Array = np.full(rows, np.nan, dtype=np.float32)
        self._step: Array = np.zeros(rows, dtype=np.float32)
        self._still: Indexes = np.zeros(rows, dtype=np.intp)
        self._saved: Array = np.zeros((rows, horizons), dtype=np.float32)  # discounted, and the share of persistence's
        self._out: Array = np.zeros((rows, horizons), dtype=np.float32)  # moves whose moment has not come

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        self._last = grown(self._last, 0, rows, np.nan)
        self._step = grown(self._step, 0, rows, 0.0)
        self._still = np.concatenate([self._still, np.zeros(rows - len(self._still), dtype=np.intp)])
        self._saved = grown(self._saved, 0, rows, 0.0)
        self._out = grown(self._out, 0, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._last[row], self._step[row], self._still[row] = np.nan, 0.0, 0
        self._saved[row] = self._out[row] = 0.0

    def interrupt(self, rows: Indexes) -> None:
        """What was said of these series is never judged: nothing of it is out any more."""
        self._out[rows] = 0.0

    def learn(self, rows: Rows, horizon: int, *, said: Array, then: Array, now: Array) -> None:
        """Take in what had been said for now (n,), by us and by persistence, and what came."""
        if not self._budgeted:
            return
        more = np.float32(1.0 + MORE) * np.abs(then - now) - np.abs(said - now)
        self._saved[rows, horizon] = np.float32(MEMORY) * self._saved[rows, horizon] + more
        self._out[rows, horizon] = np.maximum(self._out[rows, horizon] - np.abs(said - then), np.float32(0.0))

    def watch(self, rows: Rows, now: Array, resolution: Array) -> None:
        """Take in present values and what the readings resolve, both (n,) in units of the series."""
        step = np.abs(now - self._last[rows])
        moved = step > resolution  # False for the first value of a series
        usual = self._step[rows]
        gain = np.where(usual > 0.0, np.float32(STEP_GAIN), np.float32(1.0))
        self._step[rows] = np.where(moved, usual + gain * (step - usual), usual)
        self._still[rows] = np.where(moved, 0, self._still[rows] + 1)
        self._last[rows] = now

    def point(self, rows: Rows, now: Array, resolution: Array, wanted: Array) -> Array:
        """Return the wanted points (n, horizons), or the present values (n,) where those have to do."""
        tolerance = np.float32(TOLERANCE) * resolution
        still = self._still[rows] >= STILL_TICKS
        least = np.where(still, np.maximum(tolerance, np.float32(PART) * self._step[rows]), tolerance)
        present = now[:, None]
        kept = np.abs(wanted - present) < least[:, None]
        point: Array = np.where(kept, present, wanted)
        if self._budgeted:
            out = self._out[rows]
            left = np.maximum(self._saved[rows] - out, np.float32(0.0))
            np.clip(point, present - left, present + left, out=point)
            self._out[rows] = out + np.abs(point - present)
        return point
