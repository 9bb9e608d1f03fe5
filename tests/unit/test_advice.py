"""What ``explain`` says would help: never what cannot, and what is under way anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, gone, half, host, on, profile, saver, settings, spec

from cotenant.configs.settings import AccountSettings, RebalanceSettings, SchedulingSettings, Settings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import SuspendRequested, Tick

OPEN_IT = "have an administrator open it: its limit is 0 jobs"
GIVE_BOTH = "give both gpu_memory and compute, so that the job need not take whole GPUs to be measured"
ASK_FOR_LESS = "ask for less, or have an administrator raise the limit"
WAIT = "wait for one of these jobs to end, or have an administrator raise the limit"


def helps(driver: Driver, job_id: str) -> list[str]:
    return queries.explain(driver.core.state, job_id, driver.now).would_help


def limited(**terms: Any) -> Settings:
    return settings().model_copy(update={"scheduling": SchedulingSettings(other_tenants=AccountSettings(**terms))})


@pytest.mark.parametrize(
    ("terms", "hints", "told", "advice"),
    [
        ({"most_jobs": 0}, {"compute": 0.5, "gpu_memory": GIB}, "is closed: its limit is 0 jobs", OPEN_IT),
        ({"most_jobs": 1}, {"compute": 0.5, "gpu_memory": GIB}, "runs 1 of 1 jobs", WAIT),
        ({"most_gpus": 0.4}, {"compute": 0.5, "gpu_memory": GIB}, "limit of tenant default is 0.4", ASK_FOR_LESS),
        ({"most_gpus": 0.4}, {}, "limit of tenant default is 0.4, since it was never measured", GIVE_BOTH),
        ({"most_gpus": 0.4}, {"compute": 0.2}, "limit of tenant default is 0.4, since it was never", GIVE_BOTH),
        ({"most_gpus": 1.2}, {}, "the job takes 1.00, since it was never measured", GIVE_BOTH),
        ({"most_gpus": 0.4}, {"isolation": "hard"}, "limit of tenant default is 0.4", ASK_FOR_LESS),
    ],
)
def test_a_limit_says_what_helps_against_it(
    terms: dict[str, Any], hints: dict[str, Any], told: str, advice: str
) -> None:
    driver = Driver(host(gpus=4), configured=limited(**terms))
    driver.run(spec("there", compute=0.3, gpu_memory=GIB))
    driver.submit(spec("a", **hints))
    assert told in queries.explain(driver.core.state, "a", driver.now).summary
    assert helps(driver, "a") == [advice]


@pytest.mark.parametrize("alone", [True, False])
def test_fewer_neighbours_help_only_who_has_some(alone: bool) -> None:
    driver = Driver(host())
    driver.run(half("a", compute=0.3, deadline_s=driver.now + 115.0, expected_duration_s=100.0))
    if not alone:
        driver.run(half("b", compute=0.3))
    driver.now += 10.0
    advice = helps(driver, "a")
    assert any("fewer neighbours" in each for each in advice) is not alone
    assert alone is (advice == ["a later deadline: it has its GPUs to itself already"])


@pytest.mark.parametrize(
    ("runs", "ahead", "priority", "rises"),
    [
        ({}, None, "normal", False),
        ({}, None, "high", False),
        ({}, "high", "low", True),
        ({}, "high", "high", False),
        ({}, "low", "normal", False),
        ({"checkpoint": "own"}, None, "normal", False),
        ({"checkpoint": "own", "priority": "high"}, None, "normal", True),
        ({"checkpoint": "own", "priority": "high"}, None, "high", False),
    ],
    ids=["first", "high", "behind", "behind, high", "ahead", "makes room anyway", "would make room", "highest already"],
)
def test_a_higher_priority_is_suggested_only_to_whom_it_helps(
    runs: dict[str, Any], ahead: str | None, priority: str, rises: bool
) -> None:
    """It was to everybody whose deadline was at risk: first in the queue, and of the highest class already."""
    driver = Driver(host())
    driver.run(spec("runs", isolation="hard", **runs))
    driver.do(Tick(), after_s=1000.0)
    if ahead is not None:
        driver.submit(spec("other", isolation="hard", criticality=1.0, priority=ahead))
    at_risk = {"deadline_s": driver.now + 1150.0, "expected_duration_s": 1000.0}
    driver.submit(spec("a", isolation="hard", priority=priority, **at_risk))
    assert queries.job(driver.core.state, "a").deadline.endswith("at risk")
    assert ("a higher priority" in helps(driver, "a")) is rises


@pytest.mark.parametrize(
    ("hints", "known", "too"),
    [
        ({}, False, True),
        ({"compute": 0.2}, False, True),
        ({"gpu_memory": GIB}, False, True),
        ({"gpu_memory": GIB, "compute": 0.2}, False, False),
        ({}, True, False),
    ],
)
def test_to_share_is_suggested_with_all_that_it_takes(hints: dict[str, Any], known: bool, too: bool) -> None:
    """Who followed the suggestion was told next that it shares only with both hints."""
    driver = Driver(host())
    driver.run(half("there"))
    if known:
        driver.core.state.learn("fp-a", profile(util=0.2, memory=GIB), "cpu-1")
    driver.submit(spec("a", isolation="hard", **hints))
    also = ["to share, give gpu_memory and compute as well: the job was never measured"] if too else []
    assert helps(driver, "a") == ["allow sharing: isolation soft instead of hard", *also]
    driver.submit(replace(spec("b", **hints), fingerprint="fp-a"))
    assert (driver.job("b").lease is None) is too, "as it says"


class TestRoom:
    """Less important jobs that save make room for whoever has waited for a while."""

    def test_it_is_said_beforehand_when_that_may_be_and_while_it_is_done(self) -> None:
        driver = Driver(host())
        driver.run(saver("low", priority="low"))
        driver.do(Tick(), after_s=1000.0)
        driver.submit(spec("high", priority="high", isolation="hard"))
        assert helps(driver, "high")[-1] == (
            "wait: 1 job that can save and is less important, or expected to have much more to do, "
            "may be asked to make room, in 30 s at the earliest"
        )
        driver.do(Tick(), after_s=31.0)
        assert driver.state("low") == "STOPPING"
        assert helps(driver, "high")[-1].startswith("nothing need be done: GPUs are kept for it")
        driver.do(gone(driver, "low"))
        assert on(driver, "high") == ["h1-0"]
        why = queries.explain(driver.core.state, "high", driver.now)
        assert not any("everybody" in each for each in why.details), "low waits"

    def test_one_that_just_started_has_its_rest_first(self) -> None:
        driver = Driver(host())
        driver.run(saver("low", priority="low"))
        driver.submit(spec("high", priority="high", isolation="hard"))
        assert helps(driver, "high")[-1].endswith("in 5 min at the earliest")

    @pytest.mark.parametrize(
        ("rested_s", "duration_s", "late"),
        [(0.0, 100.0, True), (250.0, 60.0, True), (250.0, 1000.0, False), (1000.0, 60.0, True), (1000.0, 600.0, False)],
        ids=["has just started", "rests still", "rests not too long", "patience alone", "in time"],
    )
    def test_what_comes_too_late_for_a_deadline_is_said_to(
        self, rested_s: float, duration_s: float, late: bool
    ) -> None:
        """A deadline in two minutes, and "wait: 1 job may be asked to make room, in 5 min"."""
        driver = Driver(host(gpus=2))
        driver.run(saver("low", priority="low"), half("other", isolation="hard"))
        driver.do(Tick(), after_s=rested_s)
        dated = {"deadline_s": driver.now + 1.15 * duration_s, "expected_duration_s": duration_s}
        driver.submit(spec("high", priority="high", isolation="hard", **dated))
        (told,) = (each for each in helps(driver, "high") if each.startswith("wait: 1 job that can save"))
        assert (", which is too late for its deadline" in told) is late
        assert ("whoever has just started is left alone for 5 min" in told) is (late and rested_s < 300.0)
        core = driver.core
        found = queries.explain(core.state, "high", driver.now, predictor=core.predictor, policy=core.policy)
        assert ("'cotenant suspend low' to make room in time: it loses nothing" in found.would_help) is late
        assert ("a higher priority" in found.would_help) is False
        if late:
            driver.do(SuspendRequested("low", "x"))
            driver.do(gone(driver, "low"))
            assert len(on(driver, "high")) == 1

    @pytest.mark.parametrize("why", ["does not save", "as important", "disabled", "over quota"])
    def test_nothing_is_promised_where_nobody_makes_room(self, why: str) -> None:
        configured = limited(most_jobs=1) if why == "over quota" else settings()
        if why == "disabled":
            configured = configured.model_copy(update={"rebalance": RebalanceSettings(enabled=False)})
        driver = Driver(host(), configured=configured)
        low = {"priority": "normal" if why == "as important" else "low"}
        driver.run(half("low", isolation="hard", **low) if why == "does not save" else saver("low", **low))
        driver.do(Tick(), after_s=1000.0)
        high = "normal" if why == "as important" else "high"
        driver.submit(spec("high", priority=high, isolation="hard"))
        assert driver.state("high") == "QUEUED"
        assert not any("make room" in each for each in helps(driver, "high"))
