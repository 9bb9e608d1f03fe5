"""Whatever is kept from cycle to cycle says what is worked out anew: arrays of waiting jobs, GPUs, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import GIB, Driver, half, host, measurement, on, profile, report, spec

from cotenant.configs.settings import AccountSettings, PlacementSettings, SchedulingSettings, Settings
from cotenant.placement.engine import Cotenant
from cotenant.placement.fleet import Fleet, Part
from cotenant.placement.types import NoFit
from cotenant.scheduler.core import walk
from cotenant.scheduler.core.events import Event, HostJoined, HostLost, JobExited, JobSubmitted, StopRequested, Tick
from cotenant.scheduler.core.line import Line
from cotenant.scheduler.core.priority import ordered, score
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.waiting import free_at

LIMITED = SchedulingSettings(tenants={"ml": AccountSettings(most_gpus=1.5, most_jobs=3)})

Step = tuple[str, int, int]


def check_line(state: State) -> None:
    """The arrays put the waiting jobs in the order that their values do."""
    line, standing = state.line, state.standing()
    jobs = [state.jobs[job_id] for job_id in state.queued]
    rows = np.array([line.row(job.spec.job_id) for job in jobs], dtype=np.int64)
    scores = line.scores(rows, state.now, standing)
    assert scores.tolist() == [score(job, state.now, standing) for job in jobs]
    want = [job.spec.job_id for job in ordered(jobs, state.now, standing)]
    assert [line.job_id(row) for row in rows[line.order(rows, scores)].tolist()] == want
    assert line.gpus_wanted() == sum(job.spec.hints.gpus for job in jobs)


def check_floor(state: State) -> None:
    """The GPUs, and when they are expected to be empty, are as the records say."""
    fleet, fresh = state.fleet(), Fleet(map(state.view, state.gpus))
    assert fleet.views == fresh.views
    for name in ("capacity", "free", "crowd", "reservable", "util", "observed_s", "schedulable", "exclusive"):
        np.testing.assert_array_equal(getattr(fleet, name), getattr(fresh, name), err_msg=name)
    idle = (fleet.crowd == 0) & fleet.schedulable
    for number in np.unique(fleet.host):
        assert fleet.idle[number] == np.count_nonzero(idle & (fleet.host == number))
    want = [free_at(view, state.end_of, state.now) for view in fleet]
    assert state.free_at().tolist() == pytest.approx(want)


def check_settled(driver: Driver) -> None:
    """What was refused is refused by every GPU that has not changed since, whoever of the jobs asks."""
    core, state = driver.core, driver.core.state
    fleet, packing = state.fleet(), state.settings.placement
    same = [place for place, view in enumerate(fleet) if view.gpu_id not in state.floor.changed]
    for ask in state.line.refusals():
        if ask.settled and isinstance(core.policy, Cotenant) and not ask.pinned:
            job = state.jobs[next(iter(ask.jobs))]
            part = Part(fleet, np.array(same, dtype=np.int64))
            answer = core.policy.place(state.request_of(job), part, core.predictor, packing, job.spec.hints.gpus)
            assert isinstance(answer, NoFit), f"{ask.key} is settled and would fit: {answer}"


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "end", "measure", "stop", "time", "join", "lose"]),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        max_size=25,
    )
)
def test_what_is_kept_is_what_is_worked_out_anew(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "FEW_GPUS", 0)  # as on many GPUs
        _live(steps)


def _live(steps: list[Step]) -> None:
    driver = Driver(host("h1", 2), host("h2", 1), configured=Settings(scheduling=LIMITED))
    for number, step in enumerate(steps):
        driver.start_all(driver.do(*_events(driver, number, step), after_s=700.0 if step[0] == "time" else 1.0))
        check_line(driver.core.state)
        check_floor(driver.core.state)
        check_settled(driver)
        kept = driver.core.state
        again = State.from_json(kept.to_json())
        assert again.to_json() == kept.to_json()


def _events(driver: Driver, number: int, step: Step) -> list[Event]:
    kind, one, other = step
    state = driver.core.state
    if kind == "submit":
        hints = {
            "gpus": 1 + one % 3 % 2,
            "gpu_memory": [None, 1, 3, 8][one % 4] and [0, 1, 3, 8][one % 4] * GIB,
            "compute": [None, 0.2, 0.4, 0.9][other % 4],
            "tenant": ["a", "ml"][other % 2],
            "expected_duration_s": [None, 100.0, 5000.0][one % 3],
            "deadline_s": [None, driver.now + 6000.0][other % 3 // 2],
        }
        return [JobSubmitted(spec(f"j{number}-{k}", **hints)) for k in range(1 + one % 2)]
    if kind == "stop" and state.queued:
        return [StopRequested(sorted(state.queued)[one % len(state.queued)], "by somebody")]
    if kind == "join":
        return [HostJoined(host("h3", 1 + one % 2))]
    if kind == "lose":
        return [HostLost("h3", "gone")]
    return _of_running(driver, step) or [Tick()]


def _of_running(driver: Driver, step: Step) -> list[Event]:
    kind, one, other = step
    running = driver.core.state.in_order(driver.core.state.leased)
    if kind == "end" and running:
        job = running[one % len(running)]
        return [JobExited(job.spec.job_id, job.epoch, host_id, 0) for host_id in job.hosts]
    if kind == "measure" and running:
        job = running[one % len(running)]
        known = profile(util=0.1 * (1 + other), memory=GIB)
        shares = job.lease.shares if job.lease else ()
        return [report("h1", *(measurement(job.spec.job_id, share.gpu_id, known) for share in shares))]
    return []


def test_jobs_that_ask_for_the_same_share_an_ask_whoever_comes_first() -> None:
    driver = Driver(host())
    driver.run(half("n", isolation="hard"))
    driver.submit(half("a", priority="low"), half("b", deadline_s=5000.0), half("c", expected_duration_s=60.0))
    line = driver.core.state.line
    assert line.ask_of("a") is line.ask_of("b") is line.ask_of("c")
    assert line.ask_of("a").settled
    driver.core.state.learn("fp-b", profile(), "cpu-1")
    assert line.ask_of("a") is not line.ask_of("b"), "its program is known now"


def test_rows_move_up_when_one_is_taken_out() -> None:
    driver = Driver()
    driver.submit(*(spec(f"j{k}") for k in range(200)))
    driver.do(HostJoined(host(memory=GIB)))
    line: Line = driver.core.state.line
    waiting = len(line)
    driver.do(*(StopRequested(f"j{k}", "by somebody") for k in range(0, 200, 3)))
    left = driver.core.state.queued
    assert len(line) == len(left) < waiting
    assert all(line.job_id(line.row(job_id)) == job_id for job_id in left)
    assert sum(len(ask.jobs) for ask in line.asks if ask is not None) == len(left)


def test_a_gpu_that_jobs_leave_when_they_change_places_is_offered_to_those_refused_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walk, "FEW_GPUS", 0)
    packing = PlacementSettings(packing_bias=1.0, max_jobs_per_gpu=2)
    driver = Driver(host(gpus=3), configured=Settings(placement=packing))
    driver.run(
        spec("a", gpu_memory=2 * GIB, compute=0.5, max_slowdown=1.5),
        spec("b", gpu_memory=3 * GIB, compute=0.1, max_slowdown=2.0),
        spec("c", gpu_memory=4 * GIB, compute=0.2, max_slowdown=1.5),
        spec("d", gpu_memory=5 * GIB, compute=0.1, max_slowdown=1.2),
        spec("late", isolation="hard", priority="low"),
    )
    (left,) = {"h1-0", "h1-1", "h1-2"} - {gpu for job_id in "abcd" for gpu in on(driver, job_id)}
    check_settled(driver)
    driver.submit(spec("next", isolation="hard", priority="low"))
    assert on(driver, "late") == [left], "it was refused while somebody was there, who was better off elsewhere"


def test_processors_that_jobs_give_back_when_they_change_places_are_offered_on_all_gpus_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walk, "FEW_GPUS", 0)
    packing = PlacementSettings(packing_bias=0.9, max_jobs_per_gpu=2)
    driver = Driver(host("h1", gpus=2, cpus=2.0), host("h2", cpus=4.0), configured=Settings(placement=packing))
    driver.run(
        spec("a", gpu_memory=5 * GIB, compute=0.1, max_slowdown=9.0, cpus=1.0),
        spec("b", gpu_memory=GIB, compute=0.5, max_slowdown=9.0),
        spec("c", gpu_memory=GIB, compute=0.9, max_slowdown=1.2, cpus=2.0),
        spec("late", gpu_memory=GIB, compute=0.1, cpus=2.0, isolation="hard", priority="low"),
    )
    assert [on(driver, job_id) for job_id in "abc"] == [["h2-0"], ["h1-0"], ["h2-0"]]
    check_settled(driver)
    driver.submit(spec("next", gpu_memory=GIB, compute=0.1, cpus=2.0, isolation="hard", priority="low"))
    assert on(driver, "late") == ["h1-1"], "somebody on the other GPU had the processors when it was refused"
