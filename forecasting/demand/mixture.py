"""The demand forecaster that mixes experts: persistence, averages, analogues and whatever was trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.forecasting.demand.arrays import Array, Indexes
from cotenant.forecasting.demand.engine import Expert, MixtureSettings, SeriesMixture
from cotenant.forecasting.demand.hostside import HORIZONS, WIDTH, Foreseen
from cotenant.forecasting.demand.streams import GAP_S, Floats, Streams, Windows
from cotenant.forecasting.types import HORIZONS_S, LEVELS, DemandProfile, Forecast, Quantiles, Signature

PEAK_MARGIN_FIRST = 0.25  # on the peak memory after a single window …
PEAK_MARGIN_LEAST = 0.02  # … shrinking towards this while the peak holds
PEAK_GROWTH = 3.6  # a job that grows is expected to grow by so many times as much again …
PEAK_GROWTH_MEMORY = 0.9  # … as it did lately, per window
MEMORY_ROOM = 2.0  # the unit of a job's memory is this times its first reading; beyond it the job starts afresh
LEAST_UNIT = float(64 << 20)
MEMORY_RESOLUTION = float(2 << 20)  # what drivers map memory in
LOADING_WINDOWS = 30  # so long a job may be about to load all the memory it was said to need
MEMORY_GATE_PRIOR = 10.0  # memory moves in small parts of what is held
STILL_AFTER = 130  # windows without a change: more than the largest lag, so that the whole known past is the same
STILL_WITHIN = 0.0005  # in units of the series
STILL_EVERY = 16  # a still series is stepped in turn only: time stands for it, and nothing it knows changes
FAR_YOUNG = 30  # ticks at a far scale; with fewer its median is that of the farthest near horizon
CHUNK = 2048  # streams whose tables fit the processor's cache together
_MIDDLE = LEVELS.index(0.5)
_ABOVE = _MIDDLE + 1

# Seconds per tick and horizons in ticks: the far future is forecast from means over longer windows.
UTIL_SCALES: tuple[tuple[int, MixtureSettings], ...] = (
    (1, MixtureSettings(horizons=HORIZONS)),
    (10, MixtureSettings(horizons=(6,), last=96, gains=(0.5, 0.15))),
    (60, MixtureSettings(horizons=(5, 15), last=64, gains=(0.5, 0.15))),
)
MEMORY_SCALES = tuple(
    (
        seconds,
        replace(
            settings,
            first_span=0.15,
            gate_prior=MEMORY_GATE_PRIOR,
            most=1e6,
            steps=True,
            resolution=MEMORY_RESOLUTION,
        ),
    )
    for seconds, settings in UTIL_SCALES
)


@dataclass(slots=True)
class _Scale:
    """One mixture at one time scale, with the means being collected for its next tick."""

    seconds: int
    mixture: SeriesMixture
    sums: Floats
    held: Indexes

    @classmethod
    def make(
        cls, seconds: int, settings: MixtureSettings, rows: int, experts: Sequence[Expert], outside: int
    ) -> _Scale:
        mixture = SeriesMixture(settings, rows, experts, outside)
        return cls(seconds, mixture, np.zeros(rows), np.zeros(rows, dtype=np.intp))

    def resize(self, rows: int) -> None:
        more = rows - len(self.sums)
        self.mixture.resize(rows)
        self.sums = np.concatenate([self.sums, np.zeros(more)])
        self.held = np.concatenate([self.held, np.zeros(more, dtype=np.intp)])

    def clear(self, row: int, expected: float | None, first_span: float | None) -> None:
        self.mixture.clear(row, expected, first_span)
        self.sums[row] = self.held[row] = 0

    def rescale(self, row: int, size: float) -> None:
        self.mixture.rescale(row, size)
        self.sums[row] = self.held[row] = 0

    def interrupt(self, rows: Indexes, elapsed: Floats) -> None:
        self.mixture.interrupt(rows[(elapsed > GAP_S * self.seconds) | (elapsed < 0.0)])

    def add(self, rows: Indexes, values: Floats, outside: Array | None) -> None:
        self.sums[rows] += values
        self.held[rows] += 1
        full = (self.held[rows] >= self.seconds) | (self.mixture.counts(rows) == 0)
        every, now = rows[full], values[full].astype(np.float32)
        told = None if outside is None else outside[full]
        for start in range(0, len(every), CHUNK):
            ticking, truth = every[start : start + CHUNK], now[start : start + CHUNK]
            means = (self.sums[ticking] / self.held[ticking]).astype(np.float32)
            # The first window ticks at once; from then on the streams take turns.
            first = self.mixture.counts(ticking) == 0
            self.mixture.step(ticking, means, truth, None if told is None else told[start : start + CHUNK])
            self.held[ticking] = np.where(first, ticking % self.seconds, 0)
            self.sums[ticking] = self.held[ticking] * means


class _Quantity:
    """All time scales of one quantity, in units of the series."""

    def __init__(
        self, scales: Sequence[tuple[int, MixtureSettings]], rows: int, experts: Sequence[Expert], outside: int = 0
    ) -> None:
        near = (experts, outside)  # both only know the windows themselves
        self.scales = [
            _Scale.make(seconds, settings, rows, *(near if seconds == 1 else ((), 0))) for seconds, settings in scales
        ]
        self._anchor: Floats = np.full(rows, np.inf)
        self._still: Indexes = np.zeros(rows, dtype=np.intp)

    def resize(self, rows: int) -> None:
        more = rows - len(self._anchor)
        self._anchor = np.concatenate([self._anchor, np.full(more, np.inf)])
        self._still = np.concatenate([self._still, np.zeros(more, dtype=np.intp)])
        for scale in self.scales:
            scale.resize(rows)

    def clear(self, row: int, expected: float | None = None, first_span: float | None = None) -> None:
        self._anchor[row], self._still[row] = np.inf, 0
        for scale in self.scales:
            scale.clear(row, expected, first_span)

    def measure(self, row: int, size: float) -> None:
        for scale in self.scales:
            scale.mixture.measure(row, size)

    def rescale(self, row: int, size: float) -> None:
        self._anchor[row], self._still[row] = np.inf, 0
        for scale in self.scales:
            scale.rescale(row, size)

    def step(self, rows: Indexes, values: Floats, elapsed: Floats, outside: Array | None = None) -> None:
        moved = np.abs(values - self._anchor[rows]) > STILL_WITHIN
        self._anchor[rows] = np.where(moved, values, self._anchor[rows])
        still = np.where(moved, 0, self._still[rows] + 1)
        self._still[rows] = still
        awake = (still < STILL_AFTER) | ((still + rows) % STILL_EVERY == 0)
        for scale in self.scales:
            scale.interrupt(rows, elapsed)
            if scale.seconds == 1:
                scale.add(rows[awake], values[awake], None if outside is None else outside[awake])
                scale.mixture.rest(rows[~awake])
            else:
                scale.add(rows, values, None)
        self._spread_doubt(rows, values)

    def _spread_doubt(self, rows: Indexes, values: Floats) -> None:
        """Have the far scales, whose next tick may be a minute away, doubt what the near one doubts."""
        near = self.scales[0].mixture
        doubted = near.doubted(rows)
        if not len(doubted):
            return
        jumps = near.jumps(doubted)
        present = values[np.searchsorted(rows, doubted)].astype(np.float32)
        for scale in self.scales[1:]:
            scale.mixture.doubt(doubted, jumps)
            scale.mixture.glance(doubted, present)

    def quantiles(self, rows: Indexes) -> Array:
        """Return values of shape (n, horizons, levels).

        A far scale ticks once in ten seconds or a minute and has seen little of a young series: its means lag behind
        what is read now, and its errors are few. So a young one has the near median, and no interval ends inside that
        of a nearer horizon.
        """
        near, *far = (scale.mixture.quantiles(rows) for scale in self.scales)
        for scale, said in zip(self.scales[1:], far, strict=True):
            young = scale.mixture.counts(rows) < FAR_YOUNG
            said[young, :, _MIDDLE] = near[young, -1:, _MIDDLE]
        joined: Array = np.concatenate([near, *far], axis=1)
        np.maximum.accumulate(joined[:, :, _ABOVE:], axis=1, out=joined[:, :, _ABOVE:])
        np.minimum.accumulate(joined[:, :, :_MIDDLE], axis=1, out=joined[:, :, :_MIDDLE])
        return joined


class MixtureForecaster:
    """Quantiles of utilisation and memory from a gated mixture of experts (see ``DemandForecaster``).

    * Utilisation is demand: a window in which the job was held back by its own share is corrected. With a job's first
      optimizer step its utilisation so far is forgotten: starting up is no sign of what comes.
    * Every job on every GPU is a stream of its own. A job on several GPUs has one forecast, per GPU: the lowest p10,
      the mean p50 and the highest of the upper quantiles over its streams.
    * 1, 2 and 5 s ahead are forecast from windows, 1 min from means over 10 s, 5 and 15 min from means over 1 min; what
      the far forecasts are judged by are single windows all the same.
    * Windows that are out of order, duplicated, empty, absurd or without any reading are ignored. When a host's clock
      is set back, its windows are ignored until ten of them have advanced. After a missing window or reading forecasts
      go on, but nothing is learnt from those whose moment shifted.
    * Intervals are wide at first and narrow with the errors seen. What is known beforehand (``prime``) narrows them.
    * What hosts foresaw from the samples within the windows joins as further experts; missing, it changes nothing.
    * A forecast exists once utilisation or memory was read, or the job was primed. What was never read is not in it.

    Not thread-safe.
    """

    name = "mixture"

    def __init__(self, util_experts: Sequence[Expert] = (), memory_experts: Sequence[Expert] = ()) -> None:
        """Make an empty forecaster; the experts are further ones for 1, 2 and 5 s, in ticks of a second."""
        self._streams = Streams()
        rows = self._streams.size
        self._util = _Quantity(UTIL_SCALES, rows, util_experts, WIDTH)
        self._memory = _Quantity(MEMORY_SCALES, rows, memory_experts)
        self._unit: Floats = np.zeros(rows)
        self._held: Floats = np.zeros(rows)
        self._peak: Floats = np.zeros(rows)
        self._growth: Floats = np.zeros(rows)  # of the peak lately
        self._holds: Indexes = np.zeros(rows, dtype=np.intp)
        self._windows: Indexes = np.zeros(rows, dtype=np.intp)
        self._trains = np.zeros(rows, dtype=np.bool_)
        self._seen = np.zeros((rows, 2), dtype=np.bool_)  # utilisation, memory
        self._unread: Floats = np.zeros((rows, 2))  # seconds since each was last read
        self._primed: dict[str, DemandProfile] = {}

    def prime(self, job_id: str, profile: DemandProfile) -> None:
        """Tell what is known of a job before its first window: from hints or from earlier runs of its program."""
        if profile.source != "unknown":
            self._primed[job_id] = profile

    def observe(self, signature: Signature) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored, never fatal."""
        self.observe_batch((signature,))

    def observe_batch(self, signatures: Sequence[Signature], foreseen: Foreseen | None = None) -> None:
        """Take in many windows at once, in order; much cheaper than one by one.

        Args:
            signatures: The windows.
            foreseen: What hosts foresaw at the end of these windows. Streams without it are forecast without it.
        """
        for windows in self._streams.take(signatures):
            if self._streams.size > len(self._unit):
                self._resize(self._streams.size)
            self._take(windows, self._outside(windows, foreseen) if foreseen else None)

    def forecast(self, job_id: str) -> Forecast | None:
        """Return the forecast of a job, or None when nothing usable was observed yet."""
        return self.forecast_batch((job_id,)).get(job_id)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        """Return the forecasts of those of the jobs that have one; much cheaper than one by one."""
        found = [(job_id, self._read(job_id)) for job_id in job_ids]
        slots = np.array([slot for _, own in found for slot in own], dtype=np.intp)
        utils = self._util.quantiles(slots).astype(np.float64)
        memories = self._memory.quantiles(slots) * self._unit[slots, None, None]
        # The far scales tick seldom, and a still series in turn: what is held may stay, whatever was foreseen last.
        least = self._held[slots]
        for i in np.flatnonzero(self._windows[slots] <= LOADING_WINDOWS).tolist():
            least[i] = max(least[i], self._least_peak(int(slots[i])))
        np.maximum(memories[:, :, _ABOVE:], least[:, None, None], out=memories[:, :, _ABOVE:])
        forecasts: dict[str, Forecast] = {}
        start = 0
        for job_id, own in found:
            if not own:
                primed = self._from_profile(job_id)
                if primed is not None:
                    forecasts[job_id] = primed
                continue
            util, memory = utils[start : start + len(own)], memories[start : start + len(own)]
            start += len(own)
            forecasts[job_id] = self._forecast(job_id, own, util, memory)
        return forecasts

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended. Unknown ids are ignored."""
        self._primed.pop(job_id, None)
        for slot in self._streams.forget(job_id):
            self._util.clear(slot)
            self._memory.clear(slot)
            self._unit[slot] = self._held[slot] = self._peak[slot] = self._growth[slot] = 0.0
            self._holds[slot] = self._windows[slot] = 0
            self._trains[slot] = self._seen[slot] = False
            self._unread[slot] = 0.0

    def _outside(self, windows: Windows, foreseen: Foreseen) -> Array:
        """Return what hosts foresaw of these streams as demand, NaN where they did not, (n, horizons, width)."""
        outside = np.full((len(windows.slots), len(HORIZONS), WIDTH), np.nan, dtype=np.float32)
        # A host of another version may know other horizons or experts: what it says is left out.
        said = [
            (self._streams.find(*key), values) for key, values in foreseen.items() if len(values) == outside[0].size
        ]
        slots = np.array([-1 if slot is None else slot for slot, _ in said], dtype=np.intp)
        places = np.minimum(np.searchsorted(windows.slots, slots), len(outside) - 1)
        here = windows.slots[places] == slots
        values = np.array([values for _, values in said], dtype=np.float32).reshape(-1, *outside.shape[1:])
        outside[places[here]] = np.where((values >= 0.0) & (values <= 1.0), values, np.nan)[here]
        stretched: Array = np.minimum(1.0, outside * windows.stretch[:, None, None].astype(np.float32))
        return stretched

    def _take(self, windows: Windows, outside: Array | None) -> None:
        slots = windows.slots
        for i in np.flatnonzero(self._windows[slots] == 0).tolist():
            self._begin(int(slots[i]))
        self._windows[slots] += 1
        starting = windows.steps & ~self._trains[slots]
        self._trains[slots[starting]] = True
        for slot in slots[starting & (self._windows[slots] > 1)].tolist():
            self._clear_util(slot)
        # Time goes on for what cannot be read now. Set back, it says nothing of how long ago that was read.
        back = (windows.elapsed < 0.0)[:, None]
        self._unread[slots] = np.where(back, np.inf, self._unread[slots] + windows.elapsed[:, None])
        seen = np.isfinite(windows.util)
        if seen.any():
            told = None if outside is None else outside[seen]
            self._util.step(slots[seen], windows.util[seen], self._read_now(slots[seen], 0), told)
        seen = np.isfinite(windows.memory)
        if seen.any():
            elapsed = self._read_now(slots[seen], 1)
            self._take_memory(slots[seen], windows.memory[seen], windows.peak[seen], elapsed)

    def _read_now(self, slots: Indexes, quantity: int) -> Floats:
        """Note that a quantity was read in these streams; returns the seconds since it was before."""
        self._seen[slots, quantity] = True
        elapsed: Floats = self._unread[slots, quantity]
        self._unread[slots, quantity] = 0.0
        return elapsed

    def _take_memory(self, slots: Indexes, memory: Floats, peak: Floats, elapsed: Floats) -> None:
        unit = self._unit[slots]
        for i in np.flatnonzero((unit == 0.0) | (memory > MEMORY_ROOM * unit)).tolist():
            slot = int(slots[i])
            self._unit[slot] = MEMORY_ROOM * max(LEAST_UNIT, float(memory[i]))
            self._memory.rescale(slot, self._unit[slot])
        self._memory.step(slots, memory / self._unit[slots], elapsed)
        self._held[slots] = memory
        before = self._peak[slots]
        grew = peak > before
        more = np.where(grew & (before > 0.0), peak - before, 0.0)
        self._growth[slots] = PEAK_GROWTH_MEMORY * self._growth[slots] + more
        self._holds[slots] = np.where(grew, 1, self._holds[slots] + 1)
        self._peak[slots] = np.maximum(self._peak[slots], peak)

    def _begin(self, slot: int) -> None:
        profile = self._primed.get(self._streams.job_of(slot))
        if profile is not None:
            self._clear_util(slot)
            if profile.memory_bytes:
                self._set_unit(slot, max(LEAST_UNIT, MEMORY_ROOM * profile.memory_bytes))

    def _least_peak(self, slot: int) -> float:
        profile = self._primed.get(self._streams.job_of(slot))
        return float(profile.memory_bytes or 0) if profile is not None else 0.0

    def _set_unit(self, slot: int, unit: float) -> None:
        self._unit[slot] = unit
        self._memory.measure(slot, unit)

    def _clear_util(self, slot: int) -> None:
        profile = self._primed.get(self._streams.job_of(slot))
        if profile is None:
            self._util.clear(slot)
            return
        # What was said of a job and never measured tells where to look; not how far it is off.
        measured = profile.source == "history"
        span = max(0.1, 1.25 * (profile.util_p95 - profile.util_mean)) if measured else None
        self._util.clear(slot, profile.util_mean, span)

    def _read(self, job_id: str) -> list[int]:
        return [slot for slot in self._streams.of_job.get(job_id, ()) if self._seen[slot].any()]

    def _forecast(self, job_id: str, own: list[int], util: Floats, memory: Floats) -> Forecast:
        seen = self._seen[own]
        held = [slot for slot in own if self._seen[slot, 1]]
        peaks = [
            self._peak[slot]
            * (1.0 + PEAK_MARGIN_LEAST + (PEAK_MARGIN_FIRST - PEAK_MARGIN_LEAST) / math.sqrt(max(1, self._holds[slot])))
            + PEAK_GROWTH * self._growth[slot]
            for slot in held
        ]
        peaks += [self._least_peak(slot) for slot in held]
        return Forecast(
            job_id=job_id,
            util=_by_horizon(util[seen[:, 0]]),
            memory=_by_horizon(memory[seen[:, 1]]),
            peak_memory_bytes=float(max(peaks, default=0.0)),
            windows=int(self._windows[own].sum()),
        )

    def _from_profile(self, job_id: str) -> Forecast | None:
        profile = self._primed.get(job_id)
        if profile is None or profile.memory_bytes is None:
            return None
        mean, high, memory = profile.util_mean, max(profile.util_mean, profile.util_p95), float(profile.memory_bytes)
        util = Quantiles(max(0.0, 2.0 * mean - high), mean, high, high, min(1.0, 2.0 * high - mean))
        held = Quantiles(0.0, memory, memory, memory, memory * (1.0 + PEAK_MARGIN_FIRST))
        horizons = dict.fromkeys(HORIZONS_S)
        return Forecast(
            job_id, dict.fromkeys(horizons, util), dict.fromkeys(horizons, held), memory * (1.0 + PEAK_MARGIN_FIRST), 0
        )

    def _resize(self, rows: int) -> None:
        more = rows - len(self._unit)
        self._util.resize(rows)
        self._memory.resize(rows)
        self._unit = np.concatenate([self._unit, np.zeros(more)])
        self._held = np.concatenate([self._held, np.zeros(more)])
        self._peak = np.concatenate([self._peak, np.zeros(more)])
        self._growth = np.concatenate([self._growth, np.zeros(more)])
        self._holds = np.concatenate([self._holds, np.zeros(more, dtype=np.intp)])
        self._windows = np.concatenate([self._windows, np.zeros(more, dtype=np.intp)])
        self._trains = np.concatenate([self._trains, np.zeros(more, dtype=np.bool_)])
        self._seen = np.concatenate([self._seen, np.zeros((more, 2), dtype=np.bool_)])
        self._unread = np.concatenate([self._unread, np.zeros((more, 2))])


def _by_horizon(values: Floats) -> dict[int, Quantiles]:
    """Return the quantiles that span those of all streams (n, horizons, levels); none of no stream."""
    if not len(values):
        return {}
    joined: Floats = values[0] if len(values) == 1 else values.max(axis=0)
    if len(values) > 1:
        joined[:, :_MIDDLE] = values[:, :, :_MIDDLE].min(axis=0)
        joined[:, _MIDDLE] = values[:, :, _MIDDLE].mean(axis=0)
    return {horizon: Quantiles(*levels) for horizon, levels in zip(HORIZONS_S, joined.tolist(), strict=True)}
