"""Tables on disk that grow by the second: Parquet files partitioned by day and host, kept for a while.

Layout: ``date=YYYY-MM-DD/host=ID/part-<milliseconds>-<number>.parquet``, date (UTC) and milliseconds being those of the
first row. A file appears complete or not at all; names that begin with a dot are not finished, and every reader of
such folders passes over them. ``pandas.read_parquet(root)`` reads everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

STALE_S = 3600.0  # an unfinished file this old is of a writer that was killed

_LAST_S = 253_402_300_799.0  # of the year 9999
_PARTS = b"cotenant.parts"  # of a file that takes the place of others: their names
_PARTITION = re.compile(r"date=(\d{4}-\d{2}-\d{2})/host=([^/]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file."""

    path: Path
    date: str
    host: str


class DailyFiles:
    """Writes the files and keeps their number and age in bounds. One writer at a time; not thread-safe.

    Args:
        root: The folder; made when it does not exist.
        schema: Of the rows; its metadata is written into every file.
        time: The column with the Unix seconds by which rows are filed.
        keep_days: Days of rows that are kept.
        keep_bytes: Largest size of all files together.
    """

    def __init__(self, root: Path, schema: pa.Schema, time: str, keep_days: float, keep_bytes: int) -> None:
        self.root = root
        self._schema = schema
        self._time = time
        self._keep_days = keep_days
        self._keep_bytes = keep_bytes

    def write(self, host_id: str, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Write the rows of one host, one file per day.

        Args:
            host_id: The host.
            rows: A value for every column of the schema.

        Raises:
            OSError: The disk is full, or another reason not to write; nothing of the day at hand was written.
        """
        days: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            days.setdefault(day_of(row[self._time]), []).append(row)
        return [self._write_day(day, host_id, those) for day, those in days.items()]

    def tidy(self, now_s: float) -> None:
        """Delete what is too old or too much, and make one file of each host's day that is over.

        Args:
            now_s: Unix seconds.

        Raises:
            OSError: Something cannot be read or written.
        """
        oldest = day_of(now_s - 86400.0 * self._keep_days)
        for part in parts_of(self.root):
            if part.date < oldest:
                _delete(part.path)
        for folder in {part.path.parent for part in parts_of(self.root) if part.date < day_of(now_s)}:
            _merge(folder, self._schema)
        sizes = [(part.path, part.path.stat().st_size) for part in parts_of(self.root)]
        excess = sum(size for _, size in sizes) - self._keep_bytes
        for path, size in sizes:
            if excess <= 0:
                break
            _delete(path)
            excess -= size
        for path in self.root.glob("date=*/host=*/.part-*"):
            if now_s - path.stat().st_mtime > STALE_S:
                _delete(path)

    def _write_day(self, day: str, host_id: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        folder = self.root / f"date={day}" / f"host={quote(host_id, safe='')}"
        folder.mkdir(parents=True, exist_ok=True)
        columns = {name: [row[name] for row in rows] for name in self._schema.names}
        path = _free_name(folder, min(columns[self._time]))
        with _finished(path) as unfinished:
            pq.write_table(pa.table(columns, schema=self._schema), unfinished, compression="zstd")
        return path


def parts_of(root: Path) -> list[Part]:
    """Return all finished files, the oldest first."""
    found = []
    for path in root.glob("date=*/host=*/part-*.parquet"):
        match = _PARTITION.fullmatch(path.parent.relative_to(root).as_posix())
        if match is not None:
            found.append(Part(path, match[1], unquote(match[2])))
    return sorted(found, key=lambda part: (part.date, _milliseconds(part.path), part.path.name, part.host))


def _milliseconds(path: Path) -> int:
    middle = path.name.split("-")[1].partition(".")[0]
    return int(middle) if middle.isdecimal() else 0


def _merge(folder: Path, common: pa.Schema) -> None:
    """Make one file of a folder's files, row by row as they are. Files that cannot be read stay.

    The new file names those it replaces. A writer that is killed before all of them are gone finds them here next time.
    """
    parts = sorted(folder.glob("part-*.parquet"), key=lambda path: (_milliseconds(path), path.name))
    schemas = {}
    for path in parts:
        with contextlib.suppress(OSError, pa.ArrowException):
            schemas[path] = pq.read_schema(path)
    for schema in schemas.values():
        for name in json.loads((schema.metadata or {}).get(_PARTS, b"[]")):
            _delete(folder / name)
    current = [path for path, schema in schemas.items() if path.exists() and schema.equals(common)]
    if len(current) < 2:
        return
    metadata = {**(common.metadata or {}), _PARTS: json.dumps([path.name for path in current])}
    merged = _free_name(folder, _milliseconds(current[0]) / 1e3)
    schema = common.with_metadata(metadata)
    with _finished(merged) as unfinished, pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        for path in current:
            with pq.ParquetFile(path) as file:
                writer.write_table(file.read().replace_schema_metadata(metadata))
    for path in current:
        _delete(path)


def readable(path: Path) -> pa.Table | None:
    try:
        # One file, not a data set: the path's own columns would be added otherwise.
        with pq.ParquetFile(path) as file:
            return file.read()
    except FileNotFoundError:
        return None  # deleted meanwhile, by age
    except (OSError, pa.ArrowException) as error:
        warnings.warn(f"{path}: cannot be read and is left out ({error})", stacklevel=3)
        return None


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Give the name to write under; when that went well, the file is on the disk and has its own name."""
    unfinished = path.with_name("." + path.name)
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _free_name(folder: Path, start_s: float) -> Path:
    for number in range(1 << 30):
        path = folder / f"part-{int(start_s * 1e3)}-{number}.parquet"
        if not path.exists():
            return path
    raise FileExistsError(f"{folder}: has too many files of the same moment")


def _delete(path: Path) -> None:
    """Delete a file, and the folders it leaves empty."""
    path.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def day_of(unix_s: float) -> str:
    within = min(max(unix_s, 0.0), _LAST_S)  # a clock may stand anywhere
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=within)).date().isoformat()
