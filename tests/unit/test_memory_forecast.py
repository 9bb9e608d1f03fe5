"""Room made for jobs that are forecast to outgrow their memory shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, gone, host, measurement, on, profile, report, settings, sharer, spec

from cotenant.configs.settings import CheckpointSettings, RebalanceSettings, ResizeSettings, Settings
from cotenant.forecasting.types import UNKNOWN_PROFILE, Quantiles
from cotenant.scheduler.core.events import (
    HostJoined,
    JobExited,
    MemoryOverrun,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.model import Bounds

REST_S = 5.0 * 60.0


def pair(configured: Settings | None = None, **hints: Any) -> Driver:
    """big and small on one GPU of 8 GiB, 4 and 3 of them; small saves, and has run for a while."""
    driver = Driver(host(), configured=configured)
    driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4))
    driver.run(sharer("small", compute=0.4, **hints))
    driver.do(Tick(), after_s=REST_S)
    return driver


def expect(driver: Driver, p50: float, p99: float | None = None, **window: Any) -> None:
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    seen = measurement("big", share.gpu_id, profile(util=0.4, memory=4 * GIB), **window)
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
    driver.do(gone(driver, "small"))
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes >= 6 * GIB
    assert [driver.state(job_id) for job_id in ("big", "small", "waiting")] == ["RUNNING", "QUEUED", "QUEUED"]


def test_nobody_leaves_for_a_forecast_that_rests_on_an_estimate() -> None:
    driver = pair()
    expect(driver, 6, memory_source="device")
    assert driver.stops() == []
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes == 5 * GIB  # what nobody has
    expect(driver, 6, memory_source="process")
    assert [stop.job_id for stop in driver.stops()] == ["small"]


UNREAD = {"memory_bytes": None, "memory_peak_bytes": None}


@pytest.mark.parametrize(
    ("here", "there", "leaves"),
    [
        ({}, {}, True),
        ({}, UNREAD, True),
        (UNREAD, {}, False),  # what is forecast is the other GPU's
        (UNREAD, {"memory_source": "device"}, False),
        ({}, {"memory_source": "device"}, False),  # a part of that may be of others
    ],
)
def test_nobody_leaves_for_what_was_read_on_another_gpu(
    here: dict[str, Any], there: dict[str, Any], leaves: bool
) -> None:
    driver = Driver(host(gpus=2))
    driver.run(spec("big", gpus=2, gpu_memory=4 * GIB, compute=0.4), sharer("small", compute=0.4))
    driver.do(Tick(), after_s=REST_S)
    both = []
    for gpu_id in on(driver, "big"):
        window = {"memory_source": "process"} | (here if [gpu_id] == on(driver, "small") else there)
        seen = measurement("big", gpu_id, profile(util=0.4, memory=4 * GIB), **window)
        memory = dict.fromkeys(seen.forecast.memory, Quantiles(*[6.0 * GIB] * 5))
        both.append(replace(seen, forecast=replace(seen.forecast, memory=memory)))
    driver.do(report("h1", *both))
    assert bool(driver.stops()) == leaves


def test_nobody_leaves_for_a_forecast_while_nothing_is_read() -> None:
    """Be it old, or what earlier runs needed: readings may be missing now and then, or never come."""
    driver = pair()
    expect(driver, 6, memory_bytes=None, memory_peak_bytes=None)
    assert driver.stops() == []
    expect(driver, 6)
    assert [stop.job_id for stop in driver.stops()] == ["small"]


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
    driver.run(sharer("small", compute=0.4))
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


@pytest.mark.parametrize(("first", "other"), [(6.0, 6.0), (6.0, 7.5)])
def test_of_two_that_need_more_one_leaves_and_the_other_stays(first: float, other: float) -> None:
    driver = Driver(host())
    for job_id in ("a", "b"):
        driver.run(spec(job_id, gpu_memory=4 * GIB, compute=0.4, checkpoint="own", max_slowdown=4.0))
    driver.do(Tick(), after_s=REST_S)
    seen = []
    for job_id, p50 in (("a", first), ("b", other)):
        window = measurement(job_id, "h1-0", profile(util=0.3, memory=4 * GIB))
        memory = dict.fromkeys(window.forecast.memory, Quantiles(*[p50 * GIB] * 5))
        seen.append(replace(window, forecast=replace(window.forecast, memory=memory)))
    driver.do(report("h1", *seen))
    (stop,) = driver.stops()
    stays = {"a": "b", "b": "a"}[stop.job_id]
    assert (driver.state(stop.job_id), driver.state(stays)) == ("STOPPING", "RUNNING")
    driver.do(JobExited(stop.job_id, stop.epoch, "h1", -15, stopped=True))
    assert (driver.state(stop.job_id), driver.state(stays)) == ("QUEUED", "RUNNING")


def exit_of(driver: Driver, code: int, **more: Any) -> JobExited:
    return JobExited("job", driver.job("job").epoch, "h1", code, **more)


def suspended_and_resumed(driver: Driver) -> None:
    driver.do(SuspendRequested("job", "by hand"))
    driver.do(exit_of(driver, -15, stopped=True))
    driver.do(ResumeRequested("job", "by hand"))


def has_run_out(driver: Driver) -> None:
    driver.do(exit_of(driver, 1, out_of_memory=True))


def has_overrun(driver: Driver) -> None:
    driver.do(MemoryOverrun("job", driver.job("job").epoch, "h1", 7 * GIB))
    suspended_and_resumed(driver)


def was_expected_to(driver: Driver) -> None:
    driver.run(sharer("small", compute=0.4))
    driver.do(Tick(), after_s=REST_S)
    (share,) = driver.job("job").lease.shares  # type: ignore[union-attr]
    seen = measurement("job", share.gpu_id, profile(util=0.4, memory=4 * GIB))
    memory = dict.fromkeys(seen.forecast.memory, Quantiles(*[7.5 * GIB] * 5))
    driver.do(report("h1", replace(seen, forecast=replace(seen.forecast, memory=memory))))
    assert [stop.job_id for stop in driver.stops()] == ["small"]
    driver.do(StopRequested("small", "not needed"), gone(driver, "small"))
    suspended_and_resumed(driver)


@pytest.mark.parametrize("learns", [has_run_out, has_overrun, was_expected_to])
def test_a_margin_makes_no_gpu_too_small_that_holds_the_job(learns: Callable[[Driver], None]) -> None:
    """There is a larger GPU elsewhere, but the checkpoint is here."""
    driver = Driver(host(), host("h2", memory=80 * GIB))
    driver.run(spec("large", gpu_memory=79 * GIB, isolation="hard"))
    driver.run(spec("job", gpu_memory=6 * GIB if learns is has_run_out else 4 * GIB, compute=0.4, checkpoint="own"))
    assert driver.job("job").hosts == ("h1",)
    learns(driver)
    assert driver.state("job") == "STARTING"
    (share,) = driver.job("job").lease.shares  # type: ignore[union-attr]
    assert (share.gpu_id, share.memory_bytes) == ("h1-0", 8 * GIB)


def test_one_that_has_outgrown_its_host_starts_over_elsewhere() -> None:
    driver = Driver(host())
    driver.run(spec("job", gpu_memory=6 * GIB, compute=0.4, checkpoint="own"))
    driver.do(HostJoined(host("h2", memory=80 * GIB)))
    driver.do(MemoryOverrun("job", driver.job("job").epoch, "h1", 9 * GIB))
    driver.do(exit_of(driver, -15, stopped=True))
    assert (driver.state("job"), driver.job("job").hosts) == ("STARTING", ("h2",))


@pytest.mark.parametrize("shared", [True, False])
def test_one_on_several_hosts_is_asked_only_where_it_finds_its_checkpoint_again(shared: bool) -> None:
    kept = CheckpointSettings(directory="/everywhere" if shared else None)
    driver = Driver(host("h1"), host("h2"), configured=settings().model_copy(update={"checkpoints": kept}))
    driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4))
    driver.run(sharer("wide", gpus=2, gang="cluster", compute=0.4))
    driver.do(Tick(), after_s=REST_S)
    assert set(driver.job("wide").hosts) == {"h1", "h2"}
    expect(driver, 6)
    assert {stop.job_id for stop in driver.stops()} == ({"wide"} if shared else set())


def test_what_one_leaves_for_another_reason_is_waited_for() -> None:
    driver = Driver(host())
    driver.run(spec("big", gpu_memory=4 * GIB, compute=0.3))
    driver.run(sharer("small", gpu_memory=2 * GIB, compute=0.2), sharer("other", gpu_memory=2 * GIB, compute=0.2))
    driver.do(Tick(), after_s=REST_S)
    driver.do(SuspendRequested("other", "by hand"))
    expect(driver, 6)
    assert driver.stops() == []
    driver.do(gone(driver, "other"))
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes > 4 * GIB
    assert driver.state("small") == "RUNNING"


def test_memory_is_followed_where_utilisation_cannot_be_read() -> None:
    driver = pair()
    (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    planned = driver.job("big").profile
    unread = replace(UNKNOWN_PROFILE, memory_bytes=int(4.15 * GIB), solo_step_rate=8.0)  # within what counts as noise
    seen = measurement("big", share.gpu_id, unread, util_mean=None, util_peak=None)
    driver.do(report("h1", replace(seen, forecast=replace(seen.forecast, util={}))))
    (grown,) = driver.job("big").lease.shares  # type: ignore[union-attr]
    assert grown.memory_bytes > unread.memory_bytes  # type: ignore[operator]
    assert 0.4 <= grown.compute < 0.55  # as its hint says, not as if it needed all of the GPU
    known = driver.job("big").profile
    assert planned is not None
    assert known == replace(planned, memory_bytes=unread.memory_bytes, solo_step_rate=8.0)
