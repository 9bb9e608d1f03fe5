"""A job that the driver freezes, on real Ray: it makes room, is moved, and its program never notices.

The GPUs and the driver are stand-ins; the processes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_support import GPUS
from conftest import TEST_SETTINGS, Deployment, start_deployment, stop_deployment
from fake_driver import COUNT, FakeDriver
from nvml_standin import Standin
from support import alive, wait_until

from cotenant.configs.settings import DeviceSettings, EnforcementSettings
from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.views import JobView

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GIB = 1 << 30
WAIT_S = 60.0


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    standin = Standin(tmp_path / "standin")
    standin.set(*(f"{gpu} used=0" for gpu in GPUS))
    return FakeDriver(tmp_path / "driver", standin, monkeypatch)


@pytest.fixture
def host(ray_environment: None, driver: FakeDriver, tmp_path: Path) -> Iterator[Deployment]:
    """One host with two NVIDIA GPUs and no MPS."""
    more = {"device": DeviceSettings(), "enforcement": EnforcementSettings(mps="off")}
    deployment = start_deployment(tmp_path, head_gpus=2, settings=TEST_SETTINGS.model_copy(update=more))
    yield deployment
    stop_deployment(deployment)


class Jobs:
    """What the tests ask of jobs that count."""

    def __init__(self, host: Deployment, driver: FakeDriver) -> None:
        self.host = host
        self.driver = driver

    def start(self, **hints: str) -> JobView:
        return self.host.reach(self.host.run(COUNT, hints=Hints(gpu_memory=12 * GIB, **hints)), "RUNNING", WAIT_S)

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait; meanwhile the stand-in for the driver takes processes that have ended off its GPUs."""

        def look() -> bool:
            for pid in self.driver.on(0) | self.driver.on(1):
                if not alive(pid):
                    self.driver.clear(pid)
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


def test_a_job_is_moved_makes_room_and_goes_on_without_its_program_noticing(host, driver):
    jobs = Jobs(host, driver)
    job = jobs.start(checkpoint="driver")
    jobs.until(lambda: driver.on(jobs.on(job)), "it is on its GPU")
    (pid,) = driver.on(jobs.on(job))
    jobs.until(lambda: all(gpu.checkpoints for gpu in host.client.gpus()), "the host knows that it can freeze")

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
    others = [jobs.start(), jobs.start()]
    jobs.until(lambda: driver.on(0) and driver.on(1), "both GPUs are in use")
    assert jobs.count(job) == at

    host.client.resume(job.job_id)
    jobs.reaches(job, "QUEUED")
    host.client.stop(others[0].job_id, "make room")
    jobs.reaches(job, "RUNNING")
    assert driver.on(jobs.on(job)) == {pid}
    jobs.counts(job)
    view = host.client.job(job.job_id)
    assert (view.epoch, view.restarts) == (1, 0), "it was never started anew"
    for each in (job, others[1]):
        host.client.stop(each.job_id, "end of test")
    jobs.reaches(job, "CANCELLED")
