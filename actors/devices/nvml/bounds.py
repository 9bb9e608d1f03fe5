"""What a reading of NVML can be at all; anything else is no reading (None), never 0."""

from __future__ import annotations

from cotenant.forecasting.types import Reading

MAX_BYTES = 1 << 50
MAX_W = 5_000.0
MAX_MHZ = 10_000.0
MAX_C = 150.0
_ROUNDING = 1.01  # a little over 100 % comes from rounding


def fraction(percent: float | None) -> Reading:
    """Return a percentage as a fraction in [0, 1]; None when it is absurd."""
    if percent is None or not 0 <= percent <= 100 * _ROUNDING:  # NaN fails too
        return None
    return min(percent / 100, 1.0)


def bounded(value: float | None, most: float) -> Reading:
    """Return the value; None when it is below 0 or above ``most``."""
    return None if value is None or not 0 <= value <= most else float(value)


def used_bytes(value: int | None, total: int | None) -> int | None:
    """Return bytes in use; None when the driver does not say, or says more than there is (18446744073707737660)."""
    most = MAX_BYTES if total is None else total
    return None if value is None or not 0 <= value <= most else int(value)
