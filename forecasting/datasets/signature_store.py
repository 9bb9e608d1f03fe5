"""Measured windows on disk: Parquet files partitioned by day and host, kept for a while.

Layout: ``date=YYYY-MM-DD/host=ID/part-<milliseconds>-<number>.parquet``, date (UTC) and milliseconds being those of the
windows' start. A file appears complete or not at all; names that begin with a dot are not finished, and every reader of
such folders passes over them. ``pandas.read_parquet(root)`` reads everything; ``load_signatures`` also checks, upgrades
and selects. ``docs/signatures.md`` tells what the columns mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cotenant.forecasting.signatures import COLUMNS, FIELDS, placed, upgrade
from cotenant.forecasting.types import SIGNATURE_VERSION
from cotenant.forecasting.versions import UnknownVersion, check_version

FINGERPRINT = "fingerprint"
HOST = "host"
ORDER = ("start_s", HOST, "job_id", "gpu_id")
STALE_S = 3600.0  # an unfinished file this old is of a writer that was killed

_LAST_S = 253_402_300_799.0  # of the year 9999
_TYPES = {"text": pa.string(), "number": pa.float64(), "whole": pa.int64()}
_VERSION = b"cotenant.signature_version"
_PARTS = b"cotenant.parts"  # of a file that takes the place of others: their names
_SCHEMA = pa.schema(
    [*(pa.field(each.name, _TYPES[each.kind]) for each in FIELDS), pa.field(FINGERPRINT, pa.string())],
    metadata={_VERSION: str(SIGNATURE_VERSION)},
)
_PARTITION = re.compile(r"date=(\d{4}-\d{2}-\d{2})/host=([^/]+)")
_ALWAYS = frozenset(each.name for each in FIELDS if not each.none_when)


class SignatureFileError(ValueError):
    """A file of the store that this version cannot use as it is; names the file."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A finished file."""

    path: Path
    date: str
    host: str


class SignatureStore:
    """Writes the files and keeps their number and age in bounds. One writer at a time; not thread-safe.

    Args:
        root: The folder; made when it does not exist.
        keep_days: Days of windows that are kept.
        keep_bytes: Largest size of all files together.
    """

    def __init__(self, root: Path, keep_days: float, keep_bytes: int) -> None:
        self.root = root
        self._keep_days = keep_days
        self._keep_bytes = keep_bytes

    def write(self, host_id: str, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Write the rows of one host, one file per day. Rows that tell of no window at all are left out.

        Args:
            host_id: The host.
            rows: ``signatures.to_row`` plus ``fingerprint``.

        Raises:
            OSError: The disk is full, or another reason not to write; nothing of the day at hand was written.
        """
        days: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if placed(row):
                days.setdefault(_date(row["start_s"]), []).append(row)
        return [self._write_day(day, host_id, those) for day, those in days.items()]

    def tidy(self, now_s: float) -> None:
        """Delete what is too old or too much, and make one file of each host's day that is over.

        Args:
            now_s: Unix seconds.

        Raises:
            OSError: Something cannot be read or written.
        """
        oldest = _date(now_s - 86400.0 * self._keep_days)
        for part in _parts(self.root):
            if part.date < oldest:
                _delete(part.path)
        for folder in {part.path.parent for part in _parts(self.root) if part.date < _date(now_s)}:
            _merge(folder)
        sizes = [(part.path, part.path.stat().st_size) for part in _parts(self.root)]
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
        columns = {name: [row[name] for row in rows] for name in _SCHEMA.names}
        path = _free_name(folder, min(columns["start_s"]))
        with _finished(path) as unfinished:
            pq.write_table(pa.table(columns, schema=_SCHEMA), unfinished, compression="zstd")
        return path


def load_signatures(
    root: Path | str,
    since: float | None = None,
    until: float | None = None,
    hosts: Collection[str] | None = None,
    jobs: Collection[str] | None = None,
) -> pd.DataFrame:
    """Read windows back, upgraded to this version of the schema.

    A file that cannot be read (cut off, damaged) is left out with a warning that names it.

    Args:
        root: The store's folder.
        since: Unix seconds; only windows that began then or later.
        until: Unix seconds; only windows that began before.
        hosts: Only these hosts.
        jobs: Only these jobs.

    Returns:
        The columns of ``signatures.FIELDS``, ``fingerprint`` and ``host``, in order of start; NaN or None = missing.

    Raises:
        FileNotFoundError: There is no such folder.
        SignatureFileError: A file lacks columns of its version, or a newer version of cotenant wrote it.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder; give the root of a signature store")
    frames = []
    for part in _parts(root):
        if (since is not None and part.date < _date(since)) or (until is not None and part.date > _date(until)):
            continue
        if hosts is not None and part.host not in hosts:
            continue
        table = _readable(part.path)
        if table is not None:
            frames.append(_selected(_upgraded(part, table), since, until, jobs))
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return _typed(pd.DataFrame(columns=[*COLUMNS, FINGERPRINT, HOST]))
    # Twice only where a writer was killed while it made one file of many.
    whole = pd.concat(filled, ignore_index=True).drop_duplicates([*ORDER])
    return whole.sort_values([*ORDER], ignore_index=True)


def _upgraded(part: _Part, table: pa.Table) -> pd.DataFrame:
    version = _version(part.path, table)
    lacking = [each.name for each in FIELDS if each.since <= version and each.name not in table.column_names]
    if lacking:
        raise SignatureFileError(f"{part.path}: lacks columns of version {version}: {', '.join(lacking)}")
    columns = {name: table.column(name).to_pandas() for name in table.column_names if name != "schema_version"}
    current = upgrade(columns | {"schema_version": version})
    current = {name: current[name] for name in COLUMNS} | {FINGERPRINT: columns.get(FINGERPRINT), HOST: part.host}
    return _typed(pd.DataFrame(current, index=pd.RangeIndex(table.num_rows)))


def _version(path: Path, table: pa.Table) -> int:
    """Return the version a file was written with: the newest its metadata or its rows name."""
    said = (table.schema.metadata or {}).get(_VERSION, b"0")
    rows = table.column("schema_version").to_pylist() if "schema_version" in table.column_names else []
    try:
        version = max([int(said), *(int(each) for each in rows if each is not None)])
        check_version(version, SIGNATURE_VERSION)
    except UnknownVersion as error:
        raise SignatureFileError(f"{path}: {error}") from error
    except ValueError as error:
        raise SignatureFileError(f"{path}: {error}: its version cannot be read") from error
    return version


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Give columns the same types whatever is in them: what can be missing is a float, as NaN is."""
    for each in FIELDS:
        if each.kind == "text":
            frame[each.name] = frame[each.name].astype(object)
        else:
            frame[each.name] = frame[each.name].astype(
                "int64" if each.kind == "whole" and each.name in _ALWAYS else "float64"
            )
    frame[FINGERPRINT] = frame[FINGERPRINT].astype(object)
    frame[HOST] = frame[HOST].astype(object)
    return frame


def _selected(
    frame: pd.DataFrame, since: float | None, until: float | None, jobs: Collection[str] | None
) -> pd.DataFrame:
    keep = pd.Series(True, index=frame.index)
    if since is not None:
        keep &= frame["start_s"] >= since
    if until is not None:
        keep &= frame["start_s"] < until
    if jobs is not None:
        keep &= frame["job_id"].isin(set(jobs))
    return frame[keep]


def _readable(path: Path) -> pa.Table | None:
    try:
        # One file, not a data set: the path's own columns would be added otherwise.
        with pq.ParquetFile(path) as file:
            return file.read()
    except FileNotFoundError:
        return None  # deleted meanwhile, by age
    except (OSError, pa.ArrowException) as error:
        warnings.warn(f"{path}: cannot be read and is left out ({error})", stacklevel=3)
        return None


def _parts(root: Path) -> list[_Part]:
    """Return all finished files, the oldest first."""
    found = []
    for path in root.glob("date=*/host=*/part-*.parquet"):
        match = _PARTITION.fullmatch(path.parent.relative_to(root).as_posix())
        if match is not None:
            found.append(_Part(path, match[1], unquote(match[2])))
    return sorted(found, key=lambda part: (part.date, _milliseconds(part.path), part.path.name, part.host))


def _milliseconds(path: Path) -> int:
    middle = path.name.split("-")[1].partition(".")[0]
    return int(middle) if middle.isdecimal() else 0


def _merge(folder: Path) -> None:
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
    current = [path for path, schema in schemas.items() if path.exists() and schema.equals(_SCHEMA)]
    if len(current) < 2:
        return
    metadata = {_VERSION: str(SIGNATURE_VERSION), _PARTS: json.dumps([path.name for path in current])}
    merged = _free_name(folder, _milliseconds(current[0]) / 1e3)
    schema = _SCHEMA.with_metadata(metadata)
    with _finished(merged) as unfinished, pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        for path in current:
            with pq.ParquetFile(path) as file:
                writer.write_table(file.read().replace_schema_metadata(metadata))
    for path in current:
        _delete(path)


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


def _date(unix_s: float) -> str:
    within = min(max(unix_s, 0.0), _LAST_S)  # a clock may stand anywhere
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=within)).date().isoformat()
