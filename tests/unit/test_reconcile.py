"""A host's inventory against the leases: what is noted, what is sent again."""

from __future__ import annotations

import pytest
from scheduling import Driver, half, host

from cotenant.scheduler.core.events import HostLost, JobExited, JobMissing, JobStarted, StopRequested
from cotenant.scheduler.core.reconcile import InventoryItem, Phase, reconcile


def found(driver: Driver, *inventory: InventoryItem, after_s: float = 1.0) -> list[tuple[str, str, int]]:
    """(kind, job id, epoch) of everything reconcile says about host h1."""
    before = driver.core.state.to_json()
    events, commands = reconcile(driver.core.state, "h1", inventory, driver.now + after_s)
    assert driver.core.state.to_json() == before
    told = [(e.kind, e.job_id, e.epoch) for e in events if isinstance(e, JobMissing | JobStarted)]
    assert len(told) == len(events)
    return told + [(c.kind, c.job_id, c.epoch) for c in commands]


def item(epoch: int = 1, revision: int = 0, phase: Phase = "running", job_id: str = "a") -> InventoryItem:
    return InventoryItem(job_id, epoch, revision, phase)


@pytest.mark.parametrize(
    ("inventory", "after_s", "want"),
    [
        ([], 1.0, [("start", "a", 1)]),
        ([], 29.0, [("start", "a", 1)]),
        ([], 31.0, [("job_missing", "a", 1)]),
        ([item(phase="starting")], 31.0, []),
        ([item()], 1.0, [("job_started", "a", 1)]),
        ([item(phase="exited")], 31.0, []),
        ([item(epoch=0)], 1.0, [("stop", "a", 0), ("start", "a", 1)]),
        ([item(epoch=5)], 1.0, [("stop", "a", 5), ("start", "a", 1)]),
    ],
)
def test_a_starting_job(inventory: list[InventoryItem], after_s: float, want: list[tuple[str, str, int]]) -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    assert found(driver, *inventory, after_s=after_s) == want


@pytest.mark.parametrize(
    ("inventory", "want"),
    [
        ([item()], []),
        ([], [("job_missing", "a", 1)]),
        ([item(phase="exited")], []),
        ([item(epoch=0)], [("job_missing", "a", 1), ("stop", "a", 0)]),
    ],
)
def test_a_running_job(inventory: list[InventoryItem], want: list[tuple[str, str, int]]) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    assert found(driver, *inventory) == want


@pytest.mark.parametrize(
    ("inventory", "want"),
    [
        ([item()], [("stop", "a", 1)]),
        ([item(phase="starting")], [("stop", "a", 1)]),
        ([item(phase="stopping")], []),
        ([item(phase="exited")], []),
        ([], [("job_missing", "a", 1)]),
    ],
)
def test_a_stopping_job(inventory: list[InventoryItem], want: list[tuple[str, str, int]]) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(StopRequested("a", "stopped by user"))
    assert found(driver, *inventory) == want


@pytest.mark.parametrize(("after_s", "want"), [(9.0, "stop"), (11.0, "job_missing")])
def test_a_stop_may_still_be_behind_a_start_that_is_under_way(after_s: float, want: str) -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    driver.do(StopRequested("a", "stopped by user"))
    assert found(driver, after_s=after_s) == [(want, "a", 1)]


def test_a_start_that_got_lost_is_stopped_before_the_next_try() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    driver.do(JobMissing("a", 1, "h1"))
    assert (driver.state("a"), driver.kinds()) == ("STOPPING", [("stop", "a")])
    driver.do(JobMissing("a", 1, "h1"))
    assert driver.state("a") == "QUEUED"


def test_a_stopping_job_that_is_gone_is_let_go() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(StopRequested("a", "stopped by user"))
    driver.do(*reconcile(driver.core.state, "h1", [], driver.now)[0])
    assert driver.state("a") == "CANCELLED"


@pytest.mark.parametrize(("phase", "want"), [("running", 1), ("starting", 1), ("stopping", 0), ("exited", 0)])
def test_strangers_are_stopped(phase: Phase, want: int) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(JobExited("a", 1, "h1", 0))
    told = found(driver, item(phase=phase), item(job_id="nobody", epoch=9, phase=phase))
    assert told == [("stop", "a", 1), ("stop", "nobody", 9)][: 2 * want]


def test_a_job_that_now_runs_elsewhere_is_stopped_here() -> None:
    driver = Driver(host("h1"), host("h2"))
    driver.run(half("a"))
    driver.start_all(driver.do(HostLost("h1", "no report")))
    assert found(driver, item()) == [("stop", "a", 1)]


def test_older_shares_are_sent_again() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.run(half("b"))
    revision = driver.job("a").lease.revision  # type: ignore[union-attr]
    assert revision > 0
    b = item(job_id="b", revision=9)
    assert found(driver, item(revision=revision), b) == []
    assert found(driver, item(revision=revision - 1), b) == [("resize", "a", 1)]


def test_what_is_sent_again_is_what_holds_now() -> None:
    driver = Driver(host())
    (start,) = driver.submit(half("a"))
    _, (again,) = reconcile(driver.core.state, "h1", [], driver.now)
    assert (again.shares, again.epoch) == (start.shares, start.epoch)  # type: ignore[union-attr]
