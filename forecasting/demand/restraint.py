"""Restraint: when a forecast that would move goes back to the last value after all.

* A series that stands still goes on doing so or takes a step, and hardly ever does anything between the two. While it
  stands still, a foreseen move much smaller than its usual step is none; and what readings do not resolve never is one.
* What forecasts lose beyond persistence is a budget, as in conservative bandits (Wu et al. 2016): once their discounted
  absolute errors exceed persistence's by more than a small share and a tolerance, persistence speaks until its own
  errors have caught up. Errors below the tolerance decide nothing. Series that stand still between steps have no such
  budget: what persistence loses it loses in a few steps, and before each of them everything else looks worse.
"""

from __future__ import annotations

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Indexes, Rows, grown

STILL_TICKS = 2  # without a move: then a series stands still
PART = 0.75  # of the usual step
STEP_GAIN = 0.1  # of the newest step in the usual one
MEMORY = 0.98  # of errors, per tick
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
        # Discounted absolute errors, of what was said and of persistence, and how many they are.
        self._errors: Array = np.zeros((3, rows, horizons), dtype=np.float32)

    def resize(self, rows: int) -> None:
        """Make room for ``rows`` series."""
        self._last = grown(self._last, 0, rows, np.nan)
        self._step = grown(self._step, 0, rows, 0.0)
        self._still = np.concatenate([self._still, np.zeros(rows - len(self._still), dtype=np.intp)])
        self._errors = grown(self._errors, 1, rows, 0.0)

    def clear(self, row: int) -> None:
        """Forget one series."""
        self._last[row], self._step[row], self._still[row] = np.nan, 0.0, 0
        self._errors[:, row] = 0.0

    def learn(self, rows: Rows, horizon: int, ours: Array, persistence: Array) -> None:
        """Take in the absolute errors (n,) of what had been said for now, and of persistence."""
        if not self._budgeted:
            return
        for i, errors in enumerate((ours, persistence, np.ones_like(ours))):
            self._errors[i, rows, horizon] = np.float32(MEMORY) * self._errors[i, rows, horizon] + errors

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
        if self._budgeted:
            ours, persistence, count = self._errors[:, rows]
            kept |= ours > np.float32(1.0 + MORE) * persistence + tolerance[:, None] * count
        point: Array = np.where(kept, present, wanted)
        return point
