"""What a serving interference predictor may be asked and told: never an exception, never a confident guess."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interference_tables import measured, profiles, world

from cotenant.forecasting.interference import Observation
from cotenant.forecasting.interference.learned import MOST_EVIDENCE, LearnedInterference
from cotenant.forecasting.interference.observations import MOST_THROUGHPUT, most_informative, pairs_of
from cotenant.forecasting.interference.table import UTIL, Jobs, PairTable
from cotenant.forecasting.training.interference import LEAST_ROWS, fit_interference, fit_pairs
from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile, ThroughputPrediction

MODELS = fit_interference(measured(), "made up", "none", "timeslice")
PREDICTOR = MODELS.predictor()
NOTHING_LEARNT = LearnedInterference({})
JOBS = profiles()
ABSURD = (math.nan, math.inf, -math.inf, -0.1, 2.5, 250.0, 1e300, 5e-324)
UNIT = st.floats(0.0, 1.0)


def job(util: float, name: str = "", bandwidth: float | None = 0.3) -> DemandProfile:
    return DemandProfile(
        util, util, 1 << 30, 10.0, 30.0, "history", membw_util=bandwidth, fingerprint=name, family="stranger"
    )


def told(n: float, half: float, focal: DemandProfile, other: DemandProfile, seconds: float = 60.0) -> Observation:
    low, high = max(1e-12, n - half), min(MOST_THROUGHPUT, n + half)
    return Observation("a", focal, (other,), n, low, high, seconds)


def check(found: list[ThroughputPrediction] | tuple[ThroughputPrediction, ...], members: int) -> None:
    assert len(found) == members
    for each in found:
        assert 0.0 < each.low <= each.mid <= each.high <= 1.0
        assert math.isfinite(each.slowdown)


NUMBERS = st.one_of(UNIT, st.sampled_from(ABSURD))
PROFILES = st.builds(
    DemandProfile,
    util_mean=NUMBERS,
    util_p95=NUMBERS,
    memory_bytes=st.sampled_from((None, 0, -1, 1, 1 << 30, 1 << 70)),
    solo_step_rate=st.one_of(st.none(), NUMBERS),
    observed_s=NUMBERS,
    source=st.sampled_from(("history", "hints", "class", "unknown")),
    membw_util=st.one_of(st.none(), NUMBERS),
    fingerprint=st.sampled_from(("", JOBS[0].fingerprint, "new", "\x00", "n" * 300)),
    family=st.sampled_from(("", JOBS[0].family, "unheard of")),
)


class TestAsked:
    @settings(max_examples=120)
    @given(members=st.lists(PROFILES, max_size=5), gpu_type=st.sampled_from(("a", "never heard of", "")))
    def test_any_profiles_get_an_answer(self, members: list[DemandProfile], gpu_type: str) -> None:
        for predictor in (PREDICTOR, NOTHING_LEARNT):
            check(tuple(predictor.predict(members, gpu_type)), len(members))
            assert len(predictor.explain(members, gpu_type)) == len(members)

    @pytest.mark.parametrize("predictor", [PREDICTOR, NOTHING_LEARNT])
    @pytest.mark.parametrize("who", [JOBS[0], job(1.0), UNKNOWN_PROFILE])
    def test_sixteen_at_once(self, predictor: LearnedInterference, who: DemandProfile) -> None:
        found = tuple(predictor.predict([who] * 16, "a"))
        check(found, 16)
        assert found[0].mid <= predictor.predict([who] * 2, "a")[0].mid

    @pytest.mark.parametrize("changed", [{"util_mean": value} for value in (math.nan, 2.5, -0.1)])
    def test_an_absurd_utilisation_gets_a_wider_interval(self, changed: dict[str, float]) -> None:
        sound, broken = (
            PREDICTOR.predict([job(0.5), each], "a")[0] for each in (job(0.9), replace(job(0.9), **changed))
        )
        assert broken.high - broken.low > sound.high - sound.low

    def test_a_model_of_one_job(self) -> None:
        rows = np.zeros(LEAST_ROWS, dtype=np.intp)
        alone = Jobs(("only",), ("one",), np.array([[0.8]]))
        model = fit_pairs(PairTable((UTIL,), alone, rows, rows, np.full(LEAST_ROWS, 0.55)), "timeslice")
        predictor = LearnedInterference({"a": model})
        check(tuple(predictor.predict([job(0.2), job(0.9, "only")], "a")), 2)
        known = replace(job(0.8, "only"), family="one")
        assert predictor.predict([known] * 2, "a")[0].mid == pytest.approx(0.55, abs=0.01)


class TestTold:
    PAIR = (job(0.8, "new"), job(0.7, "other"))

    @settings(max_examples=40)
    @given(
        facts=st.lists(
            st.tuples(
                st.floats(1e-9, MOST_THROUGHPUT),
                st.sampled_from((0.0, 1e-12, 0.02, 2.0)),
                st.sampled_from((0.0, 1e-9, 1.0, 60.0, 1e12)),
                PROFILES,
                PROFILES,
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_any_evidence_leaves_a_predictor_that_answers(
        self, facts: list[tuple[float, float, float, DemandProfile, DemandProfile]]
    ) -> None:
        evidence = [told(n, half, focal, other, seconds) for n, half, seconds, focal, other in facts]
        evidence += [replace(each, others=(*each.others, JOBS[2])) for each in evidence]
        for predictor in (PREDICTOR, NOTHING_LEARNT):
            informed = predictor.with_evidence(evidence)
            check(tuple(informed.predict(self.PAIR, "a")), 2)
            check(tuple(informed.predict([facts[0][3], facts[0][4], JOBS[1]], "a")), 3)

    def test_evidence_against_all_that_was_learnt_is_believed_of_the_pair_and_spreads_little(self) -> None:
        known = measured()[5]
        against = replace(known, throughput=1.9, low=1.8, high=2.0, seconds=60.0)
        informed = PREDICTOR.with_evidence([against])
        pair = [known.focal, *known.others]
        assert informed.predict(pair, "a")[0].mid == 1.0
        third = [JOBS[3], JOBS[8]]
        assert informed.predict(third, "a")[0].mid == pytest.approx(PREDICTOR.predict(third, "a")[0].mid, abs=0.05)

    @settings(max_examples=40)
    @given(
        facts=st.lists(st.tuples(st.floats(0.05, 1.5), st.sampled_from((6.0, 60.0))), min_size=1, max_size=4),
        own=UNIT,
        demands=st.tuples(UNIT, UNIT, UNIT, UNIT),
        name=st.sampled_from(("", "other", "third", JOBS[1].fingerprint)),
        of_three=st.booleans(),
    )
    def test_more_demand_never_predicts_less_slowdown_whatever_was_told(
        self,
        facts: list[tuple[float, float]],
        own: float,
        demands: tuple[float, float, float, float],
        name: str,
        of_three: bool,
    ) -> None:
        others = (job(0.7, "other"), job(0.2, "third"), JOBS[1], job(0.9, "fourth"))
        evidence = [
            told(n, 0.02, job(0.8, "new"), other, seconds) for (n, seconds), other in zip(facts, others, strict=False)
        ]
        if of_three:
            evidence = [replace(each, others=(*each.others, JOBS[2])) for each in evidence]
        informed = PREDICTOR.with_evidence(evidence)
        answers = [
            informed.predict([job(own, "new"), job(choose(demands[:2]), name, choose(demands[2:]))], "a")[0]
            for choose in (min, max)
        ]
        before, after = ((each.low, each.mid, each.high) for each in answers)
        assert all(new <= old + 1e-9 for old, new in zip(before, after, strict=True))

    def test_the_first_measured_pair_does_not_make_a_job_well_known(self) -> None:
        third = [job(0.8, "new"), job(0.7, "third")]
        widths = []
        for count in (0, 1, 3, 9):
            evidence = [
                told(0.6, 0.02, third[0], replace(each, family=f"family {k}")) for k, each in enumerate(JOBS[:count])
            ]
            found = PREDICTOR.with_evidence(evidence).predict([third[0], JOBS[11]], "a")[0]
            widths.append(found.high - found.low)
        assert widths[0] > widths[1] > widths[2] > widths[3]
        assert widths[1] > 0.5 * widths[0]

    def test_of_too_much_evidence_every_job_keeps_its_best(self) -> None:
        jobs = [job(0.05 + 0.015 * k, f"n{k}") for k in range(60)]
        rng = np.random.default_rng(1)
        pairs = [(jobs[k // 60], jobs[k % 60]) for k in rng.permutation(3600)[:2000]]
        evidence = [told(0.6, half, a, b) for (a, b), half in zip(pairs, rng.uniform(0.01, 0.2, 2000), strict=True)]
        rows = pairs_of(evidence, ("util",))
        kept = most_informative(rows, MOST_EVIDENCE)
        assert len(rows) == 2000
        assert len(kept) == MOST_EVIDENCE
        assert min(np.bincount(kept.focal, minlength=60) + np.bincount(kept.other, minlength=60)) >= 8
        assert kept.noise.mean() < 0.7 * rows.noise.mean()
        informed = PREDICTOR.with_evidence(evidence)
        dropped = next(
            (a, b)
            for a, b in pairs
            if not np.any(
                (kept.focal == rows.jobs.ids.index(a.fingerprint)) & (kept.other == rows.jobs.ids.index(b.fingerprint))
            )
        )
        assert informed.predict(dropped, "a")[0].mid == pytest.approx(0.6)

    def test_little_evidence_is_all_kept(self) -> None:
        table = world()
        assert most_informative(table, len(table)) is table
