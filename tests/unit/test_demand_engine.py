"""The parts of the mixture: analogues, Hedge, gate, calibration, streams of windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as array_strategy
from packing import window

from cotenant.forecasting.demand.analogues import Analogues
from cotenant.forecasting.demand.arrays import median_of_four, span, weighted_median
from cotenant.forecasting.demand.calibration import Calibration, Said
from cotenant.forecasting.demand.choice import Choice
from cotenant.forecasting.demand.engine import MixtureSettings, Moment, SeriesMixture
from cotenant.forecasting.demand.hostside import HostAnalogues
from cotenant.forecasting.demand.mixing import Gate, Hedge
from cotenant.forecasting.demand.restraint import MEMORY, Restraint
from cotenant.forecasting.demand.streams import Streams

SMALL = MixtureSettings(horizons=(1, 3), last=20, gains=(0.3,))
ONE = np.array([0])


def single(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


fours = array_strategy(np.float32, (7, 4), elements=st.floats(-10, 10, width=32))
weights = array_strategy(np.float32, (7, 4), elements=st.sampled_from([0.125, 0.25, 0.5, 1.0]))


@given(fours, weights)
def test_medians_are_the_smallest_values_with_half_the_weight_below(values: np.ndarray, heavy: np.ndarray) -> None:
    wanted = [
        min(v for v in row if sum(w for u, w in zip(row, own, strict=True) if u <= v) >= sum(own) / 2)
        for row, own in zip(values.tolist(), heavy.tolist(), strict=True)
    ]
    assert median_of_four([*values.T], [*heavy.T]).tolist() == wanted
    assert weighted_median(values, heavy).tolist() == wanted


def test_consecutive_rows_become_a_slice() -> None:
    assert span(np.array([3, 4, 5])) == slice(3, 6)
    assert isinstance(span(np.array([3, 5])), np.ndarray)
    assert isinstance(span(np.array([5, 4])), np.ndarray)


def test_analogues_repeat_a_period_and_refuse_too_few_lags() -> None:
    pattern = [0.1, 0.2, 0.9, 0.4, 0.7]
    mixture = SeriesMixture(SMALL, 1)
    for tick in range(60):
        mixture.step(ONE, single(pattern[tick % 5]))
    said = mixture.step(ONE, single(pattern[0]))
    assert said[0] == pytest.approx([pattern[1], pattern[3]], abs=0.02)
    with pytest.raises(ValueError, match="last is 5; 4 analogues 3 ticks ahead"):
        Analogues(1, (1, 3), last=5, gains=(0.3,))


def test_hedge_moves_weight_to_the_expert_that_errs_less_and_back() -> None:
    hedge = Hedge(1, 1, 3)
    predictions = np.array([[[0.0, 0.5, 1.0]]], dtype=np.float32)
    for _ in range(30):
        hedge.learn(ONE, 0, np.abs(predictions[:, 0] - 1.0))
    assert hedge.heard(ONE, predictions).mean() == pytest.approx(1.0, abs=0.05)
    for _ in range(30):
        hedge.learn(ONE, 0, np.abs(predictions[:, 0] - 0.5))
    heard = hedge.heard(ONE, predictions)
    mean, median = heard.mean(), heard.median()
    assert (mean[0, 0], median[0, 0]) == (pytest.approx(0.5, abs=0.05), 0.5)
    hedge.clear(0)
    assert hedge.heard(ONE, predictions).mean() == pytest.approx(0.5 * 0.0 + 0.25 * 0.5 + 0.25 * 1.0)


@pytest.mark.parametrize(("worth", "wanted"), [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5)])
def test_the_gate_opens_as_far_as_the_mixture_has_earned(worth: float, wanted: float) -> None:
    gate, rng = Gate(1, 1, 3.0), np.random.default_rng(0)
    for _ in range(300):
        then, moved = rng.random(), float(rng.normal(0.0, 0.3))
        gate.learn(
            ONE,
            0,
            then=single(then),
            mean=single(then + moved),
            median=single(then + moved),
            now=single(then + worth * moved),
        )
    point = gate.point(ONE, single(0.5), np.full((1, 1), 0.7, np.float32), np.full((1, 1), 0.7, np.float32))
    assert point[0, 0] == pytest.approx(0.5 + wanted * 0.2, abs=0.03)


def test_calibration_starts_wide_and_reaches_its_levels() -> None:
    calibration, rng = Calibration(1, 1, 0.5), np.random.default_rng(0)
    point = np.full((1, 1), 0.5, dtype=np.float32)
    states = calibration.states(single(0.5), np.zeros((1, 1), dtype=np.float32))
    first = calibration.quantiles(ONE, states, point, single(0.5))[0, 0]
    assert first[0] < 0.15
    assert first[2] > 0.9
    hits = []
    for tick in range(3000):
        quantiles = calibration.quantiles(ONE, states, point, single(0.5))[:, 0]
        now = single(0.5 + 0.1 * rng.standard_normal())
        if tick > 500:
            hits.append(now[0] <= quantiles[0])
        calibration.learn(ONE, 0, Said(states[:, 0], point[:, 0], quantiles), now)
    assert np.mean(hits, axis=0) == pytest.approx([0.1, 0.9, 0.95, 0.99], abs=0.02)


def test_weights_of_errors_stay_finite_over_days() -> None:
    calibration, point = Calibration(1, 1, 0.5), np.full((1, 1), 0.5, dtype=np.float32)
    states = calibration.states(single(0.5), np.zeros((1, 1), dtype=np.float32))
    for _ in range(6000):
        said = Said(states[:, 0], point[:, 0], calibration.quantiles(ONE, states, point, single(0.5))[:, 0])
        calibration.learn(ONE, 0, said, single(0.5))
    assert calibration.quantiles(ONE, states, point, single(0.5))[0, 0] == pytest.approx(0.5, abs=0.002)


def test_a_bigger_table_keeps_what_it_knew() -> None:
    rng = np.random.default_rng(0)
    small, large = SeriesMixture(SMALL, 2), SeriesMixture(SMALL, 2)
    rows = np.arange(2)
    for tick in range(60):
        if tick == 30:
            large.resize(5)
        now = rng.random(2).astype(np.float32)
        assert small.step(rows, now) == pytest.approx(large.step(rows, now), abs=1e-6)
        assert small.quantiles(rows) == pytest.approx(large.quantiles(rows), abs=1e-6)


def test_a_cleared_row_is_like_a_new_one() -> None:
    rng = np.random.default_rng(0)
    used, fresh = SeriesMixture(SMALL, 1), SeriesMixture(SMALL, 1)
    for _ in range(50):
        used.step(ONE, rng.random(1).astype(np.float32))
    used.clear(0)
    for _ in range(50):
        now = rng.random(1).astype(np.float32)
        assert used.step(ONE, now) == pytest.approx(fresh.step(ONE, now), abs=1e-6)


@pytest.mark.parametrize("interrupted", [True, False])
def test_forecasts_across_an_interruption_are_not_judged(interrupted: bool) -> None:
    mixture = SeriesMixture(SMALL, 1)
    for _ in range(100):
        mixture.step(ONE, single(0.5))
    for value in (0.9, 0.5) * 10:
        if interrupted:
            mixture.interrupt(ONE)
        mixture.step(ONE, single(value))
    for _ in range(40):  # until the doubt about a series that jumps is gone
        mixture.step(ONE, single(0.5))
    learnt_the_jumps = mixture.quantiles(ONE)[0, 0, -1] > 0.6
    assert learnt_the_jumps != interrupted


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60))
def test_quantiles_are_ordered_and_bounded(values: list[float]) -> None:
    mixture = SeriesMixture(SMALL, 1)
    for value in values:
        mixture.step(ONE, single(value))
        quantiles = mixture.quantiles(ONE)[0]
        assert (np.diff(quantiles, axis=1) >= 0.0).all()
        assert quantiles.min() >= 0.0
        assert quantiles.max() <= 1.0


def test_the_host_foresees_means_from_a_rhythm_within_windows() -> None:
    host = HostAnalogues(2, (1, 5), per_window=10, last=200)
    rows, errors = np.arange(2), []
    samples = np.stack([np.arange(600) % 23 < 11, np.arange(600) % 37 < 20]).astype(np.float32)
    for tick in range(600):
        host.take(rows, samples[:, tick : tick + 1])
        if 300 <= tick < 590 and tick % 10 == 9:
            said = host.predict(rows)
            errors.append(np.abs(said[:, 0] - samples[:, tick + 1 : tick + 11].mean(axis=1)[:, None]))
    assert np.mean(errors) < 0.02
    host.clear(0)
    host.take(np.array([0]), single(0.3)[:, None])
    assert host.predict(np.array([0])) == pytest.approx(0.3)


def test_a_bigger_table_of_the_host_keeps_what_it_knew() -> None:
    rng, rows = np.random.default_rng(0), np.arange(2)
    small, large = HostAnalogues(2, (1,), per_window=5, last=30), HostAnalogues(2, (1,), per_window=5, last=30)
    for tick in range(60):
        if tick == 30:
            large.resize(4)
        now = rng.random((2, 1)).astype(np.float32)
        small.take(rows, now)
        large.take(rows, now)
    assert small.predict(rows) == pytest.approx(large.predict(rows), abs=1e-6)


def test_samples_taken_in_together_say_the_same_as_one_by_one() -> None:
    """Of series of all ages: new ones, young ones, and such as have long been settled."""
    rng = np.random.default_rng(0)
    together, alone = (HostAnalogues(6, (1, 3), per_window=5, last=40) for _ in range(2))
    for block in range(80):
        rows = np.array([0, 1, 2, 3] if block < 30 else [0, 2, 3, 4, 5] if block < 60 else [0, 3, 5])
        samples = rng.random((len(rows), int(rng.integers(1, 12)))).astype(np.float32)
        together.take(rows, samples)
        for tick in range(samples.shape[1]):
            for place, row in enumerate(rows):
                alone.take(np.array([row]), samples[place : place + 1, tick : tick + 1])
        if block in (10, 40):
            together.clear(2)
            alone.clear(2)
        one_by_one = [alone.predict(np.array([row])) for row in rows]
        assert np.array_equal(together.predict(rows), np.concatenate(one_by_one))


def test_absent_experts_change_nothing_and_present_ones_are_weighed() -> None:
    rng = np.random.default_rng(0)
    values = np.clip(0.5 + 0.3 * rng.standard_normal(120), 0.0, 1.0).astype(np.float32)
    plain, deaf, told = SeriesMixture(SMALL, 1), SeriesMixture(SMALL, 1, outside=2), SeriesMixture(SMALL, 1, outside=2)
    nothing = np.full((1, 2, 2), np.nan, dtype=np.float32)
    ours, theirs = [], []
    for tick in range(117):
        truth = np.stack([values[tick + 1], values[tick + 3]])[None, :, None]
        beside = np.concatenate([truth, nothing[:, :, 1:]], axis=2) if tick % 7 else nothing
        alone = plain.step(ONE, values[tick : tick + 1])
        outside = None if tick % 2 else nothing
        assert deaf.step(ONE, values[tick : tick + 1], outside=outside) == pytest.approx(alone, abs=1e-6)
        assert deaf.quantiles(ONE) == pytest.approx(plain.quantiles(ONE), abs=1e-6)
        said = told.step(ONE, values[tick : tick + 1], outside=beside)
        if tick > 30 and tick % 7:
            ours.append(abs(said[0, 0] - values[tick + 1]))
            theirs.append(abs(alone[0, 0] - values[tick + 1]))
    assert np.mean(ours) < 0.3 * np.mean(theirs)


def test_streams_take_each_series_once_per_round_and_count_the_time_between() -> None:
    streams = Streams()
    batch = [window(second, 0.1 * second, job_id=job) for second in (0, 1, 3) for job in ("a", "b")]
    rounds = list(streams.take(batch))
    assert [len(found.slots) for found in rounds] == [2, 2, 2]
    assert [found.elapsed[0] for found in rounds] == [np.inf, 1.0, 2.0]
    assert list(streams.take([])) == []


def test_streams_grow_and_numbers_are_used_again() -> None:
    streams = Streams()
    list(streams.take([window(0, 0.5, job_id=f"job-{i}") for i in range(200)]))
    assert streams.size == 256
    freed = streams.forget("job-17")
    (found,) = streams.take([window(0, 0.5, job_id="new")])
    assert found.slots.tolist() == freed
    assert streams.job_of(freed[0]) == "new"


@pytest.mark.parametrize(
    ("better", "worse", "steps", "wanted"),
    [
        (0.1, 0.1, False, 1),  # as good: the incumbent stays
        (0.1, 0.3, False, 2),  # the other is better again and again
        (0.0, 0.0, True, 1),  # nothing happens
    ],
)
def test_the_incumbent_speaks_until_another_has_proved_itself(
    better: float, worse: float, steps: bool, wanted: int
) -> None:
    choice = Choice(1, (1, 5), 3, np.array([1, 1]), steps)
    candidates = np.array([[[0.0, 1.0, 2.0]] * 2], dtype=np.float32)
    rng = np.random.default_rng(0)
    for _ in range(60):
        noise = float(rng.uniform(0.0, 0.2))
        for j in (0, 1):
            choice.learn(ONE, j, np.array([[9.0, worse, better]], dtype=np.float32) + np.float32(noise))
    assert choice.point(ONE, candidates)[0].tolist() == [wanted, wanted]
    choice.clear(0)
    assert choice.point(ONE, candidates)[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("steps", [False, True])
def test_one_large_error_of_the_incumbents_is_no_proof(steps: bool) -> None:
    choice = Choice(1, (5,), 2, np.array([1]), steps)
    choice.learn(ONE, 0, np.array([[0.0, 0.7]], dtype=np.float32))
    assert choice.point(ONE, np.array([[[0.0, 1.0]]], dtype=np.float32))[0, 0] == 1.0


def test_a_series_in_another_unit_keeps_its_age_alone() -> None:
    told: list[Moment] = []

    class Listener:
        name, width, expected = "listener", 0, None

        def resize(self, rows: int) -> None: ...

        def clear(self, row: int) -> None: ...

        def step(self, moment: Moment) -> np.ndarray:
            told.append(moment)
            return np.empty((len(moment.rows), 2, 0), dtype=np.float32)

    mixture = SeriesMixture(SMALL, 1, (Listener(),))
    for _ in range(3):
        mixture.step(ONE, single(0.5))
    mixture.rest(ONE)
    mixture.rescale(0, 4.0)
    mixture.step(ONE, single(0.2))
    assert [(each.ages[0], each.counts[0], each.sizes[0]) for each in told[-2:]] == [(2, 2, 1.0), (4, 0, 4.0)]
    mixture.clear(0)
    mixture.step(ONE, single(0.2))
    assert told[-1].ages[0] == 0


def restrained(steps: bool, values: list[float]) -> Restraint:
    restraint = Restraint(1, 1, steps)
    for value in values:
        restraint.watch(ONE, single(value), single(0.01))
    return restraint


def spoken(restraint: Restraint, now: float, wanted: float) -> float:
    return float(restraint.point(ONE, single(now), single(0.01), single(wanted)[None])[0, 0])


def judged(restraint: Restraint, said: float, then: float, now: float) -> None:
    restraint.learn(ONE, 0, said=single(said), then=single(then), now=single(now))


@pytest.mark.parametrize(
    ("values", "wanted", "said"),
    [
        ([0.2], 0.204, 0.2),  # readings do not resolve that
        ([0.2], 0.21, 0.21),  # nothing is known of its steps yet
        ([0.2, 0.6, 0.2, 0.2, 0.2], 0.45, 0.2),  # it stands still, and its steps are larger
        ([0.2, 0.6, 0.2, 0.2, 0.2], 0.55, 0.55),
        ([0.2, 0.6, 0.2, 0.2, 0.21], 0.45, 0.21),  # still: what readings do not resolve is no move
        ([0.2, 0.6, 0.2, 0.2, 0.3], 0.45, 0.45),  # it moves
    ],
)
def test_small_moves_are_none_while_a_series_stands_still(values: list[float], wanted: float, said: float) -> None:
    for steps in (False, True):
        restraint = restrained(steps, values)
        for _ in range(3):
            judged(restraint, 0.5, 0.2, 0.5)  # so that it may risk a move
        assert spoken(restraint, values[-1], wanted) == pytest.approx(said)


def test_a_series_starts_with_persistence_and_risks_what_was_saved() -> None:
    restraint = restrained(False, [0.2])
    assert spoken(restraint, 0.2, 0.9) == pytest.approx(0.2)
    for _ in range(3):
        judged(restraint, 0.5, 0.2, 0.5)
    assert spoken(restraint, 0.2, 0.9) == pytest.approx(0.9), "0.9 was saved, and 0.03 of what persistence lost"
    assert 0.4 < spoken(restraint, 0.2, 0.9) < 0.45, "as long as the 0.7 of before may be lost, 0.2 is left"
    restraint.interrupt(ONE)
    assert spoken(restraint, 0.2, 0.9) == pytest.approx(0.9), "what is never judged is not lost"


def test_a_series_of_steps_has_no_budget() -> None:
    restraint = restrained(True, [0.2])
    for _ in range(30):
        judged(restraint, 0.5, 0.2, 0.2)
    assert spoken(restraint, 0.2, 0.9) == pytest.approx(0.9)


@given(st.lists(st.tuples(st.floats(0.0, 1.0, width=32), st.floats(0.0, 1.0, width=32)), min_size=8, max_size=80))
def test_whatever_comes_errors_stay_within_the_budget(series: list[tuple[float, float]]) -> None:
    ahead, restraint, said, errors = 3, Restraint(1, 1, steps=False), [], np.zeros(2)
    for tick, (now, wanted) in enumerate(series):
        if tick >= ahead:
            then = series[tick - ahead][0]
            judged(restraint, said[-ahead], then, now)
            errors = MEMORY * errors + (abs(said[-ahead] - now), abs(then - now))
        restraint.watch(ONE, single(now), single(0.01))
        said.append(spoken(restraint, now, wanted))
        assert errors[0] <= 1.05 * errors[1] + 1e-5, "MORE, and what is forgotten while moves are out"


def test_an_expert_that_never_lets_a_still_series_be_is_not_heard() -> None:
    class Restless:
        name, width = "restless", 1
        expected = np.array([[0.1, 0.1], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], dtype=np.float32)

        def resize(self, rows: int) -> None: ...

        def clear(self, row: int) -> None: ...

        def step(self, moment: Moment) -> np.ndarray:
            return np.repeat(moment.history[:, :1] + np.float32(0.05), 2, axis=1)[:, :, None]

    mixture = SeriesMixture(replace(SMALL, steps=True), 1, (Restless(),))
    said = [mixture.step(ONE, single(value)) for value in [0.2, 0.6, 0.2, 0.2, 0.2, 0.2]]
    assert said[0] == pytest.approx(0.25)
    assert said[-1] == pytest.approx(0.2)


def test_upper_quantiles_of_steps_never_fall_below_what_is_held() -> None:
    mixture = SeriesMixture(replace(SMALL, steps=True), 1)
    for tick in range(124):
        held = single(0.8 if tick % 8 < 4 else 0.2)
        said = mixture.step(ONE, held)
        assert (mixture.quantiles(ONE)[0, :, 2:] >= held).all()
    assert said[0, 0] == pytest.approx(0.2, abs=0.1)  # the last of the four high ones: it will fall
