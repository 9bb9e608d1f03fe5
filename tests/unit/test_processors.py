"""Processors of hosts: by the checks of a policy, held for who waits, and through the whole core."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from packing import GIB, SETTINGS, gpu, request, resident
from scheduling import Driver, half, host, spec

from cotenant.actors.processors import processors
from cotenant.forecasting.interference import UtilisationRule
from cotenant.placement.engine import policy, policy_names
from cotenant.placement.explain import explain, would_help
from cotenant.placement.fleet import Fleet
from cotenant.placement.processors import keep_for, rooms
from cotenant.placement.types import GpuView, NoFit, Placement
from cotenant.scheduler.core import queries, whatif
from cotenant.scheduler.core.events import HostJoined, JobExited, MoveRequested, SuspendRequested, Tick
from cotenant.scheduler.core.invariants import InvariantViolation, check_processors
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.state import State

RULE = UtilisationRule()


def cluster(*hosts: tuple[float | None, int]) -> list[GpuView]:
    """Hosts of so many processors and empty GPUs."""
    return [
        gpu(f"h{number}-{index}", host=f"h{number}", cpus=cpus)
        for number, (cpus, gpus) in enumerate(hosts)
        for index in range(gpus)
    ]


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize(
    ("hosts", "asks", "on"),
    [
        ([(4.0, 2), (8.0, 2)], {"cpus": 5.0}, {"h1": 1}),
        ([(4.0, 2), (None, 2)], {"cpus": 500.0}, {"h1": 1}),
        ([(4.0, 2), (8.0, 2)], {"cpus": 4.0, "gpus": 2}, {"h1": 2}),
        ([(9.0, 4), (8.0, 4)], {"cpus": 4.0, "gpus": 4, "one_host": False}, {"h0": 2, "h1": 2}),
        ([(0.3, 3)], {"cpus": 0.1, "gpus": 3}, {"h0": 3}),
        ([(0.0, 2)], {"cpus": 0.0, "gpus": 2}, {"h0": 2}),
    ],
    ids=["enough on one", "not known", "for each gpu", "few on each host", "parts of a core", "not counted"],
)
def test_where_a_job_goes(name: str, hosts: list[tuple[float | None, int]], asks: Any, on: dict[str, int]) -> None:
    gpus = cluster(*hosts)
    answer = policy(name).place(request(memory=GIB, **asks), gpus, RULE, SETTINGS, 9)
    assert isinstance(answer, Placement)
    host_of = {each.gpu_id: each.host_id for each in gpus}
    found = [host_of[share.gpu_id] for share in answer.shares]
    assert {host_id: found.count(host_id) for host_id in found} == on


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize(
    ("hosts", "asks", "told"),
    [
        (
            [(4.0, 2), (6.0, 2)],
            {"cpus": 7.0},
            "2 hosts: too few processors: 7 wanted, at most 6 can be had even when empty",
        ),
        (
            [(4.0, 2)],
            {"cpus": 3.0, "gpus": 2},
            "1 host: too few processors: 6 wanted, at most 4 can be had even when empty",
        ),
        (
            [(9.0, 4), (5.0, 4)],
            {"cpus": 4.0, "gpus": 4, "one_host": False},
            "wants 4 GPUs, at most 3 of this cluster could ever serve it together; 2 hosts: 7 processors short",
        ),
    ],
)
def test_what_never_fits(name: str, hosts: list[tuple[float, int]], asks: Any, told: str) -> None:
    answer = policy(name).place(request(memory=GIB, **asks), cluster(*hosts), RULE, SETTINGS, 9)
    assert isinstance(answer, NoFit)
    assert explain(answer.errors) == told
    assert answer.never


@pytest.mark.parametrize("name", policy_names())
def test_what_does_not_fit_now(name: str) -> None:
    """Twelve of sixteen are taken on each of three hosts, by a job on one of two GPUs."""
    taken = resident("r", cpus=12.0)
    gpus = [
        each
        for number in range(3)
        for each in (
            gpu(f"h{number}-0", taken, host=f"h{number}", cpus=16.0),
            gpu(f"h{number}-1", host=f"h{number}", cpus=16.0),
        )
    ]
    answer = policy(name).place(request(memory=GIB, cpus=16.0), gpus, RULE, SETTINGS, 9)
    assert isinstance(answer, NoFit)
    assert "3 hosts: 12 processors short" in explain(answer.errors)
    assert "wait for jobs on these hosts to end, or ask for fewer cpus" in would_help(answer.errors)
    assert not answer.never


@pytest.mark.parametrize("name", policy_names())
def test_what_never_fits_is_told_before_what_is_in_the_way_now(name: str) -> None:
    gpus = [gpu(f"g{number}", host="a", cpus=4.0, schedulable=False) for number in range(2)]
    answer = policy(name).place(request(memory=GIB, gpus=2, cpus=2.5), gpus, RULE, SETTINGS, 9)
    assert isinstance(answer, NoFit)
    assert answer.never
    assert {(error.kind, error.never) for error in answer.errors} == {("cpus_never", True)}


def test_counts_in_thousandths_leave_nothing_behind() -> None:
    fleet = Fleet(cluster((1.0, 2)))
    for _ in range(7):
        fleet.put(gpu("h0-0", *(resident(f"r{n}", cpus=0.1) for n in range(10)), host="h0", cpus=1.0))
        assert fleet.spare()[0] == 0
        fleet.put(gpu("h0-0", host="h0", cpus=1.0))
    room = rooms(fleet, request(cpus=0.1))
    assert room is not None
    assert room[0] == 10


def test_processors_that_are_kept_are_those_beyond_what_the_jobs_there_give_back() -> None:
    fleet = Fleet([gpu("a", resident("r", cpus=2.0), cpus=16.0), gpu("b", cpus=16.0)])
    keep_for(fleet, [(8.0, ("a",)), (1.0, ("gone",)), (0.0, ("b",))])
    assert fleet.spare()[0] == 8000
    keep_for(fleet, ())
    assert fleet.spare()[0] == 14000


def test_a_host_whose_jobs_take_more_than_it_has_is_a_bug_when_it_is_given_away() -> None:
    over = Fleet([gpu("a", resident("r", cpus=5.0), host="h7", cpus=4.5), gpu("b", host="other", cpus=1.0)])
    check_processors(over, ["b"])
    with pytest.raises(InvariantViolation, match=r"host h7: its jobs take 0\.5 processors more than it has"):
        check_processors(over, ["b", "a"])


def where(driver: Driver) -> dict[str, str]:
    return {
        job_id: job.lease.shares[0].gpu_id for job_id, job in driver.core.state.jobs.items() if job.lease is not None
    }


def test_a_job_that_ends_makes_room_on_the_other_gpus_of_its_host() -> None:
    many = tuple(host(f"h{n}", 4, cpus=1.0) for n in range(2, 20))  # so many that only GPUs that change are looked at
    driver = Driver(host("h1", gpus=4, cpus=8.0), *many)
    driver.run(half("a", cpus=6.0, isolation="hard"), half("b", cpus=2.0, isolation="hard"))
    driver.submit(half("c", cpus=6.0, isolation="hard", gpus=1))
    assert set(where(driver)) == {"a", "b"}
    driver.do(JobExited("a", 1, "h1", 0))
    assert where(driver)["c"].startswith("h1")
    (told,) = [view for view in queries.hosts(driver.core.state) if view.host_id == "h1"]
    assert (told.cpus, told.cpus_reserved) == (8.0, 8.0)


def test_a_suspended_job_holds_no_processors() -> None:
    driver = Driver(host(gpus=2, cpus=4.0))
    driver.run(half("a", cpus=3.0))
    driver.submit(half("b", cpus=3.0))
    told = queries.explain(driver.core.state, "b", driver.now)
    assert told.summary == "waits: 1 host: 2 processors short"
    assert "3 processors reserved for each GPU" in queries.explain(driver.core.state, "a", driver.now).details
    driver.do(SuspendRequested("a", "asked"))
    driver.do(JobExited("a", 1, "h1", -15, stopped=True))
    assert set(where(driver)) == {"b"}


def test_a_plan_and_an_impossible_job_name_the_processors() -> None:
    driver = Driver(host(gpus=2, cpus=4.0))
    planned = whatif.plan(driver.core, [half("x", cpus=3.0), half("y", cpus=3.0), half("z", cpus=5.0)], driver.now).jobs
    assert [each.placeable for each in planned] == ["now", "later", "never"]
    assert planned[1].explanation == "1 host: 2 processors short"
    driver.submit(half("z", cpus=5.0))
    assert driver.job("z").not_placeable
    assert "1 host: too few processors: 5 wanted, at most 4 can be had even when empty" in driver.job("z").reason


def test_a_reservation_keeps_processors_from_smaller_jobs() -> None:
    """The wide job waits for both GPUs and all processors; small ones that come later must not eat them up."""
    driver = Driver(host(gpus=4, cpus=8.0))
    driver.run(half("a", cpus=4.0, isolation="hard"))
    driver.submit(spec("wide", gpus=2, cpus=4.0, gpu_memory=GIB, compute=0.5, isolation="hard"))
    driver.do(Tick(), after_s=700.0)
    driver.submit(half("small", cpus=1.0), half("free"))
    assert driver.core.state.reservation is not None
    assert set(where(driver)) == {"a", "free"}
    driver.do(JobExited("a", 1, "h1", 0))
    assert set(where(driver)) == {"wide", "free"}
    driver.do(JobExited("wide", 1, "h1", 0))
    assert "small" in where(driver)


def test_a_job_moves_within_its_host_although_that_has_no_processors_left() -> None:
    driver = Driver(host(gpus=2, cpus=4.0))
    driver.run(half("a", cpus=4.0, checkpoint="own"))
    before = where(driver)["a"]
    driver.do(MoveRequested("a", "asked"))
    driver.submit(half("late", cpus=1.0))
    driver.do(JobExited("a", 1, "h1", -15, stopped=True))
    assert where(driver)["a"] != before
    assert "late" not in where(driver)


def test_a_host_with_fewer_processors_than_before_takes_nobody_who_asks_for_some() -> None:
    driver = Driver(host(gpus=2, cpus=8.0))
    driver.run(half("a", cpus=6.0))
    driver.do(HostJoined(host(gpus=2, cpus=4.0)))
    driver.submit(half("b", cpus=1.0), half("c"))
    assert set(where(driver)) == {"a", "c"}
    driver.do(HostJoined(host(gpus=2, cpus=math.nan)))  # nothing to go by
    assert set(where(driver)) == {"a", "b", "c"}


def test_records_of_before_read_as_not_known() -> None:
    driver = Driver(host(gpus=2, cpus=8.0))
    driver.run(half("a", cpus=6.0))
    text = driver.core.state.to_json()
    older = text.replace(b',"cpus":8.0', b"").replace(b',"cpus":6.0', b"")
    assert older != text
    restored = State.from_json(older)
    assert restored.hosts["h1"].cpus is None
    assert restored.jobs["a"].spec.hints.cpus is None
    assert State.from_json(text).to_json() == text
    assert pickle.loads(pickle.dumps(host(cpus=2.0))).cpus == 2.0
    known = Host.__new__(Host)
    known.__setstate__(["h", "n", (), 0.0, True])  # type: ignore[attr-defined]  # as an older agent sends it
    assert known == Host("h", "n", (), 0.0)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu.max": "what\n"}, None),
        ({"cpu.max": "0 0\n"}, None),
        ({}, None),
    ],
)
def test_processors_of_this_host(tmp_path: Path, files: dict[str, str], want: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found, everything = processors(tmp_path), processors(tmp_path / "nowhere")
    assert everything >= 1.0
    assert found == (everything if want is None else want)


def test_a_gpu_that_turns_up_on_another_host_takes_its_jobs_along() -> None:
    fleet = Fleet([gpu("a", host="h0", cpus=4.0)])
    fleet.put(gpu("a", resident("r", cpus=3.0), host="new", cpus=5.0))
    assert fleet.spare()[fleet.number_of("new")] == 2000
