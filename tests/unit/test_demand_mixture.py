"""The mixture of experts: what it learns, what it refuses, how wide it is before it knows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import GIB, profile, window

from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.demand.hostside import WIDTH
from cotenant.forecasting.types import HORIZONS_S, Forecast, Quantiles, Signature


def values(quantiles: Quantiles) -> list[float]:
    return [quantiles.p10, quantiles.p50, quantiles.p90, quantiles.p95, quantiles.p99]


def forecast_of(forecaster: MixtureForecaster, job_id: str = "job") -> Forecast:
    forecast = forecaster.forecast(job_id)
    assert forecast is not None
    return forecast


def assert_sound(forecast: Forecast) -> None:
    assert all(tuple(each) in ((), HORIZONS_S) for each in (forecast.util, forecast.memory))
    assert forecast.util or forecast.memory
    for levels in map(values, (*forecast.util.values(), *forecast.memory.values())):
        assert all(math.isfinite(value) for value in levels)
        assert levels == sorted(levels)
        assert levels[0] >= 0.0
    assert all(each.p99 <= 1.0 for each in forecast.util.values())
    for by_horizon in (forecast.util, forecast.memory):  # the farther ahead, the less is sure
        for near, far in pairwise(by_horizon[horizon] for horizon in by_horizon):
            assert far.p10 <= near.p10
            assert all(later >= sooner for sooner, later in zip(values(near)[2:], values(far)[2:], strict=True))
    if forecast.memory:
        assert forecast.peak_memory_bytes >= forecast.memory[1].p50 * 0.99


def phases(second: int) -> float:
    """A training job: 20 s of steps, 4 s of validation, a dip of 1 s for the checkpoint."""
    place = second % 25
    return 0.9 if place < 20 else 0.4 if place < 24 else 0.05


def test_the_phases_of_training_are_learnt_and_beat_persistence_and_averages() -> None:
    forecaster = MixtureForecaster()
    rng = np.random.default_rng(0)
    noisy = [min(1.0, max(0.0, phases(s) + 0.02 * float(rng.standard_normal()))) for s in range(250)]
    errors: dict[tuple[str, int], list[float]] = {}
    average = noisy[0]
    for second, util in enumerate(noisy):
        forecaster.observe(window(second, util))
        average += 0.3 * (util - average)
        for horizon in (1, 2, 5):
            if second >= 125 and second + horizon < len(noisy):
                truth = noisy[second + horizon]
                for name, guess in (
                    ("mixture", forecast_of(forecaster).util[horizon].p50),
                    ("persistence", util),
                    ("average", average),
                ):
                    errors.setdefault((name, horizon), []).append(abs(guess - truth))
    for horizon in (1, 2, 5):
        ours = float(np.mean(errors["mixture", horizon]))
        assert ours < 0.6 * float(np.mean(errors["persistence", horizon]))
        assert ours < 0.6 * float(np.mean(errors["average", horizon]))


def test_noise_without_structure_is_not_forecast_worse_than_by_persistence() -> None:
    forecaster = MixtureForecaster()
    rng = np.random.default_rng(1)
    walk = np.clip(0.5 + np.cumsum(0.03 * rng.standard_normal(300)), 0.0, 1.0)
    ours, last = [], []
    for second, util in enumerate(walk[:-5].tolist()):
        forecaster.observe(window(second, util))
        ours.append(abs(forecast_of(forecaster).util[5].p50 - walk[second + 5]))
        last.append(abs(util - walk[second + 5]))
    assert np.mean(ours[20:]) <= 1.05 * np.mean(last[20:])


def test_upper_quantiles_cover_what_they_say() -> None:
    forecaster = MixtureForecaster()
    rng = np.random.default_rng(2)
    utils = rng.beta(2.0, 3.0, 900).tolist()
    hits: dict[str, list[bool]] = {"p90": [], "p95": [], "p99": []}
    for second, util in enumerate(utils[:-1]):
        forecaster.observe(window(second, util))
        if second >= 200:
            for level, found in hits.items():
                found.append(utils[second + 1] <= getattr(forecast_of(forecaster).util[1], level))
    assert 0.87 <= np.mean(hits["p90"]) <= 0.93
    assert 0.93 <= np.mean(hits["p95"]) <= 0.97
    assert 0.97 <= np.mean(hits["p99"]) <= 1.0


def test_a_single_window_gives_a_wide_interval() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe(window(0, 0.3))
    forecast = forecast_of(forecaster)
    assert_sound(forecast)
    assert forecast.windows == 1
    for horizon in HORIZONS_S:
        assert forecast.util[horizon].p50 == pytest.approx(0.3, abs=1e-6)
        assert forecast.util[horizon].p95 >= 0.7
        assert forecast.util[horizon].p10 <= 0.05
        assert forecast.memory[horizon].p95 >= 1.2 * GIB


def test_a_constant_job_is_known_after_a_few_minutes() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe_batch([window(second, 0.4) for second in range(300)])
    forecast = forecast_of(forecaster)
    assert forecast.util[5].p50 == pytest.approx(0.4, abs=0.01)
    assert forecast.util[5].p95 - forecast.util[5].p10 < 0.05
    assert forecast.memory[5].p95 < 1.05 * GIB


def test_an_abrupt_change_widens_the_interval() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe_batch([window(second, 0.2) for second in range(200)])
    before = forecast_of(forecaster).util[5]
    rng = np.random.default_rng(3)
    for second in range(200, 260):
        forecaster.observe(window(second, float(rng.uniform(0.3, 1.0))))
    after = forecast_of(forecaster).util[5]
    assert after.p50 > 0.3
    assert after.p95 - after.p10 > before.p95 - before.p10 + 0.3


@pytest.mark.parametrize(("before", "after"), [(0.15, 0.85), (0.85, 0.15), (0.15, 0.4)])
@pytest.mark.parametrize("missing", [0, 1])
def test_after_an_abrupt_change_no_interval_is_sure_of_what_was(before: float, after: float, missing: int) -> None:
    jobs = [f"job-{i}" for i in range(20)]
    forecaster, rng = MixtureForecaster(), np.random.default_rng(0)
    over: dict[int, list[bool]] = {horizon: [] for horizon in HORIZONS_S}
    held: dict[int, list[bool]] = {horizon: [] for horizon in HORIZONS_S}
    for second in range(310):
        if second in range(300 - missing, 300):
            continue
        level = before if second < 300 else after
        utils = level + 0.02 * rng.standard_normal(len(jobs))
        forecaster.observe_batch([window(second, util, job_id=job) for job, util in zip(jobs, utils, strict=True)])
        if second >= 300:
            then = after + 0.02 * rng.standard_normal(len(jobs))
            for job_id, forecast in forecaster.forecast_batch(jobs).items():
                for horizon in HORIZONS_S:
                    quantiles = forecast.util[horizon]
                    over[horizon].append(bool(then[jobs.index(job_id)] > quantiles.p99))
                    held[horizon].append(quantiles.p99 - quantiles.p10 > 0.9 * abs(after - before))
    assert all(np.mean(each) <= 0.02 for each in over.values()), {h: np.mean(each) for h, each in over.items()}
    assert all(np.mean(held[horizon]) > 0.9 for horizon in (60, 300, 900))


def test_the_doubt_about_a_job_that_returns_is_soon_gone() -> None:
    forecaster, rng = MixtureForecaster(), np.random.default_rng(0)
    utils = (0.3 + 0.02 * rng.standard_normal(440)).tolist()
    utils[400] = 0.9
    for second, util in enumerate(utils):
        forecaster.observe(window(second, util))
        if second in (399, 400, 401, 439):
            quantiles = forecast_of(forecaster).util[1]
            wide = quantiles.p99 - quantiles.p10 > 0.3
            assert wide == (second in (400, 401)), (second, quantiles)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0.05, 8.0), st.integers(1, 15)), min_size=1, max_size=4))
def test_no_upper_quantile_of_memory_is_below_what_is_held(stretches: list[tuple[float, int]]) -> None:
    forecaster, second = MixtureForecaster(), 0
    for level, lasting in stretches:
        for _ in range(lasting):
            forecaster.observe(window(second, 0.5, memory=level * GIB))
            second += 1
        forecast = forecast_of(forecaster)
        assert_sound(forecast)
        for horizon in HORIZONS_S:
            assert forecast.memory[horizon].p90 >= level * GIB


def test_memory_that_was_said_to_be_needed_may_be_loaded_and_is_the_least_peak() -> None:
    forecaster = MixtureForecaster()
    forecaster.prime("job", profile(0.3, 7 * GIB, source="hints"))
    for second in range(40):
        forecaster.observe(window(second, 0.3, memory=min(2.0, 0.5 + second / 8) * GIB))
        forecast = forecast_of(forecaster)
        assert_sound(forecast)
        assert all((each.p99 == 7 * GIB) == (second < 30) for each in forecast.memory.values())
        assert forecast.peak_memory_bytes >= 7 * GIB


def test_a_hint_of_the_utilisation_is_no_reason_to_be_sure() -> None:
    forecaster = MixtureForecaster()
    for source in ("hints", "class", "history"):
        forecaster.prime(source, profile(0.8, p95=0.85, source=source))
        forecaster.observe(window(0, 0.3, job_id=source))
    assert forecast_of(forecaster, "hints").util[5].p95 > 0.7
    assert forecast_of(forecaster, "class").util[5].p95 > 0.7
    assert forecast_of(forecaster, "history").util[5].p95 < 0.5


def test_the_peak_of_a_job_that_is_loading_is_yet_to_come() -> None:
    forecaster = MixtureForecaster()
    for second in range(6):
        forecaster.observe(window(second, 0.3, memory=(1.0 + second) * GIB))
    loading = forecast_of(forecaster).peak_memory_bytes
    assert loading > 1.25 * 6 * GIB + 2 * GIB
    for second in range(6, 60):
        forecaster.observe(window(second, 0.3, memory=6.0 * GIB))
    assert 6 * GIB < forecast_of(forecaster).peak_memory_bytes < 1.1 * 6 * GIB


def test_what_is_known_beforehand_gives_a_forecast_and_narrows_the_first_intervals() -> None:
    forecaster = MixtureForecaster()
    forecaster.prime("job", profile(0.3, 2 * GIB, p95=0.4))
    forecaster.prime("unknown", profile(0.3, source="unknown"))
    assert forecaster.forecast("unknown") is None
    told = forecast_of(forecaster)
    assert_sound(told)
    assert (told.windows, told.util[5].p50, told.util[900].p95) == (0, 0.3, 0.4)
    assert told.peak_memory_bytes == 2.5 * GIB
    forecaster.observe(window(0, 0.3))
    forecaster.observe(window(0, 0.3, job_id="other"))
    assert forecast_of(forecaster).util[5].p95 < forecast_of(forecaster, "other").util[5].p95 - 0.2


ABSURD = (
    window(1, 0.5, samples=0),
    window(math.nan, 0.5),
    window(1, 0.5, window_s=0.0),
    window(1, 0.5, window_s=1e300),
    window(1, 2.5, memory=18446744073707737660.0),
    window(1, math.nan, memory=None),
    window(1, None, memory=-1.0),
    window(1, math.inf, memory=math.inf),
)


@pytest.mark.parametrize("bad", ABSURD)
def test_unusable_windows_leave_no_trace(bad: Signature) -> None:
    forecaster = MixtureForecaster()
    forecaster.observe(bad)
    assert forecaster.forecast("job") is None
    forecaster.observe_batch([window(2, 0.5), window(3, 0.5)])
    known = forecast_of(forecaster)
    forecaster.observe(bad)
    assert forecast_of(forecaster) == known


def test_half_a_reading_is_used_and_the_other_half_is_not_made_up() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe(window(0, 0.5, memory=None))
    half = forecast_of(forecaster)
    assert (half.memory, half.peak_memory_bytes) == ({}, 0.0)
    assert half.util[1].p50 == pytest.approx(0.5)
    forecaster.observe(window(1, None, memory=float(GIB)))
    forecast = forecast_of(forecaster)
    assert_sound(forecast)
    assert forecast.util[1].p50 == pytest.approx(0.5)


def test_what_is_read_on_one_of_two_gpus_only_is_forecast_from_that_one() -> None:
    forecaster = MixtureForecaster()
    for second in range(5):
        both = [window(second, 0.5, memory=None), window(second, None, memory=float(GIB), gpu_id="other")]
        forecaster.observe_batch(both)
    forecast = forecast_of(forecaster)
    assert_sound(forecast)
    assert forecast.util[1].p50 == pytest.approx(0.5, abs=0.05)
    assert forecast.memory[1].p50 == pytest.approx(GIB, rel=0.05)


def test_duplicates_and_late_windows_are_ignored_until_the_clock_was_set_back() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe_batch([window(5000 + i, 0.2) for i in range(5)])
    known = forecast_of(forecaster)
    forecaster.observe_batch([window(5004, 0.9), window(5001, 0.9), window(5004, 0.9)])
    assert forecast_of(forecaster) == known
    forecaster.observe_batch([window(second, 0.8) for second in range(60)])
    assert forecast_of(forecaster).util[1].p50 == pytest.approx(0.8, abs=0.05)


def test_a_jump_of_the_clock_forward_is_survived_and_not_learnt_from() -> None:
    forecaster = MixtureForecaster()
    for second in (0, 1, 2, 10**9, 10**9 + 1):
        forecaster.observe(window(second, 0.2 if second < 10 else 0.6))
    forecast = forecast_of(forecaster)
    assert_sound(forecast)
    assert forecast.util[1].p50 == pytest.approx(0.6, abs=0.1)


def test_held_back_is_not_idle() -> None:
    forecaster = MixtureForecaster()
    forecaster.observe_batch([window(second, 0.25, throttled=0.5) for second in range(30)])
    assert forecast_of(forecaster).util[1].p50 == pytest.approx(0.5, abs=0.01)


def test_starting_up_is_forgotten_when_training_begins() -> None:
    forecaster = MixtureForecaster()
    for second in range(5):
        forecaster.observe(window(second, 0.9, rate=None))
    for second in range(5, 8):
        forecaster.observe(window(second, 0.2, rate=10.0))
    assert forecast_of(forecaster).util[900].p50 == pytest.approx(0.2, abs=0.02)


def test_memory_that_outgrows_its_scale_is_followed() -> None:
    forecaster = MixtureForecaster()
    for second in range(80):
        forecaster.observe(window(second, 0.5, memory=float(GIB) if second < 30 else 40.0 * GIB))
    forecast = forecast_of(forecaster)
    assert_sound(forecast)
    assert forecast.memory[1].p50 == pytest.approx(40.0 * GIB, rel=0.01)
    assert 40.0 * GIB < forecast.peak_memory_bytes < 48.0 * GIB


def test_growing_memory_is_foreseen_by_the_upper_quantiles() -> None:
    forecaster = MixtureForecaster()
    step = GIB / 64
    for second in range(120):
        forecaster.observe(window(second, 0.5, memory=4.0 * GIB + step * second))
    last = 4.0 * GIB + step * 119
    ahead = forecast_of(forecaster).memory[5]
    assert ahead.p95 >= last + 4 * step


@given(
    st.lists(st.tuples(st.floats(0.1, 4.0), st.integers(1, 58)), min_size=1, max_size=5),
    st.floats(0.0, 0.05),
    st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_medians_far_ahead_of_a_young_job_are_those_of_now_and_not_of_its_start(
    stretches: list[tuple[float, int]], growth: float, lead: int
) -> None:
    forecaster = MixtureForecaster()
    levels = [level for level, length in [(0.05, lead), *stretches] for _ in range(length)]
    for second, level in enumerate(levels):
        forecaster.observe(window(second, min(1.0, level / 4.0), memory=(level + growth * second) * GIB))
        forecast = forecast_of(forecaster)
        assert_sound(forecast)
        assert all(forecast.memory[far].p50 == forecast.memory[5].p50 for far in (60, 300, 900))
        assert all(forecast.util[far].p50 == forecast.util[5].p50 for far in (60, 300, 900))


def test_medians_far_ahead_are_learnt_in_the_end() -> None:
    forecaster = MixtureForecaster()
    for second in range(1200):  # busy for half of every minute; at the end about to become so
        forecaster.observe(window(second, 0.9 if second % 60 < 30 else 0.1))
    last = forecast_of(forecaster)
    assert last.util[5].p50 > 0.7
    assert last.util[60].p50 < 0.3


def test_jobs_do_not_mix_and_a_forgotten_one_starts_afresh() -> None:
    forecaster = MixtureForecaster()
    for second in range(5):
        forecaster.observe_batch([window(second, i / 200, job_id=f"job-{i}") for i in range(200)])
    for i in (0, 63, 64, 199):
        assert forecast_of(forecaster, f"job-{i}").util[1].p50 == pytest.approx(i / 200, abs=1e-3)
    forecaster.forget("job-7")
    forecaster.forget("never seen")
    assert forecaster.forecast("job-7") is None
    forecaster.observe(window(0, 0.9, job_id="new"))
    assert forecast_of(forecaster, "new").windows == 1
    assert forecast_of(forecaster, "new").util[1].p50 == pytest.approx(0.9)


def test_a_job_on_two_gpus_has_one_forecast_that_spans_both() -> None:
    forecaster = MixtureForecaster()
    for second in range(200):
        forecaster.observe_batch([window(second, 0.2, gpu_id="a"), window(second, 0.6, gpu_id="b")])
    util = forecast_of(forecaster).util[5]
    assert forecast_of(forecaster).windows == 400
    assert (util.p10, util.p50, util.p90) == (
        pytest.approx(0.2, abs=0.05),
        pytest.approx(0.4, abs=0.05),
        pytest.approx(0.6, abs=0.05),
    )


def test_a_batch_equals_the_same_windows_one_by_one() -> None:
    windows = [window(i // 3, (i * 7 % 10) / 10, job_id=f"job-{i % 3}") for i in range(90)]
    one, many = MixtureForecaster(), MixtureForecaster()
    for signature in windows:
        one.observe(signature)
    many.observe_batch(windows)
    ids = ["job-0", "job-1", "job-2", "unknown"]
    assert set(many.forecast_batch(ids)) == {"job-0", "job-1", "job-2"}
    for job_id in ids[:3]:
        ours, theirs = forecast_of(one, job_id), forecast_of(many, job_id)
        for horizon in HORIZONS_S:
            assert values(ours.util[horizon]) == pytest.approx(values(theirs.util[horizon]), abs=1e-6)


def test_what_the_host_foresees_is_used_once_it_has_proved_right() -> None:
    rng = np.random.default_rng(4)
    utils = rng.uniform(0.1, 0.5, 200).tolist()
    told, alone, held = MixtureForecaster(), MixtureForecaster(), MixtureForecaster()
    errors: dict[str, list[float]] = {"told": [], "alone": [], "held": []}
    for second in range(190):
        ahead = tuple(utils[second + horizon] for horizon in (1, 2, 5) for _ in range(WIDTH))
        told.observe_batch([window(second, utils[second])], {("job", "g0"): ahead, ("gone", "g0"): ahead})
        alone.observe_batch([window(second, utils[second])], {})
        # Held back by half: what is measured and foreseen is half of what is wanted.
        half = tuple(value / 2.0 for value in ahead)
        held.observe_batch([window(second, utils[second] / 2.0, throttled=0.5)], {("job", "g0"): half})
        if second > 60:
            for name, forecaster in (("told", told), ("alone", alone), ("held", held)):
                errors[name].append(abs(forecast_of(forecaster).util[5].p50 - utils[second + 5]))
    assert np.mean(errors["told"]) < 0.3 * np.mean(errors["alone"])
    assert errors["held"] == pytest.approx(errors["told"], abs=1e-4)


@pytest.mark.parametrize(
    "said",
    [
        (),
        (0.5,),
        (0.5,) * (3 * WIDTH + 1),
        (None,) * (3 * WIDTH),
        (math.nan,) * (3 * WIDTH),
        (7.0, -1.0, math.inf) * WIDTH,
    ],
)
def test_what_a_host_cannot_have_foreseen_leaves_no_trace(said: tuple[float | None, ...]) -> None:
    told, alone = MixtureForecaster(), MixtureForecaster()
    for second in range(60):
        told.observe_batch([window(second, phases(second))], {("job", "g0"): said})
        alone.observe_batch([window(second, phases(second))])
    assert forecast_of(told) == forecast_of(alone)


readings = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(0.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 50), readings, readings, readings), max_size=30))
def test_forecasts_are_sound_whatever_is_observed(
    rows: list[tuple[int, float | None, float | None, float | None]],
) -> None:
    forecaster = MixtureForecaster()
    for second, util, memory, throttled in rows:
        signature = window(second, util, memory=memory, throttled=throttled)
        forecaster.observe(replace(signature, memory_peak_bytes=util))
    forecast = forecaster.forecast("job")
    if forecast is not None:
        assert_sound(forecast)
