"""The learned predictor: sets, evidence, fallbacks, bad input."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interference_tables import measured, profiles
from packing import profile

from cotenant.forecasting.datasets import bridge
from cotenant.forecasting.interference import Observation, UtilisationRule
from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.observations import FEATURES, features, jobs_of, merged, pairs_of
from cotenant.forecasting.training.interference import fit_interference, from_suite
from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile, ThroughputPrediction

MODELS = fit_interference(measured(), "made up", "none", "timeslice")
PREDICTOR = MODELS.predictor()
JOBS = profiles()
UNIT = st.floats(0.0, 1.0)


def job(util: float, name: str = "", bandwidth: float | None = 0.3) -> DemandProfile:
    return replace(profile(util), fingerprint=name, membw_util=bandwidth)


def seen(
    n: float, seconds: float = 60.0, half: float = 0.02, who: DemandProfile | None = None, gpu_type: str = "a"
) -> Observation:
    return Observation(
        gpu_type, who or job(0.8, "new"), (job(0.7, "other"),), n, max(0.01, n - half), n + half, seconds
    )


def ends(prediction: ThroughputPrediction) -> tuple[float, float, float]:
    return prediction.low, prediction.mid, prediction.high


def test_it_predicts_what_it_was_fitted_on() -> None:
    errors = [
        abs(PREDICTOR.predict([each.focal, *each.others], "a")[0].mid - each.throughput) for each in measured()[:60]
    ]
    assert sum(errors) / len(errors) < 0.02


def test_fitting_says_where_the_model_comes_from() -> None:
    assert MODELS.card.source == "made up"
    assert len(MODELS.card.data_fingerprint) == 64
    for held_out in ("job", "family"):
        assert 0.0 < MODELS.card.metrics[f"a: leave-{held_out}-out MAE"] < 0.03


def test_nobody_and_alone() -> None:
    assert not PREDICTOR.predict([], "a")
    assert ends(PREDICTOR.predict([job(0.9)], "a")[0]) == (1.0, 1.0, 1.0)
    assert not LearnedInterference({}).predict([], "a")


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    sets = [[JOBS[0], JOBS[5]], [JOBS[3]], [], [JOBS[1], JOBS[2], JOBS[7]], [JOBS[0], JOBS[0]]]
    together = PREDICTOR.predict_many(sets, "a")
    assert [[ends(each) for each in members] for members in together] == [
        [pytest.approx(ends(each)) for each in PREDICTOR.predict(members, "a")] for members in sets
    ]


def test_the_reason_names_the_parts() -> None:
    assert "utilisations alone give" in PREDICTOR.predict([JOBS[0], JOBS[5]], "a")[0].reason
    for other in JOBS:  # what a number is of is said: beside it stands a slowdown
        reason = PREDICTOR.predict([JOBS[0], other], "a")[0].reason
        assert re.search(r"give \d\.\d\d of its speed(, what is known of [a-z ]+[+-]\d.*)?$", reason), reason


def test_causes_of_the_slowdown() -> None:
    heavy = PREDICTOR.explain([job(0.9, bandwidth=0.9), job(0.9, bandwidth=0.9)], "a")[0]
    light = PREDICTOR.explain([job(0.9, bandwidth=0.9), job(0.1, bandwidth=0.0)], "a")[0]
    assert heavy["neighbours' util"] > 0.2 > light["neighbours' util"]
    assert heavy["neighbours' membw_util"] > light["neighbours' membw_util"] - 1e-9
    assert heavy["total"] > light["total"]
    assert PREDICTOR.explain([job(0.5)], "a") == [{}]
    assert LearnedInterference({}).explain([job(0.5), job(0.6)], "a") == [{}, {}]


class TestSets:
    def test_three_that_fit_in_pairs_but_not_together(self) -> None:
        pair = PREDICTOR.predict([job(0.4)] * 2, "a")[0].mid
        assert PREDICTOR.predict([job(0.4)] * 3, "a")[0].mid < pair - 0.1

    @settings(max_examples=30)
    @given(utils=st.lists(UNIT, min_size=2, max_size=4), data=st.data())
    def test_more_demand_never_predicts_less_slowdown(self, utils: list[float], data: st.DataObject) -> None:
        which = data.draw(st.integers(1, len(utils) - 1))
        more = [*utils]
        more[which] = data.draw(st.floats(utils[which], 1.0))
        before = PREDICTOR.predict([job(util) for util in utils], "a")[0]
        after = PREDICTOR.predict([job(util) for util in more], "a")[0]
        assert all(new <= old + 1e-9 for old, new in zip(ends(before), ends(after), strict=True))

    @settings(max_examples=30)
    @given(utils=st.lists(UNIT, min_size=1, max_size=3), extra=UNIT)
    def test_a_further_neighbour_never_predicts_less_slowdown(self, utils: list[float], extra: float) -> None:
        before = PREDICTOR.predict([job(util) for util in utils], "a")
        after = PREDICTOR.predict([job(util) for util in [*utils, extra]], "a")
        for old, new in zip(before, after, strict=False):
            assert all(b <= a + 1e-9 for a, b in zip(ends(old), ends(new), strict=True))

    @pytest.mark.parametrize("utils", [[0.4] * 4, [0.4] * 3, [0.35] * 3, [0.3] * 4, [0.25] * 5])
    def test_what_pairs_do_not_show_is_uncertain_in_both_directions(self, utils: list[float]) -> None:
        told = PREDICTOR.predict([job(util) for util in utils], "a")[0]
        assert told.low <= told.mid - 0.04
        assert told.high >= min(1.0, told.mid + 0.04)

    def test_a_light_job_may_be_spared_and_a_heavy_one_pay_for_all(self) -> None:
        light, *_, heavy = PREDICTOR.predict([job(0.2), job(0.4), job(0.4), job(0.7)], "a")
        assert light.high > 0.95
        assert heavy.low < 0.45 < heavy.mid

    def test_a_neighbour_nothing_is_known_of_may_want_next_to_nothing(self) -> None:
        told = PREDICTOR.predict([job(0.5), job(0.5), UNKNOWN_PROFILE], "a")[0]
        assert told.high > 0.9
        assert told.mid < 0.6

    def test_the_reason_is_what_all_want_together_where_that_slows_down_most(self) -> None:
        reason = PREDICTOR.predict([job(0.4)] * 4, "a")[0].reason
        assert reason.startswith("with its 3 neighbours together it wants 160% of the GPU; beside the worst of them")

    def test_the_reason_is_the_worst_neighbour_where_that_slows_down_most(self) -> None:
        reason = PREDICTOR.predict([job(0.9), job(0.9), job(0.1)], "a")[0].reason
        assert reason.startswith("2 neighbours, the worst: utilisations alone give 0.")


class TestEvidence:
    PAIR = (job(0.8, "new"), job(0.7, "other"))

    def test_a_minute_together_replaces_the_prediction(self) -> None:
        told = PREDICTOR.with_evidence([seen(0.93)]).predict(self.PAIR, "a")[0]
        assert ends(told) == pytest.approx((0.91, 0.93, 0.95))
        assert told.reason.startswith("measured together for 60 s: 0.93")

    def test_less_than_a_minute_counts_in_part(self) -> None:
        prior = PREDICTOR.predict(self.PAIR, "a")[0].mid
        mids = [PREDICTOR.with_evidence([seen(0.95, s)]).predict(self.PAIR, "a")[0].mid for s in (6.0, 30.0, 60.0)]
        assert prior < mids[0] < mids[1] < mids[2] == pytest.approx(0.95)

    def test_a_few_seconds_count_by_how_sure_they_are(self) -> None:
        prior = PREDICTOR.predict(self.PAIR, "a")[0].mid
        sure, unsure = (
            PREDICTOR.with_evidence([seen(0.4, 6.0, half)]).predict(self.PAIR, "a")[0] for half in (0.01, 0.3)
        )
        assert abs(sure.mid - 0.4) < 0.4 * abs(prior - 0.4)
        assert abs(unsure.mid - 0.4) > 0.6 * abs(prior - 0.4)
        assert sure.high - sure.low >= 0.08  # another run may well be off by .05
        assert "measured together for 6 s: 0.40 of its speed alone; before that" in sure.reason

    def test_it_moves_the_same_job_beside_others(self) -> None:
        slow = [seen(0.4, who=job(0.8, "new"))]
        beside = [job(0.8, "new"), job(0.65, "third")]
        assert PREDICTOR.with_evidence(slow).predict(beside, "a")[0].mid < PREDICTOR.predict(beside, "a")[0].mid - 0.02

    def test_it_stays_on_its_gpu_type(self) -> None:
        assert ends(PREDICTOR.with_evidence([seen(0.95, gpu_type="b")]).predict(self.PAIR, "a")[0]) == ends(
            PREDICTOR.predict(self.PAIR, "a")[0]
        )

    def test_contradiction_makes_the_interval_wide(self) -> None:
        told = PREDICTOR.with_evidence([seen(0.5), seen(0.9)]).predict(self.PAIR, "a")[0]
        assert told.low <= 0.48
        assert told.high >= 0.92
        assert "contradict" in told.reason

    def test_a_measured_triple_is_found_in_any_order(self) -> None:
        one, two, three = job(0.5, "x"), job(0.4, "y"), job(0.3, "z")
        told = PREDICTOR.with_evidence([Observation("a", one, (two, three), 0.77, 0.75, 0.79, 90.0)])
        assert told.predict([one, three, two], "a")[0].mid == pytest.approx(0.77)
        assert told.predict([three, one, two], "a")[1].mid == pytest.approx(0.77)

    def test_a_measured_triple_teaches_what_to_expect_of_its_pairs_and_of_others_but_less_than_a_pair(self) -> None:
        slow, known, other, third = job(0.5, "x"), job(0.4, "y"), job(0.3, "z"), job(0.4, "w")
        expected = PREDICTOR.predict([slow, known, other], "a")[0].mid
        triple = Observation("a", slow, (known, other), expected / 2, expected / 2 - 0.01, expected / 2 + 0.01, 60.0)
        both = Observation("a", slow, (known,), expected / 2, expected / 2 - 0.01, expected / 2 + 0.01, 60.0)
        for beside in (known, third):
            before, after, best = (
                each.predict([slow, beside], "a")[0].mid
                for each in (PREDICTOR, PREDICTOR.with_evidence([triple]), PREDICTOR.with_evidence([both]))
            )
            assert before - 0.01 > after > best

    def test_a_triple_as_expected_teaches_nothing(self) -> None:
        slow, known, other = job(0.5, "x"), job(0.4, "y"), job(0.3, "z")
        told = PREDICTOR.predict([slow, known, other], "a")[0].mid
        informed = PREDICTOR.with_evidence([Observation("a", slow, (known, other), told, told, told, 60.0)])
        for beside in (known, other, job(0.6, "w")):
            mids = [each.predict([slow, beside], "a")[0].mid for each in (PREDICTOR, informed)]
            assert mids[1] == pytest.approx(mids[0], abs=0.01)

    def test_a_triple_does_not_contradict_a_pair_that_was_measured(self) -> None:
        slow, known, other = job(0.5, "x"), job(0.4, "y"), job(0.3, "z")
        pair = Observation("a", slow, (known,), 0.9, 0.89, 0.91, 60.0)
        triple = Observation("a", slow, (known, other), 0.3, 0.29, 0.31, 60.0)
        informed = PREDICTOR.with_evidence([pair, triple])
        assert informed.predict([slow, known], "a")[0].mid == pytest.approx(0.9)
        assert informed.predict([slow, other], "a")[0].mid < PREDICTOR.predict([slow, other], "a")[0].mid - 0.02

    def test_a_job_without_fingerprint_teaches_nothing(self) -> None:
        nameless = Observation("a", job(0.8), (job(0.7),), 0.2, 0.1, 0.3, 100.0)
        pair = [job(0.8), job(0.7)]
        assert ends(PREDICTOR.with_evidence([nameless]).predict(pair, "a")[0]) == ends(PREDICTOR.predict(pair, "a")[0])

    @pytest.mark.parametrize(
        "numbers", [(0.5, math.nan, 0.9), (0.5, 0.6, 0.9), (0.0, -1.0, 0.9), (0.5, 0.4, 3.0), (0.5, 0.4, 0.45)]
    )
    def test_impossible_measurements_are_refused(self, numbers: tuple[float, float, float]) -> None:
        n, low, high = numbers
        with pytest.raises(ValueError, match="give 0 < low <= throughput"):
            Observation("a", job(0.5), (job(0.5),), n, low, high)

    def test_alone_is_no_measurement_of_sharing(self) -> None:
        with pytest.raises(ValueError, match="at least one neighbour"):
            Observation("a", job(0.5), (), 0.5, 0.4, 0.6)

    @pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
    def test_impossible_times_are_refused(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="seconds: "):
            seen(0.5, seconds)

    def test_repeated_measurements_are_weighted_by_time(self) -> None:
        found = merged([seen(0.5, 10.0), seen(0.52, 30.0)])
        assert found.throughput == pytest.approx(0.515)
        assert found.seconds == 40.0
        assert not found.contradictory


class TestFallbacks:
    PAIR = (job(0.8), job(0.7))

    def test_another_gpu_type_gets_a_wider_interval_and_says_so(self) -> None:
        known, other = PREDICTOR.predict(self.PAIR, "a")[0], PREDICTOR.predict(self.PAIR, "b")[0]
        assert other.high - other.low > known.high - known.low
        assert "'b'" in other.reason

    def test_another_gpu_type_learns_from_its_own_pairs(self) -> None:
        here = [replace(each, gpu_type="b") for each in measured()[:40]]
        told = PREDICTOR.with_evidence(here)
        before, after = (
            sum(abs(p.predict([e.focal, *e.others], "b")[0].mid - e.throughput) for e in here)
            for p in (PREDICTOR, told)
        )
        assert after < before

    def test_without_any_model_the_rule_decides(self) -> None:
        found = LearnedInterference({}).predict(self.PAIR, "a")
        assert [each.mid for each in found] == [each.mid for each in UtilisationRule().predict(self.PAIR, "a")]
        assert "no model for GPU type 'a'" in found[0].reason

    def test_without_any_model_measurements_still_count(self) -> None:
        told = LearnedInterference({}, evidence=[seen(0.93)]).predict(TestEvidence.PAIR, "a")[0]
        assert told.mid == pytest.approx(0.93)

    def test_types_of_few_pairs_share_the_pooled_model(self) -> None:
        few = [replace(each, gpu_type="rare") for each in measured()[:5]]
        found = fit_interference([*measured(), *few], "made up", "none", "timeslice")
        assert set(found.models) == {"a"}
        assert found.pooled is not None

    def test_no_utilisation_at_all_is_refused(self) -> None:
        blind = [
            replace(
                each,
                focal=replace(each.focal, util_mean=math.nan),
                others=(replace(each.others[0], util_mean=math.nan),),
            )
            for each in measured()
        ]
        with pytest.raises(ValueError, match="util_mean: no measured job has one"):
            fit_interference(blind, "made up", "none")


class TestBadInput:
    def test_a_job_nothing_is_known_of_counts_as_the_worst_with_a_wide_interval(self) -> None:
        worst = PREDICTOR.predict([job(0.5), job(1.0)], "a")[0]
        unknown = PREDICTOR.predict([job(0.5), UNKNOWN_PROFILE], "a")[0]
        assert unknown.mid <= worst.mid  # its bandwidth use is guessed from the utilisation: high
        assert unknown.high - unknown.low > worst.high - worst.low
        assert unknown.high > 0.9

    @pytest.mark.parametrize(
        "absurd",
        [
            {"util_mean": math.nan},
            {"util_mean": 2.5},
            {"util_mean": -0.1},
            {"membw_util": math.nan},
            {"membw_util": 250.0},
            {"memory_bytes": 18446744073707737660},
            {"memory_bytes": 0},
            {"solo_step_rate": 0.0},
            {"solo_step_rate": math.inf},
            {"solo_step_rate": -1.0},
        ],
    )
    def test_absurd_readings_count_as_missing(self, absurd: dict[str, float]) -> None:
        pair = [replace(job(0.6), **absurd), replace(job(0.6), **absurd)]  # type: ignore[arg-type]
        for prediction in (*PREDICTOR.predict(pair, "a"), *LearnedInterference({}).predict(pair, "a")):
            assert 0.0 < prediction.low <= prediction.mid <= prediction.high <= 1.0
        ((name, _),) = absurd.items()
        feature = {"util_mean": "util", "memory_bytes": "log_memory_bytes", "solo_step_rate": "log_step_s"}.get(
            name, name
        )
        assert math.isnan(features(pair[0])[feature])

    def test_foreign_features_are_refused(self) -> None:
        with pytest.raises(ValueError, match="a profile has util, membw_util"):
            jobs_of([job(0.5)], ("util", "warp_stalls"))


def test_pairs_of_keeps_pairs_of_named_jobs_once() -> None:
    many = [*measured()[:3], measured()[0], Observation("a", JOBS[0], (JOBS[1], JOBS[2]), 0.5, 0.4, 0.6)]
    assert len(pairs_of(many, FEATURES)) == 3


def test_what_the_suite_measured_becomes_observations() -> None:
    def suite(n: float, low: float | None, share: float | None) -> bridge.Observation:
        names = ("x", "y")
        members = (job(0.5, "x"), job(0.4, "y"))
        return bridge.Observation("a", "timeslice", names, names, members, 1, n, low, None, 3, (share, share))

    found = from_suite([suite(0.8, 0.7, None), suite(0.8, None, 0.5), suite(2.5, None, None)])
    assert [(each.focal.fingerprint, each.low, each.throughput, each.high) for each in found] == [
        ("y", 0.7, 0.8, 0.8),
        ("y", 2.0, 2.0, 2.0),
    ]
