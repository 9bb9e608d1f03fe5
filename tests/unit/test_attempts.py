"""Attempts to make room that failed are not made again for as long as nothing has changed, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import GIB, Driver, gone, host, measurement, on, profile, report, saver, sharer

from cotenant.placement.fleet import Integers
from cotenant.scheduler.core import preemption
from cotenant.scheduler.core.attempts import Attempt, Attempts
from cotenant.scheduler.core.board import Board
from cotenant.scheduler.core.commands import Command, StopJob
from cotenant.scheduler.core.events import Event, JobExited, JobSubmitted, Tick
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.state import State

REST_S = 5.0 * 60.0
Step = tuple[str, int, int]


class Doubted(Attempts):
    """Has everything tried again, and knows what it would have said."""

    def __init__(self) -> None:
        super().__init__()
        self.said_so = False

    def failed(self, attempt: Attempt) -> bool:
        """See ``Attempts.failed``."""
        self.said_so = super().failed(attempt)
        return False


class Tries:
    """Counts what is tried; what ``doubted`` says had failed must fail again."""

    def __init__(self, patch: pytest.MonkeyPatch, doubted: Doubted | None = None) -> None:
        self.count = self.repeated = 0
        self._doubted, self._really = doubted, preemption._place_without
        patch.setattr(preemption, "_place_without", self)

    def __call__(self, board: Board, job: Job, places: Integers, group: Sequence[tuple[float, Job]]) -> Any:
        leaving = self._really(board, job, places, group)
        self.count += 1
        if self._doubted is not None and self._doubted.said_so:
            self.repeated += 1
            assert leaving is None, f"{job.spec.job_id} was refused on {places} before, and would fit"
        return leaving


def test_what_failed_is_tried_again_only_once_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch)
    driver = Driver(host())
    driver.run(sharer("stays", checkpoint="none"), sharer("low", priority="low"))
    assert on(driver, "stays") == on(driver, "low") == ["h1-0"]
    driver.do(Tick(), after_s=REST_S)
    driver.submit(saver("high", priority="high"))
    driver.do(Tick(), after_s=35.0)
    assert (tries.count, driver.stops()) == (1, []), "with low gone there is still too little memory"
    for _ in range(3):
        driver.core.state.moves.look(driver.now)
        driver.do(Tick(), after_s=6.0)
    assert tries.count == 1
    driver.do(gone(driver, "stays", 0))
    driver.do(Tick(), after_s=6.0)
    assert (tries.count, [stop.job_id for stop in driver.stops()]) == (2, ["low"])


def test_it_is_tried_again_once_more_of_them_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch)
    driver = Driver(host())
    driver.run(sharer("low", priority="low"))
    driver.do(Tick(), after_s=REST_S / 2.0)
    driver.run(sharer("later", priority="low"))
    driver.do(Tick(), after_s=REST_S / 2.0 + 10.0)
    driver.submit(saver("high", priority="high"))
    driver.do(Tick(), after_s=35.0)
    assert (tries.count, driver.stops()) == (1, []), "the later one has not had its rest"
    driver.core.state.moves.look(driver.now)
    driver.do(Tick(), after_s=REST_S / 2.0)
    assert sorted(stop.job_id for stop in driver.stops()) == ["later", "low"]


def test_who_asks_for_less_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch)
    driver = Driver(host())
    driver.run(sharer("stays", checkpoint="none"), sharer("low", priority="low"))
    driver.do(Tick(), after_s=REST_S)
    driver.submit(saver("high", priority="high"))
    driver.do(Tick(), after_s=35.0)
    assert (tries.count, driver.stops()) == (1, [])
    driver.submit(sharer("less", priority="high", gpu_memory=4 * GIB))
    driver.do(Tick(), after_s=35.0)
    assert [stop.job_id for stop in driver.stops()] == ["low"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "end", "end", "measure"]),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        min_size=10,
        max_size=30,
    )
)
def test_what_is_remembered_would_fail_again(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _live(patch, steps)


def test_much_is_remembered() -> None:
    """The steps of the test before do lead to attempts that are made again."""
    steps: list[Step] = [("submit", k, 3 * k) for k in range(8)] + [
        ("time", 0, 0),
        ("measure", 1, 3),
        ("time", 1, 0),
    ] * 5
    with pytest.MonkeyPatch.context() as patch:
        assert _live(patch, steps) > 0


def _live(patch: pytest.MonkeyPatch, steps: list[Step]) -> int:
    driver = Driver(host("h1", 2))
    doubted = driver.core.state.line.attempts = Doubted()
    tries = Tries(patch, doubted)
    for number, step in enumerate(steps):
        _settle(driver, driver.do(*_events(driver, number, step), after_s=400.0))
        driver.core.state.moves.look(driver.now)
        _settle(driver, driver.do(Tick(), after_s=6.0))
    return tries.repeated


def _settle(driver: Driver, commands: list[Command]) -> None:
    """Have agents start and stop what they are to."""
    while commands:
        driver.start_all(commands)
        stops = [gone(driver, command.job_id) for command in commands if isinstance(command, StopJob)]
        commands = driver.do(*stops) if stops else []


def _events(driver: Driver, number: int, step: Step) -> list[Event]:
    kind, one, other = step
    running = [job for job in driver.core.state.in_order(driver.core.state.leased) if job.state == "RUNNING"]
    if kind == "submit":
        hints = {
            "gpus": 1 + one % 4 // 3,
            "gpu_memory": [2, 3, 5, 8][one % 4] * GIB,
            "compute": [0.3, 0.5, 0.7][other % 3],
            "checkpoint": ["own", "own", "none"][other % 3],
            "priority": ["low", "normal", "high"][one % 3],
            "expected_duration_s": [None, 100.0, 5000.0, 90_000.0][other % 4],
        }
        return [JobSubmitted(sharer(f"j{number}", **hints))]
    if kind == "end" and running:
        job = running[one % len(running)]
        return [JobExited(job.spec.job_id, job.epoch, host_id, 0) for host_id in job.hosts]
    if kind == "measure" and running:
        job = running[one % len(running)]
        known = profile(util=0.1 * (1 + other), memory=GIB)
        shares = job.lease.shares if job.lease else ()
        return [report(job.hosts[0], *(measurement(job.spec.job_id, each.gpu_id, known) for each in shares))]
    return [Tick()]


class Forgetful(Attempts):
    """Has everything tried again."""

    def failed(self, attempt: Attempt) -> bool:
        """See ``Attempts.failed``."""
        super().failed(attempt)
        return False


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "submit", "end", "measure"]), st.integers(0, 9), st.integers(0, 9)),
        min_size=10,
        max_size=30,
    )
)
def test_who_remembers_decides_as_who_forgets(steps: list[Step]) -> None:
    """Jobs that make room, and jobs that are to be parted because one is slowed down too much."""
    remembering, forgetful = Driver(host("h1", 3)), Driver(host("h1", 3))
    forgetful.core.state.line.attempts = Forgetful()
    for number, step in enumerate(steps):
        for driver in (remembering, forgetful):
            _settle(driver, driver.do(*_events(driver, number, step), after_s=400.0))
            for job_id in driver.core.state.leased:  # everybody is hurt
                driver.core.state.moves.hurt_since.setdefault(job_id, driver.now - 100.0)
            driver.core.state.moves.look(driver.now)
            _settle(driver, driver.do(Tick(), after_s=6.0))
    assert remembering.core.state.to_json() == forgetful.core.state.to_json()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "end", "measure", "measure"]), st.integers(0, 9), st.integers(0, 9)),
        min_size=5,
        max_size=20,
    )
)
def test_what_jobs_ask_is_remembered_only_while_it_holds(steps: list[Step]) -> None:
    driver = Driver(host("h1", 2))
    state = driver.core.state
    for number, step in enumerate(steps):
        _settle(driver, driver.do(*_events(driver, number, step), after_s=400.0))
        fresh = State.from_json(state.to_json())  # remembers nothing
        for job_id, job in state.jobs.items():
            assert state.request_of(job) == fresh.request_of(fresh.jobs[job_id])
