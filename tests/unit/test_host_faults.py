"""Runs that faults of their hosts end: no restarts of the job, but not for ever either."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduling import Driver, half, host

from cotenant.scheduler.core import turn
from cotenant.scheduler.core.events import HostJoined, HostLost, JobExited, JobMissing, Tick
from cotenant.scheduler.core.model import Host


def broken(whole: Host) -> Host:
    return replace(whole, gpus=tuple(replace(gpu, healthy=False, fault="it is lost") for gpu in whole.gpus))


def host_fault(driver: Driver, kind: str) -> None:
    """End the run of job "a", or have it end, through no fault of its own."""
    job = driver.job("a")
    (name,) = job.hosts
    if kind == "what it ran under":
        driver.do(JobExited("a", job.epoch, name, -9, "the MPS daemon died", lost=True))
    elif kind == "gpu":
        driver.do(HostJoined(broken(host(name))))
        driver.do(JobExited("a", job.epoch, name, -15, stopped=True))
        driver.do(HostJoined(host(name)))
    elif kind == "node":
        driver.do(HostLost(name, "no report"))
        driver.do(HostJoined(host(name)))
    else:
        driver.do(JobMissing("a", job.epoch, name))


HOST_FAULTS = ["what it ran under", "gpu", "node", "its record"]


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_a_fault_of_the_host_is_no_restart_of_the_job_it_ends(kind: str) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    restarts = driver.core.state.settings.lease.max_restarts
    for fault in range(1, restarts + 3):
        host_fault(driver, kind)
        job = driver.job("a")
        assert any(f"; fault {fault} of its hosts, no restart of its own" in each.reason for each in job.history)
        while driver.state("a") == "QUEUED":
            driver.do(Tick(), after_s=1.0)
        driver.start_all(driver.commands)
        job = driver.job("a")
        assert (job.state, job.restarts, job.host_faults) == ("RUNNING", 0, fault)
    driver.do(JobExited("a", driver.job("a").epoch, "h1", 1))
    assert driver.state("a") == "FAILED", "what it does wrong by itself is its restart policy's, as ever"


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_a_job_whose_hosts_fail_each_time_does_not_run_for_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what makes them fail."""
    monkeypatch.setattr(turn, "MOST_HOST_FAULTS", 3)
    driver = Driver(host())
    driver.run(half("a"))
    restarts, runs = driver.core.state.settings.lease.max_restarts, 0
    while driver.state("a") != "FAILED":
        if driver.state("a") == "RUNNING":
            runs += 1
            host_fault(driver, kind)
        driver.start_all(driver.do(Tick(), after_s=1.0) if driver.state("a") == "QUEUED" else driver.commands)
    assert runs == 3 + restarts + 1
    assert f"; gave up after {restarts} restarts" in driver.job("a").reason


def test_faults_of_what_a_job_runs_under_are_followed_by_growing_pauses() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    for wait_s in (1.0, 2.0, 4.0):
        host_fault(driver, "what it ran under")
        assert driver.do(Tick(), after_s=wait_s - 0.5) == []
        driver.start_all(driver.do(Tick(), after_s=0.5))
        assert driver.state("a") == "RUNNING"


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_a_job_that_is_never_to_run_twice_does_not_after_a_fault_of_its_host_either(kind: str) -> None:
    driver = Driver(host())
    driver.run(half("a", restart="never"))
    host_fault(driver, kind)
    assert driver.state("a") == "FAILED"
