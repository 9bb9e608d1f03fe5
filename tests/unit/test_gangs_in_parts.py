"""Gangs of several hosts or GPU types: of what is left of one whose host is gone, and of what is learnt of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduling import Driver, host, measurement, on, profile, report, sharer

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
