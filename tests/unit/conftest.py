"""Fixtures of the unit tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_client import FakeClient, job_view

from cotenant import _preflight, cli
from cotenant.scheduler.core.model import JobState


@pytest.fixture(autouse=True)
def _python_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of tests run ``python``; where the shell knows it as ``python3`` only, they would be warned of."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def ordinary_arithmetic() -> Iterator[None]:
    """Fail the test that leaves this process taking very small numbers for 0, not those that come after it."""
    yield
    assert sys.float_info.min / 2 > 0.0, (
        "the processor flushes denormal numbers; torch.set_flush_denormal(False) undoes it"
    )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    """What the command line talks to: one job that runs and one that has ended, in a directory with a script."""
    fake = FakeClient(job_view(), job_view("job-9", JobState.SUCCEEDED))
    monkeypatch.setattr(cli, "_client", lambda address: fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(_preflight.RAY_JOB_CONFIG, raising=False)
    (tmp_path / "train.py").touch()
    return fake
