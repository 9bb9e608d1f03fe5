"""What tenants and queues hold and have used, and the fair-share factor that follows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling import GIB, Driver, half, host, measurement, profile, report, spec

from cotenant.configs.settings import AccountSettings, SchedulingSettings, Settings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.accounts import KEPT_ACCOUNTS, Account, Accounts, fair_share
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import HostJoined, JobExited, StopRequested, Tick
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.state import State

DAY_S = 86400.0


def held(driver: Driver, name: str = "default") -> tuple[float, int, int]:
    account = driver.core.state.accounts.by_kind["tenant"][name]
    return account.held, account.jobs, account.waiting


@pytest.mark.parametrize(
    ("used", "gpus", "after_s", "want"),
    [
        (100.0, 0.0, 0.0, 100.0),
        (100.0, 0.0, DAY_S, 50.0),
        (100.0, 0.0, 3 * DAY_S, 12.5),
        (0.0, 2.0, DAY_S, 2.0 * DAY_S / math.log(2.0) * 0.5),
        (0.0, 1.0, 1.0, 1.0),
        (100.0, 1.0, -5.0, 100.0),
    ],
)
def test_use_decays(used: float, gpus: float, after_s: float, want: float) -> None:
    assert Account(used, at=0.0, held=gpus).used_at(after_s, DAY_S) == pytest.approx(want, rel=1e-5)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6), st.floats(1.0, 1e6))
def test_use_does_not_depend_on_how_often_it_is_settled(steps: list[float], half_life_s: float) -> None:
    once, often, at = Account(50.0, held=1.5), Account(50.0, held=1.5), 0.0
    for step in steps:
        at += step
        often.used, often.at = often.used_at(at, half_life_s), at
    assert often.used == pytest.approx(once.used_at(at, half_life_s), rel=1e-6)


@pytest.mark.parametrize(
    ("used", "weights", "want"),
    [
        ({}, {}, {}),
        ({"a": 0.0}, {"a": 1.0}, {}),
        ({"a": 10.0}, {"a": 1.0}, {"a": 0.5}),
        ({"a": 10.0, "b": 10.0}, {"a": 1.0, "b": 1.0}, {"a": 0.5, "b": 0.5}),
        ({"a": 30.0, "b": 10.0}, {"a": 3.0, "b": 1.0}, {"a": 0.5, "b": 0.5}),
        ({"a": 10.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, {"a": 0.25, "b": 1.0}),
    ],
)
def test_fair_share(used: dict[str, float], weights: dict[str, float], want: dict[str, float]) -> None:
    accounts = {name: Account(amount, waiting=1) for name, amount in used.items()}
    assert fair_share(accounts, weights, 0.0, DAY_S) == pytest.approx(want)


@pytest.mark.parametrize(
    ("hints", "want"),
    [
        ({"gpu_memory": 2 * GIB, "compute": 0.5}, 0.5),
        ({"gpu_memory": 6 * GIB, "compute": 0.5}, 0.75),
        ({"gpu_memory": 2 * GIB, "compute": 0.25, "isolation": "hard"}, 1.0),
        ({}, 1.0),
        ({"gpu_memory": 2 * GIB, "compute": 0.5, "gpus": 2}, 1.0),
    ],
)
def test_a_job_holds_what_it_is_promised_and_not_what_nobody_wants(hints: dict[str, object], want: float) -> None:
    driver = Driver(host(gpus=2))
    driver.run(spec("a", **hints))
    assert held(driver) == (want, 1, 0)
    driver.do(JobExited("a", 1, "h1", 0))
    assert held(driver) == (0.0, 0, 0)


def test_what_is_held_follows_what_is_measured_and_what_a_gpu_has() -> None:
    driver = Driver(host())
    driver.run(spec("a", gpu_memory=GIB))
    driver.do(report("h1", measurement("a", "h1-0", profile(util=0.25, memory=GIB))))
    assert held(driver)[0] == pytest.approx(0.275, abs=1 / 256)
    driver.do(HostJoined(host(memory=2 * GIB)))
    assert held(driver)[0] == pytest.approx(0.55, abs=1 / 128), "its memory with the margin"


def test_waiting_jobs_are_counted_and_use_is_charged() -> None:
    driver = Driver(host())
    driver.run(half("a", tenant="x", isolation="hard"))
    driver.submit(half("b", tenant="y"))
    assert (held(driver, "x"), held(driver, "y")) == ((1.0, 1, 0), (0.0, 0, 1))
    driver.do(Tick(), after_s=100.0)
    used = driver.core.state.accounts.by_kind["tenant"]["x"].used_at(driver.now, DAY_S)
    assert used == pytest.approx(102.0, rel=0.01)


def test_jobs_that_end_while_they_wait_are_counted_no_more() -> None:
    driver = Driver(host())
    driver.submit(half("n", isolation="hard"), half("a", isolation="hard"), half("b", gpu_memory=64 * GIB))
    assert held(driver) == (1.0, 1, 1), "b could never be placed"
    driver.do(StopRequested("a", "x"))
    assert held(driver) == (1.0, 1, 0)


def test_accounts_come_back_from_a_snapshot() -> None:
    driver = Driver(host())
    driver.run(half("a", tenant="x", queue="q"))
    driver.submit(half("b", tenant="y"), half("c", tenant="y", isolation="hard"))
    driver.do(JobExited("a", 1, "h1", 0), after_s=50.0)
    again = State.from_json(driver.core.state.to_json())
    assert again.accounts == driver.core.state.accounts
    assert again.to_json() == driver.core.state.to_json()


def test_a_snapshot_from_before_there_were_accounts_loads() -> None:
    driver = Driver(host())
    driver.run(half("a", deadline_s=1e6, expected_duration_s=100.0))
    driver.submit(half("b", isolation="hard"))
    (record,) = json.loads(driver.core.state.to_json())
    for name in ("accounts", "progress", "reservation", "deadlines_seen_at"):
        del record[name]
    for name in ("settings", "configured"):
        del record[name]["scheduling"]
    for job in record["jobs"]:
        del job["urgency"], job["at_risk"]
    core = Core.from_state(State.from_json(json.dumps([record]).encode()))
    core.handle([Tick()], driver.now + 5.0)
    check(core.state)
    account = core.state.accounts.by_kind["tenant"]["default"]
    assert (account.jobs, account.waiting, account.used) == (1, 1, 0.0)


def test_whoever_used_less_comes_first() -> None:
    driver = Driver(host())
    driver.run(half("a", tenant="greedy", isolation="hard"))
    driver.do(Tick(), after_s=3600.0)
    driver.submit(half("b", tenant="greedy", isolation="hard"), half("c", tenant="modest", isolation="hard"))
    driver.do(JobExited("a", 1, "h1", 0))
    assert (driver.state("b"), driver.state("c")) == ("QUEUED", "STARTING")


def test_weights_say_what_is_fair() -> None:
    accounts = Accounts()
    accounts.by_kind["tenant"] = {"a": Account(30.0), "b": Account(10.0)}
    rules = SchedulingSettings(tenants={"a": AccountSettings(weight=3.0)})
    assert accounts.factors(rules, 0.0)["tenant"] == pytest.approx({"a": 0.5, "b": 0.5})


def test_accounts_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEPT_ACCOUNTS == 10_000
    monkeypatch.setattr("cotenant.scheduler.core.accounts.KEPT_ACCOUNTS", 2)
    accounts = Accounts()
    accounts.by_kind["tenant"] = {"a": Account(30.0), "b": Account(10.0)}
    job = Job(half("j", tenant="c"), JobState.QUEUED, queued_at=0.0)
    accounts.note(job, {}, 0.0, DAY_S)
    assert list(accounts.by_kind["tenant"]) == ["a", "c"]


@pytest.mark.parametrize("half_life_s", [1.0, 86_400.0, 1e15, 1e17, 1e308])
def test_any_half_life_charges_what_was_held(half_life_s: float) -> None:
    charged = Account(used=0.0, at=0.0, held=2.0).used_at(10.0, half_life_s)
    assert 0.0 < charged <= 20.0 * (1.0 + 1e-12)
    if half_life_s > 1e6:
        assert charged == pytest.approx(20.0, rel=1e-3)


def test_accounts_as_people_see_them() -> None:
    rules = SchedulingSettings(tenants={"ml": AccountSettings(weight=3.0, most_gpus=2.0)})
    driver = Driver(host(gpus=2), configured=Settings(scheduling=rules))
    driver.run(half("a"), half("b", tenant="x", isolation="hard"))
    driver.submit(half("c", tenant="x", gpu_memory=9 * GIB), spec("d", tenant="x"))
    driver.do(Tick(), after_s=100.0)
    views = {(view.kind, view.name): view for view in queries.accounts(driver.core.state, driver.now)}
    assert list(views) == [("tenant", "default"), ("tenant", "ml"), ("tenant", "x"), ("queue", "default")]
    ml, x, queue = views["tenant", "ml"], views["tenant", "x"], views["queue", "default"]
    assert (ml.weight, ml.most_gpus, ml.held_gpus, ml.fair_share, ml.entitled_fraction) == (3.0, 2.0, 0.0, 1.0, 0.0)
    assert (x.held_gpus, x.running_jobs, x.waiting_jobs, x.entitled_fraction) == (1.0, 1, 1, 0.5)
    assert x.used_gpu_s == pytest.approx(102.0, rel=0.01)
    assert x.used_fraction == pytest.approx(1.0 / (1.0 + views["tenant", "default"].held_gpus))
    assert x.fair_share == pytest.approx(2 ** -(x.used_fraction / 0.5))
    assert x.fair_share < 0.5 < views["tenant", "default"].fair_share
    assert (queue.used_fraction, queue.entitled_fraction, queue.fair_share) == (1.0, 1.0, 0.5)
