"""What of a measured window can be trusted, decided in one place for everything that learns from windows."""

from __future__ import annotations

import math
from typing import TypeGuard

from cotenant.forecasting.types import Reading, Signature

MOST_BYTES = float(1 << 50)
MOST_RATE = 1e9  # steps per second
MOST_WINDOW_S = 3600.0  # hosts send one a second; what is summed up over windows must stay a number of seconds
MOST_UTIL = 1.1  # counters are read a little late or early: up to here it is noise and clipped, beyond it is absurd


def finite(value: Reading) -> TypeGuard[float]:
    """Return whether the reading is there and a number."""
    return value is not None and math.isfinite(value)


def usable_window(signature: Signature) -> bool:
    """Return whether the window has a sensible place in time and was measured at all."""
    return math.isfinite(signature.start_s) and 0.0 < signature.window_s <= MOST_WINDOW_S and signature.samples > 0


def usable_util(signature: Signature) -> float | None:
    """Return the window's utilisation in [0, 1] corrected for throttling; None when it is missing or absurd."""
    util = signature.util_mean
    if not finite(util) or not 0.0 <= util <= MOST_UTIL:
        return None
    return uncensored(util, signature.throttled_fraction)


def usable_memory(signature: Signature) -> tuple[float, float] | None:
    """Return the window's memory (at its end, peak) in bytes; None when it is missing or absurd."""
    memory, peak = signature.memory_bytes, signature.memory_peak_bytes
    if not finite(memory):
        memory = peak
    if not finite(memory) or not 0.0 <= memory <= MOST_BYTES:
        return None
    if not finite(peak) or not memory <= peak <= MOST_BYTES:
        peak = memory
    return memory, peak


def usable_rate(signature: Signature) -> float | None:
    """Return the window's steps per second; None when they are missing or absurd (a counter that went backwards)."""
    rate = signature.step_rate
    return rate if finite(rate) and 0.0 <= rate <= MOST_RATE else None


def uncensored(util: float, throttled_fraction: Reading) -> float:
    """Return the utilisation a job held back by its own share would have had, in [0, 1].

    A job that was held back for the fraction t of a window did its work in the other 1 - t of it; unhindered it
    would have gone on like that: util / (1 - t), at most 1. Without a reading the utilisation counts as it is.
    """
    held_back = min(1.0, max(0.0, throttled_fraction)) if finite(throttled_fraction) else 0.0
    return min(1.0, util / max(1e-6, 1.0 - held_back))
