"""Fixtures of several contract suites."""

from __future__ import annotations

import pytest
from launching import Host
from support import wait_until


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
