"""What version 1 of signatures added: step times, growth, file I/O, device readings, descriptors."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from profiling import Machine, job

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.devices.procfs import Process
from cotenant.actors.devices.tree import JobTree
from cotenant.actors.reports import Descriptors, JobReport, RecentSteps
from cotenant.configs.settings import DeviceSettings
from cotenant.forecasting.types import DeviceActivity, OperatorMix

MIX = OperatorMix(1.0, *[0.0] * 8, launches_per_step=50.0, step=20)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def report(steps: int, *recent: RecentSteps, **more: object) -> JobReport:
    return replace(JobReport(steps, 0.0, 0.0, controls="", processes=1, recent=recent), **more)


# -- step times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "p50", "p95"),
    [
        pytest.param((10, (0.1, 0.1)), (13, (0.1, 0.1, 0.2, 0.4, 0.3)), 0.3, 0.39, id="only the steps of the window"),
        pytest.param((10, (0.1,)), (10, (0.1,)), None, None, id="no step in the window"),
        pytest.param((10, (0.1,)), (110, (0.2,) * 48), 0.2, 0.2, id="more steps than are kept"),
        pytest.param((10, (0.1,)), (11, ()), None, None, id="a step of unknown length"),
        pytest.param((10, (0.1,)), (3, (0.5, 0.5)), None, None, id="the counter began anew"),
    ],
)
def test_step_times(machine, before, after, p50, p95) -> None:
    machine.play(0.0, 0.05)
    machine.collect(report(10, RecentSteps(7, *before)))
    machine.play(0.1, 0.15)
    (signature,) = machine.collect(report(13, RecentSteps(7, *after)))
    assert signature.step_time_p50_s == pytest.approx(p50)
    assert signature.step_time_p95_s == pytest.approx(p95)


def test_step_times_of_several_processes_are_taken_together(machine) -> None:
    machine.play(0.0, 0.05)
    machine.collect(report(10, RecentSteps(7, 10, (9.0,))))
    machine.play(0.1, 0.15)
    (signature,) = machine.collect(report(14, RecentSteps(7, 11, (9.0, 0.1)), RecentSteps(8, 2, (0.3,))))
    assert signature.step_time_p50_s == pytest.approx(0.2)


def test_the_first_report_says_nothing_of_the_window(machine) -> None:
    machine.play(0.0, 0.05)
    (signature,) = machine.collect(report(10, RecentSteps(7, 10, (0.1,))))
    assert signature.step_time_p50_s is None


# -- where utilisation comes from ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "source", "age_s"),
    [
        pytest.param([(0.4, "process", 0.1), (0.4, "process", 0.3)], "process", 0.2, id="the driver by process"),
        pytest.param([(0.4, "process", 0.2), (0.4, "device", 0.0)], "device", 0.1, id="one estimate makes it one"),
        pytest.param([(0.4, "process", 0.2), (None, None, None)], "process", 0.2, id="a gap is none"),
        pytest.param([(0.4, "process", 0.2), (9.0, "device", 0.0)], "process", 0.2, id="absurd ones are left out"),
        pytest.param([(None, None, None)], None, None, id="nothing is none"),
    ],
)
def test_source_and_age_of_utilisation(machine, readings, source, age_s) -> None:
    for util, said_by, age in readings:
        machine.tick(replace(job(None, util=util), util_source=said_by, util_age_s=age))
    (signature,) = machine.collect()
    assert (signature.util_source, signature.util_age_s) == (source, pytest.approx(age_s))


def test_a_counter_is_no_estimate(machine) -> None:
    machine.tick(replace(job(0.0, util=0.5), util_source="device", util_age_s=0.5))
    machine.tick(replace(job(0.05, util=0.5), util_source="device", util_age_s=0.5))
    (signature,) = machine.collect()
    assert signature.util_source == "counter"


@pytest.mark.parametrize(
    ("readings", "source"),
    [
        pytest.param([(1e8, "process"), (1e8, None)], "process", id="of its processes"),
        pytest.param([(1e8, "process"), (1e8, "device"), (1e8, "process")], "device", id="one estimate makes it one"),
        pytest.param([(1e8, "process"), (18446744073707737660.0, "device")], "process", id="absurd ones are left out"),
        pytest.param([(1e8, "device"), (None, None)], "device", id="a gap is none"),
        pytest.param([(None, None)], None, id="nothing is none"),
    ],
)
def test_source_of_memory(machine, readings, source) -> None:
    for memory, said_by in readings:
        machine.tick(replace(job(0.0, memory), memory_source=said_by))
    (signature,) = machine.collect()
    assert (signature.memory_source, signature.memory_estimated) == (source, source == "device")
    machine.tick(job(0.0, 1e8))
    (signature,) = machine.collect()
    assert signature.memory_source == "process"  # of the next window


# -- memory growth --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "growth"),
    [
        pytest.param([1e8, 1e8, 1e8], 0.0, id="constant is 0"),
        pytest.param([1e8, 2e8, 3e8], 1e9, id="growing"),
        pytest.param([3e8, 3e8, 1e8], -1e9, id="shrinking"),
        pytest.param([1e8, None, 3e8], 1e9, id="a gap is bridged"),
        pytest.param([1e8], None, id="one reading is no growth"),
        pytest.param([None, None], None, id="nothing is none, not 0"),
        pytest.param([1e8, 18446744073707737660.0, 3e8], 1e9, id="absurd ones are left out"),
    ],
)
def test_memory_growth(machine, readings, growth) -> None:
    for value in readings:
        machine.tick(job(0.0, value))
    (signature,) = machine.collect()
    assert signature.memory_growth_bytes_s == pytest.approx(growth)


def test_growth_is_of_the_window_and_not_of_the_one_before(machine) -> None:
    machine.window(0.0, 0.0, memory=1e8)
    assert machine.window(0.0, 0.0, memory=5e8).memory_growth_bytes_s == 0.0


# -- file I/O -------------------------------------------------------------------------------------------------------


def test_io_is_a_rate_over_the_readings_there_are(machine) -> None:
    def play(*values: float | None) -> float | None:
        for value in values:
            machine.tick(replace(job(0.0), read_bytes=value, write_bytes=None))
        (signature,) = machine.collect()
        assert signature.write_bytes_s is None
        return signature.read_bytes_s

    assert play(None, None, None) is None
    assert play(1000.0, None, None) is None  # one reading is no rate
    assert play(None, 1400.0, None) == pytest.approx(1000.0)  # 400 bytes since 0.4 s ago, in the window before
    assert play(None, None, None) is None
    assert play(1400.0, 1400.0) == 0.0
    assert play(0.0) is None  # whose counter it is now is not known


IO = """
import os, subprocess, sys
read = "with open('/dev/zero', 'rb', buffering=0) as f: f.read(300_000)"
print("ready", flush=True); sys.stdin.readline()
exec(read)
subprocess.run([sys.executable, "-S", "-c", read], check=True)
open("/dev/null", "wb", buffering=0).write(bytes(50_000))
print("done", flush=True); sys.stdin.readline()
"""


def test_io_of_a_real_tree_with_a_child_that_ends() -> None:
    backend = CpuBackend(DeviceSettings(), "h", count=1)
    gpu = backend.discover()[0]
    with subprocess.Popen(
        [sys.executable, "-S", "-c", IO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        backend.watch("job", [gpu.gpu_id], child.pid)
        backend._passes._next_io_s = 0.0
        before = backend.sample().jobs[0]
        assert (before.read_bytes, before.write_bytes) == (0, 0)  # what it read before is not counted
        assert backend.sample().jobs[0].read_bytes is None  # not read each time
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        backend._passes._next_io_s = 0.0
        after = backend.sample().jobs[0]
        child.stdin.close()
    backend.close()
    assert after.read_bytes is not None
    assert after.write_bytes is not None
    assert 600_000 <= after.read_bytes < 2_000_000  # starting Python reads something too
    assert 50_000 <= after.write_bytes < 100_000


def test_a_process_that_is_gone_or_not_ours_to_look_at() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as child:
        process = Process(child.pid)
        child.wait()
        with pytest.raises(ProcessLookupError):
            process.io_bytes()
        process.close()


class Looked:
    """A process as ``JobTree.see_io`` sees it."""

    def __init__(self, *answers: tuple[int, int] | None) -> None:
        self.answers = list(answers)

    def io_bytes(self) -> tuple[int, int] | None:
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        pytest.param([(100, 10), (150, 10), (151, 12)], [(0, 0), (50, 0), (51, 2)], id="growing"),
        pytest.param([(100, 10), (40, 10), (60, 10)], [(0, 0), (0, 0), (20, 0)], id="a part is lost with a child"),
        pytest.param(
            [(100, 10), None, (500, 10), (510, 10)], [(0, 0), None, (0, 0), (10, 0)], id="forbidden meanwhile"
        ),
    ],
)
def test_io_of_a_tree_never_goes_backwards(answers, want) -> None:
    tree = JobTree("job")
    tree.members[1] = type("Member", (), {"process": Looked(*answers)})()
    got = []
    for _ in answers:
        tree.see_io()
        got.append(tree.io_bytes)
    assert got == want


# -- the whole device -----------------------------------------------------------------------------------------------


def test_device_readings_are_means_over_the_window(machine) -> None:
    for power, membw in ((100.0, 0.2), (300.0, None), (200.0, 0.4)):
        machine.devices = [DeviceSample("g0", 0.5, 1e9, activity=DeviceActivity(power_w=power, membw_util=membw))]
        machine.tick(job(0.0))
    (signature,) = machine.collect()
    assert signature.device == DeviceActivity(util=0.5, power_w=pytest.approx(200.0), membw_util=pytest.approx(0.3))
    assert machine.profiler.device_readings()[0].activity == signature.device
    machine.devices = [DeviceSample("g0", None, None, lost=True)]
    machine.tick(job(0.0))
    assert machine.profiler.device_readings()[0].activity is None


def test_a_device_that_says_nothing_gives_nothing(machine) -> None:
    machine.devices = [DeviceSample("g0", None, None)]
    assert machine.window(0.0, 0.1).device is None


@pytest.mark.parametrize("value", [2.5, -0.1, math.nan, math.inf, 18446744073707737660.0])
def test_absurd_device_readings_are_dropped_and_counted(machine, value) -> None:
    machine.devices = [DeviceSample("g0", 0.5, 1e9, activity=DeviceActivity(sm_active=value))]
    signature = machine.window(0.0, 0.1)
    assert signature.device == DeviceActivity(util=0.5)
    assert machine.profiler.rejected == 2


def test_a_device_sample_of_an_older_agent_is_read() -> None:
    old = object.__new__(DeviceSample)
    old.__setstate__(["g0", 0.5, 1e9, False, "note"])
    assert old == DeviceSample("g0", 0.5, 1e9, note="note")
    assert pickle.loads(pickle.dumps(old)) == old


# -- descriptors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hints", "said", "want"),
    [
        ({}, {}, (None, None)),
        ({}, {"batch_size": 16, "framework": "torch"}, (16, "torch")),
        ({"job": Descriptors(32, "jax")}, {"batch_size": 16, "framework": "torch"}, (32, "jax")),
        ({"job": Descriptors(32)}, {"framework": "torch"}, (32, "torch")),
        ({"other": Descriptors(32)}, {}, (None, None)),
    ],
)
def test_hints_come_before_what_was_observed(machine, hints, said, want) -> None:
    machine.play(0.0, 0.1)
    (signature,) = machine.profiler.collect({"job": report(3, **said)}, machine.shares, hints)
    assert (signature.batch_size, signature.framework) == want


def test_the_mix_is_the_jobs_own(machine) -> None:
    machine.play(0.0, 0.1)
    (signature,) = machine.collect(report(3, mix=MIX))
    assert signature.mix == MIX
