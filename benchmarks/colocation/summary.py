"""Quick figures from raw windows: for the plan, for progress lines and for the table at the end of a run.

No window is rejected here. The tables (``cotenant.forecasting.datasets.colocation``) are what to publish.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Windows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Solo:
    """A workload alone: medians over its windows; None where nothing is known.

    The utilisation is the member's own, or the whole device's where it does not tell its processes apart.
    """

    rate: float | None
    utilisation: float | None
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class Together:
    """A visit of a set.

    Attributes:
        visit: Its name.
        members: Names of the workloads.
        throughputs: Each member's mean rate together over its mean rate alone, in the members' order.
        savings: 1 - 1 / (sum of throughputs) in each window together.
    """

    visit: str
    members: tuple[str, ...]
    throughputs: tuple[float, ...]
    savings: tuple[float, ...]


def solos(windows: Windows) -> dict[str, Solo]:
    """Every workload that was measured alone."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for window in windows:
        if window["kind"] == "solo":
            found[window["member"]].append(window)
    return {
        member: Solo(_median(rows, "rate"), _utilisation(rows), _median(rows, "memory_bytes"))
        for member, rows in sorted(found.items())
    }


def together(windows: Windows) -> list[Together]:
    """Every visit of a set whose members all have rates alone and together, in the order of the windows."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for window in windows:
        if len(window["members"]) > 1:
            found[window["visit"]].append(window)
    sets = (_together(visit, rows) for visit, rows in found.items())
    return [one for one in sets if one is not None]


def widths(sets: Iterable[Together]) -> dict[tuple[str, str], float]:
    """By the sorted names of a pair: how far its savings lie apart over all its windows."""
    savings: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in sets:
        if len(one.members) == 2:
            first, second = sorted(one.members)
            savings[first, second].extend(one.savings)
    return {pair: max(values) - min(values) for pair, values in savings.items()}


def _together(visit: str, rows: Sequence[Mapping[str, Any]]) -> Together | None:
    members = tuple(rows[0]["members"])
    alone: list[list[float]] = [[] for _ in members]
    shared: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if not row["rate"]:
            continue
        if row["kind"] == "solo":
            alone[row["slot"]].append(row["rate"])
        else:
            shared[row["position"]][row["slot"]] = row["rate"]
    complete = [rates for rates in shared.values() if len(rates) == len(members)]
    if not complete or not all(alone):
        return None
    base = [fmean(rates) for rates in alone]
    ratios = [[rates[slot] / base[slot] for slot in range(len(members))] for rates in complete]
    return Together(
        visit,
        members,
        tuple(fmean(window[slot] for window in ratios) for slot in range(len(members))),
        tuple(1.0 - 1.0 / sum(window) for window in ratios),
    )


def _utilisation(rows: Sequence[Mapping[str, Any]]) -> float | None:
    own = _median(rows, "util_mean")
    return _median(rows, "device_util") if own is None else own


def _median(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    known = [row[column] for row in rows if row[column] is not None]
    return median(known) if known else None
