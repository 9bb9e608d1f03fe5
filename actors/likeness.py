"""What the host foresees of its jobs from the 10 Hz samples, which the windows sent to the PRM no longer show."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from cotenant.forecasting.demand.hostside import HORIZONS, HostAnalogues
from cotenant.forecasting.types import Reading

Key = tuple[str, str]  # job id, GPU id

FIRST_ROWS = 8
LOOK_BACK = 60  # windows
SETTLED = 2  # windows without a prediction at a job's beginning, and after a gap
FRACTION_DIGITS = 4


@dataclass(slots=True)
class _Series:
    """The samples of one job on one GPU, on the grid.

    Attributes:
        row: Its place in the analogues.
        until_s: Up to when it has samples; NaN = it has none.
        count: Samples since it began.
        waiting: Those of them that the analogues have not taken in.
        anew: It began anew since they last did.
    """

    row: int
    until_s: float = math.nan
    count: int = 0
    waiting: list[float] = field(default_factory=list)
    anew: bool = False

    def take(self, at_s: float, value: float, period_s: float, most: int) -> int:
        """Take in a sample; one that comes more than ``most`` periods after the last begins anew.

        Returns:
            How many samples wait.
        """
        elapsed = (at_s - self.until_s) / period_s
        if abs(elapsed) <= most:
            steps = max(0, round(elapsed))
            self.until_s += steps * period_s
        else:  # also when nothing was known
            self.anew, self.count, steps = True, 0, 1
            self.waiting.clear()
            self.until_s = at_s
        self.count += steps
        self.waiting += [value] * steps
        return len(self.waiting)


class Likeness:
    """Looks for moments alike in the utilisation of a host's jobs, all at once. Not thread-safe.

    Samples are put on an even grid of the sampling period: a late one stands for the periods it missed, an early one
    waits for the next. A job that was not read for longer than a window begins anew.

    Nothing is asked before a window ends, so the samples of one are taken in together, those of all jobs at once: one
    burst of work costs a fraction of ten, each of which finds the processor's caches cold.
    """

    def __init__(self, period_s: float, per_window: int) -> None:
        """Begin without jobs.

        Args:
            period_s: Time between samples.
            per_window: Samples in a window.
        """
        self._period_s, self._per_window = period_s, per_window
        self._analogues = HostAnalogues(FIRST_ROWS, HORIZONS, per_window=per_window, last=LOOK_BACK * per_window)
        self._series: dict[Key, _Series] = {}
        self._size = FIRST_ROWS
        self._free = list(range(FIRST_ROWS - 1, -1, -1))

    def take(self, at_s: float, readings: Mapping[Key, Reading]) -> None:
        """Take in one sample: the utilisation of every job on every GPU since the sample before, in [0, 1]."""
        waiting = 0
        for key, value in readings.items():
            if value is not None:
                waiting = max(waiting, self._of(key).take(at_s, value, self._period_s, self._per_window))
        if waiting >= self._per_window:
            self._work_off()

    def _work_off(self) -> None:
        """Have the analogues take in what waits: at once of jobs with as many samples, which are nearly always all."""
        alike: dict[int, list[_Series]] = {}
        for series in sorted(self._series.values(), key=lambda series: series.row):
            if series.anew:
                self._analogues.clear(series.row)
                series.anew = False
            if series.waiting:
                alike.setdefault(len(series.waiting), []).append(series)
        for group in alike.values():
            rows = np.array([series.row for series in group], dtype=np.intp)
            self._analogues.take(rows, np.array([series.waiting for series in group], dtype=np.float32))
            for series in group:
                series.waiting.clear()

    def foreseen(self, at_s: float) -> dict[Key, tuple[float, ...]]:
        """Return, for jobs read just now, mean utilisation of the windows to come, by horizon and then by expert."""
        self._work_off()
        settled, recent_s = SETTLED * self._per_window, self._per_window * self._period_s
        known = sorted(
            (series.row, key)
            for key, series in self._series.items()
            if series.count >= settled and at_s - series.until_s < recent_s
        )
        if not known:
            return {}
        said = self._analogues.predict(np.array([row for row, _ in known], dtype=np.intp))
        rounded = np.round(said.astype(np.float64), FRACTION_DIGITS).reshape(len(known), -1).tolist()
        return {key: tuple(values) for (_, key), values in zip(known, rounded, strict=True)}

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other jobs."""
        for key in self._series.keys() - set(keys):
            row = self._series.pop(key).row
            self._analogues.clear(row)
            self._free.append(row)

    def _of(self, key: Key) -> _Series:
        series = self._series.get(key)
        if series is None:
            if not self._free:
                self._free.extend(range(2 * self._size - 1, self._size - 1, -1))
                self._size *= 2
                self._analogues.resize(self._size)
            series = self._series[key] = _Series(self._free.pop())
        return series
