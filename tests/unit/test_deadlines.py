"""Deadlines: what is expected of them, who yields for them, and what people are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling import GIB, Driver, host, measurement, profile, report, settings, spec

from cotenant.configs.settings import SchedulingSettings
from cotenant.placement.types import Share
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.dated import Dated
from cotenant.scheduler.core.deadlines import (
    at_speed,
    done_s,
    ends,
    expected_end,
    remaining_alone_s,
    running_outlook,
    tell,
    waiting_outlook,
)
from cotenant.scheduler.core.events import JobExited, StopRequested, Tick
from cotenant.scheduler.core.model import Hints, Job, JobState, Lease, Progress
from cotenant.scheduler.core.priority import held_urgency
from cotenant.scheduler.core.state import State

NOW = 5000.0


def running(deadline_in_s: float, needs_s: float | None, *, at_risk: bool = False) -> Job:
    hints = {"deadline_s": NOW + deadline_in_s, "expected_duration_s": needs_s}
    return Job(spec("j", **hints), JobState.RUNNING, queued_at=0.0, at_risk=at_risk)


@pytest.mark.parametrize(
    ("deadline_in_s", "needs_s", "speed", "standing", "told"),
    [
        (1000.0, 500.0, 1.0, "", "deadline in 17 min; needs 8 min at the present speed"),
        (600.0, 420.0, 0.5, "at risk", "deadline in 10 min; needs 14 min at the present speed: at risk"),
        (600.0, 840.0, 0.5, "lost", "deadline in 10 min; needs 14 min even alone on its GPUs: cannot be met"),
        (-180.0, 100.0, 1.0, "lost", "deadline missed 3 min ago"),
        (7200.0, None, 1.0, "", "deadline in 2 h; how long the job still needs is not known"),
        (-1.0, None, 1.0, "lost", "deadline missed 1 s ago"),
        (3 * 86400.0, 90.0, 1.0, "", "deadline in 3 d; needs 90 s at the present speed"),
    ],
)
def test_outlook_of_a_running_job(
    deadline_in_s: float, needs_s: float | None, speed: float, standing: str, told: str
) -> None:
    progress = None if needs_s is None else Progress(0.0, NOW, speed)
    outlook = running_outlook(running(deadline_in_s, needs_s), progress, NOW)
    assert outlook is not None
    assert (outlook.at_risk, outlook.lost) == (standing == "at risk", standing == "lost")
    assert tell(outlook) == told


@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ({"deadline_s": NOW + 600.0, "expected_duration_s": 240.0}, "deadline in 10 min; needs 4 min once it runs"),
        (
            {"deadline_s": NOW + 600.0, "expected_duration_s": 540.0},
            "deadline in 10 min; needs 9 min once it runs: at risk",
        ),
        (
            {"deadline_s": NOW + 600.0, "expected_duration_s": 720.0},
            "deadline in 10 min; needs 12 min even if it starts now: cannot be met",
        ),
    ],
)
def test_outlook_of_a_waiting_job(hints: dict[str, Any], told: str) -> None:
    outlook = waiting_outlook(Hints(**hints), NOW)
    assert outlook is not None
    assert tell(outlook) == told


def test_a_job_without_a_deadline_has_no_outlook() -> None:
    assert waiting_outlook(Hints(expected_duration_s=5.0), NOW) is None
    assert running_outlook(Job(spec("j"), JobState.RUNNING, queued_at=0.0), None, NOW) is None


def test_escalation_does_not_flicker() -> None:
    """At risk below a margin of a fifth, safe again only above two fifths."""
    progress = Progress(0.0, NOW, 1.0)
    rows = [(left, was, running_outlook(running(left, 100.0, at_risk=was), progress, NOW)) for left in (110, 130, 150)
            for was in (False, True)]  # fmt: skip
    found = {(left, was): outlook.at_risk for left, was, outlook in rows if outlook}
    assert found == {
        (110, False): True, (110, True): True, (130, False): False, (130, True): True, (150, False): False,
        (150, True): False,
    }  # fmt: skip


def test_progress_adds_up() -> None:
    progress = at_speed(Progress(0.0, 0.0, 1.0), 0.5, 100.0)
    assert progress == Progress(100.0, 100.0, 0.5)
    assert at_speed(progress, 0.51, 200.0) is progress, "a change too small to note"
    assert done_s(progress, 300.0) == 200.0
    assert at_speed(progress, 0.0, 100.0).speed > 0.0
    hints = Hints(expected_duration_s=150.0)
    assert (remaining_alone_s(hints, progress, 150.0), remaining_alone_s(hints, progress, 300.0)) == (25.0, None)


def test_on_a_slower_gpu_type_all_of_it_takes_longer() -> None:
    """Half as fast alone, and slowed down to a half by a neighbour: a quarter of the work of the fastest type."""
    progress = at_speed(Progress(0.0, 0.0, 1.0, alone=0.5), 0.5, 0.0)
    hints = Hints(expected_duration_s=100.0, deadline_s=250.0)
    job = Job(spec("j", expected_duration_s=100.0, deadline_s=250.0), JobState.RUNNING, queued_at=0.0)
    assert done_s(progress, 200.0) == 50.0
    assert remaining_alone_s(hints, progress, 200.0) == 100.0
    assert expected_end(job, progress, 3.0, 200.0) == (400.0, 500.0)
    assert ends([(job, progress)])[:2] == (400.0, 400.0)
    outlook = running_outlook(job, progress, 200.0)
    assert outlook is not None
    assert (outlook.needs_s, outlook.alone_s, outlook.lost) == (200.0, 100.0, True)


def test_what_a_job_has_done_counts_the_speed_of_its_gpu_type() -> None:
    """Measured or not: a step rate tells how fast a job goes against alone on the same GPU."""
    slow, fast = host("slow"), host("fast")
    fast = replace(fast, gpus=tuple(replace(gpu, gpu_type="fast") for gpu in fast.gpus))
    driver = Driver(slow, fast, configured=settings(speeds={"fast": 4.0}))
    for each in ("first", "second"):
        driver.run(spec(each, expected_duration_s=1000.0, isolation="hard", checkpoint="own"))
    for unmeasured in (True, False):
        driver.do(Tick(), after_s=100.0)
        done = {each: done_s(driver.core.state.progress[each], driver.now) for each in ("first", "second")}
        assert done["first"] == pytest.approx(4.0 * done["second"], rel=0.05), unmeasured
        for each, where in (("first", "fast"), ("second", "slow")):
            busy = profile(0.9, GIB, rate=10.0)
            driver.do(report(where, measurement(each, f"{where}-0", busy, step_rate=10.0)))


def side_by_side(deadline_in_s: float) -> Driver:
    """Two busy jobs that want a whole GPU each; "a" has a deadline and says how long it runs alone."""
    driver = Driver(host())
    light = {"gpu_memory": GIB, "max_slowdown": 10.0}
    driver.core.state.learn("fp-a", profile(0.4, GIB), "cpu-1")
    driver.core.state.learn("fp-b", profile(0.4, GIB), "cpu-1")
    driver.run(spec("a", deadline_s=driver.now + deadline_in_s, expected_duration_s=100.0, **light), spec("b", **light))
    return driver


def measured(driver: Driver, rate: float) -> None:
    busy = profile(0.9, GIB, rate=10.0)
    driver.do(report("h1", *(measurement(each, "h1-0", busy, step_rate=rate, throttled_fraction=0.3) for each in "ab")))


def shares(driver: Driver) -> tuple[float, float]:
    a, b = (driver.job(each).lease.shares[0].compute for each in "ab")  # type: ignore[union-attr]
    return a, b


def test_neighbours_yield_to_a_deadline_at_risk() -> None:
    calm, risky = side_by_side(1e6), side_by_side(160.0)
    for driver in (calm, risky):
        for _ in range(5):
            measured(driver, rate=5.0)
    assert shares(calm)[0] == pytest.approx(0.5, abs=0.03)
    assert shares(risky)[0] > 0.65
    assert risky.job("a").at_risk
    view = queries.job(risky.core.state, "a")
    assert view.deadline.endswith("at the present speed: at risk")
    told = queries.explain(risky.core.state, "a", risky.now)
    assert view.deadline in told.details
    assert told.would_help == ["fewer neighbours: alone it needs 97 s"]


def test_nobody_yields_to_a_deadline_that_is_lost() -> None:
    driver = side_by_side(60.0)
    for _ in range(5):
        measured(driver, rate=5.0)
    assert not driver.job("a").at_risk
    assert shares(driver)[0] < 0.65
    assert queries.job(driver.core.state, "a").deadline.endswith("even alone on its GPUs: cannot be met")
    assert queries.explain(driver.core.state, "a", driver.now).would_help == ["a deadline at least 44 s later"]


def test_the_measured_speed_counts_and_a_restart_begins_anew() -> None:
    driver = Driver(host())
    driver.run(spec("a", gpu_memory=GIB, expected_duration_s=100.0, deadline_s=1e6, restart="on_failure"))
    driver.do(report("h1", measurement("a", "h1-0", profile(rate=10.0), step_rate=5.0)))
    driver.do(Tick(), after_s=20.0)
    progress = driver.core.state.progress["a"]
    assert progress.speed == 0.5
    assert done_s(progress, driver.now) == pytest.approx(11.0, abs=0.5)
    assert State.from_json(driver.core.state.to_json()).progress == driver.core.state.progress
    driver.do(JobExited("a", 1, "h1", 1))
    assert "a" not in driver.core.state.progress
    assert (driver.job("a").urgency, driver.job("a").at_risk) == (0.0, False)


def test_an_urgent_job_that_waits_comes_before_its_class() -> None:
    driver = Driver(host())
    driver.run(spec("n", isolation="hard"))
    driver.submit(
        spec("calm", isolation="hard"),
        spec("urgent", isolation="hard", deadline_s=driver.now + 130.0, expected_duration_s=110.0),
    )
    driver.do(JobExited("n", 1, "h1", 0))
    assert driver.state("urgent") == "STARTING"


@st.composite
def _dated(draw: st.DrawFn, seq: int) -> tuple[Job, Progress | None]:
    """A job with GPUs whose numbers lie where something changes."""
    now_and_then = st.sampled_from([-1.0, 0.0, 1.0, 90.0, 100.0, 110.0, 130.0, 4000.0])
    lease = draw(st.none() | st.just(Lease(f"j{seq}", 1, 1, (Share("g", GIB, 1.0),), 0.0)))
    job = replace(
        running(draw(now_and_then), draw(st.none() | now_and_then.filter(lambda needs_s: needs_s > 0.0))),
        lease=lease,
        at_risk=draw(st.booleans()),
        urgency=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.25, 2.0]) | st.floats(0.0, 2.0)),
        seq=seq,
    )
    named = replace(job, spec=replace(job.spec, job_id=f"j{seq}"))
    since, speed = st.sampled_from([NOW - 50.0, NOW, NOW + 5.0]), st.sampled_from([0.5, 1.0])
    done = st.builds(Progress, now_and_then, since, speed, st.sampled_from([0.25, 1.0]))
    return named, draw(st.none() | done)


@given(st.data())
def test_whose_deadline_weighs_otherwise_is_found_in_arrays_as_one_by_one(data: st.DataObject) -> None:
    rules, dated = SchedulingSettings(), Dated()
    last: dict[str, tuple[Job, Progress | None]] = {}
    for _ in range(data.draw(st.integers(0, 8))):
        job, progress = data.draw(_dated(data.draw(st.integers(0, 4))))
        dated.follow(job, progress)
        last[job.spec.job_id] = job, progress
    want = set[str]()
    for job_id, (job, progress) in last.items():
        outlook = running_outlook(job, progress, NOW)
        if job.lease is None or outlook is None:
            continue
        changed = outlook.at_risk != job.at_risk
        if changed or held_urgency(job.urgency, outlook, rules, risk_changed=changed) != job.urgency:
            want.add(job_id)
    assert dated.stirred(NOW, rules) == sorted(want)
    assert sorted(dated) == sorted(job_id for job_id, (job, _) in last.items() if job.lease is not None)


@pytest.mark.parametrize(
    ("deadline_in_s", "needs_s", "at_risk"),
    [(1000.0, 100.0, False), (110.0, 100.0, True), (90.0, 100.0, False), (-5.0, 100.0, False), (None, 100.0, False)],
    ids=["on time", "at risk", "cannot be met", "missed", "none"],
)
@pytest.mark.parametrize("waits", [True, False])
def test_a_program_need_not_read_words_to_know_of_a_risk(
    deadline_in_s: float | None, needs_s: float, at_risk: bool, waits: bool
) -> None:
    driver = Driver(host())
    if waits:
        driver.run(spec("there", isolation="hard"))
    deadline_s = None if deadline_in_s is None else driver.now + deadline_in_s + 1.0
    driver.run(spec("j", isolation="hard", deadline_s=deadline_s, expected_duration_s=needs_s))
    view = queries.job(driver.core.state, "j")
    assert view.deadline_at_risk is at_risk
    assert view.deadline.endswith("at risk") is at_risk
    driver.do(StopRequested("j", "enough"), after_s=0.0)
    if waits:
        assert queries.job(driver.core.state, "j").deadline_at_risk is False
