"""Checks of the tables and cards of the co-location data set against their declaration in ``columns.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cotenant.forecasting.datasets.columns import CARD, KEYS, TABLES, Column

_DTYPES = {"string": "string", "integer": "Int64", "number": "float64", "flag": "bool"}
_SHOWN = 8


class DataError(ValueError):
    """Data that cannot be used. The message names the file or table, the place, the value and what is accepted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a table.

    Attributes:
        table: The table or file.
        column: The column.
        row: Its row, from 0; None when it is about the whole column.
        value: What is there.
        accepted: What would be accepted.
    """

    table: str
    column: str
    row: int | None
    value: object
    accepted: str

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row}"
        return f"{self.table}: column {self.column!r}{where}: {self.value!r} is not accepted; give {self.accepted}"


def check(name: str, frame: pd.DataFrame) -> list[Problem]:
    """What is wrong with a table; an empty list when nothing is. Columns that are not declared are not looked at.

    Args:
        name: ``samples``, ``solo`` or ``pairs``.
        frame: The table.
    """
    problems: list[Problem] = []
    for column in TABLES[name]:
        if column.name not in frame.columns:
            problems.append(Problem(name, column.name, None, None, f"the column; {column.accepted} in each row"))
            continue
        for row, value in enumerate(frame[column.name].tolist()):
            accepted = refuses(column, value)
            if accepted:
                problems.append(Problem(name, column.name, row, value, accepted))
    return problems or _check_key(name, frame)


def check_card(card: Mapping[str, Any], where: str = "card.json") -> list[Problem]:
    """What is wrong with the card of one run; an empty list when nothing is."""
    problems = []
    for column in CARD:
        accepted = refuses(column, card.get(column.name))
        if accepted:
            problems.append(Problem(where, column.name, None, card.get(column.name), accepted))
    method = card.get("method")
    for field in ("window_s", "settle_s"):
        value = method.get(field) if isinstance(method, Mapping) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 3600:
            problems.append(Problem(where, f"method.{field}", None, value, "a number of seconds in [0, 3600]"))
    if not isinstance(card.get("workloads"), Mapping):
        given = card.get("workloads")
        problems.append(Problem(where, "workloads", None, given, "a mapping of names to their description"))
    return problems


def refuses(column: Column, value: object) -> str:
    """Empty when the column accepts the value; otherwise what it would accept."""
    if is_missing(value):
        return "" if column.na else f"{column.accepted}; it may not be missing"
    return "" if _fits(column, value) else column.accepted


def is_missing(value: object) -> bool:
    """Whether a value is a missing reading: None, NA or not a number."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def require(problems: Sequence[Problem]) -> None:
    """Raise ``DataError`` with the first problems when there are any."""
    if problems:
        more = f"\n… and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DataError("\n".join(str(problem) for problem in problems[:_SHOWN]) + more)


def conform(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The declared columns in their order and types, checked.

    Raises:
        DataError: Something in the table is not accepted.
    """
    require(check(name, frame))
    columns = {column.name: frame[column.name].astype(_DTYPES[column.kind]) for column in TABLES[name]}  # type: ignore[call-overload]
    return pd.DataFrame(columns).reset_index(drop=True)


def frame_of(name: str, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A checked table made of rows; a column that a row lacks is missing there.

    Raises:
        DataError: Something in the rows is not accepted.
    """
    kept = list(rows)
    columns = {column.name: [row.get(column.name) for row in kept] for column in TABLES[name]}
    return conform(name, pd.DataFrame(columns, dtype="object"))


def _fits(column: Column, value: object) -> bool:
    if column.kind == "string":
        return isinstance(value, str) and (not column.values or value in column.values)
    # Booleans of numpy and pandas print the same as Python's, which their types do not tell.
    is_flag = str(value) in {"True", "False"}
    if column.kind == "flag":
        return is_flag
    if is_flag or isinstance(value, str):
        return False
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    if column.kind == "integer" and not number.is_integer():
        return False
    low = -math.inf if column.low is None else column.low
    high = math.inf if column.high is None else column.high
    return math.isfinite(number) and low <= number <= high and not (column.above and number == low)


def _check_key(name: str, frame: pd.DataFrame) -> list[Problem]:
    key = list(KEYS[name])
    doubled = frame.duplicated(subset=key)
    rows = [row for row, double in enumerate(doubled.tolist()) if double]
    what = f"each combination of {', '.join(key)} once"
    return [Problem(name, key[-1], row, tuple(frame[key].iloc[row].tolist()), what) for row in rows]


__all__ = ["DataError", "Problem", "check", "check_card", "conform", "frame_of", "is_missing", "refuses", "require"]
