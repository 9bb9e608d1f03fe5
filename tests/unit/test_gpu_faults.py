"""What a host agent tells of GPUs that cannot be used."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.gpufaults import HEALTHY_S, MAX_REST_S, NO_REASON, GpuFaults, judged
from cotenant.actors.jobrecords import Exited


def device(gpu_id: str, lost: bool, note: str = "") -> DeviceSample:
    return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=lost, note=note)


def test_a_fault_keeps_its_first_words_until_the_gpu_works() -> None:
    faults = GpuFaults(count(step=1000.0).__next__)
    told = [
        (dict(faults.update([device("a", lost, note), device("b", False, "busy")])), set(faults.back))
        for lost, note in ((False, ""), (True, "silent for 5.1 s"), (True, "silent for 6.1 s"), (False, ""), (True, ""))
    ]
    silent = {"a": "silent for 5.1 s"}
    assert told == [({}, set()), (silent, set()), (silent, set()), ({}, {"a"}), ({"a": NO_REASON}, set())]


def test_a_gpu_that_is_lost_again_and_again_is_used_less_and_less_often() -> None:
    """Whatever is placed on it each time loses its start."""
    now, used = [0.0], []
    faults = GpuFaults(lambda: now[0])
    for second in range(3600):  # it answers for 3 s and is lost for 3 s
        now[0] = float(second)
        why = faults.update([device("a", second % 6 < 3, "off the bus"), device("b", False)])
        used += [second] if "a" in faults.back else []
        assert "b" not in why
    assert used == [3]
    assert why == {"a": "off the bus; lost 2 times in a row: it is used once it has answered for 10 s"}


@given(st.lists(st.tuples(st.floats(0.1, 400.0), st.floats(0.1, 700.0)), min_size=1, max_size=12))
def test_a_gpu_comes_back_once_it_has_answered_for_long_enough(spells: list[tuple[float, float]]) -> None:
    """Seconds for which it is lost and for which it answers, in turn."""
    now, words = [0.0], set()
    faults = GpuFaults(lambda: now[0])
    for lost_s, fine_s in spells:
        words |= set(faults.update([device("a", True, "gone")]).values())
        now[0] += lost_s
        assert faults.update([device("a", True, "gone for longer")])
        faults.update([device("a", False)])
        now[0] += fine_s
        faults.update([device("a", False)])
    assert len(words) <= len(spells)
    now[0] += MAX_REST_S
    assert faults.update([device("a", False)]) == {}
    now[0] += HEALTHY_S + 1.0
    assert faults.update([device("a", True, "gone")]) == {"a": "gone"}
    assert faults.update([device("a", False)]) == {}, "at once: it had been well for long"
    assert faults.back == {"a"}


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
