"""The end of a job is told when its device memory is free."""

from __future__ import annotations

import pytest

from cotenant.actors.devices.base import DeviceSample, JobSample, Sample
from cotenant.actors.vacating import PATIENCE_S, Vacating

MIB = 1 << 20


def sample(used: float | None, **jobs: float | None) -> Sample:
    """One GPU that uses so many MiB, and what its jobs use of it."""
    device = DeviceSample("g", None, None if used is None else used * MIB)
    rows = tuple(
        JobSample(job_id, "g", None, None, None if memory is None else memory * MIB, None)
        for job_id, memory in jobs.items()
    )
    return Sample(0.0, (device,), rows)


@pytest.fixture
def running() -> Vacating:
    """Two jobs, and 300 MiB that the driver has for itself."""
    vacating = Vacating()
    vacating.see(sample(2300, a=1500, b=500))
    return vacating


def test_an_end_is_told_when_the_memory_is_free(running):
    running.see(sample(800, a=None, b=500))
    assert running.wait("a", 1, ["g"], 0.0) == ""


def test_memory_that_a_dead_process_holds_is_waited_for(running):
    running.see(sample(2300, a=None, b=500))  # no process of the job is left, but its memory is
    assert running.wait("a", 1, ["g"], 0.0) is None
    running.see(sample(2300, b=500))
    assert running.wait("a", 1, ["g"], 1.0) is None
    running.see(sample(1900, b=1100))  # the neighbour grows meanwhile
    assert running.wait("a", 1, ["g"], 2.0) is None
    running.see(sample(1410, b=1100))
    assert running.wait("a", 1, ["g"], 2.1) == ""


def test_memory_that_never_comes_back_is_told_with_the_end(running):
    running.see(sample(2300, b=500))
    assert running.wait("a", 1, ["g"], 0.0) is None
    text = running.wait("a", 1, ["g"], PATIENCE_S)
    assert text == "1500 MiB of g are still in use 10 s after job a left it"
    running.see(sample(2300, b=500))  # it is nobody's from now on
    running.see(sample(2300))
    assert running.wait("b", 1, ["g"], PATIENCE_S) is None
    running.see(sample(1800))
    assert running.wait("b", 1, ["g"], PATIENCE_S) == ""


@pytest.mark.parametrize("told", [None, 0.0])
def test_where_nobody_can_tell_nothing_is_waited_for(told):
    vacating = Vacating()
    assert vacating.wait("a", 1, ["g"], 0.0) == ""
    vacating.see(sample(told, a=None))
    vacating.see(sample(900, a=None))
    assert vacating.wait("a", 1, ["g"], 0.0) == "", "the job was never measured"
    vacating.see(sample(None, a=500))
    assert vacating.wait("a", 2, ["g"], 0.0) == "", "the device does not say"


def test_small_differences_are_none(running):
    running.see(sample(800 + 60, b=500))
    assert running.wait("a", 1, ["g"], 0.0) == ""


def test_a_job_whose_freeze_was_given_up_is_waited_for_in_full_when_it_ends(running):
    running.see(sample(2300, a=1500, b=500), moving={"a"})
    assert running.wait("a", 1, ["g"], 0.0) is None
    running.see(sample(2300, a=1500, b=500))
    running.see(sample(2300, b=500))
    assert running.wait("a", 1, ["g"], 60.0) is None
    running.see(sample(800, b=500))
    assert running.wait("a", 1, ["g"], 61.0) == ""
