"""The first demand forecaster: exponentially weighted histograms, no training.

For every job and horizon the forecaster keeps a histogram of past windows in which a window counts half as much after
the half-life of that horizon. The quantiles of the histogram are the forecast: what the job did recently, on the time
scale of the question, it is expected to do again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.demand.hostside import Foreseen
from cotenant.forecasting.types import HORIZONS_S, LEVELS, Forecast, Quantiles, Signature
from cotenant.forecasting.windows import usable_memory, usable_util, usable_window

# A question about the next second is answered from the last seconds, one about the next quarter of an hour from the
# last quarter. The short ones were compared on recorded series (benchmarks/forecast.py): shorter still follows
# steps faster, but its 95th percentile is exceeded more often.
HALF_LIVES_S: dict[int, float] = {1: 2.0, 2: 4.0, 5: 10.0, 60: 60.0, 300: 300.0, 900: 900.0}

PEAK_MARGIN_FIRST = 0.25  # on the peak memory after a single window …
PEAK_MARGIN_LEAST = 0.02  # … shrinking towards this while the peak holds

_BINS = 64
_FORGOTTEN = 44.0  # e^44, 64 half-lives: what lies further back weighs nothing in float32
_RESCALE_ABOVE = 1e9  # weights grow instead of all old ones shrinking; float32 keeps 7 digits
_RESTART_AFTER = 10  # so many advancing windows from "the past" in a row: the host's clock was set back

_LEVELS = np.array(LEVELS)
_ALL_HORIZONS = np.arange(len(HORIZONS_S))[None, :]
_CHUNK = 256  # jobs whose histograms fit the processor's cache together

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]


@dataclass(slots=True)
class _Clock:
    """The last accepted window of a job on one GPU, and the windows refused as old since then."""

    last_s: float = -math.inf
    refused_s: float = -math.inf
    refused: int = 0

    def accepts(self, start_s: float) -> bool:
        """Accept what is newer; also a run of advancing windows from the past: there the clock was set back."""
        if start_s <= self.last_s:
            self.refused = self.refused + 1 if start_s > self.refused_s else 1
            self.refused_s = start_s
            if self.refused < _RESTART_AFTER:
                return False
        self.last_s, self.refused, self.refused_s = start_s, 0, -math.inf
        return True


@dataclass(slots=True)
class _Job:
    slot: int
    trains: bool = False
    clocks: dict[str, _Clock] = field(default_factory=dict)


class _Histograms:
    """One exponentially weighted histogram per row and horizon, over [0, top of the row]."""

    def __init__(self, rows: int) -> None:
        self.weights = np.zeros((rows, len(HORIZONS_S), _BINS), dtype=np.float32)
        self.top: Floats = np.ones(rows)
        self.least: Floats = np.full(rows, np.inf)
        self.most: Floats = np.full(rows, -np.inf)

    def grow(self, rows: int) -> None:
        bigger = _Histograms(rows)
        used = len(self.top)
        for name in ("weights", "top", "least", "most"):
            getattr(bigger, name)[:used] = getattr(self, name)
            setattr(self, name, getattr(bigger, name))

    def clear(self, row: int) -> None:
        self.weights[row] = 0.0
        self.top[row], self.least[row], self.most[row] = 1.0, np.inf, -np.inf

    def add(self, rows: Indexes, values: Floats, weights: Floats) -> None:
        """Add one value per (distinct) row with its weight per horizon; the range doubles until the value fits."""
        outside = values > self.top[rows]
        while outside.any():
            narrow = rows[outside]
            merged = self.weights[narrow, :, 0::2] + self.weights[narrow, :, 1::2]
            self.weights[narrow, :, : _BINS // 2] = merged
            self.weights[narrow, :, _BINS // 2 :] = 0.0
            self.top[narrow] *= 2.0
            outside = values > self.top[rows]
        bins = np.minimum((values / self.top[rows] * _BINS).astype(np.intp), _BINS - 1)
        self.weights[rows[:, None], _ALL_HORIZONS, bins[:, None]] += weights
        self.least[rows] = np.minimum(self.least[rows], values)
        self.most[rows] = np.maximum(self.most[rows], values)

    def quantiles(self, rows: Indexes) -> Floats:
        """Return values of shape (rows, horizons, levels), linear inside a bin, never outside what was seen."""
        sums = np.zeros((len(rows), len(HORIZONS_S), _BINS + 1))
        np.cumsum(self.weights[rows], axis=2, out=sums[:, :, 1:])
        wanted = sums[:, :, -1:] * _LEVELS
        index = (sums[:, :, None, 1:-1] < wanted[:, :, :, None]).sum(axis=3)
        lower = np.take_along_axis(sums, index, axis=2)
        upper = np.take_along_axis(sums, index + 1, axis=2)
        inside = np.minimum((wanted - lower) / np.maximum(upper - lower, 1e-300), 1.0)
        values = (index + inside) * (self.top[rows] / _BINS)[:, None, None]
        clipped: Floats = np.clip(values, self.least[rows][:, None, None], self.most[rows][:, None, None])
        return clipped


class EwQuantileForecaster:
    """Quantiles of utilisation and memory from exponentially weighted history (see ``DemandForecaster``).

    * Utilisation is demand: a window in which the job was held back by its own share is corrected (``uncensored``).
      A window slowed down by neighbours is not: the device does not say by how much.
    * With a job's first optimizer step its utilisation so far is forgotten: starting up is no sign of what comes.
    * A job on several GPUs has one histogram fed by all of them: its forecast is per GPU.
    * ``peak_memory_bytes`` is the largest memory seen plus a margin, 25 % after one window and shrinking towards
      2 % with the square root of the number of windows since the peak last grew.
    * Windows that are out of order, duplicated, empty, absurd or without any reading are ignored. When a host's clock
      is set back, its windows are ignored until ten of them have advanced, then time goes on from there.
    * A forecast exists once utilisation or memory was read. What was never read is not in it.

    Cost per window: constant. Memory per job: 3 KiB. Not thread-safe.
    """

    name = "ew-quantile"

    def __init__(self) -> None:
        slots = 64
        self._jobs: dict[str, _Job] = {}
        self._free: list[int] = list(range(slots - 1, -1, -1))
        self._rates: Floats = math.log(2.0) / np.array([HALF_LIVES_S[h] for h in HORIZONS_S])
        self._scale: Floats = np.ones((slots, len(HORIZONS_S)))
        self._time: Floats = np.full(slots, -np.inf)
        self._windows = np.zeros(slots, dtype=np.int64)
        self._holds = np.zeros(slots, dtype=np.int64)
        self._peak: Floats = np.zeros(slots)
        self._histograms = _Histograms(2 * slots)  # row 2 · slot: utilisation, row 2 · slot + 1: memory

    def observe(self, signature: Signature) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored, never fatal."""
        self.observe_batch((signature,))

    def observe_batch(self, signatures: Sequence[Signature], foreseen: Foreseen | None = None) -> None:
        """Take in many windows at once, in order; much cheaper than one by one. What hosts foresaw is not used."""
        for rows in self._rounds(signatures):
            self._take(np.array(rows, dtype=np.float64))

    def forecast(self, job_id: str) -> Forecast | None:
        """Return the forecast of a job, or None when nothing usable was observed yet."""
        return self.forecast_batch((job_id,)).get(job_id)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        """Return the forecasts of those of the jobs that have one; much cheaper than one by one."""
        known = [(job_id, job.slot) for job_id in job_ids if (job := self._jobs.get(job_id)) and self._read(job.slot)]
        forecasts: dict[str, Forecast] = {}
        for start in range(0, len(known), _CHUNK):
            chunk = known[start : start + _CHUNK]
            slots = np.array([slot for _, slot in chunk], dtype=np.intp)
            rows = np.stack([2 * slots, 2 * slots + 1], axis=1).ravel()
            seen = np.isfinite(self._histograms.most[rows])
            values = self._histograms.quantiles(rows).tolist()
            for i, (job_id, slot) in enumerate(chunk):
                forecasts[job_id] = Forecast(
                    job_id=job_id,
                    util=_by_horizon(values[2 * i]) if seen[2 * i] else {},
                    memory=_by_horizon(values[2 * i + 1]) if seen[2 * i + 1] else {},
                    peak_memory_bytes=self._expected_peak(slot),
                    windows=int(self._windows[slot]),
                )
        return forecasts

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended. Unknown ids are ignored."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        slot = job.slot
        self._histograms.clear(2 * slot)
        self._histograms.clear(2 * slot + 1)
        self._scale[slot], self._time[slot] = 1.0, -np.inf
        self._windows[slot] = self._holds[slot] = 0
        self._peak[slot] = 0.0
        self._free.append(slot)

    def _read(self, slot: int) -> bool:
        return bool(np.isfinite(self._histograms.most[2 * slot : 2 * slot + 2]).any())

    def _expected_peak(self, slot: int) -> float:
        margin = PEAK_MARGIN_LEAST + (PEAK_MARGIN_FIRST - PEAK_MARGIN_LEAST) / math.sqrt(max(1, self._holds[slot]))
        return float(self._peak[slot]) * (1.0 + margin)

    def _rounds(self, signatures: Sequence[Signature]) -> Iterator[list[tuple[float, ...]]]:
        """Yield rows (slot, time, util, memory, peak; NaN = missing) such that a round has every slot at most once."""
        rows: list[tuple[float, ...]] = []
        slots: set[int] = set()
        for signature in signatures:
            util, memory = usable_util(signature), usable_memory(signature)
            if not usable_window(signature) or (util is None and memory is None):
                continue
            job = self._jobs.get(signature.job_id) or self._new_job(signature.job_id)
            if not job.clocks.setdefault(signature.gpu_id, _Clock()).accepts(signature.start_s):
                continue
            if job.slot in slots:
                yield rows
                rows, slots = [], set()
            if signature.step_rate and not job.trains:
                job.trains = True
                self._histograms.clear(2 * job.slot)
            slots.add(job.slot)
            at_end, peak = memory or (math.nan, math.nan)
            rows.append((job.slot, signature.start_s, math.nan if util is None else util, at_end, peak))
        if rows:
            yield rows

    def _new_job(self, job_id: str) -> _Job:
        if not self._free:
            self._grow()
        job = self._jobs[job_id] = _Job(self._free.pop())
        return job

    def _grow(self) -> None:
        used = len(self._time)
        self._histograms.grow(4 * used)
        self._scale = np.concatenate([self._scale, np.ones_like(self._scale)])
        self._time = np.concatenate([self._time, np.full(used, -np.inf)])
        self._windows = np.concatenate([self._windows, np.zeros_like(self._windows)])
        self._holds = np.concatenate([self._holds, np.zeros_like(self._holds)])
        self._peak = np.concatenate([self._peak, np.zeros(used)])
        self._free.extend(range(2 * used - 1, used - 1, -1))

    def _take(self, rows: Floats) -> None:
        slots = rows[:, 0].astype(np.intp)
        start, util, memory, peak = rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4]
        self._age(slots, start)
        self._windows[slots] += 1
        scale = self._scale[slots]
        seen = np.isfinite(util)
        self._histograms.add(2 * slots[seen], util[seen], scale[seen])
        seen = np.isfinite(memory)
        self._histograms.add(2 * slots[seen] + 1, memory[seen], scale[seen])
        slots, peak = slots[seen], peak[seen]
        grew = peak > self._peak[slots]
        self._holds[slots] = np.where(grew, 1, self._holds[slots] + 1)
        self._peak[slots] = np.maximum(self._peak[slots], peak)

    def _age(self, slots: Indexes, start: Floats) -> None:
        """Let time pass: a new window weighs more than all before it, which is cheaper than making those lighter."""
        elapsed = np.where(np.isfinite(self._time[slots]), start - self._time[slots], 0.0)
        self._time[slots] = start
        self._scale[slots] *= np.exp(np.clip(elapsed[:, None] * self._rates, 0.0, _FORGOTTEN))
        for horizon in range(len(HORIZONS_S)):
            heavy = slots[self._scale[slots, horizon] > _RESCALE_ABOVE]
            if heavy.size:
                factor = 1.0 / self._scale[heavy, horizon, None]
                for rows in (2 * heavy, 2 * heavy + 1):
                    shrunk = self._histograms.weights[rows, horizon] * factor
                    self._histograms.weights[rows, horizon] = np.where(shrunk < 1e-30, 0.0, shrunk)
                self._scale[heavy, horizon] = 1.0


def _by_horizon(values: Sequence[Sequence[float]]) -> dict[int, Quantiles]:
    return {horizon: Quantiles(*values[i]) for i, horizon in enumerate(HORIZONS_S)}
