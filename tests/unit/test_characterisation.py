"""Feature ranks, interpolation, clusters and pairs on data whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from cotenant.forecasting.characterisation import clusters, packing, page, prediction, selection, synthesis
from cotenant.forecasting.characterisation.findings import findings
from cotenant.forecasting.characterisation.pipeline import Inputs, characterise
from cotenant.forecasting.characterisation.tables import MEMORY, UTIL, Pairs
from cotenant.forecasting.datasets.runs import make_runs

BATCHES = (2.0, 8.0, 32.0, 128.0, 512.0)


def runs_table(families: int = 5) -> pd.DataFrame:
    """Families whose utilisation is linear in log2(batch) and whose memory is linear in the batch."""
    rows = [
        {
            "family": f"family{number}",
            "batch": batch,
            "parameters": 2.0 ** (16 + 2 * number),
            "util_max": 10.0 + 5.0 * number + 4.0 * math.log2(batch),
            "memory_max": 5.0 + 2.0 * number + 0.1 * batch,
            "power": 3.0 * number + batch / 100.0,
        }
        for number in range(families)
        for batch in BATCHES
    ]
    return pd.DataFrame(rows)


# -- selection --------------------------------------------------------------------------------------------------------


def test_a_monotone_feature_ranks_first_and_a_constant_one_has_no_rank() -> None:
    rng = np.random.default_rng(0)
    target = np.arange(20.0)
    table = pd.DataFrame({"t": target, "same": target * 2, "noise": rng.normal(size=20), "constant": 7.0})
    scores = selection.rank_features(table, "t", ["noise", "constant", "same"])
    assert [score.name for score in scores] == ["same", "noise", "constant"]
    assert (scores[0].pearson, scores[0].spearman, scores[0].kendall) == pytest.approx((1.0, 1.0, 1.0))
    assert scores[0].average_rank == 1.0
    assert (scores[2].pearson, scores[2].average_rank) == (None, None)


def test_equal_features_share_their_mean_rank() -> None:
    table = pd.DataFrame({"t": [1.0, 2.0, 3.0, 4.0], "a": [1.0, 2.0, 3.0, 4.0], "b": [-1.0, -2.0, -3.0, -4.0]})
    assert [score.average_rank for score in selection.rank_features(table, "t", ["a", "b"])] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("feature", "known"),
    [([1.0, np.nan, 3.0, 4.0, 5.0], 4), ([np.nan, np.nan, np.nan, 1.0, 2.0], 2), ([np.nan] * 5, 0)],
    ids=["one missing", "too few", "none"],
)
def test_missing_values_are_left_out(feature: list[float], known: int) -> None:
    table = pd.DataFrame({"t": [1.0, 2.0, 3.0, 4.0, 5.0], "a": feature})
    (score,) = selection.rank_features(table, "t", ["a"])
    assert score.rows == known
    assert (score.pearson is None) == (known < 3)


def test_a_counter_of_many_digits_keeps_its_coefficient() -> None:
    table = pd.DataFrame({"t": [1.0, 2.0, 3.0, 4.0], "bytes": 1.79135e11 + np.arange(4.0)})
    (score,) = selection.rank_features(table, "t", ["bytes"])
    assert score.pearson == pytest.approx(1.0)


def test_the_span_says_what_one_group_does_to_a_rank() -> None:
    table = pd.DataFrame(
        {"t": [1.0, 2.0, 3.0, 9.0, 9.5, 9.9], "a": [3.0, 2.0, 1.0, 9.0, 9.2, 9.4], "b": [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]}
    )
    scores = {s.name: s for s in selection.rank_features(table, "t", ["a", "b"], [0, 0, 0, 1, 1, 1])}
    assert scores["a"].rank_low is not None
    assert scores["a"].rank_low <= scores["a"].rank_high  # type: ignore[operator]


@pytest.mark.parametrize(
    ("target", "features", "message"),
    [
        ("t", ["words"], "'words' is not a numeric column"),
        ("gone", ["a"], "'gone'"),
        ("flat", ["a"], "'flat' is constant"),
    ],
)
def test_a_bad_column_is_named(target: str, features: list[str], message: str) -> None:
    table = pd.DataFrame({"t": [1.0, 2.0, 3.0], "a": [1.0, 2.0, 4.0], "flat": 1.0, "words": ["x", "y", "z"]})
    with pytest.raises(ValueError, match=message):
        selection.rank_features(table, target, features)


def test_two_features_that_add_up_to_the_target_are_found() -> None:
    table = pd.DataFrame(
        {
            "t": [3.0, 5.0, 9.0, 4.0],
            "low": [1.0, 2.0, 4.0, 3.0],
            "range": [2.0, 3.0, 5.0, 1.0],
            "x": [0.0, 1.0, 0.0, 2.0],
        }
    )
    assert selection.identities(table, "t", ["low", "range", "x"]) == (("low", "range"),)


# -- synthesis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", synthesis.METHODS)
@pytest.mark.parametrize("abscissa", synthesis.ABSCISSAS)
def test_every_interpolation_passes_through_its_points(method: str, abscissa: str) -> None:
    batch, value = np.array(BATCHES), np.array([10.0, 30.0, 20.0, 60.0, 50.0])
    assert synthesis.interpolated(batch, value, batch, method, abscissa) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("method", synthesis.METHODS)
@pytest.mark.parametrize("abscissa", synthesis.ABSCISSAS)
def test_every_interpolation_says_the_same_again(method: str, abscissa: str) -> None:
    batch = 2.0 ** np.linspace(0.0, 10.0, 30)  # of so many points a polynomial shows how it was summed
    value, at = np.random.default_rng(0).uniform(0.0, 100.0, 30), (batch[1:] + batch[:-1]) / 2.0
    first = synthesis.interpolated(batch, value, at, method, abscissa).tolist()
    assert all(synthesis.interpolated(batch, value, at, method, abscissa).tolist() == first for _ in range(5))


def test_a_line_over_log2_is_found_again_and_chosen() -> None:
    curves = synthesis.curves_of(make_runs(runs_table(), "x", None).table, UTIL)
    assert synthesis.best_combination(curves) == ("linear", "log2")
    points = synthesis.hold_out(curves, "linear", "log2")
    assert (len(points), int(points["interior"].sum())) == (25, 15)
    assert synthesis.errors_of(points).mae == pytest.approx(0.0, abs=1e-9)
    assert synthesis.errors_of(synthesis.chosen_elsewhere(curves)).rmse == pytest.approx(0.0, abs=1e-9)
    assert synthesis.errors_of(synthesis.hold_out(curves, "linear", "batch")).mae > 1.0


def test_errors_are_what_they_say() -> None:
    errors = synthesis.errors_of(pd.DataFrame({"actual": [0.0, 0.0], "predicted": [3.0, -1.0]}))
    assert (errors.points, errors.mse, errors.rmse, errors.mae) == (2, 5.0, pytest.approx(math.sqrt(5.0)), 2.0)


def test_self_consistency_looks_better_than_held_out_points() -> None:
    rng = np.random.default_rng(1)
    curves = [synthesis.Curve(str(i), str(i), np.array(BATCHES), rng.uniform(0, 100, 5)) for i in range(4)]
    held = synthesis.hold_out(curves, "cubic spline", "log2")
    assert synthesis.round_trip(curves, "cubic spline", "log2").mae < 0.2 * synthesis.errors_of(held).mae


def test_synthetic_rows_lie_between_measured_ones_and_in_bounds() -> None:
    table = make_runs(runs_table(2), "x", None).table
    made = synthesis.synthesise(table, {UTIL: ("linear", "log2"), MEMORY: ("barycentric", "batch")}, per_gap=3)
    assert len(made) == 2 * 4 * 3
    assert not set(made["batch"]) & set(BATCHES)
    assert made[[UTIL, MEMORY]].to_numpy().min() >= 0.0
    assert made[[UTIL, MEMORY]].to_numpy().max() <= 100.0


def test_the_audit_finds_how_published_rows_were_made() -> None:
    curve = synthesis.Curve("a", "a", np.array(BATCHES), np.array([10.0, 30.0, 20.0, 60.0, 50.0]))
    at = np.concatenate([curve.batch, synthesis.between(curve.batch, 4)])
    made = synthesis.interpolated(curve.batch, curve.value, at, "cubic spline", "rank")
    best = synthesis.audit([curve], {"a": (at, made)}).iloc[0]
    assert (best["method"], best["abscissa"], best["mae"]) == ("cubic spline", "rank", pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize(
    ("batches", "method", "abscissa", "message"),
    [
        ((1.0, 2.0), "linear", "log2", "2 points"),
        (BATCHES, "magic", "log2", "method 'magic'"),
        (BATCHES, "linear", "root", "abscissa 'root'"),
    ],
)
def test_bad_interpolations_are_refused(batches: tuple[float, ...], method: str, abscissa: str, message: str) -> None:
    batch = np.array(batches)
    with pytest.raises(ValueError, match=message):
        synthesis.interpolated(batch, batch, batch, method, abscissa)


def test_without_a_long_enough_curve_nothing_can_be_held_out() -> None:
    curves = [synthesis.Curve("a", "a", np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))]
    with pytest.raises(ValueError, match="at least four"):
        synthesis.errors_of(synthesis.hold_out(curves, "linear", "log2"))


# -- clusters ---------------------------------------------------------------------------------------------------------


def blobs() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(centre, 2.0, (20, 2)) for centre in ((70, 10), (10, 10), (40, 62))])


def test_three_blobs_are_three_clusters_by_every_criterion() -> None:
    counts = clusters.sweep(clusters.scaled(blobs(), "standard"), largest=6, seeds=5)
    assert clusters.elbow([count.inertia for count in counts]) == 3
    assert clusters.elbow([count.distortion for count in counts]) == 3
    assert clusters.by_silhouette(counts) == 3
    assert clusters.by_gap(counts) == 3
    assert counts[2].subsample_agreement == pytest.approx(1.0)


def test_uniform_points_have_no_clusters_by_the_gap() -> None:
    counts = clusters.sweep(np.random.default_rng(3).uniform(size=(60, 2)), largest=4, seeds=10)
    assert clusters.by_gap(counts) == 1


def test_labels_are_ordered_by_utilisation_and_the_same_for_every_scaling() -> None:
    labels = {how: clusters.clustered(clusters.scaled(blobs(), how), 3) for how in clusters.SCALINGS}
    assert labels["none"].tolist() == [2] * 20 + [0] * 20 + [1] * 20
    assert all(clusters.agreement(labels["none"], other) == 1.0 for other in labels.values())
    summary = clusters.summary(labels["none"], {"util": blobs()[:, 0]})
    assert [row["runs"] for row in summary] == [20, 20, 20]


@pytest.mark.parametrize(
    ("points", "how", "message"),
    [
        ([[1.0, np.nan]], "none", "not finite"),
        ([[1.0, 2.0]], "log", "scaling 'log'"),
    ],
)
def test_points_that_cannot_be_scaled_are_refused(points: list[list[float]], how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clusters.scaled(np.array(points), how)


def test_too_few_different_points_are_refused() -> None:
    with pytest.raises(ValueError, match="1 different points"):
        clusters.sweep(np.ones((9, 2)))


def test_a_constant_column_does_not_disturb_scaling() -> None:
    assert clusters.scaled(np.array([[1.0, 5.0], [3.0, 5.0]]), "standard").tolist() == [[-1.0, 0.0], [1.0, 0.0]]


# -- pairs ------------------------------------------------------------------------------------------------------------


def pair(a: str, b: str, solo: tuple[float, float], packed: tuple[float, float]) -> dict[str, object]:
    return {"a": a, "b": b, "solo_a_s": solo[0], "solo_b_s": solo[1], "packed_a_s": packed[0], "packed_b_s": packed[1]}


def test_saving_and_slowdown_are_worked_out_from_the_times() -> None:
    row = packing.measured(pd.DataFrame([pair("x", "y", (100.0, 60.0), (110.0, 90.0))])).iloc[0]
    assert (row["slowdown_a"], row["slowdown_b"]) == pytest.approx((0.1, 0.5))
    assert row["saving"] == pytest.approx(1 - 110 / 160)
    assert row["bound"] == pytest.approx(60 / 160)
    # x ran alone for 20 s, so 80 of its 100 s were done in the 90 s of the overlap
    assert (row["n_a"], row["n_b"]) == pytest.approx((80 / 90, 60 / 90))
    assert row["rate_saving"] == pytest.approx(1 - 90 / 140)


def test_pairs_known_by_rates_give_the_rates_back() -> None:
    row = packing.from_rates(pd.DataFrame({"a": ["x"], "b": ["y"], "n_a": [0.8], "n_b": [0.5]})).iloc[0]
    assert (row["n_a"], row["n_b"], row["rate_saving"]) == pytest.approx((0.8, 0.5, 1 - 1 / 1.3))


def test_reported_figures_that_contradict_their_times_are_found() -> None:
    rows = pd.DataFrame(
        [pair("x", "y", (100.0, 100.0), (110.0, 110.0)), pair("x", "z", (100.0, 100.0), (110.0, 110.0))]
    )
    table = packing.measured(rows).assign(reported_saving=[0.45, 0.30], reported_slowdown_a=[0.1, 0.1])
    assert packing.contradictions(table)["b"].tolist() == ["z"]


def test_clusters_that_matter_are_seen_and_random_ones_are_not() -> None:
    labels = {f"t{i}": i % 2 for i in range(8)}
    rows = [
        pair(a, b, (100.0, 100.0), (110.0, 110.0) if labels[a] != labels[b] else (170.0, 170.0))
        for a in labels
        for b in labels
        if a < b
    ]
    table = packing.measured(pd.DataFrame(rows))
    seen = packing.contrast(table, labels, "saving", shuffles=300)
    assert seen.across > seen.within
    assert seen.p < 0.1
    unrelated = {name: int(int(name[1:]) >= 4) for name in labels}
    assert packing.contrast(table, unrelated, "saving", shuffles=300).p > 0.2
    assert [row["clusters"] for row in packing.by_cluster_pair(table, labels)] == ["0–0", "0–1", "1–1"]


@pytest.mark.parametrize(
    ("labels", "message"), [({"x": 0, "y": 0}, "nothing to compare"), ({"x": 0}, "no cluster for y")]
)
def test_a_comparison_that_cannot_be_made_is_refused(labels: dict[object, int], message: str) -> None:
    table = packing.measured(pd.DataFrame([pair("x", "y", (1.0, 1.0), (1.0, 1.0))]))
    with pytest.raises(ValueError, match=message):
        packing.contrast(table, labels, "saving")


def test_the_threshold_table_sorts_directions_by_both_utilisations() -> None:
    directed = pd.DataFrame({"util": [30, 60, 90, 90], "peer_util": [40, 60, 30, 90], "slowdown": [1.0, 1.3, 1.5, 2.0]})
    found = {row["group"]: row["pairs"] for row in packing.threshold_table(directed, (70.0,))}
    assert found == {
        "both below": 2,
        "both below, sum up to 100": 1,
        "both below, sum over 100": 1,
        "one below": 1,
        "none below": 1,
    }


# -- prediction and the whole -----------------------------------------------------------------------------------------


def test_a_line_over_parameters_is_found_for_unseen_families() -> None:
    runs = make_runs(runs_table(), "x", None)
    sets = prediction.feature_sets(runs)
    assert set(sets) == {"before the run", "batch and parameters", "other GPU counters"}
    scores = {(s.features, s.model): s for s in prediction.leave_family_out(runs, UTIL, sets, ("ridge",))}
    assert scores["batch and parameters", "ridge"].mae < 0.2 * scores["none", "mean"].mae
    assert set(scores["none", "mean"].by_family) == {f"family{i}" for i in range(5)}


def test_too_few_families_cannot_be_left_out() -> None:
    runs = make_runs(runs_table(2), "x", None)
    with pytest.raises(ValueError, match="2 families"):
        prediction.leave_family_out(runs, UTIL, {}, ("ridge",))


def test_a_report_of_little_data_says_what_it_lacks() -> None:
    runs = make_runs(runs_table(2).query("batch <= 8"), "x", None)
    report = characterise(Inputs(runs), k=2, quick=True)
    assert report["interference"] == "there are no measured pairs"
    assert "at least four" in report["synthesis"][UTIL]
    assert "2 families" in report["prediction"]
    assert {finding["verdict"] for finding in report["findings"]} >= {"cannot be told"}


def test_own_rates_are_compared_by_own_clusters() -> None:
    runs = make_runs(runs_table(3), "x", None)
    names = runs.table["run"].tolist()[::3]
    pairs = pd.DataFrame([{"a": a, "b": b, "n_a": 0.9, "n_b": 0.8} for a in names for b in names if a < b])
    report = characterise(Inputs(runs, Pairs(pairs)), k=3, quick=True)
    assert not report["interference"]["in_seconds"]
    assert report["interference"]["by"]["own"]["contrast"]["rate_saving"]["across"] == pytest.approx(1 - 1 / 1.7)
    assert len(findings(report)) == 4


def judged(groups: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Table of pairs → the verdict on pairs below the threshold, by their mean slowdown and its 90th percentile."""
    row = {"threshold": 70.0, "group": "both below", "pairs": 30, "worst": 2.0}
    section = {"by": {}} | {key: [row | {"mean": mean, "p90": p90}] for key, (mean, p90) in groups.items()}
    found = findings({"clusters": "none", "interference": section})
    return {"second_matrix" if "MPS" in each.claim else "below": each.verdict for each in found if "70 %" in each.claim}


def test_better_numbers_never_give_a_worse_verdict() -> None:
    order = ["does not hold", "holds in part", "holds"]
    levels = (1.0, 1.1, 1.101, 1.4, 2.0)
    verdicts = {each: order.index(judged({"below": each})["below"]) for each in itertools.product(levels, levels)}
    assert set(verdicts.values()) == {0, 1, 2}
    for (mine, mine_p90), (other, other_p90) in itertools.permutations(verdicts, 2):
        if mine <= other and mine_p90 <= other_p90:
            assert verdicts[mine, mine_p90] >= verdicts[other, other_p90]


def test_another_table_of_pairs_does_not_change_the_verdict_on_the_first() -> None:
    assert judged({"below": (1.06, 1.13)}) == {"below": "holds in part"}
    assert judged({"below": (1.16, 1.4), "second_matrix": (1.02, 1.07)}) == {
        "below": "does not hold",
        "second_matrix": "holds",
    }


def test_no_probability_is_told_as_nothing() -> None:
    contrast: dict[str, float] = {"across": 0.4, "within": 0.2, "across_median": 0.4, "within_median": 0.2}
    contrast |= {"pairs_across": 54, "pairs_within": 24, "p": 0.0005}
    whole = dict.fromkeys(("saving", "bound", "rate_saving", "overlap_slowdown"), contrast)
    found = findings({"clusters": "none", "interference": {"by": {"own": {"contrast": whole}}}})
    assert [text for text in (each.why for each in found) if "p = 0.00" in text] == []
    assert sum("p < 0.01" in each.why for each in found) == 2
    assert page._contrast_table({"contrast": whole}).count("<td class=number>&lt; 0.01</td>") == len(whole)
