"""Jobs that the driver freezes on their host, and lets go on there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen_jobs import FROZEN, SUSPEND, cluster, explained, frozen, inventory, running, thawing, whole
from scheduling import GIB, Driver, half, host, on

from cotenant.scheduler.core import queries
from cotenant.scheduler.core.commands import ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    FreezeFailed,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobExited,
    JobMissing,
    JobStarted,
    MoveRequested,
    ResumeRequested,
    StartFailed,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.freezing import FREEZE_TIMEOUT_S
from cotenant.scheduler.core.reconcile import InventoryItem


class TestSuspending:
    def test_it_is_frozen_and_its_gpu_serves_another(self):
        driver = running()
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert (stop.freezes, stop.epoch, stop.revision, stop.asks) == (True, 1, 0, False)
        assert queries.job(driver.core.state, "a").starts_over == ""
        driver.submit(whole("b"))
        assert driver.state("b") == "QUEUED"
        driver.start_all(driver.do(FROZEN))
        assert (driver.state("a"), driver.state("b")) == ("SUSPENDED", "RUNNING")
        job = driver.job("a")
        assert (job.lease, job.epoch, job.restarts, job.interruptions) == (None, 1, 0, 1)

    def test_it_goes_on_in_its_epoch_with_a_newer_revision_and_nothing_is_lost(self):
        driver = frozen(expected_duration_s=1000.0)
        done_s = driver.job("a").done_s
        assert done_s > 50.0
        (start,) = driver.do(ResumeRequested("a", "asked"))
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch, start.revision, start.host_id) == (True, 1, 1, "h1")
        driver.start_all([start])
        job = driver.job("a")
        assert (job.state, job.frozen, job.done_s, job.freezes) == ("RUNNING", None, done_s, True)
        assert driver.core.state.progress["a"].done_s == done_s

    def test_it_is_frozen_again_and_again(self):
        driver = frozen()
        for revision in (1, 2, 3):
            driver.start_all(driver.do(ResumeRequested("a", "asked")))
            (stop,) = driver.do(SUSPEND)
            assert isinstance(stop, StopJob)
            assert (stop.freezes, stop.epoch, stop.revision) == (True, 1, revision)
            driver.do(replace(FROZEN, revision=revision))
        assert (driver.state("a"), driver.job("a").epoch, driver.job("a").interruptions) == ("SUSPENDED", 1, 4)

    def test_what_it_held_is_what_it_needs_whatever_its_hint(self):
        driver = cluster()
        driver.run(half("a", checkpoint="driver"))
        job = driver.job("a")
        assert job.lease is not None
        grown = replace(job.lease.shares[0], memory_bytes=6 * GIB)
        driver.core.state.put(replace(job, lease=replace(job.lease, revision=1, shares=(grown,))))
        driver.do(SUSPEND)
        driver.do(replace(FROZEN, revision=1))
        driver.run(half("b"))
        driver.do(ResumeRequested("a", "asked"))
        assert driver.state("a") == "QUEUED"
        driver.do(StopRequested("b", "enough"))
        (start,) = driver.do(JobExited("b", 1, "h1", -15, stopped=True))
        assert isinstance(start, StartJob)
        assert start.shares[0].memory_bytes == 6 * GIB

    def test_a_suspended_one_that_is_only_held_back_stays_frozen(self):
        driver = frozen()
        driver.run(whole("b"))
        driver.do(ResumeRequested("a", "asked"))
        driver.do(SUSPEND)
        assert (driver.state("a"), driver.job("a").frozen is not None) == ("SUSPENDED", True)

    def test_resumed_before_it_is_frozen_it_goes_on_once_it_is(self):
        driver = running()
        driver.do(SUSPEND)
        driver.do(ResumeRequested("a", "changed my mind"))
        (start,) = driver.do(FROZEN)
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch, start.revision) == (True, 1, 1)


class TestWhere:
    def test_it_goes_on_on_another_gpu_of_its_host_and_nowhere_else(self):
        driver = frozen(gpus=2, hosts=2)
        driver.run(*(whole(f"b{number}", checkpoint="none") for number in range(4)))
        driver.do(ResumeRequested("a", "asked"))
        elsewhere = next(job_id for job_id in ("b0", "b1", "b2", "b3") if driver.job(job_id).hosts == ("h2",))
        driver.do(JobExited(elsewhere, 1, "h2", 0))
        assert driver.state("a") == "QUEUED"
        near = next(job_id for job_id in ("b0", "b1", "b2", "b3") if on(driver, job_id) == ["h1-1"])
        (start,) = driver.do(JobExited(near, 1, "h1", 0))
        assert isinstance(start, StartJob)
        assert (start.thaws, on(driver, "a")) == (True, ["h1-1"])

    @pytest.mark.parametrize("change", [{"gpu_type": "cpu-2"}, {"checkpoints": False}])
    def test_not_on_gpus_that_cannot_take_it(self, change: dict[str, object]):
        driver = frozen(gpus=2)
        driver.run(whole("b", checkpoint="none"))
        free = "h1-1" if on(driver, "b") == ["h1-0"] else "h1-0"
        both = driver.core.state.hosts["h1"]
        other = [replace(gpu, **change) if gpu.gpu_id == free else gpu for gpu in both.gpus]  # type: ignore[arg-type]
        driver.do(HostJoined(replace(both, gpus=tuple(other))))
        driver.do(ResumeRequested("a", "asked"))
        assert driver.state("a") == "QUEUED"
        (start,) = driver.do(JobExited("b", 1, "h1", 0))
        assert isinstance(start, StartJob)
        assert free not in on(driver, "a")

    def test_it_starts_over_once_its_host_has_no_such_gpus_any_more(self):
        driver = frozen(hosts=2)
        gpus = (replace(driver.core.state.hosts["h1"].gpus[0], gpu_type="cpu-2"),)
        (stop,) = driver.do(HostJoined(replace(driver.core.state.hosts["h1"], gpus=gpus)))
        assert isinstance(stop, StopJob)
        assert (stop.freezes, stop.epoch) == (False, 1)
        assert driver.do(ResumeRequested("a", "asked")) == []
        assert "no GPUs any more on which it could go on" in explained(driver)
        _, (again,) = inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True))
        assert isinstance(again, StopJob)
        assert not again.freezes
        (start,) = driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch) == (False, 2)

    def test_moving_it_to_another_gpu_of_its_host_freezes_it(self):
        driver = running(gpus=2)
        (stop,) = driver.do(MoveRequested("a", "asked"))
        assert isinstance(stop, StopJob)
        assert stop.freezes
        (start,) = driver.do(FROZEN)
        assert isinstance(start, StartJob)
        assert (start.thaws, on(driver, "a")) == (True, ["h1-1"])

    def test_nobody_moves_it_to_another_host_unless_that_is_meant(self):
        driver = running(hosts=2)
        assert driver.do(MoveRequested("a", "anywhere")) == []
        (stop,) = driver.do(MoveRequested("a", "there", ("h2-0",)))
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        assert "can go on only there" in queries.job(driver.core.state, "a").starts_over
        (start,) = driver.do(JobExited("a", 1, "h1", -15, stopped=True))
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch, start.host_id, driver.job("a").done_s) == (False, 2, "h2", 0.0)


class TestWhoCanBeFrozen:
    @pytest.mark.parametrize(
        ("hints", "able", "why"),
        [
            ({}, False, "the driver cannot freeze processes on h1-0: 'cotenant doctor' on host h1.example says"),
            ({"checkpoint": "none"}, True, ""),
            ({"gpus": 2, "gang": "cluster"}, True, "it is on several hosts"),
        ],
    )
    def test_others_start_over_as_they_were_told(self, hints: dict[str, object], able: bool, why: str):
        driver = Driver(host("h1", checkpoints=able), *([host("h2", checkpoints=able)] if "gpus" in hints else []))
        driver.run(whole("a", **hints))
        assert not driver.job("a").saves
        assert why in explained(driver)
        assert ("checkpoint own would help" in explained(driver)) == bool(why)
        for stop in driver.do(SUSPEND):
            assert isinstance(stop, StopJob)
            assert not stop.freezes
        assert queries.job(driver.core.state, "a").starts_over.endswith("it will start over")

    def test_a_gang_that_may_lie_anywhere_can_be_frozen_where_it_lies_on_one_host(self):
        driver = cluster(gpus=2)
        driver.run(whole("a", gpus=2, gang="cluster"))
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert stop.freezes
        driver.do(FROZEN)
        driver.run(whole("b", checkpoint="none"))
        driver.do(ResumeRequested("a", "asked"))
        assert driver.state("a") == "QUEUED"
        (start,) = driver.do(JobExited("b", 1, "h1", 0))
        assert isinstance(start, StartJob)
        assert (start.thaws, len(start.shares)) == (True, 2)

    def test_not_while_it_starts(self):
        driver = cluster()
        driver.submit(whole("a"))
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert not stop.freezes

    def test_the_driver_may_come_and_go(self):
        driver = running()
        for able in (False, True):
            driver.do(HostJoined(host("h1", checkpoints=able)))
            assert driver.job("a").freezes is able

    def test_who_is_more_important_gets_its_place_and_nothing_is_lost(self):
        driver = running(priority="low")
        driver.submit(whole("b", priority="high", checkpoint="none"))
        (stop,) = driver.do(Tick(), after_s=1000.0)
        assert isinstance(stop, StopJob)
        assert (stop.job_id, stop.freezes) == ("a", True)
        (start,) = driver.do(FROZEN)
        assert (start.job_id, driver.state("a")) == ("b", "QUEUED")
        assert "frozen on host h1.example in 5.0 GiB of its memory" in explained(driver)


class TestFailure:
    def test_it_goes_on_and_is_not_frozen_again(self):
        driver = running()
        driver.do(SUSPEND)
        commands = driver.do(FreezeFailed("h1", "a", 1, 0, "unified memory"))
        assert [type(command) for command in commands] == [ResizeShares]
        assert commands[0].revision == 1  # type: ignore[union-attr]
        assert driver.state("a") == "RUNNING"
        assert "checkpoint driver counts as none: freezing it has failed: unified memory" in explained(driver)
        (stop,) = driver.do(SUSPEND)
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        assert "unified memory" in queries.job(driver.core.state, "a").starts_over

    def test_what_was_stopped_meanwhile_ends(self):
        driver = running()
        driver.do(SUSPEND)
        (stop,) = driver.do(StopRequested("a", "enough"))
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        for late in (FreezeFailed("h1", "a", 1, 0, "busy"), FROZEN):
            assert driver.do(late) == []
            assert driver.state("a") == "STOPPING"
        driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert driver.state("a") == "CANCELLED"

    def test_a_driver_that_hangs_does_not_hold_it_for_ever(self):
        driver = running()
        driver.do(SUSPEND)
        assert driver.do(Tick(), after_s=FREEZE_TIMEOUT_S - 1.0) == []
        (stop,) = driver.do(Tick(), after_s=5.0)
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert (driver.state("a"), driver.job("a").done_s) == ("SUSPENDED", 0.0)
        assert "was not frozen within 600 s" in explained(driver)

    @pytest.mark.parametrize("end", [JobExited("a", 1, "h1", -11, "broken", lost=True), JobExited("a", 1, "h1", 1)])
    def test_processes_that_break_meanwhile_start_over_and_are_not_blamed(self, end: Event):
        driver = running(restart="never")
        driver.do(SUSPEND)
        driver.do(end)
        job = driver.job("a")
        assert (job.state, job.frozen, job.restarts, job.done_s) == ("SUSPENDED", None, 0, 0.0)
        assert "ended while they were being frozen" in job.unfreezable
        assert "starts over" in explained(driver)

    def test_one_that_was_done_before_it_was_frozen_is_done(self):
        driver = running()
        driver.do(SUSPEND)
        driver.do(JobExited("a", 1, "h1", 0))
        assert driver.state("a") == "SUCCEEDED"

    @pytest.mark.parametrize(
        "end",
        [
            JobExited("a", 1, "h1", -9, "its processes are gone", lost=True),
            JobExited("a", 1, "h1", -9),
            StartFailed("a", 1, "h1", "cuda error 999", retry=True),
            StartFailed("a", 1, "h1", "cuda error 999"),
            HostLost("h1", "gone"),
        ],
    )
    @pytest.mark.parametrize("restart", ["never", "on_failure"])
    def test_one_that_cannot_go_on_starts_over_with_a_new_epoch(self, end: Event, restart: str):
        driver = thawing(restart=restart)
        driver.do(end)
        if isinstance(end, HostLost):
            driver.do(HostJoined(host("h1", checkpoints=True)))
        job = driver.job("a")
        assert (job.state, job.frozen, job.restarts, job.epoch, job.done_s) == ("STARTING", None, 0, 2, 0.0)
        assert "starts over" in explained(driver)

    def test_one_that_is_not_let_go_on_in_time_is_ended(self):
        driver = thawing()
        assert driver.do(Tick(), after_s=599.0) == [], "the driver may take its time, or the host may be away"
        (stop,) = driver.do(Tick(), after_s=2.0)
        assert isinstance(stop, StopJob)
        assert not stop.freezes
        driver.do(JobExited("a", 1, "h1", -9, stopped=True))
        assert (driver.job("a").epoch, driver.job("a").restarts, driver.state("a")) == (2, 0, "STARTING")

    @pytest.mark.parametrize(("code", "state"), [(0, "SUCCEEDED"), (3, "FAILED")])
    def test_once_it_goes_on_its_end_is_its_own(self, code: int, state: str):
        driver = thawing()
        driver.do(JobStarted("a", 1, "h1"))
        driver.do(JobExited("a", 1, "h1", code))
        assert driver.state("a") == state


class TestWhileItIsFrozen:
    @pytest.mark.parametrize(
        "end",
        [
            JobExited("a", 1, "h1", -9, "out of host memory", lost=True),
            JobMissing("a", 1, "h1"),
            HostLost("h1", "gone"),
        ],
    )
    def test_what_is_gone_starts_over_or_stays_suspended(self, end: Event):
        driver = frozen(expected_duration_s=1000.0)
        driver.do(end)
        job = driver.job("a")
        assert (job.state, job.frozen, job.done_s, job.restarts) == ("SUSPENDED", None, 0.0, 0)
        assert "starts over, since" in explained(driver)
        driver.do(HostJoined(host("h1", checkpoints=True)))
        (start,) = driver.do(ResumeRequested("a", "asked"))
        assert isinstance(start, StartJob)
        assert (start.thaws, start.epoch) == (False, 2)

    def test_the_end_of_an_earlier_life_is_not_its_end(self):
        driver = frozen()
        driver.do(JobExited("a", 0, "h1", -9))
        assert driver.job("a").frozen is not None

    @pytest.mark.parametrize("event", [StopRequested("a", "enough"), ClientLost("a")])
    def test_cancelled_it_has_ended_at_once_and_its_processes_are_killed(self, event: Event):
        driver = frozen()
        (stop,) = driver.do(event)
        assert isinstance(stop, StopJob)
        assert (stop.host_id, stop.job_id, stop.epoch, stop.freezes) == ("h1", "a", 1, False)
        assert (driver.state("a"), driver.job("a").frozen) == ("CANCELLED", None)
        _, commands = inventory(driver, InventoryItem("a", 1, 0, "running", frozen=True))
        assert [(type(each), getattr(each, "freezes", None)) for each in commands] == [(StopJob, False)]

    def test_a_host_that_does_not_answer_keeps_it(self):
        driver = frozen(hosts=2)
        driver.do(HostUnreachable("h1", "no report"))
        driver.do(ResumeRequested("a", "asked"))
        assert driver.state("a") == "QUEUED"
        (start,) = driver.do(HostJoined(host("h1", checkpoints=True)))
        assert isinstance(start, StartJob)
        assert start.thaws

    def test_it_is_seen(self):
        driver = frozen()
        view = queries.job(driver.core.state, "a").frozen
        assert view is not None
        assert (view.host, view.memory_bytes, view.since) == ("h1.example", 5 * GIB, driver.now)
        driver.now += 180.0
        told = explained(driver)
        assert "frozen on host h1.example in 5.0 GiB of its memory, 3 min ago" in told
        assert "goes on only there, on 1 cpu-1 GPU with 8.0 GiB free" in told
