"""What ``explain`` says of a job that its neighbours slow down too much: all of it comes true, or is not said."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from scheduling import GIB, Driver, gone, half, host, measurement, on, profile, report, saver, settings, sharer, spec

from cotenant.configs.settings import CheckpointSettings, RebalanceSettings, Settings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import MoveRequested, SuspendRequested
from cotenant.scheduler.views import Explanation

RESTED_S, SOON_S = 350.0, 5.0
OFF = settings().model_copy(update={"rebalance": RebalanceSettings(enabled=False)})
HINT = "give job {} the hint checkpoint: own, if its program saves and continues: {} could then be moved to {}"


def explained(driver: Driver, job_id: str = "a") -> Explanation:
    core = driver.core
    return queries.explain(core.state, job_id, driver.now, predictor=core.predictor, policy=core.policy)


def slow(driver: Driver, after_s: float, rate: float = 2.0) -> None:
    """Report a at this rate; alone it goes at 10."""
    (gpu_id,) = on(driver, "a")
    known = profile(util=0.5, memory=2 * GIB)
    driver.do(report("h1", measurement("a", gpu_id, known, step_rate=rate, neighbours=1)), after_s=after_s)


def pair(
    *, place: bool = True, rate: float = 2.0, configured: Settings | None = None, elsewhere: bool = False, **hints: Any
) -> Driver:
    """a and b share a GPU and have had their rest; the other GPU has room (``place``) or none, on another host or not.

    Hints are those of a and b, by their names.
    """
    hosts = (host(gpus=1), host("h2")) if elsewhere else (host(gpus=2),)
    driver = Driver(*hosts, configured=configured)
    driver.run(saver("full", checkpoint="none"))
    both = {"expected_duration_s": 9000.0}
    driver.run(sharer("a", **(both | hints.get("a", {}))))
    driver.run(sharer("b", **(both | hints.get("b", {}))))
    assert on(driver, "a") == on(driver, "b")
    if place:
        driver.run(spec("light", gpu_memory=int(2.5 * GIB), compute=0.05))
        driver.start_all(driver.do(gone(driver, "full", 0)))
    host_id = on(driver, "a")[0][:2]
    known = profile(util=0.5, memory=2 * GIB)
    for after_s in (RESTED_S, SOON_S):
        seen = measurement("a", on(driver, "a")[0], known, step_rate=rate, neighbours=1)
        driver.do(report(host_id, seen), after_s=after_s)
    return driver


def stopped_within(driver: Driver, seconds: float) -> list[str]:
    """Go on until somebody has to leave."""
    until = driver.now + seconds
    while driver.now < until and not driver.stops():
        slow(driver, SOON_S)
    return [stop.job_id for stop in driver.stops()]


def none(job_id: str, saves: bool) -> dict[str, Any]:
    return {} if saves else {"checkpoint": "none"}


CASES = list(product([True, False], [True, False], [True, False], ["low", "normal", "high"]))


@pytest.mark.parametrize(("place", "a_saves", "b_saves", "priority"), CASES)
def test_what_is_promised_happens_and_what_is_not_does_not(
    place: bool, a_saves: bool, b_saves: bool, priority: str
) -> None:
    """A job at a fifth of its speed that accepts a quarter was told nothing at all."""
    hints: dict[str, Any] = {"a": none("a", a_saves) | {"priority": priority}, "b": none("b", b_saves)}

    def anew(**changed: dict[str, Any]) -> Driver:
        return pair(place=place, **{name: hints[name] | changed.get(name, {}) for name in hints})

    found = explained(anew())
    assert found.would_help, "something always helps"
    waits = [each for each in found.would_help if each.startswith("wait: ")]
    assert len(waits) == (not any(each.startswith("nobody is moved: ") for each in found.details))
    stops = stopped_within(anew(), 60.0)
    assert bool(stops) is bool(waits)
    if waits:
        assert "in 25 s at the earliest" in waits[0]
        assert stopped_within(anew(), 15.0) == []
        assert f"job {stops[0]}" in waits[0] or "wait: it may be moved" in waits[0]
    for job_id in "ab":
        if any(each.startswith(f"give job {job_id} the hint checkpoint: own") for each in found.would_help):
            assert stopped_within(anew(**{job_id: {"checkpoint": "own"}}), 60.0) == [job_id]
    if any(each.startswith("a higher priority") for each in found.would_help):
        assert stopped_within(anew(a={"priority": "high"}), 60.0) == ["b"]
    for told in (each for each in found.would_help if each.startswith("'cotenant ")):
        _, what, job_id = told.split(":")[0].split("'")[1].split(" ")
        driver = anew()
        driver.do(MoveRequested(job_id, "x") if what == "move" else SuspendRequested(job_id, "x"))
        assert [stop.job_id for stop in driver.stops()] == [job_id]
        assert told.endswith("it loses nothing") is (hints[job_id].get("checkpoint") != "none")
        driver.start_all(driver.do(gone(driver, job_id)))
        assert what == "suspend" or f" to {on(driver, job_id)[0]}: " in told


def test_one_to_whom_no_hint_has_been_given_is_told_which() -> None:
    without = {"checkpoint": "none"}
    found = explained(pair(a=without, b=without))
    why = "neither it nor its neighbours can leave their GPUs without losing what they have done (hint checkpoint)"
    assert f"nobody is moved: {why}" in found.details
    assert found.would_help == [
        HINT.format("a", "it", "h1-0"),
        HINT.format("b", "job b", "h1-0"),
        "'cotenant move b' to h1-0: it starts over then, since it does not save",
        "'cotenant move a' to h1-0: it starts over then, since it does not save",
        "'cotenant suspend b' until this job has ended: it starts over then, since it does not save",
    ]


def test_one_that_is_less_important_makes_room() -> None:
    found = explained(pair(place=False, a={"priority": "high"}, b={"priority": "low"}))
    assert found.would_help[0] == (
        "wait: job b, which is less important, may be asked to make room, in 25 s at the earliest"
    )


@pytest.mark.parametrize("saves", [True, False])
def test_rebalancing_that_is_off_is_named_and_suggested_where_it_would_do_something(saves: bool) -> None:
    hints = none("", saves)
    found = explained(pair(configured=OFF, a=hints, b=hints))
    assert "nobody is moved: rebalancing is switched off (setting rebalance.enabled)" in found.details
    assert ("set rebalance.enabled: then it may be moved to h1-0" in found.would_help) is saves


def test_a_policy_that_parts_nobody_is_named() -> None:
    driver = pair()
    other = settings(policy="static").placement
    driver.core.state.set_settings(driver.core.state.settings.model_copy(update={"placement": other}))
    told = "nobody is moved: the placement policy static parts no jobs (setting placement.policy)"
    assert told in explained(driver).details


@pytest.mark.parametrize("shared", [True, False])
def test_a_directory_that_all_hosts_read_is_suggested_where_the_room_is_on_another(shared: bool) -> None:
    configured = settings()
    if shared:
        configured = configured.model_copy(update={"checkpoints": CheckpointSettings(directory="/everywhere")})
    found = explained(pair(elsewhere=True, configured=configured))
    advice = [each for each in found.would_help if each.startswith("set checkpoints.directory, so that job a can ")]
    assert len(advice) == (not shared)
    assert found.would_help[0].startswith("wait: ") is shared


def test_one_that_is_leaving_already_is_waited_for() -> None:
    driver = pair()
    driver.do(MoveRequested("b", "x"))
    assert explained(driver).would_help == ["nothing need be done: job b leaves its GPUs already"]


@pytest.mark.parametrize("place", [True, False])
def test_a_deadline_at_risk_gets_more_of_the_gpu_and_no_other_place(place: bool) -> None:
    """Only "fewer neighbours" was said, not that nobody would see to that, nor how."""
    driver = pair(place=place, rate=4.0, a={"deadline_s": 1000.0 + 16_200.0})
    found = explained(driver)
    assert any(
        each.startswith("nobody is moved: a deadline at risk has its share weigh more") for each in found.details
    )
    assert found.would_help[0].startswith("fewer neighbours: ")
    commands = [each.split("'")[1] for each in found.would_help[1:]]
    moves = ["cotenant move b", "cotenant move a"] if place else []
    assert commands == [*moves, "cotenant suspend b"]


def test_who_would_start_over_is_not_told_to_move_for_its_deadline() -> None:
    hints = {"checkpoint": "none"}
    found = explained(pair(rate=4.0, a=hints | {"deadline_s": 1000.0 + 16_200.0}, b=hints))
    assert not any("cotenant move a" in each for each in found.would_help)


@pytest.mark.parametrize("alone", [True, False])
def test_who_gets_on_well_or_is_alone_is_told_nothing(alone: bool) -> None:
    driver = Driver(host())
    driver.run(half("a", checkpoint="none"))
    if not alone:
        driver.run(half("b"))
    slow(driver, RESTED_S, rate=2.0 if alone else 9.0)
    found = explained(driver)
    assert not any("nobody is moved" in each for each in found.details)
    assert found.would_help == []


def test_looking_changes_nothing() -> None:
    for place in (True, False):
        driver = pair(place=place)
        before = driver.core.state.to_json()
        explained(driver)
        assert driver.core.state.to_json() == before
        assert [view.residents for view in driver.core.state.fleet().views] == [
            driver.core.state.view_anew(gpu_id).residents for gpu_id in driver.core.state.gpus
        ]
