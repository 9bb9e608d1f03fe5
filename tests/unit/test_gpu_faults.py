"""What a host agent tells of GPUs that cannot be used."""

from __future__ import annotations

import pytest

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.gpufaults import NO_REASON, GpuFaults, judged
from cotenant.actors.jobrecords import Exited


def device(gpu_id: str, lost: bool, note: str = "") -> DeviceSample:
    return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=lost, note=note)


def test_a_fault_keeps_its_first_words_until_the_gpu_works() -> None:
    faults = GpuFaults()
    told = [
        (dict(faults.update([device("a", lost, note), device("b", False, "busy")])), set(faults.back))
        for lost, note in ((False, ""), (True, "silent for 5.1 s"), (True, "silent for 6.1 s"), (False, ""), (True, ""))
    ]
    silent = {"a": "silent for 5.1 s"}
    assert told == [({}, set()), (silent, set()), (silent, set()), ({}, {"a"}), ({"a": NO_REASON}, set())]


FAILED = Exited("job", 1, 1, "exit code 1")


def test_a_job_that_fails_on_a_gpu_that_is_lost_was_let_down() -> None:
    """Its program met the fault before anybody else did."""
    ended = judged(FAILED, ["a", "b"], [device("a", True, "XID 79"), device("b", False), device("c", True, "gone")])
    assert ended == Exited("job", 1, 1, "GPU a: XID 79; it ended with 1", lost=True)


@pytest.mark.parametrize(
    ("ended", "lost"),
    [
        (FAILED, "c"),
        (Exited("job", 1, 0, "exit code 0"), "a"),
        (Exited("job", 1, -15, "enough", stopped=True), "a"),
        (Exited("job", 1, -9, "its daemon died", lost=True), "a"),
    ],
    ids=["another GPU", "success", "stopped", "known"],
)
def test_other_ends_stay_what_they_are(ended: Exited, lost: str) -> None:
    assert judged(ended, ["a"], [device(name, name == lost) for name in "abc"]) == ended
