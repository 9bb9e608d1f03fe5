"""Predicted against actual: what is scored, by which window, and the figures."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from packing import GIB, window

from cotenant.actors.forecasts import forecast_view
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.scoring import ForecastScores, ScoredForecast, SlowdownScores
from cotenant.forecasting.types import HORIZONS_S, DemandProfile, Forecast, Quantiles, Signature, ThroughputPrediction

UTIL = Quantiles(0.1, 0.4, 0.6, 0.7, 0.8)
MEMORY = Quantiles(*[float(each * GIB) for each in (1.0, 1.0, 1.2, 1.3, 1.5)])


def forecast(job_id: str = "job", util: Quantiles = UTIL, peak: float = 1.25 * GIB) -> Forecast:
    return Forecast(job_id, dict.fromkeys(HORIZONS_S, util), dict.fromkeys(HORIZONS_S, MEMORY), peak, 10)


def step(scores: ForecastScores, *windows: Signature, said: Forecast | None = None) -> list[ScoredForecast]:
    """One second of a host, as the PRM does it."""
    rows = scores.observe(windows)
    names = {each.job_id for each in windows}
    scores.expect({name: said or forecast(name) for name in names}, windows[0].start_s + 1.0, windows)
    return rows


def play(scores: ForecastScores, seconds: int, util: float | None = 0.5) -> list[ScoredForecast]:
    return [row for second in range(seconds) for row in step(scores, window(second, util))]


def of(rows: list[ScoredForecast], horizon: int, quantity: str = "util") -> list[ScoredForecast]:
    return [row for row in rows if (row.horizon_s, row.quantity) == (horizon, quantity)]


def test_a_forecast_is_scored_when_its_moment_comes() -> None:
    scores = ForecastScores()
    assert step(scores, window(0, 0.2)) == []
    util, memory = step(scores, window(1, 0.5))
    assert util == ScoredForecast("job", "g0", 1_000_001.0, 1, "util", 0.4, 0.6, 0.7, 0.8, 0.5, 0.2)
    assert (memory.quantity, memory.actual, memory.persistence) == ("memory", GIB, GIB)


def test_every_horizon_is_scored_in_its_turn() -> None:
    scores = ForecastScores()
    rows = play(scores, 1200)
    counts = {horizon: len(of(rows, horizon)) for horizon in (1, 5, 60, 300, 900)}
    assert counts == {1: 1199, 5: 1195, 60: 114, 300: 15, 900: 5}
    assert len(of(rows, 300, "peak")) == 15
    score = scores.score("job")
    assert score is not None
    assert {horizon: each.scored for horizon, each in score.horizons.items()} == counts
    assert scores.overall().horizons == score.horizons


def test_the_figures() -> None:
    scores = ForecastScores()
    for second, util in enumerate([0.2, 0.5, 0.65, 0.75, 0.85]):
        step(scores, window(second, util, memory=(1.0 if second < 4 else 1.6) * GIB))
    found = scores.overall().horizons[1]
    assert found.scored == 4
    assert found.util_error == pytest.approx((0.1 + 0.25 + 0.35 + 0.45) / 4)
    assert found.util_persistence_error == pytest.approx((0.3 + 0.15 + 0.1 + 0.1) / 4)
    assert (found.coverage_p90, found.coverage_p95) == (0.25, 0.5)
    assert found.memory_violations == 0.25
    assert found.memory_waste_percent == pytest.approx(50.0 * 3 / 4)
    assert found.pinball is not None
    first = 0.1 * 0.4 + 0.5 * 0.1 + 0.1 * 0.1 + 0.05 * 0.2 + 0.01 * 0.3
    assert 0.0 < first / 5 < found.pinball


@pytest.mark.parametrize("held", [0.0, 1e-320, 1e-300, 0.5, 1.0, float(1 << 50)])
def test_whatever_memory_is_held_the_figures_are_numbers(held: float) -> None:
    scores = ForecastScores()
    for second in range(5):
        step(scores, window(second, memory=held))
    step(scores, window(5, memory=float(GIB)))
    for score in (scores.overall(), scores.score("job")):
        assert score is not None
        for each in score.horizons.values():
            assert all(math.isfinite(figure) for figure in astuple(each) if figure is not None)


def test_utilisation_is_scored_as_demand() -> None:
    scores = ForecastScores()
    step(scores, window(0, 0.3, throttled=0.5))
    util = step(scores, window(1, 0.3, throttled=0.4))[0]
    assert (util.persistence, util.actual) == (pytest.approx(0.6), pytest.approx(0.5))


def test_a_peak_that_is_exceeded_within_five_minutes_was_forecast_too_low() -> None:
    scores = ForecastScores()
    for second in range(700):
        step(scores, window(second, 0.5, memory=1.0 * GIB, peak=(2.0 if second == 330 else 1.0) * GIB))
    overall = scores.overall()
    rows = overall.peaks_scored
    assert rows >= 6
    assert overall.peaks_under is not None
    assert 0.0 < overall.peaks_under < 1.0


@pytest.mark.parametrize(("peak", "largest"), [(1.25, 1.5), (2.0, 2.0)])
def test_the_largest_memory_until_the_end_is_no_less_than_at_any_moment_until_then(peak: float, largest: float) -> None:
    """A minute ahead 1.5 GiB are exceeded once in a hundred times: until the end more is not less."""
    said = forecast(peak=peak * GIB)
    told = forecast_view(said, [window(0, 0.5)], "mixture")
    assert told.peak_memory_bytes == largest * GIB
    assert all(told.peak_memory_bytes >= row.p99 for row in told.memory)
    scores = ForecastScores()
    rows = [row for second in range(700) for row in step(scores, window(second, 0.5), said=said)]
    assert {row.p50 for row in of(rows, 300, "peak")} == {largest * GIB}


@pytest.mark.parametrize("drift", [0.97, 1.03, 0.7])
def test_the_nearest_window_is_the_one(drift: float) -> None:
    scores = ForecastScores()
    rows = []
    for number in range(400):
        rows += step(scores, replace(window(0, number / 1000), start_s=1e6 + number * drift, window_s=drift))
    far = of(rows, 60)
    assert far
    assert {round(1000 * (row.actual - row.persistence)) for row in far} == {round(60 / drift)}


def test_missing_windows_are_not_scored() -> None:
    scores = ForecastScores()
    step(scores, window(0))
    rows = step(scores, window(3))
    assert of(rows, 1) == []
    rows = step(scores, window(4))
    assert len(of(rows, 1)) == 1
    assert len(of(step(scores, window(5)), 5)) == 1


@pytest.mark.parametrize(
    "late",
    [
        pytest.param({"start_s": 1_000_000.0}, id="out of order"),
        pytest.param({"start_s": 1_000_001.0}, id="duplicate"),
        pytest.param({"start_s": math.nan}, id="no time"),
        pytest.param({"start_s": math.inf}, id="endless"),
    ],
)
def test_late_and_senseless_windows_change_nothing(late: dict[str, float]) -> None:
    scores, plain = ForecastScores(), ForecastScores()
    for each in (scores, plain):
        step(each, window(0))
        step(each, window(1))
    assert step(scores, replace(window(1, 0.9), **late)) == []  # type: ignore[arg-type]
    assert step(scores, window(2)) == step(plain, window(2))


@pytest.mark.parametrize("util", [None, math.nan, 2.5])
def test_a_window_without_a_reading_scores_nothing_of_it(util: float | None) -> None:
    scores = ForecastScores()
    step(scores, window(0))
    rows = step(scores, window(1, util))
    assert [row.quantity for row in rows] == ["memory"]
    assert [row.quantity for row in step(scores, window(2))] == ["memory"]  # nothing to compare with


@pytest.mark.parametrize("jump_s", [-7200, 10**6])
def test_a_clock_that_jumps_loses_what_was_waited_for(jump_s: int) -> None:
    scores = ForecastScores()
    play(scores, 100)
    rows = [row for second in range(10) for row in step(scores, window(jump_s + second))]
    assert of(rows, 60) == []
    assert of([row for second in range(10, 20) for row in step(scores, window(jump_s + second))], 1)


def test_a_job_on_two_gpus_is_judged_on_the_first_until_it_has_left_that() -> None:
    scores = ForecastScores()
    rows = []
    for second in range(10):
        rows += step(scores, window(second, 0.2), window(second, 0.8, gpu_id="g1"))
    assert {row.gpu_id for row in rows} == {"g0"}
    rows = [row for second in range(10, 30) for row in step(scores, window(second, 0.8, gpu_id="g1"))]
    assert {row.gpu_id for row in rows} == {"g1"}


def test_jobs_without_a_forecast_or_window_are_no_trouble() -> None:
    scores = ForecastScores()
    scores.expect({"job": forecast()}, 0.0, [])
    scores.expect({"job": forecast()}, 0.0, [window(0)])
    assert scores.observe([window(0), window(0, job_id="other")]) == []
    scores.expect({}, 0.0, [window(0)])
    assert scores.observe([window(1)]) == []
    assert scores.score("never seen") is None
    scores.forget("never seen")
    scores.forget("job")
    assert scores.score("job") is None
    nothing = scores.overall()
    assert (nothing.horizons, nothing.peaks_scored, nothing.peaks_under) == ({}, 0, None)


def test_many_jobs_take_turns() -> None:
    scores = ForecastScores()
    counts = [
        len(of(step(scores, *[window(second, job_id=f"job-{i}") for i in range(1000)]), 1)) for second in range(40)
    ]
    assert sum(counts[20:31]) == 1000  # each job once in eleven seconds
    assert max(counts[20:]) <= 100


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.forecasting.scoring.MOST_JOBS", 10)
    scores = ForecastScores()
    for second in range(400):
        step(scores, window(second), window(second, job_id=f"job-{second}"))
    assert len(scores._jobs) <= 10
    assert max(len(job.expected) for job in scores._jobs.values()) < 20


def observed(n: float, gpu_type: str = "A100") -> Observation:
    known = DemandProfile(0.8, 0.8, None, 10.0, 60.0, "history", fingerprint="a")
    return Observation(gpu_type, known, (replace(known, fingerprint="b"),), n, n - 0.01, n + 0.01, 60.0)


def test_slowdowns_are_scored_beside_the_rule() -> None:
    scores = SlowdownScores()
    assert scores.overall() is None
    for n, gpu_type in ((0.5, "A100"), (0.7, "A100"), (1.1, "T4")):
        scores.add(observed(n, gpu_type), ThroughputPrediction(0.55, 0.6, 0.75))
    overall, by_type = scores.overall(), scores.by_type()
    assert overall is not None
    assert (overall.scored, overall.error) == (3, pytest.approx((0.1 + 0.1 + 0.4) / 3))
    assert overall.bias == pytest.approx((0.1 - 0.1 - 0.4) / 3)
    assert overall.coverage == pytest.approx(1 / 3)
    rule = UtilisationRule().predict([observed(0.5).focal, *observed(0.5).others], "A100")[0].mid
    assert overall.rule_error == pytest.approx((abs(rule - 0.5) + abs(rule - 0.7) + abs(rule - 1.0)) / 3)
    assert set(by_type) == {"A100", "T4"}
    assert by_type["A100"].coverage == 0.5
    assert [row.covered for row in scores.rows()] == [False, True, False]


def test_the_history_of_slowdowns_is_bounded() -> None:
    scores = SlowdownScores()
    for _ in range(2500):
        scores.add(observed(0.5), ThroughputPrediction(0.5, 0.5, 0.5))
    assert len(scores.rows()) == 2000
