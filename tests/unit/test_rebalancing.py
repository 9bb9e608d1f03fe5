"""Suspending, resuming and moving: what users ask for, and what the scheduler does by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, gone, host, measurement, on, profile, report, saver, settings, sharer, spec

from cotenant.configs.settings import CheckpointSettings, RebalanceSettings, Settings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.commands import StartJob
from cotenant.scheduler.core.events import (
    Event,
    HostJoined,
    HostLost,
    JobExited,
    MemoryOverrun,
    MoveRequested,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.core.state import State

REST_S = 5.0 * 60.0
SHARED = CheckpointSettings(directory="/everywhere")


def again(driver: Driver) -> None:
    """The state survives being written down."""
    text = driver.core.state.to_json()
    assert State.from_json(text).to_json() == text


class TestAsked:
    """What users ask for."""

    def test_a_suspended_job_holds_nothing_and_goes_on_when_it_is_resumed(self) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        driver.do(SuspendRequested("a", "suspended by user"), after_s=100.0)
        assert driver.stops()[0].grace_s == Settings().checkpoints.grace_s
        driver.submit(saver("b"))
        assert (driver.state("a"), driver.state("b")) == ("STOPPING", "QUEUED")
        driver.do(gone(driver, "a"))
        assert (driver.state("a"), on(driver, "a"), on(driver, "b")) == ("SUSPENDED", [], ["h1-0"])
        driver.do(Tick(), after_s=1000.0)
        assert driver.state("a") == "SUSPENDED"
        driver.do(ResumeRequested("a", "resumed by user"), gone(driver, "b", 0))
        job = driver.job("a")
        assert (driver.state("a"), job.epoch, job.restarts, job.interruptions) == ("STARTING", 2, 0, 1)
        assert job.done_s == pytest.approx(101.0, abs=2.0)
        again(driver)

    def test_only_waiting_counts_as_waiting(self) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        driver.submit(saver("b"))
        driver.do(SuspendRequested("b", "x"), after_s=50.0)
        assert driver.state("b") == "SUSPENDED"
        driver.do(ResumeRequested("b", "y"), after_s=5000.0)
        assert driver.now - driver.job("b").queued_at == pytest.approx(50.0)

    def test_a_waiting_job_keeps_its_memory_of_waiting_over_a_run(self) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        driver.submit(saver("b"))
        driver.start_all(driver.do(gone(driver, "a", 0), after_s=40.0))
        driver.do(SuspendRequested("b", "x"), after_s=1000.0)
        driver.do(gone(driver, "b"))
        driver.do(ResumeRequested("b", "y"), after_s=1000.0)
        assert driver.now - driver.job("b").queued_at == pytest.approx(40.0)

    @pytest.mark.parametrize(
        ("events", "state"),
        [
            ([StopRequested("a", "enough")], "CANCELLED"),
            ([ResumeRequested("a", "go on")], "STARTING"),
            ([SuspendRequested("a", "once more")], "SUSPENDED"),
            ([StopRequested("a", "enough"), ResumeRequested("a", "too late")], "CANCELLED"),
            ([StopRequested("a", "enough"), SuspendRequested("a", "too late")], "CANCELLED"),
            ([HostLost("h1", "gone")], "SUSPENDED"),
        ],
    )
    def test_what_is_asked_while_it_is_being_suspended(self, events: list[Event], state: str) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        driver.do(SuspendRequested("a", "x"))
        driver.do(*events)
        if driver.state("a") == "STOPPING":
            driver.do(gone(driver, "a"))
        assert driver.state("a") == state

    @pytest.mark.parametrize(("stopped", "state"), [(True, "SUSPENDED"), (False, "SUCCEEDED")])
    def test_exit_code_0_is_success_only_without_having_been_asked_to_stop(self, stopped: bool, state: str) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        driver.do(SuspendRequested("a", "x"))
        driver.do(gone(driver, "a", 0, stopped=stopped))
        assert driver.state("a") == state

    def test_a_job_that_was_suspended_before_any_host_was_known(self) -> None:
        driver = Driver()
        driver.submit(saver("a"))
        driver.do(SuspendRequested("a", "x"))
        assert driver.state("a") == "SUSPENDED"
        driver.do(ResumeRequested("a", "y"))
        assert driver.state("a") == "PENDING"

    def test_what_makes_no_sense_is_ignored(self) -> None:
        driver = Driver(host())
        driver.run(saver("a"), saver("b"))
        driver.do(
            SuspendRequested("nobody", "x"), ResumeRequested("a", "x"), MoveRequested("b", "x"), MoveRequested("a", "x")
        )
        assert (driver.state("a"), driver.state("b"), driver.commands) == ("RUNNING", "QUEUED", [])
        assert sum(driver.core.state.ignored.values()) == 4

    @pytest.mark.parametrize(("wanted", "place"), [((), "h1-1"), (("h1-2",), "h1-2"), (("h1-1", "h1-2"), "h1-1")])
    def test_a_job_is_moved_where_somebody_wants_it(self, wanted: tuple[str, ...], place: str) -> None:
        driver = Driver(host(gpus=3))
        driver.run(saver("a"))
        driver.do(MoveRequested("a", "moved by user", wanted))
        assert driver.stops()[0].reason == "moved by user"
        driver.submit(saver("b"), saver("c"))  # its new place is kept for it
        driver.start_all(driver.commands)
        driver.start_all(driver.do(gone(driver, "a")))
        assert (driver.state("a"), on(driver, "a"), driver.job("a").epoch) == ("RUNNING", [place], 2)
        assert not driver.core.state.moves.claims
        again(driver)

    def test_a_job_without_a_checkpoint_can_be_moved_when_somebody_asks_and_starts_over(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(saver("a", checkpoint="none", expected_duration_s=500.0))
        driver.do(MoveRequested("a", "x"), after_s=100.0)
        assert driver.stops()[0].grace_s == settings().lease.stop_grace_s
        driver.do(gone(driver, "a"))
        assert (on(driver, "a"), driver.job("a").done_s) == (["h1-1"], 0.0)

    def test_a_claim_is_over_when_those_who_leave_take_too_long(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(saver("a"))
        driver.do(MoveRequested("a", "x"))
        driver.submit(saver("b"))
        assert on(driver, "b") == []
        assert "kept for job a" in queries.explain(driver.core.state, "b", driver.now).summary or on(driver, "b") == []
        driver.do(SuspendRequested("b", "x"), ResumeRequested("b", "x"), after_s=100.0)
        assert on(driver, "b") == ["h1-1"]
        driver.do(gone(driver, "a"))
        assert on(driver, "a") == ["h1-0"]


class TestPriority:
    """A more important job that waits."""

    def low(self, **hints: Any) -> Driver:
        driver = Driver(host())
        driver.run(saver("low", **({"priority": "low"} | hints)))
        return driver

    def wait(self, driver: Driver, job_id: str = "high", **hints: Any) -> None:
        """Have a job wait for longer than others are patient."""
        driver.submit(saver(job_id, **({"priority": "high"} | hints)))
        driver.do(Tick(), after_s=29.0)
        assert driver.stops() == []
        driver.do(Tick(), after_s=5.0)

    def test_takes_the_place_of_a_less_important_one(self) -> None:
        driver = self.low()
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver)
        assert [stop.job_id for stop in driver.stops()] == ["low"]
        text = queries.explain(driver.core.state, "low", driver.now).summary
        assert "makes room for job high" in text
        driver.submit(saver("other", priority="high"))  # it came later
        driver.start_all(driver.do(gone(driver, "low")))
        assert (driver.state("low"), on(driver, "high"), on(driver, "other")) == ("QUEUED", ["h1-0"], [])
        assert driver.job("low").interruption is not None
        driver.start_all(driver.do(gone(driver, "high", 0)))
        driver.start_all(driver.do(gone(driver, "other", 0)))
        assert (driver.state("low"), driver.job("low").epoch) == ("RUNNING", 2)
        again(driver)

    @pytest.mark.parametrize(
        ("hints", "why"),
        [
            ({"checkpoint": "none"}, "it would lose its work"),
            ({"priority": "high"}, "it is as important"),
            ({"expected_duration_s": 450.0}, "it is gone soon anyway"),
        ],
    )
    def test_leaves_others_alone(self, hints: dict[str, Any], why: str) -> None:
        driver = self.low(**hints)
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver)
        assert driver.stops() == [], why

    def test_leaves_alone_who_has_only_just_started(self) -> None:
        driver = self.low()
        self.wait(driver)
        assert driver.stops() == []

    def test_does_nothing_when_it_is_switched_off(self) -> None:
        configured = settings().model_copy(update={"rebalance": RebalanceSettings(enabled=False)})
        driver = Driver(host(), configured=configured)
        driver.run(saver("low", priority="low"))
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver)
        assert driver.stops() == []

    def test_waiting_protects_but_is_no_argument_against_others(self) -> None:
        """Low has waited for 50 minutes before it ran; another low one that waits for hours never takes its place."""
        driver = Driver(host())
        driver.run(saver("first", priority="high"))
        driver.submit(saver("low", priority="low"))
        driver.start_all(driver.do(gone(driver, "first", 0), after_s=3000.0))
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver)
        assert driver.stops() == []
        driver.start_all(driver.do(gone(driver, "low", 0)))
        driver.submit(saver("patient", priority="low"))
        driver.do(Tick(), after_s=20_000.0)
        assert driver.stops() == []

    def test_several_make_room_for_a_wide_job_and_only_those_that_have_to(self) -> None:
        driver = Driver(host(gpus=4))
        driver.run(*(saver(f"low{i}", priority="low") for i in range(3)))
        driver.run(saver("kept", checkpoint="none"))
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver, gpus=2)
        assert len(driver.stops()) == 2
        leaving = [stop.job_id for stop in driver.stops()]
        driver.do(gone(driver, leaving[0]))
        assert on(driver, "high") == []
        assert on(driver, leaving[0]) == []  # what it left is kept
        driver.do(gone(driver, leaving[1]))
        assert len(on(driver, "high")) == 2

    def test_what_one_leaves_that_had_more_than_the_first_wants_serves_the_next(self) -> None:
        """Two wide jobs wait; the one of four GPUs that leaves for the first has room for the second as well."""
        driver = Driver(host(gpus=6))
        driver.run(saver("before", gpus=4), saver("small", priority="low", gpus=2))
        driver.do(gone(driver, "before", 0))
        driver.run(saver("large", priority="low", gpus=4))  # the newest leaves first
        driver.do(Tick(), after_s=REST_S)
        driver.submit(*(saver(job_id, priority="high", gpus=2) for job_id in ("high", "second")))
        driver.do(Tick(), after_s=29.0)
        driver.do(Tick(), after_s=5.0)
        assert [stop.job_id for stop in driver.stops()] == ["large"]
        driver.start_all(driver.do(gone(driver, "large")))
        held = [gpu_id for job_id in ("high", "second", "small") for gpu_id in on(driver, job_id)]
        assert len(set(held)) == len(held) == 6

    def test_a_claimant_that_finds_another_place_needs_the_first_no_more(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(saver("low", priority="low"), saver("other", checkpoint="none"))
        place = on(driver, "low")
        driver.do(Tick(), after_s=REST_S)
        self.wait(driver)
        driver.do(gone(driver, "other", 0))
        assert len(on(driver, "high")) == 1
        assert on(driver, "high") != place
        driver.do(gone(driver, "low"))
        assert on(driver, "low") == place


class TestApart:
    """Jobs that share."""

    def pair(self, *more: JobSpec, gpus: int = 2, **hints: Any) -> Driver:
        """a and b share a GPU; the others are full of jobs that do not share."""
        driver = Driver(host(gpus=gpus))
        driver.run(*(saver(f"full{i}", checkpoint="none") for i in range(1, gpus)))
        driver.run(sharer("a", **hints))
        driver.run(sharer("b", **hints), *more)
        assert on(driver, "a") == on(driver, "b")
        return driver

    @pytest.mark.parametrize(("left_s", "moves"), [(1000.0, True), (100.0, False)])
    def test_a_job_moves_to_a_faster_gpu_that_became_free_when_that_is_worth_it(
        self, left_s: float, moves: bool
    ) -> None:
        """After five minutes; the new GPU is four times as fast: 920 s left on it are worth a minute, 20 s are not."""
        new = host("h2")
        driver = Driver(
            host("h1"),
            replace(new, gpus=tuple(replace(gpu, gpu_type="new") for gpu in new.gpus)),
            configured=settings(speeds={"new": 4.0}).model_copy(update={"checkpoints": SHARED}),
        )
        driver.run(saver("other", expected_duration_s=5000.0, checkpoint="none"))
        driver.run(saver("a", expected_duration_s=left_s))
        assert (on(driver, "other"), on(driver, "a")) == (["h2-0"], ["h1-0"])
        driver.do(Tick(), after_s=REST_S)
        driver.do(gone(driver, "other", 0), after_s=10.0)
        assert [stop.job_id for stop in driver.stops()] == (["a"] if moves else [])

    def test_get_gpus_of_their_own_when_some_are_free(self) -> None:
        driver = self.pair(expected_duration_s=20_000.0)
        driver.do(Tick(), after_s=REST_S)
        assert driver.stops() == []
        driver.do(gone(driver, "full1", 0))
        (stop,) = driver.stops()
        assert stop.reason.startswith("gets GPUs of its own, or faster ones, which were free: saves ")
        driver.start_all(driver.do(gone(driver, stop.job_id)))
        assert set(on(driver, "a")) | set(on(driver, "b")) == {"h1-0", "h1-1"}
        driver.do(Tick(), after_s=10 * REST_S)
        assert driver.stops() == []

    @pytest.mark.parametrize(
        ("hints", "why"),
        [
            ({"expected_duration_s": 330.0}, "it is not worth it any more"),
            ({"expected_duration_s": 20_000.0, "checkpoint": "none"}, "they would lose their work"),
        ],
    )
    def test_stay_where_they_are(self, hints: dict[str, Any], why: str) -> None:
        driver = self.pair(**hints)
        driver.do(Tick(), after_s=REST_S)
        driver.do(gone(driver, "full1", 0))
        assert driver.stops() == [], why

    def test_stay_while_somebody_waits(self) -> None:
        driver = self.pair(spec("wide", gpus=2, isolation="hard"), expected_duration_s=20_000.0)
        driver.do(Tick(), after_s=REST_S)
        driver.do(gone(driver, "full1", 0))
        assert driver.stops() == []

    def test_are_parted_when_one_is_measured_to_be_hurt(self) -> None:
        """a runs at a fifth of its rate, and there is a GPU with a light job."""
        driver = self.pair(expected_duration_s=9000.0)
        (crowded,), (other,) = on(driver, "a"), on(driver, "full1")
        driver.run(spec("light", gpu_memory=int(2.5 * GIB), compute=0.05))
        driver.start_all(driver.do(gone(driver, "full1", 0)))
        assert on(driver, "light") == [other]
        slow = measurement("a", crowded, profile(util=0.5, memory=2 * GIB), step_rate=2.0, neighbours=1)
        driver.do(report("h1", slow), after_s=REST_S)
        driver.do(report("h1", slow), after_s=20.0)
        assert driver.stops() == []
        driver.do(report("h1", slow), after_s=20.0)
        (stop,) = driver.stops()
        assert stop.reason.startswith("job a on its GPU is slowed down 5.00 > 4.00: saves ")
        driver.do(gone(driver, stop.job_id))
        assert on(driver, stop.job_id) == [other]

    @pytest.mark.parametrize(("util", "parts"), [(0.9, True), (0.5, False)])
    def test_are_parted_when_one_is_predicted_to_be_hurt(self, util: float, parts: bool) -> None:
        """Both turn out to want most of a GPU; nothing shows yet in how fast they go."""
        driver = self.pair(expected_duration_s=9000.0, max_slowdown=1.3)
        (crowded,), (other,) = on(driver, "a"), on(driver, "full1")
        driver.run(spec("light", gpu_memory=int(2.5 * GIB), compute=0.05))
        driver.start_all(driver.do(gone(driver, "full1", 0)))
        driver.do(Tick(), after_s=REST_S)
        wants = profile(util=util, memory=2 * GIB)
        driver.do(report("h1", *(measurement(name, crowded, wants, neighbours=1) for name in ("a", "b"))))
        driver.do(Tick(), after_s=10.0)
        assert not driver.core.state.moves.hurt_since
        stops = driver.stops()
        assert [stop.job_id in ("a", "b") for stop in stops] == [True] * parts
        assert all(" on its GPU is slowed down 1." in stop.reason and "> 1.30: saves " in stop.reason for stop in stops)
        if parts:
            driver.do(gone(driver, stops[0].job_id))
            assert on(driver, stops[0].job_id) == [other]

    def test_one_that_was_hurt_for_a_moment_only_is_left_alone(self) -> None:
        driver = self.pair(expected_duration_s=9000.0)
        known = profile(util=0.5, memory=2 * GIB)
        for rate in (1.0, 9.0, 1.0, 9.0):
            driver.do(report("h1", measurement("a", on(driver, "a")[0], known, step_rate=rate, neighbours=1)))
        assert "a" not in driver.core.state.moves.hurt_since


class TestMemory:
    """A job that outgrows its memory share."""

    def pair(self, **hints: Any) -> Driver:
        """big and small on one GPU of 8 GiB, 4 and 3 of them; small saves."""
        driver = Driver(host())
        driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4))
        driver.run(sharer("small", compute=0.4, **hints))
        return driver

    def outgrow(self, driver: Driver, used: int) -> None:
        driver.do(MemoryOverrun("big", driver.job("big").epoch, "h1", used * GIB))

    def memory(self, driver: Driver) -> int:
        (share,) = driver.job("big").lease.shares  # type: ignore[union-attr]
        return share.memory_bytes

    def test_gets_what_a_neighbour_that_saves_leaves_before_anybody_else(self) -> None:
        driver = self.pair()
        driver.submit(spec("waiting", gpu_memory=3 * GIB, compute=0.1))
        self.outgrow(driver, 6)
        (stop,) = driver.stops()
        assert (stop.job_id, stop.reason) == ("small", "makes room for job big, which needs more memory than its share")
        self.outgrow(driver, 6)
        assert driver.stops() == []
        driver.do(gone(driver, "small"))
        assert self.memory(driver) == 6 * GIB * 12 // 10 + 1
        assert [driver.state(job_id) for job_id in ("big", "small", "waiting")] == ["RUNNING", "QUEUED", "QUEUED"]
        assert driver.job("small").restarts == 0

    @pytest.mark.parametrize("hints", [{"checkpoint": "none"}, {"priority": "high"}])
    def test_is_stopped_itself_when_the_neighbour_would_lose_or_is_more_important(self, hints: dict[str, Any]) -> None:
        driver = self.pair(**hints)
        self.outgrow(driver, 6)
        assert [stop.job_id for stop in driver.stops()] == ["big"]
        assert driver.job("big").memory_hint_corrected is not None

    def test_is_stopped_itself_when_all_of_the_gpu_is_not_enough(self) -> None:
        driver = self.pair()
        self.outgrow(driver, 9)
        assert [stop.job_id for stop in driver.stops()] == ["big"]

    def test_a_job_that_saves_goes_itself_rather_than_a_more_important_one(self) -> None:
        driver = Driver(host())
        driver.run(spec("big", gpu_memory=4 * GIB, compute=0.4, checkpoint="own", priority="low"))
        driver.run(sharer("small", compute=0.4))
        self.outgrow(driver, 6)
        assert [stop.job_id for stop in driver.stops()] == ["big"]


class TestOutOfMemory:
    """A job in which an allocation failed."""

    def fail(self, driver: Driver) -> None:
        driver.do(JobExited("a", driver.job("a").epoch, "h1", 1, "exit code 1", out_of_memory=True))

    @pytest.mark.parametrize("restart", ["never", "on_failure"])
    def test_is_tried_once_more_with_more(self, restart: str) -> None:
        driver = Driver(host())
        driver.run(spec("a", gpu_memory=4 * GIB, compute=0.4, restart=restart))
        self.fail(driver)
        job = driver.job("a")
        assert (job.state, job.epoch, job.restarts) == ("STARTING", 2, 1)
        assert job.lease is not None
        assert job.lease.shares[0].memory_bytes == 6 * GIB
        self.fail(driver)
        assert driver.state("a") == "FAILED"
        assert driver.job("a").reason == "exit code 1: out of memory with 6.0 GiB; give it more (hint gpu_memory)"

    def test_fails_when_it_had_all_there_is(self) -> None:
        driver = Driver(host())
        driver.run(saver("a"))
        self.fail(driver)
        assert (driver.state("a"), driver.job("a").exit_code) == ("FAILED", 1)


class TestReach:
    """Where a job finds its checkpoint again."""

    def moved(self, **changes: Any) -> Driver:
        driver = Driver(host("h1"), configured=settings().model_copy(update=changes))
        driver.run(saver("low", priority="low"))
        driver.do(Tick(), after_s=REST_S)
        driver.submit(saver("high", priority="high", restart="never"))
        driver.do(Tick(), after_s=40.0)
        driver.do(gone(driver, "low"))
        driver.start_all(driver.commands)
        driver.do(HostJoined(host("h2")))
        return driver

    def test_a_job_waits_for_its_host_when_no_other_can_read_its_checkpoint(self) -> None:
        driver = self.moved()
        assert (driver.state("low"), driver.job("low").anchor) == ("QUEUED", "h1")
        told = " ".join(queries.explain(driver.core.state, "low", driver.now).details)
        assert "on host h1.example only" in told
        assert "taken from its GPUs once " in told
        driver.do(gone(driver, "high", 0))
        assert on(driver, "low") == ["h1-0"]

    def test_with_a_shared_directory_it_goes_anywhere(self) -> None:
        assert on(self.moved(checkpoints=SHARED), "low") == ["h2-0"]

    def test_a_checkpoint_that_is_lost_with_its_host_holds_nobody_back(self) -> None:
        driver = self.moved()
        driver.do(HostLost("h1", "gone"))
        assert on(driver, "low") == ["h2-0"]


def test_starts_of_a_moved_job_are_fenced() -> None:
    """The start elsewhere comes only after the exit, and with a newer epoch."""
    driver = Driver(host("h1"), host("h2"))
    driver.run(saver("a"))
    (place,) = {"h1-0", "h2-0"} - set(on(driver, "a"))
    commands = driver.do(MoveRequested("a", "x", (place,)))
    assert not [command for command in commands if isinstance(command, StartJob)]
    (start,) = driver.do(gone(driver, "a"))
    assert isinstance(start, StartJob)
    assert (start.host_id, start.epoch) == ("h2", 2)
    driver.do(JobExited("a", 1, "h1", -15))
    assert driver.state("a") == "STARTING"
