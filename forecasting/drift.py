"""When a model no longer fits: its errors have moved, or its intervals no longer hold what they promise.

Errors: the test of Page (1954, "Continuous inspection schemes", Biometrika 41) in the form of Hinkley (1971), to both
sides. With z the error less its running mean, in running standard deviations: ``up <- max(0, up + z - DRIFT)``, the
same for -z, and an alarm at ``THRESHOLD``. Coverage: the binomial probability that intervals which hold what they
promise cover so few of the last hundred.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from scipy import special

LEARNING = 200  # errors before the mean and the standard deviation are believed
MEMORY = 5_000  # errors they rest on
DRIFT = 1.0  # standard deviations that do not count
THRESHOLD = 30.0  # a shift by two standard deviations is found after about 30 errors
MOST_Z = 4.0  # one wild measurement is no drift
LEAST_SCALE = 0.01  # of the unit of the errors: nobody cares for less
COVERAGE_SPAN = 100
COVERAGE_LEAST = 50
COVERAGE_CHANCE = 1e-6  # it is tested at every score, so thousands of times
MOST_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Drift:
    """An alarm.

    Attributes:
        key: Of what.
        kind: "error": the errors have moved; "coverage": the intervals are too narrow.
        samples: Scores since the key began or was last reset.
        reason: What was seen, in words.
    """

    key: Hashable
    kind: Literal["error", "coverage"]
    samples: int
    reason: str


@dataclass(slots=True)
class _Watch:
    """What is kept of one key."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    up: float = 0.0
    down: float = 0.0
    moved: int = 0  # errors since either sum was last 0
    moved_sum: float = 0.0
    covered: deque[bool] = field(default_factory=deque)
    held: int = 0  # of them

    def add(self, error: float) -> str:
        """Take in an error; say what is wrong, "" when nothing is."""
        scale = max(LEAST_SCALE, math.sqrt(self.variance))
        z = min(MOST_Z, max(-MOST_Z, (error - self.mean) / scale))
        if self.count >= LEARNING:
            self.up = max(0.0, self.up + z - DRIFT)
            self.down = max(0.0, self.down - z - DRIFT)
            self.moved, self.moved_sum = (self.moved + 1, self.moved_sum + error) if self.up or self.down else (0, 0.0)
            if max(self.up, self.down) > THRESHOLD:
                return (
                    f"the last {self.moved} errors are {self.moved_sum / self.moved:.3g} on average, "
                    f"those before {self.mean:.3g} ± {scale:.2g}"
                )
        self.count += 1
        gain = 1.0 / min(self.count, MEMORY)
        step = error - self.mean
        self.mean += gain * step
        self.variance += gain * (step * step * (1.0 - gain) - self.variance)
        return ""

    def cover(self, covered: bool, level: float) -> str:
        """Take in whether an interval held; say what is wrong, "" when nothing is."""
        self.covered.append(covered)
        self.held += covered
        if len(self.covered) > COVERAGE_SPAN:
            self.held -= self.covered.popleft()
        count, held = len(self.covered), self.held
        if count < COVERAGE_LEAST or held >= level * count or _tail(held, count, level) >= COVERAGE_CHANCE:
            return ""
        return f"{held} of the last {count} intervals held what was measured; {level:.0%} should have"


class DriftDetector:
    """Watches errors and coverage by key (kind of model and GPU type, model and program). Pure, bounded.

    An alarm resets its key, so what comes after is compared with itself and not with a past that is gone. Errors that
    do not vary, single ones and such as are no numbers never alarm. Errors have to be independent and of one scale:
    divide them by what they are errors of where that differs. Errors that hang together alarm more often than they
    should. The least recently seen of more than 10,000 keys are dropped. Not thread-safe.

    Args:
        level: What part of the intervals should hold, in (0, 1).

    Raises:
        ValueError: ``level`` is not in (0, 1).
    """

    def __init__(self, level: float = 0.8) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: {level} is not accepted; give a number between 0 and 1")
        self.level = level
        self._watches: dict[Hashable, _Watch] = {}

    def update(self, key: Hashable, error: float | None, covered: bool | None = None) -> Drift | None:
        """Take in one score.

        Args:
            key: What was scored.
            error: Predicted − actual, or its absolute value; None or not a number: not scored.
            covered: Whether the interval held what was measured; None: not known.

        Returns:
            An alarm, or None.
        """
        watch = self._watches.pop(key, None) or _Watch()
        self._watches[key] = watch  # most recently seen last
        while len(self._watches) > MOST_KEYS:
            del self._watches[next(iter(self._watches))]
        samples = watch.count + 1
        kind: Literal["error", "coverage"] = "error"
        reason = watch.add(error) if error is not None and math.isfinite(error) else ""
        if not reason and covered is not None:
            kind, reason = "coverage", watch.cover(covered, self.level)
        if not reason:
            return None
        self.reset(key)
        return Drift(key, kind, samples, reason)

    def reset(self, key: Hashable) -> None:
        """Begin a key anew, after its model was replaced for example. Unknown keys are ignored."""
        self._watches.pop(key, None)


@lru_cache(maxsize=4096)
def _tail(held: int, count: int, level: float) -> float:
    """Return the probability of at most ``held`` successes in ``count`` trials."""
    return float(special.bdtr(held, count, level))
