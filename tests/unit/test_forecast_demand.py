"""The demand forecaster: what it learns, what it refuses, what it promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, window

from cotenant.forecasting.demand import EwQuantileForecaster
from cotenant.forecasting.types import HORIZONS_S, Forecast, Quantiles
from cotenant.forecasting.windows import uncensored


def forecast_of(*utils: float, memory: float = float(GIB)) -> Forecast:
    forecaster = EwQuantileForecaster()
    for second, util in enumerate(utils):
        forecaster.observe(window(second, util, memory=memory))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    return forecast


def values(quantiles: Quantiles) -> list[float]:
    return [quantiles.p10, quantiles.p50, quantiles.p90, quantiles.p95, quantiles.p99]


def test_a_constant_job_is_forecast_exactly_at_every_horizon() -> None:
    forecast = forecast_of(*[0.37] * 30, memory=431 * 2.0**20)
    assert tuple(forecast.util) == tuple(forecast.memory) == HORIZONS_S
    for horizon in HORIZONS_S:
        assert values(forecast.util[horizon]) == [0.37] * 5
        assert values(forecast.memory[horizon]) == [431 * 2.0**20] * 5
    assert forecast.windows == 30


def test_short_horizons_follow_a_step_before_long_ones() -> None:
    forecast = forecast_of(*[0.2] * 300, *[0.8] * 30)
    assert forecast.util[1].p50 == pytest.approx(0.8, abs=0.02)
    assert forecast.util[5].p50 == pytest.approx(0.8, abs=0.02)
    assert forecast.util[900].p50 == pytest.approx(0.2, abs=0.02)


def test_quantiles_of_a_spread_match_the_spread() -> None:
    forecast = forecast_of(*[(i * 37 % 100) / 100 for i in range(2000)])
    for level, value in zip((0.10, 0.50, 0.90, 0.95, 0.99), values(forecast.util[900]), strict=True):
        assert value == pytest.approx(level, abs=0.03)


@pytest.mark.parametrize(
    ("util", "throttled", "demand"),
    [
        (0.30, 0.0, 0.30),
        (0.30, None, 0.30),
        (0.30, 0.4, 0.50),
        (0.50, 0.5, 1.00),
        (0.50, 0.9, 1.00),
        (0.10, 1.0, 1.00),
        (0.00, 1.0, 0.00),
        (0.30, math.nan, 0.30),
    ],
)
def test_a_throttled_window_counts_as_the_demand_behind_it(util: float, throttled: float | None, demand: float) -> None:
    assert uncensored(util, throttled) == pytest.approx(demand)
    forecaster = EwQuantileForecaster()
    forecaster.observe(window(0, util, throttled=throttled))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.util[5].p95 == pytest.approx(demand)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"util": None, "memory": None}, id="nothing read"),
        pytest.param({"util": math.nan, "memory": math.inf}, id="not numbers"),
        pytest.param({"util": -0.1, "memory": -1.0}, id="negative"),
        pytest.param({"util": 7.0, "memory": 1e30}, id="absurd"),
        pytest.param({"window_s": 0.0}, id="no length"),
        pytest.param({"window_s": 1e300}, id="of no length that a window has"),
        pytest.param({"window_s": math.nan}, id="length is no number"),
        pytest.param({"samples": 0}, id="no samples"),
        pytest.param({"second": math.nan}, id="no time"),
        pytest.param({"second": 9.0}, id="duplicate"),
        pytest.param({"second": 3.5}, id="out of order"),
    ],
)
def test_unusable_windows_change_nothing(bad: dict[str, float]) -> None:
    forecaster = EwQuantileForecaster()
    for second in range(10):
        forecaster.observe(window(second, 0.3))
    before = forecaster.forecast("job")
    forecaster.observe(window(**{"second": 10.0, "util": 0.9, **bad}))
    assert forecaster.forecast("job") == before


def test_half_a_window_updates_the_half_that_was_read() -> None:
    forecaster = EwQuantileForecaster()
    forecaster.observe(window(0, None, memory=5.0 * GIB))
    half = forecaster.forecast("job")
    assert half is not None
    assert (half.util, half.memory[1].p50) == ({}, 5.0 * GIB)
    forecaster.forget("job")
    forecaster.observe(window(0, 0.3, memory=None))
    half = forecaster.forecast("job")
    assert half is not None
    assert (half.util[1].p50, half.memory, half.largest_memory_bytes) == (0.3, {}, 0.0)
    forecaster.observe(window(1, None, memory=5.0 * GIB))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert (forecast.util[1].p50, forecast.memory[1].p50) == (0.3, 5.0 * GIB)


def test_slightly_more_than_the_whole_device_is_noise() -> None:
    assert forecast_of(1.05).util[1].p99 == 1.0


def test_a_clock_set_back_is_believed_after_ten_windows() -> None:
    forecaster = EwQuantileForecaster()
    forecaster.observe(window(5000, 0.2))
    for second in range(9):
        forecaster.observe(window(second, 0.8))
    first = forecaster.forecast("job")
    for second in range(9, 60):
        forecaster.observe(window(second, 0.8))
    last = forecaster.forecast("job")
    assert first is not None
    assert last is not None
    assert first.util[1].p50 == pytest.approx(0.2)
    assert last.util[1].p50 == pytest.approx(0.8, abs=0.02)


def test_a_late_window_before_the_clock_is_set_back_does_not_delay_the_restart() -> None:
    forecaster = EwQuantileForecaster()
    forecaster.observe_batch([window(5000, 0.2), window(5001, 0.2), window(5000, 0.2)])
    forecaster.observe_batch([window(second, 0.8) for second in range(60)])
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.util[1].p50 == pytest.approx(0.8, abs=0.02)


def test_a_jump_of_the_clock_forward_forgets_but_keeps_working() -> None:
    forecaster = EwQuantileForecaster()
    for second in (0, 1, 2, 10**9, 10**9 + 1):
        forecaster.observe(window(second, 0.2 if second < 10 else 0.6))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.util[60].p10 == pytest.approx(0.6, abs=0.02)


def test_peak_memory_margin_shrinks_while_the_peak_holds_and_returns_when_it_grows() -> None:
    forecaster = EwQuantileForecaster()
    peaks: list[float] = []
    for second in range(100):
        forecaster.observe(window(second, 0.5, memory=1000.0))
        forecast = forecaster.forecast("job")
        assert forecast is not None
        peaks.append(forecast.peak_memory_bytes)
    assert peaks[0] == pytest.approx(1250.0)
    assert peaks == sorted(peaks, reverse=True)
    assert 1020.0 < peaks[-1] < 1050.0
    forecaster.observe(window(100, 0.5, memory=1500.0, peak=2000.0))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.peak_memory_bytes == pytest.approx(2500.0)


def test_jobs_do_not_mix_and_a_forgotten_one_starts_afresh() -> None:
    forecaster = EwQuantileForecaster()
    for second in range(5):
        forecaster.observe_batch([window(second, i / 200, job_id=f"job-{i}") for i in range(200)])
    for i in (0, 63, 64, 199):
        forecast = forecaster.forecast(f"job-{i}")
        assert forecast is not None
        assert forecast.util[1].p50 == pytest.approx(i / 200)
    forecaster.forget("job-7")
    forecaster.forget("never seen")
    assert forecaster.forecast("job-7") is None
    forecaster.observe(window(0, 0.9, job_id="new"))
    forecast = forecaster.forecast("new")
    assert forecast is not None
    assert (forecast.util[1].p10, forecast.windows) == (0.9, 1)


def test_a_job_on_two_gpus_learns_from_both() -> None:
    forecaster = EwQuantileForecaster()
    for second in range(20):
        forecaster.observe_batch([window(second, 0.2, gpu_id="a"), window(second, 0.6, gpu_id="b")])
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.windows == 40
    assert (forecast.util[60].p10, forecast.util[60].p90) == (
        pytest.approx(0.2, abs=0.02),
        pytest.approx(0.6, abs=0.02),
    )


def test_a_batch_equals_the_same_windows_one_by_one() -> None:
    windows = [window(i // 3, (i * 7 % 10) / 10, job_id=f"job-{i % 3}") for i in range(60)]
    one, many = EwQuantileForecaster(), EwQuantileForecaster()
    for signature in windows:
        one.observe(signature)
    many.observe_batch(windows)
    ids = ["job-0", "job-1", "job-2", "unknown"]
    assert one.forecast_batch(ids) == many.forecast_batch(ids)
    assert set(many.forecast_batch(ids)) == {"job-0", "job-1", "job-2"}


def test_hours_of_windows_do_not_overflow() -> None:
    forecaster = EwQuantileForecaster()
    forecaster.observe_batch([window(second, 0.25 + 0.5 * (second % 2)) for second in range(3000)])
    forecast = forecaster.forecast("job")
    assert forecast is not None
    for horizon in HORIZONS_S:
        assert all(math.isfinite(value) for value in values(forecast.util[horizon]))
        assert forecast.util[horizon].p90 == pytest.approx(0.75, abs=0.02)


readings = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 50), readings, readings, readings), max_size=30))
def test_forecasts_are_ordered_and_bounded_whatever_is_observed(
    rows: list[tuple[int, float | None, float | None, float | None]],
) -> None:
    forecaster = EwQuantileForecaster()
    for second, util, memory, throttled in rows:
        signature = window(second, util, memory=memory, throttled=throttled)
        forecaster.observe(replace(signature, memory_peak_bytes=util))
    forecast = forecaster.forecast("job")
    if forecast is None:
        return
    assert all(tuple(each) in ((), HORIZONS_S) for each in (forecast.util, forecast.memory))
    assert forecast.util or forecast.memory
    for utils in map(values, forecast.util.values()):
        assert utils == sorted(utils)
        assert utils[0] >= 0.0
        assert utils[-1] <= 1.0
    for memories in map(values, forecast.memory.values()):
        assert memories == sorted(memories)
        assert memories[0] >= 0.0
        assert memories[-1] <= forecast.peak_memory_bytes + 1.0


def test_starting_up_is_forgotten_when_training_begins() -> None:
    forecaster = EwQuantileForecaster()
    for second in range(5):
        forecaster.observe(window(second, 0.9, rate=None))
    for second in range(5, 8):
        forecaster.observe(window(second, 0.2, rate=10.0))
    forecast = forecaster.forecast("job")
    assert forecast is not None
    assert forecast.util[900].p99 == pytest.approx(0.2, abs=0.02)
