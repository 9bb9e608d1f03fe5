"""What ``up`` tells about the cluster it has started on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from fake_client import FakeClient

from cotenant.actors import cluster
from cotenant.configs.settings import DeviceSettings, Settings
from cotenant.scheduler.errors import CotenantError


def test_hosts_that_the_journal_remembers_but_that_are_gone_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeClient()
    [there] = client.hosts()
    gone = there.model_copy(update={"host_id": "host-of-yesterday", "reachable": False})
    monkeypatch.setattr(client, "hosts", lambda: [gone, there])
    monkeypatch.setattr(cluster.Client, "connect", lambda: client)
    monkeypatch.setattr(cluster, "start_actors", lambda *_: [])
    monkeypatch.setattr(cluster, "_wait_for_hosts", lambda _: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    report = cluster._finish(Settings(), None, None)
    assert (report.hosts, report.gpus) == (1, len(there.gpus))


@pytest.mark.parametrize(
    ("nvml", "settings", "expected"),
    [
        (None, DeviceSettings(count=3), ["--num-gpus=3"]),
        (None, DeviceSettings(cores_per_gpu=10_000), ["--num-gpus=1"]),
        (SimpleNamespace(close=lambda: None), DeviceSettings(), []),  # Ray counts NVIDIA GPUs itself
        (SimpleNamespace(close=lambda: None), DeviceSettings(count=1), ["--num-gpus=1"]),
    ],
)
def test_what_ray_is_told_of_this_machines_gpus(
    monkeypatch: pytest.MonkeyPatch, nvml: object, settings: DeviceSettings, expected: list[str]
) -> None:
    monkeypatch.setattr(cluster, "start_nvml", lambda _: nvml)
    assert cluster._gpu_count(Settings(device=settings)) == expected


def test_a_driver_that_does_not_work_is_told_before_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ValueError("device.backend: 'auto' is not accepted on this host: the driver was updated")

    monkeypatch.setattr(cluster, "start_nvml", fail)
    with pytest.raises(CotenantError, match="the driver was updated"):
        cluster._gpu_count(Settings())
