"""Models on a real cluster: what is measured of pairs is learnt, a broken model is told, trainings come and go."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from support import wait_until

from cotenant.forecasting.datasets.registry import INTERFERENCE_FILE, SHIPPED, Registry
from cotenant.scheduler.core.model import Hints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BROKEN = "20200101T000000Z-00000000"
STEPPING = """
import sys, time, torch
torch.set_num_threads(1)
weights = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
end = time.time() + float(sys.argv[1])
while time.time() < end:
    optimizer.zero_grad()
    weights(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def test_a_training_runs_in_the_background_and_only_a_model_that_is_not_worse_serves(learning):
    wait_until(lambda: learning.client.predictions().trainings, 120, "a training has ended")
    (training,) = learning.client.predictions().trainings
    assert training.kind == "interference"
    assert training.candidate.keys() == training.active.keys() != set(), training.reason
    assert training.adopted == (training.version is not None)
    serves = training.version or "shipped"
    wait_until(lambda: learning.client.predictions().serving["interference"] == serves, 20, f"{serves} serves")
    assert not learning.client.predictions().warnings


def test_an_activated_model_serves_without_a_restart(learning):
    registry = Registry(learning.home / "home" / "models")
    folder = registry.folder("interference", SHIPPED)
    card = dataclasses.replace(registry.card("interference", SHIPPED), made_at="2030-01-01T00:00:00+00:00", version="")
    version = registry.add("interference", card, lambda path: shutil.copy(folder / INTERFERENCE_FILE, path))
    registry.activate("interference", version)
    wait_until(lambda: learning.client.predictions().serving["interference"] == version, 20, "the new model serves")
    registry.activate("interference", None)
    wait_until(lambda: learning.client.predictions().serving["interference"] == SHIPPED, 20, "the shipped one serves")


def test_jobs_that_share_a_device_become_evidence(learning):
    hints = Hints(gpu_memory=400 << 20, compute=0.3, max_slowdown=5.0)
    before = learning.client.predictions().evidence
    first = learning.run(STEPPING, "60", hints=hints, name="first")
    wait_until(
        lambda: (usage := learning.client.job(first.job_id).usage) and usage.step_rate, 30, "the first job steps"
    )
    scored = lambda: {each.horizon_s: each.scored for each in learning.client.forecast_scores(first.job_id)}  # noqa: E731
    wait_until(lambda: scored().get(5, 0) >= 8, 40, "forecasts of the first job were scored while it was alone")
    wait_until(lambda: learning.client.job(first.job_id).solo_step_rate, 30, "its rate alone is known")
    second = learning.run(STEPPING, "40", hints=hints, name="second")
    learning.reach(second, "RUNNING")
    forecast = learning.client.forecast(first.job_id)
    assert [each.horizon_s for each in forecast.util] == [1, 2, 5, 60, 300, 900]
    assert 0.0 < forecast.memory[0].p50 <= forecast.peak_memory_bytes
    slowdown = learning.client.explain(first.job_id).slowdown
    assert slowdown.neighbours == [second.job_id]
    assert 1.0 <= slowdown.low <= slowdown.slowdown <= slowdown.high
    wait_until(
        lambda: (told := learning.client.predictions()).slowdowns and told.evidence > before,
        60,
        "the pair was measured",
    )
    (score,) = learning.client.predictions().slowdowns
    assert score.gpu_type == "cpu-core"
    assert 0.0 <= score.error <= 1.0
    learning.settle()
    assert learning.client.forecast(first.job_id) is None


def test_a_model_that_cannot_be_loaded_is_told_and_jobs_go_on(learning):
    registry = learning.home / "home" / "models"
    registry.mkdir(exist_ok=True)
    (registry / "active.json").write_text(json.dumps({"interference": BROKEN, "demand": BROKEN}))
    wait_until(
        lambda: sum(BROKEN in warning for warning in learning.client.predictions().warnings) == 2,
        30,
        "both broken models are told",
    )
    assert learning.client.predictions().serving["interference"] == "shipped"
    assert learning.client.health().ok
    components = str(learning.client.health().components)
    assert BROKEN in components
    assert "demand: " in components
    assert learning.finish(learning.run("print('still here')")).state == "SUCCEEDED"
    (registry / "active.json").unlink()
    wait_until(lambda: not learning.client.predictions().warnings, 30, "the warnings are gone")
