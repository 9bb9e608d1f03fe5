"""While cotenant goes down it takes no jobs and starts none, and nothing that it has taken is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hosts import FakeHost
from local_client import LocalCotenant
from scheduling import settings, spec

from cotenant.actors.leaving import kept_off
from cotenant.scheduler.core.events import HostJoined, HostUnreachable, Tick
from cotenant.scheduler.core.model import Hints, JobSpec
from cotenant.scheduler.errors import GoingDown

WORDS = "cotenant is going down: no new jobs are taken"


def whole(job_id: str) -> JobSpec:
    """A job that shares its GPU with nobody."""
    return spec(job_id, isolation="hard")


def go_down(tmp_path: Path, identity: str | None = None) -> LocalCotenant:
    """Return one that goes down: one job is being stopped, another waits."""
    cotenant = LocalCotenant(tmp_path, FakeHost(), settings=settings(), identity=identity)
    cotenant.client.submit_many([whole("runs"), whole("waits")])
    cotenant.report()
    assert cotenant.client.job("runs").state == "RUNNING"
    assert cotenant.scheduler.shut_down() == 1, "what waits is not stopped"
    return cotenant


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[LocalCotenant]:
    cotenant = go_down(tmp_path)
    yield cotenant
    cotenant.close()


@pytest.mark.parametrize("same", [True, False])
def test_a_scheduler_that_is_started_anew_on_the_way_goes_on_going_down(tmp_path: Path, same: bool) -> None:
    """Ray starts an actor anew that dies: it had forgotten what it was at, took jobs and started those that wait."""
    leaving = go_down(tmp_path, identity="actor-1")
    (host,) = leaving.hosts
    host.end("runs", 1, -15)
    leaving.close()
    again = LocalCotenant(tmp_path, host, settings=settings(), identity="actor-1" if same else "actor-2")
    again.report()
    assert again.client.job("waits").state == ("QUEUED" if same else "RUNNING")
    if same:
        with pytest.raises(GoingDown):
            again.client.submit_many([whole("new")])
        assert again.scheduler.shut_down() == 0
    again.close()


@pytest.mark.parametrize("kind", ["command", "lease"])
@pytest.mark.parametrize("attached", [False, True])
def test_a_new_job_is_refused_in_words(leaving: LocalCotenant, kind: str, attached: bool) -> None:
    new = replace(whole("new"), kind=kind, attached=attached, command=("true",) if kind == "command" else ())  # type: ignore[arg-type]
    with pytest.raises(GoingDown, match=f"^{WORDS}$"):
        leaving.client.submit_many([new])
    with pytest.raises(GoingDown):
        leaving.client.submit_many([whole("waits"), new])
    assert {job.job_id for job in leaving.client.jobs()} == {"runs", "waits"}


def test_the_api_says_so(leaving: LocalCotenant) -> None:
    answer = leaving.http("POST", "/jobs", {"command": ["true"]})
    assert (answer.status_code, answer.json()["detail"]) == (503, WORDS)
    assert answer.json()["type"] == "urn:cotenant:problem:going-down"
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_job_that_was_taken_may_be_sent_again(leaving: LocalCotenant) -> None:
    assert leaving.client.submit_many([whole("waits")])[0].state == "QUEUED"


def test_what_waits_starts_with_the_next_scheduler_and_not_before(tmp_path: Path) -> None:
    leaving = go_down(tmp_path)
    (host,) = leaving.hosts
    host.end("runs", 1, -15)
    other = FakeHost("h2")
    for one in (host, other, host, other):
        one.answered(report := one.message(), leaving.scheduler.report(report))
    assert {job.job_id: str(job.state) for job in leaving.client.jobs()} == {"runs": "CANCELLED", "waits": "QUEUED"}
    assert (host.starts, other.starts) == ([("runs", 1)], [])
    leaving.close()
    again = LocalCotenant(tmp_path, host, settings=settings())
    again.report()
    assert again.client.job("waits").state == "RUNNING"
    assert again.client.submit(["true"], Hints(), job_id="new", env={}).state == "QUEUED"
    again.close()


def test_a_job_whose_client_waits_is_ended(tmp_path: Path) -> None:
    """The client ends with cotenant: nobody would be there when the job runs after the next start."""
    cotenant = LocalCotenant(tmp_path, FakeHost(), settings=settings())
    cotenant.client.submit_many([whole("runs"), replace(whole("attached"), attached=True)])
    assert cotenant.scheduler.shut_down() == 2
    assert cotenant.client.job("attached").state == "CANCELLED"
    cotenant.close()


def test_a_host_that_was_about_to_join_gets_nothing() -> None:
    """Its report may have been looked at just before."""
    events = kept_off([Tick(), HostJoined(FakeHost().host)])
    assert events == [Tick(), HostUnreachable("h1", WORDS)]
