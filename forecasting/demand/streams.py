"""Windows as arrays: which are usable, which stream (one job on one GPU) each belongs to, which come too late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.demand.arrays import Flags, Indexes
from cotenant.forecasting.types import Signature
from cotenant.forecasting.windows import MOST_BYTES, MOST_UTIL, MOST_WINDOW_S

Floats = npt.NDArray[np.float64]

RESTART_AFTER = 10  # so many advancing windows from "the past" in a row: the host's clock was set back
GAP_S = 1.5  # later than this after the last window, one is missing in between

_FIELDS = attrgetter(
    "start_s",
    "window_s",
    "samples",
    "util_mean",
    "throttled_fraction",
    "memory_bytes",
    "memory_peak_bytes",
    "step_rate",
)
_COLUMNS = 8
_KEY = attrgetter("job_id", "gpu_id")


@dataclass(frozen=True, slots=True)
class Windows:
    """Usable windows of distinct streams; NaN = not read.

    Attributes:
        slots: Number of the stream, shape (n,), ascending.
        util: Demand for the GPU, in [0, 1], shape (n,).
        memory: Device memory at the end of the window in bytes, shape (n,).
        peak: Largest device memory in the window in bytes, shape (n,).
        steps: Whether the job took optimizer steps, shape (n,).
        elapsed: Seconds since the stream's window before; infinite for its first.
        stretch: Demand over measured utilisation: more than 1 where the job was held back by its own share.
    """

    slots: Indexes
    util: Floats
    memory: Floats
    peak: Floats
    steps: Flags
    elapsed: Floats
    stretch: Floats


@dataclass(slots=True)
class Streams:
    """The streams of all jobs, numbered, with the clock of each. Grows by itself: compare ``size`` after ``take``."""

    size: int = 64
    of_job: dict[str, list[int]] = field(default_factory=dict)
    _slots: dict[tuple[str, str], int] = field(default_factory=dict)
    _keys: dict[int, tuple[str, str]] = field(default_factory=dict)
    _free: list[int] = field(default_factory=lambda: list(range(63, -1, -1)))
    _last: Floats = field(default_factory=lambda: np.full(64, -np.inf))
    _refused: Floats = field(default_factory=lambda: np.full(64, -np.inf))
    _refusals: Indexes = field(default_factory=lambda: np.zeros(64, dtype=np.intp))

    def take(self, signatures: Sequence[Signature]) -> Iterator[Windows]:
        """Yield the usable windows, in order, in rounds in which every stream comes at most once."""
        if not signatures:
            return
        # Of thousands of windows every Python call for each would cost more than all that is learnt from them.
        every = chain.from_iterable(map(_FIELDS, signatures))
        table = np.fromiter(every, dtype=np.float64, count=_COLUMNS * len(signatures)).reshape(-1, _COLUMNS)
        usable, columns = _usable(table)
        kept = np.flatnonzero(usable)
        measured = signatures if len(kept) == len(signatures) else [signatures[i] for i in kept.tolist()]
        found = list(map(self._slots.get, map(_KEY, measured)))
        if None in found:
            found = [self._begin(each) if slot is None else slot for each, slot in zip(measured, found, strict=True)]
        slots = np.array(found, dtype=np.intp)
        while len(kept):
            distinct, first = np.unique(slots, return_index=True)
            yield from self._round(distinct, columns[:, kept[first]])
            rest = np.ones(len(kept), dtype=np.bool_)
            rest[first] = False
            kept, slots = kept[rest], slots[rest]

    def find(self, job_id: str, gpu_id: str) -> int | None:
        """Return the number of a stream; None when there is none."""
        return self._slots.get((job_id, gpu_id))

    def job_of(self, slot: int) -> str:
        """Return the job a stream belongs to."""
        return self._keys[slot][0]

    def forget(self, job_id: str) -> list[int]:
        """Drop the streams of a job and return their numbers, which will be given to others."""
        slots = self.of_job.pop(job_id, [])
        for slot in slots:
            del self._slots[self._keys.pop(slot)]
            self._last[slot] = self._refused[slot] = -np.inf
            self._refusals[slot] = 0
            self._free.append(slot)
        return slots

    def _begin(self, signature: Signature) -> int:
        """Return the number of a stream, a new one unless it was begun by an earlier window of the same batch."""
        key = _KEY(signature)
        slot = self._slots.get(key)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[key] = self._free.pop()
            self._keys[slot] = key
            self.of_job.setdefault(signature.job_id, []).append(slot)
        return slot

    def _grow(self) -> None:
        more = self.size
        self._last = np.concatenate([self._last, np.full(more, -np.inf)])
        self._refused = np.concatenate([self._refused, np.full(more, -np.inf)])
        self._refusals = np.concatenate([self._refusals, np.zeros(more, dtype=np.intp)])
        self._free.extend(range(2 * self.size - 1, self.size - 1, -1))
        self.size *= 2

    def _round(self, slots: Indexes, columns: Floats) -> Iterator[Windows]:
        start = columns[0]
        late = start <= self._last[slots]
        advancing = start > self._refused[slots]
        self._refusals[slots] = np.where(late, np.where(advancing, self._refusals[slots] + 1, 1), 0)
        self._refused[slots] = np.where(late, start, -np.inf)
        accepted = ~late | (self._refusals[slots] >= RESTART_AFTER)
        if not accepted.any():
            return
        slots, columns = slots[accepted], columns[:, accepted]
        elapsed = columns[0] - self._last[slots]
        self._last[slots], self._refused[slots], self._refusals[slots] = columns[0], -np.inf, 0
        yield Windows(slots, columns[1], columns[2], columns[3], columns[4] > 0.0, elapsed, columns[5])


def _usable(table: Floats) -> tuple[Flags, Floats]:
    """Return which rows count, and (start, util, memory, peak, rate, stretch) as columns; as ``windows.py``."""
    start, length, samples, util, held, memory, peak, rate = table.T
    with np.errstate(invalid="ignore"):
        util = np.where((util >= 0.0) & (util <= MOST_UTIL), util, np.nan)
        held = np.where(np.isfinite(held), np.clip(held, 0.0, 1.0), 0.0)
        stretch = 1.0 / np.maximum(1e-6, 1.0 - held)
        util = np.minimum(1.0, util * stretch)
        memory = np.where(np.isfinite(memory), memory, peak)
        memory = np.where((memory >= 0.0) & (memory <= MOST_BYTES), memory, np.nan)
        peak = np.where((peak >= memory) & (peak <= MOST_BYTES), peak, memory)
        measured = np.isfinite(start) & (length > 0.0) & (length <= MOST_WINDOW_S) & (samples > 0)
    return measured & (np.isfinite(util) | np.isfinite(memory)), np.stack([start, util, memory, peak, rate, stretch])
