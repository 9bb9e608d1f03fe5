"""GPUs that are kept for a job: for how long, and that nobody leaves any for one that may not have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, gone, host, measurement, on, profile, report, saver, sharer, spec

from cotenant.configs.settings import (
    AccountSettings,
    CheckpointSettings,
    RebalanceSettings,
    SchedulingSettings,
    Settings,
)
from cotenant.scheduler.core import queries, walk
from cotenant.scheduler.core.board import CLAIM_SLACK_S
from cotenant.scheduler.core.events import HostJoined, HostUnreachable, MoveRequested, SettingsChanged, Tick
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.moves import PATIENCE_S

SHARED = Settings(checkpoints=CheckpointSettings(directory="/everywhere"))
REST_S = 5.0 * SHARED.rebalance.move_cost_s


def with_rules(**rules: Any) -> Settings:
    return SHARED.model_copy(update={"scheduling": SchedulingSettings(**rules)})


def of_type(found: Host, gpu_type: str) -> Host:
    return replace(found, gpus=tuple(replace(gpu, gpu_type=gpu_type) for gpu in found.gpus))


def stopping(driver: Driver) -> list[str]:
    return sorted(job_id for job_id in driver.core.state.jobs if driver.state(job_id) == "STOPPING")


@pytest.mark.parametrize("few_gpus", [0, walk.FEW_GPUS])
@pytest.mark.parametrize("waits", [True, False])
def test_what_is_kept_for_too_long_is_offered_to_others_although_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, few_gpus: int, waits: bool
) -> None:
    """A job that is being moved does not end; nobody else comes, ends or changes."""
    monkeypatch.setattr(walk, "FEW_GPUS", few_gpus)
    driver = Driver(host(gpus=2), configured=SHARED)
    driver.run(saver("a"))
    driver.do(MoveRequested("a", "x"))
    kept_s = SHARED.checkpoints.grace_s + CLAIM_SLACK_S
    if waits:
        driver.submit(saver("b"))
        assert (driver.state("a"), driver.state("b")) == ("STOPPING", "QUEUED")
        driver.do(Tick(), after_s=kept_s - 2.0)
        assert on(driver, "b") == []
        driver.do(Tick())
    else:
        driver.do(Tick(), after_s=kept_s)
        driver.submit(saver("b"))
    assert not driver.core.state.moves.claims
    assert on(driver, "b") == ["h1-1"]


LIMITS = [
    {"tenants": {"ml": AccountSettings(most_jobs=1)}},
    {"queues": {"q": AccountSettings(most_jobs=1)}},
    {"other_tenants": AccountSettings(most_gpus=1.5)},
]


@pytest.mark.parametrize("rules", LIMITS)
@pytest.mark.parametrize("way", ["more important", "shorter", "makespan", "faster"])
def test_nobody_makes_room_for_more_jobs_than_may_start(rules: dict[str, Any], way: str) -> None:
    """Two wait that fit nowhere; their tenant or queue may start one of them."""
    aim = "makespan" if way == "makespan" else "completion"
    large, small = {"expected_duration_s": 50_000.0}, {"expected_duration_s": 500.0}
    they, we = (small, large) if way == "makespan" else (large, small)
    we = {"priority": "high"} if way == "more important" else we
    others = of_type(host("h2"), "slow") if way in ("makespan", "faster") else host("h2")
    driver = Driver(host("h1"), others, configured=with_rules(aim=aim, **rules))
    driver.run(saver("a", tenant="x", **they), saver("b", tenant="y", **they))
    driver.do(Tick(), after_s=REST_S)
    driver.submit(*(saver(each, tenant="ml", queue="q", **we) for each in ("c", "d")))
    for _ in range(60):
        driver.start_all(driver.do(Tick(), after_s=5.0))
        leaving = stopping(driver)
        if leaving:
            driver.start_all(driver.do(*(gone(driver, job_id) for job_id in leaving)))
    assert sum(job.interruptions for job in driver.core.state.jobs.values()) == 1
    assert [driver.state(each) for each in "abcd"].count("RUNNING") == 2, "no GPU is kept for the other one"


@pytest.mark.parametrize("rules", [{"most_jobs": 1}, {"most_gpus": 0.6}])
@pytest.mark.parametrize("way", ["free", "hurt", "asked", "faster"])
def test_nobody_is_moved_who_could_not_start_again(rules: dict[str, Any], way: str) -> None:
    """A limit was lowered below what runs: that stops nobody, however much better off it would be elsewhere."""
    driver = Driver(host("h1"), configured=SHARED)
    driver.run(*(sharer(each, tenant="ml", expected_duration_s=50_000.0) for each in "ab"))
    lowered = SchedulingSettings(tenants={"ml": AccountSettings(**rules)})
    driver.do(Tick(), after_s=REST_S)
    driver.do(SettingsChanged(SHARED.placement, SHARED.resize, lowered))
    if way == "hurt":
        slow = measurement("a", "h1-0", profile(rate=100.0), neighbours=1, step_rate=8.0)
        driver.do(report("h1", slow))
        driver.do(report("h1", slow), after_s=40.0)
    driver.do(HostJoined(of_type(host("h2", 2), "fast") if way == "faster" else host("h2", 2)))
    if way == "asked":
        driver.do(MoveRequested("a", "x"))
        assert driver.core.state.ignored == {"move to where there is no room": 1}
    for _ in range(20):
        driver.do(Tick(), after_s=10.0)
    assert stopping(driver) == []
    driver.do(SettingsChanged(SHARED.placement, SHARED.resize, SchedulingSettings()))
    driver.do(Tick(), after_s=10.0)
    assert len(stopping(driver)) == 1, "but for the limit it would move"


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("size_weight", [0.0, 0.2])
def test_nobody_makes_room_for_an_equal(factor: float, size_weight: float) -> None:
    """Values may all be 0, and the factor 1: then an equal one is not more important."""
    weights = dict.fromkeys(("fair_share_weight", "urgency_weight", "criticality_weight"), 0.0)
    moving = RebalanceSettings(priority_factor=factor)
    configured = with_rules(**weights, size_weight=size_weight).model_copy(update={"rebalance": moving})
    driver = Driver(host(), configured=configured)
    driver.run(saver("a", priority="low"))
    driver.do(Tick(), after_s=REST_S)
    driver.submit(saver("b", priority="low"))
    for _ in range(40):
        driver.do(Tick(), after_s=10.0)
    assert (driver.state("a"), driver.state("b")) == ("RUNNING", "QUEUED")
    assert not any("less important" in line for line in queries.explain(driver.core.state, "b", driver.now).would_help)


@pytest.mark.parametrize("aim", ["completion", "makespan"])
@pytest.mark.parametrize("way", ["free", "hurt", "faster"])
def test_nobody_is_moved_from_a_host_that_does_not_answer(way: str, aim: str) -> None:
    """It would not hear of it: GPUs would be kept for a job that runs on as it did."""
    driver = Driver(host("h1"), configured=with_rules(aim=aim))
    driver.run(*(sharer(each, expected_duration_s=50_000.0) for each in "ab"))
    driver.do(Tick(), after_s=REST_S)
    if way == "hurt":
        slow = measurement("a", "h1-0", profile(rate=100.0), neighbours=1, step_rate=8.0)
        driver.do(report("h1", slow))
        driver.do(report("h1", slow), after_s=PATIENCE_S + 1.0)
    driver.do(HostUnreachable("h1", "no answer"))
    found = of_type(host("h2", 2), "fast") if way == "faster" else host("h2", 2)
    driver.do(HostJoined(found))
    for _ in range(20):
        driver.do(Tick(), after_s=10.0)
        assert (stopping(driver), driver.core.state.moves.claims) == ([], {})
    driver.do(HostJoined(driver.core.state.hosts["h1"]))
    for _ in range(2):
        driver.do(Tick(), after_s=10.0)
    assert len(stopping(driver)) >= 1, "as soon as it answers somebody moves"


@pytest.mark.parametrize("few_gpus", [0, walk.FEW_GPUS])
def test_a_kept_gpu_is_offered_to_others_as_soon_as_whom_it_was_kept_for_is_there(
    monkeypatch: pytest.MonkeyPatch, few_gpus: int
) -> None:
    """Nothing else may happen for long: whoever may share it would wait beside it."""
    monkeypatch.setattr(walk, "FEW_GPUS", few_gpus)
    driver = Driver(host("small", memory=4 * GIB), configured=SHARED)
    driver.run(saver("a", gpu_memory=2 * GIB, compute=0.4))
    driver.do(HostJoined(host("large")))
    driver.do(MoveRequested("a", "x"))
    driver.submit(spec("b", gpu_memory=5 * GIB, compute=0.4))
    assert (driver.state("a"), driver.state("b")) == ("STOPPING", "QUEUED")
    driver.do(gone(driver, "a", 0))
    assert on(driver, "a") == on(driver, "b") == ["large-0"]
