"""Every promise, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from scheduling import GIB, Driver, half, host

from cotenant.placement.types import Share
from cotenant.scheduler.core.events import JobExited, StopRequested
from cotenant.scheduler.core.invariants import InvariantViolation, check
from cotenant.scheduler.core.model import Ending, Job, JobState, StateChange
from cotenant.scheduler.core.state import State


def leased(memory: int, compute: float) -> Callable[[Job], Job]:
    """A change of the job's only share."""

    def change(job: Job) -> Job:
        assert job.lease is not None
        return replace(job, lease=replace(job.lease, shares=(Share("h1-0", memory, compute),)))

    return change


@pytest.fixture
def driver() -> Driver:
    driver = Driver(host())
    driver.run(half("a"))
    driver.run(half("b"))
    return driver


@pytest.mark.parametrize(
    ("change", "story"),
    [
        (leased(6 * GIB, 0.4), "GPU h1-0: 9663676416 bytes promised of 8589934592"),
        (leased(GIB, 0.9), "compute shares add up to"),
        (leased(GIB, 0.0), "a share is outside"),
        (leased(-1, 0.1), "negative size"),
        (lambda job: replace(job, lease=None), "'a' is RUNNING and has no lease"),
        (lambda job: replace(job, epoch=2), "'a' at epoch 2 holds the lease of 'a' at 1"),
        (lambda job: replace(job, state=JobState.SUCCEEDED), "'a' is SUCCEEDED and holds a lease"),
        (lambda job: replace(job, ending=Ending(JobState.FAILED, "x")), "'a' is RUNNING and its ending is"),
        (lambda job: replace(job, started_hosts=frozenset()), "'a' is running although only"),
        (lambda job: replace(job, history=()), "a history of 0 changes that does not end there"),
        (
            lambda job: replace(job, history=(StateChange(0.0, JobState.FAILED, "x"), *job.history)),
            "'a' went from FAILED to PENDING",
        ),
    ],
)
def test_a_broken_record_is_found(driver: Driver, change: Callable[[Job], Job], story: str) -> None:
    driver.core.state.put(change(driver.job("a")))
    with pytest.raises(InvariantViolation, match=story):
        check(driver.core.state)


@pytest.mark.parametrize(
    "drift",
    [
        lambda state: state.queued.add("a"),
        lambda state: state.pending.add("a"),
        lambda state: state.leased.discard("a"),
        lambda state: state.delayed.add("a"),
        lambda state: state.on_gpu["h1-0"].discard("a"),
    ],
)
def test_a_drifting_index_is_found(driver: Driver, drift: Callable[[State], None]) -> None:
    check(driver.core.state)
    drift(driver.core.state)
    with pytest.raises(InvariantViolation, match="index"):
        check(driver.core.state)


def test_a_terminal_state_never_changes(driver: Driver) -> None:
    driver.do(JobExited("a", 1, "h1", 0))
    with pytest.raises(InvariantViolation, match="'a' is SUCCEEDED at epoch 1 and was to become QUEUED"):
        driver.core.state.put(replace(driver.job("a"), state=JobState.QUEUED))


def test_an_epoch_never_goes_backwards(driver: Driver) -> None:
    with pytest.raises(InvariantViolation, match="at epoch 0"):
        driver.core.state.put(replace(driver.job("a"), epoch=0))


def test_a_violation_tells_the_story(driver: Driver) -> None:
    driver.do(StopRequested("a", "stopped by user"))
    driver.core.state.put(replace(driver.job("a"), ending=None))
    with pytest.raises(InvariantViolation, match="STOPPING: stopped by user"):
        check(driver.core.state)
