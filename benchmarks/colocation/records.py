"""The folder a run writes to: one JSON object a line, appended visit by visit, readable again after any crash.

A visit is written in one piece when it is complete. What a crash cut off is removed when the folder is opened again, so
that the visit is repeated and everything before it is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FORMAT = 1
SOLO_WINDOWS = 3
WINDOWS = "windows.jsonl"
EVENTS = "events.jsonl"
EXTRAS = "solo_extras.jsonl"

Record = dict[str, Any]


class FolderError(RuntimeError):
    """The output folder cannot be used; says which file, what is wrong and what to do."""


class DiskFull(OSError):
    """A visit could not be written; what was written before is intact."""


class Folder:
    """An output folder, held by one process at a time.

    Attributes:
        path: The folder.
        windows: Every window of every complete visit, oldest first.
        events: What went wrong in this and earlier runs, oldest first.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder, make it when it does not exist, and lock it.

        Raises:
            FolderError: Another process works in it, it cannot be written, or a file in it is damaged in the middle.
        """
        self.path = path
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"--out {path}: cannot be made: {error}") from error
        self._lock = _lock(path / "lock")
        try:
            self.windows, self.events = read(path, repair=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    @property
    def finished(self) -> frozenset[str]:
        """Names of the visits that need no repetition: measured completely, or known not to fit into memory."""
        return finished_visits(self.windows, self.events)

    def add_visit(self, windows: Sequence[Record], extra: Record | None = None) -> None:
        """Keep one complete visit.

        Args:
            windows: One record per member and window.
            extra: What a visit of a single workload measured beside its windows.

        Raises:
            DiskFull: It could not be written; the files are as they were before.
        """
        if extra is not None:
            _append(self.path / EXTRAS, [extra])
        _append(self.path / WINDOWS, windows)
        self.windows.extend(windows)

    def add_event(self, event: Record) -> None:
        """Keep one event; DiskFull when it could not be written."""
        _append(self.path / EVENTS, [event])
        self.events.append(event)


def read(path: Path, *, repair: bool = False) -> tuple[list[Record], list[Record]]:
    """The windows of complete visits and the events in a folder; empty lists where there is none.

    Args:
        path: The folder.
        repair: Cut off what a crash left incomplete at the end of a file.

    Raises:
        FolderError: A file is damaged in the middle, or of another format.
    """
    _load(path / EXTRAS, repair=repair)
    return _load(path / WINDOWS, repair=repair, whole_visits=True), _load(path / EVENTS, repair=repair)


def finished_visits(windows: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the visits that need no repetition: measured completely, or known not to fit into memory."""
    return complete_visits(windows) | {event["visit"] for event in events if event["event"] == "does_not_fit"}


def complete_visits(windows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the visits all of whose windows are there, in whatever order its members took their turns."""
    seen: dict[str, set[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    for window in windows:
        seen.setdefault(window["visit"], set()).add((window["position"], window["slot"]))
        sizes[window["visit"]] = len(window["members"])
    return frozenset(visit for visit, found in seen.items() if _is_complete(found, sizes[visit]))


def _is_complete(found: set[tuple[int, int]], size: int) -> bool:
    """Whether records, each a position and a slot, are all that a visit of ``size`` members has.

    A single member has three windows. A set has two rounds, each with a window of every member alone and one of all.
    """
    positions, count = (SOLO_WINDOWS, SOLO_WINDOWS) if size == 1 else (2 * (size + 1), 4 * size)
    return len(found) == count and {position for position, _ in found} == set(range(positions))


def _lock(path: Path) -> int:
    """Hold the lock file; the kernel lets go of it when the process ends, however it ends."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FolderError(f"--out {path.parent}: cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise FolderError(
            f"--out {path.parent}: another run (process {holder}) works in it; wait for it or give another --out"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def _load(path: Path, *, repair: bool, whole_visits: bool = False) -> list[Record]:
    """Read a file without what a crash left incomplete at its end."""
    if not path.exists():
        return []
    data = path.read_bytes()
    records: list[Record] = []
    begins: list[int] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        line = data[position:end] if end >= 0 else data[position:]
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if end < 0 or not isinstance(record, dict):
            if 0 <= end < len(data) - 1:
                raise FolderError(
                    f"{path}, line {len(records) + 1}: not a JSON object; repair it or give another --out"
                )
            break
        if record.get("format") != FORMAT:
            raise FolderError(
                f"{path}, line {len(records) + 1}: format is {record.get('format')!r}; this version reads and writes "
                f"{FORMAT}; give another --out"
            )
        records.append(record)
        begins.append(position)
        position = end + 1
    if whole_visits and records:
        last = records[-1]["visit"]
        if last not in complete_visits(records):
            while records and records[-1]["visit"] == last:
                records.pop()
                position = begins.pop()
    if repair and position < len(data):
        os.truncate(path, position)
    return records


def _append(path: Path, records: Sequence[Record]) -> None:
    data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode("utf-8")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, size)
            raise DiskFull(error.errno, f"{error.strerror}; earlier visits are kept", str(path)) from error
    finally:
        os.close(file)
