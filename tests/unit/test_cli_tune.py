"""The command ``cotenant tune``: what it writes, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import invoke

from cotenant.forecasting.datasets.registry import Registry
from cotenant.forecasting.training.problems import PairProblem


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def recordings(folder: Path, files: int) -> Path:
    """Recordings of nvidia-smi, one GPU each, 100 s long."""
    folder.mkdir()
    for number in range(files):
        util = 50 + 40 * np.sign(np.sin(np.arange(100) * 0.7 + number))
        stamps = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(100), unit="s")
        table = pd.DataFrame(
            {"timestamp": stamps, "power.draw [W]": 100, "utilization.gpu [%]": util, "memory.used [MiB]": 1000}
        )
        table.to_csv(folder / f"{number}.csv", index=False)
    return folder


def test_pairs_are_tuned_and_the_result_is_kept(tmp_path: Path, state: Path) -> None:
    file = tmp_path / "result.json"
    code, said, errors = invoke("tune", "interference", "cpu", "--trials", "3", "--json", str(file), "--train-best")
    assert code == 0, errors
    assert "default options" in said
    assert "constant mean" in said
    assert "3 trials" in said
    found = json.loads(file.read_text())
    assert found["trials"]["complete"] + found["trials"]["pruned"] == 3
    assert found["best_score"]["metrics"]["MAE"] <= found["default_score"]["metrics"]["MAE"]
    assert not set(found["groups"]) & set(found["never seen"].split(", "))
    assert (state / "studies" / f"{found['study']}.db").exists()
    card = Registry(state / "models").versions("interference")[-1]
    assert card.metrics["never seen: MAE"] > 0.0
    assert found["never seen"] in card.protocol
    assert "optimistic" in card.protocol


def test_series_are_tuned(tmp_path: Path) -> None:
    data = recordings(tmp_path / "data", 4)
    code, said, errors = invoke("tune", "demand", str(data), "--trials", "1", "--quantity", "memory")
    assert code == 0, errors
    assert "nothing is better than the default options" in said
    assert "untrained mixture" in said


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fold, calls = PairProblem.folds, []

    def interrupted(self, options):
        calls.append(options)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fold(self, options)

    monkeypatch.setattr(PairProblem, "folds", interrupted)
    code, said, errors = invoke("tune", "interference", "cpu", "--trials", "4")
    assert code == 130
    assert "stopped: 2 of 4 trials are done and kept" in errors
    assert "give the same command again" in errors
    monkeypatch.setattr(PairProblem, "folds", fold)
    code, said, errors = invoke("tune", "interference", "cpu", "--trials", "4")
    assert code == 0, errors
    assert "4 trials" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sideways", "cpu"), "No such command 'sideways'"),
        (("interference", "cpu", "--trials", "0"), "trials: 0 is not accepted; give a whole number of at least 1"),
        (("interference", "cpu", "--timeout", "-1"), "timeout: -1.0 is not accepted; give a number of seconds above 0"),
        (("interference", "cpu", "--timeout", "nan"), "timeout: nan is not accepted"),
        (("interference", "cpu", "--jobs", "0"), "jobs: 0 is not accepted"),
        (("interference", "cpu", "--study", "../up"), "study: '../up' is not accepted"),
        (("interference", "nowhere"), "nowhere: there is nothing"),
        (("interference", "cpu", "--mode", "magic"), "mode: 'magic' is not accepted"),
        (("interference",), "Missing argument"),
        (("demand", "nowhere"), "nowhere: there is nothing"),
    ],
)
def test_what_is_not_accepted_is_named(words: tuple[str, ...], message: str) -> None:
    code, _, errors = invoke("tune", *words)
    assert code == 1
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_quantities_that_are_not_there_are_refused(tmp_path: Path) -> None:
    code, _, errors = invoke("tune", "demand", str(recordings(tmp_path / "data", 3)), "--quantity", "power")
    assert (code, "quantity: 'power' is not accepted; give util, memory" in errors) == (1, True)


def test_too_few_recordings_are_refused(tmp_path: Path) -> None:
    code, _, errors = invoke("tune", "demand", str(recordings(tmp_path / "data", 2)), "--quantity", "memory")
    assert (code, "data: 2 sources with series long enough" in errors) == (1, True)


def test_a_storage_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("a letter to a friend\n" * 50)
    code, _, errors = invoke("tune", "interference", "cpu", "--storage", str(tmp_path), "--study", "s")
    assert code == 1
    assert "cannot be used" in errors
    assert "s.db" in errors


def test_a_study_of_other_data_is_refused(tmp_path: Path) -> None:
    rest = ("--storage", str(tmp_path / "x.journal"), "--study", "s", "--trials", "1")
    assert invoke("tune", "interference", "cpu", *rest)[0] == 0
    code, _, errors = invoke("tune", "interference", "cpu", *rest, "--seed", "1")
    assert code == 1
    assert "study: 's' in" in errors
    assert "belongs to another" in errors
