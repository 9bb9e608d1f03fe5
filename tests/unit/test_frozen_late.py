"""Freezing when answers come late, twice or never, and hosts that have something else than was believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen_jobs import FROZEN, SUSPEND, cluster, explained, frozen, inventory, running, thawing, whole
from scheduling import GIB, Driver, host, on

from cotenant.scheduler.core.commands import StartJob, StopJob
from cotenant.scheduler.core.events import (
    Event,
    FreezeFailed,
    HostJoined,
    JobExited,
    JobMissing,
    JobStarted,
    ResumeRequested,
    Tick,
)
from cotenant.scheduler.core.freezable import STUCK_S
from cotenant.scheduler.core.freezing import MOST_CUT
from cotenant.scheduler.core.reconcile import InventoryItem
from cotenant.scheduler.core.state import State


class TestLateAndTwice:
    def test_the_same_answer_twice_is_one(self):
        driver = frozen()
        before = driver.job("a")
        driver.do(FROZEN)
        assert driver.job("a") == before

    @pytest.mark.parametrize("late", [FROZEN, FreezeFailed("h1", "a", 1, 0, "busy")])
    def test_an_answer_of_an_older_revision_is_over(self, late: Event):
        driver = thawing()
        for _ in range(2):
            before = driver.job("a")
            driver.do(late)
            assert driver.job("a") == before
            driver.do(JobStarted("a", 1, "h1"))
        driver.do(SUSPEND)
        driver.do(late)
        assert (driver.state("a"), driver.job("a").freezing) == ("STOPPING", True)

    @pytest.mark.parametrize(
        "late", [replace(FROZEN, epoch=0), replace(FROZEN, epoch=2), replace(FROZEN, host_id="h9")]
    )
    def test_an_answer_about_something_else_is_ignored(self, late: Event):
        driver = running()
        driver.do(SUSPEND)
        driver.do(late)
        assert driver.state("a") == "STOPPING"

    def test_one_that_was_frozen_late_goes_on_as_soon_as_it_can(self):
        """The command came twice: what is frozen does not run, whatever was believed."""
        driver = running()
        driver.do(SUSPEND)
        driver.do(FreezeFailed("h1", "a", 1, 0, "busy"))
        (start,) = driver.do(FROZEN)
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch, start.revision) == (True, 1, 2)

    def test_interrupted_while_it_is_about_to_go_on_it_stays_frozen(self):
        driver = thawing()
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert (stop.freezes, stop.revision) == (True, 1)
        driver.do(JobStarted("a", 1, "h1"))
        driver.do(replace(FROZEN, revision=1))
        frozen = driver.job("a").frozen
        assert frozen is not None
        assert (driver.state("a"), frozen.revision) == ("SUSPENDED", 1)

    def test_a_gpu_that_fails_meanwhile_leaves_it_frozen(self):
        driver = thawing(gpus=2)
        (used,) = on(driver, "a")
        gpus = [
            replace(gpu, fault="lost") if gpu.gpu_id == used else gpu for gpu in host("h1", 2, checkpoints=True).gpus
        ]
        (stop,) = driver.do(HostJoined(replace(host("h1", 2), gpus=tuple(gpus))))
        assert isinstance(stop, StopJob)
        assert stop.freezes

    @pytest.mark.parametrize("change", [{"fault": "lost"}, {"memory_bytes": GIB}, None])
    def test_what_cannot_be_frozen_does_not_go_on_on_a_gpu_that_has_failed_meanwhile(self, change: object):
        driver = running()
        driver.do(SUSPEND)
        (gpu,) = host("h1", checkpoints=True).gpus
        gpus = () if change is None else (replace(gpu, **change),)  # type: ignore[arg-type]
        driver.do(HostJoined(replace(host("h1"), gpus=gpus)))
        (stop,) = driver.do(FreezeFailed("h1", "a", 1, 0, "busy"))
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert (driver.state("a"), driver.job("a").frozen) == ("SUSPENDED", None)
        assert "it could not be frozen (busy), and GPU h1-0" in explained(driver)

    @pytest.mark.parametrize("thawed", [False, True])
    def test_a_gpu_that_is_gone_before_it_is_frozen_leaves_it_the_others_of_its_host(self, thawed: bool):
        """What type they must be was asked of the GPU that was gone: of none, and the job started over."""
        driver = thawing(gpus=2) if thawed else running(gpus=2)
        (used,) = on(driver, "a")
        driver.do(SUSPEND)
        left = tuple(gpu for gpu in host("h1", 2, checkpoints=True).gpus if gpu.gpu_id != used)
        driver.do(HostJoined(replace(host("h1", 2), gpus=left)))
        driver.do(replace(FROZEN, revision=int(thawed)))
        frozen = driver.job("a").frozen
        assert frozen is not None
        assert (frozen.gpu_type, frozen.ends) == ("cpu-1", "")
        (start,) = driver.do(ResumeRequested("a", "asked"))
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch, [share.gpu_id for share in start.shares]) == (True, 1, [left[0].gpu_id])

    @pytest.mark.parametrize("resumed", [False, True])
    def test_one_that_was_done_when_it_was_frozen_is_done_and_does_not_run_again(self, resumed: bool):
        driver = frozen()
        if resumed:
            driver.run(whole("b", checkpoint="none"))
            driver.do(ResumeRequested("a", "asked"))
            assert driver.state("a") == "QUEUED"
        driver.do(JobExited("a", 1, "h1", 0))
        job = driver.job("a")
        assert (job.state, job.exit_code, job.frozen) == ("SUCCEEDED", 0, None)


class TestCutShort:
    """The host agent ended while it froze the job: that says nothing of the job."""

    def test_it_goes_on_and_can_be_frozen_again(self):
        driver = running()
        driver.do(SUSPEND)
        driver.do(FreezeFailed("h1", "a", 1, 0, "the host agent ended meanwhile", again=True))
        job = driver.job("a")
        assert (driver.state("a"), job.freezes, job.unfreezable, job.lease is not None) == ("RUNNING", True, "", True)
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert (stop.freezes, stop.revision) == (True, 1)
        driver.do(replace(FROZEN, revision=1))
        assert driver.state("a") == "SUSPENDED"

    def test_not_for_ever_since_it_may_be_freezing_that_ends_the_agent(self):
        driver = running()
        for revision in range(MOST_CUT + 1):
            assert driver.job("a").freezes
            driver.do(SUSPEND)
            driver.do(FreezeFailed("h1", "a", 1, revision, "the host agent ended meanwhile", again=True))
        assert (driver.job("a").freezes, driver.state("a")) == (False, "RUNNING")
        assert "the host agent ended meanwhile" in driver.job("a").unfreezable


class TestGpusThatDoNotWork:
    """A frozen job whose host has such GPUs, none of which works."""

    @staticmethod
    def faulty(hosts: int = 2) -> Driver:
        """Job a is frozen on h1, and to go on; its GPU is lost."""
        driver = frozen(hosts=hosts)
        (gpu,) = host("h1", checkpoints=True).gpus
        driver.do(HostJoined(replace(host("h1"), gpus=(replace(gpu, healthy=False, fault="lost"),))))
        driver.do(ResumeRequested("a", "asked"))
        driver.do(Tick())
        assert driver.state("a") == "QUEUED"
        return driver

    def test_it_waits_for_them_for_a_while_and_starts_over_elsewhere(self):
        """It waited for ever, beside GPUs that were idle."""
        driver = self.faulty()
        assert "none of these works, first seen 0.0 s ago: unless one does within 30 min it starts over" in explained(
            driver
        )
        assert driver.do(Tick(), after_s=STUCK_S - 1.0) == []
        (stop,) = driver.do(Tick(), after_s=2.0)
        assert isinstance(stop, StopJob)
        assert (stop.host_id, stop.epoch, stop.freezes) == ("h1", 1, False)
        (start,) = driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert isinstance(start, StartJob)
        assert (start.host_id, start.epoch, start.thaws) == ("h2", 2, False)
        assert "no GPU of host h1.example on which it could go on has worked for 30 min" in explained(driver)
        assert driver.job("a").restarts == 0

    def test_one_that_works_again_in_time_takes_it(self):
        driver = self.faulty()
        driver.do(Tick(), after_s=STUCK_S - 1.0)
        (start,) = driver.do(HostJoined(host("h1", checkpoints=True)))
        assert isinstance(start, StartJob)
        assert (start.host_id, start.epoch, start.thaws) == ("h1", 1, True)

    def test_the_time_starts_anew_once_one_has_worked(self):
        driver = self.faulty()
        lost = driver.core.state.hosts["h1"]
        driver.do(Tick(), after_s=STUCK_S - 1.0)
        driver.do(SUSPEND)
        driver.do(HostJoined(host("h1", checkpoints=True)), Tick())
        driver.do(HostJoined(lost))
        driver.do(ResumeRequested("a", "asked"), Tick())
        assert driver.do(Tick(), after_s=STUCK_S - 1.0) == []
        assert len(driver.do(Tick(), after_s=2.0)) == 1

    def test_whoever_has_suspended_it_is_not_hurried(self):
        driver = self.faulty()
        driver.do(SUSPEND)
        assert driver.do(Tick(), after_s=10 * STUCK_S) == []
        job = driver.job("a")
        assert (driver.state("a"), job.frozen is not None and job.frozen.ends) == ("SUSPENDED", "")


class TestReconciling:
    def test_what_is_frozen_as_expected_is_left_alone(self):
        driver = frozen()
        assert inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True)) == ([], [])

    def test_what_is_not_there_any_more_starts_over(self):
        driver = frozen()
        events, commands = inventory(driver)
        assert (events, commands) == ([JobMissing("a", 1, "h1")], [])

    def test_what_runs_although_it_was_frozen_is_frozen_again(self):
        driver = frozen()
        events, (stop,) = inventory(driver, InventoryItem("a", 1, 1, "running"))
        assert events == []
        assert isinstance(stop, StopJob)
        assert (stop.freezes, stop.revision) == (True, 1)

    @pytest.mark.parametrize("phase", ["running", "stopping"])
    def test_what_is_frozen_and_unknown_is_ended(self, phase: object):
        item = InventoryItem("x", 4, 0, phase, frozen=True)  # type: ignore[arg-type]
        _, (stop,) = inventory(cluster(), item)
        assert isinstance(stop, StopJob)
        assert (stop.epoch, stop.freezes) == (4, False)

    def test_a_freeze_is_repeated(self):
        driver = running()
        (first,) = driver.do(SUSPEND)
        _, (again,) = inventory(driver, InventoryItem("a", 1, 0, "running"))
        assert again == first

    def test_a_thaw_is_repeated_until_it_has_arrived(self):
        driver = thawing()
        (first,) = driver.commands
        assert isinstance(first, StartJob)
        events, (again,) = inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True))
        assert events == []
        assert isinstance(again, StartJob)
        assert replace(again, reason=first.reason) == first
        assert inventory(driver, InventoryItem("a", 1, 1, "running", frozen=True)) == ([], [])
        assert inventory(driver, InventoryItem("a", 1, 1, "running"))[0] == [JobStarted("a", 1, "h1")]
        (absent,) = inventory(driver)[1]
        assert isinstance(absent, StartJob)
        assert absent.thaws

    def test_a_thaw_is_repeated_although_an_old_start_was_told_once_more(self):
        """Its answer was lost, and the events of that report have come again after the job was frozen."""
        driver = thawing()
        (first,) = driver.commands
        driver.do(JobStarted("a", 1, "h1"))
        assert driver.state("a") == "RUNNING"
        events, (again,) = inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True))
        assert events == []
        assert isinstance(again, StartJob)
        assert replace(again, reason="") == replace(first, reason="")

    def test_what_is_frozen_although_it_should_run_is_noted(self):
        driver = running()
        (event,), commands = inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True))
        assert commands == []
        (start,) = driver.do(event)
        assert isinstance(start, StartJob)
        assert start.thaws


def test_what_its_program_was_found_to_need_elsewhere_does_not_keep_it_from_going_on():
    driver = frozen()
    driver.core.state.put(replace(driver.job("a"), memory_hint_corrected=20 * GIB))
    (start,) = driver.do(ResumeRequested("a", "asked"))
    assert isinstance(start, StartJob)
    assert start.shares[0].memory_bytes == 8 * GIB


def test_a_state_read_back_decides_the_same():
    for made in (running, frozen, thawing):
        driver = made()
        if made is running:
            driver.do(SUSPEND)
        text = driver.core.state.to_json()
        assert State.from_json(text).to_json() == text


def test_states_of_older_versions_are_read():
    driver = running()
    text = driver.core.state.to_json().decode()
    for old in ('"checkpoints":true', '"freezes":true', '"freezing":false', '"granted_revision":0', '"unfreezable":""'):
        assert f",{old}" in text
        text = text.replace(f",{old}", "")
    state = State.from_json(text.encode())
    assert not state.jobs["a"].freezes
    assert not state.gpus["h1-0"].checkpoints
