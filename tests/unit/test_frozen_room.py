"""Where frozen jobs go on, and who makes room for whom when some of them can be frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen_jobs import FROZEN, SUSPEND, cluster, frozen, running, whole
from scheduling import GIB, Driver, host, on, settings, sharer, spec

from cotenant.configs.settings import AccountSettings, CheckpointSettings, SchedulingSettings
from cotenant.scheduler.core.commands import StartJob, StopJob
from cotenant.scheduler.core.events import (
    HostJoined,
    JobStarted,
    MemoryOverrun,
    MoveRequested,
    ResumeRequested,
    SettingsChanged,
)
from cotenant.scheduler.core.model import Bounds
from cotenant.scheduler.core.scaling import Load, loads_of

OTHER_TYPE = {"gpu_type": "cpu-2"}


def test_a_directory_that_all_hosts_share_takes_nobody_to_another_host():
    shared = settings().model_copy(update={"checkpoints": CheckpointSettings(directory="/shared")})
    driver = Driver(host("h1", checkpoints=True), host("h2", checkpoints=True), configured=shared)
    driver.run(whole("a"))
    assert driver.do(MoveRequested("a", "anywhere")) == []


@pytest.mark.parametrize("change", [OTHER_TYPE, {"checkpoints": False}])
def test_nor_does_it_move_to_gpus_of_its_host_that_cannot_take_it(change: dict[str, object]):
    driver = running(gpus=2)
    (used,) = on(driver, "a")
    there = driver.core.state.hosts["h1"]
    gpus = (gpu if gpu.gpu_id == used else replace(gpu, **change) for gpu in there.gpus)  # type: ignore[arg-type]
    driver.do(HostJoined(replace(there, gpus=tuple(gpus))))
    assert driver.do(MoveRequested("a", "elsewhere")) == []


def test_gpus_that_were_kept_for_it_and_cannot_take_it_any_more_do_not_get_it():
    driver = running(gpus=2)
    (used,) = on(driver, "a")
    driver.do(MoveRequested("a", "elsewhere"))
    there = driver.core.state.hosts["h1"]
    gpus = tuple(replace(gpu, checkpoints=gpu.gpu_id == used) for gpu in there.gpus)
    driver.do(HostJoined(replace(there, gpus=gpus)))
    assert driver.do(FROZEN)[0].thaws  # type: ignore[union-attr]
    assert on(driver, "a") == [used]


def test_a_host_that_has_frozen_jobs_is_not_given_back():
    driver = frozen(hosts=2)
    assert loads_of(driver.core.state) == [Load("h1", 1, True, 0.0), Load("h2", 1, False, 0.0)]


def test_what_its_processes_cannot_exceed_is_remembered():
    ceiling = Bounds(memory_bytes=8 * GIB)
    driver = cluster()
    (start,) = driver.submit(whole("a"))
    driver.do(JobStarted("a", start.epoch, "h1", ceiling=ceiling))
    driver.do(SUSPEND)
    driver.do(FROZEN)
    driver.start_all(driver.do(ResumeRequested("a", "asked")))
    assert (driver.state("a"), driver.job("a").ceiling) == ("RUNNING", ceiling)


def test_one_that_has_outgrown_its_share_before_is_not_given_up_with_what_it_has_done():
    """A limit that it is above may be raised again."""
    driver = frozen()
    driver.core.state.put(replace(driver.job("a"), overruns=1))
    now = driver.core.state.settings
    limited = SchedulingSettings(other_tenants=AccountSettings(most_gpus=0.5))
    driver.do(SettingsChanged(now.placement, now.resize, limited))
    driver.do(ResumeRequested("a", "asked"))
    assert driver.state("a") == "QUEUED"
    (start,) = driver.do(SettingsChanged(now.placement, now.resize, now.scheduling))
    assert isinstance(start, StartJob)
    assert start.thaws


class TestMemory:
    def outgrow(self, **big: object) -> list[StopJob]:
        """big and small on one GPU of 8 GiB, 4 and 3 of them; both can be frozen, and big needs 6."""
        self.driver = cluster()
        self.driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4, **big))
        self.driver.run(sharer("small", compute=0.4, checkpoint="driver", expected_duration_s=600.0))
        assert self.driver.job("small").freezes
        self.driver.do(MemoryOverrun("big", 1, "h1", 6 * GIB))
        return self.driver.stops()

    def test_a_neighbour_is_frozen_and_what_it_had_is_the_others_at_once(self):
        (stop,) = self.outgrow()
        assert (stop.job_id, stop.freezes) == ("small", True)
        self.driver.do(replace(FROZEN, job_id="small"))
        lease = self.driver.job("big").lease
        assert lease is not None
        assert lease.shares[0].memory_bytes > 6 * GIB
        assert self.driver.job("small").frozen is not None

    @pytest.mark.parametrize(("checkpoint", "leaves"), [("own", "big"), ("driver", "small")])
    def test_one_that_would_start_over_itself_comes_first_like_one_that_saves_nothing(
        self, checkpoint: str, leaves: str
    ):
        (stop,) = self.outgrow(checkpoint=checkpoint)
        assert stop.job_id == leaves
        assert isinstance(stop, StopJob)
