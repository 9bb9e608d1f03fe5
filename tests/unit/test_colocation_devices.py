"""Readings of the measurement suite's devices: the core of this machine, and a GPU played by the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from statistics import median

import pytest
from benchmarks.colocation.devices import MemberClock, open_device
from benchmarks.colocation.readings import DeviceError, Ticker, mean, peak
from nvml_standin import Standin
from support import wait_until

from cotenant.actors.devices.nvml.watchdog import Hung, Watchdog

SPIN = "import time; print('go', flush=True)\nwhile True: pass"
DOZE = "import time; print('go', flush=True)\ntime.sleep(60)"


@pytest.fixture
def child():
    started = []

    def start(code, core=None):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout.readline() == b"go\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_another_device_is_refused():
    with pytest.raises(DeviceError, match="'tpu' is not accepted; give cpu or cuda"):
        open_device("tpu")


def test_no_gpu_and_no_dry_run_is_an_error():
    with pytest.raises(DeviceError, match="--dry-run goes through everything without one"):
        open_device("cuda")


class TestCpu:
    def test_identity_has_the_card_s_fields(self):
        identity = open_device("cpu").identity()
        assert identity["gpu_type"] == "cpu-core"
        assert identity["host_cores"] == len(os.sched_getaffinity(0))
        assert identity["memory_bytes"] > 2**28
        assert identity["driver"] is None and identity["cuda"] is None

    def test_reads_members_and_nobody_else(self, child):
        device = open_device("cpu")
        busy, idle = child(SPIN, device.core), child(DOZE)
        device.start_sampling({"busy": busy.pid, "idle": idle.pid})
        cpu_before = MemberClock(busy.pid)
        used_ns = cpu_before.read()[0]
        began = time.monotonic()
        time.sleep(0.6)
        seconds = time.monotonic() - began
        used_s = (cpu_before.read()[0] - used_ns) / 1e9
        readings = device.stop_sampling()
        cpu_before.close()
        assert readings.members["busy"].util_mean == pytest.approx(used_s / seconds, abs=0.1)
        assert readings.members["busy"].util_peak >= readings.members["busy"].util_mean - 0.1
        assert readings.members["idle"].util_mean < 0.05
        assert readings.members["idle"].memory_bytes > 2**20
        assert readings.ticks >= 4
        assert readings.cost_s < 0.05 * readings.seconds
        assert readings.power_w is None and readings.sm_active is None
        assert readings.notes == ()

    def test_sees_foreign_load_on_its_core_only(self, child):
        device = open_device("cpu")
        member, stranger = child(DOZE), child(SPIN, device.core)
        device.start_sampling({"member": member.pid})
        used_ns = time.clock_gettime_ns((~stranger.pid << 3) | 2)
        time.sleep(0.6)
        used_s = (time.clock_gettime_ns((~stranger.pid << 3) | 2) - used_ns) / 1e9
        readings = device.stop_sampling()
        assert readings.foreign_s >= used_s - 0.05

    def test_a_member_that_dies_has_no_readings(self, child):
        device = open_device("cpu")
        process = child(DOZE)
        device.start_sampling({"a": process.pid, "b": os.getpid(), "c": 2**22 + 1})
        process.kill()
        process.wait()
        time.sleep(0.25)
        readings = device.stop_sampling()
        assert readings.members["a"].util_mean is None and readings.members["c"].memory_bytes is None
        assert readings.members["b"].util_mean is not None
        assert readings.notes == (
            "c: its process had ended before the window",
            "a: its process ended during the window",
        )

    def test_start_and_stop_alternate(self):
        device = open_device("cpu")
        with pytest.raises(RuntimeError, match="has not been started"):
            device.stop_sampling()
        device.start_sampling({})
        with pytest.raises(RuntimeError, match="started already"):
            device.start_sampling({})
        device.close()
        device.close()


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    return Standin(tmp_path_factory.mktemp("standin"))


SAMPLE = """
import dataclasses, os, time
from benchmarks.colocation.devices import open_device
device = open_device("cuda", dry_run=True)
device.start_sampling({"a": 10, "b": 11})
time.sleep(%s)
readings = device.stop_sampling()
device.close()
found = dataclasses.asdict(readings) | {"identity": device.identity(), "env": device.member_env()}
print(json.dumps(found), flush=True)
os._exit(0)  # a thread may be stuck in the stand-in for ever
"""
WELL = (
    "driver 580.1",
    "gpu 0 uuid=GPU-a name=NVIDIA_H100 total=80000 used=600 util=55 power=300000 energy_rate=250 clock=1980 temp=61"
    " tx_rate=1000000 rx_rate=3000000",
    "process 0 pid=10 memory=24576 sm=40 list=mps",
    "process 0 pid=11 memory=600 sm=20",
    "metric 0 2 61.5",
    "metric 0 5 20",
    "metric 0 10 33",
    "metric 0 12 10",
)


def sampled(standin, *lines, seconds=0.75):
    standin.set(*lines)
    return standin.python(SAMPLE % seconds)


class TestCuda:
    def test_reads_everything_a_healthy_gpu_tells(self, standin):
        found = sampled(standin, *WELL)
        assert found["members"]["a"]["util_mean"] == pytest.approx(0.4)
        assert found["members"]["a"]["util_peak"] == pytest.approx(0.4)
        assert found["members"]["a"]["memory_bytes"] == 24576
        assert found["members"]["b"]["util_mean"] == pytest.approx(0.2)
        assert found["members"]["b"]["memory_bytes"] == 600
        assert 0 <= found["members"]["a"]["util_age_s"] < 0.3
        expected = {"device_util": 0.55, "sm_active": 0.615, "tensor_active": 0.2, "membw_util": 0.33}
        assert {key: found[key] for key in expected} == pytest.approx(expected)
        assert found["power_w"] == pytest.approx(250, rel=0.05)
        assert found["pcie_rx_bytes_s"] == pytest.approx(3e6, rel=0.05)
        assert found["pcie_tx_bytes_s"] == pytest.approx(1e6, rel=0.05)
        assert (found["clock_mhz"], found["temperature_c"], found["foreign_s"]) == (1980, 61, None)
        assert found["notes"] == []
        identity = found["identity"]
        assert (identity["gpu_type"], identity["gpu_uuid"], identity["driver"]) == ("NVIDIA H100", "GPU-a", "580.1")
        assert identity["memory_bytes"] == 80000
        assert found["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-a"

    def test_without_nvml_everything_is_missing_and_says_so(self, standin, tmp_path):
        found = standin.python(SAMPLE % 0.2, LD_LIBRARY_PATH=str(tmp_path))
        assert found["device_util"] is None and found["members"]["a"]["memory_bytes"] is None
        assert found["identity"]["gpu_type"] is None
        assert "NVML Shared Library Not Found" in found["notes"][0]

    @pytest.mark.parametrize("code", [9, 18, 999])
    def test_a_driver_that_does_not_start_is_a_note(self, standin, code):
        found = sampled(standin, f"fault nvmlInit {code}", seconds=0.1)
        assert found["device_util"] is None
        assert "NVML cannot be started" in found["notes"][0]

    @pytest.mark.parametrize(
        ("lines", "missing", "note"),
        [
            (["fault nvmlDeviceGetProcessUtilization 3"], ["a.util_mean", "b.util_peak"], "Not Supported"),
            (["fault nvmlDeviceGetProcessUtilization 7"], ["a.util_mean"], None),
            (["fault nvmlGpmSampleGet 4"], ["sm_active", "membw_util"], "Insufficient Permissions"),
            (["metric 0 5 20 4"], ["tensor_active"], "GPM tensor_active"),
            (["fault nvmlDeviceGetFieldValues 3"], ["pcie_rx_bytes_s", "pcie_tx_bytes_s"], "Not Supported"),
            (["fault nvmlDeviceGetUtilizationRates 999"], ["device_util"], "Unknown Error"),
            (["fault * 15"], ["device_util", "power_w", "a.memory_bytes", "clock_mhz"], "GPU is lost"),
            (["gpu 0 total=80000 power=4294967295 temp=4000"], ["power_w", "temperature_c"], None),
            (["process 0 pid=10 memory=18446744073707737660 sm=250"], ["a.util_mean", "a.memory_bytes"], None),
        ],
    )
    def test_what_is_absurd_or_refused_is_missing_and_the_rest_is_not(self, standin, lines, missing, note):
        kept = [line for line in WELL if not any(line.split()[:3] == new.split()[:3] for new in lines)]
        if lines[0].startswith("gpu"):
            kept = [line for line in kept if not line.startswith("gpu")] + [
                "fault nvmlDeviceGetTotalEnergyConsumption 3"
            ]
        if lines[0].startswith("metric"):
            kept = [line for line in kept if line != "metric 0 5 20"]
        found = sampled(standin, *kept, *lines)
        for name in missing:
            member, _, field = name.rpartition(".")
            value = found["members"][member][field] if member else found[field]
            assert value is None, name
        assert note is None or any(note in text for text in found["notes"])
        if "fault * 15" not in lines:
            assert found["members"]["b"]["memory_bytes"] == 600

    def test_an_old_driver(self, tmp_path):
        old = Standin(tmp_path, ["nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMPSComputeRunningProcesses_v3"])
        found = sampled(old, *WELL)
        assert found["sm_active"] is None and found["device_util"] == pytest.approx(0.55)
        assert found["members"]["b"]["memory_bytes"] == 600  # from the other list

    def test_a_hung_driver_does_not_block(self, standin):
        standin.set(*WELL, "hang nvmlDeviceGetPowerUsage")
        code = "import benchmarks.colocation.nvml as n\nn.GpuReader.__init__.__defaults__ = (None, 0.3)\n"
        began = time.monotonic()
        found = standin.python(code + SAMPLE % 0.6)
        assert time.monotonic() - began < 10
        assert found["device_util"] is None
        assert any("did not return within 0.3 s" in note for note in found["notes"])
        assert found["identity"]["gpu_type"] == "NVIDIA H100"

    def test_shares_from_before_the_window_are_dropped(self, standin):
        lines = [line for line in WELL if "pid=10" not in line]
        found = sampled(standin, *lines, "process 0 pid=10 memory=5 sm=40 time=1")
        assert found["members"]["a"]["util_mean"] is None
        assert found["members"]["b"]["util_mean"] == pytest.approx(0.2)

    def test_a_share_is_held_for_a_second(self, standin):
        standin.set(*WELL)
        later = [line for line in WELL if "pid=10" not in line]
        change = f"time.sleep(0.5)\nopen(os.environ['NVML_STANDIN_STATE'], 'w').write({chr(10).join(later)!r})\n"
        found = standin.python((SAMPLE % 1.6).replace("time.sleep(", change + "time.sleep(", 1))
        assert found["members"]["a"]["util_mean"] == pytest.approx(0.4)
        assert 0.3 < found["members"]["a"]["util_age_s"] < 1.0
        assert found["members"]["b"]["util_age_s"] < found["members"]["a"]["util_age_s"]

    def test_foreign_numbers_of_a_container_are_noted(self, standin):
        found = sampled(standin, "gpu 0", "process 0 pid=77 memory=1 sm=1", seconds=0.2)
        assert any("not by those of this container" in note for note in found["notes"])


class TestTicker:
    def test_ticks_ten_times_a_second(self):
        times = []
        ticker = Ticker(lambda: times.append(time.monotonic()))
        wait_until(lambda: len(times) >= 6, 10.0, "six ticks")
        assert ticker.stop()
        assert times[5] - times[0] > 0.45
        assert median(after - before for before, after in pairwise(times)) < 0.15  # a busy machine may be late once
        assert ticker.ticks == len(times)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_failed_tick_is_told(self):
        ticker = Ticker(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="the sampler failed"):
            ticker.stop()


class TestWatchdog:
    def test_hands_results_and_errors_on(self):
        watchdog = Watchdog("test")
        assert watchdog.call(1.0, max, 2, 3) == 3
        with pytest.raises(ZeroDivisionError):
            watchdog.call(1.0, lambda: 1 / 0)
        watchdog.close()

    def test_stops_waiting_and_then_refuses_at_once(self):
        watchdog = Watchdog("test")
        free = threading.Event()
        with pytest.raises(Hung, match=r"test: a call did not return within 0.05 s"):
            watchdog.call(0.05, free.wait)
        began = time.monotonic()
        with pytest.raises(Hung):
            watchdog.call(5.0, max, 2, 3)
        assert time.monotonic() - began < 4
        free.set()
        watchdog.close()

    def test_a_timeout_of_the_function_itself_is_its_own(self):
        watchdog = Watchdog("test")

        def fail():
            raise TimeoutError("mine")

        with pytest.raises(TimeoutError, match="mine"):
            watchdog.call(1.0, fail)
        assert watchdog.call(1.0, max, 2, 3) == 3
        watchdog.close()


def test_means_leave_out_what_is_missing():
    assert mean([None, 1.0, 3.0]) == 2.0
    assert mean([None]) is None
    assert peak([]) is None
    assert peak([0.0] * 99 + [1.0]) == 0.0
