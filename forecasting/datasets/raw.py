"""Reads what the measurement suite wrote: the card, the windows, the events and the extras of one run.

A reading that no device can give (250 %, 2^64 bytes, NaN, a negative time) becomes missing and is counted. What
identifies a window must be right, or the file is refused. The last line of a file may be torn: a run that was killed
while it wrote leaves one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.forecasting.datasets.columns import FORMAT, MIX, MODES, SAMPLES, SOLO, Column
from cotenant.forecasting.datasets.schema import DataError, check_card, is_missing, refuses, require

CARD_FILE = "card.json"
WINDOWS_FILE = "windows.jsonl"
EVENTS_FILE = "events.jsonl"
EXTRAS_FILE = "solo_extras.jsonl"

_RAW_COLUMNS = tuple(
    column for column in SAMPLES if column.source == "windows.jsonl" and column.name not in {"set", "size"}
)
_STRUCTURE = tuple(column for column in _RAW_COLUMNS if not column.na)
_READINGS = tuple(column for column in _RAW_COLUMNS if column.na)
_EXTRAS = tuple(column for column in SOLO if column.source.startswith(EXTRAS_FILE))
EXTRA_NAMES = tuple(column.name for column in _EXTRAS)
_SHARES = re.compile(r"[a-z_]+:([0-9]+(?:-[0-9]+)*)/")  # "mps_cap:70-30/a+b#1"
_KNOWN = {"format", "members", *(column.name for column in _RAW_COLUMNS)}


@dataclass(frozen=True, slots=True)
class RawRun:
    """One run as it was written.

    Attributes:
        card: The card.
        windows: One row per member and window, with the columns of ``samples`` that come from the file or the card,
            in order of time.
        failures: The events: sets that did not fit, hung, died, were refused.
        extras: One row per solo visit: ``member``, ``mode`` and the extra columns of ``solo``.
        dropped: What was left out, by reason: ``duplicates``, ``torn_lines``, ``absurd_readings``, ``unknown_fields``.
    """

    card: dict[str, Any]
    windows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    extras: list[dict[str, Any]]
    dropped: dict[str, int]


def read_raw(folder: Path) -> RawRun:
    """Read the files that the suite wrote to ``folder``.

    Raises:
        DataError: A file is missing, is of another format, or has something that cannot be accepted.
    """
    card = read_json(folder / CARD_FILE)
    check_format(folder / CARD_FILE, card)
    require(check_card(card, str(folder / CARD_FILE)))
    dropped: Counter[str] = Counter()
    windows = _windows(folder / WINDOWS_FILE, card, dropped)
    failures = [_failure(where, row) for where, row in _lines(folder / EVENTS_FILE, dropped, needed=False)]
    extras = [_extra(where, row, dropped) for where, row in _lines(folder / EXTRAS_FILE, dropped, needed=False)]
    return RawRun(card, windows, failures, extras, dict(dropped))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        DataError: There is no such file, or something else is in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; give a folder that the measurement suite wrote") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: {type(content).__name__} is not accepted; give a JSON object")
    return content


def check_format(where: Path | str, record: Mapping[str, Any]) -> None:
    """Refuse a record of another format.

    Raises:
        DataError: Its field ``format`` is not the number this version reads.
    """
    number = record.get("format")
    if number != FORMAT or isinstance(number, bool):
        raise DataError(f"{where}: field 'format': {number!r} is not accepted; this version reads {FORMAT}")


def _windows(path: Path, card: Mapping[str, Any], dropped: Counter[str]) -> list[dict[str, Any]]:
    seen: set[tuple[object, ...]] = set()
    unknown: set[str] = set()
    windows = []
    for where, row in _lines(path, dropped, needed=True):
        check_format(where, row)
        unknown |= row.keys() - _KNOWN
        window = {"run_id": card["run_id"], "gpu_type": card["gpu_type"], **_window(where, row, dropped)}
        key = (window["visit"], window["position"], window["slot"])
        if key in seen:
            dropped["duplicates"] += 1
            continue
        seen.add(key)
        windows.append(window)
    dropped["unknown_fields"] += len(unknown)
    if not windows:
        raise DataError(f"{path}: there is no window in it; measure first")
    windows.sort(key=lambda window: (window["started_unix_s"], window["visit"], window["position"], window["slot"]))
    return windows


def _window(where: str, row: Mapping[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    window: dict[str, Any] = {column.name: _structural(where, column, row.get(column.name)) for column in _STRUCTURE}
    window |= {column.name: _reading(column, row.get(column.name), dropped) for column in _READINGS}
    members = _members(where, row.get("members"))
    window |= {"set": "+".join(members), "size": len(members), "occasion": _occasion(where, window["visit"])}
    slot, member = window["slot"], window["member"]
    if slot >= len(members) or members[slot] != member:
        raise DataError(f"{where}: field 'slot': {slot!r} is not accepted; give the place of {member!r} in {members}")
    return window


def _structural(where: str, column: Column, value: Any) -> Any:
    accepted = refuses(column, value)
    if accepted:
        raise DataError(f"{where}: field {column.name!r}: {value!r} is not accepted; give {accepted}")
    return value


def _reading(column: Column, value: object, dropped: Counter[str]) -> float | None:
    if value is None:
        return None
    if is_missing(value) or refuses(column, value):
        dropped["absurd_readings"] += 1
        return None
    return float(value)  # type: ignore[arg-type]


def _members(where: str, value: object) -> list[str]:
    names = value if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and name and not set(name) & set("+/#") for name in names):
        raise DataError(f"{where}: field 'members': {value!r} is not accepted; give a list of names without +, / and #")
    return names


def _occasion(where: str, visit: str) -> int:
    number = visit.rpartition("#")[2]
    if not number.isdecimal() or int(number) < 1:
        raise DataError(f"{where}: field 'visit': {visit!r} is not accepted; give mode/set#occasion, occasions from 1")
    return int(number)


def _failure(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    check_format(where, row)
    if not isinstance(row.get("event"), str):
        raise DataError(f"{where}: field 'event': {row.get('event')!r} is not accepted; give a text")
    fields = ("visit", "mode", "members", "event", "member", "message")
    failure = {field: row[field] for field in fields if row.get(field) is not None}
    shares = _SHARES.match(str(row.get("visit")))
    if shares:
        failure["shares"] = [int(percent) / 100.0 for percent in shares[1].split("-")]
    if "members" in failure:
        members = _members(where, failure["members"])
        if shares and len(failure["shares"]) != len(members):
            raise DataError(
                f"{where}: field 'visit': {row['visit']!r} is not accepted; give a share for each of {members}"
            )
    return failure


def _extra(where: str, row: Mapping[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    if not isinstance(row.get("member"), str) or row.get("mode") not in MODES:
        given = {field: row.get(field) for field in ("member", "mode")}
        raise DataError(
            f"{where}: {given} is not accepted; give 'member', a name, and 'mode', one of {', '.join(MODES)}"
        )
    mix = row.get("mix") or row.get("fractions") or {}
    flat = dict(row) | {f"mix_{name}": mix.get(name) for name in MIX if name in mix}
    readings = {column.name: _reading(column, flat.get(column.name), dropped) for column in _EXTRAS}
    return {"member": row["member"], "mode": row["mode"], **readings}


def _lines(path: Path, dropped: Counter[str], needed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and content of each line; only the last one may be torn."""
    if not path.exists():
        if needed:
            raise DataError(f"{path}: there is no such file; give a folder that the measurement suite wrote")
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                dropped["torn_lines"] += 1
                return
            raise DataError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: {type(row).__name__} is not accepted; give a JSON object")
        yield where, row


__all__ = ["CARD_FILE", "EXTRA_NAMES", "WINDOWS_FILE", "RawRun", "check_format", "read_json", "read_raw"]
