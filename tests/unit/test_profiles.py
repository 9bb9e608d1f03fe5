"""The profile book: which windows count for what."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, window

from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.demand.ewquantile import EwQuantileForecaster
from cotenant.forecasting.profiles import ProfileBook, from_hints
from cotenant.forecasting.types import UNKNOWN_PROFILE, Forecast, JobMeasurement, Signature
from cotenant.scheduler.core.sanity import plausible

NUMBERS = (0.0, 0.5, 1.0, 2.5, 20.0, -1.0, 1e12, 18446744073707737660.0, 1e300, 1e-300, math.nan, math.inf, -math.inf)


def trained(
    book: ProfileBook | None = None, *, job_id: str = "job", util: float = 0.5, rate: float = 20.0
) -> ProfileBook:
    """A book that has seen a job start (three windows at full load), warm up (two) and run alone (eight)."""
    book = book or ProfileBook()
    for second in range(3):
        book.observe(window(second, 1.0, job_id=job_id), "fp")
    for second in range(3, 5):
        book.observe(window(second, 0.9, job_id=job_id, rate=3.0), "fp")
    for second in range(5, 13):
        book.observe(window(second, util, job_id=job_id, rate=rate), "fp")
    return book


def test_nothing_is_known_of_a_job_never_seen() -> None:
    assert ProfileBook().profile("job", "fp") == UNKNOWN_PROFILE


def test_solo_numbers_leave_out_start_and_warm_up() -> None:
    known = trained().profile("job", "fp")
    assert (known.util_mean, known.util_p95, known.solo_step_rate) == (0.5, 0.5, 20.0)
    assert (known.observed_s, known.source, known.from_shared) == (8.0, "history", False)


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param({"neighbours": 1}, id="beside another job"),
        pytest.param({"throttled": 0.03}, id="held back"),
    ],
)
def test_solo_numbers_ignore_windows_that_are_not_solo(unlike: dict[str, float]) -> None:
    book = trained()
    for second in range(13, 60):
        book.observe(window(second, 0.2, rate=8.0, **unlike), "fp")  # type: ignore[arg-type]
    known = book.profile("job", "fp")
    assert (known.util_mean, known.solo_step_rate, known.from_shared) == (0.5, 20.0, False)


@pytest.mark.parametrize("throttled", [0.0, 0.02, None])
def test_hardly_or_unknowably_held_back_is_solo(throttled: float | None) -> None:
    book = ProfileBook()
    for second in range(10):
        book.observe(window(second, 0.4, rate=10.0, throttled=throttled), "fp")
    assert not book.profile("job", "fp").from_shared


def test_shared_windows_serve_while_there_is_nothing_better_and_are_marked() -> None:
    book = ProfileBook()
    for second in range(10):
        book.observe(window(second, 0.3, rate=10.0, throttled=0.4, neighbours=1), "fp")
    known = book.profile("job", "fp")
    assert known.util_mean == pytest.approx(0.5)  # corrected for having been held back
    assert (known.from_shared, known.solo_step_rate, known.observed_s) == (True, None, 8.0)
    book.observe(window(10, 0.6, rate=12.0), "fp")
    known = book.profile("job", "fp")
    assert (known.util_mean, known.from_shared, known.observed_s) == (0.6, False, 1.0)


def test_a_program_without_steps_is_known_by_all_its_windows() -> None:
    book = ProfileBook()
    for second in range(10):
        book.observe(window(second, 0.7, rate=None), "fp")
    known = book.profile("job", "fp")
    assert (known.util_mean, known.observed_s, known.solo_step_rate) == (pytest.approx(0.7), 10.0, None)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        pytest.param([20.0] * 10, 20.0, id="steady"),
        pytest.param([20.0, 20.0, 0.0, 0.0, 0.0] * 6, 20.0, id="evaluation phases"),
        pytest.param([20.0] * 8 + [55.0, 2.0], 20.0, id="stray windows"),
        pytest.param([0.0, 0.0, 1.0] * 40, 1 / 3, id="one step in three seconds"),
        pytest.param([1.0, 0.0, 1.0, 0.0], 0.5, id="unfinished block"),
        pytest.param([1.0], None, id="a single step"),
        pytest.param([math.nan, 20.0, math.inf, 20.0], 20.0, id="absurd rates"),
    ],
)
def test_solo_step_rate_is_robust(rates: list[float], expected: float | None) -> None:
    book = ProfileBook()
    for second, rate in enumerate([1.0, 1.0, *rates]):
        book.observe(window(second, 0.5, rate=rate), "fp")
    assert book.profile("job", "fp").solo_step_rate == (None if expected is None else pytest.approx(expected, rel=0.1))


@given(
    st.floats(0.5, 200.0),
    st.floats(1.8, 20.0),
    st.integers(20, 60),
    st.lists(st.floats(0.9, 1.1), min_size=1, max_size=7),
    st.booleans(),
)
def test_a_program_with_phases_has_no_rate_alone_and_gets_one_once_it_is_steady(
    slow: float, times: float, length: int, noise: list[float], faster_first: bool
) -> None:
    rates = [slow] * length + [slow * times] * length
    book = ProfileBook()
    seconds = 0

    def run(job_id: str, played: list[float]) -> None:
        nonlocal seconds
        for k, rate in enumerate(played):
            lengths = max(1.0, 8.0 / rate / 5.0)  # slow steps: the time between them counts, not the second
            book.observe(window(seconds, 0.5, job_id=job_id, rate=rate * noise[k % len(noise)], window_s=lengths), "fp")
            seconds += math.ceil(lengths)

    run("first", rates[:2] + (rates[::-1] if faster_first else rates))
    assert book.profile("first", "fp").solo_step_rate is None
    assert book.profile(None, "fp").solo_step_rate is None
    assert ProfileBook.from_json(book.to_json()).profile("next", "fp").solo_step_rate is None
    run("next", [slow] * 12)
    assert book.profile("next", "fp").solo_step_rate is None  # it may only be in its first phase
    run("next", [slow] * 5 * 64)
    assert book.profile("next", "fp").solo_step_rate == pytest.approx(slow, rel=0.11)


@given(st.floats(0.5, 200.0), st.lists(st.floats(0.85, 1.15), min_size=1, max_size=9), st.integers(5, 200))
def test_a_steady_program_has_a_rate_alone_however_long_it_runs(rate: float, noise: list[float], seconds: int) -> None:
    book = ProfileBook()
    for second in range(3 + math.ceil(seconds + 2 / rate)):
        book.observe(window(second, 0.5, rate=rate * noise[second % len(noise)]), "fp")
    assert book.profile("job", "fp").solo_step_rate == pytest.approx(rate, rel=0.16)


def test_a_new_run_starts_from_what_its_fingerprint_is_known_for() -> None:
    book = trained()
    assert book.profile("next", "fp") == book.profile(None, "fp") == book.profile("job", "fp")
    assert book.profile("next", "other") == UNKNOWN_PROFILE
    for second in range(8):  # a start-up at full load says nothing about the run
        book.observe(window(second, 1.0, job_id="next"), "fp")
    assert book.profile("next", "fp").util_mean == 0.5


def test_own_measurement_replaces_the_fingerprint_after_five_seconds() -> None:
    book = trained(util=0.5)
    utils = []
    for second in range(2 + 6):
        book.observe(window(second, 0.8, job_id="next", rate=20.0), "fp")
        utils.append(book.profile("next", "fp").util_mean)
    assert utils[-3] < 0.7  # four seconds of its own
    assert utils[-2:] == [pytest.approx(0.8)] * 2


def test_memory_is_the_largest_of_all_windows_of_the_class() -> None:
    book = trained()
    book.observe(window(20, 0.1, memory=3.0 * GIB, neighbours=2, throttled=0.5), "fp")
    assert book.profile("job", "fp").memory_bytes == 3 * GIB
    assert book.profile("next", "fp").memory_bytes == 3 * GIB


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"util": None, "memory": None}, id="nothing read"),
        pytest.param({"util": -1.0, "memory": math.nan}, id="absurd"),
        pytest.param({"second": 12.0}, id="duplicate"),
        pytest.param({"second": 4.0}, id="out of order"),
        pytest.param({"samples": 0}, id="no samples"),
        pytest.param({"window_s": 1e300}, id="of no length that a window has"),
    ],
)
def test_unusable_windows_change_nothing(bad: dict[str, float]) -> None:
    book = trained()
    before = book.profile("job", "fp")
    book.observe(window(**{"second": 20.0, "util": 0.99, "memory": 9e12, "rate": 99.0, **bad}), "fp")  # type: ignore[arg-type]
    assert book.profile("job", "fp") == before


@pytest.mark.parametrize("wrong", [18446744073707737660.0, math.inf, -1.0, math.nan])
def test_a_counter_of_steps_that_went_backwards_is_no_rate(wrong: float) -> None:
    book = trained()
    book.observe(window(13, 0.5, rate=wrong), "fp")
    assert book.profile("job", "fp").solo_step_rate == 20.0
    fresh = ProfileBook()
    for second in range(12):
        fresh.observe(window(second, 0.5, rate=wrong if second % 2 else 20.0), "fp")
    assert fresh.profile("job", "fp").solo_step_rate == 20.0


@pytest.mark.parametrize("ahead", [3600.0, 1e9])
@pytest.mark.parametrize("saved", [False, True])
def test_a_clock_that_was_ahead_stops_no_learning(ahead: float, saved: bool) -> None:
    book = trained()
    book.observe(window(ahead, 0.5, rate=20.0), "fp")
    if saved:
        book = ProfileBook.from_json(book.to_json())
    for second in range(13, 113):
        book.observe(window(second, 0.9, rate=40.0), "fp")
    known = book.profile("job", "fp")
    assert (known.util_mean, known.solo_step_rate) == (pytest.approx(0.9), 40.0)


@st.composite
def any_windows(draw: st.DrawFn) -> Signature:
    number = st.sampled_from(NUMBERS)
    reading = st.none() | number
    return window(
        draw(number | st.integers(0, 40).map(float)),
        draw(reading),
        memory=draw(reading),
        peak=draw(number),
        rate=draw(reading),
        throttled=draw(reading),
        neighbours=draw(st.sampled_from((0, 1, -1))),
        window_s=draw(number),
        samples=draw(st.sampled_from((10, 0, -1, 10**20))),
    )


@given(st.lists(any_windows(), max_size=40))
def test_whatever_was_observed_the_scheduler_believes_what_comes_of_it(windows: list[Signature]) -> None:
    book, mixture, simple = ProfileBook(), MixtureForecaster(), EwQuantileForecaster()
    for each in windows:
        book.observe(each, "fp")
        for forecaster in (mixture, simple):
            forecaster.observe(each)
    book = ProfileBook.from_json(book.to_json())
    usual = window(50, 0.5)
    for forecast in (mixture.forecast("job"), simple.forecast("job")):
        for job_id in ("job", "another"):
            told = forecast or Forecast("job", {}, {}, 0.0, 0)
            assert plausible(JobMeasurement("job", "fp", usual, told, book.profile(job_id, "fp")))


def test_json_round_trip_goes_on_where_it_stopped() -> None:
    book = trained()
    book.observe(window(13, 0.55, rate=3.0), "fp")  # leaves a block of steps unfinished
    copy = ProfileBook.from_json(book.to_json())
    assert copy.to_json() == book.to_json()
    for second in range(13, 20):
        for each in (book, copy):
            each.observe(window(second, 0.6, rate=5.0), "fp")
    assert copy.profile("job", "fp") == book.profile("job", "fp")


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"format": "else"}', '{"format": "cotenant-profiles-1"}'])
def test_what_is_no_book_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        ProfileBook.from_json(text)


def test_size_is_bounded_and_the_longest_unseen_go_first() -> None:
    book = ProfileBook(max_jobs=3, max_fingerprints=2)
    for i in range(4):
        book.observe(window(0, 0.1, job_id=f"job-{i}"), f"fp-{i}")
        book.observe(window(i + 1, 0.1, job_id="job-0"), "fp-0")
    assert book.profile("job-0", "none").source == "history"
    assert book.profile("job-1", "none").source == "unknown"
    assert book.profile(None, "fp-0").source == book.profile(None, "fp-3").source == "history"
    assert book.profile(None, "fp-1").source == book.profile(None, "fp-2").source == "unknown"


def test_forgetting_a_job_keeps_its_class() -> None:
    book = trained()
    book.forget("job")
    book.forget("never seen")
    assert book.profile("job", "none") == UNKNOWN_PROFILE
    assert book.profile("job", "fp").util_mean == 0.5


@pytest.mark.parametrize(
    ("compute", "memory", "util", "source"),
    [(0.4, GIB, 0.4, "hints"), (None, GIB, 1.0, "unknown"), (0.4, None, 0.4, "unknown"), (None, None, 1.0, "unknown")],
)
def test_hints_make_a_profile_only_together(
    compute: float | None, memory: int | None, util: float, source: str
) -> None:
    known = from_hints(compute, memory)
    assert known == replace(known, util_mean=util, util_p95=util, memory_bytes=memory, observed_s=0.0)
    assert known.source == source
