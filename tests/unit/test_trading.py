"""Jobs on GPUs of several types that change places."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scheduling import GIB, Driver, host, on, profile, settings, spec

from cotenant.configs.settings import CheckpointSettings, SchedulingSettings, Settings
from cotenant.scheduler.core import trading
from cotenant.scheduler.core.choices import Choices
from cotenant.scheduler.core.events import JobExited, Tick
from cotenant.scheduler.core.model import Host, Job, JobSpec, JobState
from cotenant.scheduler.core.prices import prices_of_work
from cotenant.scheduler.core.priority import Standing, in_words, ordered
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.trading import _assigned

REST_S = 5.0 * 60.0
SPEEDS = settings(speeds={"fast": 4.0}).model_copy(update={"checkpoints": CheckpointSettings(directory="/everywhere")})


def fast(host_id: str = "fast", gpus: int = 1, **more: Any) -> Host:
    found = host(host_id, gpus, **more)
    return replace(found, gpus=tuple(replace(gpu, gpu_type="fast") for gpu in found.gpus))


def saver(job_id: str, left_s: float = 6000.0, **hints: Any) -> JobSpec:
    """A job that has GPUs to itself and continues from its checkpoint."""
    given = {"gpu_memory": GIB, "isolation": "hard", "checkpoint": "own", "expected_duration_s": left_s} | hints
    return spec(job_id, **given)


def rested(*specs: JobSpec, hosts: tuple[Host, ...] = (), configured: Settings = SPEEDS) -> Driver:
    """All run, those first that are named first, and have had their rest."""
    driver = Driver(*(hosts or (host("slow"), fast())), configured=configured)
    for one in specs:
        driver.run(one)
    driver.do(Tick(), after_s=REST_S)
    return driver


def leave(driver: Driver) -> None:
    """Whoever was asked to leave does."""
    asked = list(dict.fromkeys(stop.job_id for stop in driver.stops()))
    for job_id in asked:
        job = driver.job(job_id)
        ended = [JobExited(job_id, job.epoch, host_id, -15, stopped=True) for host_id in job.hosts]
        driver.start_all(driver.do(*ended))


def test_the_fast_gpu_goes_to_the_more_important() -> None:
    driver = rested(saver("plain"), saver("high", priority="high"))
    assert {stop.job_id for stop in driver.stops()} == {"plain", "high"}
    text = driver.core.state.to_json()
    assert State.from_json(text).to_json() == text
    assert driver.job("high").ending.reason.startswith("changes places on GPUs of several types with others: saves 1")
    leave(driver)
    assert (on(driver, "plain"), on(driver, "high")) == (["slow-0"], ["fast-0"])
    assert driver.job("high").restarts == 0
    driver.do(Tick(), after_s=REST_S + 10.0)
    assert driver.stops() == [], "it is as it should be"


def test_the_fast_gpu_goes_to_who_is_sped_up_more_by_it() -> None:
    """However much longer the other has left: it gets the fast one as soon as the first is through."""
    driver = Driver(host("slow"), fast(), configured=SPEEDS)
    for name, rate in (("long", 11.0), ("short", 80.0)):
        driver.core.state.learn(f"fp-{name}", profile(rate=10.0), "cpu-1")
        driver.core.state.learn(f"fp-{name}", profile(rate=rate), "fast")
    driver.run(saver("long", 60_000.0))
    driver.run(saver("short", 6000.0))
    assert (on(driver, "short"), on(driver, "long")) == (["slow-0"], ["fast-0"])
    driver.do(Tick(), after_s=REST_S)
    why = {name: driver.job(name).ending.reason for name in ("short", "long")}
    assert why["short"].startswith("changes places on GPUs of several types with others: saves ")
    assert why["long"] == "changes places on GPUs of several types with others, who gain more speed by it than it loses"
    leave(driver)
    assert (on(driver, "short"), on(driver, "long")) == (["fast-0"], ["slow-0"])


@pytest.mark.parametrize(
    ("plain", "high", "why"),
    [
        ({}, {"checkpoint": "none"}, "one would lose what it has done"),
        ({"priority": "high"}, {}, "both gain the same"),
        ({"left_s": 20_000.0}, {"priority": "normal", "left_s": 60_000.0}, "the longer one gets it afterwards anyway"),
        ({"left_s": 600.0}, {"left_s": 330.0}, "it is not worth two moves"),
        ({"gpu_memory": 6 * GIB}, {}, "one does not fit on the other type"),
    ],
)
def test_they_stay(plain: dict[str, Any], high: dict[str, Any], why: str) -> None:
    hosts = (host("slow", memory=4 * GIB), fast())
    driver = rested(saver("plain", **plain), saver("high", **{"priority": "high"} | high), hosts=hosts)
    assert (on(driver, "plain"), on(driver, "high")) == (["fast-0"], ["slow-0"])
    assert driver.stops() == [], why


def test_where_all_gpus_are_of_one_type_nobody_moves() -> None:
    driver = rested(saver("plain"), saver("high", priority="high"), hosts=(host("a"), host("b")))
    assert driver.stops() == []


def test_nobody_is_moved_before_his_rest() -> None:
    driver = Driver(host("slow"), fast(), configured=SPEEDS)
    driver.run(saver("plain"))
    driver.do(Tick(), after_s=REST_S)
    driver.run(saver("high", priority="high"))
    driver.do(Tick(), after_s=REST_S - 10.0)
    assert driver.stops() == []
    driver.do(Tick(), after_s=20.0)
    assert {stop.job_id for stop in driver.stops()} == {"plain", "high"}


def test_a_gang_and_two_others_change_places() -> None:
    driver = rested(
        saver("one", priority="low"),
        saver("two", priority="low"),
        saver("gang", gpus=2, priority="high"),
        hosts=(host("slow", 2), fast(gpus=2)),
    )
    leave(driver)
    assert sorted(on(driver, "gang")) == ["fast-0", "fast-1"]
    assert sorted(on(driver, "one") + on(driver, "two")) == ["slow-0", "slow-1"]


def test_one_for_which_there_is_no_place_stays_and_the_others_move() -> None:
    """There are two fast GPUs, but on two hosts, and the gang needs them on one."""
    driver = rested(
        saver("one", priority="low"),
        saver("two", priority="low"),
        saver("gang", gpus=2, priority="high"),
        saver("high", priority="high"),
        hosts=(host("slow", 3), fast("fast-a"), fast("fast-b")),
    )
    leave(driver)
    assert sorted(on(driver, "gang")) == ["slow-0", "slow-1"]
    assert on(driver, "high")[0].startswith("fast-")


def test_two_that_share_change_places_with_who_is_more_important() -> None:
    """Those that share are assigned as well: the fast GPU goes to one alone, and they go on together elsewhere."""
    driver = Driver(host("slow"), fast(), configured=SPEEDS)
    for each in ("one", "two"):
        driver.core.state.learn(f"fp-{each}", profile(0.3, GIB), "cpu-1")
        driver.run(saver(each, isolation="soft", priority="low"))
    assert on(driver, "one") == on(driver, "two")
    driver.run(saver("high", priority="high"))
    driver.do(Tick(), after_s=REST_S + 60.0)
    leave(driver)
    leave(driver)
    assert on(driver, "high") == ["fast-0"]
    assert on(driver, "one") == on(driver, "two") == ["slow-0"]


def test_one_makes_room_for_who_waits_and_gains_more() -> None:
    """On one of the types the waiting job is forty times as fast, and the other nearly as fast as on the other type."""
    driver = Driver(host("slow"), fast(), configured=SPEEDS)
    for name, rate in (("indifferent", 10.5), ("idle", 10.5), ("picky", 400.0)):
        driver.core.state.learn(f"fp-{name}", profile(rate=10.0), "cpu-1")
        driver.core.state.learn(f"fp-{name}", profile(rate=rate), "fast")
    driver.run(saver("indifferent", 40_000.0), saver("idle", 40_000.0))
    driver.run(saver("picky", 30_000.0))
    driver.do(Tick(), after_s=REST_S)
    left = driver.stops()
    assert len(left) == 1
    assert driver.job(left[0].job_id).ending.reason.startswith("leaves its GPUs to others")
    leave(driver)
    assert on(driver, "picky") == ["fast-0"]


@pytest.mark.parametrize(("waited_s", "stopped"), [(200.0, 1), (REST_S + 200.0, 0)])
def test_who_has_waited_for_longer_than_it_has_run_makes_no_room(waited_s: float, stopped: int) -> None:
    driver = Driver(host("slow"), fast(), configured=SPEEDS)
    for name, rate in (("indifferent", 10.5), ("idle", 10.5), ("picky", 400.0)):
        driver.core.state.learn(f"fp-{name}", profile(rate=10.0), "cpu-1")
        driver.core.state.learn(f"fp-{name}", profile(rate=rate), "fast")
    driver.run(saver("before", checkpoint="none"), saver("before too", checkpoint="none"))
    driver.submit(saver("indifferent", 40_000.0), saver("idle", 40_000.0))
    driver.start_all(driver.do(*(JobExited(name, 1, on(driver, name)[0].split("-")[0], 0)
                                 for name in ("before", "before too")), after_s=waited_s))  # fmt: skip
    driver.run(saver("picky", 30_000.0))
    driver.do(Tick(), after_s=REST_S)
    assert len(driver.stops()) == stopped


def test_nobody_makes_room_for_who_is_of_a_lower_class() -> None:
    driver = rested(saver("one", 40_000.0), saver("two", 40_000.0))
    driver.run(saver("small", 600.0, priority="low"))
    driver.do(Tick(), after_s=REST_S)
    assert driver.stops() == []


def test_with_the_aim_makespan_the_long_job_runs_first() -> None:
    """Three jobs on two GPUs of one type: whoever has as much to do as the other two is never to wait."""
    aims = {aim: configured.model_copy(update={"scheduling": SchedulingSettings(aim=aim)}) for aim, configured in
            (("completion", SPEEDS), ("makespan", SPEEDS))}  # fmt: skip
    for aim, stopped in (("completion", 0), ("makespan", 1)):
        driver = Driver(host("one"), host("two"), configured=aims[aim])
        driver.run(saver("short", 5000.0), saver("middle", 5000.0))
        driver.run(saver("long", 10_000.0))
        driver.do(Tick(), after_s=REST_S)
        assert len(driver.stops()) == stopped, aim
    leave(driver)
    assert on(driver, "long")


def test_order_and_reasons_follow_the_aim() -> None:
    now, jobs = 100.0, [Job(saver(name, left), JobState.QUEUED, seq=seq, queued_at=0.0)
                        for seq, (name, left) in enumerate((("short", 60.0), ("long", 60_000.0)))]  # fmt: skip
    for aim, order in (("completion", ["short", "long"]), ("makespan", ["long", "short"])):
        standing = Standing(SchedulingSettings(aim=aim))
        assert [job.spec.job_id for job in ordered(jobs, now, standing)] == order
        assert ("long jobs first: aim makespan" in in_words(jobs[0], now, standing)) == (aim == "makespan")


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_no_other_assignment_is_worth_more(data: st.DataObject, jobs: int, parts: int) -> None:
    """Alone or in pairs; everybody at most once, no part used beyond its GPUs, and some must run."""
    gpus = np.array(data.draw(st.lists(st.integers(1, 3), min_size=jobs, max_size=jobs)))
    limits = np.array(data.draw(st.lists(st.integers(0, 4), min_size=parts, max_size=parts)), dtype=float)
    must = np.array(data.draw(st.lists(st.booleans(), min_size=jobs, max_size=jobs)))
    pairs = [(a, b) for a, b in itertools.combinations(range(jobs), 2) if gpus[a] == gpus[b]]
    found = [(a, b, part) for a, b in [*((job, -1) for job in range(jobs)), *pairs] for part in range(parts)]
    first, second, part = (np.array(each) for each in zip(*found, strict=True))
    worth = np.array(data.draw(st.lists(st.floats(0.1, 100.0), min_size=len(found), max_size=len(found))))
    choices = Choices(first, second, part, np.ones(len(found)), np.ones(len(found)))

    def value(chosen: Any) -> float:
        taken = [job for each in chosen for job in choices.members(each)]
        used = np.bincount(part[list(chosen)], weights=gpus[first[list(chosen)]], minlength=parts)
        allowed = len(taken) == len(set(taken)) and (used <= limits).all() and set(np.flatnonzero(must)) <= set(taken)
        return float(worth[list(chosen)].sum()) if allowed else -np.inf

    best = max(
        value(list(each)) for size in range(jobs + 1) for each in itertools.combinations(range(len(found)), size)
    )
    chosen = _assigned(choices, worth, gpus, limits, must)
    assert (chosen is None) == (best == -np.inf)
    if chosen is not None:
        assert value(chosen.tolist()) == pytest.approx(best, rel=1e-3)


@given(st.lists(st.tuples(st.floats(10.0, 1e5), st.floats(0.05, 1.0), st.integers(1, 2)), min_size=1, max_size=5))
def test_prices_add_up_to_the_end_of_all(drawn: list[tuple[float, float, int]]) -> None:
    """Strong duality: what all work is worth is how long it takes at best; no assignment earns more per second."""
    left_s, slow, gpus = (np.array(each) for each in zip(*drawn, strict=True))
    jobs, there = len(left_s), np.array([2, 2])
    first, part = np.tile(np.arange(jobs), 2), np.repeat([0, 1], jobs)
    speed = np.concatenate([slow, np.ones(jobs)])
    choices = Choices(first, np.full(2 * jobs, -1), part, speed, np.zeros(2 * jobs))
    prices = prices_of_work(choices, left_s, gpus, there)
    assert (prices >= 0.0).all()
    alone_s, all_s = float((left_s).max()), float((left_s * gpus).sum() / there.sum())
    end_s = float(prices @ left_s)
    assert end_s >= max(alone_s, all_s) * (1.0 - 1e-6), "nobody is done before it is, and work takes GPUs"
    for chosen in itertools.product((-1, 0, 1), repeat=jobs):
        used = np.bincount([each for each in chosen if each >= 0], minlength=2,
                           weights=[g for each, g in zip(chosen, gpus, strict=True) if each >= 0])  # fmt: skip
        if (used <= there).all():
            rate = sum(prices[job] * (slow[job] if each == 0 else 1.0) for job, each in enumerate(chosen) if each >= 0)
            assert rate <= 1.0 + 1e-6, "or all would be done before the end that is possible"


def test_memory_grows_with_the_choices_and_not_with_their_square() -> None:
    """The scheduler is asked now and then, of as many jobs as may change places: it must not run out of memory."""
    jobs, kinds = 100, 2
    one, other = np.nonzero(np.triu(np.ones((jobs, jobs)), 1))
    first, second = np.concatenate([np.arange(jobs), one]), np.concatenate([np.full(jobs, -1), other])
    part, count = np.repeat(np.arange(kinds), len(first)), kinds * len(first)
    speed = np.where(np.tile(second, kinds) < 0, 1.0, 0.7)
    choices = Choices(np.tile(first, kinds), np.tile(second, kinds), part, speed, np.where(speed < 1.0, 0.7, 0.0))
    gpus, there = np.ones(jobs, dtype=np.int64), np.array([16, 16])
    tracemalloc.start()
    prices = prices_of_work(choices, np.full(jobs, 3600.0), gpus, there)
    worth = choices.total(prices, by_speed=True)
    assert _assigned(choices, worth, gpus, there.astype(np.float64), np.zeros(jobs, dtype=np.bool_)) is not None
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2000 * count, "a square of numbers would take 8 bytes for each two of them"


@pytest.mark.parametrize("most", [1, 6, 10, 10_000])
@pytest.mark.parametrize("aim", ["completion", "makespan"])
@pytest.mark.parametrize("pairs", [True, False])
def test_nobody_leaves_since_there_are_more_choices_than_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, most: int, aim: str, pairs: bool
) -> None:
    """What everybody has is always among them: jobs that share are not parted, nor any suspended, for want of it."""
    monkeypatch.setattr(trading, "MOST_CHOICES", most)
    aimed = SPEEDS.model_copy(update={"scheduling": SchedulingSettings.model_validate({"aim": aim})})
    hints = {"gpu_memory": 3 * GIB, "compute": 0.3, "max_slowdown": 4.0, "isolation": "soft"} if pairs else {}
    jobs = [saver(f"j{number}", 20_000.0, **hints) for number in range(8 if pairs else 4)]
    driver = rested(*jobs, hosts=(fast(gpus=2), host("slow", 2)), configured=aimed)
    before = {job.job_id: on(driver, job.job_id) for job in jobs}
    assert len({*map(tuple, before.values())}) == 4
    driver.submit(saver("late", 19_000.0, gpu_memory=8 * GIB))
    for _ in range(60):
        driver.do(Tick(), after_s=30.0)
        assert driver.stops() == []
    assert {job.job_id: on(driver, job.job_id) for job in jobs} == before
