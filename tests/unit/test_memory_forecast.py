"""Room made for jobs that are forecast to outgrow their memory shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, host, measurement, profile, report, settings, spec

from cotenant.configs.settings import RebalanceSettings, ResizeSettings, Settings
from cotenant.forecasting.types import Quantiles
from cotenant.scheduler.core.events import JobExited, Tick
from cotenant.scheduler.core.model import Bounds, JobSpec

REST_S = 5.0 * 60.0


def small(**hints: Any) -> JobSpec:
    return spec("small", **({"gpu_memory": 3 * GIB, "compute": 0.4, "checkpoint": "own", "max_slowdown": 4.0} | hints))


def pair(configured: Settings | None = None, **hints: Any) -> Driver:
    """big and small on one GPU of 8 GiB, 4 and 3 of them; small saves, and has run for a while."""
    driver = Driver(host(), configured=configured)
    driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4))
    driver.run(small(**hints))
    driver.do(Tick(), after_s=REST_S)
    return driver


def expect(driver: Driver, p50: float, p99: float | None = None) -> None:
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    seen = measurement("big", share.gpu_id, profile(util=0.4, memory=4 * GIB))
    level = Quantiles(p50 * GIB, p50 * GIB, *[(p99 or p50) * GIB] * 3)
    memory = dict.fromkeys(seen.forecast.memory, level)
    driver.do(report("h1", replace(seen, forecast=replace(seen.forecast, memory=memory))))


def test_gets_what_a_neighbour_leaves_before_it_needs_it() -> None:
    driver = pair()
    driver.submit(spec("waiting", gpu_memory=3 * GIB, compute=0.1))
    expect(driver, 6)
    (stop,) = driver.stops()
    assert stop.job_id == "small"
    assert stop.reason == "makes room for job big, which is forecast to need 6.0 GiB, more than its share"
    expect(driver, 6)
    assert driver.stops() == []
    driver.do(JobExited("small", driver.job("small").epoch, "h1", -15, stopped=True))
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes >= 6 * GIB
    assert [driver.state(job_id) for job_id in ("big", "small", "waiting")] == ["RUNNING", "QUEUED", "QUEUED"]


def test_has_what_is_free_first() -> None:
    driver = pair()
    expect(driver, 4.9)
    assert driver.stops() == []
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes == 5 * GIB


def test_nobody_leaves_for_what_is_possible_but_not_likely() -> None:
    driver = pair()
    expect(driver, 4.5, 7)
    assert driver.stops() == []


@pytest.mark.parametrize("hints", [{"checkpoint": "none"}, {"priority": "high"}])
def test_runs_on_when_nobody_can_leave(hints: dict[str, Any]) -> None:
    driver = pair(**hints)
    expect(driver, 6)
    assert driver.stops() == []
    assert driver.state("big") == "RUNNING"


def test_one_that_has_just_come_is_not_asked() -> None:
    driver = Driver(host())
    driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4))
    driver.run(small())
    expect(driver, 6)
    assert driver.stops() == []
    driver.do(Tick(), after_s=REST_S)
    expect(driver, 6)
    assert [stop.job_id for stop in driver.stops()] == ["small"]


@pytest.mark.parametrize("limit", [Bounds(memory_bytes=5 * GIB), Bounds(memory_bytes=4 * GIB)])
def test_what_it_cannot_have_is_not_made_for_it(limit: Bounds) -> None:
    for name in ("limits", "ceiling"):
        driver = pair()
        driver.core.state.put(replace(driver.job("big"), **{name: limit}))
        expect(driver, 6)
        assert driver.stops() == []


def test_more_than_the_gpu_has_is_not_made_for_it() -> None:
    driver = pair()
    expect(driver, 9)
    assert driver.stops() == []


@pytest.mark.parametrize(
    "changed", [{"resize": ResizeSettings(enabled=False)}, {"rebalance": RebalanceSettings(enabled=False)}]
)
def test_nobody_leaves_where_that_is_switched_off(changed: dict[str, Any]) -> None:
    driver = pair(settings().model_copy(update=changed))
    expect(driver, 6)
    assert driver.stops() == []
