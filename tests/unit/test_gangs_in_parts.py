"""Gangs of several hosts or GPU types: of what is left of one whose host is gone, and of what is learnt of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduling import GIB, Driver, host, measurement, on, profile, report, sharer

from cotenant.configs.settings import CheckpointSettings, RebalanceSettings, Settings
from cotenant.scheduler.core.events import Event, HostJoined, HostLost, MoveRequested, Tick
from cotenant.scheduler.core.model import Host

REST_S = 5.0 * RebalanceSettings().move_cost_s
SHARED = Settings(checkpoints=CheckpointSettings(directory="/everywhere"))


def of_type(found: Host, gpu_type: str) -> Host:
    return replace(found, gpus=tuple(replace(gpu, gpu_type=gpu_type) for gpu in found.gpus))


@pytest.mark.parametrize("loss", [HostLost("h2", "gone"), HostJoined(host("h2", 0))])
@pytest.mark.parametrize("aim", ["completion", "makespan"])
@pytest.mark.parametrize("then", ["rest", "hurt", "asked"])
def test_the_neighbours_of_a_gang_that_lost_a_host_are_looked_at(loss: Event, aim: str, then: str) -> None:
    """While what is left of it ends on the other host, rebalancing works out what its neighbours gain by a move."""
    scheduling = SHARED.scheduling.model_copy(update={"aim": aim})
    driver = Driver(host("h1"), host("h2"), configured=SHARED.model_copy(update={"scheduling": scheduling}))
    driver.run(sharer("g", gpus=2, gang="cluster"))
    driver.run(sharer("a"))
    shared = on(driver, "a")[0]
    driver.do(Tick(), after_s=REST_S)
    if shared == "h2-0":  # the other host is the one that stays
        loss = replace(loss, host_id="h1") if isinstance(loss, HostLost) else HostJoined(host("h1", 0))
    driver.do(loss, HostJoined(of_type(host("h3", 2), "fast")))
    assert (driver.state("g"), driver.job("g").lease is None) == ("STOPPING", False)
    if then == "hurt":
        slow = measurement("a", shared, profile(rate=100.0), neighbours=1, step_rate=8.0)
        for _ in range(2):
            driver.do(report(driver.job("a").hosts[0], slow), after_s=40.0)
    elif then == "asked":
        driver.do(MoveRequested("a", "x"))
    driver.do(Tick(), after_s=60.0)
    assert driver.state("a") == ("RUNNING" if then == "rest" else "STOPPING")


@pytest.mark.parametrize("lost", [None, "h3", "h4"])
def test_what_is_learnt_of_a_program_counts_where_a_gang_of_it_has_gpus_of_several_types(lost: str | None) -> None:
    driver = Driver(host("h1"), of_type(host("h2"), "other"))
    driver.submit(*(replace(sharer(job_id, gpu_memory=8 * GIB), fingerprint="fp") for job_id in "ab"))
    driver.do(HostJoined(host("h3")), HostJoined(of_type(host("h4"), "other")))
    driver.submit(replace(sharer("g", gpus=2, gang="cluster"), fingerprint="fp"))
    assert sorted(on(driver, "g")) == ["h3-0", "h4-0"]
    if lost is not None:
        driver.do(HostLost(lost, "gone"))
        assert driver.state("g") == "STOPPING"
    for util, seconds in ((0.2, 60.0), (0.6, 600.0)):
        for job_id in "ab":  # every step checks that the GPUs are kept as the records say
            (gpu_id,) = on(driver, job_id)
            seen = measurement(job_id, gpu_id, profile(util=util, seconds=seconds))
            driver.do(report(driver.job(job_id).hosts[0], seen))
