"""One scheduling cycle: order, proposals, explanations, and what must not be changed by looking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scheduling import GIB, Driver, half, host, spec

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request, Share
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    HostJoined,
    HostUnreachable,
    JobExited,
    JobStarted,
    JobSubmitted,
    MoveRequested,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.invariants import InvariantViolation, check
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.priority import ordered, score
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.waiting import RESERVE_AFTER_S


def waiting(job_id: str, queued_at: float = 0.0, seq: int = 0, **hints: object) -> Job:
    return Job(spec(job_id, **hints), JobState.QUEUED, queued_at=queued_at, seq=seq)


class Refusing:
    """A policy that takes nothing, or everything on the first GPU, and counts how often it is asked."""

    name = "refusing"
    exchanges = False

    def __init__(self, *, greedy: bool = False) -> None:
        self.greedy = greedy
        self.asked: list[tuple[str, int]] = []

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        self.asked.append((request.job_id, waiting_gpus))
        if self.greedy:
            return Placement(request.job_id, (Share(gpus[0].gpu_id, 8 * GIB, 1.0),), {}, 0.0, 0.0, "because")
        return NoFit(request.job_id, (FitError("share_limit", gpus[0].gpu_id, 2, 1),), never=False)


class TestOrder:
    """Who is offered a place first."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (waiting("a", priority="high"), waiting("b", priority="normal")),
            (waiting("a", priority="normal"), waiting("b", priority="low")),
            (waiting("a", deadline_s=1100.0), waiting("b")),
            (waiting("a", deadline_s=1100.0), waiting("b", deadline_s=9000.0)),
            (waiting("a", deadline_s=5000.0, expected_duration_s=3900.0), waiting("b", deadline_s=4000.0)),
            (waiting("a", deadline_s=1100.0, criticality=1.0), waiting("b", deadline_s=1100.0, criticality=0.1)),
            (waiting("a", priority="high"), waiting("b", deadline_s=1000.0, criticality=1.0)),
            (waiting("a", queued_at=10.0), waiting("b", queued_at=20.0)),
            (waiting("a", queued_at=10.0, seq=1), waiting("b", queued_at=10.0, seq=2)),
            (waiting("a", priority="low", queued_at=-2000.0), waiting("b", priority="high", queued_at=1000.0)),
        ],
    )
    def test_order(self, first: Job, second: Job) -> None:
        now = 1000.0
        assert [job.spec.job_id for job in ordered([second, first], now)] == ["a", "b"]

    def test_nothing_starves(self) -> None:
        old = waiting("a", queued_at=0.0, priority="low")
        urgent = waiting("b", queued_at=10_000.0, priority="high", deadline_s=0.0, criticality=1.0)
        assert score(old, 10_000.0) > score(urgent, 10_000.0)

    def test_the_core_places_in_that_order(self) -> None:
        driver = Driver(host())
        driver.submit(spec("a", priority="low"), spec("b"), spec("c", priority="high"))
        assert driver.kinds() == [("start", "c")]

    def test_a_requeued_job_keeps_the_time_it_waited_but_not_the_time_it_ran(self) -> None:
        driver = Driver(host())
        driver.run(spec("n"))
        driver.submit(spec("a", restart="on_failure"))
        waited = 500.0
        driver.do(JobExited("n", 1, "h1", 0), after_s=waited)
        driver.do(JobExited("a", 1, "h1", 1), after_s=3600.0)
        assert driver.now - driver.job("a").queued_at == waited


class TestAsking:
    """How often and with what the policy is asked."""

    def test_jobs_that_ask_for_the_same_get_the_same_refusal(self) -> None:
        policy = Refusing()
        core = Core(Driver().core.state.settings, policies=lambda name: policy)
        core.handle([HostJoined(host())], 0.0)
        alike = [JobSubmitted(half(f"j{number}")) for number in range(100)]
        core.handle([*alike, JobSubmitted(half("other", gpu_memory=GIB))], 1.0)
        assert policy.asked == [("j0", 101), ("other", 101)]
        assert len({id(errors) for errors in core.state.refused.values()}) == 2
        again = State.from_json(core.state.to_json())
        assert again.refused == core.state.refused

    def test_waiting_gpus_count_down_as_jobs_are_placed(self) -> None:
        driver = Driver(host(gpus=3))
        policy = Refusing(greedy=True)
        driver.core.policies = lambda name: policy
        driver.core.handle([JobSubmitted(half("a"))], 5.0)
        assert policy.asked == [("a", 1)]

    def test_a_plan_that_breaks_an_invariant_is_never_committed(self) -> None:
        core = Core(Driver().core.state.settings, policies=lambda name: Refusing(greedy=True))
        core.handle([HostJoined(host())], 0.0)
        with pytest.raises(InvariantViolation, match="GPU h1-0: 17179869184 bytes promised of 8589934592"):
            core.handle([JobSubmitted(half("a")), JobSubmitted(half("b"))], 1.0)
        assert not core.state.leased

    def test_an_overlooked_job_is_noticed(self) -> None:
        core = Core(Driver().core.state.settings, policies=lambda name: Refusing())
        core.handle([HostJoined(host()), JobSubmitted(half("a"))], 0.0)
        with pytest.raises(InvariantViolation, match="'a' has waited for 4 cycles beside an idle GPU"):
            for second in range(1, 6):
                core.handle([HostJoined(host())], float(second))
                check(core.state)


class TestPinned:
    """Jobs that may run on one host only."""

    def test_it_goes_nowhere_else(self) -> None:
        driver = Driver(host("h1"), host("h2"))
        driver.submit(replace(half("a"), pinned_host="h2"), replace(half("b"), pinned_host="h2"))
        assert {driver.job("a").hosts, driver.job("b").hosts} == {("h2",)}

    def test_it_waits_for_its_host(self) -> None:
        driver = Driver(host("h1"))
        driver.submit(replace(half("a"), pinned_host="h2"))
        driver.do(HostJoined(host("h1")))
        assert driver.state("a") == "QUEUED"
        driver.do(HostJoined(host("h2")))
        assert driver.state("a") == "STARTING"

    def test_it_fails_when_its_host_could_never_take_it(self) -> None:
        driver = Driver(host("h1"), host("h2", memory=GIB))
        driver.submit(replace(half("a"), pinned_host="h2"))
        assert driver.job("a").not_placeable


class TestReservation:
    """A large job is not passed by small ones for ever."""

    def test_gpus_are_held_for_a_job_that_has_waited_long(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("s0", isolation="hard"), half("s1", isolation="hard"))
        driver.submit(half("big", gpus=2, isolation="hard"))
        driver.do(JobExited("s0", 1, "h1", 0))
        driver.run(half("s2", isolation="hard"))
        assert driver.state("s2") == "RUNNING", "before ten minutes a small job may pass"
        driver.do(Tick(), after_s=RESERVE_AFTER_S)
        driver.do(JobExited("s1", 1, "h1", 0))
        driver.submit(half("s3", isolation="hard"))
        assert driver.state("s3") == "QUEUED"
        driver.do(JobExited("s2", 1, "h1", 0))
        assert (driver.state("big"), driver.state("s3")) == ("STARTING", "QUEUED")

    def test_the_others_learn_why_they_wait(self) -> None:
        driver = Driver(host())
        driver.run(half("n", isolation="hard"))
        driver.submit(half("big", isolation="hard"))
        driver.do(Tick(), after_s=RESERVE_AFTER_S)
        driver.submit(half("small"))
        assert [error.kind for error in driver.core.state.refused["small"]] == ["not_schedulable"]


class TestExplanations:
    """What people are told."""

    def test_of_a_waiting_job(self) -> None:
        driver = Driver(host())
        driver.run(half("n", isolation="hard"))
        driver.submit(half("a"))
        told = queries.explain(driver.core.state, "a", driver.now)
        assert told.summary.startswith("waits: 1 GPU: ")
        assert told.details[0] == "number 1 of 1 in the queue"
        assert told.would_help

    def test_of_one_that_waits_for_hosts(self) -> None:
        driver = Driver()
        driver.submit(half("a"))
        assert queries.explain(driver.core.state, "a", driver.now).summary == "waits: no GPU host is known yet"

    def test_of_one_that_backs_off(self) -> None:
        driver = Driver(host())
        driver.submit(half("a", restart="on_failure"))
        driver.do(JobExited("a", 1, "h1", 1))
        assert queries.explain(driver.core.state, "a", driver.now).summary == "waits 1 s before the next try"

    def test_of_one_that_runs_beside_another(self) -> None:
        driver = Driver(host())
        driver.run(half("a"), half("b"))
        details = queries.explain(driver.core.state, "a", driver.now, predictor=driver.core.predictor).details
        assert details[0].startswith("on h1-0 beside b: compute 0.")
        assert details[0].endswith(" GiB")
        assert any(line.startswith("predicted slowdown 1.") for line in details)

    def test_what_was_predicted_when_it_started_is_not_told_as_if_it_were_so_now(self) -> None:
        driver = Driver(host())
        driver.run(half("a"), half("b"))
        driver.do(JobExited("a", 1, "h1", 0))
        details = queries.explain(driver.core.state, "b", driver.now).details
        assert details[0].startswith("on h1-0 alone")
        assert any(line.startswith("placed at its start: on h1-0 beside a: predicted saving") for line in details)

    def test_what_cannot_be_held_is_told_while_it_runs(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        told = "no optimizer step seen"
        assert f"control: {told}" in queries.explain(driver.core.state, "a", driver.now, told).details
        driver.do(JobExited("a", 1, "h1", 0))
        assert "control" not in " ".join(queries.explain(driver.core.state, "a", driver.now, told).details)

    def test_times_are_told_as_people_do(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        for later, text in (
            (0.0, "0.0 s ago"),
            (90.0, "90.0 s ago"),
            (600.0, "10 min ago"),
            (9e4, "25 h ago"),
            (9e5, "10 d ago"),
        ):
            last = queries.explain(driver.core.state, "a", driver.now + later).details[-1]
            assert last.startswith(f"{text}  RUNNING: ")

    def test_of_a_host_that_does_not_answer(self) -> None:
        driver = Driver(host())
        driver.do(HostUnreachable("h1", "no report"))
        driver.submit(half("a"))
        assert [error.kind for error in driver.core.state.refused["a"]] == ["not_schedulable"]


class TestViews:
    """Records as their owners see them."""

    def test_jobs_newest_first_and_limited(self) -> None:
        driver = Driver(host())
        driver.submit(half("a"), half("b"), half("c"))
        driver.do(StopRequested("c", "x"))
        state = driver.core.state
        assert [view.job_id for view in queries.jobs(state)] == ["c", "b", "a"]
        assert [view.job_id for view in queries.jobs(state, active_only=True, limit=1)] == ["b"]

    def test_attached_jobs_are_those_that_still_need_a_client(self) -> None:
        driver = Driver(host())
        driver.submit(*(replace(half(job_id), attached=True) for job_id in "ab"), half("c"))
        driver.do(JobExited("a", 1, "h1", 0))
        assert queries.attached(driver.core.state) == ["b"]

    def test_location_is_kept_after_the_end(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(JobExited("a", 1, "h1", 0))
        assert queries.location(driver.core.state, "a") == [("h1", 1)]

    def test_location_of_earlier_runs_is_kept(self) -> None:
        driver = Driver(host("h1"), host("h2"))
        driver.run(half("a"))
        for epoch in (1, 2):
            first = driver.core.state.jobs["a"].hosts[0]
            driver.do(JobStarted("a", epoch, first))
            driver.do(MoveRequested("a", "x", ("h2-0" if first == "h1" else "h1-0",)))
            driver.do(JobExited("a", epoch, first, 143))
        assert queries.location(driver.core.state, "a") == [("h1", 3), ("h2", 2), ("h1", 1)]

    def test_gpus_and_hosts(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a"))
        first, second = queries.gpus(driver.core.state)
        assert (first.jobs, first.memory_reserved_bytes, first.compute_granted) == (["a"], 3 * GIB, 1.0)
        assert (second.jobs, second.util, second.memory_used_bytes) == ([], None, None)
        assert [view.gpus for view in queries.hosts(driver.core.state)] == [["h1-0", "h1-1"]]
