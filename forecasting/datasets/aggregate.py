"""Makes the tables ``solo`` and ``pairs`` of judged windows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotenant.forecasting.datasets.columns import SOLO
from cotenant.forecasting.datasets.intervals import Estimate, estimate
from cotenant.forecasting.datasets.raw import EXTRA_NAMES

Row = dict[str, Any]
Workloads = Mapping[tuple[str, str], Mapping[str, Any]]

_DESCRIBED = ("family", "architecture", "batch", "kind", "reads")
_MEDIANS = tuple(
    column.name
    for column in SOLO
    if column.source == "median over accepted solo windows" and column.name not in {"rate", "host_cores"}
)


def solo_rows(samples: Iterable[Row], extras: Iterable[Row], workloads: Workloads) -> list[Row]:
    """One row per GPU type, mode, member and share, from its solo windows.

    Args:
        samples: Judged windows.
        extras: Rows with ``gpu_type``, ``mode``, ``member`` and the extra columns.
        workloads: What the cards say of (gpu_type, member).
    """
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in samples:
        if row["kind"] == "solo":
            groups[row["gpu_type"], row["mode"], row["member"], row["share"]].append(row)
    found: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for extra in extras:
        found[extra["gpu_type"], extra["mode"], extra["member"]].append(extra)
    rows = []
    for key in sorted(groups, key=_sortable):
        gpu_type, mode, member, share = key
        described = workloads.get((gpu_type, member), {})
        rows.append(
            {"gpu_type": gpu_type, "mode": mode, "member": member, "share": share}
            | {field: described.get(field) for field in _DESCRIBED}
            | _solo_figures(groups[key])
            | {name: _median(extra[name] for extra in found[gpu_type, mode, member]) for name in EXTRA_NAMES}
        )
    return rows


def pair_rows(samples: Sequence[Row], failures: Iterable[Row], solo: Iterable[Row], workloads: Workloads) -> list[Row]:
    """One row per GPU type, mode, shares, set and focal member; sets that did not fit are rows without throughput.

    Args:
        samples: Judged windows.
        failures: Events with ``gpu_type``.
        solo: The rows of ``solo_rows``.
        workloads: What the cards say of (gpu_type, member).
    """
    windows = _shared_windows(samples)
    groups: defaultdict[tuple[Any, ...], list[list[Row]]] = defaultdict(list)
    for window in windows:
        groups[_set_key(window)].append(window)
    failed, too_large = _failed_sets(failures)
    demands = _Demands(solo)
    rows: list[Row] = []
    for key in sorted(groups.keys() | too_large, key=_sortable):
        fits = key not in too_large or any(not row["rejected"] for window in groups[key] for row in window)
        saving = _saving(groups[key], len(key[3]))
        of_set = {
            "failures": failed[key[:2] + key[3:]],
            "fits": fits,
            "saving": saving.median,
            "saving_low": saving.low,
            "saving_high": saving.high,
        }
        rows.extend(
            _identity(key, member, workloads)
            | _pair_figures([row for w in groups[key] for row in w if (row["member"], row["share"]) == member])
            | of_set
            | demands.of(key[0], key[1], [name for name, _ in key[3]], member[0])
            for member in dict.fromkeys(key[3])
        )
    return rows


class _Demands:
    """Looks up utilisations alone: in the same mode and not held to a share where there is such a row."""

    def __init__(self, solo: Iterable[Row]) -> None:
        self._rows: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in solo:
            if row["util_mean"] is not None:
                self._rows[row["gpu_type"], row["member"]].append(row)

    def of(self, gpu_type: str, mode: str, names: Sequence[str], member: str) -> dict[str, float | None]:
        utils = [self._one(gpu_type, mode, name) for name in names]
        known = [util for util in utils if util is not None]
        own = self._one(gpu_type, mode, member)
        total = math.fsum(known) if len(known) == len(utils) else None
        others = None if total is None or own is None else max(0.0, total - own)
        return {"util": own, "util_others": others, "util_sum": total}

    def _one(self, gpu_type: str, mode: str, member: str) -> float | None:
        rows = self._rows[gpu_type, member]
        best = min(rows, key=lambda row: (row["share"] is not None, row["mode"] != mode), default=None)
        return None if best is None else float(best["util_mean"])


def _solo_figures(rows: Sequence[Row]) -> Row:
    accepted = [row for row in rows if not row["rejected"]]
    rate = estimate([row["rate"] for row in accepted], [row["occasion"] for row in accepted])
    return {
        "runs": len({row["run_id"] for row in rows}),
        "occasions": rate.occasions,
        "windows": rate.windows,
        "rejected": len(rows) - len(accepted),
        "rate": rate.median,
        "rate_low": rate.low,
        "rate_high": rate.high,
        "memory_bytes": max((row["memory_bytes"] for row in accepted if row["memory_bytes"] is not None), default=None),
        "host_cores": _median(
            row["host_busy_s"] / row["window_s"] for row in accepted if row["host_busy_s"] is not None
        ),
    } | {name: _median(_reading(row, name) for row in accepted) for name in _MEDIANS}


def _pair_figures(rows: Sequence[Row]) -> Row:
    accepted = [row for row in rows if not row["rejected"]]
    throughput = estimate([row["throughput"] for row in accepted], [row["occasion"] for row in accepted])
    return {
        "runs": len({row["run_id"] for row in rows}),
        "occasions": throughput.occasions,
        "windows": throughput.windows,
        "rejected": len(rows) - len(accepted),
        "throughput": throughput.median,
        "throughput_low": throughput.low,
        "throughput_high": throughput.high,
        "slowdown": None if throughput.median is None else 1.0 / throughput.median,
        "rate_solo": _median(row["rate_solo"] for row in accepted),
        "rate_shared": _median(row["rate"] for row in accepted),
    }


def _reading(row: Row, name: str) -> float | None:
    """A reading of a solo window. Alone, the member's utilisation is the device's, where only that is told."""
    value: float | None = row[name]
    return row["device_util"] if value is None and name == "util_mean" else value


def _saving(windows: Iterable[Sequence[Row]], size: int) -> Estimate:
    """Packing saving 1 - 1/sum(n), from the sums of the windows that were accepted for all members."""
    sums, occasions = [], []
    for window in windows:
        parts = [row["throughput"] for row in window if not row["rejected"]]
        if len(parts) == size:
            sums.append(math.fsum(parts))
            occasions.append(window[0]["occasion"])
    total = estimate(sums, occasions)
    median, low, high = (None if end is None else 1.0 - 1.0 / end for end in (total.median, total.low, total.high))
    return Estimate(median, low, high, total.windows, total.occasions)


def _shared_windows(samples: Iterable[Row]) -> list[list[Row]]:
    windows: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in samples:
        if row["kind"] == "shared":
            windows[row["run_id"], row["visit"], row["position"]].append(row)
    return list(windows.values())


def _set_key(window: Sequence[Row]) -> tuple[Any, ...]:
    """(gpu_type, mode, shares, ((member, share), …) sorted): the same for any order of the members."""
    row = window[0]
    held = {other["slot"]: other["share"] for other in window}
    names = enumerate(row["set"].split("+"))
    members = tuple(sorted(((name, held.get(slot)) for slot, name in names), key=_sortable))
    return row["gpu_type"], row["mode"], _shares(members), members


def _failed_sets(failures: Iterable[Row]) -> tuple[defaultdict[tuple[Any, ...], int], set[tuple[Any, ...]]]:
    """How often each set failed, by (gpu_type, mode, members), and the keys of those that did not fit."""
    failed: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    too_large = set()
    for event in failures:
        names = event.get("members") or []
        if len(names) < 2 or event.get("mode") is None:
            continue
        shares = event.get("shares") or [None] * len(names)
        members = tuple(sorted(zip(names, shares, strict=True), key=_sortable))
        failed[event["gpu_type"], event["mode"], members] += 1
        if event["event"] == "does_not_fit":
            too_large.add((event["gpu_type"], event["mode"], _shares(members), members))
    return failed, too_large


def _identity(key: tuple[Any, ...], member: tuple[str, float | None], workloads: Workloads) -> Row:
    gpu_type, mode, shares, members = key
    others = list(members)
    others.remove(member)
    families = [workloads.get((gpu_type, name), {}).get("family") or "unknown" for name, _ in members]
    return {
        "gpu_type": gpu_type,
        "mode": mode,
        "shares": shares,
        "set": "+".join(name for name, _ in members),
        "size": len(members),
        "member": member[0],
        "share": member[1],
        "others": "+".join(name for name, _ in others),
        "share_others": _shares(others),
        "families": "+".join(families),
    }


def _shares(members: Iterable[tuple[str, float | None]]) -> str:
    shares = [share for _, share in members]
    if all(share is None for share in shares):
        return ""
    return "/".join("-" if share is None else f"{share:g}" for share in shares)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _sortable(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key whose missing shares can be compared; 0 is no share, so it stands for none."""
    return tuple(_sortable(part) if isinstance(part, tuple) else 0.0 if part is None else part for part in key)


__all__ = ["pair_rows", "solo_rows"]
