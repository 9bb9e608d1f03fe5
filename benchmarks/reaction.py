"""How soon a share follows a job's demand: from the moments of both, without Ray and without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_CHANGE = 0.02  # resize.min_change


class Change(NamedTuple):
    """One change of the share word: when (monotonic), and the compute from then on."""

    at: float
    compute: float


class Followed(NamedTuple):
    """Seconds from each change of demand to the first change of the share, and to nine tenths of the way (or None)."""

    first: list[float | None]
    settled: list[float | None]


def followed(phases: Sequence[tuple[float, bool]], changes: Sequence[Change], *, busy: bool) -> Followed:
    """Return how soon the share followed when the job became busy, or ceased to be.

    Args:
        phases: When each phase began (monotonic), and whether the job is busy in it. The first begins while jobs are
            still being placed and is left out.
        changes: The changes of its share.
        busy: Which of the changes of demand.
    """
    ends = [at for at, _ in phases[1:]] + [changes[-1].at if changes else 0.0]
    sign = 1.0 if busy else -1.0
    found = Followed([], [])
    for (at, is_busy), end in zip(phases, ends, strict=True):
        before = [change.compute for change in changes if change.at <= at]
        within = [change for change in changes if at < change.at <= end]
        if is_busy is not busy or not before or at == phases[0][0]:
            continue
        moved = [change for change in within if sign * (change.compute - before[-1]) >= LEAST_CHANGE]
        way = sign * (within[-1].compute - before[-1]) if within else 0.0
        there = [change for change in within if way > 0 and sign * (change.compute - before[-1]) >= 0.9 * way]
        found.first.append(moved[0].at - at if moved else None)
        found.settled.append(there[0].at - at if there else None)
    return found
