"""Freezing when answers come late, twice or never, and hosts that have something else than was believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen_jobs import FROZEN, SUSPEND, cluster, explained, frozen, inventory, running, thawing, whole
from scheduling import GIB, host, on

from cotenant.scheduler.core.commands import StartJob, StopJob
from cotenant.scheduler.core.events import (
    Event,
    FreezeFailed,
    HostJoined,
    JobExited,
    JobMissing,
    JobStarted,
    ResumeRequested,
)
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
