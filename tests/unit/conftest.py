"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_client import FakeClient, job_view

from cotenant import _preflight, cli
from cotenant.scheduler.core.model import JobState


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    """What the command line talks to: one job that runs and one that has ended, in a directory with a script."""
    fake = FakeClient(job_view(), job_view("job-9", JobState.SUCCEEDED))
    monkeypatch.setattr(cli, "_client", lambda address: fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(_preflight.RAY_JOB_CONFIG, raising=False)
    (tmp_path / "train.py").touch()
    return fake
