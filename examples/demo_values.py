"""Reads the demo's report and writes its figures as text; what is missing is written "n/a", never 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NA = "n/a"
MODES = {
    "exclusive": "one job per device",
    "static": "static halves of a device",
    "first": "packed, first predictors",
    "cotenant": "packed, present predictors",
}
PACKED = ("first", "cotenant")  # in both, jobs share devices as cotenant's predictions have it
Row = Mapping[str, Any]


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None when there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _writer(pattern: str, scale: float = 1.0) -> Callable[[object], str]:
    def write(value: object) -> str:
        known = number(value)
        return NA if known is None else pattern.format(known * scale)

    return write


seconds = _writer("{:.1f}\N{NO-BREAK SPACE}s")
percent = _writer("{:.0f}\N{NO-BREAK SPACE}%", 100.0)
change = _writer("{:+.0f}\N{NO-BREAK SPACE}%", 100.0)
points = _writer("{:+.1f}\N{NO-BREAK SPACE}points", 100.0)
points_off = _writer("{:.1f}\N{NO-BREAK SPACE}points", 100.0)
tenths = _writer("{:.1f}\N{NO-BREAK SPACE}%", 100.0)
megabytes = _writer("{:.1f}\N{NO-BREAK SPACE}MB", 1e-6)
ratio = _writer("{:.2f}")
fine = _writer("{:.3f}")
hours = _writer("{:.4f}")
whole = _writer("{:.0f}")


def plain(value: object) -> str:
    """Return any value as text."""
    return NA if value is None else str(value)


def names(value: object) -> str:
    """Return a list of names as text; "-" for an empty one."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return NA
    return ", ".join(plain(name) for name in value) or "-"


def rows_of(source: Row, key: str) -> list[Row]:
    """Return a list of records; an absent one is empty."""
    return [row for row in source.get(key) or () if isinstance(row, Mapping)]


def part_of(source: Row, key: str) -> Row:
    """Return a record inside a record; an absent one is empty."""
    value = source.get(key)
    return value if isinstance(value, Mapping) else {}


def mode_of(report: Row, name: str) -> Row:
    """Return what was measured in one mode."""
    return part_of(part_of(report, "modes"), name)


def series_of(mode: Row) -> dict[str, list[tuple[float, float | None]]]:
    """Return device → (seconds, utilisation or None), without readings that have no time."""
    return {
        str(device): [(at, number(point[1])) for point in points or () if (at := number(point[0])) is not None]
        for device, points in (mode.get("devices") or {}).items()
    }


def prediction_error(job: Row) -> float | None:
    """Return predicted over measured slowdown, minus one."""
    measured, predicted = number(job.get("slowdown_measured")), number(job.get("slowdown_predicted"))
    return predicted / measured - 1 if measured and predicted is not None else None


def over_limit(job: Row) -> bool:
    """Return whether the job is known to have been slowed down more than it allows."""
    measured, limit = number(job.get("slowdown_measured")), number(job.get("max_slowdown"))
    return measured is not None and limit is not None and measured > limit
