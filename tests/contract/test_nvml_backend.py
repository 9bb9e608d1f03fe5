"""The ``nvml`` backend on the stand-in: what it finds, what it reads, and everything a driver does to it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from nvml_host import FOUR, GIB, Clock, NvmlHost, all_read, device, job, until
from nvml_standin import Standin
from nvml_standin.inprocess import loaded

from cotenant.actors.devices.base import SILENT_LOST_S, Sample
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import DeviceSettings, ProfilerSettings


@pytest.fixture
def host(standin: Standin, library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlHost]:
    monkeypatch.setattr("cotenant.actors.devices.nvml.crew.SILENT_LOST_S", 2.0)
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    host = NvmlHost(standin, library, processes)
    yield host
    host.close()
    for process in processes:
        process.kill()
        process.wait()


# -- what it finds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, None, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        (None, 2, ["GPU-0", "GPU-1"]),
        (None, 9, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        ("2,0", None, ["GPU-2", "GPU-0"]),
        ("2,0", 1, ["GPU-2"]),
        ("GPU-3", None, ["GPU-3"]),
        ("0,1,8,2,3", None, ["GPU-0", "GPU-1"]),
    ],
)
def test_whole_gpus(host: NvmlHost, visible: str | None, count: int | None, expected: list[str]) -> None:
    gpus = host.start(*FOUR, visible=visible, counted=count).discover()
    assert [gpu.gpu_id for gpu in gpus] == expected
    assert [gpu.index for gpu in gpus] == list(range(len(expected)))
    assert [dict(gpu.visible_env) for gpu in gpus] == [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in expected]


def test_what_jobs_may_use_is_what_the_driver_leaves(host: NvmlHost) -> None:
    lines = (f"gpu 0 uuid=GPU-0 name=NVIDIA_H100_80GB_HBM3 total={80 * GIB} reserved={GIB}",)
    (gpu,) = host.start(*lines).discover()
    assert (gpu.gpu_type, gpu.memory_bytes, gpu.physical_memory_bytes) == ("NVIDIA H100 80GB HBM3", 79 * GIB, 80 * GIB)
    (gpu,) = host.start(*lines, memory_bytes=10 * GIB).discover()
    assert (gpu.memory_bytes, gpu.physical_memory_bytes) == (10 * GIB, 80 * GIB)
    with pytest.raises(ValueError, match=f"device.memory_bytes: {80 * GIB} is not accepted; give 1 to {79 * GIB}"):
        host.start(*lines, memory_bytes=80 * GIB)


MIG = (
    "gpu 0 uuid=GPU-0 mig=1",
    f"instance 0 0 MIG-a total={5 * GIB} gi=9 ci=1 name=NVIDIA_H100_MIG_1g.10gb",
    f"instance 0 3 MIG-d total={40 * GIB} used={GIB} gi=2",
    "gpu 1 uuid=GPU-1",
    "gpu 2 uuid=GPU-2 mig=1",
)


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, None, ["MIG-a", "MIG-d", "GPU-1"]),
        (None, 1, ["MIG-a", "MIG-d"]),
        ("1,0", None, ["GPU-1", "MIG-a", "MIG-d"]),
        ("MIG-d", None, ["MIG-d"]),
        ("MIG-d,MIG-a", 1, ["MIG-d", "MIG-a"]),
        ("MIG-GPU-0/9/1", None, ["MIG-a"]),
    ],
)
def test_instances_with_holes_between_them(
    host: NvmlHost, visible: str | None, count: int | None, expected: list[str]
) -> None:
    backend = host.start(*MIG, visible=visible, counted=count)
    assert [gpu.gpu_id for gpu in backend.discover()] == expected
    if visible is None and count is None:
        assert backend.notes == ("GPU 2: MIG is on, but it has no instance",)
        assert backend.discover()[0].gpu_type == "NVIDIA H100 MIG 1g.10gb"


def test_a_gpu_that_is_lost_or_hangs_at_the_start_is_left_out(host: NvmlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.actors.devices.nvml.discovery.TIMEOUT_S", 0.3)
    backend = host.start(*FOUR, "fault * 15 2", "hang nvmlDeviceGetMigMode 0")
    assert [gpu.gpu_id for gpu in backend.discover()] == ["GPU-1", "GPU-3"]
    assert [note.partition(":")[0] for note in backend.notes] == ["GPU 0 is left out", "GPU 2 is left out"]


def test_gpus_that_were_left_out_are_found_when_they_answer(host: NvmlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is lost at the start and one hangs; no further call is made into the one that hangs."""
    monkeypatch.setattr("cotenant.actors.devices.nvml.discovery.TIMEOUT_S", 0.3)
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    before = set(threading.enumerate())  # other tests leave threads that wait
    backend = host.start(*FOUR, "fault * 15 2", "hang nvmlDeviceGetMigMode 0")
    profiler = Profiler(backend, ProfilerSettings())
    stuck = "GPU 0 is left out: the driver still does not answer"
    until(backend, lambda _: stuck in backend.notes, "another look")
    calls = [thread for thread in set(threading.enumerate()) - before if thread.name == "GPU 0 calls"]
    assert len(calls) == 1
    host.show(*FOUR, "hang nvmlDeviceGetMigMode 0")
    until(backend, lambda _: len(backend.discover()) == 3, "the lost one to be found")
    assert [(gpu.gpu_id, gpu.index) for gpu in backend.discover()] == [("GPU-1", 0), ("GPU-3", 1), ("GPU-2", 2)]
    host.show(*FOUR)
    until(backend, lambda _: len(backend.discover()) == 4, "the one that hung to be found")
    assert backend.notes == ()
    backend.watch("a", ["GPU-0"], host.pids[0])
    until(backend, all_read, "all of them to be read")
    profiler.tick()
    assert {device.gpu_id for device in profiler.device_readings()} == {f"GPU-{index}" for index in range(4)}


@pytest.mark.parametrize(
    ("lines", "visible", "settings", "says"),
    [
        (FOUR, "", {}, "this host has 0 GPUs .CUDA_VISIBLE_DEVICES is ''"),
        (FOUR, "0", {"count": 2}, "device.count: 2 is not accepted; this host has 1 GPUs"),
        (("gpu 0", "fault nvmlDeviceGetCount_v2 999"), None, {}, "device.backend: 'nvml' is not accepted on this host"),
        (("gpu 0 uuid=GPU-0", "fault nvmlDeviceGetMemoryInfo 3"), None, {}, "set device.memory_bytes"),
    ],
)
def test_a_host_it_cannot_work_on_says_why(
    host: NvmlHost, lines: tuple[str, ...], visible: str | None, settings: dict[str, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        host.start(*lines, visible=visible, **settings)


def test_a_gpu_that_does_not_tell_its_memory_needs_the_setting(host: NvmlHost) -> None:
    backend = host.start("gpu 0 uuid=GPU-0 util=30", "fault nvmlDeviceGetMemoryInfo 3", memory_bytes=4 * GIB)
    assert backend.discover()[0].memory_bytes == 4 * GIB
    sample = until(backend, lambda sample: sample.devices[0].util is not None, "a reading")
    assert (sample.devices[0].util, sample.devices[0].memory_bytes, sample.devices[0].lost) == (0.3, None, False)


# -- what it reads --------------------------------------------------------------------------------------------------


def test_two_jobs_are_told_apart(host: NvmlHost) -> None:
    """Memory by process comes from both lists and is never swapped; bytes never from the utilisation of memory."""
    backend = host.start(
        f"gpu 0 uuid=GPU-0 util=70 memutil=50 used={8 * GIB} gpm=0",
        f"process 0 pid=PID0 memory={24576 << 20} sm=40 list=compute",
        f"process 0 pid=PID1 memory={600 << 20} sm=30 list=mps",
        "process 0 pid=4294967295 memory=5 sm=0",
        f"process 0 pid={_dead_pid()} memory=77",
    )
    backend.watch("a", ["GPU-0"], host.pids[0])
    backend.watch("b", ["GPU-0"], host.pids[1])
    sample = until(backend, lambda sample: job(sample, "a").util is not None, "readings of the jobs")
    a, b = job(sample, "a"), job(sample, "b")
    assert (a.util, a.util_source, b.util, b.util_source) == (0.4, "process", 0.3, "process")
    assert (b.memory_bytes, device(sample, "GPU-0").memory_bytes) == (600 << 20, 8 * GIB)
    assert a.memory_bytes is None  # more than the 16 GiB there are
    host.show(
        "gpu 0 uuid=GPU-0",
        "process 0 pid=PID0 memory=24576 list=both",
        "process 0 pid=PID1 memory=600 list=both",
    )
    sample = until(backend, lambda sample: job(sample, "a").memory_bytes == 24576, "the lists to be read again")
    assert job(sample, "b").memory_bytes == 600


@pytest.mark.parametrize("fails", ["Compute", "MPSCompute"])
def test_one_list_alone_says_of_nobody_that_he_has_no_memory(host: NvmlHost, fails: str) -> None:
    """The other list may hold him: that it could not be read is no 0."""
    in_list = "compute" if fails == "Compute" else "mps"
    lines = (f"gpu 0 uuid=GPU-0 util=60 used={GIB}", f"process 0 pid=PID0 memory=100 list={in_list}")
    backend = host.start(*lines)
    backend.watch("a", ["GPU-0"], host.pids[0])
    backend.watch("b", ["GPU-0"], host.pids[1])
    until(backend, lambda sample: job(sample, "a").memory_bytes == 100, "the lists to be read")
    host.show(*lines, f"fault nvmlDeviceGet{fails}RunningProcesses_v3 999")
    sample = until(backend, lambda sample: job(sample, "a").memory_bytes != 100, "the lists to be read again")
    assert (job(sample, "a").memory_bytes, job(sample, "b").memory_bytes) == (None, None)
    assert backend.contexts(["GPU-0"], host.pids) is None


def _dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("gpu", "memory", "util"),
    [
        ("used=18446744073707737660", None, 0.0),
        ("total=1000 used=2000", None, 0.0),
        ("total=1000 used=500 util=250", 500, None),
    ],
)
def test_what_cannot_be_true_is_missing(host: NvmlHost, gpu: str, memory: int | None, util: float | None) -> None:
    backend = host.start("gpu 0 uuid=GPU-0")
    until(backend, all_read, "the first readings")
    host.show(f"gpu 0 uuid=GPU-0 {gpu}")
    found = until(
        backend,
        lambda sample: (sample.devices[0].memory_bytes, sample.devices[0].util) == (memory, util),
        "the absurd readings to be left out",
    )
    assert not found.devices[0].lost


@pytest.mark.parametrize("code", [3, 4, 6, 7, 13, 999])
def test_utilisation_that_is_not_told_by_process(host: NvmlHost, code: int) -> None:
    """NotFound and InsufficientSize: nothing new. NotSupported and the like: a part of the device's, an estimate."""
    backend = host.start(
        "gpu 0 uuid=GPU-0 util=60",
        "process 0 pid=PID0 memory=100",
        f"fault nvmlDeviceGetProcessUtilization {code}",
    )
    backend.watch("a", ["GPU-0"], host.pids[0])
    sample = until(backend, lambda sample: job(sample, "a").util is not None, "an estimate")
    assert (job(sample, "a").util, job(sample, "a").util_source) == (0.6, "device")


ACTIVITY = (
    "gpu 0 uuid=GPU-0 memutil=50 energy_rate=250 tx_rate=1e6 rx_rate=2e6 nvlink_tx_rate=3e6 nvlink_rx_rate=4e6"
    " clock=1980 temp=61 reasons=36",
    *(f"metric 0 {number} {value}" for number, value in ((2, 61), (5, 42.5), (10, 33), (12, 8))),
    "metric 0 11 7 3",
)


def activity(backend: NvmlBackend, names: Sequence[str]) -> dict[str, float | None]:
    """The newest value of each, once all were told."""
    seen: dict[str, float | None] = {}

    def complete(sample: Sample) -> bool:
        told = sample.devices[0].activity
        if told is not None:
            seen.update({name: value for name in names if (value := getattr(told, name)) is not None})
        return len(seen) == len(names)

    until(backend, complete, f"{sorted(names)} to be told")
    return seen


def test_what_the_device_tells_beyond_that(host: NvmlHost) -> None:
    backend = host.start(*ACTIVITY)
    counted = {"sm_active": 0.61, "tensor_active": 0.425, "membw_util": 0.33, "fp32_active": 0.08}
    assert activity(backend, list(counted)) == counted
    slow = {"sm_clock_mhz": 1980.0, "temperature_c": 61.0}
    rates = {
        "pcie_tx_bytes_s": 1e6,
        "pcie_rx_bytes_s": 2e6,
        "nvlink_tx_bytes_s": 3e6,
        "nvlink_rx_bytes_s": 4e6,
        "power_w": 250.0,
    }
    # The stand-in counts by the wall clock, the backend by the monotonic one, and between the two is a busy machine.
    assert activity(backend, [*slow, *rates]) == pytest.approx(slow | rates, rel=0.5)
    sample = backend.sample()
    assert sample.devices[0].note == "clocks held down: power cap, heat"
    assert sample.devices[0].activity is None or sample.devices[0].activity.fp64_active is None


@pytest.mark.parametrize(
    ("lines", "membw"),
    [
        (("gpu 0 uuid=GPU-0 gpm=0 memutil=50",), 0.5),
        (("gpu 0 uuid=GPU-0 memutil=50", "fault nvmlGpmSampleGet 4"), 0.5),  # refused in a container
        (("gpu 0 uuid=GPU-0 memutil=50", "fault nvmlGpmQueryDeviceSupport 13"), 0.5),
    ],
)
def test_without_performance_counters(host: NvmlHost, lines: tuple[str, ...], membw: float) -> None:
    assert activity(host.start(*lines), ["membw_util"]) == {"membw_util": membw}


def test_an_old_driver_lacks_functions(tmp_path: Path) -> None:
    old = Standin(
        tmp_path,
        [
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlGpmQueryDeviceSupport",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlEventSetCreate",
        ],
    )
    old.set(f"gpu 0 uuid=GPU-0 total={16 * GIB} used=500 util=40 memutil=20 power=90000 energy_rate=0")
    process = subprocess.Popen(["sleep", "100"])
    with loaded(old) as library:
        backend = NvmlBackend(DeviceSettings(), library=library)
        backend.watch("a", ["GPU-0"], process.pid)
        sample = until(backend, lambda sample: job(sample, "a").util is not None, "an estimate")
        assert activity(backend, ["membw_util", "power_w"]) == {"membw_util": 0.2, "power_w": 90.0}
        backend.close()
    process.kill()
    process.wait()
    assert (sample.devices[0].util, sample.devices[0].memory_bytes) == (0.4, 500)
    # The only job of the device has what is in use there: an estimate, as its utilisation.
    one = job(sample, "a")
    assert (one.memory_bytes, one.memory_source, one.util_source) == (500, "device", "device")


def test_an_instance_has_its_own_memory_processes_and_utilisation(host: NvmlHost) -> None:
    backend = host.start(*MIG, "metric 0 1 55", "process 0 pid=PID0 memory=300 instance=3", visible="0")
    backend.watch("a", ["MIG-d"], host.pids[0])
    backend.watch("b", ["MIG-a"], host.pids[1])
    sample = until(backend, lambda sample: job(sample, "a").util is not None, "utilisation of the instance")
    assert (device(sample, "MIG-a").memory_bytes, device(sample, "MIG-d").memory_bytes) == (0, GIB)
    assert (job(sample, "a").memory_bytes, job(sample, "b").memory_bytes) == (300, 0)
    assert (job(sample, "a").util, job(sample, "a").util_source) == (0.55, "device")
    assert job(sample, "b").util == 0.0  # it has no process there


# -- trouble --------------------------------------------------------------------------------------------------------


def test_one_of_four_is_lost_and_comes_back(host: NvmlHost) -> None:
    backend = host.start(*FOUR)
    until(backend, all_read, "all four to be read")
    host.show(*FOUR, "fault * 15 2")
    sample = until(backend, lambda sample: device(sample, "GPU-2").lost, "the loss to be seen")
    assert device(sample, "GPU-2").note.startswith("the GPU is lost (nvml")
    assert [each.memory_bytes for each in sample.devices] == [0, GIB, None, 3 * GIB]
    assert [each.lost for each in sample.devices] == [False, False, True, False]
    host.show(*FOUR)
    until(backend, all_read, "the GPU to be used again")


def test_a_call_that_never_returns_holds_up_one_gpu_only(host: NvmlHost) -> None:
    clock = Clock()
    backend = host.start(*FOUR, "process 2 pid=PID0 memory=100", "process 1 pid=PID1 memory=200", clock=clock)
    backend.watch("a", ["GPU-2"], host.pids[0])
    backend.watch("b", ["GPU-1"], host.pids[1])
    until(backend, lambda sample: all_read(sample) and job(sample, "a").memory_bytes == 100, "all to be read", clock)
    host.show(*FOUR, "process 1 pid=PID1 memory=200", "hang nvmlDeviceGetMemoryInfo 2")
    until(backend, lambda sample: device(sample, "GPU-2").memory_bytes is None, "silence to be seen", clock)

    def others_read(sample: Sample) -> bool:
        return job(sample, "b").memory_bytes == 200 and device(sample, "GPU-3").memory_bytes == 3 * GIB

    sample = until(backend, others_read, "the others to be read at that moment")
    assert not device(sample, "GPU-2").lost
    assert device(sample, "GPU-2").note.startswith("the driver has not answered for 1.")
    assert (job(sample, "a").memory_bytes, job(sample, "a").util) == (None, None)
    clock.now_s += SILENT_LOST_S
    assert device(backend.sample(), "GPU-2").lost
    sample = until(backend, others_read, "the others to be read at that moment")
    assert [each.lost for each in sample.devices] == [False, False, True, False]
    host.show(*FOUR)
    until(backend, all_read, "the GPU to be used again", clock)


def test_an_instance_that_is_destroyed_takes_no_other_with_it(host: NvmlHost) -> None:
    """Its place in the list goes to another instance before it is made again."""
    backend = host.start(*MIG, visible="0")
    until(backend, all_read, "both instances to be read")
    others = [line for line in MIG if "MIG-a" not in line]
    host.show(*others, "instance 0 0 MIG-e used=7")
    sample = until(backend, lambda sample: device(sample, "MIG-a").lost, "its loss to be seen")
    assert (device(sample, "MIG-d").lost, device(sample, "MIG-d").memory_bytes) == (False, GIB)
    host.show(*others, "instance 0 0 MIG-e used=7", "instance 0 1 MIG-a used=5")
    sample = until(backend, all_read, "it to be used again")
    assert device(sample, "MIG-a").memory_bytes == 5


def test_instances_that_are_made_later_are_found(host: NvmlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose instances are managed, and on one that had none; what is known keeps its number."""
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    backend = host.start(*MIG)
    host.show(*MIG, "instance 0 1 MIG-b used=3", "instance 2 0 MIG-z used=4")
    until(backend, lambda _: len(backend.discover()) == 5, "the new ones to be found")
    found = [(gpu.gpu_id, gpu.index, gpu.visible_env["CUDA_VISIBLE_DEVICES"]) for gpu in backend.discover()]
    names = ["MIG-a", "MIG-d", "GPU-1", "MIG-b", "MIG-z"]
    assert found == [(name, index, name) for index, name in enumerate(names)]
    assert backend.notes == ()
    backend.watch("a", ["MIG-b"], host.pids[0])
    sample = until(backend, all_read, "all of them to be read")
    assert [each.memory_bytes for each in sample.devices] == [0, GIB, 0, 3, 4]


def test_a_new_instance_that_is_too_small_is_a_note(host: NvmlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    backend = host.start(*MIG, visible="0", memory_bytes=GIB)
    host.show(*MIG, "instance 0 1 MIG-b total=1000")
    until(backend, lambda _: any("1000, the memory of MIG-b" in note for note in backend.notes), "the note")
    assert [gpu.gpu_id for gpu in backend.discover()] == ["MIG-a", "MIG-d"]


def test_a_gpu_whose_mig_is_switched_keeps_what_is_known_of_it(host: NvmlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instances would be announced beside the GPU that they are parts of."""
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    backend = host.start(*MIG)
    host.show(*(line.replace("GPU-1", "GPU-1 mig=1") for line in MIG), "instance 1 0 MIG-x", "instance 2 0 MIG-z")
    until(backend, lambda _: len(backend.discover()) == 4, "the other new one to be found")
    assert [gpu.gpu_id for gpu in backend.discover()] == ["MIG-a", "MIG-d", "GPU-1", "MIG-z"]


@pytest.mark.parametrize(
    ("broken", "says", "mended"),
    [
        (("gpu 0 uuid=GPU-0 recovery=1",), "the driver asks for a reset of the GPU", True),
        (("gpu 0 uuid=GPU-0 recovery=9",), "the driver asks for recovery action 9", True),
        (("gpu 0 uuid=GPU-0", "xid 0 79"), "XID 79 (GPU has fallen off the bus): the GPU must be reset", False),
        (("gpu 0 uuid=GPU-0", "fault nvmlDeviceGetMemoryInfo 16 0"), "the GPU is lost (nvmlDeviceGetMemoryInfo", True),
        (("gpu 0 uuid=GPU-0", "fault nvmlDeviceGetMemoryInfo 999 0"), "the driver has not answered for ", True),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(host: NvmlHost, broken: tuple[str, ...], says: str, mended: bool) -> None:
    backend = host.start("gpu 0 uuid=GPU-0 recovery=0" if "recovery" in broken[0] else "gpu 0 uuid=GPU-0")
    until(backend, all_read, "the first readings")
    host.show(*broken)
    sample = until(backend, lambda sample: sample.devices[0].lost, "the fault to be seen")
    assert sample.devices[0].note.startswith(says)
    assert (sample.devices[0].util, sample.devices[0].memory_bytes, sample.devices[0].activity) == (None, None, None)
    host.show("gpu 0 uuid=GPU-0 recovery=0" if "recovery" in broken[0] else "gpu 0 uuid=GPU-0")
    if mended:
        until(backend, all_read, "the GPU to be used again")
    else:
        for _ in range(3):
            assert backend.sample().devices[0].lost


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("gpu 0 uuid=GPU-0 remap_failed=1", "memory rows could not be remapped: the board should be replaced"),
        ("gpu 0 uuid=GPU-0 ecc=3", "3 uncorrected memory errors"),
    ],
)
def test_errors_that_are_worth_knowing(host: NvmlHost, line: str, note: str) -> None:
    backend = host.start("gpu 0 uuid=GPU-0")
    until(backend, all_read, "the first readings")
    host.show(line)
    until(backend, lambda sample: sample.devices[0].note == note, "the errors to be noted")


def test_an_error_of_a_program_drains_nothing(host: NvmlHost) -> None:
    backend = host.start("gpu 0 uuid=GPU-0", "xid 0 13")
    sample = until(backend, lambda sample: sample.devices[0].note != "", "the error to be noted")
    assert (sample.devices[0].note, sample.devices[0].lost) == ("XID 13", False)


def test_which_processes_have_memory_on_which_gpus(host: NvmlHost) -> None:
    clock = Clock()
    held = ("process 0 pid=PID0 memory=100", "process 1 pid=PID0 memory=20", "process 1 pid=PID1 memory=3")
    backend = host.start(*FOUR, *held, clock=clock)
    one, two = host.pids
    until(backend, all_read, "all GPUs are read", clock)

    def told(gpu_ids: tuple[str, ...], *pids: int) -> object:
        found = backend.contexts(gpu_ids, pids)
        return None if found is None else dict(found.memory)

    assert told(("GPU-0", "GPU-1"), one, two) == {one: 120, two: 3}
    assert told(("GPU-1",), two) == {two: 3}
    assert told(("GPU-2",), one, two) == {}
    assert told(("GPU-0", "GPU-9"), one) is None, "it has no such GPU"
    before = clock.now_s
    unknown = f"process 1 pid=PID1 memory={(1 << 64) - 1}"
    host.show(*FOUR[:1], FOUR[1].replace("used=", "used=1"), *FOUR[2:], held[0], unknown)
    until(backend, lambda _: told(("GPU-1",), one, two) == {two: None}, "what is in use has changed", clock)
    found = backend.contexts(("GPU-1",), (two,))
    assert found is not None
    assert before <= found.listed_s <= found.read_s <= clock.now_s
    host.show(*FOUR, "fault * 15 1")
    until(backend, lambda _: told(("GPU-0", "GPU-1"), one) is None, "one of them is lost", clock)
    assert told(("GPU-0",), one) is not None
