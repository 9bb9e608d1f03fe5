"""What ``up`` tells about the cluster it has started on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from fake_client import FakeClient

from cotenant.actors import cluster
from cotenant.configs.settings import Settings


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
