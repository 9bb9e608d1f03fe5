"""Tables read row by row and field by field: what cannot be is an error that names file, line, field and value."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from cotenant.scheduler.simulation.errors import Place, TraceError

LONGEST_S = 1e8  # three years: beyond that a simulation would not come to its end
SHORTEST_S = 1e-3  # of a run: less is lost where times of years are rounded


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a reader says of a row that is no job.

    Attributes:
        why: Which rows these are and why they do not count, in the plural: "pods that were never scheduled".
    """

    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, read field by field.

    Attributes:
        path: The file.
        line: Line in it, from 1, or the name of the place.
        fields: The values as text, by column.
    """

    path: Path
    line: Place
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field that must not be empty."""
        if isinstance(self.line, int) and name not in self.fields:
            columns = ", ".join(str(each) for each in self.fields)
            raise self.error(name, "no such column", f"a table that has it; the columns are {columns}")
        if not self.has(name):
            raise self.error(name, self.fields.get(name), "a value")
        return str(self.fields[name])

    def number(self, name: str, least: float = 0.0, *, above: bool = False, most: float = math.inf) -> float:
        """Return a finite number from ``least`` (``above``: greater than it) to ``most``."""
        words = f"a number {'above' if above else 'of at least'} {least:g}"
        words += "" if most == math.inf else f" and at most {most:g}"
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise self.error(name, text, words) from None
        if not math.isfinite(value) or value < least or (above and value == least) or value > most:
            raise self.error(name, text, words)
        return value

    def seconds(self, name: str, per_second: float = 1.0, *, above: bool = False) -> float:
        """Return a time that the file gives in such parts of a second, at most ``LONGEST_S``."""
        return self.number(name, above=above, most=LONGEST_S * per_second) / per_second

    def optional_seconds(self, name: str) -> float | None:
        """Return a time in seconds, or None where the field is empty or missing."""
        return self.seconds(name) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Return whether the field is there and not empty."""
        return self.fields.get(name) not in (None, "")

    def optional(self, name: str, least: float = 0.0, *, above: bool = False) -> float | None:
        """Return a number, or None where the field is empty or missing."""
        return self.number(name, least, above=above) if self.has(name) else None

    def whole(self, name: str, least: int = 0) -> int:
        """Return a whole number of at least ``least``."""
        value = self.number(name, least)
        if value != int(value):
            raise self.error(name, self.fields[name], f"a whole number of at least {least}")
        return int(value)

    def time(self, name: str) -> float:
        """Return a date and time (ISO 8601, UTC unless it says otherwise) as Unix seconds."""
        text = self.text(name)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise self.error(name, text, "a date and time such as 2017-10-01 00:00:45") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def error(self, name: str, value: object, accepted: str) -> TraceError:
        """Return the error for this field."""
        return TraceError(self.path, self.line, name, value, accepted)


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file, plain or compressed with gzip.

    Raises:
        TraceError: What is read of it, here or in the block, is no text.
        OSError: The file cannot be read.
    """
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
                yield lines
        else:
            with path.open(encoding="utf-8", newline="") as lines:
                yield lines
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error) as error:
        why = " ".join(str(error).split())
        raise TraceError(path, None, "file", path.name, f"a text file that can be read ({why})") from error


def read_table(path: Path) -> Iterator[Row]:
    """Read a CSV table with a head, row by row.

    Raises:
        TraceError: A row has more or fewer fields than the head.
    """
    with open_text(path) as lines:
        reader = csv.DictReader(lines)
        for fields in reader:
            if None in fields or None in fields.values():
                count = len(reader.fieldnames or ())
                raise TraceError(path, reader.line_num, "columns", "too many or too few", f"{count} as in the head")
            yield Row(path, reader.line_num, fields)
