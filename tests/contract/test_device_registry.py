"""Which device backend a host gets, where there is a driver and where there is none."""

from __future__ import annotations

import os
from typing import Literal

import pytest
from nvml_standin import Standin

from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.devices.registry import create_backend, start_nvml
from cotenant.configs.settings import DeviceSettings

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


def test_the_head_is_told_nothing_where_ray_counts_real_gpus(library: Library, standin: Standin) -> None:
    standin.set(*FOUR)
    found = start_nvml(DeviceSettings())
    assert found is not None
    found.close()
    assert start_nvml(DeviceSettings(backend="cpu")) is None
    assert create_backend(DeviceSettings(), "h", 2).name == "nvml"
