"""A job that the driver freezes, on real Ray: it makes room, is moved, and its program never notices.

The GPUs and the driver are stand-ins; the processes are not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import COUNT, FakeDriver
from ray.exceptions import RayActorError
from support import wait_until

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.names import NAMESPACE, agent_name
from cotenant.scheduler.views import JobView

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GIB = 1 << 30
WAIT_S = 60.0


class Jobs:
    """What the tests ask of jobs that count."""

    def __init__(self, host: Any, driver: FakeDriver) -> None:
        self.host = host
        self.driver = driver

    def start(self, **hints: str) -> JobView:
        return self.host.reach(self.host.run(COUNT, hints=Hints(gpu_memory=12 * GIB, **hints)), "RUNNING", WAIT_S)

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait; meanwhile the stand-in for the driver takes processes that have ended off its GPUs."""

        def look() -> bool:
            self.driver.sweep()
            return bool(holds())

        wait_until(look, WAIT_S, what)

    def reaches(self, job: JobView, state: str) -> None:
        self.until(lambda: self.host.client.job(job.job_id).state == state, f"{job.job_id} becomes {state}")

    def count(self, job: JobView) -> int:
        lines = self.host.client.logs(job.job_id).data.split()
        assert lines == [b"%d" % number for number in range(1, len(lines) + 1)], "it goes on where it was"
        return len(lines)

    def counts(self, job: JobView) -> None:
        before = self.count(job)
        self.until(lambda: self.count(job) > before + 3, "it counts on")

    def on(self, job: JobView) -> int:
        (share,) = self.host.client.job(job.job_id).shares
        return ["GPU-a", "GPU-b"].index(share.gpu_id)


def kill_agent(host: Any) -> None:
    """Kill the host's agent, and wait until Ray has started another one."""
    import ray

    def pid() -> int:
        return int(ray.get(ray.get_actor(agent_name(host.client.hosts()[0].host_id), NAMESPACE).ping.remote()))

    def is_another() -> bool:
        try:
            return pid() != before
        except RayActorError:
            return False  # it is being started

    before = pid()
    os.kill(before, signal.SIGKILL)
    wait_until(is_another, WAIT_S, "there is another agent")


def test_a_job_is_moved_makes_room_and_goes_on_without_its_program_noticing(freezes, driver):
    host, jobs = freezes, Jobs(freezes, driver)
    job = jobs.start(checkpoint="driver")
    jobs.until(lambda: driver.on(jobs.on(job)), "it is on its GPU")
    (pid,) = driver.on(jobs.on(job))
    jobs.until(
        lambda: "the driver can freeze it" in str(host.client.explain(job.job_id)),
        "the host has said that it can freeze it",
    )

    first = jobs.on(job)
    host.client.move(job.job_id)
    jobs.until(lambda: driver.on(1 - first) == {pid}, "it is on the other GPU")
    jobs.reaches(job, "RUNNING")
    assert jobs.on(job) == 1 - first
    jobs.counts(job)

    host.client.suspend(job.job_id)
    jobs.reaches(job, "SUSPENDED")
    assert driver.on(0) | driver.on(1) == set()
    at = jobs.count(job)
    kill_agent(host)
    jobs.until(lambda: host.client.hosts()[0].reachable, "its host has another agent")
    others = [jobs.start(), jobs.start()]
    jobs.until(lambda: driver.on(0) and driver.on(1), "both GPUs are in use")
    assert jobs.count(job) == at
    view = host.client.job(job.job_id)
    assert (view.state, view.epoch) == ("SUSPENDED", 1), view
    assert view.frozen is not None
    assert view.frozen.memory_bytes == GIB

    host.client.resume(job.job_id)
    jobs.reaches(job, "QUEUED")
    host.client.stop(others[0].job_id, "make room")
    jobs.reaches(job, "RUNNING")
    jobs.until(lambda: driver.on(jobs.on(job)) == {pid}, "it has its GPU to itself")
    jobs.counts(job)
    view = host.client.job(job.job_id)
    assert (view.epoch, view.restarts) == (1, 0), "it was never started anew"
    for each in (job, others[1]):
        host.client.stop(each.job_id, "end of test")
    jobs.reaches(job, "CANCELLED")
