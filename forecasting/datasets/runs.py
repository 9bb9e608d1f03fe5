"""Single runs and pairs from any table: columns are renamed, units made the same, and every value is checked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from cotenant.forecasting.characterisation.tables import MEMORY, PAIR_COLUMNS, TARGETS, UTIL, Pairs, Role, Runs
from cotenant.forecasting.datasets.published import as_numbers
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.tables import Tables, not_measured

USUAL_MODE = "timeslice"  # most is measured in it
_PERCENT = (0.0, 100.0)
_FORMS: Mapping[str, tuple[str, float]] = {
    "util_max_fraction": (UTIL, 100.0),
    "memory_max_fraction": (MEMORY, 100.0),
    "util_mean_fraction": ("util_mean", 100.0),
}
_BYTES = "memory_max_bytes"
_OPTIONAL: tuple[str, ...] = ("run", "architecture", "kind", "parameters", "util_mean")
NAMES: tuple[str, ...] = ("family", "batch", *TARGETS, *_OPTIONAL, *_FORMS, _BYTES)
_SHOWN = 12


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV (also compressed) or Parquet file; column names lose spaces around them.

    Raises:
        DataError: It cannot be read, it has no rows, or two columns of one name.
    """
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pandas' own parsing errors are ValueErrors
        raise DataError(f"{path.name}: it cannot be read as a table: {error}") from error
    table.columns = [str(name).strip() for name in table.columns]
    if table.columns.has_duplicates:
        raise DataError(f"{path.name}: column {table.columns[table.columns.duplicated()][0]!r} is there twice")
    if table.empty:
        raise DataError(f"{path.name}: it has no rows")
    return table


def read_runs(path: Path, columns: Mapping[str, str], device_memory_bytes: float | None = None) -> Runs:
    """Read single runs from a table with any column names.

    Args:
        path: CSV or Parquet file.
        columns: One of ``NAMES`` → the file's column, where they differ. ``family``, ``batch``, a utilisation
            (``util_max`` in percent or ``util_max_fraction``) and a memory (``memory_max`` in percent,
            ``memory_max_fraction`` or ``memory_max_bytes``) are needed.
        device_memory_bytes: Memory of the device; needed for ``memory_max_bytes``.

    Raises:
        DataError: A column is missing, or a value is not accepted.
    """
    if unknown := sorted(set(columns) - set(NAMES)):
        raise DataError(f"columns: {unknown[0]!r} is not accepted; give any of {', '.join(NAMES)}")
    return make_runs(_renamed(path, columns), path.name, device_memory_bytes)


def _renamed(path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """Read a table whose columns get our names; each of ours must stand for another of theirs, which it replaces."""
    table = read_table(path)
    require(path.name, table, columns.values())
    taken: dict[str, str] = {}
    for ours, theirs in columns.items():
        if theirs in taken:
            raise DataError(
                f"columns: {theirs!r} is not accepted for both {taken[theirs]!r} and {ours!r}; give another"
            )
        taken[theirs] = ours
    hidden = [ours for ours, theirs in columns.items() if ours != theirs and ours not in taken and ours in table]
    return table.drop(columns=hidden).rename(columns=taken)


def make_runs(
    table: pd.DataFrame, source: str, device_memory_bytes: float | None, roles: Mapping[str, Role] | None = None
) -> Runs:
    """Make checked runs of a table whose columns have our names (``NAMES``).

    Args:
        table: The rows; any further numeric column is a feature.
        source: Its name, for messages and reports.
        device_memory_bytes: Memory of the device; None when unknown.
        roles: Role of further features; "gpu" where it does not say. Columns with the role "derived" are kept apart.

    Raises:
        DataError: A column is missing, or a value is not accepted.
    """
    rows = _same_units(table, source, device_memory_bytes)
    require(source, rows, ("family", "batch", *TARGETS))
    rows["family"] = [_text(source, "family", i, value) for i, value in enumerate(rows["family"])]
    for name, default in (("architecture", rows["family"]), ("kind", "training")):
        rows[name] = rows[name].astype(str).str.strip() if name in rows else default
    _check_numbers(source, rows, "batch", (1.0, 1e9))
    for name in (*TARGETS, *(("util_mean",) if "util_mean" in rows else ())):
        _check_numbers(source, rows, name, _PERCENT, missing=name == "util_mean")
    if "parameters" in rows:
        _check_numbers(source, rows, "parameters", (1.0, 1e15), missing=True)
    if "run" not in rows:
        rows["run"] = [f"{a} batch {b:g}" for a, b in zip(rows["architecture"], rows["batch"], strict=True)]
    given = roles or {}
    own = {"run", "family", "architecture", "kind", *TARGETS, "util_mean"}
    features: dict[str, Role] = {}
    for name in rows.columns:
        if name in own or not pd.api.types.is_numeric_dtype(rows[name]):
            continue
        rows[name] = rows[name].astype(float).replace([np.inf, -np.inf], np.nan)
        features[name] = "before" if name in {"batch", "parameters"} else given.get(name, "gpu")
    return Runs(rows.reset_index(drop=True), features, source, device_memory_bytes)


def own_runs(tables: Tables, mode: str | None = None, gpu_type: str | None = None) -> tuple[Runs, Pairs]:
    """Make runs and pairs of the project's own co-location data set.

    Args:
        tables: The data set.
        mode: How the device was shared; None takes time slicing where it was measured, else the first.
        gpu_type: The type of device; None takes the first.

    Raises:
        DataError: There are no such rows, or a card does not say how much memory the device has.
    """
    solo = tables.solo[tables.solo["share"].isna()]
    solo = solo[solo["family"].notna() & solo["util_peak"].notna() & solo["batch"].notna()]
    measured = [(str(row.gpu_type), str(row.mode)) for row in solo.itertuples()]
    if gpu_type is None:
        gpu_type = measured[0][0] if measured else ""
    if mode is None:
        modes = [its_mode for its_type, its_mode in measured if its_type == gpu_type]
        mode = USUAL_MODE if USUAL_MODE in modes or not modes else modes[0]
    solo = solo[(solo["gpu_type"] == gpu_type) & (solo["mode"] == mode)]
    if solo.empty:
        raise not_measured("single runs", mode, gpu_type, measured)
    memory = next((card.get("memory_bytes") for card in tables.cards if card["gpu_type"] == gpu_type), None)
    if not isinstance(memory, (int, float)) or not memory > 0:
        raise DataError(f"card: memory_bytes {memory!r} of {gpu_type} is not accepted; give a number of bytes")
    solo = solo.dropna(subset=["memory_bytes"]).dropna(axis=1, how="all")
    taken = pd.DataFrame(solo.assign(util_peak=solo["util_peak"].clip(upper=1.0), batch=solo["batch"].astype(float)))
    renamed = {"member": "run", "util_peak": "util_max_fraction", "memory_bytes": _BYTES}
    taken = taken.rename(columns=renamed | {"util_mean": "util_mean_fraction"})
    if "util_mean_fraction" in taken:
        taken["util_mean_fraction"] = taken["util_mean_fraction"].clip(upper=1.0)
    counts = [name for name in ("runs", "occasions", "windows", "rejected", "share") if name in taken]
    runs = make_runs(taken.drop(columns=counts), f"{gpu_type}, {mode}", float(memory))
    return replace(runs, gpu_types=(gpu_type,)), _own_pairs(tables.pairs, gpu_type, mode)


def read_pairs(path: Path, columns: Mapping[str, str] | None = None) -> Pairs:
    """Read pairs in seconds from a table; ``columns`` maps ``PAIR_COLUMNS`` to the file's names.

    Raises:
        DataError: A column is missing, or a time is not a positive number.
    """
    return make_pairs(_renamed(path, columns or {}), path.name)


def make_pairs(table: pd.DataFrame, source: str) -> Pairs:
    """Make checked pairs of a table whose columns have our names; DataError for what is not accepted."""
    require(source, table, PAIR_COLUMNS)
    rows = table.reset_index(drop=True)
    for name in PAIR_COLUMNS[:2]:
        rows[name] = [_text(source, name, i, value) for i, value in enumerate(rows[name])]
    for name in PAIR_COLUMNS[2:]:
        _check_numbers(source, rows, name, (1e-9, 1e12))
    return Pairs(rows)


def require(source: str, table: pd.DataFrame, names: object) -> None:
    """Raise DataError when a table lacks a column."""
    wanted = [str(name) for name in names] if not isinstance(names, str) and hasattr(names, "__iter__") else []
    if missing := [name for name in wanted if name not in table]:
        there = ", ".join(map(str, table.columns[:_SHOWN])) + (", …" if len(table.columns) > _SHOWN else "")
        raise DataError(f"{source}: column {missing[0]!r} is missing; there are: {there}")


def _same_units(table: pd.DataFrame, source: str, device_memory_bytes: float | None) -> pd.DataFrame:
    rows = table.copy()
    for form, (name, factor) in _FORMS.items():
        if form in rows:
            rows[name] = as_numbers(rows.pop(form)) * factor
    if _BYTES in rows:
        if device_memory_bytes is None:
            raise DataError(f"{source}: {_BYTES} needs the device's memory; give it with --device-memory")
        rows[MEMORY] = as_numbers(rows.pop(_BYTES)) / device_memory_bytes * 100.0
    return rows


def _check_numbers(
    source: str, rows: pd.DataFrame, name: str, limits: tuple[float, float], missing: bool = False
) -> None:
    """Make a column numbers in place; DataError names the first row that is not accepted."""
    values = as_numbers(rows[name]).astype(float)
    for index, (raw, value) in enumerate(zip(rows[name], values, strict=True)):
        if missing and pd.isna(raw):
            continue
        if not math.isfinite(value) or not limits[0] <= value <= limits[1]:
            shown = "a missing value" if pd.isna(raw) else repr(raw)
            raise DataError(
                f"{source}: column {name!r}, row {index + 1}: {shown} is not accepted; "
                f"give a number from {limits[0]:g} to {limits[1]:g}"
            )
    rows[name] = values


def _text(source: str, name: str, index: int, value: object) -> str:
    text = "" if value is None or value != value else str(value).strip()  # noqa: PLR0124 - NaN is not itself
    if not text:
        raise DataError(f"{source}: column {name!r}, row {index + 1}: it is empty; give a name")
    return text


def _own_pairs(pairs: pd.DataFrame, gpu_type: str, mode: str) -> Pairs:
    chosen = pairs[
        (pairs["gpu_type"] == gpu_type)
        & (pairs["mode"] == mode)
        & (pairs["size"] == 2)
        & (pairs["shares"].fillna("") == "")
        & pairs["throughput"].notna()
    ]
    found = []
    for _, both in chosen.groupby("set", sort=True):
        members = both["member"].tolist()
        if len(members) == 2:
            rates = both["throughput"].astype(float).tolist()
            found.append((members[0], members[1], rates[0], rates[1]))
    return Pairs(pd.DataFrame(found, columns=["a", "b", "n_a", "n_b"]))
