"""Which GPUs are linked by NVLink, on the stand-in; and that gangs get those that are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nvml_host import GIB, NvmlHost
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from scheduling import Driver, on, spec

from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.devices.nvml.links import islands
from cotenant.configs.settings import DeviceSettings
from cotenant.scheduler.core.events import HostJoined
from cotenant.scheduler.core.model import Gpu, Host


@pytest.fixture
def nvml(standin: Standin, library: Library) -> Iterator[NvmlHost]:
    host = NvmlHost(standin, library, ())
    host.pids = [0, 0]
    yield host
    host.close()


def gpus(*groups: int) -> tuple[str, ...]:
    return tuple(f"gpu {k} uuid=GPU-{k} total={16 * GIB} island={group}" for k, group in enumerate(groups))


@pytest.mark.parametrize(
    ("lines", "visible", "found"),
    [
        (gpus(1, 2, 1, 2), None, ["nvlink-0", "nvlink-1", "nvlink-0", "nvlink-1"]),
        (gpus(1, 1, 1, 1), None, ["nvlink-0"] * 4),
        (gpus(0, 0, 0), None, ["", "", ""]),
        (gpus(0, 3, 3, 0), None, ["nvlink-0", "nvlink-1", "nvlink-1", "nvlink-3"]),
        (gpus(1, 2, 1, 2), "3,1", ["nvlink-1", "nvlink-1"]),
        ((*gpus(1, 1, 1), "fault * 15 1"), None, ["nvlink-0", "nvlink-0"]),
        ((*gpus(1, 1, 1), "fault nvmlDeviceGetP2PStatus 3 1"), None, ["", "", ""]),
        ((*gpus(1, 1), "gpu 2 mig=1 island=1", "instance 2 0 MIG-a gi=1"), None, ["nvlink-0", "nvlink-0", ""]),
    ],
    ids=["two groups", "one", "none", "some are alone", "chosen", "one is lost", "one cannot say", "an instance"],
)
def test_groups(nvml: NvmlHost, lines: tuple[str, ...], visible: str | None, found: list[str]) -> None:
    assert [gpu.island for gpu in nvml.start(*lines, visible=visible).discover()] == found


def test_a_gpu_that_hangs_when_asked_for_its_links_is_used_all_the_same(
    nvml: NvmlHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.actors.devices.nvml.discovery.TIMEOUT_S", 0.3)
    backend = nvml.start(*gpus(1, 1), "hang nvmlDeviceGetP2PStatus 1")
    assert [(gpu.gpu_id, gpu.island) for gpu in backend.discover()] == [("GPU-0", ""), ("GPU-1", "")]


def test_an_old_driver_does_not_say(tmp_path: Path) -> None:
    old = Standin(tmp_path, ["nvmlDeviceGetP2PStatus"])
    old.set(*gpus(1, 1))
    with loaded(old) as library:
        backend = NvmlBackend(DeviceSettings(), library=library)
        assert [gpu.island for gpu in backend.discover()] == ["", ""]
        backend.close()


def test_a_link_joins_groups_whichever_of_the_two_says_so() -> None:
    assert islands({0: set(), 1: set(), 2: {0}, 3: {1, 2}, 4: set()}) == {
        **dict.fromkeys(range(4), "nvlink-0"),
        4: "nvlink-4",
    }


def test_a_gang_gets_gpus_that_are_linked(nvml: NvmlHost) -> None:
    found = nvml.start(*gpus(1, 2, 1, 2)).discover()
    told = tuple(Gpu(g.gpu_id, "h", g.gpu_type, g.index, g.memory_bytes, island=g.island) for g in found)
    driver = Driver()
    driver.do(HostJoined(Host("h", "h.example", told, joined_at=0.0)))
    driver.run(spec("first", isolation="hard"))
    assert on(driver, "first") == ["GPU-0"]
    driver.run(spec("gang", gpus=2, isolation="hard"))
    assert sorted(on(driver, "gang")) == ["GPU-1", "GPU-3"]
    driver.run(spec("rest", isolation="hard"))
    assert on(driver, "rest") == ["GPU-2"]
