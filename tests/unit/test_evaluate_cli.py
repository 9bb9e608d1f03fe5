"""``cotenant evaluate``: hold-out tables beside every baseline, and the score of a model as it is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import invoke

from cotenant._evaluate import programs_of
from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.training import demand_fit

BASELINES = ("constant mean", "utilisation rule", "half of the excess")


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for number in range(3):
        rng = np.random.default_rng(number)
        stamps = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(120), unit="s")
        busy = np.arange(120) % 12 < 8
        pd.DataFrame(
            {
                "timestamp": stamps.strftime("%Y/%m/%d %H:%M:%S.%f"),
                "power.draw": 100,
                "utilization.gpu": np.where(busy, 80, 20) + rng.integers(-3, 4, 120),
                "memory.used": np.where(busy, 4000, 3500),
            }
        ).to_csv(folder / f"run{number}.csv", index=False)
    return folder


def test_interference_by_family_and_as_shipped(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    where = ("--registry", str(tmp_path / "models"), "--json", str(file))
    code, out, err = invoke("evaluate", "interference", "cpu", "--version", "shipped", *where)
    assert code == 0
    for text in ("held-out family", *BASELINES, "all 6 groups", "version shipped, as it is"):
        assert text in out
    assert "was trained on these very data" in err
    record = json.loads(file.read_text())
    found = record["held-out family"]
    assert len(found["folds"]) == 6
    assert found["version"]["metrics"]["MAE"] < found["all"]["metrics"]["MAE"] < min(found["all"]["baselines"].values())
    assert "constant mean" not in found["version"]["baselines"]
    assert record["warnings"]


def test_interference_by_job(tmp_path: Path) -> None:
    code, out, err = invoke("evaluate", "interference", "cpu", "--groups", "job", "--registry", str(tmp_path))
    assert (code, err) == (0, "")
    assert "held-out job" in out
    assert "all 13 groups" in out


def test_demand_and_a_trained_version(tmp_path: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_fit, "TrainingOptions", partial(demand_fit.TrainingOptions, trees=5))
    where = ("--registry", str(tmp_path / "models"))
    few = ("--updates", "2", "--experts", "gru,trees")
    trained = invoke("train", "demand", str(recordings), "--licence", "ours", *few, *where, "--json")
    version = json.loads(trained[1])["version"]
    file = tmp_path / "scores.json"
    code, out, err = invoke(
        "evaluate", "demand", str(recordings), "--version", version, *few, *where, "--json", str(file)
    )
    assert code == 0, err
    assert "was trained on these very data" in err
    assert "as it is" in out
    assert "it stays as it is' (below 1: better)" in out
    for column in ("error", "untrained", "average", "worst +1", "worst +5", "p95 +1", "p95 +5"):
        assert column in out
    assert max(map(len, out.splitlines())) <= 180
    record = json.loads(file.read_text())
    for quantity in ("util", "memory"):
        assert quantity in out
        assert len(record[quantity]["folds"]) == 3
        assert "MAE / persistence" in record[quantity]["all"]["metrics"]
        assert {name.split(",")[0] for name in record[quantity]["all"]["baselines"]} == {
            "persistence",
            "EWMA",
            "untrained mixture",
        }
        assert not any(name.startswith("EWMA") for name in record[quantity]["version"]["baselines"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interference", "cpu", "--version", "newest"), "version: 'newest' is not accepted"),
        (("interference", "cpu", "--json", "/nonexistent/x.json"), "/nonexistent/x.json cannot be written"),
        (("interference", "none"), "none: there is nothing"),
        (("demand", "none"), "none: there is nothing"),
    ],
)
def test_what_is_not_accepted(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = invoke("evaluate", *arguments, "--registry", str(tmp_path))
    assert code == 1
    assert message in err


def test_programs_of_a_store_are_named_by_the_jobs_that_ran_them() -> None:
    none = np.zeros(0)
    series = [
        ValueSeries("15a2dcae1b24b959", "job-1 on h1-0", none),
        ValueSeries("15a2dcae1b24b959", "job-1 on h1-1", none),
        ValueSeries("15a2dcae1b24b959", "job-2 on h1-0", none),
        ValueSeries("5408c679489705cd", "job-3 on h1-0", none),
        ValueSeries("job-4", "job-4 on h1-0", none),  # of no known program
        ValueSeries("trace.csv", "GPU 0", none),
    ]
    assert programs_of(series) == {
        "15a2dcae1b24b959": "15a2dcae1b24b959 (job-1 and 1 more)",
        "5408c679489705cd": "5408c679489705cd (job-3)",
    }
