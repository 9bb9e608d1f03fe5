"""What a run that had too little memory teaches later runs of its program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, host, measurement, profile, report, spec

from cotenant.scheduler.core import queries
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import HostJoined, HostLost, JobExited, MemoryOverrun
from cotenant.scheduler.core.model import JobSpec, Outgrown
from cotenant.scheduler.core.state import State
from cotenant.scheduler.fingerprint import NAMELESS


def run_of(program: str, job_id: str, memory: int | None = 2 * GIB, **hints: Any) -> JobSpec:
    """A run of a program with this memory hint."""
    given = {"compute": 0.4} | ({} if memory is None else {"gpu_memory": memory}) | hints
    return replace(spec(job_id, **given), fingerprint=program)


def fail(driver: Driver, job_id: str) -> None:
    """The job runs out of memory."""
    driver.do(JobExited(job_id, driver.job(job_id).epoch, "h1", 1, "exit code 1", out_of_memory=True))


def memory(driver: Driver, job_id: str) -> float:
    """The job's share, in GiB."""
    lease = driver.job(job_id).lease
    assert lease is not None
    return lease.shares[0].memory_bytes / GIB


def end(driver: Driver, *job_ids: str) -> None:
    driver.do(*(JobExited(job_id, driver.job(job_id).epoch, "h1", 0) for job_id in job_ids))


def test_later_runs_start_with_what_was_learnt_and_say_so() -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    assert memory(driver, "a") == 3.0
    end(driver, "a")
    driver.run(run_of("p", "b"), run_of("other", "c"))
    assert (memory(driver, "b"), memory(driver, "c")) == (3.0, 2.0)
    explained = {job_id: queries.explain(driver.core.state, job_id, driver.now).details for job_id in "bc"}
    says = (
        "3.0 GiB of memory reserved per GPU instead of the 2.0 GiB of its hint: an earlier run of its program, job a,"
    )
    assert f"{says} had too little with 2.0 GiB" in explained["b"]
    assert not any("had too little" in line for line in explained["c"])


def test_so_do_runs_that_wait() -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"), spec("big", gpu_memory=6 * GIB, compute=0.5))
    driver.submit(run_of("p", "b"))
    assert driver.state("b") == "QUEUED"
    fail(driver, "a")
    end(driver, "big")
    assert (memory(driver, "a"), memory(driver, "b")) == (3.0, 3.0)


def test_it_is_learnt_once_and_not_for_ever() -> None:
    """Each run has its own second try, but none starts with more than the first had in the end."""
    driver = Driver(host())
    for number in range(5):
        job_id = f"run-{number}"
        driver.run(run_of("p", job_id))
        assert memory(driver, job_id) == (2.0 if number == 0 else 3.0)
        fail(driver, job_id)
        assert memory(driver, job_id) == (3.0 if number == 0 else 4.5)
        fail(driver, job_id)
        assert driver.state(job_id) == "FAILED"


def test_a_hint_above_it_counts_and_may_turn_out_too_small_as_well() -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    end(driver, "a")
    driver.run(run_of("p", "b", 4 * GIB))
    assert memory(driver, "b") == 4.0
    fail(driver, "b")
    end(driver, "b")
    driver.run(run_of("p", "c", 4 * GIB))
    assert memory(driver, "c") == 6.0


@pytest.mark.parametrize("hint", [1, 2.5])
def test_another_hint_below_it_counts_too(hint: float) -> None:
    """Whoever changes the hint may have changed the program; what is wrong about it shows at once."""
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    end(driver, "a")
    driver.run(run_of("p", "b", int(hint * GIB)))
    assert memory(driver, "b") == hint
    fail(driver, "b")
    assert memory(driver, "b") == hint * 1.5


@pytest.mark.parametrize("changed", [{"tenant": "bob"}, {"cwd": "/home/bob"}, {"lease": True}])
def test_strangers_are_told_nothing(changed: dict[str, Any]) -> None:
    """The same fingerprint is not the same program: directories are no part of it, and leases may have no name."""

    def run(job_id: str, *, stranger: bool) -> JobSpec:
        hints = {"tenant": changed["tenant"]} if stranger and "tenant" in changed else {}
        given = run_of(NAMELESS if "lease" in changed else "p", job_id, **hints)
        return replace(given, cwd=changed["cwd"]) if stranger and "cwd" in changed else given

    driver = Driver(host())
    driver.run(run("alice", stranger=False), spec("big", gpu_memory=6 * GIB, compute=0.5))
    driver.submit(run("waits", stranger=True))
    fail(driver, "alice")
    end(driver, "big")
    assert (memory(driver, "alice"), memory(driver, "waits")) == (3.0, 2.0)
    end(driver, "alice", "waits")
    driver.run(run("bob", stranger=True))
    assert memory(driver, "bob") == 2.0
    assert not any("had too little" in line for line in queries.explain(driver.core.state, "bob", driver.now).details)


def ran_with(driver: Driver, job_id: str, used_gib: float, code: int = 0) -> None:
    """A run is measured at this and ends."""
    driver.start_all(driver.commands)
    used = profile(memory=int(used_gib * GIB), seconds=90.0)
    driver.do(report("h1", replace(measurement(job_id, "h1-0", used), fingerprint="p")))
    driver.do(JobExited(job_id, driver.job(job_id).epoch, "h1", code))


@pytest.mark.parametrize(
    ("hint", "used", "code", "then"),
    [
        pytest.param(2, 1.0, 0, 2.0, id="less than its hint"),
        pytest.param(2, 2.5, 0, 3.0, id="more than its hint"),
        pytest.param(2, 1.0, 1, 3.0, id="it did not end well"),
        pytest.param(None, 1.9, 0, 2.0, id="less than what was too little"),
        pytest.param(None, 2.1, 0, 3.0, id="more than what was too little"),
    ],
)
def test_a_run_that_did_not_need_it_has_it_forgotten(hint: int | None, used: float, code: int, then: float) -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    end(driver, "a")
    driver.run(run_of("p", "b", None if hint is None else hint * GIB))
    ran_with(driver, "b", used, code)
    driver.run(run_of("p", "c"))
    assert memory(driver, "c") == then


def test_runs_that_wait_then_do_without_it_too() -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    end(driver, "a")
    driver.run(run_of("p", "b"), spec("big", gpu_memory=5 * GIB, compute=0.4))
    driver.submit(run_of("p", "waits"))
    assert driver.state("waits") == "QUEUED"
    ran_with(driver, "b", 1.0)
    assert memory(driver, "waits") == 2.0


def test_what_earlier_runs_used_does_not_keep_it() -> None:
    """Only what the run itself used says whether it needed more than its hint; the most that it used at any time."""
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    ran_with(driver, "a", 2.5)
    for job_id, used, then in (("b", (2.5, 1.0), 3.0), ("c", (1.0,), 2.0)):
        driver.run(run_of("p", job_id))
        for gib in used:
            known = profile(memory=int(2.5 * GIB), seconds=90.0)  # of all runs
            driver.do(report("h1", measurement(job_id, "h1-0", known, memory_peak_bytes=gib * GIB)))
        end(driver, job_id)
        driver.run(run_of("p", f"after-{job_id}"))
        assert memory(driver, f"after-{job_id}") == then
        end(driver, f"after-{job_id}")


def test_the_run_that_had_too_little_does_not_have_it_forgotten() -> None:
    """What it needed for a moment may have come and gone between two readings."""
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    ran_with(driver, "a", 1.0)
    driver.run(run_of("p", "b"))
    assert memory(driver, "b") == 3.0


def test_what_outgrew_a_gpu_without_room_counts_too() -> None:
    driver = Driver(host(gpus=2))
    driver.run(spec("n", gpu_memory=5 * GIB, compute=0.4), spec("m", gpu_memory=5 * GIB, compute=0.4))
    driver.run(run_of("p", "a", 3 * GIB))
    driver.do(MemoryOverrun("a", 1, "h1", 4 * GIB))
    driver.do(JobExited("a", 1, "h1", -15))
    end(driver, "n", "m")
    driver.run(run_of("p", "b", 3 * GIB))
    assert memory(driver, "b") == pytest.approx(4.8, abs=0.01)


@pytest.mark.parametrize(
    ("known_gib", "starts_with"),
    [
        pytest.param(1, 3.0, id="measured to need less"),
        pytest.param(5, 5.5, id="measured to need more: what is measured counts"),
    ],
)
def test_without_a_hint_it_is_the_least_beside_what_is_measured(known_gib: int, starts_with: float) -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    driver.start_all(driver.commands)
    known = profile(memory=known_gib * GIB, seconds=90.0)
    driver.do(report("h1", replace(measurement("a", "h1-0", known), fingerprint="p")))
    end(driver, "a")
    driver.run(run_of("p", "b", None))
    assert memory(driver, "b") == pytest.approx(starts_with, abs=0.01)


def test_a_program_of_which_nothing_is_known_still_gets_the_whole_gpu() -> None:
    driver = Driver(host())
    driver.run(run_of("p", "a"))
    fail(driver, "a")
    end(driver, "a")
    driver.run(replace(spec("b"), fingerprint="p"))
    assert memory(driver, "b") == 8.0


def test_nobody_becomes_unplaceable_by_it() -> None:
    """The GPU that was large enough is gone: what is there has to do, and where it cannot, the hint counts again."""
    driver = Driver(host("h1", memory=16 * GIB))
    driver.run(run_of("p", "a", 8 * GIB))
    fail(driver, "a")
    assert memory(driver, "a") == 12.0
    end(driver, "a")
    for host_id, gone, job_id, there in (("h2", "h1", "b", 10), ("h3", "h2", "c", 8)):
        driver.do(HostLost(gone, "gone"), HostJoined(host(host_id, memory=there * GIB)))
        driver.run(run_of("p", job_id, 8 * GIB))
        assert memory(driver, job_id) == there


def test_it_survives_a_restart_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.scheduler.core.outgrown.KEPT_FINGERPRINTS", 2)
    driver = Driver(host())
    for number, program in enumerate(("p", "q", "p", "r")):  # p again: it is no longer the one seen longest ago
        job_id = f"{program}-{number}"
        driver.run(run_of(program, job_id))
        fail(driver, job_id)
        end(driver, job_id)
    assert [known.job_id for known in driver.core.state.outgrown.values()] == ["p-0", "r-3"]
    driver.core = Core.from_state(State.from_json(driver.core.state.to_json()))
    for program, starts_with in (("r", 3.0), ("p", 3.0), ("q", 2.0)):
        driver.run(run_of(program, f"{program}-again"))
        assert memory(driver, f"{program}-again") == starts_with
        end(driver, f"{program}-again")


def test_what_an_older_version_has_written_is_read_and_is_nobodys() -> None:
    """It was kept by fingerprint alone, and the hint was not noted."""
    driver = Driver(host())
    driver.core.state.outgrown["p"] = Outgrown("a", 2 * GIB, 3 * GIB)
    before = driver.core.state.to_json()
    text = before.replace(b',"hint_bytes":null', b"")
    assert text != before
    driver.core = Core.from_state(State.from_json(text))
    driver.run(run_of("p", "b"))
    assert memory(driver, "b") == 2.0
