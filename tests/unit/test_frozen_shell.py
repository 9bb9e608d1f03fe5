"""Frozen jobs on a real scheduler with its journal and hosts that freeze at once, and as users see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from fake_client import job_view
from fake_hosts import FakeFleet, FakeHost, PromptScheduler
from frozen_jobs import whole
from rich.console import Console
from scheduling import GIB, Driver, half, host, settings, spec
from support import wait_until

from cotenant import _render
from cotenant.actors import vital
from cotenant.actors.enforcement.choice import NO_WHOLE_GPUS
from cotenant.actors.scheduler_actor import Request, Scheduler
from cotenant.scheduler.core.freezable import doubt
from cotenant.scheduler.core.model import Host, Job, JobSpec, JobState
from cotenant.scheduler.errors import HintError
from cotenant.scheduler.journal.store import Journal
from cotenant.scheduler.specs import check_spec
from cotenant.scheduler.views import FrozenView

DRIVER = {"gpu_memory": 8 * GIB, "compute": 1.0, "checkpoint": "driver"}


class Bench:
    """A scheduler without Ray, its host, and a way to start it anew."""

    def __init__(self, path: Path) -> None:
        self.home, self.url = path, f"sqlite:///{path}/journal.db"
        self.host = FakeHost(checkpoints=True)
        self.started: list[Scheduler] = []
        self.begin()

    def begin(self) -> None:
        """Start a scheduler; the one before, if any, counts as killed."""
        fleet, journal = FakeFleet(self.host), Journal(self.url)
        self.scheduler = PromptScheduler(settings().model_dump_json(), self.url, str(self.home), fleet, journal)  # type: ignore[arg-type]
        self.started.append(self.scheduler)

    def report(self) -> None:
        """The host reports."""
        message = self.host.message()
        self.host.answered(message, self.scheduler.report(message))

    def state(self, job_id: str) -> JobState:
        return self.scheduler.job(job_id).state

    def run(self, *specs: JobSpec) -> None:
        self.scheduler.submit(list(specs))
        self.report()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(vital.os, "_exit", lambda code: None)  # one whose journal another has taken ends its process
    before = set(threading.enumerate())
    bench = Bench(tmp_path)
    bench.report()
    yield bench
    for scheduler in bench.started:
        scheduler._stopping.set()
        scheduler._inbox.put(Request([]))
    own = ("commit", "watch")
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name in own], 5, "its threads end")
    for scheduler in bench.started:
        scheduler._ledger._journal.close()


def test_frozen_it_outlives_the_scheduler_and_goes_on_as_it_was(bench: Bench) -> None:
    bench.run(spec("a", **DRIVER))
    bench.scheduler.steer("a", "suspend", None, "asked")
    bench.report()
    bench.run(spec("b", **DRIVER))
    assert (bench.state("a"), bench.state("b"), bench.host.running()) == ("SUSPENDED", "RUNNING", [("b", 1)])
    bench.begin()
    bench.report()
    view = bench.scheduler.job("a").frozen
    assert view is not None
    assert (view.host, view.memory_bytes) == ("h1.example", GIB)
    bench.scheduler.steer("a", "resume", None, "asked")
    bench.host.end("b", 1, 0)
    bench.report()
    bench.report()
    assert (bench.state("a"), bench.host.running(), bench.host.starts) == ("RUNNING", [("a", 1)], [("a", 1), ("b", 1)])


def test_what_a_host_has_lost_of_it_starts_over(bench: Bench) -> None:
    bench.run(spec("a", **DRIVER))
    bench.scheduler.steer("a", "suspend", None, "asked")
    bench.report()
    del bench.host.held["a", 1]
    bench.report()
    assert (bench.state("a"), bench.scheduler.job("a").frozen) == ("SUSPENDED", None)
    bench.scheduler.steer("a", "resume", None, "asked")
    bench.report()
    assert bench.host.running() == [("a", 2)]


def test_stopped_it_is_gone(bench: Bench) -> None:
    bench.run(spec("a", **DRIVER))
    bench.scheduler.steer("a", "suspend", None, "asked")
    bench.report()
    bench.scheduler.stop(["a"], "enough")
    assert (bench.state("a"), bench.host.held["a", 1].phase) == ("CANCELLED", "exited")


@pytest.mark.parametrize(
    ("hosts", "hints", "why"),
    [
        ([host("h1", 2, checkpoints=True)], {"gpus": 2}, ""),
        ([host("h1", 2, checkpoints=True)], {"checkpoint": "own"}, ""),
        ([host("h1", 2, checkpoints=True)], {"gang": "cluster"}, ""),
        ([], {}, ""),
        ([host("h1", 2)], {}, "on no GPU of this cluster, as far as its hosts have told: 'cotenant doctor --cluster'"),
        ([host("h1", 2, checkpoints=True)], {"gpus": 3}, "none has 3 GPUs of one type that the driver can freeze"),
        (
            [host("h1", 2, checkpoints=True)],
            {"gpus": 2, "gang": "cluster"},
            "gang cluster: where its GPUs lie on",
        ),
    ],
)
def test_whoever_waits_to_be_frozen_one_day_is_told_at_once_when_that_will_not_be(
    hosts: list[Host], hints: dict[str, object], why: str
) -> None:
    """The program would not save, and lose all that it has done: too late when it is told once it runs."""
    driver = Driver(*hosts)
    job = Job(whole("a", **hints), JobState.QUEUED, 0.0)
    told = doubt(driver.core.state, job)
    assert why in told if why else told == ""


def test_a_submitted_job_says_that_it_cannot_be_frozen(bench: Bench) -> None:
    bench.run(spec("first", **DRIVER))
    (view,) = bench.scheduler.submit([spec("second", **DRIVER)])
    assert view.no_freezing == bench.scheduler.job("first").no_freezing == ""
    assert [view.no_freezing for view in bench.scheduler.hosts()] == [""]
    bench.host.host = host()
    bench.report()
    (view,) = bench.scheduler.submit([spec("third", **DRIVER)])
    assert view.no_freezing.startswith("the driver can freeze processes on no GPU of this cluster")
    assert bench.scheduler.job("first").no_freezing.startswith("the driver cannot freeze processes on h1-0")
    assert any("counts as none" in line for line in bench.scheduler.explain("third").details)
    assert [view.no_freezing for view in bench.scheduler.hosts()] == [NO_WHOLE_GPUS]


def test_the_list_of_jobs_says_where_it_is() -> None:
    frozen = FrozenView(host_id="h1", host="node-7", gpu_type="A100", memory_bytes=5 * GIB, since=1000.0)
    view = job_view(state=JobState.SUSPENDED, frozen=frozen, reason="suspended by user", shares=[])
    told = StringIO()
    Console(file=told, width=200).print(_render.jobs([view]))
    assert "frozen on node-7, 5.0GiB of its memory: suspended by user" in told.getvalue()


def test_a_lease_cannot_be_frozen() -> None:
    lease = replace(half("a", checkpoint="driver"), kind="lease", command=())
    with pytest.raises(HintError, match="checkpoint: 'driver' is not accepted; give none or own for a lease"):
        check_spec(lease)
    check_spec(half("a", checkpoint="driver"))
