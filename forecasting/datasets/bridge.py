"""From measured tables to what interference predictors take: profiles of the members, and what was observed of sets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.tables import Tables
from cotenant.forecasting.types import DemandProfile


@dataclass(frozen=True, slots=True)
class Observation:
    """The measured throughput of one member of one set that shared a device.

    Attributes:
        gpu_type: Type of the device.
        mode: How it was shared.
        members: Names of all members of the set.
        families: Their families, in the same order: for hold-out by family.
        profiles: What they do alone, in the same order: the argument of ``InterferencePredictor.predict``.
        focal: Index of the member that ``n`` is of; the prediction to compare with is ``predict(profiles)[focal]``.
        n: Its normalised throughput, rate together / rate alone.
        low: Lower end of the 80 % interval; None when measured in one window.
        high: Upper end.
        windows: Number of windows behind it.
        shares: The share each member was held to, in the order of ``members``; None for one that was not.
    """

    gpu_type: str
    mode: str
    members: tuple[str, ...]
    families: tuple[str, ...]
    profiles: tuple[DemandProfile, ...]
    focal: int
    n: float
    low: float | None
    high: float | None
    windows: int
    shares: tuple[float | None, ...]


def profiles(tables: Tables, mode: str | None = None, gpu_type: str | None = None) -> dict[str, DemandProfile]:
    """What each member of the data set does alone on one type of device.

    A member measured alone in several modes is taken from ``mode`` where it is there, never from a row that was held to
    a share when there is another. Its utilisation counts as unknown where the device did not tell.

    Args:
        tables: The data set.
        mode: The sharing mode; None takes the row with the most windows.
        gpu_type: The type of device; may be left out when the data set has only one.

    Raises:
        DataError: The data set has several types of devices and none was given, or not this one.
    """
    chosen = _gpu_type(tables, gpu_type)
    window_s = {(row["member"], row["run_id"]): row["window_s"] for row in tables.samples.to_dict("records")}
    seconds = {member: length for (member, _), length in window_s.items()}
    rows: defaultdict[str, list[dict[Any, Any]]] = defaultdict(list)
    for row in tables.solo.to_dict("records"):
        if row["gpu_type"] == chosen and row["windows"] > 0:
            rows[row["member"]].append(row)
    best = {
        member: min(
            found, key=lambda row: (not pd.isna(row["share"]), mode not in {None, row["mode"]}, -row["windows"])
        )
        for member, found in rows.items()
    }
    return {member: _profile(row, float(seconds[member])) for member, row in best.items()}


def observations(tables: Tables, mode: str, gpu_type: str | None = None) -> list[Observation]:
    """What was measured of the sets in one mode: one entry per set and focal member.

    Sets that did not fit and members whose windows were all rejected are left out: they have no throughput.

    Args:
        tables: The data set.
        mode: The sharing mode.
        gpu_type: The type of device; may be left out when the data set has only one.

    Raises:
        DataError: The data set has several types of devices and none was given, or not this one; or nothing was
            measured in this mode.
    """
    chosen = _gpu_type(tables, gpu_type)
    here = tables.pairs[tables.pairs["gpu_type"] == chosen]
    if not (here["mode"] == mode).any():
        known = ", ".join(sorted(set(here["mode"].tolist()))) or "nothing was measured"
        raise DataError(f"mode: {mode!r} is not accepted; measured on {chosen!r} are: {known}")
    alone = profiles(tables, mode, chosen)
    found = []
    for row in here[here["mode"] == mode].to_dict("records"):
        names = tuple(row["set"].split("+"))
        if not pd.isna(row["throughput"]) and all(name in alone for name in names):
            found.append(_observation(row, names, alone))
    return found


def _observation(row: dict[Any, Any], names: tuple[str, ...], alone: dict[str, DemandProfile]) -> Observation:
    shares = tuple(_share(part) for part in row["shares"].split("/")) if row["shares"] else (None,) * len(names)
    own = None if pd.isna(row["share"]) else float(row["share"])
    # Twice the same workload, held to different shares: the share tells which of the two it is.
    focal = next(i for i, name in enumerate(names) if name == row["member"] and _same(shares[i], own))
    return Observation(
        gpu_type=row["gpu_type"],
        mode=row["mode"],
        members=names,
        families=tuple(row["families"].split("+")),
        profiles=tuple(alone[name] for name in names),
        focal=focal,
        n=float(row["throughput"]),
        low=None if pd.isna(row["throughput_low"]) else float(row["throughput_low"]),
        high=None if pd.isna(row["throughput_high"]) else float(row["throughput_high"]),
        windows=int(row["windows"]),
        shares=shares,
    )


def _profile(row: dict[Any, Any], window_s: float) -> DemandProfile:
    memory = None if pd.isna(row["memory_bytes"]) else int(row["memory_bytes"])
    rate = None if pd.isna(row["rate"]) else float(row["rate"])
    observed_s = float(row["windows"]) * window_s
    known = not pd.isna(row["util_mean"])
    mean = min(1.0, float(row["util_mean"])) if known else 1.0
    peak = mean if pd.isna(row["util_peak"]) else min(1.0, max(mean, float(row["util_peak"])))
    return DemandProfile(
        util_mean=mean,
        util_p95=peak,
        memory_bytes=memory,
        solo_step_rate=rate,
        observed_s=observed_s,
        source="history" if known else "unknown",
        membw_util=None if pd.isna(row["membw_util"]) else min(1.0, float(row["membw_util"])),
        fingerprint=row["member"],
        family="" if pd.isna(row["family"]) else row["family"],
    )


def _gpu_type(tables: Tables, gpu_type: str | None) -> str:
    known = tables.gpu_types
    if gpu_type is None and len(known) == 1:
        return known[0]
    if gpu_type not in known:
        raise DataError(f"gpu_type: {gpu_type!r} is not accepted; give one of {', '.join(map(repr, known))}")
    return gpu_type


def _share(text: str) -> float | None:
    return None if text == "-" else float(text)


def _same(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return abs(first - second) < 1e-3


__all__ = ["Observation", "observations", "profiles"]
