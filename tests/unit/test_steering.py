"""What is refused of what users ask for a job that is there, and how they ask."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import invoke
from fake_client import FakeClient, job_view
from scheduling import GIB, Driver, host, spec

from cotenant import cli
from cotenant.scheduler.core.events import HostJoined, MoveRequested, ResumeRequested, StopRequested, SuspendRequested
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import JobNotFound, NotAccepted
from cotenant.scheduler.steering import check_moved, order


@pytest.fixture
def driver() -> Driver:
    """One job that runs, one that waits, one suspended, one about to be, one being stopped, one cancelled, a lease."""
    driver = Driver(host("h1", gpus=3))
    whole: dict[str, Any] = {"gpu_memory": 8 * GIB, "compute": 1.0}
    driver.run(spec("running", **whole), spec("going", **whole), spec("stopping", **whole))
    driver.do(HostJoined(host("h2")))
    driver.run(spec("other", **whole))
    driver.submit(spec("waiting", **whole), spec("suspended", **whole), spec("gone", **whole))
    driver.do(SuspendRequested("suspended", "x"), SuspendRequested("going", "x"))
    driver.do(StopRequested("gone", "x"), StopRequested("stopping", "x"))
    return driver


@pytest.mark.parametrize(
    ("job_id", "what", "to", "message"),
    [
        ("running", "resume", None, "give a job that is suspended; this one is RUNNING"),
        ("waiting", "resume", None, "give a job that is suspended; this one is QUEUED"),
        ("gone", "suspend", None, "give a job that has not ended and is not about to; this one is CANCELLED"),
        ("stopping", "suspend", None, "give a job that has not ended and is not about to; this one is STOPPING"),
        ("waiting", "move", None, "give a job that is running; this one is QUEUED"),
        ("going", "move", None, "give a job that is running; this one is STOPPING"),
        ("running", "move", "h3", "to: 'h3' is not accepted; give the id of a GPU or the name of a host, as h1-0"),
        ("running", "move", "own", "to: 'h1-0' is not accepted; give other GPUs than those the job has"),
    ],
)
def test_what_makes_no_sense(driver: Driver, job_id: str, what: Any, to: str | None, message: str) -> None:
    lease = driver.job("running").lease
    assert lease is not None
    to = lease.shares[0].gpu_id if to == "own" else to
    with pytest.raises(NotAccepted) as caught:
        order(driver.core.state, job_id, what, to, "x")
    assert message.replace("h1-0' is", f"{to}' is") in str(caught.value)


def test_a_job_that_is_not_there(driver: Driver) -> None:
    with pytest.raises(JobNotFound):
        order(driver.core.state, "nobody", "suspend", None, "x")


@pytest.mark.parametrize(
    ("job_id", "what", "to", "event"),
    [
        ("running", "suspend", None, SuspendRequested("running", "x")),
        ("waiting", "suspend", None, SuspendRequested("waiting", "x")),
        ("suspended", "resume", None, ResumeRequested("suspended", "x")),
        ("going", "resume", None, ResumeRequested("going", "x")),
        ("running", "move", None, MoveRequested("running", "x")),
        ("running", "move", "h2-0", MoveRequested("running", "x", ("h2-0",))),
        ("running", "move", "h2", MoveRequested("running", "x", ("h2-0",))),
        ("running", "move", "h1.example", MoveRequested("running", "x", ("h1-0", "h1-1", "h1-2"))),
    ],
)
def test_what_does(driver: Driver, job_id: str, what: Any, to: str | None, event: object) -> None:
    assert order(driver.core.state, job_id, what, to, "x") == event


def test_a_place_with_too_few_gpus(driver: Driver) -> None:
    wide = Driver(host("h1", gpus=2), host("h2"))
    wide.run(spec("wide", gpus=2))
    with pytest.raises(NotAccepted, match="give a place with 2 GPUs"):
        order(wide.core.state, "wide", "move", "h2", "x")


def test_a_lease_belongs_to_its_program() -> None:
    from dataclasses import replace

    driver = Driver(host())
    driver.run(replace(spec("lease"), kind="lease", command=()))
    with pytest.raises(NotAccepted, match="a lease whose Ray program promises to save"):
        order(driver.core.state, "lease", "suspend", None, "x")


def test_no_room_is_told(driver: Driver) -> None:
    ordered = order(driver.core.state, "running", "move", "h2", "x")
    driver.do(ordered)
    with pytest.raises(NotAccepted) as caught:
        check_moved(driver.core, ordered, "h2")
    assert str(caught.value) == ("to: 'h2' is not accepted; give GPUs with room for the job: h2-0: 8.0 GiB short")


def test_no_room_is_told_gpu_by_gpu() -> None:
    driver = Driver(host("h1", gpus=4))
    half: dict[str, Any] = {"gpu_memory": 4 * GIB, "compute": 0.5}
    driver.run(spec("a", **half), spec("b", gpu_memory=8 * GIB, compute=1.0, isolation="hard"))
    driver.run(spec("c", gpu_memory=6 * GIB, compute=0.9), spec("d", gpu_memory=3 * GIB, compute=0.8))
    ordered = order(driver.core.state, "a", "move", None, "x")
    driver.do(ordered)
    with pytest.raises(NotAccepted) as caught:
        check_moved(driver.core, ordered, None)
    said, _, why = str(caught.value).partition("room for: ")
    assert said == "job: 'a' is not accepted; give a job that other GPUs have "  # nobody has said where to
    told = why.split("; ")
    on = {job_id: driver.job(job_id).lease.shares[0].gpu_id for job_id in "bcd"}  # type: ignore[union-attr]
    assert sorted(told) == sorted(
        [
            f"{on['b']}: taken by a job that does not share",
            f"{on['c']}: 2.0 GiB short",
            f"{on['d']}: compute 0.50 wanted, 0.20 free",
        ]
    )


def test_a_move_under_way_needs_no_reason(driver: Driver) -> None:
    for what in ("suspend", "move"):
        driver = Driver(host("h1", gpus=2))
        driver.run(spec("a", gpu_memory=8 * GIB, compute=1.0))
        ordered = order(driver.core.state, "a", what, None, "x")  # type: ignore[arg-type]
        driver.do(ordered)
        check_moved(driver.core, ordered, None)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient(job_view(starts_over="it will start over"), job_view("saver", hints={"checkpoint": "own"}))
    monkeypatch.setattr(cli, "_client", lambda address: client)
    monkeypatch.setattr(FakeClient, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(FakeClient, "__exit__", lambda self, *how: None, raising=False)
    return client


@pytest.mark.parametrize(
    ("words", "asked", "printed"),
    [
        (["suspend", "saver"], ("saver", "suspend", "suspended by user"), "saver STOPPING"),
        (["resume", "saver", "--reason", "go"], ("saver", "resume", "go"), "saver QUEUED"),
        (["move", "saver"], ("saver", "move", "", "moved by user"), "saver STOPPING"),
        (["move", "saver", "--to", "gpu-1"], ("saver", "move", "gpu-1", "moved by user"), "saver STOPPING"),
    ],
)
def test_commands(client: FakeClient, words: list[str], asked: tuple[str, ...], printed: str) -> None:
    code, out, err = invoke(*words)
    assert (code, out.strip(), err) == (0, printed, "")
    assert client.steered == [asked]


@pytest.mark.parametrize("what", ["suspend", "move"])
def test_whoever_loses_his_work_is_told(client: FakeClient, what: str) -> None:
    code, _, err = invoke(what, "job-1")
    assert code == 0
    assert "it will start over" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suspend", "nobody"], "no job 'nobody'"),
        (["move", "job-1", "--to", "nowhere"], "to: 'nowhere' is not accepted; give GPUs with room for the job"),
        (["resume"], "Missing argument"),
    ],
)
def test_commands_that_go_wrong(client: FakeClient, words: list[str], message: str) -> None:
    code, _, err = invoke(*words)
    assert (code, message in err) == (1, True), err
    assert JobState.SUSPENDED not in [view.state for view in client.known.values()]
