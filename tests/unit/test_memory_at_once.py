"""Several jobs on one GPU that outgrow their memory shares before anybody has left for the first of them."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import GIB, Driver, gone, host, sharer, spec

from cotenant.scheduler.core.events import MemoryOverrun, StopRequested, SuspendRequested, Tick

REST_S = 5.0 * 60.0


def crowd(*savers: str, memory: int = 14, **hints: Any) -> Driver:
    """Two jobs of 2 GiB that do not save, and some of 5 GiB that do, the first of them the least important."""
    driver = Driver(host(memory=memory * GIB))
    for job_id in ("a", "b"):
        driver.run(spec(job_id, gpu_memory=2 * GIB, compute=0.2, max_slowdown=5.0, **hints))
    for job_id, priority in zip(savers, ("low", "normal"), strict=False):
        driver.run(sharer(job_id, gpu_memory=5 * GIB, compute=0.2, max_slowdown=5.0, priority=priority))
    return driver


def outgrow(driver: Driver, job_id: str, used: float) -> list[str]:
    """The job uses so many GiB; returns who is stopped for that."""
    driver.do(MemoryOverrun(job_id, driver.job(job_id).epoch, "h1", int(used * GIB)))
    return [stop.job_id for stop in driver.stops()]


def memory(driver: Driver, job_id: str) -> float:
    (share,) = driver.job(job_id).lease.shares  # type: ignore[union-attr]
    return share.memory_bytes / GIB


def states(driver: Driver, *job_ids: str) -> list[str]:
    return [driver.state(job_id) for job_id in job_ids]


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_what_one_leaves_for_the_first_serves_the_second_too(first: str, second: str) -> None:
    driver = crowd("low", "other")
    driver.submit(spec("waiting", gpu_memory=2 * GIB, compute=0.1))
    assert outgrow(driver, first, 4.0) == ["low"]
    assert outgrow(driver, second, 4.0) == []
    assert outgrow(driver, first, 4.0) == []
    driver.do(gone(driver, "low"))
    assert memory(driver, first) == pytest.approx(4.8)
    assert memory(driver, second) >= 4.0, "nobody else gets it"
    assert states(driver, "a", "b", "other", "low", "waiting") == [*["RUNNING"] * 3, *["QUEUED"] * 2]


def test_nobody_fails_for_want_of_what_is_about_to_be_free() -> None:
    driver = crowd("low", memory=9)
    outgrow(driver, "a", 4.0)
    assert outgrow(driver, "b", 4.0) == []
    driver.do(gone(driver, "low"))
    assert states(driver, "a", "b") == ["RUNNING", "RUNNING"]
    assert memory(driver, "b") >= 4.0


def test_what_the_first_is_to_have_is_not_counted_twice() -> None:
    driver = crowd("low", "other")
    assert outgrow(driver, "a", 5.0) == ["low"]  # and has 6 with a margin: 1 of 5 is left
    assert outgrow(driver, "b", 4.0) == ["other"]
    driver.do(gone(driver, "low"), gone(driver, "other"))
    assert memory(driver, "a") == pytest.approx(6.0)
    assert memory(driver, "b") == pytest.approx(4.8)


def test_one_who_wants_more_meanwhile_has_another_leave() -> None:
    driver = crowd("low", "other")
    outgrow(driver, "a", 4.0)
    outgrow(driver, "b", 4.0)
    assert outgrow(driver, "a", 8.0) == ["other"]
    driver.do(gone(driver, "low"), gone(driver, "other"))
    assert memory(driver, "a") >= 8.0
    assert outgrow(driver, "b", 4.0) == []


@pytest.mark.parametrize("leaves", [StopRequested("low", "by hand"), SuspendRequested("low", "by hand")])
def test_what_one_leaves_for_no_job_serves_whom_it_is_short_for(leaves: Any) -> None:
    driver = crowd("low", "other")
    driver.submit(spec("waiting", gpu_memory=5 * GIB, compute=0.1))
    driver.do(leaves)
    assert outgrow(driver, "a", 4.0) == []
    driver.do(gone(driver, "low"))
    assert memory(driver, "a") == pytest.approx(4.8)
    assert driver.state("waiting") == "QUEUED"


def test_the_place_that_one_leaves_for_a_more_important_job_is_not_counted() -> None:
    driver = crowd("low", "other")
    driver.do(Tick(), after_s=REST_S)
    driver.submit(sharer("important", gpu_memory=5 * GIB, compute=0.2, max_slowdown=5.0, priority="high"))
    driver.do(Tick(), after_s=40.0)
    assert [stop.job_id for stop in driver.stops()] == ["low"]
    assert outgrow(driver, "a", 4.0) == ["other"]
    driver.do(gone(driver, "low"))
    assert memory(driver, "a") == pytest.approx(4.8), "it uses that already: two must not have it"
    driver.do(gone(driver, "other"))
    assert states(driver, "a", "b", "important") == ["RUNNING", "RUNNING", "STARTING"]


def test_nobody_waits_for_more_than_is_seen_once_all_have_left() -> None:
    driver = crowd("low", memory=9)
    outgrow(driver, "a", 5.0)
    assert driver.job("a").awaits_memory
    driver.do(gone(driver, "low"))
    assert not driver.job("a").awaits_memory
