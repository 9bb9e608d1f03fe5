"""Events in, commands and states out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from scheduling import GIB, Driver, half, host, measurement, profile, report, settings, spec

from cotenant.configs.settings import PlacementSettings, ResizeSettings
from cotenant.scheduler.core import turn
from cotenant.scheduler.core.commands import Command, StartJob
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobExited,
    JobMissing,
    JobStarted,
    JobSubmitted,
    MemoryOverrun,
    SettingsChanged,
    StartFailed,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.queries import gpus
from cotenant.scheduler.core.state import KEPT_ENDED_JOBS


def test_a_job_waits_as_pending_until_a_host_is_known() -> None:
    driver = Driver()
    assert driver.submit(half("a")) == []
    assert driver.state("a") == "PENDING"
    (start,) = driver.do(HostJoined(host()))
    assert (start.kind, start.job_id, driver.state("a")) == ("start", "a", "STARTING")


def test_the_same_job_id_twice_is_one_job() -> None:
    driver = Driver(host())
    assert len(driver.submit(half("a"), half("a", priority="high"))) == 1
    assert driver.submit(half("a")) == []
    assert driver.job("a").spec == half("a")
    assert driver.core.state.ignored == {"submitted again": 2}


def test_a_start_carries_a_lease_with_a_new_epoch_and_the_whole_compute_when_alone() -> None:
    driver = Driver(host())
    (start,) = driver.submit(half("a"))
    assert isinstance(start, StartJob)
    assert (start.epoch, start.host_id, start.shares[0].compute) == (1, "h1", 1.0)
    assert start.shares == driver.job("a").lease.shares  # type: ignore[union-attr]
    assert start.planned == driver.core.state.profile_of(driver.job("a"))
    assert start.planned is not None
    assert start.planned.source == "hints"


def test_a_neighbour_is_made_room_for_before_it_starts() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.submit(half("b"))
    assert driver.kinds() == [("resize", "a"), ("start", "b")]
    shares = [driver.job(job_id).lease.shares[0].compute for job_id in "ab"]  # type: ignore[union-attr]
    assert sum(shares) <= 1.0
    assert min(shares) >= 0.4, "the compute hint is a guarantee"


def test_a_neighbour_that_is_stopping_gives_way_too() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(StopRequested("a", "stopped by user"))
    driver.submit(half("b"))
    assert driver.kinds() == [("resize", "a"), ("start", "b")]


def test_who_stays_behind_alone_gets_the_whole_compute_back() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.run(half("b"))
    driver.do(JobExited("b", 1, "h1", 0))
    assert driver.kinds() == [("resize", "a")]
    assert driver.resizes()[0].shares[0].compute == 1.0


@pytest.mark.parametrize(
    ("restart", "last", "want", "code"),
    [
        ("on_node_loss", JobExited("a", 1, "h1", 0), "SUCCEEDED", 0),
        ("on_node_loss", JobExited("a", 1, "h1", 3), "FAILED", 3),
        ("on_node_loss", JobExited("a", 1, "h1", -9), "FAILED", -9),
        ("on_failure", JobExited("a", 1, "h1", 3), "QUEUED", None),
        ("never", JobExited("a", 1, "h1", -9, lost=True), "FAILED", -9),
        ("on_node_loss", JobExited("a", 1, "h1", -9, lost=True), "QUEUED", None),
        ("on_failure", JobExited("a", 1, "h1", -9, lost=True), "QUEUED", None),
        ("on_failure", JobExited("a", 1, "h1", 0), "SUCCEEDED", 0),
        ("never", JobMissing("a", 1, "h1"), "FAILED", None),
        ("on_node_loss", JobMissing("a", 1, "h1"), "QUEUED", None),
        ("never", HostLost("h1", "no report"), "FAILED", None),
        ("on_node_loss", HostLost("h1", "no report"), "QUEUED", None),
        ("on_failure", HostLost("h1", "no report"), "QUEUED", None),
        ("never", StartFailed("a", 1, "h1", "no such file", 127), "FAILED", 127),
        ("never", StartFailed("a", 1, "h1", "busy", retry=True), "QUEUED", None),
    ],
)
def test_how_a_job_ends(restart: str, last: Event, want: str, code: int | None) -> None:
    driver = Driver(host())
    driver.run(half("a", restart=restart))
    driver.do(last)
    assert (driver.state("a"), driver.job("a").exit_code) == (want, code)
    assert driver.job("a").lease is None


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by signal 9")], ids=str
)
def test_the_reason_of_an_exit_is_told(code: int, reason: str) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(JobExited("a", 1, "h1", code))
    assert driver.job("a").reason == reason


def test_an_exit_that_overtakes_the_start_counts() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    driver.do(JobExited("a", 1, "h1", 0))
    assert driver.state("a") == "SUCCEEDED"


def test_failures_are_tried_again_with_growing_patience_and_then_given_up() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    for restart, wait_s in ((1, 1.0), (2, 2.0)):
        driver.do(StartFailed("a", restart, "h1", "busy", retry=True))
        assert driver.state("a") == "QUEUED"
        assert driver.do(Tick(), after_s=wait_s - 0.5) == []
        assert [c.kind for c in driver.do(Tick(), after_s=0.5)] == ["start"]
    driver.do(StartFailed("a", 3, "h1", "busy", exit_code=5, retry=True))
    assert (driver.state("a"), driver.job("a").exit_code) == ("FAILED", 5)
    assert driver.job("a").reason == "could not be started: busy; gave up after 2 restarts"


def test_a_start_that_the_hosts_services_let_down_is_no_restart_and_waits_until_they_may_be_there() -> None:
    driver = Driver(host())
    driver.submit(half("a", restart="never"))
    for epoch, (told, wait_s) in enumerate([(7.0, 7.0), (0.0, 1.0), (1e9, 300.0), (2.0, 2.0)], start=1):
        driver.do(StartFailed("a", epoch, "h1", "no daemon", retry=True, retry_after_s=told))
        assert driver.state("a") == "QUEUED"
        assert driver.do(Tick(), after_s=wait_s - 0.5) == []
        assert [c.kind for c in driver.do(Tick(), after_s=0.5)] == ["start"]
    assert driver.job("a").restarts == 0
    assert driver.job("a").history[-2].reason == (
        "could not be started: no daemon; once more in 2 s, no restart of its own"
    )
    driver.do(StartFailed("a", 5, "h1", "busy", retry=True))
    assert driver.job("a").history[-1].reason == "could not be started: busy; restart 1 of 2"


def test_services_that_never_let_a_job_start_do_not_have_it_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MOST_LET_DOWN", 3)
    driver = Driver(host())
    driver.submit(half("a"))
    tries = 0
    while driver.state("a") != "FAILED":
        if driver.state("a") == "STARTING":
            tries += 1
            driver.do(StartFailed("a", tries, "h1", "no daemon", retry=True, retry_after_s=2.0))
        driver.do(Tick(), after_s=2.0)
    assert tries == 3 + 2 + 1
    assert driver.job("a").reason == "could not be started: no daemon; gave up after 2 restarts"


def test_a_job_that_has_run_may_be_let_down_anew() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    driver.do(StartFailed("a", 1, "h1", "no daemon", retry=True, retry_after_s=1.0))
    assert driver.job("a").let_down == 1
    driver.start_all(driver.do(Tick()))
    assert (driver.state("a"), driver.job("a").let_down) == ("RUNNING", 0)


def test_a_start_that_takes_too_long_is_stopped_and_tried_again() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    assert driver.do(Tick(), after_s=30.0) == []
    driver.do(Tick(), after_s=1.0)
    assert (driver.kinds(), driver.state("a")) == ([("stop", "a")], "STOPPING")
    driver.do(JobExited("a", 1, "h1", -15))
    assert (driver.state("a"), driver.job("a").restarts) == ("QUEUED", 1)
    assert driver.job("a").history[-1].reason == "did not start within 30 s; restart 1 of 2"


@pytest.mark.parametrize("ask", [StopRequested("a", "stopped by user"), ClientLost("a")], ids=["stop", "client lost"])
def test_stopping(ask: Event) -> None:
    pending, queued, running = Driver(), Driver(host()), Driver(host())
    pending.submit(half("a"))
    pending.do(ask)
    assert pending.state("a") == "CANCELLED"
    queued.run(spec("b"))
    queued.submit(half("a"))
    queued.do(ask)
    assert queued.state("a") == "CANCELLED"
    running.run(half("a"))
    running.do(ask)
    assert (running.kinds(), running.state("a")) == ([("stop", "a")], "STOPPING")
    assert running.job("a").lease is not None, "its processes may still run"
    assert running.do(ask) == []
    running.do(JobExited("a", 1, "h1", 0))
    assert (running.state("a"), running.job("a").exit_code) == ("CANCELLED", 0)
    running.do(ask)
    assert running.core.state.ignored == {"stop of a job that is not there": 1}


def test_a_cancelled_job_is_not_tried_again() -> None:
    driver = Driver(host())
    driver.submit(half("a"))
    driver.do(Tick(), after_s=31.0)
    driver.do(StopRequested("a", "stopped by user"))
    driver.do(JobExited("a", 1, "h1", -15))
    assert (driver.state("a"), driver.job("a").reason) == ("CANCELLED", "stopped by user")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (JobStarted("a", 0, "h1"), "stale epoch"),
        (JobExited("a", 0, "h1", 0), "stale epoch"),
        (JobExited("a", 7, "h1", 0), "stale epoch"),
        (StartFailed("a", 0, "h1", "x"), "stale epoch"),
        (JobMissing("a", 0, "h1"), "stale epoch"),
        (MemoryOverrun("a", 0, "h1", 9 * GIB), "stale epoch"),
        (JobExited("a", 1, "elsewhere", 0), "host has no part in the job"),
        (JobExited("nobody", 1, "h1", 0), "unknown job"),
        (JobStarted("nobody", 1, "h1"), "unknown job"),
        (StopRequested("nobody", "x"), "stop of a job that is not there"),
        (HostUnreachable("elsewhere", "x"), "unknown host"),
        (report("h1", measurement("nobody", "h1-0")), "measurement of a job that is not there"),
        (report("h1", measurement("a", "h9-0")), "measurement of a job that is not there"),
        (report("h1", measurement("a", "h1-0", profile(util=float("nan")))), "absurd measurement"),
        (report("h1", measurement("a", "h1-0", profile(rate=float("inf")))), "absurd measurement"),
        (report("h1", measurement("a", "h1-0", util_mean=-1.0)), "absurd measurement"),
    ],
)
def test_what_is_stale_unknown_or_absurd_is_counted_and_changes_nothing(event: Event, why: str) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    before = driver.job("a")
    assert driver.do(event) == []
    assert driver.job("a") is before
    assert driver.core.state.ignored == {why: 1}


class TestSeveralHosts:
    """A job whose GPUs lie on two hosts."""

    @pytest.fixture
    def driver(self) -> Driver:
        driver = Driver(host("h1"), host("h2"))
        driver.submit(half("a", gpus=2, gang="cluster", restart="on_failure"))
        return driver

    def test_it_is_started_on_each_and_runs_when_all_have_started(self, driver: Driver) -> None:
        assert [(c.host_id, [s.gpu_id for s in c.shares]) for c in driver.commands if isinstance(c, StartJob)] == [
            ("h1", ["h1-0"]),
            ("h2", ["h2-0"]),
        ]
        driver.do(JobStarted("a", 1, "h2"))
        assert driver.state("a") == "STARTING"
        driver.do(JobStarted("a", 1, "h2"))
        assert driver.state("a") == "STARTING"
        driver.do(JobStarted("a", 1, "h1"))
        assert driver.state("a") == "RUNNING"

    @pytest.mark.parametrize(("code", "want"), [(0, "SUCCEEDED"), (1, "QUEUED")])
    def test_an_exit_on_one_host_stops_the_others_before_anything_is_freed(
        self, driver: Driver, code: int, want: str
    ) -> None:
        driver.start_all(driver.commands)
        driver.do(JobExited("a", 1, "h1", code))
        assert [(stop.host_id, stop.job_id) for stop in driver.stops()] == [("h2", "a")]
        assert driver.state("a") == "STOPPING"
        assert len(driver.job("a").lease.shares) == 2  # type: ignore[union-attr]
        driver.do(JobExited("a", 1, "h1", code))
        assert driver.state("a") == "STOPPING"
        driver.do(JobExited("a", 1, "h2", -15))
        assert driver.state("a") == want
        assert driver.job("a").exit_code == (0 if code == 0 else None)

    def test_a_lost_host_counts_as_done(self, driver: Driver) -> None:
        driver.start_all(driver.commands)
        driver.do(HostLost("h1", "no report"))
        assert ([stop.host_id for stop in driver.stops()], driver.state("a")) == (["h2"], "STOPPING")
        driver.do(HostLost("h2", "no report"))
        assert driver.state("a") == "QUEUED"


class TestHosts:
    """Hosts come, fall silent, go and change."""

    def test_nothing_new_goes_to_a_silent_host_but_its_jobs_keep_their_leases(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(HostUnreachable("h1", "no report"))
        assert driver.submit(half("b")) == []
        assert driver.state("a") == "RUNNING"
        driver.do(HostJoined(host()))
        assert ("start", "b") in driver.kinds()

    def test_a_job_of_a_lost_host_starts_elsewhere_with_a_newer_epoch(self) -> None:
        driver = Driver(host("h1"), host("h2"))
        driver.run(half("a"))
        (start,) = driver.do(HostLost("h1", "no report"))
        assert isinstance(start, StartJob)
        assert (start.host_id, start.epoch) == ("h2", 2)
        driver.do(JobExited("a", 1, "h1", 0))
        assert driver.state("a") == "STARTING", "the old host's word no longer counts"

    @pytest.mark.parametrize("after", [host(gpus=1), host(gpus=2, memory=2 * GIB)], ids=["GPU gone", "GPU shrank"])
    def test_jobs_are_evicted_from_gpus_that_are_gone_or_shrank(self, after: object) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a", gpus=2))
        driver.do(HostJoined(after))  # type: ignore[arg-type]
        assert (driver.kinds(), driver.state("a")) == ([("stop", "a")], "STOPPING")
        driver.do(JobExited("a", 1, "h1", -15))
        assert driver.state("a") == "QUEUED"

    def test_a_gpu_that_another_host_announces_belongs_to_that_host(self) -> None:
        driver = Driver(host("h1"))
        driver.run(half("a"))
        moved = replace(host("h2"), gpus=host("h1").gpus)
        driver.do(HostJoined(moved))
        assert [stop.host_id for stop in driver.stops()] == ["h1"]
        driver.do(HostLost("h1", "no report"))
        assert (driver.state("a"), driver.job("a").hosts) == ("STARTING", ("h2",))

    def test_jobs_leave_a_broken_gpu_and_it_is_used_again_once_it_works(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        lease = driver.job("a").lease
        assert lease is not None
        gpu_id = lease.shares[0].gpu_id
        other, broken = host("h2"), replace(host(), gpus=(replace(host().gpus[0], healthy=False, fault="it is lost"),))
        assert broken.gpus[0].gpu_id == gpu_id
        driver.do(HostJoined(broken))
        (stop,) = driver.stops()
        assert stop.reason.startswith(
            f"GPU {gpu_id} of host h1.example: it is lost; fault 1 of its hosts, no restart of its own"
        )
        assert driver.do(HostJoined(broken)) == []  # told once
        driver.do(JobExited("a", 1, "h1", -15))
        assert driver.state("a") == "QUEUED"
        assert [view.note for view in gpus(driver.core.state)] == ["it is lost"]
        assert [(c.kind, c.host_id) for c in driver.do(HostJoined(other))] == [("start", "h2")]
        driver.submit(half("b", gpu_memory=8 * GIB, compute=1.0))
        assert driver.state("b") == "QUEUED"
        assert [(c.kind, c.host_id) for c in driver.do(HostJoined(host()))] == [("start", "h1")]

    def test_an_unhealthy_gpu_gets_nothing_new(self) -> None:
        sick = replace(host(), gpus=tuple(replace(gpu, healthy=False) for gpu in host().gpus))
        driver = Driver(sick)
        assert driver.submit(half("a")) == []
        assert [c.kind for c in driver.do(HostJoined(host()))] == ["start"]


class TestNeverPlaceable:
    """Jobs that no device could ever take."""

    @pytest.mark.parametrize("hints", [{"gpu_memory": 9 * GIB}, {"gpus": 3}], ids=["memory", "GPUs"])
    def test_it_fails_at_once_with_the_explanation(self, hints: dict[str, int]) -> None:
        driver = Driver(host(gpus=2))
        driver.submit(spec("a", **hints))
        job = driver.job("a")
        assert (driver.state("a"), job.not_placeable, bool(job.fit_errors)) == ("FAILED", True, True)
        assert job.reason.startswith("no device of this cluster could ever take it: ")

    def test_it_waits_while_no_host_is_known(self) -> None:
        driver = Driver()
        driver.submit(spec("a", gpu_memory=9 * GIB))
        assert driver.state("a") == "PENDING"
        driver.do(HostJoined(host()))
        assert driver.state("a") == "FAILED"

    def test_a_job_that_ran_before_waits_for_its_host_to_come_back(self) -> None:
        driver = Driver(host("h1"), host("h2", memory=GIB))
        driver.run(half("a"))
        driver.do(HostLost("h1", "no report"))
        assert driver.state("a") == "QUEUED"
        driver.do(HostJoined(host("h1")))
        assert driver.state("a") == "STARTING"


def test_settings_apply_at_once() -> None:
    driver = Driver(host(), configured=settings(max_jobs_per_gpu=1))
    driver.run(half("a"))
    assert driver.submit(half("b")) == []
    driver.do(SettingsChanged(PlacementSettings(), ResizeSettings()))
    assert driver.kinds() == [("resize", "a"), ("start", "b")]


def test_static_slots_stay_as_they_are() -> None:
    driver = Driver(host(), configured=settings(policy="static", static_slots=2))
    driver.run(half("a"))
    assert driver.job("a").lease.shares[0].compute == 0.5  # type: ignore[union-attr]
    assert driver.do(report("h1", measurement("a", "h1-0"))) == []


def test_time_never_goes_backwards() -> None:
    driver = Driver(host())
    before = driver.now
    driver.do(JobSubmitted(half("a")), after_s=-500.0)
    assert driver.job("a").queued_at == before


def test_nothing_happens_without_a_change() -> None:
    driver = Driver(host())
    driver.run(spec("a"))
    driver.submit(spec("b"))
    cycles = driver.core.state.cycle
    driver.do(Tick())
    driver.do(Tick())
    assert driver.core.state.cycle == cycles


def test_only_the_newest_ended_jobs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEPT_ENDED_JOBS == 10_000
    monkeypatch.setattr("cotenant.scheduler.core.state.KEPT_ENDED_JOBS", 3)
    driver = Driver()
    driver.submit(*(half(f"j{number}") for number in range(5)))
    for number in (4, 0, 1, 2, 3):
        driver.do(StopRequested(f"j{number}", "x"))
    assert list(driver.core.state.jobs) == ["j1", "j2", "j3"]


def _submit_at_once(count: int) -> tuple[float, Driver, list[Command]]:
    driver = Driver(host(gpus=2))
    batch = [JobSubmitted(half(f"j{number}", gpu_memory=GIB + number)) for number in range(count)]
    begun = time.process_time()
    commands = driver.core.handle(batch, driver.now)
    return time.process_time() - begun, driver, commands


def test_thousands_of_jobs_at_once() -> None:
    # Against itself on the same machine: growth with the square of the number would be a hundredfold.
    few = min(_submit_at_once(300)[0] for _ in range(3))
    many, driver, commands = _submit_at_once(3_000)
    assert many < 30 * few
    assert len([c for c in commands if isinstance(c, StartJob)]) >= 2
    assert len(driver.core.state.jobs) == 3_000


def test_a_job_knows_where_it_was_after_its_end() -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(JobExited("a", 1, "h1", 0))
    job: Job = driver.job("a")
    assert (job.hosts, job.epoch, job.lease) == (("h1",), 1, None)


@pytest.mark.parametrize(
    "loss",
    [
        lambda epoch: HostLost("h1", "gone"),
        lambda epoch: JobMissing("a", epoch, "h1"),
        lambda epoch: HostJoined(replace(host(), gpus=())),
        lambda epoch: MemoryOverrun("a", epoch, "h1", 100 * GIB),
    ],
)
def test_a_lease_that_was_held_is_not_granted_again_when_it_is_lost(loss: Callable[[int], Event]) -> None:
    driver = Driver(host(), host("h2"))
    driver.run(replace(half("a"), kind="lease", command=(), attached=True, pinned_host="h1"))
    assert driver.state("a") == "RUNNING"
    driver.do(loss(driver.job("a").epoch))
    if driver.state("a") == "STOPPING":
        driver.do(JobExited("a", driver.job("a").epoch, "h1", 0, "stopped"))
    assert driver.state("a") == "FAILED", driver.job("a").reason
    assert "restart" not in driver.job("a").reason


def test_a_lease_that_could_not_be_started_is_tried_again() -> None:
    driver = Driver(host())
    driver.submit(replace(half("a"), kind="lease", command=(), attached=True))
    driver.do(StartFailed("a", 1, "h1", "busy", 1, True))
    assert driver.state("a") == "QUEUED"
