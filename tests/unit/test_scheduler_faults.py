"""The scheduler's shell when something goes wrong: crashes, a full disk, faults of the core, pauses, late reports."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hosts import FakeFleet, FakeHost, PromptScheduler
from scheduling import half, settings, spec
from support import wait_until

from cotenant.actors import scheduler_actor, vital
from cotenant.actors.messages import HostReport
from cotenant.actors.scheduler_actor import Scheduler
from cotenant.configs.settings import JournalSettings, LeaseSettings
from cotenant.scheduler.core import handlers
from cotenant.scheduler.core.events import JobSubmitted, StopRequested, Tick
from cotenant.scheduler.core.turn import Turn
from cotenant.scheduler.errors import NotConnected, NotHandled
from cotenant.scheduler.journal.store import Journal, JournalError, NotRecordable

SETTINGS = settings().model_copy(update={"lease": LeaseSettings(ttl_s=1.0, client_ttl_s=1.2, max_restarts=3)})


class FullDisk(Journal):
    """A journal that cannot be written while ``full``."""

    full = False

    def _write(self, *statements: object) -> None:
        if self.full:
            raise JournalError("cannot write to the journal: database or disk is full")
        super()._write(*statements)


class Bench:
    """A scheduler without Ray, its hosts, and a way to start it anew."""

    def __init__(self, path: Path) -> None:
        self.home = path
        self.url = f"sqlite:///{path}/journal.db"
        self.host = FakeHost()
        self.started: list[Scheduler] = []
        self.begin()

    def begin(self, limit: int | None = None) -> None:
        """Start a scheduler; the one before, if any, counts as killed."""
        self.journal = FullDisk(self.url)
        self.fleet = FakeFleet(self.host, limit=limit)
        self.scheduler = PromptScheduler(SETTINGS.model_dump_json(), self.url, str(self.home), self.fleet, self.journal)  # type: ignore[arg-type]
        self.started.append(self.scheduler)

    def report(self, *, answered: bool = True) -> bool:
        """The host reports; its agent may not get the answer."""
        message = self.host.message()
        recorded = self.scheduler.report(message)
        if answered:
            self.host.answered(message, recorded)
        return recorded

    def state(self, job_id: str) -> str:
        return str(self.scheduler.job(job_id).state)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exits of the process that a failing thread asked for."""
    asked: list[int] = []
    monkeypatch.setattr(vital.os, "_exit", asked.append)
    return asked


@pytest.fixture
def bench(tmp_path: Path, exits: list[int]) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.report()
    yield bench
    for scheduler in bench.started:
        scheduler._stopping.set()
        scheduler._inbox.put(scheduler_actor.Request([]))
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name in ("commit", "watch") and t.daemon], 5, "threads end"
    )
    for scheduler in bench.started:
        scheduler._ledger._journal.close()


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "answers lost"])
@pytest.mark.parametrize("delivered", range(9))
def test_a_scheduler_killed_before_any_command_loses_and_repeats_nothing(
    bench: Bench, delivered: int, answered: bool
) -> None:
    """Everything is journaled; the scheduler is killed when that many of its commands have reached the agents."""
    bench.begin(limit=delivered)
    steps = [
        lambda: bench.scheduler.submit([half("a"), half("b")]),
        lambda: bench.report(answered=answered),
        lambda: bench.scheduler.stop(["a"], "stopped by user"),
        lambda: bench.report(answered=answered),
        lambda: bench.scheduler.submit([spec("c", isolation="hard")]),
        lambda: bench.host.end("b", 1, 0),
        lambda: bench.report(answered=answered),
    ]
    bench.report()
    for step in steps:
        step()
        if bench.fleet.left == 0:
            bench.begin()
    bench.begin()
    for _ in range(6):
        bench.report()
        assert len({job_id for job_id, _ in bench.host.running()}) == len(bench.host.running())
    for job_id, epoch in bench.host.running():
        bench.host.end(job_id, epoch, 0)
    for _ in range(3):
        bench.report()
        for job_id, epoch in bench.host.running():
            bench.host.end(job_id, epoch, 0)
    assert {job: bench.state(job) for job in "abc"} == {"a": "CANCELLED", "b": "SUCCEEDED", "c": "SUCCEEDED"}
    assert len(set(bench.host.starts)) == len(bench.host.starts), "no lease was started twice"
    assert {job: bench.scheduler.job(job).restarts for job in "abc"} == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("delivered", range(5))
def test_a_lease_that_leaves_its_gpus_outlives_the_scheduler(
    bench: Bench, delivered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above: started, asked for, given back, and started again; whoever misses a command is told again."""
    monkeypatch.setattr(scheduler_actor, "TICK_S", 3600.0)  # however slow this is, its host does not count as lost
    bench.begin(limit=delivered)
    lease = replace(half("a", checkpoint="own", grace_s=600.0), kind="lease", command=())
    steps = [
        lambda: bench.scheduler.submit([lease]),
        lambda: bench.scheduler.steer("a", "suspend", None, "x"),
        lambda: bench.scheduler.return_lease("a", 1),
        lambda: bench.scheduler.steer("a", "resume", None, "go on"),
    ]
    seen = []
    bench.report()
    for step in steps:
        step()
        bench.scheduler._commit([])  # the commands of the step have gone out
        if bench.fleet.left == 0:
            bench.begin()
        for _ in range(3):
            bench.report()
        seen.append(bench.state("a"))
    assert seen == ["RUNNING", "STOPPING", "SUSPENDED", "RUNNING"]
    assert bench.host.starts == [("a", 1), ("a", 2)]


class TestFullDisk:
    """What cannot be recorded is refused; what runs goes on; afterwards everything goes on."""

    def test_jobs_that_run_keep_their_leases_and_nothing_is_lost(self, bench: Bench) -> None:
        bench.scheduler.submit([half("a"), half("b")])
        bench.report()
        bench.journal.full = True
        with pytest.raises(JournalError, match="disk is full"):
            bench.scheduler.submit([half("c")])
        with pytest.raises(JournalError):
            bench.scheduler.stop(["b"], "x")
        assert bench.report() is True, "nothing had to be recorded"
        bench.host.end("a", 1, 0)
        assert bench.report() is False, "an answer, which renews the leases; but the exit has to come again"
        assert bench.state("a") == "RUNNING"
        bench.journal.full = False
        assert bench.report() is True
        assert bench.state("a") == "SUCCEEDED"
        bench.scheduler.submit([half("c")])
        assert bench.host.starts == [("a", 1), ("b", 1), ("c", 1)]

    def test_the_watch_goes_on(self, bench: Bench, exits: list[int]) -> None:
        bench.scheduler.submit([replace(half("a"), attached=True)])
        bench.report()
        bench.journal.full = True
        time.sleep(1.2)  # ticks, and the loss of the client, cannot be recorded
        bench.journal.full = False
        wait_until(lambda: bench.state("a") != "RUNNING", 5, "the lost client is noticed once it can be recorded")
        assert exits == []

    def test_a_snapshot_that_cannot_be_written_costs_nobody_his_answer(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise JournalError("full")

        monkeypatch.setattr(bench.journal, "snapshot", full)
        monkeypatch.setattr(bench.scheduler._ledger, "_snapshot_every", 1)
        assert bench.scheduler.submit([half("a")])[0].state == "STARTING"


def poison(monkeypatch: pytest.MonkeyPatch, job_id: str = "bad") -> None:
    """Make the core fail at this job, after it has changed something."""
    sound = handlers.HANDLERS[JobSubmitted]

    def handle(turn: Turn, event: JobSubmitted) -> None:
        sound(turn, event)
        if event.spec.job_id == job_id:
            raise ZeroDivisionError("a fault of the core's")

    monkeypatch.setattr(handlers, "HANDLERS", {**handlers.HANDLERS, JobSubmitted: handle})
    monkeypatch.setattr("cotenant.scheduler.core.engine.HANDLERS", {**handlers.HANDLERS, JobSubmitted: handle})


class TestFaultsOfTheCore:
    """An event that cannot be handled is set aside; others, and the next start, are not hurt."""

    def test_it_is_told_to_whoever_sent_it_and_changes_nothing(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        poison(monkeypatch)
        bench.scheduler.submit([half("before")])
        with pytest.raises(NotHandled, match=r"set aside: ZeroDivisionError: a fault of the core's"):
            bench.scheduler.submit([half("good"), half("bad"), half("fine")])
        assert [view.job_id for view in bench.scheduler.jobs(False, None)] == ["fine", "good", "before"]
        assert "set aside in the journal: job_submitted of batch" in capfd.readouterr().err
        assert "were set aside: 1" in bench.scheduler._ledger.note()
        bench.report()
        assert ("good", 1) in bench.host.starts, "its start follows from the inventory"

    def test_requests_committed_with_it_are_answered(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        poison(monkeypatch)
        group = [scheduler_actor.Request([JobSubmitted(half(job_id))]) for job_id in ("x", "bad", "y")]
        bench.scheduler._settle(group)
        assert group[0].done.result() is group[2].done.result() is None
        with pytest.raises(NotHandled):
            group[1].done.result()
        assert {view.job_id for view in bench.scheduler.jobs(False, None)} == {"x", "y"}

    def test_a_start_with_it_in_the_journal_sets_it_aside(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.scheduler.submit([half("good")])
        bench.scheduler.submit([half("bad")])
        poison(monkeypatch)  # handled well by the version before, not by this one
        bench.begin()
        assert [view.job_id for view in bench.scheduler.jobs(False, None)] == ["good"]
        bench.begin()
        assert bench.scheduler._ledger.note() != ""

    def test_a_core_that_fails_at_everything_still_starts(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.scheduler.submit([half(f"job-{i}") for i in range(30)])

        def fail(*_: object) -> None:
            raise AssertionError("broken")

        with monkeypatch.context() as patch:
            patch.setattr("cotenant.scheduler.core.engine.run_cycle", fail)
            bench.begin()
            assert {view.state for view in bench.scheduler.jobs(False, None)} == {"PENDING"}, "the host was set aside"
        bench.report()
        assert len(bench.host.running()) > 0
        assert bench.scheduler.submit([half("new")])[0].job_id == "new"

    def test_a_rebuild_that_fails_is_done_before_anything_else(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        poison(monkeypatch)
        set_aside = bench.journal.set_aside

        def full(*_: object) -> None:
            raise JournalError("full")

        monkeypatch.setattr(bench.journal, "set_aside", full)
        with pytest.raises(JournalError):
            bench.scheduler.submit([half("bad")])
        with pytest.raises(JournalError):
            bench.scheduler.submit([half("good")])
        monkeypatch.setattr(bench.journal, "set_aside", set_aside)
        bench.scheduler.submit([half("good")])
        assert [view.job_id for view in bench.scheduler.jobs(False, None)] == ["good"]

    def test_a_host_whose_event_was_set_aside_is_not_asked_for_it_again(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.host.events.append(JobSubmitted(half("bad")))
        poison(monkeypatch)
        assert bench.report() is True
        assert bench.host.events == []


def test_what_cannot_be_written_down_is_refused_alone(bench: Bench) -> None:
    bad = replace(half("bad"), env={"A": "\udcff"})
    group = [scheduler_actor.Request([JobSubmitted(one)]) for one in (half("x"), bad, half("y"))]
    bench.scheduler._settle(group)
    with pytest.raises(NotRecordable):
        group[1].done.result()
    assert {view.job_id for view in bench.scheduler.jobs(False, None)} == {"x", "y"}


def test_another_scheduler_on_the_journal_ends_this_one(bench: Bench, exits: list[int]) -> None:
    old = bench.scheduler
    bench.begin()
    with pytest.raises((JournalError, NotConnected), match=r"another scheduler|being shut down"):  # a tick may be first
        old.submit([half("a")])
    wait_until(lambda: exits, 5, "the old one's process ends")
    assert exits[0] == 1
    bench.scheduler.submit([half("a")])


class TestLateReports:
    """Reports may overtake each other when one of them was given up."""

    def test_an_older_inventory_changes_nothing(self, bench: Bench) -> None:
        old = bench.host.message()
        bench.scheduler.submit([half("a")])
        bench.report()
        bench.report()
        assert bench.state("a") == "RUNNING"
        assert bench.scheduler.report(old) is False
        assert bench.state("a") == "RUNNING"
        assert bench.host.running() == [("a", 1)]

    def test_an_exit_told_twice_and_late_counts_once(self, bench: Bench) -> None:
        bench.scheduler.submit([half("a", restart="on_failure")])
        bench.report()
        bench.host.end("a", 1, 3)
        bench.report(answered=False)
        assert bench.scheduler.job("a").restarts == 1
        bench.report()
        assert bench.scheduler.job("a").restarts == 1


def silence(scheduler: Scheduler, seconds: float) -> None:
    for contact in scheduler._contacts.values():
        contact.seen -= seconds


class TestPauses:
    """A process was stopped for longer than the leases hold, and goes on."""

    def test_a_paused_scheduler_blames_no_client(self, bench: Bench) -> None:
        bench.scheduler.submit([replace(half("a"), attached=True)])
        bench.report()
        with bench.scheduler._lock:  # what holds every thread of it up
            time.sleep(1.5)
        for _ in range(4):
            bench.scheduler.renew(["a"])
            time.sleep(0.1)
        assert bench.state("a") == "RUNNING"
        wait_until(lambda: bench.state("a") != "RUNNING", 5, "a client that is gone is noticed all the same")

    def test_nor_one_that_was_paused_in_the_middle_of_a_look(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.scheduler.submit([replace(half("a"), attached=True)])
        bench.report()
        over = threading.Event()

        def pause() -> None:
            if not over.is_set():
                time.sleep(1.5)
                over.set()

        bench.scheduler.renew(["a"])
        monkeypatch.setattr(bench.scheduler, "_watch_hosts", pause)
        assert over.wait(10)
        for _ in range(4):
            bench.scheduler.renew(["a"])
            time.sleep(0.1)
        assert bench.state("a") == "RUNNING"

    def test_jobs_of_a_lost_host_go_on_elsewhere_and_it_is_rid_of_them(self, bench: Bench) -> None:
        other = FakeHost("h2")
        bench.scheduler.submit([spec("a", isolation="hard")])
        bench.report()
        bench.fleet.hosts["h2"] = other
        message = other.message()
        other.answered(message, bench.scheduler.report(message))
        with bench.scheduler._lock:
            bench.scheduler._contacts["h1"].seen -= 60
        wait_until(lambda: other.running() == [("a", 2)], 5, "the job starts on the other host")
        wait_until(lambda: bench.fleet.forgotten == ["h1"], 5, "nothing of the lost host is kept")
        bench.host.end("a", 1, -9, lost=True)  # what its supervisor did meanwhile
        bench.report()
        assert bench.state("a") == "STARTING"
        bench.report()
        assert bench.host.held == {}

    def test_leases_that_expired_are_a_loss_of_the_host(self, bench: Bench) -> None:
        bench.scheduler.submit([spec("a", isolation="hard")])
        bench.report()
        bench.host.end("a", 1, -9, lost=True)
        bench.report()
        view = bench.scheduler.job("a")
        assert (view.state, view.restarts) == ("QUEUED", 0)
        assert "fault 1 of its hosts" in view.reason

    @pytest.mark.parametrize("phase", ["STARTING", "STOPPING"])
    def test_a_host_removed_in_the_middle_of_it(self, bench: Bench, phase: str) -> None:
        bench.fleet.left = 0
        bench.scheduler.submit([spec("a", isolation="hard")])
        if phase == "STOPPING":
            bench.scheduler.stop(["a"], "stopped by user")
        assert bench.state("a") == phase
        del bench.fleet.hosts["h1"]
        with bench.scheduler._lock:
            silence(bench.scheduler, 60)
        want = {"STARTING": "QUEUED", "STOPPING": "CANCELLED"}[phase]
        wait_until(lambda: bench.state("a") in (want, "PENDING"), 5, f"the job becomes {want}")
        wait_until(lambda: not bench.scheduler._contacts, 5, "nobody waits for the removed host any more")


def test_the_same_job_id_from_many_clients_is_one_job(bench: Bench) -> None:
    with ThreadPoolExecutor(16) as pool:
        views = list(pool.map(lambda _: bench.scheduler.submit([half("a")])[0], range(64)))
    assert {view.job_id for view in views} == {"a"}
    assert len(bench.scheduler.jobs(False, None)) == 1
    bench.report()
    assert bench.host.starts == [("a", 1)]


def test_stops_race_with_starts_and_win(bench: Bench) -> None:
    for number in range(20):
        job_id = f"job-{number}"
        with ThreadPoolExecutor(2) as pool:
            submitted = pool.submit(bench.scheduler.submit, [half(job_id)])
            reporting = pool.submit(bench.report)
            submitted.result()
            bench.scheduler.stop([job_id], "enough")
            reporting.result()
        bench.report()
        bench.report()
        assert bench.state(job_id) == "CANCELLED"
        assert bench.host.running() == []


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_jump_of_the_clock_fires_and_freezes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    bench.fleet.left = 0
    bench.scheduler.submit([half("a")])
    began, before = time.monotonic(), bench.scheduler._clock.now()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    bench.scheduler._commit([Tick()])
    assert bench.state("a") == "STARTING", "its start has not timed out"
    time.sleep(0.2)
    passed = bench.scheduler._clock.now() - before
    assert 0.1 < passed < time.monotonic() - began + 1.0


def test_a_journal_from_the_future_does_not_stop_time(bench: Bench) -> None:
    bench.scheduler._ledger.take_in([StopRequested("nobody", "x")], time.time() + 86400)
    bench.begin()
    before = bench.scheduler._clock.now()
    assert before >= time.time() + 80000
    time.sleep(0.1)
    assert bench.scheduler._clock.now() > before + 0.05


def test_snapshots_are_written_now_and_then(tmp_path: Path) -> None:
    from cotenant.scheduler.journal.ledger import Ledger

    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    ledger = Ledger(journal, SETTINGS.model_copy(update={"journal": JournalSettings(snapshot_every=10)}))
    for number in range(25):
        ledger.take_in([Tick()], float(number))
        ledger.snapshot_if_due()
    assert len(journal.load().entries) == 5
    ledger.close()


def test_a_report_names_its_number() -> None:
    first, second = FakeHost().message(), FakeHost().message()
    assert isinstance(first, HostReport)
    assert first.number < second.number


def test_what_a_scheduler_restores_is_not_looked_through_for_garbage(bench: Bench) -> None:
    gc.unfreeze()
    try:
        bench.begin()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
