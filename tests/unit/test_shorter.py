"""Jobs that make room for others that have much less to do."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import GIB, Driver, host, spec

from cotenant.scheduler.core.events import JobExited, Tick
from cotenant.scheduler.core.model import JobSpec

REST_S = 5.0 * 60.0


def alone(job_id: str, **hints: Any) -> JobSpec:
    """A job that takes a GPU whole and continues from its checkpoint."""
    return spec(job_id, **({"gpu_memory": 8 * GIB, "compute": 1.0, "checkpoint": "own"} | hints))


def waiting(long: dict[str, Any], short: dict[str, Any], waited_s: float = 0.0) -> Driver:
    """``long`` runs and has had its rest, ``short`` has waited for more than half a minute."""
    driver = Driver(host())
    if waited_s:
        driver.run(alone("before"))
    driver.submit(alone("long", **({"expected_duration_s": 20_000.0} | long)))
    if waited_s:
        driver.do(JobExited("before", 1, "h1", 0), after_s=waited_s)
    driver.start_all(driver.commands)
    driver.do(Tick(), after_s=REST_S)
    driver.submit(alone("short", **({"expected_duration_s": 1000.0} | short)))
    driver.do(Tick(), after_s=20.0)
    assert driver.stops() == []
    driver.do(Tick(), after_s=20.0)
    return driver


def test_a_long_job_makes_room_for_a_short_one_and_goes_on_afterwards() -> None:
    driver = waiting({}, {})
    assert [(stop.job_id, stop.reason) for stop in driver.stops()] == [
        ("long", "makes room for job short, which has much less to do")
    ]
    driver.start_all(driver.do(JobExited("long", 1, "h1", -15, stopped=True)))
    assert (driver.state("long"), driver.state("short")) == ("QUEUED", "RUNNING")
    driver.start_all(driver.do(JobExited("short", 1, "h1", 0), after_s=1000.0))
    assert (driver.state("long"), driver.job("long").epoch, driver.job("long").restarts) == ("RUNNING", 2, 0)


@pytest.mark.parametrize(
    ("long", "short", "waited_s", "why"),
    [
        ({"checkpoint": "none"}, {}, 0.0, "it would lose what it has done"),
        ({}, {"expected_duration_s": 10_000.0}, 0.0, "it has not that much more to do"),
        ({}, {"expected_duration_s": None}, 0.0, "nobody knows that the other is shorter"),
        ({"priority": "high"}, {}, 0.0, "it is of a higher class"),
        ({}, {}, 400.0, "it has waited for long enough"),
    ],
)
def test_it_stays(long: dict[str, Any], short: dict[str, Any], waited_s: float, why: str) -> None:
    assert waiting(long, short, waited_s).stops() == [], why
