"""Measured windows on disk: Parquet files partitioned by day and host, kept for a while.

``daily.py`` tells how the files lie; the moment of a row is the start of its window. ``load_signatures`` checks,
upgrades and selects. ``docs/signatures.md`` tells what the columns mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from cotenant.forecasting.datasets.daily import DailyFiles, Part, day_of, parts_of, readable
from cotenant.forecasting.signatures import COLUMNS, FIELDS, placed, upgrade
from cotenant.forecasting.types import SIGNATURE_VERSION
from cotenant.forecasting.versions import UnknownVersion, check_version

FINGERPRINT = "fingerprint"
HOST = "host"
ORDER = ("start_s", HOST, "job_id", "gpu_id")

_TYPES = {"text": pa.string(), "number": pa.float64(), "whole": pa.int64()}
_VERSION = b"cotenant.signature_version"
_SCHEMA = pa.schema(
    [*(pa.field(each.name, _TYPES[each.kind]) for each in FIELDS), pa.field(FINGERPRINT, pa.string())],
    metadata={_VERSION: str(SIGNATURE_VERSION)},
)
_ALWAYS = frozenset(each.name for each in FIELDS if not each.none_when)


class SignatureFileError(ValueError):
    """A file of the store that this version cannot use as it is; names the file."""


class SignatureStore:
    """Writes the files and keeps their number and age in bounds. Several processes may; not thread-safe.

    Args:
        root: The folder; made when it does not exist.
        keep_days: Days of windows that are kept.
        keep_bytes: Largest size of all files together.
    """

    def __init__(self, root: Path, keep_days: float, keep_bytes: int) -> None:
        self.root = root
        self._files = DailyFiles(root, _SCHEMA, "start_s", keep_days, keep_bytes)

    def write(self, host_id: str, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Write the rows of one host, one file per day. Rows that tell of no window at all are left out.

        Args:
            host_id: The host.
            rows: ``signatures.to_row`` plus ``fingerprint``.

        Raises:
            OSError: The disk is full, or another reason not to write; nothing of the day at hand was written.
        """
        return self._files.write(host_id, [row for row in rows if placed(row)])

    def tidy(self, now_s: float) -> None:
        """Delete what is too old or too much, and make one file of each host's day that is over.

        Args:
            now_s: Unix seconds.

        Raises:
            OSError: Something cannot be read or written.
        """
        self._files.tidy(now_s)


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
        SignatureFileError: A file lacks columns of its version or has words for numbers, or a newer version of cotenant
            wrote it.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder; give the root of a signature store")
    frames = []
    for part in parts_of(root):
        if (since is not None and part.date < day_of(since)) or (until is not None and part.date > day_of(until)):
            continue
        if hosts is not None and part.host not in hosts:
            continue
        table = readable(part.path)
        if table is not None:
            frames.append(_selected(_upgraded(part, table), since, until, jobs))
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return _typed(pd.DataFrame(columns=[*COLUMNS, FINGERPRINT, HOST]))
    # Twice only where a writer was killed while it made one file of many.
    whole = pd.concat(filled, ignore_index=True).drop_duplicates([*ORDER])
    return whole.sort_values([*ORDER], ignore_index=True)


def _upgraded(part: Part, table: pa.Table) -> pd.DataFrame:
    version = _version(part.path, table)
    lacking = [each.name for each in FIELDS if each.since <= version and each.name not in table.column_names]
    if lacking:
        raise SignatureFileError(f"{part.path}: lacks columns of version {version}: {', '.join(lacking)}")
    columns = {name: table.column(name).to_pandas() for name in table.column_names if name != "schema_version"}
    current = upgrade(columns | {"schema_version": version})
    current = {name: current[name] for name in COLUMNS} | {FINGERPRINT: columns.get(FINGERPRINT), HOST: part.host}
    try:
        return _typed(pd.DataFrame(current, index=pd.RangeIndex(table.num_rows)))
    except _WrongType as error:
        raise SignatureFileError(f"{part.path}: {error}") from error


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


class _WrongType(ValueError):
    """A column has something that is no number."""


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Give columns the same types whatever is in them: what can be missing is a float, as NaN is.

    Raises:
        _WrongType: A column of numbers has something else.
    """
    for each in FIELDS:
        if each.kind == "text":
            frame[each.name] = frame[each.name].astype(object)
        else:
            whole = each.kind == "whole" and each.name in _ALWAYS
            try:
                frame[each.name] = frame[each.name].astype("int64" if whole else "float64")
            except (TypeError, ValueError) as error:
                raise _WrongType(f"column '{each.name}': {error}") from error
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
