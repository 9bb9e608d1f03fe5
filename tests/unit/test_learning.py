"""What the PRM learns on a cluster: evidence that is told once and survives, trainings that start when they are due."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cotenant.actors import learning
from cotenant.actors.learning import ENOUGH_TO_TRAIN, ENOUGH_WINDOWS, TELL_EVERY_S, Evidence, Training
from cotenant.actors.messages import WindowBatch
from cotenant.actors.models import ModelShelf
from cotenant.actors.retraining import Retrainer
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.datasets.observation_file import load_observations
from cotenant.forecasting.types import DemandProfile, Signature

SOLO_RATE = 10.0


def profile(job_id: str) -> DemandProfile:
    return DemandProfile(0.6, 0.7, 1 << 30, SOLO_RATE, 30.0, "history", fingerprint=f"program {job_id}")


def window(job_id: str, second: int, rate: float, neighbours: int = 1) -> Signature:
    return Signature(job_id, "g", float(second), 1.0, 10, 0.5, 0.6, 1e9, 1e9, rate, 0.0, 0.0, neighbours, 0.5)


def together(evidence: Evidence, seconds: range, rate: float = 8.0) -> int:
    """Two jobs share a GPU for so long; returns how many observations came of it."""
    count = 0
    for second in seconds:
        windows = (window("a", second, rate), window("b", second, rate))
        batch = WindowBatch("h", second + 1.0, windows, {}, (), {"g": "cpu-core"})
        count += len(evidence.observe(batch, windows, {"a": profile("a"), "b": profile("b")}))
    return count


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def evidence(tmp_path: Path, said: list[str]) -> Evidence:
    return Evidence(tmp_path / "evidence.jsonl", said.append)


def test_jobs_that_share_a_gpu_become_evidence_that_is_told_once(evidence: Evidence) -> None:
    assert not evidence.due(0.0)
    found = together(evidence, range(40))
    told = evidence.due(40.0)
    assert len(told) == found >= 2
    assert [each.throughput for each in told] == pytest.approx([0.8] * found)
    assert {each.gpu_type for each in told} == {"cpu-core"}
    assert not evidence.due(41.0)


def test_the_scheduler_is_told_in_lots(evidence: Evidence) -> None:
    together(evidence, range(20))
    assert evidence.due(100.0)
    together(evidence, range(20, 80))
    assert not evidence.due(100.0 + TELL_EVERY_S / 2)
    assert evidence.due(100.0 + TELL_EVERY_S)


def test_evidence_survives_a_restart(evidence: Evidence, said: list[str]) -> None:
    found = together(evidence, range(40))
    evidence.save()
    evidence.save()
    assert len(load_observations(evidence.path).observations) == found
    assert Evidence(evidence.path, said.append).since_training == found
    assert not said


def test_a_full_disk_is_told_once_and_loses_nothing_when_it_is_over(evidence: Evidence, said: list[str]) -> None:
    evidence.path.mkdir()  # nothing can be appended to a folder
    found = together(evidence, range(40))
    evidence.save()
    evidence.save()
    assert len(said) == 1
    evidence.path.rmdir()
    evidence.save()
    assert len(load_observations(evidence.path).observations) == found


def test_what_cannot_be_read_is_told_and_left_alone(evidence: Evidence, said: list[str]) -> None:
    together(evidence, range(40))
    evidence.save()
    with evidence.path.open("a") as file:
        file.write("{broken\n")
    again = Evidence(evidence.path, said.append)
    assert len(said) == 1
    assert again.since_training > 0


def test_a_long_file_becomes_one_line_a_set(
    evidence: Evidence, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together(evidence, range(400))
    evidence.save()
    before = len(load_observations(evidence.path).observations)
    monkeypatch.setattr(learning, "LONGEST_FILE", 4)
    Evidence(evidence.path, said.append)
    assert before > 2
    assert len(load_observations(evidence.path).observations) == 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def training(path: Path, clock: Clock, **settings: object) -> tuple[Training, Retrainer]:
    chosen = PredictionSettings.model_validate({"retrain_every_s": 60.0, **settings})
    retrainer = Retrainer(60.0, path, (sys.executable, "-c", "import signal; signal.pause()"), clock)
    return Training(chosen, ModelShelf(chosen, path), path, path / "signatures", retrainer), retrainer


def test_interference_is_trained_once_enough_was_measured_and_not_too_soon(tmp_path: Path, evidence: Evidence) -> None:
    clock = Clock()
    trained, retrainer = training(tmp_path, clock)
    evidence.since_training = ENOUGH_TO_TRAIN
    trained.poll(evidence, {})
    assert trained.running == ""
    clock.now = 60.0
    trained.poll(evidence, {})
    assert trained.running.startswith("interference: 12 measurements")
    assert evidence.since_training == 0
    retrainer.close()


def test_demand_is_trained_on_drift_or_many_windows(tmp_path: Path, evidence: Evidence) -> None:
    clock = Clock()
    trained, retrainer = training(tmp_path, clock)
    clock.now = 60.0
    trained.count(ENOUGH_WINDOWS - 1)
    trained.poll(evidence, {})
    assert trained.running == ""
    trained.poll(evidence, {"demand": "drift of bert"})
    assert trained.running == "demand: drift of bert"
    retrainer.close()


@pytest.mark.parametrize(
    "settings", [{"retrain": False}, {"interference": "rule", "demand": "ewquantile"}], ids=["off", "simple"]
)
def test_nothing_is_trained_that_is_not_wanted(tmp_path: Path, evidence: Evidence, settings: dict[str, object]) -> None:
    clock = Clock()
    trained, retrainer = training(tmp_path, clock, **settings)
    clock.now = 60.0
    evidence.since_training = ENOUGH_TO_TRAIN
    trained.count(ENOUGH_WINDOWS)
    trained.poll(evidence, {"demand": "drift", "interference": "drift"})
    assert trained.running == ""
    retrainer.close()
