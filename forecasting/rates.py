"""Step rates measured in blocks of whole steps: their middle, and how far off it may be.

A rate is measured over blocks of at least eight steps: one window of a fast job, many windows of a slow one. A pause
(evaluation, checkpoint) falls into one block. The middle of the blocks is their mean without the highest and the lowest
fifth, so pauses do not move it, as they do not move the solo rate (a median of such blocks in ``profiles``): only like
can be compared with like. Its error is that of Tukey and McLaughlin (1963): the standard deviation after the fifths
were pulled in (winsorised), over 0.6 · √m, with Student's t of as many degrees of freedom as blocks are left, less one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from scipy import special

BLOCK_STEPS = 8.0  # as in ``profiles``
TRIMMED = 0.2  # at either end
LEAST_BLOCKS = 3  # of fewer the spread says next to nothing
MOST_BLOCKS = 64  # then neighbouring blocks are put together


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate and its uncertainty.

    Attributes:
        mean: Steps per second.
        error: Its standard error, steps per second.
        freedom: Degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: int


@dataclass(slots=True)
class Blocks:
    """Steps and seconds in blocks. Bounded: of too many blocks, neighbours are put together.

    Attributes:
        done: Steps and seconds of every full block, in order.
        seconds: Seconds in full blocks.
    """

    done: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    _steps: float = 0.0
    _time_s: float = 0.0

    def add(self, steps: float, seconds: float) -> None:
        """Count steps into the running block; eight of them fill it."""
        self._steps += steps
        self._time_s += seconds
        if self._steps < BLOCK_STEPS:
            return
        self.done.append((self._steps, self._time_s))
        self.seconds += self._time_s
        self._steps = self._time_s = 0.0
        if len(self.done) > MOST_BLOCKS:
            pairs = zip(self.done[0:-1:2], self.done[1::2], strict=True)
            last = self.done[-1:]  # an odd number of blocks
            self.done = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs] + last

    def empty(self) -> list[float]:
        """Return the rates of the full blocks and forget them; the running block goes on."""
        rates = [steps / seconds for steps, seconds in self.done]
        self.done, self.seconds = [], 0.0
        return rates

    def take(self) -> Rate | None:
        """Return the rate over the full blocks and forget them; the running block goes on. None: too few blocks."""
        return rate_of(self.empty()) if len(self.done) >= LEAST_BLOCKS else None


def rate_of(rates: Sequence[float]) -> Rate | None:
    """Return the middle of block rates with its error; None when there are too few to tell the error.

    Args:
        rates: Steps per second, one per block, shape (m,).
    """
    count = len(rates)
    if count < LEAST_BLOCKS:
        return None
    cut = int(TRIMMED * count)
    ordered = np.sort(np.array(rates, dtype=np.float64))
    inner = ordered[cut : count - cut]
    spread = float(np.clip(ordered, inner[0], inner[-1]).std(ddof=1))
    kept = len(inner)
    return Rate(float(inner.mean()), spread * math.sqrt(count) / kept, kept - 1)


@lru_cache(maxsize=256)
def student_t(level: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution."""
    return float(special.stdtrit(freedom, level))
