"""Tables on disk that grow by the second: Parquet files partitioned by day and host, kept for a while.

Layout: ``date=YYYY-MM-DD/host=ID/part-<milliseconds>-<number>.parquet``, date (UTC) and milliseconds being those of the
first row, the number drawn: a name that was used before would be taken for the file that had it. A file appears whole
or not at all; names that begin with a dot are not finished, and every reader of such folders passes over them.
``pandas.read_parquet(root)`` reads everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
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
_PART = re.compile(r"part-[^/]+\.parquet")
_PARTITION = re.compile(r"date=(\d{4}-\d{2}-\d{2})/host=([^/]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file."""

    path: Path
    date: str
    host: str


class DailyFiles:
    """Writes the files and keeps their number and age in bounds. Several processes may; not thread-safe.

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
            ValueError: A row has a value that cannot be written; nothing was.
            TypeError: The same.
        """
        days: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            days.setdefault(day_of(row[self._time]), []).append(row)
        lots = {day: self._lot(those) for day, those in days.items()}  # all of them, before any is on the disk
        return [self._write_day(day, host_id, *lot) for day, lot in lots.items()]

    def tidy(self, now_s: float) -> None:
        """Delete what is too old or too much, and make one file of each host's day that is over.

        Does nothing while another process does it. Files that cannot be read stay until they are too old or too much.

        Args:
            now_s: Unix seconds.

        Raises:
            OSError: Something cannot be listed, written or deleted.
        """
        with _alone(self.root) as mine:
            if mine:
                self._tidy(now_s)

    def _tidy(self, now_s: float) -> None:
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

    def _lot(self, rows: Sequence[Mapping[str, Any]]) -> tuple[int, pa.Table]:
        """Return the milliseconds of the first row, and the rows as they are written."""
        columns = {name: [row[name] for row in rows] for name in self._schema.names}
        return int(min(columns[self._time]) * 1e3), pa.table(columns, schema=self._schema)

    def _write_day(self, day: str, host_id: str, milliseconds: int, table: pa.Table) -> Path:
        folder = self.root / f"date={day}" / f"host={quote(host_id, safe='')}"
        folder.mkdir(parents=True, exist_ok=True)
        with _finished(folder, milliseconds) as (unfinished, path):
            pq.write_table(table, unfinished, compression="zstd")
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
        for name in _replaced(schema):
            _delete(folder / name)
    current = [path for path, schema in schemas.items() if path.exists() and schema.equals(common)]
    while len(current) >= 2:
        try:
            _join(current, common)
        except _Damaged as error:  # in the middle: its end, where the schema is, can be read
            current.remove(error.path)
        else:
            for path in current:
                _delete(path)
            return


def _replaced(schema: pa.Schema) -> list[str]:
    """Return the names of the files that a file takes the place of."""
    try:
        names = json.loads((schema.metadata or {}).get(_PARTS, b"[]"))
    except (ValueError, RecursionError):
        return []
    known = names if isinstance(names, list) else []
    return [name for name in known if isinstance(name, str) and _PART.fullmatch(name)]


class _Damaged(Exception):
    """A file cannot be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


def _join(parts: Sequence[Path], common: pa.Schema) -> None:
    """Write the rows of several files into a new one beside them."""
    metadata = {**(common.metadata or {}), _PARTS: json.dumps([path.name for path in parts])}
    schema = common.with_metadata(metadata)
    made = _finished(parts[0].parent, _milliseconds(parts[0]))
    with made as (unfinished, _), pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        for path in parts:
            try:
                rows = _read(path)
            except (OSError, pa.ArrowException) as error:
                raise _Damaged(path) from error
            writer.write_table(rows.replace_schema_metadata(metadata))


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:  # one file, not a data set: the path's own columns would be added otherwise
        return file.read()


def readable(path: Path) -> pa.Table | None:
    try:
        return _read(path)
    except FileNotFoundError:
        return None  # deleted meanwhile, by age
    except (OSError, pa.ArrowException) as error:
        warnings.warn(f"{path}: cannot be read and is left out ({error})", stacklevel=3)
        return None


@contextlib.contextmanager
def _finished(folder: Path, milliseconds: int) -> Iterator[tuple[Path, Path]]:
    """Give the name to write under and the file's own; when that went well, it is on the disk and has its own name."""
    unfinished, path = _reserved(folder, milliseconds)
    try:
        yield unfinished, path
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _reserved(folder: Path, milliseconds: int) -> tuple[Path, Path]:
    """Make an unfinished file; its own name is nobody else's, nor that of a file that was replaced before."""
    while True:
        path = folder / f"part-{milliseconds}-{secrets.randbelow(10**18)}.parquet"
        unfinished = path.with_name("." + path.name)
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                unfinished.touch(exist_ok=False)
                return unfinished, path


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Say whether this process alone tidies a folder meanwhile; there is nothing to tidy where there is none."""
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    """Delete a file, and the folders it leaves empty."""
    path.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def day_of(unix_s: float) -> str:
    within = min(max(unix_s, 0.0), _LAST_S)  # a clock may stand anywhere
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=within)).date().isoformat()
