"""Which device backend a host gets, where there is a driver and where there is none."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
from nvml_standin import Standin
from support import wait_until

from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.devices.registry import create_backend, start_nvml
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import DeviceSettings, ProfilerSettings

FOUR = tuple(f"gpu {index} uuid=GPU-{index}" for index in range(4))
CPU = ("cpu", len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("chosen", "lines", "visible", "expected"),
    [
        ("auto", FOUR, None, ("nvml", 4)),
        ("auto", FOUR, "1", ("nvml", 1)),
        ("nvml", FOUR, None, ("nvml", 4)),
        ("auto", (), None, CPU),
        ("auto", FOUR, "", CPU),
        ("cpu", FOUR, None, CPU),
        ("auto", ("gpu 0", "fault nvmlInit 9"), None, CPU),
        ("auto", ("gpu 0", "fault nvmlInit 18"), None, "device.backend: 'auto' is not accepted on this host: "),
        ("nvml", ("gpu 0", "fault nvmlInit 9"), None, "device.backend: 'nvml' is not accepted on this host: "),
        ("nvml", (), None, "device.count: None is not accepted; this host has 0 GPUs"),
    ],
)
def test_the_backend_of_a_host(
    *,
    standin: Standin,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    chosen: Literal["auto", "nvml", "cpu"],
    lines: tuple[str, ...],
    visible: str | None,
    expected: tuple[str, int] | str,
) -> None:
    standin.set(*lines)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    try:
        made = create_backend(DeviceSettings(backend=chosen, count=None), "h", None)
    except ValueError as error:
        assert str(error).startswith(str(expected))
    else:
        assert (made.name, len(made.discover())) == expected
        made.close()


@pytest.mark.parametrize("chosen", ["auto", "nvml"])
@pytest.mark.parametrize("hung", ["nvmlInit", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_hangs_at_the_start_is_named_and_its_gpus_used_when_it_answers(
    *,
    standin: Standin,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    chosen: Literal["auto", "nvml"],
    hung: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("cotenant.actors.devices.registry.Library", partial(Library, 0.3))
    for module in ("registry", "nvml.discovery"):
        monkeypatch.setattr(f"cotenant.actors.devices.{module}.TIMEOUT_S", 0.3)
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    standin.set(*FOUR, f"hang {hung}")
    before = set(threading.enumerate())
    made = create_backend(DeviceSettings(backend=chosen), "h", 4)
    assert (made.name, made.discover(), made.sample().devices) == ("nvml", (), ())
    (note,) = made.notes
    assert note.startswith("no GPU can be used: ")
    name = hung.removesuffix("_v2")
    assert re.search(rf"{name}: (a call did not return within 0.3 s|the driver still does not answer)$", note)
    if name == "nvmlDeviceGetCount":
        wait_until(lambda: bool(made.sample()) and made.notes[0].endswith("still does not answer"), 20, "another look")
    calls = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("nvml")]
    assert calls == [f"{name} calls"], "only the one that hangs"
    standin.set(*FOUR)

    def found() -> bool:
        made.sample()
        return len(made.discover()) == 4

    wait_until(found, 20, "the GPUs to be found")
    assert made.notes == ()
    made.close()


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("hang nvmlDeviceGetCount_v2", "no GPU can be used: nvmlDeviceGetCount: a call did not return within 0.3 s"),
        ("fault * 15 0", "GPU 0 is left out: nvml.*: GPU is lost"),
        ("hang nvmlDeviceGetMigMode 0", "GPU 0 is left out: a call did not return within 0.3 s"),
    ],
)
def test_a_host_none_of_whose_gpus_answers_has_them_when_they_do(
    standin: Standin, library: Library, monkeypatch: pytest.MonkeyPatch, trouble: str, says: str
) -> None:
    """However many there are to be: those that are missing may come. No second call is made meanwhile."""
    monkeypatch.setattr("cotenant.actors.devices.nvml.discovery.TIMEOUT_S", 0.3)
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.AGAIN_S", 0.1)
    standin.set("gpu 0 uuid=GPU-0", trouble)
    before = set(threading.enumerate())  # other tests leave threads that wait
    made = NvmlBackend(DeviceSettings(count=1), library=library)
    profiler = Profiler(made, ProfilerSettings())
    profiler.tick()
    assert (made.discover(), profiler.device_readings()) == ((), ())
    (note,) = made.notes
    assert re.match(says, note)

    def sampled(holds: Callable[[], bool]) -> bool:
        time.sleep(0.05)
        profiler.tick()
        return holds()

    if "hang" in trouble:
        still = "the driver still does not answer"
        wait_until(lambda: sampled(lambda: made.notes[0].endswith(still)), 20, "another look")
        calls = [each.name for each in set(threading.enumerate()) - before if each.name.endswith(" calls")]
        assert len(calls) == 2, calls  # the one that hangs, and the one that reads GPUs
    standin.set("gpu 0 uuid=GPU-0")
    wait_until(lambda: sampled(lambda: bool(profiler.device_readings())), 20, "the GPU to be found and read")
    assert (made.notes, [gpu.gpu_id for gpu in made.discover()]) == ((), ["GPU-0"])
    made.close()


def test_a_driver_that_hangs_is_an_error_where_its_gpus_are_counted(
    standin: Standin, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("cotenant.actors.devices.registry.TIMEOUT_S", 0.3)
    standin.set(*FOUR, "hang nvmlDeviceGetCount_v2")
    with pytest.raises(ValueError, match="the NVIDIA driver does not answer: nvmlDeviceGetCount: a call did not"):
        start_nvml(DeviceSettings())
    standin.set(*FOUR, "fault nvmlDeviceGetCount_v2 999")
    with pytest.raises(ValueError, match=r"device.backend: 'auto' is not accepted on this host: nvmlDeviceGetCount: "):
        start_nvml(DeviceSettings())
    standin.set("gpu 0")


def test_the_head_is_told_nothing_where_ray_counts_real_gpus(library: Library, standin: Standin) -> None:
    standin.set(*FOUR)
    found = start_nvml(DeviceSettings())
    assert found is not None
    found.close()
    assert start_nvml(DeviceSettings(backend="cpu")) is None
    assert create_backend(DeviceSettings(), "h", 2).name == "nvml"
