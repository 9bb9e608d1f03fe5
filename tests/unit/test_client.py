"""What the client decides before it asks anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_client import FORECAST, job_view

from cotenant.scheduler import transport
from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import Hints, JobState
from cotenant.scheduler.names import ClusterRecord
from cotenant.scheduler.views import ForecastView, JobView


class NoLink:
    def origin(self) -> tuple[None, None]:
        return None, None


@pytest.mark.parametrize("command", ["python train.py", "python", "python 'my train.py", ""])
def test_a_command_is_words_not_one_text(command: str) -> None:
    """A text is a sequence too: its letters would be run as words."""
    with pytest.raises(ValueError, match=r"^command: .* give a list of words"):
        Client(NoLink()).spec(command, Hints())  # type: ignore[arg-type]


def test_a_program_is_known_by_where_it_lies_in_its_project() -> None:
    def known_as(script: str, cwd: str | None = None) -> str:
        return Client(NoLink()).spec(["python", script], Hints(), cwd=cwd, env={}).fingerprint  # type: ignore[arg-type]

    assert known_as("a/train.py", "/w") == known_as("/w/a/train.py", "/w") != known_as("b/train.py", "/w")
    assert known_as("a/train.py") == known_as(f"{Path.cwd()}/a/train.py")


@pytest.mark.parametrize(
    ("given", "variables", "joined"),
    [
        ("given:1", {"COTENANT_ADDRESS": "set:1", "RAY_ADDRESS": "ray:1"}, "given:1"),
        (None, {"COTENANT_ADDRESS": "set:1", "RAY_ADDRESS": "ray:1"}, "set:1"),  # Ray's may be another cluster's
        (None, {"RAY_ADDRESS": "ray:1"}, None),  # Ray reads it itself
        (None, {"COTENANT_ADDRESS": ""}, "recorded:1"),
        (None, {}, "recorded:1"),
    ],
)
def test_which_cluster_is_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, given: str | None, variables: dict[str, str], joined: str | None
) -> None:
    import ray

    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    for name in ("COTENANT_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ClusterRecord("recorded:1", "disabled", None, None, None).save()
    asked: list[str | None] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    transport.join(given)
    assert asked == [joined]


class JobLink:
    """A scheduler that knows one job, and a PRM that still remembers it."""

    def __init__(self, view: JobView) -> None:
        self.view = view

    def scheduler(self, method: str, job_id: str) -> JobView:
        assert (method, job_id) == ("job", self.view.job_id)
        return self.view

    def prm(self, method: str, job_id: str) -> ForecastView:
        assert (method, job_id) == ("forecast", self.view.job_id)
        return FORECAST


@pytest.mark.parametrize(("state", "there"), [(JobState.RUNNING, True), (JobState.SUCCEEDED, False)])
def test_only_a_job_that_has_a_gpu_has_a_forecast(state: JobState, there: bool) -> None:
    told = Client(JobLink(job_view(state=state))).forecast("job-1")  # type: ignore[arg-type]
    assert told == (FORECAST if there else None)
