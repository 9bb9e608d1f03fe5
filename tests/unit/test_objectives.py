"""Scores on held-out groups: nothing of a group is trained on, and the figures are what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from interference_tables import FAMILIES, measured

from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.demand.engine import MixtureSettings
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.training.demand_artefact import DemandArtefact
from cotenant.forecasting.training.demand_fit import Examples, TrainingOptions, collect, fit_demand, train_demand
from cotenant.forecasting.training.demand_replay import ewma, memory_units, replay
from cotenant.forecasting.training.interference import fit_interference
from cotenant.forecasting.training.objectives import (
    CONSTANT,
    COVERAGE,
    EXCESS,
    MAE,
    RELATIVE,
    RULE,
    WIDTH,
    DemandHoldOut,
    demand_folds,
    interference_folds,
)
from cotenant.forecasting.training.scores import RMSE, FoldScore, combined
from cotenant.forecasting.types import DemandProfile

SETTINGS = MixtureSettings(horizons=(1, 4), last=40, gains=(0.3,))
FEW = TrainingOptions(trees=5, leaves=5)
MIB = float(1 << 20)


def fit(observations: Sequence[Observation]) -> InterferenceModels:
    return fit_interference(observations, "made up", "none", "timeslice")


def wave(source: str, name: str, ticks: int = 160, period: int = 9, seed: int = 0) -> ValueSeries:
    rng = np.random.default_rng(seed)
    values = 0.5 + 0.4 * np.sign(np.sin(2.0 * np.pi * np.arange(ticks) / period)) + rng.normal(0.0, 0.01, ticks)
    return ValueSeries(source, name, np.clip(values, 0.0, 1.0))


WAVES = [wave("a", "0", seed=1), wave("a", "1", seed=2), wave("b", "0", seed=3), wave("c", "0", 120, seed=4)]


def train(examples: Examples) -> dict[str, DemandArtefact]:
    return fit_demand(examples, SETTINGS, ("trees",), FEW)


class TestInterference:
    @pytest.mark.parametrize("groups", ["family", "job"])
    def test_nothing_of_the_held_out_group_is_trained_on(self, groups: str) -> None:
        told: list[set[str]] = []

        def spy(observations: Sequence[Observation]) -> InterferenceModels:
            jobs = [job for each in observations for job in (each.focal, *each.others)]
            told.append({job.family if groups == "family" else job.fingerprint for job in jobs})
            return fit(observations)

        folds = list(interference_folds(measured(), spy, groups=groups))
        assert len(folds) == (4 if groups == "family" else 12)
        assert all(fold.group not in names for fold, names in zip(folds, told, strict=True))
        # 12 jobs, 144 ordered pairs: 3 jobs of a family touch 144 - 81 of them, one job 144 - 121.
        assert {fold.rows for fold in folds} == {63 if groups == "family" else 23}

    def test_the_figures_are_what_they_are_called(self) -> None:
        held = next(iter(interference_folds(measured(), fit)))
        rest = [o for o in measured() if held.group not in {o.focal.family, o.others[0].family}]
        test = [o for o in measured() if held.group in {o.focal.family, o.others[0].family}]
        predictor, rule = fit(rest).predictor(), UtilisationRule()
        truth = np.array([min(1.0, o.throughput) for o in test])
        said = [predictor.predict([o.focal, o.others[0]], "a")[0] for o in test]
        mid = np.array([p.mid for p in said])
        assert held.metrics[MAE] == pytest.approx(np.abs(truth - mid).mean())
        assert held.metrics[RMSE] == pytest.approx(np.sqrt(((truth - mid) ** 2).mean()))
        assert held.metrics[COVERAGE] == pytest.approx(
            np.mean([p.low <= t <= p.high for p, t in zip(said, truth, strict=True)])
        )
        assert held.metrics[WIDTH] == pytest.approx(np.mean([p.high - p.low for p in said]))
        mean = np.mean([min(1.0, o.throughput) for o in rest])
        assert held.baselines[CONSTANT] == pytest.approx(np.abs(truth - mean).mean())
        first = [rule.predict([o.focal, o.others[0]], "a")[0].mid for o in test]
        assert held.baselines[RULE] == pytest.approx(np.abs(truth - first).mean())
        half = [1.0 - max(0.0, o.focal.util_mean + o.others[0].util_mean - 1.0) / 2.0 for o in test]
        assert held.baselines[EXCESS] == pytest.approx(np.abs(truth - half).mean())

    def test_repeated_measurements_count_once(self) -> None:
        twice = [*measured(), *measured()]
        assert [f.rows for f in interference_folds(twice, fit)] == [f.rows for f in interference_folds(measured(), fit)]

    def test_larger_sets_leave_training_with_any_member_and_are_not_scored(self) -> None:
        jobs = {each.focal.family: each.focal for each in measured()}
        triple = Observation("a", jobs["conv"], (jobs["gan"], jobs["agent"]), 0.4, 0.3, 0.5)
        told: dict[int, bool] = {}

        def spy(observations: Sequence[Observation]) -> InterferenceModels:
            told[len(told)] = any(len(each.others) == 2 for each in observations)
            return fit(observations)

        folds = list(interference_folds([*measured(), triple], spy))
        assert {fold.group: told[i] for i, fold in enumerate(folds)} == {
            "conv": False,
            "gan": False,
            "agent": False,
            "attention": True,
        }
        assert {fold.rows for fold in folds} == {63}

    def test_jobs_of_no_family_are_families_of_their_own_and_unnamed_ones_are_left_out(self) -> None:
        def anonymous(job: DemandProfile) -> DemandProfile:
            if job.fingerprint == "conv-0":
                return replace(job, fingerprint="")
            return replace(job, family="") if job.family == "conv" else job

        found = [
            replace(each, focal=anonymous(each.focal), others=tuple(map(anonymous, each.others))) for each in measured()
        ]
        groups = {fold.group for fold in interference_folds(found, fit)}
        assert groups == {"only conv-1", "only conv-2", "attention", "agent", "gan"}

    def test_the_seed_orders_the_groups_and_changes_nothing_else(self) -> None:
        first, same, other = (list(interference_folds(measured(), fit, seed=seed)) for seed in (0, 0, 3))
        assert first == same
        assert [f.group for f in first] != [f.group for f in other]
        assert sorted(first, key=lambda f: f.group) == sorted(other, key=lambda f: f.group)

    def test_one_family_is_too_few(self) -> None:
        alike = [
            replace(each, focal=replace(each.focal, family="one"), others=(replace(each.others[0], family="one"),))
            for each in measured()
        ]
        with pytest.raises(ValueError, match="1 family in them is not accepted; give at least 2"):
            list(interference_folds(alike, fit))

    def test_too_little_left_to_train_on_says_without_which_group(self) -> None:
        few = [each for each in measured() if each.focal.family == "conv" or each.others[0].family == "conv"]
        with pytest.raises(ValueError, match="without family 'conv' no measured pair is left to train on"):
            list(interference_folds(few, fit, seed=next(s for s in range(9) if first_group(few, s) == "conv")))


def first_group(observations: Sequence[Observation], seed: int) -> str:
    from cotenant.forecasting.training.objectives import group_names, shuffled

    return shuffled(sorted(set(group_names(observations, "family").values())), seed)[0]


class TestCombined:
    FOLDS = (
        FoldScore("x", 1, {MAE: 0.1, RMSE: 0.1, "p95 coverage": 1.0, "worst series / y": 3.0}, {RULE: 0.2}),
        FoldScore("y", 3, {MAE: 0.3, RMSE: 0.3, "p95 coverage": 0.8, "worst series / y": 1.0}, {RULE: 0.4}),
    )

    def test_rows_weigh_and_groups_spread(self) -> None:
        both = combined(self.FOLDS)
        assert (both.group, both.rows) == ("all 2 groups", 4)
        assert both.metrics[MAE] == pytest.approx(0.25)
        assert both.metrics[RMSE] == pytest.approx(np.sqrt((0.01 + 3 * 0.09) / 4))
        assert both.metrics["worst series / y"] == 3.0
        assert both.metrics[f"{MAE}, spread"] == pytest.approx(np.std([0.1, 0.3], ddof=1))
        assert both.metrics[f"{MAE}, worst group"] == 0.3
        assert both.metrics["p95 coverage, worst group"] == 0.8
        assert both.baselines == {RULE: pytest.approx(0.35)}

    def test_one_fold_has_no_spread(self) -> None:
        assert combined(self.FOLDS[:1]).metrics[f"{MAE}, spread"] == 0.0

    def test_no_fold_is_refused(self) -> None:
        with pytest.raises(ValueError, match="folds: none"):
            combined([])


class TestDemand:
    def test_series_of_one_source_are_held_out_together(self) -> None:
        told: list[set[int]] = []

        def spy(examples: Examples) -> dict[str, DemandArtefact]:
            told.append(set(examples.origins))
            return train(examples)

        folds = list(demand_folds(WAVES, SETTINGS, spy))
        assert sorted(fold.group for fold in folds) == ["a", "b", "c"]
        assert {fold.group: numbers for fold, numbers in zip(folds, told, strict=True)} == {
            "a": {2, 3},
            "b": {0, 1, 3},
            "c": {0, 1, 2},
        }

    def test_the_figures_are_what_they_are_called(self) -> None:
        fold = next(fold for fold in demand_folds(WAVES, SETTINGS, train) if fold.group == "b")
        artefacts = train(collect([WAVES[i].values for i in (0, 1, 3)], SETTINGS))
        values = WAVES[2].values
        said = replay([values], SETTINGS, lambda rows: [each.expert((1, 4), rows) for each in artefacts.values()])[0]
        for j, ahead in enumerate((1, 4)):
            truth, ticks = values[19 + ahead :], slice(19, len(values) - ahead)
            assert fold.metrics[f"MAE, {ahead} ahead"] == pytest.approx(
                np.abs(said.points[ticks, j] - truth).mean(), abs=1e-4
            )
            assert fold.metrics[f"p95 coverage, {ahead} ahead"] == pytest.approx(
                (truth <= said.p95[ticks, j]).mean(), abs=0.02
            )
            stays = float(np.abs(values[ticks] - truth).mean())
            assert fold.baselines[f"persistence, {ahead} ahead"] == pytest.approx(stays)
            assert fold.metrics[f"worst series / persistence, {ahead} ahead"] == pytest.approx(
                fold.metrics[f"MAE, {ahead} ahead"] / stays, rel=0.02
            )
        assert fold.rows == 2 * (160 - 19) - 5
        assert fold.metrics[RELATIVE] == pytest.approx(
            np.mean([fold.metrics[f"worst series / persistence, {a} ahead"] for a in (1, 4)]), rel=0.01
        )
        assert fold.baselines[f"untrained mixture, {RELATIVE}"] < 1.0  # the waves repeat themselves
        assert f"EWMA, {RELATIVE}" in fold.baselines

    def test_series_do_not_influence_each_other(self) -> None:
        alone, beside = replay([WAVES[0].values], SETTINGS)[0], replay([each.values for each in WAVES], SETTINGS)[0]
        assert np.array_equal(alone.points, beside.points)
        assert np.array_equal(alone.p95, beside.p95)

    def test_a_gap_parts_a_series_and_nothing_is_judged_across_it(self) -> None:
        holed = WAVES[0].values.copy()
        holed[80:85] = np.nan
        series = [ValueSeries("a", "0", holed), *WAVES[2:]]
        fold = next(fold for fold in demand_folds(series, SETTINGS, train) if fold.group == "a")
        assert fold.rows == sum(length - 19 - ahead for length in (80, 75) for ahead in (1, 4))
        assert all(np.isfinite(value) for value in fold.metrics.values())

    def test_memory_is_learnt_in_units_and_scored_in_bytes(self) -> None:
        series = [ValueSeries(each.source, each.name, each.values * 4096.0 * MIB) for each in WAVES]
        fold = next(iter(demand_folds(series, SETTINGS, train, memory=True)))
        assert fold.metrics["MAE, 1 ahead"] > MIB
        assert fold.metrics["MAE, 1 ahead"] < 4096.0 * MIB

    def test_what_may_not_be_trained_on_is_not(self) -> None:
        told: list[set[int]] = []

        def spy(examples: Examples) -> dict[str, DemandArtefact]:
            told.append(set(examples.origins))
            return train(examples)

        fold = DemandHoldOut(WAVES, SETTINGS).score({"a"}, spy, among={"a", "b"})
        assert (fold.group, told) == ("a", [{2}])

    def test_one_source_is_too_few(self) -> None:
        with pytest.raises(ValueError, match="series: 1 of their sources"):
            list(demand_folds(WAVES[:2], SETTINGS, train))

    def test_too_little_to_train_on_says_without_which_group(self) -> None:
        def empty(examples: Examples) -> dict[str, DemandArtefact]:
            return train(examples.of(()))

        with pytest.raises(ValueError, match=r"without '[abc]': examples: none is not accepted"):
            list(demand_folds(WAVES, SETTINGS, empty))

    def test_constant_series_are_scored(self) -> None:
        flat = [ValueSeries(name, "0", np.full(120, 0.25)) for name in "abc"]
        both = combined(list(demand_folds(flat, SETTINGS, train)))
        assert both.metrics["MAE, 1 ahead"] == pytest.approx(0.0, abs=1e-6)
        assert both.metrics[RELATIVE] == pytest.approx(1.0, abs=0.01)


class TestReplay:
    def test_training_on_collected_examples_is_the_same_as_training_on_series(self) -> None:
        values = [each.values for each in WAVES]
        first = train_demand(values, SETTINGS, ("trees",), FEW)["trees"]
        second = fit_demand(collect(values, SETTINGS), SETTINGS, ("trees",), FEW)["trees"]
        assert all(np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays)

    def test_examples_of_some_series_keep_their_order(self) -> None:
        examples = collect([each.values for each in WAVES], SETTINGS)
        assert sorted(examples.origins) == [0, 1, 2, 3]
        assert set(examples.of({1, 3}).origins) == {1, 3}
        assert [len(each) for each in examples.of({1, 3}).inputs] == [160, 120]

    def test_units_follow_a_job_that_outgrows_them(self) -> None:
        values = np.array([100.0, 150.0, 500.0, 450.0]) * MIB
        units = memory_units(values)
        assert units.tolist() == [200.0 * MIB, 200.0 * MIB, 1000.0 * MIB, 1000.0 * MIB]
        assert memory_units(np.array([1.0])).tolist() == [128.0 * MIB]

    def test_a_change_of_unit_starts_afresh(self) -> None:
        values = np.r_[np.full(60, 100.0 * MIB), np.full(60, 1000.0 * MIB)]
        said = replay([values], SETTINGS, units=[memory_units(values)])[0]
        assert said.points[-1] == pytest.approx([1000.0 * MIB] * 2, rel=1e-3)
        assert said.points[60, 0] == pytest.approx(1000.0 * MIB, rel=1e-3)

    def test_an_average_begins_with_the_first_value(self) -> None:
        assert ewma(np.array([4.0, 0.0, 0.0]), 0.5).tolist() == [4.0, 2.0, 1.0]
        assert ewma(np.array([4.0, 1.0]), 1.0).tolist() == [4.0, 1.0]


def test_the_made_up_world_has_what_the_tests_count_on() -> None:
    assert {each.focal.family for each in measured()} == set(FAMILIES)
