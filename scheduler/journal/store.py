"""The journal: every batch of events the core has taken in, and now and then a snapshot of its state.

One row per ``Core.handle`` call, because a batch is handled in one cycle: replaying batch by batch gives the identical
state. SQLite by default (write-ahead log, every commit synced to disk, file readable by its owner only); any
SQLAlchemy URL works. Nothing that cannot be read is ever deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import PydanticSerializationError
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from cotenant.scheduler.core.events import Event
from cotenant.scheduler.core.state import State
from cotenant.scheduler.errors import CotenantError

SCHEMA_VERSION: Final = 1

_MAX_BYTES = 2**30  # MySQL picks the column type by it; others ignore it
_META = MetaData()
_SCHEMA = Table("journal_schema", _META, Column("version", Integer, nullable=False))
# Each writer that opens the journal takes the next term; only the holder of the newest may write.
_WRITER = Table("journal_writer", _META, Column("term", Integer, nullable=False))
_ENTRIES = Table(
    "journal_entries",
    _META,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("now", Float(53), nullable=False),
    Column("events", LargeBinary(_MAX_BYTES), nullable=False),
)
_SNAPSHOTS = Table(
    "journal_snapshots",
    _META,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("state", LargeBinary(_MAX_BYTES), nullable=False),
)
# Events the core could not handle. They count for nothing and are kept for whoever finds out why.
_SET_ASIDE = Table(
    "journal_set_aside",
    _META,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("event", LargeBinary(_MAX_BYTES), nullable=False),
    Column("error", Text, nullable=False),
)

_ADVICE = "nothing was changed: restore it from a backup, or give another journal.url to start afresh"
_EVENTS = TypeAdapter(tuple[Event, ...], config=ConfigDict(ser_json_inf_nan="constants"))


class JournalError(CotenantError):
    """The journal cannot be read or written; the message says where and what to do. Nothing was deleted."""


class NotRecordable(JournalError):
    """A batch holds what could not be read back (text that is no UTF-8, a value of another type)."""


class JournalTaken(JournalError):
    """Another scheduler has opened the journal since; this one must stop."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch of events as it was handled. ``now`` is Unix seconds."""

    seq: int
    now: float
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the journal holds: the last snapshot (None = none yet), its number, and the batches after it, in order."""

    snapshot: State | None
    snapshot_seq: int
    entries: tuple[Entry, ...]


class Journal:
    """Durable, ordered, append-only record of event batches.

    Thread safety: one thread at a time. Opening takes the journal over: an older ``Journal`` on the same database gets
    ``JournalTaken`` at its next write, so two schedulers can never interleave.

    Args:
        url: SQLAlchemy URL, for example ``sqlite:////var/lib/cotenant/journal.db``.

    Raises:
        JournalError: The database cannot be opened, is no journal, or was written by a newer cotenant.
    """

    def __init__(self, url: str) -> None:
        try:
            self.url = make_url(url)
            self._engine = self._open()
        except (ArgumentError, ModuleNotFoundError) as error:
            raise JournalError(f"journal.url: {url!r} is not accepted ({error}); give an SQLAlchemy URL") from error
        try:
            with self._engine.begin() as connection:
                self._prepare(connection)
                self._term = self._take_over(connection)
                self._seq = self._last_seq(connection)
        except (DBAPIError, sqlite3.Error) as error:
            self._engine.dispose()
            raise JournalError(f"cannot open the journal {self._where}: {_cause(error)}; {_ADVICE}") from error
        except JournalError:
            self._engine.dispose()
            raise

    @property
    def seq(self) -> int:
        """Number of the last batch."""
        return self._seq

    def append(self, events: Sequence[Event], now: float) -> int:
        """Write one batch; it survives a crash once this returns. Returns its number.

        Raises:
            NotRecordable: It could be written but not read back; the batch was not recorded.
            JournalTaken: Another scheduler opened the journal since.
            JournalError: It could not be written (disk full, database gone); the batch was not recorded.
        """
        try:
            text = _EVENTS.dump_json(tuple(events), warnings="error")
        except PydanticSerializationError as error:
            raise NotRecordable(f"a batch of events cannot be recorded: {' '.join(str(error).split())}") from error
        row = {"seq": self._seq + 1, "now": now, "events": text}
        self._write(insert(_ENTRIES).values(row))
        self._seq += 1
        return self._seq

    def snapshot(self, state: State, seq: int) -> None:
        """Record the state after batch ``seq`` and drop the batches and snapshots it replaces, in one transaction.

        Raises:
            JournalTaken: Another scheduler opened the journal since.
            JournalError: It could not be written; the journal is as it was.
        """
        self._write(
            delete(_SNAPSHOTS),
            insert(_SNAPSHOTS).values(seq=seq, state=state.to_json()),
            delete(_ENTRIES).where(_ENTRIES.c.seq <= seq),
        )

    def set_aside(self, entry: Entry, errors: Mapping[int, str]) -> None:
        """Take events out of a batch and keep them apart, in one transaction.

        Args:
            entry: The batch.
            errors: By position in the batch, the events to take out, and why.

        Raises:
            JournalTaken: Another scheduler opened the journal since.
            JournalError: It could not be written; the journal is as it was.
        """
        left = tuple(event for position, event in enumerate(entry.events) if position not in errors)
        rows = [
            {
                "seq": entry.seq,
                "position": position,
                "event": _EVENTS.dump_json((entry.events[position],)),
                "error": error,
            }
            for position, error in errors.items()
        ]
        self._write(
            update(_ENTRIES).where(_ENTRIES.c.seq == entry.seq).values(events=_EVENTS.dump_json(left)),
            insert(_SET_ASIDE).values(rows),
        )

    def set_aside_from(self, seq: int) -> dict[int, str]:
        """Return what was set aside from batch ``seq``: why, by position.

        Raises:
            JournalError: The database cannot be read.
        """
        wanted = select(_SET_ASIDE.c.position, _SET_ASIDE.c.error).where(_SET_ASIDE.c.seq == seq)
        return {row.position: row.error for row in self._read(wanted)}

    def count_set_aside(self) -> int:
        """Return how many events were ever set aside.

        Raises:
            JournalError: The database cannot be read.
        """
        return int(self._read(select(func.count()).select_from(_SET_ASIDE))[0][0])

    def load(self) -> Loaded:
        """Read everything back.

        Raises:
            JournalError: A row cannot be read or is missing. Names the row; nothing is deleted.
        """
        snapshots = self._read(select(_SNAPSHOTS).order_by(_SNAPSHOTS.c.seq.desc()).limit(1))
        kept = snapshots[0] if snapshots else None
        rows = self._read(select(_ENTRIES).order_by(_ENTRIES.c.seq))
        seq = 0 if kept is None else kept.seq
        snapshot = None if kept is None else self._decode(f"snapshot {seq}", State.from_json, kept.state)
        entries: list[Entry] = []
        for row in rows:
            if row.seq <= seq:
                continue
            expected = seq + len(entries) + 1
            if row.seq != expected:
                raise JournalError(f"journal {self._where}: entry {expected} is missing; {_ADVICE}")
            events = self._decode(f"entry {row.seq}", _EVENTS.validate_json, row.events)
            entries.append(Entry(row.seq, row.now, events))
        return Loaded(snapshot, seq, tuple(entries))

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._engine.dispose()

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return self.url.render_as_string(hide_password=True)

    def _open(self) -> Engine:
        if self.url.get_backend_name() != "sqlite":
            return create_engine(self.url)
        if self.url.database and self.url.database != ":memory:":
            self._create_private_file(self.url.database)
        engine = create_engine(self.url)
        event.listen(engine, "connect", _configure_sqlite)
        return engine

    def _create_private_file(self, path: str) -> None:
        """Create the file for its owner only before SQLite does with the umask of the day."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            Path(path).chmod(0o600)
        except OSError as error:
            raise JournalError(f"cannot open the journal {self._where}: {error.strerror}: {path}") from error

    def _prepare(self, connection: Connection) -> None:
        foreign = set(inspect(connection).get_table_names()) - set(_META.tables)
        if foreign:
            raise JournalError(f"{self._where} is a database of something else: it has {', '.join(sorted(foreign))}")
        _META.create_all(connection)
        version = connection.execute(select(_SCHEMA.c.version)).scalar()
        if version is None:
            version = SCHEMA_VERSION
            connection.execute(insert(_SCHEMA).values(version=version))
            connection.execute(insert(_WRITER).values(term=0))
        if version > SCHEMA_VERSION:
            raise JournalError(
                f"the journal {self._where} was written by a newer cotenant (format {version}, this one reads up to "
                f"{SCHEMA_VERSION}): install that version again, or give another journal.url"
            )

    def _take_over(self, connection: Connection) -> int:
        connection.execute(update(_WRITER).values(term=_WRITER.c.term + 1))
        term: int = connection.execute(select(_WRITER.c.term)).scalar_one()
        return term

    def _last_seq(self, connection: Connection) -> int:
        last = [connection.execute(select(func.max(table.c.seq))).scalar() for table in (_ENTRIES, _SNAPSHOTS)]
        return max((seq for seq in last if seq is not None), default=0)

    def _read(self, wanted: Any) -> Sequence[Any]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(wanted).all()
        except (DBAPIError, sqlite3.Error) as error:
            raise JournalError(f"cannot read the journal {self._where}: {_cause(error)}; {_ADVICE}") from error

    def _write(self, *statements: Any) -> None:
        """Run the statements in one transaction that holds only as long as nobody else has taken over."""
        try:
            with self._engine.begin() as connection:
                # The update locks the row (SQLite: the database), so no other writer gets in before the commit.
                held = connection.execute(update(_WRITER).where(_WRITER.c.term == self._term).values(term=self._term))
                if held.rowcount != 1:
                    raise JournalTaken(f"another scheduler has opened the journal {self._where}; this one must stop")
                for statement in statements:
                    connection.execute(statement)
        except (DBAPIError, sqlite3.Error) as error:
            raise JournalError(f"cannot write to the journal {self._where}: {_cause(error)}") from error

    def _decode(self, what: str, decode: Any, raw: bytes) -> Any:
        try:
            return decode(raw)
        except ValueError as error:
            first = str(error).splitlines()[:3]
            raise JournalError(
                f"journal {self._where}: {what} cannot be read ({' '.join(first)}); {_ADVICE}"
            ) from error


def _cause(error: Exception) -> str:
    return str(error.orig if isinstance(error, DBAPIError) else error)


def _configure_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()
