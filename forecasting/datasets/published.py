"""Reads tables and documents as others publish them; what cannot be used is named by file, line and column."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cotenant.forecasting.datasets.schema import DataError

MIB = float(1 << 20)
PERCENT = (0.0, 100.0)
FRACTION = (0.0, 1.0)
POSITIVE = (1e-9, 1e15)


def read_csv(
    path: Path,
    columns: Sequence[str],
    limits: Mapping[str, tuple[float, float]],
    *,
    optional: Sequence[str] = (),
    whole: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> Any:
    """Read the columns of a table, plain or compressed.

    Args:
        path: The file.
        columns: Those that must be there, with a value in every row.
        limits: Smallest and largest value accepted of those that are numbers.
        optional: Those that may be absent or empty; they are NaN there.
        whole: Those of ``limits`` that are whole numbers.
        names: All columns of a file without a head, in order.

    Returns:
        The table, its numbers as such.

    Raises:
        DataError: It cannot be read, has no rows, or a column or value is missing or not accepted.
    """
    try:
        frame = pd.read_csv(path, header="infer" if names is None else None)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if names is not None:
        if len(frame.columns) != len(names):
            raise DataError(f"{path}: it has {len(frame.columns)} columns; expected {len(names)}: {', '.join(names)}")
        frame.columns = pd.Index(names)
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise DataError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
    if frame.empty:
        raise DataError(f"{path}: it has no rows")
    first = 2 if names is None else 1
    for name in (*columns, *optional):
        values = frame[name] if name in frame.columns else pd.Series(np.nan, index=frame.index)
        empty = values.isna().to_numpy()
        if empty.any() and name not in optional:
            raise DataError(f"{path}: line {int(empty.argmax()) + first}: column {name!r} is empty")
        if name in limits:
            least, most = limits[name]
            numbers = as_numbers(values)
            bad = ~numbers.between(least, most).to_numpy() & ~empty
            noun = "a number"
            if name in whole:
                bad |= (numbers % 1 != 0).to_numpy() & ~empty
                noun = "a whole number"
            if bad.any():
                at = int(bad.argmax())
                raise DataError(
                    f"{path}: line {at + first}: column {name!r}: {values.iloc[at]!s:.40} is not accepted; "
                    f"give {noun} from {least:g} to {most:g}"
                )
            values = numbers
        frame[name] = values
    return frame


def as_numbers(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return what a column holds as numbers: NaN where there is none, infinite what is larger than any."""
    if pd.api.types.is_numeric_dtype(values):
        return values
    return pd.Series([_number(str(value)) for value in values], index=values.index, dtype=np.float64)


def _number(text: str) -> float:
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def read_json(path: Path) -> Any:
    """Read a JSON document, plain or compressed with gzip.

    Raises:
        DataError: It cannot be read.
    """
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


__all__ = ["FRACTION", "MIB", "PERCENT", "POSITIVE", "as_numbers", "read_csv", "read_json"]
