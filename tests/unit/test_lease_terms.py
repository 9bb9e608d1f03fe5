"""Leases whose programs save: asked, given back, resumed, moved; and what becomes of those that are not given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, host, settings, spec

from cotenant.configs.settings import LeaseSettings, RebalanceSettings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.commands import StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    ClientLost,
    HostLost,
    JobExited,
    JobMissing,
    LeaseReturned,
    MemoryOverrun,
    MoveRequested,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.core.reconcile import InventoryItem, reconcile
from cotenant.scheduler.core.state import State

ASKED = StopJob("h1", "a", 1, 20.0, "x", asks=True)
GIVEN_BACK = StopJob("h1", "a", 1, 2.0, "x")
IN_TIME = JobExited("a", 1, "h1", 0, "x", stopped=True)
TOO_LATE = JobExited("a", 1, "h1", -9, "x; its program did not give it back within 20 s", stopped=True)


def lease(job_id: str = "a", **hints: Any) -> JobSpec:
    """A lease that fills a GPU of ``host``, of a program that saves."""
    whole = {"gpu_memory": 8 * GIB, "compute": 1.0, "checkpoint": "own", "grace_s": 20.0}
    return replace(spec(job_id, **(whole | hints)), kind="lease", command=(), attached=True)


@pytest.fixture
def driver() -> Driver:
    """A lease that is held."""
    driver = Driver(host())
    driver.run(lease())
    return driver


def test_it_is_asked_for_given_back_and_granted_again(driver: Driver) -> None:
    assert driver.do(SuspendRequested("a", "x")) == [ASKED]
    assert driver.state("a") == "STOPPING"
    assert driver.do(LeaseReturned("a", 1)) == [GIVEN_BACK]
    assert driver.do(IN_TIME) == []
    job = driver.job("a")
    assert (job.state, job.lease, job.given_back, job.restarts) == ("SUSPENDED", None, False, 0)
    assert queries.attached(driver.core.state) == ["a"], "whoever holds it must go on saying that he is there"
    driver.start_all(driver.do(ResumeRequested("a", "go on"), after_s=100.0))
    job = driver.job("a")
    assert (job.state, job.epoch, job.interruptions) == ("RUNNING", 2, 1)


@pytest.mark.parametrize(
    ("what", "becomes"),
    [
        (SuspendRequested("a", "x"), "SUSPENDED"),
        (MoveRequested("a", "x"), "STARTING"),
        (StopRequested("a", "x"), "CANCELLED"),
    ],
)
@pytest.mark.parametrize("returned", [True, False])
def test_where_it_goes(what: Any, becomes: str, *, returned: bool) -> None:
    """Whatever it was asked for: without the answer of its program it is lost, and not granted again."""
    driver = Driver(host(gpus=2))
    driver.run(lease())
    [stop] = [command for command in driver.do(what) if isinstance(command, StopJob)]
    assert stop.asks
    if returned:
        driver.do(LeaseReturned("a", 1))
    driver.do(IN_TIME if returned else TOO_LATE)
    if returned or becomes == "CANCELLED":
        assert driver.state("a") == becomes
    else:
        assert (driver.state("a"), driver.job("a").reason) == ("FAILED", TOO_LATE.reason)


@pytest.mark.parametrize(("returned", "becomes"), [(True, "QUEUED"), (False, "FAILED")])
def test_one_that_outgrows_its_memory_goes_on_with_more(*, returned: bool, becomes: str) -> None:
    driver = Driver(host())
    driver.run(lease(gpu_memory=4 * GIB, compute=0.5), spec("b", gpu_memory=4 * GIB, compute=0.5))
    [stop] = driver.do(MemoryOverrun("a", 1, "h1", 5 * GIB))
    assert isinstance(stop, StopJob)
    assert stop.asks
    if returned:
        driver.do(LeaseReturned("a", 1))
    driver.do(IN_TIME if returned else TOO_LATE)
    assert (driver.state("a"), driver.job("a").memory_hint_corrected) == (becomes, 6 * GIB)


@pytest.mark.parametrize(("checkpoint", "leaves"), [("own", True), ("none", False)])
def test_it_makes_room_for_a_neighbour_that_outgrows_its_memory(checkpoint: str, *, leaves: bool) -> None:
    driver = Driver(host())
    driver.run(lease(gpu_memory=4 * GIB, compute=0.5, checkpoint=checkpoint, priority="low"))
    driver.run(spec("b", gpu_memory=4 * GIB, compute=0.5, checkpoint="own", priority="high"))
    driver.do(MemoryOverrun("b", 1, "h1", 5 * GIB))
    assert [(stop.job_id, stop.asks) for stop in driver.stops()] == [("a", True) if leaves else ("b", False)]


@pytest.mark.parametrize(
    "end", [HostLost("h1", "gone"), JobMissing("a", 1, "h1"), JobExited("a", 1, "h1", -9, "it has expired", lost=True)]
)
def test_a_host_that_is_lost_takes_it_along(driver: Driver, end: Any) -> None:
    driver.do(SuspendRequested("a", "x"))
    driver.do(end)
    assert driver.state("a") == "FAILED"


def test_a_holder_that_dies_gives_nothing_back_and_keeps_nobody_waiting(driver: Driver) -> None:
    asked = driver.do(SuspendRequested("a", "x"))
    assert asked == [ASKED]
    assert driver.do(ClientLost("a")) == [GIVEN_BACK]
    driver.do(IN_TIME)
    assert driver.state("a") == "CANCELLED"


def test_a_holder_that_dies_at_work_keeps_nobody_waiting(driver: Driver) -> None:
    gone = "its client is gone: no renewal in time"
    ended = [replace(ASKED, reason=gone), replace(GIVEN_BACK, reason=gone)]
    assert driver.do(ClientLost("a")) == ended


@pytest.mark.parametrize("after", ["suspended", "queued"])
def test_a_holder_that_dies_meanwhile(driver: Driver, after: str) -> None:
    driver.do(SuspendRequested("a", "x"))
    driver.do(LeaseReturned("a", 1))
    driver.do(IN_TIME)
    if after == "queued":
        driver.run(spec("b", gpu_memory=8 * GIB, compute=1.0))
        driver.do(ResumeRequested("a", "go on"))
    assert driver.state("a") == after.upper()
    driver.do(ClientLost("a"))
    assert driver.state("a") == "CANCELLED"


@pytest.mark.parametrize("epoch", [0, 2])
def test_what_is_given_back_twice_or_unasked_changes_nothing(driver: Driver, epoch: int) -> None:
    assert driver.do(LeaseReturned("a", 1)) == []
    assert driver.state("a") == "RUNNING"
    driver.do(SuspendRequested("a", "x"))
    assert driver.do(LeaseReturned("a", epoch)) == []
    driver.do(LeaseReturned("a", 1))
    assert driver.do(LeaseReturned("a", 1), LeaseReturned("nobody", 1)) == []
    assert driver.state("a") == "STOPPING"


def test_one_that_nobody_has_yet_is_not_asked_for() -> None:
    driver = Driver(host())
    driver.submit(lease())
    assert driver.do(SuspendRequested("a", "x")) == [StopJob("h1", "a", 1, 20.0, "x")]
    driver.do(IN_TIME)
    assert driver.state("a") == "SUSPENDED"


@pytest.mark.parametrize("what", [SuspendRequested("a", "x"), MoveRequested("a", "x")])
def test_without_the_promise_nothing_happens(what: Any) -> None:
    driver = Driver(host(gpus=2))
    driver.run(lease(checkpoint="none"))
    assert driver.do(what) == []
    assert driver.state("a") == "RUNNING"


@pytest.mark.parametrize(("checkpoint", "leaves"), [("own", True), ("none", False)])
def test_it_makes_room_for_what_is_more_important(checkpoint: str, *, leaves: bool) -> None:
    lease_settings = LeaseSettings(ttl_s=10.0, stop_grace_s=2.0)
    rules = {"rebalance": RebalanceSettings(move_cost_s=1.0), "lease": lease_settings}
    driver = Driver(host(), configured=settings().model_copy(update=rules))
    driver.run(lease(priority="low", checkpoint=checkpoint))
    driver.do(Tick(), after_s=60.0)
    driver.submit(spec("b", gpu_memory=8 * GIB, compute=1.0, priority="high"))
    commands = [command for _ in range(8) for command in driver.do(Tick(), after_s=10.0)]
    assert [command.asks for command in commands if isinstance(command, StopJob)] == [True] * leaves
    if leaves:
        driver.do(LeaseReturned("a", 1))
        driver.start_all(driver.do(IN_TIME))
        assert [driver.state(job_id) for job_id in "ab"] == ["QUEUED", "RUNNING"]
        driver.start_all(driver.do(JobExited("b", 1, "h1", 0)))
        assert (driver.state("a"), driver.job("a").epoch) == ("RUNNING", 2)


def test_the_host_is_told_again_what_it_has_missed(driver: Driver) -> None:
    driver.do(SuspendRequested("a", "x"))
    assert reconcile(driver.core.state, "h1", [InventoryItem("a", 1, 0, "running")], driver.now) == ([], [ASKED])
    assert reconcile(driver.core.state, "h1", [InventoryItem("a", 1, 0, "stopping")], driver.now) == ([], [])
    driver.do(LeaseReturned("a", 1))
    for phase in ("running", "stopping"):
        item = InventoryItem("a", 1, 0, phase)
        assert reconcile(driver.core.state, "h1", [item], driver.now) == ([], [GIVEN_BACK])


@pytest.mark.parametrize("steps", range(5))
def test_a_restart_of_the_scheduler_loses_nothing(driver: Driver, steps: int) -> None:
    """In every state it goes on from what was written down."""
    events = [SuspendRequested("a", "x"), LeaseReturned("a", 1), IN_TIME, ResumeRequested("a", "go on")]
    for number, event in enumerate(events):
        if number == steps:
            driver.core = Core.from_state(State.from_json(driver.core.state.to_json()))
        driver.start_all(driver.do(event))
    check(driver.core.state)
    assert (driver.state("a"), driver.job("a").epoch) == ("RUNNING", 2)


def test_people_see_what_it_does(driver: Driver) -> None:
    driver.do(SuspendRequested("a", "suspended by user"))
    view = queries.job(driver.core.state, "a")
    assert (view.state, view.starts_over, view.stop_by) == ("STOPPING", "", driver.now + 20.0)
    asked = "its program was asked 0.0 s ago to save and give it back: lost if it does not within 20 s"
    assert asked in queries.explain(driver.core.state, "a", driver.now).details
    driver.do(LeaseReturned("a", 1))
    assert queries.job(driver.core.state, "a").stop_by is None, "nothing is left to be saved"
    driver.do(IN_TIME)
    told = queries.explain(driver.core.state, "a", driver.now)
    assert told.summary == "SUSPENDED: suspended by user"
    assert "holds nothing of any GPU; 'cotenant resume' lets it go on" in told.details
    assert any("goes on from" in line for line in told.details)
