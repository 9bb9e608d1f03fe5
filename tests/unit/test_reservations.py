"""GPUs held for a job that waited long, and who may use them meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from packing import gpu, request, resident
from scheduling import GIB, Driver, host, spec

from cotenant.scheduler.core import queries, whatif
from cotenant.scheduler.core.events import HostJoined, HostUnreachable, JobExited, StopRequested, Tick
from cotenant.scheduler.core.model import Job, JobState, Reservation
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.waiting import RESERVE_AFTER_S, EndOf, Wish, hold, renewed, reserve

NOW = 1000.0


def ends(**at: float) -> EndOf:
    """When jobs end; "at the latest" is half as long again."""
    return lambda job_id: (at[job_id], NOW + 1.5 * (at[job_id] - NOW)) if job_id in at else None


def wish(gpus: int = 1, memory: int = GIB, *, one_host: bool = True) -> Wish:
    return Wish("big", request("big", gpus=gpus, memory=memory, one_host=one_host), 0.1)


A, B, C = gpu("a", resident("r1")), gpu("b", resident("r2"), resident("r3")), gpu("c", host="h1")
JOB = Job(spec("big"), JobState.QUEUED, queued_at=0.0)


@pytest.mark.parametrize(
    ("wanted", "gpus", "end_of", "want"),
    [
        (wish(), [A, B], ends(), ("a",)),
        (wish(), [A, B], ends(r1=5000.0, r2=2000.0, r3=3000.0), ("b",)),
        (wish(), [A, B], ends(r1=5000.0, r2=2000.0), ("a",)),
        (wish(2), [A, B, C], ends(), ("a", "b")),
        (wish(2, one_host=False), [A, B, C], ends(), ("c", "a")),
        (wish(3), [A, B, C], ends(), None),
        (wish(memory=64 * GIB), [A, B], ends(), None),
        (wish(), [gpu("x", schedulable=False)], ends(), None),
        (wish(), [], ends(), None),
    ],
)
def test_which_gpus_are_held(wanted: Wish, gpus: list[Any], end_of: EndOf, want: tuple[str, ...] | None) -> None:
    found = reserve(wanted, gpus, end_of, NOW)
    assert (found.gpu_ids if found else None) == want


@pytest.mark.parametrize(
    ("gpus", "end_of", "want"),
    [
        ([A, B], ends(), ("a",)),
        ([B, A], ends(r2=1500.0, r3=1500.0), ("b",)),
        ([A, B, C], ends(), ("c",)),
        ([A, B], ends(r1=2000.0, r2=1500.0, r3=1500.0), ("b",)),
        ([A, B], ends(r1=1200.0, r2=1500.0, r3=1500.0), ("a",)),
        ([A, gpu("b", schedulable=False)], ends(), ("a",)),
    ],
    ids=["fewer residents", "nobody knows of the other", "an empty one", "later", "sooner", "lost"],
)
def test_held_gpus_are_exchanged_only_for_less_to_wait_for(
    gpus: list[Any], end_of: EndOf, want: tuple[str, ...]
) -> None:
    old = Reservation("big", ("b",), starts_by=4000.0)
    found = renewed(old, wish(), gpus, end_of, NOW)
    assert found is not None
    assert found.gpu_ids == want


@pytest.mark.parametrize(
    ("old", "end_of", "promised", "open_until"),
    [
        (None, ends(r1=2000.0, r2=1600.0, r3=1600.0), 2000.0, {"b": 2000.0}),
        (None, ends(r1=2000.0, r2=1600.0), None, {}),
        (1900.0, ends(r1=2000.0, r2=1600.0, r3=1600.0), 1900.0, {"b": 1900.0}),
        (3000.0, ends(), 3000.0, {}),
        (900.0, ends(r1=2000.0, r2=1600.0, r3=1600.0), 900.0, {}),
    ],
)
def test_promises(old: float | None, end_of: EndOf, promised: float | None, open_until: dict[str, float]) -> None:
    """At the latest r1 is gone by 2500, so its GPU is not open to others; the residents of "b" are gone by 1900."""
    held = hold(Reservation("big", ("a", "b"), old), JOB, [A, B], end_of, NOW)
    assert held.reservation == Reservation("big", ("a", "b"), promised)
    assert held.open_until == open_until
    for view in (A, B, C):
        closed = view.gpu_id != "c"
        assert held.lets_in(view.gpu_id) is not closed
        assert held.lets_in(view.gpu_id, 1899.0) is (not closed or view.gpu_id in open_until)
        assert held.lets_in(view.gpu_id, 1e9) is not closed
        assert not held.closed(view).schedulable


def waiting_gang(**residents: float | None) -> Driver:
    """Two GPUs, each with a job that does not share (with this expected duration), and a gang that waited long."""
    driver = Driver(host(gpus=2))
    driver.run(*(spec(name, isolation="hard", expected_duration_s=each) for name, each in residents.items()))
    driver.submit(spec("gang", gpus=2, isolation="hard"))
    driver.do(Tick(), after_s=RESERVE_AFTER_S)
    return driver


def short(job_id: str, seconds: float | None) -> Any:
    return spec(job_id, isolation="hard", expected_duration_s=seconds, max_slowdown=1.0)


def test_short_jobs_fill_the_gaps_and_the_gang_starts_when_promised() -> None:
    driver = waiting_gang(a=700.0, b=2000.0)
    driver.do(JobExited("a", 1, "h1", 0))
    held = driver.core.state.reservation
    assert held is not None
    assert held.starts_by == pytest.approx(1000.0 + 2000.0, abs=10.0)
    driver.submit(short("long", 5000.0), short("unknown", None), short("fits", 600.0))
    assert [driver.state(each) for each in ("long", "unknown", "fits")] == ["QUEUED", "QUEUED", "STARTING"]
    told = queries.explain(driver.core.state, "gang", driver.now).details
    assert any(line.startswith("h1-0, h1-1 held for it, expected in 23 min") for line in told)
    assert [view.held_for for view in queries.gpus(driver.core.state)] == ["gang", "gang"]
    beside = queries.explain(driver.core.state, "unknown", driver.now)
    (closed,) = [
        line for line in beside.details if line.startswith("2 GPUs held for job gang, which has waited 10 min")
    ]
    assert closed.endswith("and is to start in 23 min")
    assert "give expected_duration: a job known to be gone in time may use held GPUs" in beside.would_help
    assert not [
        line for line in queries.explain(driver.core.state, "long", driver.now).would_help if "expected" in line
    ]
    assert State.from_json(driver.core.state.to_json()).reservation == driver.core.state.reservation
    driver.do(JobExited("fits", 1, "h1", 0), after_s=600.0)
    driver.do(JobExited("b", 1, "h1", 0), after_s=700.0)
    assert driver.state("gang") == "STARTING"
    assert driver.core.state.reservation is None or driver.core.state.reservation.job_id != "gang"


@pytest.mark.parametrize(
    ("residents", "after_s", "helps"),
    [
        ({"a": 700.0, "b": 2000.0}, 0.0, True),
        ({"a": 1900.0, "b": 2000.0}, 0.0, False),  # slowed down as they accept both end after the promised time
        ({"a": None, "b": 2000.0}, 0.0, False),
        ({"a": 700.0, "b": 2000.0}, 2500.0, False),
    ],
    ids=["one is gone long before", "both stay", "nobody knows", "it is over"],
)
def test_to_say_how_long_is_suggested_where_it_helps(
    residents: dict[str, float | None], after_s: float, helps: bool
) -> None:
    """Who followed the suggestion still waited: on no held GPU would its neighbours surely have been gone."""
    driver = waiting_gang(**residents)
    if after_s:
        driver.do(Tick(), after_s=after_s)
    driver.submit(short("s", None))
    advice = queries.explain(driver.core.state, "s", driver.now).would_help
    assert any("give expected_duration" in each for each in advice) is helps


@pytest.mark.parametrize("lost", [False, True])
def test_held_gpus_are_not_told_as_out_of_order(lost: bool) -> None:
    """They were "not available", and what would help was to bring them back."""
    driver = waiting_gang(a=None, b=None)
    if lost:
        driver.do(HostJoined(host("h2")))
        driver.do(HostUnreachable("h2", "no report"))
    driver.submit(spec("small", compute=0.2, gpu_memory=GIB))
    told = queries.explain(driver.core.state, "small", driver.now)
    why = "2 GPUs: held for another job"
    assert told.summary == f"waits: {why}{'; 1 GPU: not available' if lost else ''}"
    assert queries.job(driver.core.state, "small").waits == told.summary.removeprefix("waits: ")
    assert "wait for the job to start that they are held for" in told.would_help
    assert any("bring the unavailable GPUs back" in each for each in told.would_help) is lost
    (planned,) = whatif.plan(driver.core, [spec("p", compute=0.2, gpu_memory=GIB)], driver.now).jobs
    assert why in planned.explanation


def test_nothing_is_filled_in_while_nobody_knows_when_the_gang_starts() -> None:
    driver = waiting_gang(a=700.0, b=None)
    driver.do(JobExited("a", 1, "h1", 0))
    driver.submit(short("fits", 10.0))
    assert driver.state("fits") == "QUEUED"


def test_nothing_is_filled_in_once_the_promised_time_is_over() -> None:
    driver = waiting_gang(a=700.0, b=2000.0)
    driver.do(JobExited("a", 1, "h1", 0))
    driver.do(Tick(), after_s=3000.0)
    driver.submit(short("fits", 10.0))
    assert driver.state("fits") == "QUEUED"
    driver.do(JobExited("b", 1, "h1", 0))
    assert driver.state("gang") == "STARTING"


@pytest.mark.parametrize("event", [StopRequested("gang", "x"), HostUnreachable("h1", "x")])
def test_a_reservation_ends_with_its_job_or_its_gpus(event: Any) -> None:
    driver = waiting_gang(a=None, b=None)
    driver.submit(short("s", None))
    assert driver.core.state.reservation is not None
    driver.do(event)
    assert driver.core.state.reservation is None or driver.core.state.reservation.job_id == "s"


def test_a_gang_does_not_wait_for_ever_behind_a_stream_of_small_jobs() -> None:
    """A small job arrives whenever one ends: without reservations two GPUs of one host are never free together."""
    driver = Driver(host(gpus=2))
    driver.run(short("s0", None), short("s1", None))
    driver.submit(spec("gang", gpus=2, isolation="hard"))
    oldest = 0
    for number in range(2, 40):
        driver.submit(short(f"s{number}", None))
        running = next(f"s{n}" for n in range(oldest, number) if driver.state(f"s{n}") == "RUNNING")
        driver.start_all(driver.do(JobExited(running, 1, "h1", 0), after_s=100.0))
        if driver.state("gang") != "QUEUED":
            break
    assert driver.state("gang") == "RUNNING"
    assert driver.now < 1000.0 + RESERVE_AFTER_S + 400.0
