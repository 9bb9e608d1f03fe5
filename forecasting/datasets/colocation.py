"""The co-location data set: what workloads do alone and how they slow each other down, as three tables and cards.

``samples`` has one row per member and window, ``solo`` one per workload, ``pairs`` one per set and focal member
(triples too). ``columns.py`` declares their columns, ``docs/colocation.md`` explains them.

* ``write_tables(out)`` makes the tables of one run of the measurement suite.
* ``load_colocation(name_or_path)`` loads a shipped data set, a folder of tables, or a run of the suite.
* ``merge([...])`` pools several.
* ``profiles`` and ``observations`` (``bridge.py``) turn tables into what predictors take.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cotenant.forecasting.datasets import aggregate
from cotenant.forecasting.datasets.bridge import Observation, observations, profiles
from cotenant.forecasting.datasets.columns import FORMAT, TABLES
from cotenant.forecasting.datasets.raw import CARD_FILE, WINDOWS_FILE, check_format, read_json, read_raw
from cotenant.forecasting.datasets.rejection import judge
from cotenant.forecasting.datasets.schema import DataError, check_card, conform, frame_of, is_missing, require
from cotenant.forecasting.datasets.tables import Tables

SHIPPED = Path(__file__).parent / "shipped"
_POOLED_METHOD = ("window_s", "settle_s")
_DIGITS = 6


def write_tables(out: Path | str, to: Path | str | None = None) -> Tables:
    """Make the tables of one run and write them as Parquet and CSV, with the card, to ``to`` (``out``/tables).

    Raises:
        DataError: A file of the run is missing or has something that cannot be accepted.
    """
    tables = read_run(out)
    save(tables, Path(out) / "tables" if to is None else to)
    return tables


def read_run(out: Path | str) -> Tables:
    """Make the tables of what one run of the suite left in ``out``, dry runs too.

    Raises:
        DataError: A file is missing or has something that cannot be accepted.
    """
    raw = read_raw(Path(out))
    origin = {"run_id": raw.card["run_id"], "gpu_type": raw.card["gpu_type"]}
    samples = judge(raw.windows, raw.card["device"])
    failures = [origin | failure for failure in raw.failures]
    return _assemble(samples, [origin | extra for extra in raw.extras], failures, [raw.card], raw.dropped)


def save(tables: Tables, to: Path | str) -> None:
    """Write a data set to the folder ``to``: each table as Parquet and CSV, and ``card.json``.

    Numbers have six significant digits in the CSV, times of day milliseconds.
    """
    folder = Path(to)
    if (folder / WINDOWS_FILE).exists():
        raise DataError(f"{folder}: a run of the measurement suite is in it; give another folder for the tables")
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        frame: pd.DataFrame = getattr(tables, name)
        frame.to_parquet(folder / f"{name}.parquet", index=False, compression="zstd")
        _rounded(frame).to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
    card = {
        "format": FORMAT,
        "runs": list(tables.cards),
        "failures": list(tables.failures),
        "dropped": dict(tables.dropped),
    }
    text = json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / CARD_FILE).write_text(text + "\n", encoding="utf-8")


def load_colocation(source: Path | str, allow_dry_run: bool = False) -> Tables:
    """Load a data set.

    Args:
        source: The name of a shipped data set (see ``shipped``), a folder of tables, or a run of the suite.
        allow_dry_run: Accept data that were made up to try the suite.

    Raises:
        DataError: There is no such data set, it is of another format, something in it is not accepted, or it is a
            dry run.
    """
    folder = SHIPPED / source if isinstance(source, str) and source in shipped() else Path(source)
    if (folder / WINDOWS_FILE).exists():
        tables = read_run(folder)
    elif (folder / "pairs.parquet").exists():
        tables = _load_tables(folder)
    else:
        names = ", ".join(shipped()) or "none yet"
        raise DataError(f"{source}: there is no data set; give a folder of tables, a run, or a shipped name ({names})")
    if not allow_dry_run:
        _refuse_dry_runs(tables)
    return tables


def shipped() -> list[str]:
    """The names of the data sets in the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/pairs.parquet"))


def merge(runs: Iterable[Tables | Path | str], allow_dry_run: bool = False) -> Tables:
    """Pool several runs or data sets.

    Runs on the same type of device are pooled: the occasions of the later run go on counting where the earlier ended.
    Types of devices stay apart. A window that is in twice counts once.

    Raises:
        DataError: There is nothing to merge; one is a dry run; two on the same type of device were measured with
            windows of another length, or mean another workload by the same name.
    """
    parts = [run if isinstance(run, Tables) else load_colocation(run, allow_dry_run) for run in runs]
    if not parts:
        raise DataError("runs: an empty list is not accepted; give at least one run")
    if not allow_dry_run:
        for part in parts:
            _refuse_dry_runs(part)
    cards = _merge_cards(parts)
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    samples, doubled = _merge_samples(parts)
    dropped["duplicates"] += doubled
    failures = {json.dumps(failure, sort_keys=True): failure for part in parts for failure in part.failures}
    extras = [row for part in parts for row in _records(part.solo)]
    return _assemble(samples, extras, list(failures.values()), cards, dropped)


def _assemble(
    samples: Sequence[dict[str, Any]],
    extras: Sequence[dict[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    cards: Sequence[Mapping[str, Any]],
    dropped: Mapping[str, int],
) -> Tables:
    workloads = {(card["gpu_type"], name): what for card in cards for name, what in card["workloads"].items()}
    solo = aggregate.solo_rows(samples, extras, workloads)
    pairs = aggregate.pair_rows(samples, [dict(failure) for failure in failures], solo, workloads)
    return Tables(
        samples=frame_of("samples", samples),
        solo=frame_of("solo", solo),
        pairs=frame_of("pairs", pairs),
        cards=tuple(cards),
        failures=tuple(failures),
        dropped={reason: number for reason, number in sorted(dropped.items()) if number},
    )


def _load_tables(folder: Path) -> Tables:
    card = read_json(folder / CARD_FILE)
    check_format(folder / CARD_FILE, card)
    runs = card.get("runs")
    if not isinstance(runs, list) or not runs:
        raise DataError(f"{folder / CARD_FILE}: field 'runs': {runs!r} is not accepted; give a list of cards")
    for run in runs:
        check_format(folder / CARD_FILE, run)
        require(check_card(run, str(folder / CARD_FILE)))
    frames = {name: conform(name, _read_parquet(folder / f"{name}.parquet")) for name in TABLES}
    return Tables(
        **frames, cards=tuple(runs), failures=tuple(card.get("failures", ())), dropped=dict(card.get("dropped", {}))
    )


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; write the tables again") from None
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        raise DataError(f"{path}: not a Parquet file ({error})") from None


def _refuse_dry_runs(tables: Tables) -> None:
    for card in tables.cards:
        if card["dry_run"]:
            raise DataError(f"run {card['run_id']}: field 'dry_run': True is not accepted; its figures are made up")


def _merge_cards(parts: Sequence[Tables]) -> list[Mapping[str, Any]]:
    """The cards in order of time, each once; runs that are pooled must mean the same by what they say."""
    cards: dict[str, Mapping[str, Any]] = {}
    for part in parts:
        for card in part.cards:
            cards.setdefault(card["run_id"], card)
    starts = _starts([row for part in parts for row in _records(part.samples)])
    ordered = sorted(cards.values(), key=lambda card: (starts.get(card["run_id"], math.inf), card["run_id"]))
    first: dict[str, Mapping[str, Any]] = {}
    for card in ordered:
        _refuse_conflict(first.setdefault(card["gpu_type"], card), card)
    return ordered


def _refuse_conflict(first: Mapping[str, Any], card: Mapping[str, Any]) -> None:
    claims = [
        (f"method.{field}", first["method"][field], card["method"][field])
        for field in _POOLED_METHOD
    ] + [
        (f"workloads.{name}", first["workloads"][name], card["workloads"][name])
        for name in sorted(first["workloads"].keys() & card["workloads"].keys())
    ]  # fmt: skip
    for field, wanted, given in claims:
        if wanted != given:
            raise DataError(
                f"run {card['run_id']}: field {field!r}: {given!r} is not accepted beside run {first['run_id']}; "
                f"give runs on {card['gpu_type']!r} with {wanted!r}, or keep them apart"
            )


def _merge_samples(parts: Sequence[Tables]) -> tuple[list[dict[str, Any]], int]:
    """The samples of all parts in order of time with occasions renumbered, and how many were there twice."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    total = 0
    for part in parts:
        for row in _records(part.samples):
            total += 1
            rows.setdefault((row["run_id"], row["visit"], row["position"], row["slot"]), row)
    kept = list(rows.values())
    starts = _starts(kept)
    found = {(row["gpu_type"], row["run_id"], _visited(row)) for row in kept}
    occasions: dict[tuple[str, str, int], int] = {}
    counts: Counter[str] = Counter()
    for gpu_type, run_id, visited in sorted(found, key=lambda key: (starts[key[1]], key)):
        counts[gpu_type] += 1
        occasions[gpu_type, run_id, visited] = counts[gpu_type]
    for row in kept:
        row["occasion"] = occasions[row["gpu_type"], row["run_id"], _visited(row)]
    kept.sort(key=lambda row: (row["gpu_type"], row["started_unix_s"], row["visit"], row["position"], row["slot"]))
    return kept, total - len(kept)


def _visited(row: Mapping[str, Any]) -> int:
    """The occasion within the row's own run, whatever it became when runs were pooled."""
    return int(row["visit"].rpartition("#")[2])


def _starts(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """When each run's first window began."""
    starts: dict[str, float] = {}
    for row in rows:
        starts[row["run_id"]] = min(row["started_unix_s"], starts.get(row["run_id"], math.inf))
    return starts


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, what is missing as None."""
    records: list[dict[str, Any]] = frame.to_dict("records")  # type: ignore[assignment]
    return [{name: None if is_missing(value) else value for name, value in row.items()} for row in records]


def _rounded(frame: pd.DataFrame) -> pd.DataFrame:
    columns = {}
    for name in frame.columns:
        column = frame[name]
        if name == "started_unix_s":
            column = column.round(3)
        elif column.dtype == "float64":
            column = column.map(lambda value: float(f"{value:.{_DIGITS}g}"))
        columns[name] = column
    return pd.DataFrame(columns)


__all__ = [
    "DataError",
    "Observation",
    "Tables",
    "load_colocation",
    "merge",
    "observations",
    "profiles",
    "read_run",
    "save",
    "shipped",
    "write_tables",
]
