"""What a host agent tells of GPUs that cannot be used."""

from __future__ import annotations

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.gpufaults import NO_REASON, GpuFaults


def device(gpu_id: str, lost: bool, note: str = "") -> DeviceSample:
    return DeviceSample(gpu_id, util=None, memory_bytes=None, lost=lost, note=note)


def test_a_fault_keeps_its_first_words_until_the_gpu_works() -> None:
    faults = GpuFaults()
    told = [
        dict(faults.update([device("a", lost, note), device("b", False, "busy")]))
        for lost, note in ((False, ""), (True, "silent for 5.1 s"), (True, "silent for 6.1 s"), (False, ""), (True, ""))
    ]
    assert told == [{}, {"a": "silent for 5.1 s"}, {"a": "silent for 5.1 s"}, {}, {"a": NO_REASON}]
