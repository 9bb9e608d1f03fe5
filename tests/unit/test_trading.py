"""Jobs on GPUs of several types that change places."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scheduling import GIB, Driver, host, on, profile, settings, spec

from cotenant.configs.settings import CheckpointSettings, Settings
from cotenant.scheduler.core.events import JobExited, Tick
from cotenant.scheduler.core.model import Host, JobSpec
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


amounts = st.floats(-1000.0, 1000.0)


@given(st.data(), st.integers(1, 5), st.integers(2, 3))
def test_no_other_assignment_saves_more(data: st.DataObject, jobs: int, kinds: int) -> None:
    def drawn(of: st.SearchStrategy[Any], count: int) -> np.ndarray:
        return np.array(data.draw(st.lists(of, min_size=count, max_size=count)))

    gpus, kind, free = (
        drawn(st.integers(1, 4), jobs),
        drawn(st.integers(0, kinds - 1), jobs),
        drawn(st.integers(0, 3), kinds),
    )
    saves = drawn(amounts | st.just(-np.inf), jobs * kinds).reshape(jobs, kinds)
    saves[np.arange(jobs), kind] = 0.0
    limits = free + np.bincount(kind, weights=gpus, minlength=kinds)

    def worth(chosen: Any) -> float:
        used = np.bincount(chosen, weights=gpus, minlength=kinds)
        return float(saves[np.arange(jobs), list(chosen)].sum()) if (used <= limits).all() else -np.inf

    found = _assigned(saves, gpus, kind, free)
    best = max(worth(chosen) for chosen in itertools.product(range(kinds), repeat=jobs))
    assert worth(found) == pytest.approx(best, rel=2e-3, abs=1e-3)
