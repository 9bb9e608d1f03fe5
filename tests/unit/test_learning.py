"""What the PRM learns on a cluster: evidence that survives and is told until taken in; trainings when they are due."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import wait_until

from cotenant.actors import learning
from cotenant.actors.learning import ENOUGH_TO_TRAIN, ENOUGH_WINDOWS, KEPT_VERSIONS, TELL_EVERY_S, Evidence, Training
from cotenant.actors.messages import WindowBatch
from cotenant.actors.models import ModelShelf
from cotenant.actors.retraining import Retrainer
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.datasets.observation_file import load_observations
from cotenant.forecasting.interference.evidence import EvidenceBook
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


def test_jobs_that_share_a_gpu_become_evidence_that_is_told_until_it_is_taken_in(evidence: Evidence) -> None:
    assert not evidence.due(0.0)
    found = together(evidence, range(40))
    lost = evidence.due(40.0)
    assert lost is not None
    assert found >= 2 == len(lost.observations)
    assert [each.throughput for each in lost.observations] == pytest.approx([0.8] * 2)
    assert {each.gpu_type for each in lost.observations} == {"cpu-core"}
    told = evidence.due(40.0 + TELL_EVERY_S)
    assert told is not None
    assert told == lost
    evidence.told(told)
    assert not evidence.due(100.0)


def test_what_is_measured_while_the_scheduler_answers_is_told_as_well(evidence: Evidence) -> None:
    together(evidence, range(20))
    told = evidence.due(100.0)
    assert told is not None
    together(evidence, range(20, 80))
    evidence.told(told)
    assert not evidence.due(100.0 + TELL_EVERY_S / 2)
    more = evidence.due(100.0 + TELL_EVERY_S)
    assert more is not None
    assert [each.key for each in more.observations] == [each.key for each in told.observations]
    both = zip(more.observations, told.observations, strict=True)
    assert all(new.seconds > old.seconds for new, old in both)


def test_after_a_restart_all_that_is_known_is_told_and_hearing_it_twice_changes_nothing(
    evidence: Evidence, said: list[str]
) -> None:
    together(evidence, range(80))
    told = evidence.due(80.0)
    assert told is not None
    evidence.told(told)
    evidence.save()
    again = Evidence(evidence.path, said.append)
    assert again.book.observations() == evidence.book.observations()
    core = EvidenceBook()
    told = again.due(1e6)
    assert told is not None
    for each in 2 * told.observations:
        core.take(each)
    assert core.observations() == evidence.book.observations()
    older = replace(core.observations()[0], throughput=0.1, low=0.1, seconds=1.0)
    core.take(older)
    assert core.observations() == evidence.book.observations()


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


@pytest.mark.parametrize(("learnt", "left"), [({"util: MAE / persistence": 1.0}, 5), ({}, ENOUGH_WINDOWS + 5)])
def test_windows_count_until_something_was_learnt_from_them(
    tmp_path: Path, evidence: Evidence, learnt: dict[str, float], left: int
) -> None:
    told, clock = {"version": None, "adopted": False, "reason": "x", "candidate": learnt, "active": {}}, Clock()
    program = (sys.executable, "-c", f"print({json.dumps(json.dumps(told))})")
    retrainer = Retrainer(60.0, tmp_path, program, clock)
    trained = Training(PredictionSettings(), ModelShelf(PredictionSettings(), tmp_path), tmp_path, tmp_path, retrainer)
    clock.now = 60.0
    trained.count(ENOUGH_WINDOWS)
    trained.poll(evidence, {})
    trained.count(5)
    wait_until(lambda: trained.poll(evidence, {}) is not None, 30.0, "the training has ended")
    trained.save()
    assert json.loads((tmp_path / "training.json").read_text()) == {"windows": left}


@pytest.mark.parametrize("damaged", ["", "[]", '{"windows": "many"}', '{"windows": -3}', "[" * 100_000])
def test_a_damaged_count_only_makes_the_next_training_later(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "training.json").write_text(damaged)
    trained, retrainer = training(tmp_path, Clock())
    trained.save()
    assert json.loads((tmp_path / "training.json").read_text()) == {"windows": 0}
    retrainer.close()


def test_old_versions_are_deleted_after_a_training(tmp_path: Path, evidence: Evidence) -> None:
    told = {"version": None, "adopted": False, "reason": "x", "candidate": {}, "active": {}}
    retrainer = Retrainer(0.0, tmp_path, program=(sys.executable, "-c", f"print({json.dumps(json.dumps(told))})"))
    shelf = ModelShelf(PredictionSettings(), tmp_path)
    pruned: list[tuple[str, int]] = []
    shelf.registry.prune = lambda kind, keep: pruned.append((kind, keep)) or []  # type: ignore[method-assign,func-returns-value]
    trained = Training(PredictionSettings(), shelf, tmp_path, None, retrainer)
    evidence.since_training = ENOUGH_TO_TRAIN
    wait_until(lambda: trained.poll(evidence, {}) is not None, 30.0, "the training has ended")
    assert pruned == [("interference", KEPT_VERSIONS)]
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
