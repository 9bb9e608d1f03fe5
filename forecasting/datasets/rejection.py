"""Which windows count, and what a member's throughput in a shared window is: n = rate / rate alone at that time.

Rules are applied here and never while measuring, so that they can be changed for data that exist. In their order:

``no_rate``        fewer than two steps ended: there is no rate.
``few_steps``      fewer than ``LEAST_STEPS`` steps.
``foreign_load``   strangers had the device's core for more than ``FOREIGN`` of the window (``cpu``).
``unsteady_solo``  a solo window whose CPU time per step (``cpu``) or median step time (``cuda``) is more than
                   ``UNSTEADY`` off the median of the member's solo windows in the visit.
``drift``          a shared window between two accepted solo windows of the member whose rates differ by more than
                   ``DRIFT`` of their mean.
``no_solo``        a shared window in whose visit no solo window of the member was accepted.
``absurd``         a shared window more than ``ABSURD`` times as fast as alone: one of the two was not what it seemed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

LEAST_STEPS = 8
FOREIGN = 0.05  # a member's own wake-ups and interrupts, which no process's clock shows, reach 0.03
UNSTEADY = 0.08
DRIFT = 0.10
ABSURD = 2.0

Row = dict[str, Any]


def judge(windows: Iterable[Row], device: str) -> list[Row]:
    """Return the windows with ``rejected``, ``rate_solo`` and ``throughput``, in the same order.

    Args:
        windows: Rows of one run, readings missing as None.
        device: ``cpu`` or ``cuda``.
    """
    judged = [{**window, "rejected": _own_rule(window), "rate_solo": None, "throughput": None} for window in windows]
    # By place, not by name: a workload beside itself is two processes, each with its own rate alone.
    visits: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for window in judged:
        visits[window["visit"], window["slot"]].append(window)
    for rows in visits.values():
        solo = [row for row in rows if row["kind"] == "solo"]
        _reject_unsteady(solo, device)
        accepted = sorted((row for row in solo if not row["rejected"]), key=_middle)
        for row in rows:
            if row["kind"] == "shared" and not row["rejected"]:
                _compare(row, accepted)
    return judged


def _own_rule(window: Row) -> str:
    if not window["rate"]:
        return "no_rate"
    if window["steps"] < LEAST_STEPS:
        return "few_steps"
    foreign = window["foreign_s"]
    return "foreign_load" if foreign is not None and foreign > FOREIGN * window["window_s"] else ""


def _reject_unsteady(solo: Sequence[Row], device: str) -> None:
    efforts = [(row, effort) for row in solo if not row["rejected"] and (effort := _effort(row, device)) is not None]
    if not efforts:
        return
    median = statistics.median(effort for _, effort in efforts)
    for row, effort in efforts:
        if abs(effort - median) > UNSTEADY * median:
            row["rejected"] = "unsteady_solo"


def _effort(row: Row, device: str) -> float | None:
    """Seconds a step costs, whatever the member waits for: the device does the same work in each."""
    if device == "cpu":
        busy: float | None = row["busy_s"]
        # By the rate, not by the steps: a step more or less at the edges of the window is several percent of few.
        return None if busy is None else busy / (row["rate"] * row["window_s"])
    step: float | None = row["step_p50_s"]
    return step


def _compare(row: Row, solo: Sequence[Row]) -> None:
    """Set the throughput of a shared window, or the rule that rejects it."""
    if not solo:
        row["rejected"] = "no_solo"
        return
    before = [other for other in solo if _middle(other) < _middle(row)]
    after = [other for other in solo if _middle(other) >= _middle(row)]
    if before and after and _differ(before[-1]["rate"], after[0]["rate"]):
        row["rejected"] = "drift"
        return
    # Before the first and after the last solo window there is nothing to interpolate: the nearest one counts.
    alone = float(np.interp(_middle(row), [_middle(other) for other in solo], [other["rate"] for other in solo]))
    if row["rate"] > ABSURD * alone:
        row["rejected"] = "absurd"
        return
    row["rate_solo"], row["throughput"] = alone, row["rate"] / alone


def _differ(first: float, second: float) -> bool:
    return abs(first - second) > DRIFT * (first + second) / 2.0


def _middle(row: Row) -> float:
    return float(row["started_unix_s"] + row["window_s"] / 2.0)


__all__ = ["ABSURD", "DRIFT", "FOREIGN", "LEAST_STEPS", "UNSTEADY", "judge"]
