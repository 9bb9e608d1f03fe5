"""The journal: what is acknowledged survives, what cannot be read is said and kept."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from scheduling import GIB, Driver, half, host, measurement, profile, report, settings, spec

from cotenant.configs.settings import LeaseSettings, PlacementSettings, ResizeSettings
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobExited,
    JobHeldBack,
    JobMissing,
    JobStarted,
    JobSubmitted,
    MemoryOverrun,
    SettingsChanged,
    StartFailed,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.recovery import recover
from cotenant.scheduler.journal.store import Journal, JournalError, JournalTaken

# Every kind of event, in an order in which each means something.
LIFE: Sequence[tuple[float, list[Event]]] = [
    (1.0, [HostJoined(host("h1", gpus=2))]),
    (2.0, [JobSubmitted(half("a")), JobSubmitted(half("b", restart="on_failure", deadline_s=99))]),
    (3.1, [JobStarted("a", 1, "h1", pid=7), JobStarted("b", 1, "h1")]),
    (4.2, [report("h1", measurement("a", "h1-0", profile(util=0.1 + 0.2), util_peak=float("inf")))]),
    (5.3, [HostJoined(host("h2")), MemoryOverrun("a", 1, "h1", 4 * GIB), JobHeldBack("a", 1, "h1", 0.5)]),
    (6.4, [JobExited("b", 1, "h1", -9), StartFailed("b", 1, "h1", "late", retry=True)]),
    (6.5, [SettingsChanged(PlacementSettings(packing_bias=0.7), ResizeSettings(headroom=0.2))]),
    (9.0, [Tick(), HostUnreachable("h1", "no report")]),
    (9.9, [JobSubmitted(spec("c", gpus=3, gang="cluster")), JobSubmitted(half("d")), ClientLost("d")]),
    (12.0, [HostLost("h1", "gone"), StopRequested("c", "stopped by user"), JobMissing("a", 1, "h1")]),
]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/journal.db"


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    journal = Journal(url)
    yield journal
    journal.close()


def live(journal: Journal, life: Sequence[tuple[float, list[Event]]] = LIFE) -> Core:
    """A core driven as the scheduler drives it: journal first, then handle."""
    core = recover(journal, settings())
    for now, events in life:
        journal.append(events, now)
        core.handle(events, now)
    return core


@pytest.mark.parametrize("length", range(len(LIFE) + 1))
def test_any_prefix_replays_to_the_identical_state(journal: Journal, url: str, length: int) -> None:
    before = live(journal, LIFE[:length])
    again = Journal(url)
    try:
        after = recover(again, settings())
        assert after.state.to_json() == before.state.to_json()
        assert len(again.load().entries) == 0, "recovery leaves a snapshot"
    finally:
        again.close()


@pytest.mark.parametrize("at", range(len(LIFE)))
def test_a_snapshot_anywhere_changes_nothing(journal: Journal, at: int) -> None:
    core = recover(journal, settings())
    for number, (now, events) in enumerate(LIFE):
        seq = journal.append(events, now)
        core.handle(events, now)
        if number == at:
            journal.snapshot(core.state, seq)
    assert len(journal.load().entries) == len(LIFE) - at - 1
    assert recover(journal, settings()).state.to_json() == core.state.to_json()


def test_a_state_read_back_decides_as_the_original_would() -> None:
    original = Driver(host("h1", gpus=2), host("h2"))
    original.run(*(half(f"j{number}") for number in range(7)))
    copy = Core.from_state(State.from_json(original.core.state.to_json()))
    for event in (JobExited("j1", 1, "h1", 0), HostLost("h1", "gone"), Tick(), HostJoined(host("h1", gpus=2))):
        original.now += 1.0
        assert copy.handle([event], original.now) == original.core.handle([event], original.now)
    assert copy.state.to_json() == original.core.state.to_json()


def test_only_what_was_appended_survives_a_crash(journal: Journal, url: str, tmp_path: Path) -> None:
    live(journal, LIFE[:3])
    # A crash: the files as they are on disk at this moment, without any closing.
    crashed = tmp_path / "crashed.db"
    for suffix in ("", "-wal"):
        Path(f"{crashed}{suffix}").write_bytes((tmp_path / f"journal.db{suffix}").read_bytes())
    live(journal, LIFE[3:])
    again = Journal(f"sqlite:///{crashed}")
    assert [entry.now for entry in again.load().entries] == [now for now, _ in LIFE[:3]]
    again.close()


def test_entries_are_numbered_on_across_reopening(url: str) -> None:
    first = Journal(url)
    live(first, LIFE[:2])
    first.close()
    second = Journal(url)
    recover(second, settings())
    assert second.append([Tick()], 50.0) == 3
    second.close()


def test_opening_takes_over_and_the_older_writer_is_refused(journal: Journal, url: str) -> None:
    core = live(journal, LIFE[:2])
    newer = Journal(url)
    with pytest.raises(JournalTaken, match="another scheduler"):
        journal.append([Tick()], 3.0)
    with pytest.raises(JournalTaken):
        journal.snapshot(core.state, 2)
    assert newer.append([Tick()], 3.0) == 3
    assert [entry.seq for entry in newer.load().entries] == [1, 2, 3]
    newer.close()


def test_the_file_is_private_and_every_commit_reaches_the_disk(journal: Journal, tmp_path: Path) -> None:
    live(journal, LIFE[:1])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["journal.db"] == modes["journal.db-wal"] == 0o600
    with journal._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def edit(tmp_path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        connection.execute(statement, values)
        connection.commit()


def entries(tmp_path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        return connection.execute("SELECT * FROM journal_entries").fetchall()


@pytest.mark.parametrize(
    ("statement", "values", "message"),
    [
        ("UPDATE journal_entries SET events = ? WHERE seq = 3", (b'[{"kind":"job_st',), "entry 3 cannot be read"),
        ("UPDATE journal_entries SET events = ? WHERE seq = 3", (b'[{"kind":"holiday"}]',), "entry 3 cannot be read"),
        ("DELETE FROM journal_entries WHERE seq = 2", (), "entry 2 is missing"),
        ("UPDATE journal_snapshots SET state = ?", (b"{}",), "snapshot 0 cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_and_kept(
    journal: Journal, tmp_path: Path, statement: str, values: tuple[object, ...], message: str
) -> None:
    live(journal, LIFE[:3])
    journal.close()
    edit(tmp_path, statement, *values)
    before = entries(tmp_path)
    again = Journal(f"sqlite:///{tmp_path}/journal.db")
    with pytest.raises(JournalError, match=f"journal.db: {message}.*nothing was changed: restore it"):
        recover(again, settings())
    again.close()
    assert entries(tmp_path) == before


def test_a_newer_format_is_refused(journal: Journal, url: str, tmp_path: Path) -> None:
    journal.close()
    edit(tmp_path, "UPDATE journal_schema SET version = 99")
    with pytest.raises(JournalError, match="written by a newer cotenant \\(format 99, this one reads up to 1\\)"):
        Journal(url)


def test_a_file_that_is_no_database_is_refused_and_kept(url: str, tmp_path: Path) -> None:
    text = b"my thesis, chapter one\n" * 100
    (tmp_path / "journal.db").write_bytes(text)
    with pytest.raises(JournalError, match="file is not a database"):
        Journal(url)
    assert (tmp_path / "journal.db").read_bytes() == text


def test_a_database_of_something_else_is_refused(url: str, tmp_path: Path) -> None:
    edit(tmp_path, "CREATE TABLE recipes (name)")
    with pytest.raises(JournalError, match="a database of something else: it has recipes"):
        Journal(url)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("sqlite:////nowhere/at/all/journal.db", "No such file or directory"),
        ("not a url", "'not a url' is not accepted"),
        ("oracle9://x", "is not accepted"),
    ],
)
def test_a_url_that_does_not_work_is_told(bad: str, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        Journal(bad)


def test_a_path_that_cannot_be_opened_is_told(url: str, tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(JournalError, match="Is a directory"):
        Journal(url)


class TestSettings:
    """Which settings are in force after a restart."""

    def test_what_an_administrator_changed_stays(self, journal: Journal) -> None:
        live(journal)
        assert recover(journal, settings()).state.settings.placement.packing_bias == 0.7

    def test_a_value_given_anew_wins_over_it(self, journal: Journal) -> None:
        live(journal)
        state = recover(journal, settings(packing_bias=0.2)).state
        assert state.settings.placement.packing_bias == 0.2
        assert state.settings.resize.headroom == 0.2, "that one was not given anew"

    def test_old_batches_are_replayed_under_the_old_settings(self, journal: Journal) -> None:
        core = live(journal)
        never = settings().model_copy(update={"lease": LeaseSettings(max_restarts=0)})
        again = recover(journal, never)
        assert {job.spec.job_id: job.state for job in again.state.jobs.values()} == {
            job.spec.job_id: job.state for job in core.state.jobs.values()
        }
        assert again.state.settings.lease.max_restarts == 0
