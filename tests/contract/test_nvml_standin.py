"""The stand-in for NVML plays every case it promises, towards the real nvidia-ml-py."""

from __future__ import annotations

import pytest
from nvml_standin import SONAME, Standin

ASK = """
import pynvml
def ask(name, *args):
    try:
        return getattr(pynvml, name)(*args)
    except pynvml.NVMLError as error:
        return type(error).__name__
    except pynvml.NVMLLibraryMismatchError as error:
        return "NVMLLibraryMismatchError"
print("null")
"""
GPU = ASK + "ask('nvmlInit'); h = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]\n"


def answer(standin, expression, before=GPU):
    return standin.python(f"{before}\nprint(json.dumps({expression}))")


def test_describes_the_gpus(standin):
    standin.set(
        "driver 580.1", "cuda 13010", "gpu 0 uuid=GPU-a name=NVIDIA_H100 total=1000 used=600", "gpu 1 uuid=GPU-b"
    )
    found = answer(
        standin,
        "[pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion(), len(h),"
        " pynvml.nvmlDeviceGetName(h[0]), pynvml.nvmlDeviceGetUUID(h[1]), pynvml.nvmlDeviceGetMemoryInfo(h[0]).free,"
        " pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID('GPU-b'))]",
    )
    assert found == ["580.1", 13010, 2, "NVIDIA H100", "GPU-b", 400, "GPU-b"]


def test_one_gpu_of_four_is_lost(standin):
    standin.set(*(f"gpu {i} uuid=GPU-{i} util=5{i}" for i in range(4)), "fault * 15 2")
    lost = "[ask('nvmlDeviceGetHandleByIndex', i) for i in range(4)]"
    code = f"[x if isinstance(x, str) else pynvml.nvmlDeviceGetUtilizationRates(x).gpu for x in {lost}]"
    assert answer(standin, code, ASK + "ask('nvmlInit')") == [50, 51, "NVMLError_GpuIsLost", 53]


def test_a_gpu_is_lost_while_a_program_runs(standin):
    standin.set("gpu 0 util=50")
    code = GPU + (
        "import os, pathlib\n"
        "first = pynvml.nvmlDeviceGetUtilizationRates(h[0]).gpu\n"
        "pathlib.Path(os.environ['NVML_STANDIN_STATE']).write_text('gpu 0\\nfault * 15 0\\n')\n"
        "print(json.dumps([first, ask('nvmlDeviceGetUtilizationRates', h[0])]))"
    )
    assert standin.python(code) == [50, "NVMLError_GpuIsLost"]


def test_a_call_never_returns_on_one_gpu_only(standin):
    standin.set("gpu 0 power=1000", "gpu 1 power=2000", "hang nvmlDeviceGetPowerUsage 0")
    code = GPU + (
        "import threading\n"
        "stuck = threading.Thread(target=ask, args=('nvmlDeviceGetPowerUsage', h[0]), daemon=True)\n"
        "stuck.start(); stuck.join(0.5)\n"
        "print(json.dumps([stuck.is_alive(), pynvml.nvmlDeviceGetPowerUsage(h[1])]))"
    )
    assert standin.python(code) == [True, 2000]


@pytest.mark.parametrize(
    ("lines", "expression", "expected"),
    [
        (["gpu 0 used=18446744073707737660"], "pynvml.nvmlDeviceGetMemoryInfo(h[0]).used", 18446744073707737660),
        (["gpu 0 total=1000 used=2000"], "pynvml.nvmlDeviceGetMemoryInfo(h[0]).used", 2000),
        (["gpu 0 memutil=50 used=8589934592"], "pynvml.nvmlDeviceGetUtilizationRates(h[0]).memory", 50),
        (["gpu 0 energy_rate=0"], "pynvml.nvmlDeviceGetTotalEnergyConsumption(h[0])", 0),
        (["gpu 0", "fault nvmlDeviceGetMigMode 3"], "ask('nvmlDeviceGetMigMode', h[0])", "NVMLError_NotSupported"),
        (["gpu 0 mig=1"], "pynvml.nvmlDeviceGetMigMode(h[0])", [1, 1]),
        (["gpu 0 reasons=4"], "pynvml.nvmlDeviceGetCurrentClocksEventReasons(h[0])", 4),
        (["gpu 0 limit=300000"], "pynvml.nvmlDeviceGetPowerManagementLimit(h[0])", 300000),
        (["gpu 0"], "ask('nvmlDeviceSetPowerManagementLimit', h[0], 1)", "NVMLError_InvalidArgument"),
        (["gpu 0 mode=3"], "pynvml.nvmlDeviceGetComputeMode(h[0])", 3),
    ],
)
def test_readings_as_they_are_set(standin, lines, expression, expected):
    standin.set(*lines)
    assert answer(standin, expression) == expected


@pytest.mark.parametrize(
    ("lines", "without", "expected"),
    [
        (["fault nvmlInit 18"], [], "NVMLError_LibRmVersionMismatch"),
        (["fault nvmlInit 9"], [], "NVMLError_DriverNotLoaded"),
        ([], ["nvmlInitWithFlags"], "NVMLError_FunctionNotFound"),
    ],
)
def test_the_library_does_not_start(tmp_path, lines, without, expected):
    standin = Standin(tmp_path, without)
    standin.set(*lines)
    assert answer(standin, "ask('nvmlInit')", ASK) == expected


def test_the_library_is_missing(standin, tmp_path):
    found = standin.python(f"{ASK}\nprint(json.dumps(ask('nvmlInit')))", LD_LIBRARY_PATH=str(tmp_path))
    if found is None:
        pytest.skip(f"this machine has a {SONAME} of its own")
    assert found == "NVMLError_LibraryNotFound"


def test_an_old_driver_lacks_a_function(tmp_path):
    standin = Standin(tmp_path, ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlGpmSampleAlloc"])
    standin.set("gpu 0")
    found = answer(standin, "[ask('nvmlDeviceGetComputeRunningProcesses', h[0]), ask('nvmlGpmSampleAlloc')]")
    assert found == ["NVMLLibraryMismatchError", "NVMLError_FunctionNotFound"]


def test_lists_processes_by_list(standin):
    standin.set(
        "gpu 0",
        "process 0 pid=10 memory=24576 list=compute",
        "process 0 pid=11 memory=600 list=mps",
        "process 0 pid=12 memory=18446744073709551615 list=both",
        "process 0 pid=4294967295 memory=1 list=none",
    )
    lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
    found = answer(standin, f"[[[p.pid, p.usedGpuMemory] for p in getattr(pynvml, n)(h[0])] for n in {lists!r}]")
    assert found == [[[10, 24576], [12, None]], [[11, 600], [12, None]]]


def test_lists_the_children_of_whoever_asks(standin):
    standin.set("gpu 0", "children 0 memory=7")
    code = GPU + (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '30'])\n"
        "pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h[0])]\n"
        "child.kill(); child.wait()\n"
        "print(json.dumps(pids == [child.pid]))"
    )
    assert standin.python(code)


@pytest.mark.parametrize(
    ("lines", "seen", "expected"),
    [
        (["process 0 pid=10 sm=40 time=1000"], 0, [[10, 1000, 40]]),
        (["process 0 pid=10 sm=40 time=1000"], 1000, "NVMLError_NotFound"),
        (["process 0 pid=10 sm=0 time=1000"], 0, "NVMLError_NotFound"),
        (["process 0 pid=10 sm=4", "fault nvmlDeviceGetProcessUtilization 3"], 0, "NVMLError_NotSupported"),
        (["process 0 pid=10 sm=4", "fault nvmlDeviceGetProcessUtilization 7"], 0, "NVMLError_InsufficientSize"),
    ],
)
def test_utilisation_per_process(standin, lines, seen, expected):
    standin.set("gpu 0", *lines)
    code = f"x = ask('nvmlDeviceGetProcessUtilization', h[0], {seen})"
    shown = "x if isinstance(x, str) else [[s.pid, s.timeStamp, s.smUtil] for s in x]"
    assert answer(standin, shown, f"{GPU}\n{code}") == expected


def test_mig_instances_with_holes(standin):
    standin.set("gpu 0 uuid=GPU-a mig=1", "instance 0 0 MIG-a total=10", "instance 0 3 MIG-d total=40 used=4")
    found = answer(
        standin,
        "[x if isinstance(x, str) else [pynvml.nvmlDeviceGetUUID(x), pynvml.nvmlDeviceGetMemoryInfo(x).total]"
        " for x in [ask('nvmlDeviceGetMigDeviceHandleByIndex', h[0], i)"
        " for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(h[0]))]]",
    )
    hole = "NVMLError_NotFound"
    assert found == [["MIG-a", 10], hole, hole, ["MIG-d", 40], hole, hole, hole]


METRICS = """
import time
request = pynvml.c_nvmlGpmMetricsGet_t()
request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 3
request.sample1, request.sample2 = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
for i, number in enumerate((2, 5, 10)):
    request.metrics[i].metricId = number
pynvml.nvmlGpmSampleGet(h[0], request.sample1)
pynvml.nvmlGpmSampleGet(h[0], request.sample2)
early = ask("nvmlGpmMetricsGet", request)
time.sleep(0.12)
pynvml.nvmlGpmSampleGet(h[0], request.sample2)
pynvml.nvmlGpmMetricsGet(request)
"""


def test_performance_counters(standin):
    standin.set("gpu 0", "metric 0 2 61.5", "metric 0 10 33 4")
    found = answer(
        standin, "[early, [[m.nvmlReturn, m.value] for m in list(request.metrics)[:3]]]", f"{GPU}\n{METRICS}"
    )
    assert found == ["NVMLError_InvalidArgument", [[0, 61.5], [3, 0.0], [4, 33.0]]]


def test_performance_counters_refused_in_a_container(standin):
    standin.set("gpu 0", "fault nvmlGpmSampleGet 4")
    found = answer(standin, "ask('nvmlGpmSampleGet', h[0], pynvml.nvmlGpmSampleAlloc())")
    assert found == "NVMLError_NoPermission"


def test_pcie_counters_grow(standin):
    standin.set("gpu 0 tx_rate=1000 rx_rate=0")
    found = answer(
        standin,
        "[[v.nvmlReturn, v.valueType, v.value.ullVal > 0]"
        " for v in pynvml.nvmlDeviceGetFieldValues(h[0], [197, 198, 5])]",
    )
    assert found == [[0, 3, True], [0, 3, False], [3, 3, False]]


def test_an_xid_waits(standin):
    standin.set("gpu 0", "xid 0 79")
    code = GPU + (
        "s = pynvml.nvmlEventSetCreate()\n"
        "pynvml.nvmlDeviceRegisterEvents(h[0], pynvml.nvmlEventTypeXidCriticalError, s)\n"
        "e = pynvml.nvmlEventSetWait(s, 10)\n"
        "print(json.dumps([e.eventType == pynvml.nvmlEventTypeXidCriticalError, e.eventData]))"
    )
    assert standin.python(code) == [True, 79]
