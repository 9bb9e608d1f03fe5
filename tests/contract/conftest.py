"""Fixtures of several contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import Host
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from support import wait_until

from cotenant.actors.devices.nvml.library import Library


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The hardware of a host with NVIDIA GPUs."""
    return Standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def library(standin: Standin) -> Iterator[Library]:
    """The driver's library on a host with one GPU."""
    standin.set("gpu 0")
    with loaded(standin) as library:
        yield library


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path / "run")
    yield host
    for launched in host.launcher.running():
        host.launcher.stop(launched.job_id, launched.epoch, 0.0, "the test is over")
    wait_until(
        lambda: not host.processes(supervisors=True) and not host.launcher.running(),
        10,
        "no process of the test is left",
    )
