"""Jobs that make room for others that have much less to do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from scheduling import Driver, host, saver

from cotenant.scheduler.core.events import JobExited, Tick
from cotenant.scheduler.core.preemption import TRIAL_S, UNSURE

REST_S, BEFORE_S = 5.0 * 60.0, 2.0 * 60.0


def waiting(long: dict[str, Any], short: dict[str, Any], waited_s: float = 0.0) -> Driver:
    """``long`` runs and has had its rest, ``short`` has waited for two minutes."""
    driver = Driver(host())
    if waited_s:
        driver.run(saver("before"))
    driver.submit(saver("long", **({"expected_duration_s": 20_000.0} | long)))
    if waited_s:
        driver.do(JobExited("before", 1, "h1", 0), after_s=waited_s)
    driver.start_all(driver.commands)
    driver.do(Tick(), after_s=REST_S)
    driver.submit(saver("short", **({"expected_duration_s": 1000.0} | short)))
    for _ in range(2):
        driver.do(Tick(), after_s=BEFORE_S / 2.0 - 1.0)
        assert driver.stops() == []
    driver.do(Tick(), after_s=10.0)
    return driver


def test_a_long_job_makes_room_for_a_short_one_and_goes_on_afterwards() -> None:
    driver = waiting({}, {})
    assert [(stop.job_id, stop.reason) for stop in driver.stops()] == [
        ("long", "makes room for job short, which is expected to have much less to do")
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
        ({"expected_duration_s": 3000.0}, {"expected_duration_s": None}, 0.0, "the other may take as long"),
        ({"priority": "high"}, {}, 0.0, "it is of a higher class"),
        ({}, {}, 500.0, "it has waited for long enough"),
    ],
)
def test_it_stays(long: dict[str, Any], short: dict[str, Any], waited_s: float, why: str) -> None:
    assert waiting(long, short, waited_s).stops() == [], why


def test_who_has_only_just_started_is_asked_after_its_rest_though_nothing_else_happens() -> None:
    driver = Driver(host())
    driver.run(saver("low", priority="low"))
    driver.submit(saver("high", priority="high"))
    for _ in range(4):
        driver.do(Tick(), after_s=60.0)
        assert driver.state("low") == "RUNNING"
    for _ in range(3):
        driver.do(Tick(), after_s=30.0)
    assert driver.state("low") == "STOPPING"


def test_a_job_that_nobody_knows_anything_of_is_given_a_trial() -> None:
    stops = waiting({}, {"expected_duration_s": None}).stops()
    assert [stop.job_id for stop in stops] == ["long"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_of_jobs_that_say_nothing_those_go_first_that_have_had_less(gpus: int) -> None:
    """Each has the GPUs until it has had four times what the other has: they take turns that become longer, and few."""
    driver = Driver(host(gpus=gpus))
    driver.run(saver("a", gpus=gpus), saver("b", gpus=gpus))
    turns: list[tuple[str, float]] = [("a", driver.now)]
    until = driver.now + 100.0 * TRIAL_S
    while driver.now < until:
        stops = driver.do(Tick(), after_s=60.0)
        runs = turns[-1][0]
        if driver.state(runs) == "STOPPING":
            driver.start_all([*stops, *driver.do(JobExited(runs, driver.job(runs).epoch, "h1", -15, stopped=True))])
            turns.append(("b" if runs == "a" else "a", driver.now))
    names = [name for name, _ in turns]
    lengths = [end - start for (_, start), (_, end) in itertools.pairwise(turns)]
    assert names == ["a", "b"] * (len(names) // 2) + ["a"] * (len(names) % 2)
    assert 3 <= len(turns) <= 6
    assert lengths[0] == pytest.approx(UNSURE * TRIAL_S, abs=120.0)
    had = dict.fromkeys("ab", 0.0)
    for (name, _), length in zip(turns, lengths, strict=False):
        had[name] += length
        other = had["b" if name == "a" else "a"]
        assert had[name] >= UNSURE * max(TRIAL_S, other) - 120.0
