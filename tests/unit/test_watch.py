"""Predictions held against what happened: scored once, logged, and never knowing the measurement beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.actors.models import ModelShelf
from cotenant.actors.watch import FOLDER, PredictionLog, Watch
from cotenant.configs.settings import PredictionSettings, SignatureSettings
from cotenant.forecasting.datasets.prediction_log import load_forecast_log, load_slowdown_log
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile, Signature

START = 1_900_000_000.0


def job(name: str, util: float = 0.6) -> DemandProfile:
    return DemandProfile(util, util, 1 << 30, 10.0, 30.0, "history", fingerprint=name)


def measured(n: float) -> Observation:
    return Observation("cpu-core", job("a"), (job("b"),), n, n - 0.02, n + 0.02, 60.0)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watched = Watch(ModelShelf(PredictionSettings(), tmp_path), PredictionLog(SignatureSettings(), tmp_path))
    yield watched
    watched.close()


def run(watch: Watch, seconds: int, util: float = 0.5) -> None:
    """One job with a steady demand, forecast every second as the PRM does."""
    forecaster = MixtureForecaster()
    for second in range(seconds):
        window = Signature("j", "g", START + second, 1.0, 10, util, util, 1e9, 1e9, 5.0, 0.0, 0.0, 0, 1.0)
        watch.windows("host", [window], {"j": "program"})
        forecaster.observe(window)
        watch.forecasts(forecaster.forecast_batch(["j"]), START + second + 1.0, [window])


def test_forecasts_are_scored_and_logged_when_their_moment_comes(watch: Watch, tmp_path: Path) -> None:
    assert watch.demand_scores() == []
    run(watch, 30)
    scores = {each.horizon_s: each for each in watch.demand_scores("j") or []}
    assert scores.keys() == {1, 5}  # the others are not due yet
    assert scores[1].scored == 29
    assert scores[1].util_error == pytest.approx(0.0, abs=0.02)
    assert watch.demand_scores("nobody") is None
    watch.close()
    log = load_forecast_log(tmp_path / FOLDER)
    assert set(log["job_id"]) == {"j"}
    assert (log["quantity"] == "util").sum() == scores[1].scored + scores[5].scored
    assert log.loc[log["quantity"] == "util", "actual"].eq(0.5).all()


def test_how_often_peaks_were_exceeded_is_told_where_it_is_looked_at(watch: Watch) -> None:
    run(watch, 362)
    scores = {each.horizon_s: each.memory_peaks_under for each in watch.demand_scores() or []}
    assert scores == {1: None, 5: None, 60: None, 300: 0.0}


def test_a_measurement_is_predicted_before_it_is_known_and_known_afterwards(watch: Watch, tmp_path: Path) -> None:
    watch.slowdowns("host", START, [measured(0.97)])
    (first,) = watch.slowdown_scores()
    watch.slowdowns("host", START + 60.0, [measured(0.97)])
    (both,) = watch.slowdown_scores()
    assert (first.scored, both.scored) == (1, 2)
    assert both.error == pytest.approx(first.error / 2)  # the second was known
    assert both.rule_error == pytest.approx(first.rule_error)
    watch.close()
    log = load_slowdown_log(tmp_path / FOLDER)
    assert list(log["measured"]) == [0.97, 0.97]
    assert log["others"].map(list).tolist() == [["b"], ["b"]]
    assert log["predicted"].iloc[1] == pytest.approx(0.97)


def test_the_log_is_empty_before_anything_was_scored(tmp_path: Path) -> None:
    assert len(load_forecast_log(tmp_path)) == len(load_slowdown_log(tmp_path)) == 0
    assert {"p95", "actual"} <= set(load_forecast_log(tmp_path).columns)


def test_drift_is_told_once_and_until_a_training_has_looked_at_it(watch: Watch) -> None:
    for second in range(60):  # far outside of any interval; the pair is another one every time
        seen = Observation("cpu-core", job(f"a{second}", 0.05), (job(f"b{second}", 0.05),), 0.1, 0.09, 0.11, 60.0)
        watch.slowdowns("host", START + second, [seen])
    assert "intervals" in watch.reasons()["interference"]
    assert "cpu-core" in watch.drifts[0]
    watch.retrained("interference")
    assert watch.reasons() == {}


def test_what_ended_is_forgotten_and_still_counts(watch: Watch) -> None:
    run(watch, 10)
    watch.forget("j")
    assert watch.demand_scores("j") is None
    assert watch.demand_scores()


def test_a_replaced_model_is_judged_anew(watch: Watch, tmp_path: Path) -> None:
    for second in range(49):  # one more, and the intervals would be too narrow
        seen = Observation("cpu-core", job(f"a{second}", 0.05), (job(f"b{second}", 0.05),), 0.1, 0.09, 0.11, 60.0)
        watch.slowdowns("host", START + second, [seen])
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "active.json").write_text('{"interference": "20200101T000000Z-00000000"}')
    watch.follow()
    seen = Observation("cpu-core", job("c", 0.05), (job("d", 0.05),), 0.1, 0.09, 0.11, 60.0)
    watch.slowdowns("host", START + 60.0, [seen])
    assert watch.reasons() == {}
