"""The learned model of pairs: linear algebra, monotonicity, intervals, evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interference_tables import truth, world

from cotenant.forecasting.interference.intervals import BOTH_NEW, FAMILY_FOCAL, UNCALIBRATED, Band, calibrate, fill
from cotenant.forecasting.interference.kernel import MIXES, covariance
from cotenant.forecasting.interference.learned import OTHER_TYPE_WIDENS
from cotenant.forecasting.interference.model import MISSING_WIDENS, PairModel
from cotenant.forecasting.interference.observations import FEATURES
from cotenant.forecasting.interference.physics import Physics, fair, queue, shares
from cotenant.forecasting.interference.posterior import solve, solve_robustly
from cotenant.forecasting.interference.table import BANDWIDTH, UTIL, Jobs, PairTable
from cotenant.forecasting.training.interference import LEAST_ROWS, fit_pairs

TABLE = world()
MODEL = fit_pairs(TABLE, "timeslice")
UNIT = st.floats(0.0, 1.0)


def mid(model: PairModel, focal: list[float], other: list[float], other_id: str = "") -> tuple[float, float, float]:
    jobs = Jobs(("", other_id), ("", ""), np.array([focal, other]))
    found = model.predict(jobs, np.array([0]), np.array([1]))
    return float(found.low[0]), float(found.mid[0]), float(found.high[0])


def test_a_pair_that_is_measured_anew_counts_once() -> None:
    again = MODEL.with_evidence(TABLE)
    assert len(again.table) == len(MODEL.table)
    some = TABLE.rows(np.arange(0, len(TABLE), 3))
    fresh = replace(some, throughput=np.full(len(some), 0.123))
    told = MODEL.with_evidence(fresh)
    assert len(told.table) == len(MODEL.table)
    assert (told.table.throughput == 0.123).sum() == len(some)


def test_a_held_out_family_is_predicted_better_than_by_the_mean() -> None:
    families = TABLE.families()
    test = TABLE.touched(families, 0)
    model = fit_pairs(TABLE.rows(~test), "timeslice")
    found = model.predict(TABLE.jobs, TABLE.focal[test], TABLE.other[test])
    wanted = TABLE.throughput[test]
    constant = np.abs(wanted - TABLE.throughput[~test].mean()).mean()
    assert np.abs(found.mid - wanted).mean() < 0.5 * constant


def test_holding_rows_out_by_the_block_inverse_equals_solving_without_them() -> None:
    rows = np.flatnonzero(TABLE.touched(np.arange(len(TABLE.jobs)), 3))
    posterior = MODEL.posterior()
    quick = MODEL.without(rows, posterior)
    slow = replace(quick, alpha=None)
    assert np.allclose(quick.alpha, slow.alpha, atol=1e-8)
    expected = slow.predict(TABLE.jobs, TABLE.focal[rows], TABLE.other[rows]).mid
    assert np.allclose(quick.predict(TABLE.jobs, TABLE.focal[rows], TABLE.other[rows]).mid, expected, atol=1e-8)


def test_evidence_in_closed_form_equals_having_had_it_in_the_table() -> None:
    model = replace(MODEL, table=TABLE.rows(np.arange(0, len(TABLE), 2)), trust=MODEL.trust[::2], alpha=None)
    grown = model.with_evidence(TABLE.rows(np.arange(1, len(TABLE), 2)))
    assert len(grown.table) == len(TABLE)
    assert len(grown.table.jobs) == len(TABLE.jobs)
    known = grown.predict(TABLE.jobs, TABLE.focal, TABLE.other).mid
    assert np.abs(known - TABLE.throughput).mean() < 0.03


def test_a_new_job_is_learnt_from_its_first_pairs() -> None:
    held = TABLE.touched(np.arange(len(TABLE.jobs)), 2)
    rows = np.flatnonzero(held)
    odd = replace(TABLE, throughput=np.where(TABLE.focal == 2, 0.8 * TABLE.throughput, TABLE.throughput))
    model = fit_pairs(odd.rows(~held), "timeslice")
    errors = []
    for seen in (0, 3):
        told = model.with_evidence(odd.rows(rows[:seen])) if seen else model
        later = rows[6:]
        found = told.predict(odd.jobs, odd.focal[later], odd.other[later])
        errors.append(np.abs(found.mid - odd.throughput[later]).mean())
    assert errors[1] < errors[0]


def test_evidence_with_other_features_is_refused() -> None:
    other = PairTable(
        (UTIL,), Jobs(("x", "y"), ("", ""), np.ones((2, 1))), np.array([0]), np.array([1]), np.array([0.5])
    )
    with pytest.raises(ValueError, match="this model needs"):
        MODEL.with_evidence(other)


@settings(max_examples=60)
@given(focal=st.tuples(UNIT, UNIT), less=st.tuples(UNIT, UNIT), more=st.tuples(UNIT, UNIT), known=st.booleans())
def test_more_demand_never_predicts_less_slowdown(
    focal: tuple[float, float], less: tuple[float, float], more: tuple[float, float], known: bool
) -> None:
    low = [min(a, b) for a, b in zip(less, more, strict=True)]
    high = [max(a, b) for a, b in zip(less, more, strict=True)]
    name = TABLE.jobs.ids[1] if known else ""
    before, after = mid(MODEL, list(focal), low, name), mid(MODEL, list(focal), high, name)
    assert all(new <= old + 1e-9 for old, new in zip(before, after, strict=True))


@settings(max_examples=40)
@given(focal=st.tuples(UNIT, UNIT), other=st.tuples(UNIT, UNIT))
def test_predictions_are_ordered_and_in_range(focal: tuple[float, float], other: tuple[float, float]) -> None:
    low, middle, high = mid(MODEL, list(focal), list(other))
    assert 0.0 < low <= middle <= high <= 1.0


def test_a_pair_on_record_keeps_its_exact_prediction() -> None:
    residual = MODEL.residual()
    posterior = MODEL.posterior()
    fitted = residual - MODEL.noise() / MODEL.trust * posterior.alpha
    features = MODEL.table.jobs.features
    mean = MODEL.physics.mean(MODEL.table.names, features[MODEL.table.focal], features[MODEL.table.other])
    expected = np.clip(mean + MODEL.unit * fitted, 0.01, 1.0)
    found = MODEL.predict(MODEL.table.jobs, MODEL.table.focal, MODEL.table.other).mid
    assert np.allclose(found, expected, atol=1e-6)


def test_missing_features_are_guessed_and_widen_the_interval() -> None:
    low, _, high = mid(MODEL, [0.6, 0.3], [0.6, 0.3])
    blind_low, _, blind_high = mid(MODEL, [0.6, np.nan], [0.6, np.nan])
    assert blind_high - blind_low > high - low
    worst = mid(MODEL, [0.6, 0.3], [np.nan, np.nan])
    assert worst[1] <= mid(MODEL, [0.6, 0.3], [0.5, 0.1])[1]


def test_what_the_model_knows_of_a_job_fills_its_gaps() -> None:
    name = MODEL.table.jobs.ids[4]
    complete, guessed = MODEL.completed(Jobs((name,), ("",), np.array([[np.nan, np.nan]])))
    assert complete.features[0].tolist() == MODEL.table.jobs.features[4].tolist()
    assert guessed.tolist() == [0.0]


def test_a_few_wild_measurements_lose_trust() -> None:
    wild = TABLE.throughput.copy()
    wild[[5, 50]] = 1.9, 0.05
    model = fit_pairs(replace(TABLE, throughput=wild), "timeslice")
    assert model.trust[50] < 0.5 * np.median(model.trust)


def test_intervals_cover_what_they_say_on_unseen_families() -> None:
    families = TABLE.families()
    inside = []
    for group in np.unique(families):
        test = TABLE.touched(families, int(group))
        model = fit_pairs(TABLE.rows(~test), "timeslice")
        found = model.predict(TABLE.jobs, TABLE.focal[test], TABLE.other[test])
        inside.append((found.low <= TABLE.throughput[test]) & (TABLE.throughput[test] <= found.high))
    assert 0.7 <= np.concatenate(inside).mean() <= 0.95


def test_no_model_is_fitted_to_next_to_nothing() -> None:
    with pytest.raises(ValueError, match=f"give at least {LEAST_ROWS}"):
        fit_pairs(TABLE.rows(np.arange(LEAST_ROWS - 1)))


def test_a_feature_nobody_has_is_refused() -> None:
    features = TABLE.jobs.features.copy()
    features[:, 1] = np.nan
    with pytest.raises(ValueError, match="'membw_util' is missing for every"):
        fit_pairs(replace(TABLE, jobs=replace(TABLE.jobs, features=features)))


def test_without_utilisations_effects_add_up_as_logits() -> None:
    jobs = replace(TABLE.jobs, features=np.log(TABLE.jobs.features[:, :1] + 0.1))
    model = fit_pairs(replace(TABLE, names=("log_rate",), jobs=jobs))
    assert model.logit
    found = model.predict(jobs, TABLE.focal, TABLE.other)
    assert np.abs(found.mid - TABLE.throughput).mean() < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"throughput": np.full(len(TABLE), np.nan)}, "throughput nan in row 0"),
        ({"focal": np.full(len(TABLE), 99)}, "a job that does not exist"),
        ({"other": np.zeros(3, dtype=np.intp)}, "one entry per row"),
        ({"names": (UTIL,)}, "1 names for 2 features"),
        ({"jobs": replace(TABLE.jobs, ids=("same",) * len(TABLE.jobs))}, "must be different"),
    ],
)
def test_impossible_tables_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TABLE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_covariance_is_positive_definite(mix: str) -> None:
    matrix = covariance(MIXES[mix], MODEL.standardised(TABLE.jobs), TABLE.focal, TABLE.other)
    assert np.allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > -1e-8


def test_nan_in_the_covariance_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        solve(np.full((2, 2), -1.0), np.ones(2), np.full(2, 0.1), np.ones(2))


def test_robust_solving_of_clean_rows_changes_little() -> None:
    matrix = covariance(MODEL.weights, MODEL.standardised(TABLE.jobs), TABLE.focal, TABLE.other)
    posterior = solve_robustly(matrix, MODEL.residual(), MODEL.noise())
    assert posterior.trust.min() > 0.0
    assert np.allclose(posterior.inverse, posterior.inverse.T)


class TestPhysics:
    GRID = np.linspace(0.0, 1.0, 21)

    @pytest.mark.parametrize("own", [0.0, 0.3, 0.7, 1.0])
    def test_queue_falls_with_the_neighbours_demand(self, own: float) -> None:
        assert (np.diff(queue(np.array(own), self.GRID, np.array(0.0))) <= 1e-12).all()
        assert (np.diff(queue(np.array(own), np.array(0.5), self.GRID)) <= 1e-12).all()

    @pytest.mark.parametrize("own", [0.0, 0.3, 0.5, 0.7, 1.0])
    def test_fair_falls_with_the_neighbours_demand(self, own: float) -> None:
        found = fair(np.array(own), self.GRID)
        assert (np.diff(found) <= 1e-12).all()
        assert ((found > 0.0) & (found <= 1.0)).all()

    @pytest.mark.parametrize(
        ("own", "other", "n"), [(0.4, 0.5, 1.0), (1.0, 1.0, 0.5), (0.25, 1.0, 0.9), (1.0, 0.25, 0.775)]
    )
    def test_a_light_job_keeps_most_of_what_it_wants(self, own: float, other: float, n: float) -> None:
        assert fair(np.array(own), np.array(other)) == pytest.approx(n)

    def test_the_mean_is_chosen_by_families_held_out(self) -> None:
        jobs = TABLE.jobs
        exact = fair(jobs.features[TABLE.focal, 0], jobs.features[TABLE.other, 0])
        assert fit_pairs(replace(TABLE, throughput=exact), "timeslice").physics.kind == "fair"

    def test_two_whole_jobs_get_half_each(self) -> None:
        assert queue(np.array(1.0), np.array(1.0), np.array(0.0)) == pytest.approx(0.5, abs=0.01)
        assert queue(np.array(0.0), np.array(1.0), np.array(0.0)) == pytest.approx(1.0)

    @pytest.mark.parametrize("ratio", [-3.0, 0.0, 3.0])
    def test_shares_fall_with_the_neighbours_demand(self, ratio: float) -> None:
        found = shares(np.array(0.8), self.GRID, np.array(ratio), (0.85, 1.07, 0.91, 0.05))
        assert (np.diff(found) <= 1e-12).all()
        assert ((found > 0.0) & (found <= 1.0)).all()

    def test_longer_kernels_get_more(self) -> None:
        params = (0.85, 1.07, 0.91, 0.05)
        long, short = (shares(np.array(1.0), np.array(1.0), np.array(ratio), params) for ratio in (2.0, -2.0))
        assert long > 0.8
        assert short < 0.3

    def test_a_constant_knows_no_features(self) -> None:
        found = Physics("constant", (0.7,)).mean((), np.zeros((4, 1, 0)), np.zeros((4, 3, 0)))
        assert found.shape == (4, 3)
        assert (found == 0.7).all()


class TestIntervals:
    def test_a_band_holds_its_coverage(self) -> None:
        rng = np.random.default_rng(0)
        predicted = rng.uniform(0.3, 1.0, 4000)
        measured = predicted + rng.normal(0.0, 0.02 + 0.1 * (1.0 - predicted))
        low, high = calibrate(predicted, measured, np.arange(4000) % 10).ends(predicted)
        assert 0.79 < ((low <= measured) & (measured <= high)).mean() < 0.86

    def test_its_ends_fall_with_the_prediction(self) -> None:
        predicted = np.linspace(0.05, 1.0, 50)
        steep = calibrate(predicted, np.where(np.arange(50) % 2, 1.0, predicted), np.arange(50) % 5)
        widest = BOTH_NEW * OTHER_TYPE_WIDENS * MISSING_WIDENS ** (2 * (len(FEATURES) - 1))
        for band in (steep, UNCALIBRATED):
            low, high = band.ends(predicted)
            assert (np.diff(predicted - widest * (predicted - low)) >= -1e-12).all()
            assert (np.diff(predicted + widest * (high - predicted)) >= -1e-12).all()

    def test_a_situation_without_data_borrows_the_harder_one(self) -> None:
        band = Band(0.1, 0.2, 1.0, 1.0)
        assert set(fill({FAMILY_FOCAL: band})) == {band}
        assert len(set(fill({}))) == 1


def test_bandwidth_matters_where_it_is_measured() -> None:
    assert BANDWIDTH in TABLE.names
    assert truth(0.6, 0.6, 0.9, 0.9) < truth(0.6, 0.6, 0.0, 0.0)
    assert mid(MODEL, [0.6, 0.9], [0.6, 0.9])[1] < mid(MODEL, [0.6, 0.9], [0.6, 0.0])[1]
