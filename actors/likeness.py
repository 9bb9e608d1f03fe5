"""What the host foresees of its jobs from the 10 Hz samples, which the windows sent to the PRM no longer show."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.demand.hostside import HORIZONS, HostAnalogues
from cotenant.forecasting.types import Reading

Key = tuple[str, str]  # job id, GPU id

FIRST_ROWS = 8
LOOK_BACK = 60  # windows
SETTLED = 2  # windows without a prediction at a job's beginning, and after a gap
FRACTION_DIGITS = 4


class Likeness:
    """Looks for moments alike in the utilisation of a host's jobs, all at once. Not thread-safe.

    Samples are put on an even grid of the sampling period: a late one stands for the periods it missed, an early one
    waits for the next. A job that was not read for longer than a window begins anew.

    Nothing is asked before a window ends, so the samples of one are taken in together: one burst of work costs a
    fraction of ten, each of which finds the processor's caches cold.
    """

    def __init__(self, period_s: float, per_window: int) -> None:
        """Begin without jobs.

        Args:
            period_s: Time between samples.
            per_window: Samples in a window.
        """
        self._period_s, self._per_window = period_s, per_window
        self._analogues = HostAnalogues(FIRST_ROWS, HORIZONS, per_window=per_window, last=LOOK_BACK * per_window)
        self._waiting: list[tuple[float, Mapping[Key, Reading]]] = []
        self._rows: dict[Key, int] = {}
        self._free = list(range(FIRST_ROWS - 1, -1, -1))
        self._until: npt.NDArray[np.float64] = np.full(FIRST_ROWS, np.nan)  # up to when each has samples
        self._count: npt.NDArray[np.intp] = np.zeros(FIRST_ROWS, dtype=np.intp)

    def take(self, at_s: float, readings: Mapping[Key, Reading]) -> None:
        """Take in one sample: the utilisation of every job on every GPU since the sample before, in [0, 1]."""
        self._waiting.append((at_s, readings))
        if len(self._waiting) >= self._per_window:
            self._work_off()

    def _work_off(self) -> None:
        for at_s, readings in self._waiting:
            self._learn(at_s, readings)
        self._waiting.clear()

    def _learn(self, at_s: float, readings: Mapping[Key, Reading]) -> None:
        known = {self._row(key): value for key, value in readings.items() if value is not None}
        if not known:
            return
        rows = np.array(sorted(known), dtype=np.intp)
        values = np.array([known[row] for row in rows.tolist()], dtype=np.float32)
        elapsed = (at_s - self._until[rows]) / self._period_s
        anew = ~(np.abs(elapsed) <= self._per_window)  # also when nothing was known
        for row in rows[anew & (self._count[rows] > 0)].tolist():
            self._analogues.clear(row)
            self._count[row] = 0
        steps = np.where(anew, 1, np.round(np.where(anew, 1.0, elapsed))).astype(np.intp)
        self._until[rows] = np.where(anew, at_s, self._until[rows] + steps.clip(0) * self._period_s)
        self._count[rows] += steps.clip(0)
        for done in range(int(steps.max())):
            due = steps > done
            self._analogues.take(rows[due], values[due])

    def foreseen(self, at_s: float) -> dict[Key, tuple[float, ...]]:
        """Return, for jobs read just now, mean utilisation of the windows to come, by horizon and then by expert."""
        self._work_off()
        fresh = (self._count >= SETTLED * self._per_window) & (at_s - self._until < self._per_window * self._period_s)
        keys = sorted((row, key) for key, row in self._rows.items() if fresh[row])
        if not keys:
            return {}
        said = self._analogues.predict(np.array([row for row, _ in keys], dtype=np.intp))
        rounded = np.round(said.astype(np.float64), FRACTION_DIGITS).reshape(len(keys), -1).tolist()
        return {key: tuple(values) for (_, key), values in zip(keys, rounded, strict=True)}

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other jobs."""
        self._work_off()
        for key in self._rows.keys() - set(keys):
            row = self._rows.pop(key)
            self._analogues.clear(row)
            self._until[row], self._count[row] = np.nan, 0
            self._free.append(row)

    def _row(self, key: Key) -> int:
        row = self._rows.get(key)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[key] = self._free.pop()
        return row

    def _grow(self) -> None:
        there = len(self._count)
        self._analogues.resize(2 * there)
        self._until = np.concatenate([self._until, np.full(there, np.nan)])
        self._count = np.concatenate([self._count, np.zeros(there, dtype=np.intp)])
        self._free.extend(range(2 * there - 1, there - 1, -1))
