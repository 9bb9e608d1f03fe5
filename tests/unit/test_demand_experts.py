"""Trained experts: served as trained, refused when they do not fit, and better than the untrained mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from cotenant.forecasting.demand.arrays import FAR
from cotenant.forecasting.demand.engine import Expert, MixtureSettings, Moment, SeriesMixture
from cotenant.forecasting.demand.features import FEATURES_VERSION, features
from cotenant.forecasting.demand.mixture import MEMORY_SCALES
from cotenant.forecasting.demand.nets import INPUT_LIMIT, GruExpert, TcnExpert
from cotenant.forecasting.demand.trees import TreesExpert
from cotenant.forecasting.training.demand_artefact import BrokenArtefact, DemandArtefact, load_artefact, save_artefact
from cotenant.forecasting.training.demand_fit import (
    TrainingOptions,
    collect,
    fit_demand,
    flatten_trees,
    train_demand,
    untied,
)
from cotenant.forecasting.training.demand_nets import GruNet, TcnNet
from cotenant.forecasting.training.demand_replay import memory_units, replay

SETTINGS = MixtureSettings(horizons=(1, 5), last=40, gains=(0.3,))
FEW = TrainingOptions(updates=2, trees=5, leaves=7)


def moments(ticks: int, rows: int, seed: int = 0) -> list[Moment]:
    told: list[Moment] = []

    class Listener:
        name, width, expected = "listener", 0, None

        def resize(self, rows: int) -> None: ...

        def clear(self, row: int) -> None: ...

        def step(self, moment: Moment) -> np.ndarray:
            told.append(moment)
            return np.empty((len(moment.rows), 2, 0), dtype=np.float32)

    mixture, rng = SeriesMixture(SETTINGS, rows, (Listener(),)), np.random.default_rng(seed)
    for _ in range(ticks):
        mixture.step(np.arange(rows), rng.random(rows).astype(np.float32))
    return told


def dressed(net: GruNet | TcnNet, width: int) -> dict[str, np.ndarray]:
    with torch.no_grad():
        net.head.weight.normal_()
        net.head.bias.normal_()
    rest = {"horizons": np.array([1, 5]), "features_version": np.array([FEATURES_VERSION])}
    scale = {"input.mean": np.full(width, 0.1, np.float32), "input.scale": np.full(width, 0.7, np.float32)}
    return dict(net.arrays()) | scale | rest


@pytest.mark.parametrize(("kind", "served"), [(GruNet, GruExpert), (TcnNet, TcnExpert)])
def test_a_net_stepped_tick_by_tick_says_what_torch_says_of_the_whole_series(
    kind: type[GruNet] | type[TcnNet], served: type[GruExpert] | type[TcnExpert]
) -> None:
    told = moments(30, 3)
    inputs = np.stack([features(moment) for moment in told], axis=1)
    torch.manual_seed(0)
    net = kind(inputs.shape[2], 2)
    expert = served(dressed(net, inputs.shape[2]), (1, 5), 3)
    ours = np.stack([expert.step(moment)[:, :, 0] for moment in told], axis=1)
    scaled = np.clip((inputs - 0.1) / 0.7, -INPUT_LIMIT, INPUT_LIMIT).astype(np.float32)
    with torch.no_grad():
        moves = net(torch.from_numpy(scaled)).numpy()
    now = np.stack([moment.history[:, 0] for moment in told], axis=1)
    assert ours == pytest.approx(np.maximum(now[:, :, None] + moves, 0.0), abs=1e-4)


def test_trees_walked_from_arrays_say_what_the_library_says() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(500, 6)).astype(np.float32)
    models = [
        HistGradientBoostingRegressor(max_iter=20, max_leaf_nodes=9).fit(inputs, inputs[:, j] * inputs[:, j + 1])
        for j in (0, 2)
    ]
    arrays = flatten_trees(models) | {"horizons": np.array([1, 5]), "features_version": np.array([FEATURES_VERSION])}
    expert = TreesExpert(arrays, (1, 5))
    assert expert.moves(inputs) == pytest.approx(np.stack([m.predict(inputs) for m in models], axis=1), abs=1e-5)


def test_of_too_many_series_trees_are_asked_about_the_contested_ones() -> None:
    artefact = train_demand([np.tile([0.1, 0.9, 0.5], 40)], SETTINGS, ("trees",), FEW)["trees"]
    moment = moments(30, 6)[-1]
    all_asked = TreesExpert(artefact.arrays, (1, 5)).step(moment)
    two_asked = TreesExpert(artefact.arrays, (1, 5), most=2).step(moment)
    same = np.isclose(two_asked, all_asked).all(axis=(1, 2))
    assert same.sum() >= 2
    assert two_asked[~same, :, 0] == pytest.approx(np.repeat(moment.history[~same, :1], 2, axis=1))


def sawtooth(length: int, period: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0.0, 0.01, length)
    return np.clip((np.arange(length) % period) / period + noise, 0.0, 1.0)


def after(values: np.ndarray, experts: tuple[Expert, ...]) -> float:
    mixture, errors = SeriesMixture(SETTINGS, 1, experts), []
    for tick, value in enumerate(values[:-5]):
        said = mixture.step(np.array([0]), np.array([value], dtype=np.float32))
        if tick >= 20:
            errors.append(abs(said[0, 1] - values[tick + 5]))
    return float(np.mean(errors))


def test_experts_trained_on_other_periods_help_on_a_new_one() -> None:
    training = [sawtooth(250, period, period) for period in (13, 17, 29, 33)]
    artefacts = train_demand(training, SETTINGS, options=TrainingOptions(updates=150, trees=40, tree_rate=0.2))
    assert set(artefacts) == {"gru", "tcn", "trees"}
    held = sawtooth(120, 23, 0)
    experts = tuple(artefact.expert((1, 5), 1) for artefact in artefacts.values())
    assert after(held, experts) < 0.9 * after(held, ())


def test_training_is_repeatable_and_tells_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    series = [sawtooth(100, 9, 0)]
    one = train_demand(series, SETTINGS, ("gru",), FEW, lambda *step: told.append(step))
    two = train_demand(series, SETTINGS, ("gru",), FEW)
    assert told == [("GruNet", 1, 2), ("GruNet", 2, 2)]
    for name, array in one["gru"].arrays.items():
        assert np.array_equal(array, two["gru"].arrays[name])


def test_gaps_end_a_series_and_nothing_to_learn_from_is_an_error() -> None:
    values = sawtooth(100, 9, 0)
    values[40] = np.nan
    examples = collect([values], SETTINGS)
    assert sorted(len(inputs) for inputs in examples.inputs) == [40, 59]
    assert np.isnan(examples.moves[0][-1]).all()
    with pytest.raises(ValueError, match="none of 1 series has more than 25 values"):
        collect([values[:20]], SETTINGS)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ([], "none of 0 series"),
        ([np.array([])], "none of 1 series has more than 25 values in a row"),
        ([np.full(100, np.nan)], "none of 1 series"),
        ([np.full(100, 0.5), np.full(100, 87.0)], "series 1: 87 at tick 0 is not accepted; give 0 to 1"),
        ([np.append(np.full(30, 0.5), -0.1)], r"series 0: -0\.1 at tick 30 is not accepted"),
        ([np.full((10, 10), 0.5)], r"series 0: shape \(10, 10\) is not accepted"),
        ([np.array(["busy"] * 50)], "could not convert"),
    ],
)
def test_what_cannot_be_learnt_from_is_named(series: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_demand(series, SETTINGS, options=FEW)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.05])
def test_constant_series_teach_that_nothing_changes(value: float) -> None:
    artefacts = train_demand([np.full(80, value), np.full(40, value)], SETTINGS, options=FEW)
    experts = tuple(artefact.expert((1, 5), 1) for artefact in artefacts.values())
    assert after(np.full(60, min(1.0, value)), experts) < 1e-3


def test_infinities_are_gaps() -> None:
    values = sawtooth(100, 9, 0)
    values[[40, 70]] = np.inf, -np.inf
    assert sorted(len(inputs) for inputs in collect([values], SETTINGS).inputs) == [29, 29, 40]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"updates": 0}, "updates: 0 is not accepted; give at least 1"),
        ({"trees": -1}, "trees: -1"),
        ({"leaves": 1}, "leaves: 1 is not accepted; give at least 2"),
        ({"most_examples": 0}, "most_examples: 0"),
        ({"seed": -1}, "seed: -1"),
        ({"learning_rate": 0.0}, "learning_rate: 0 is not accepted"),
        ({"tree_rate": float("nan")}, "tree_rate: nan is not accepted"),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingOptions(**wrong)  # type: ignore[arg-type]


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kinds: 'lstm' is not accepted; give some of gru, tcn, trees"):
        train_demand([sawtooth(100, 9, 0)], SETTINGS, ("lstm",), FEW)  # type: ignore[arg-type]


def test_in_a_replay_memory_that_stays_is_never_above_its_high_quantile() -> None:
    """Single precision rounds what is held to less than it in half of the cases; live forecasts are never below it."""
    rng = np.random.default_rng(0)
    held = [np.repeat([first, later], 15) for first, later in rng.uniform(20.0, 60.0, (20, 2))]
    units = [memory_units(values, 1.0 / 16.0) for values in held]
    for said, values in zip(replay(held, MEMORY_SCALES[0][1], units=units), held, strict=True):
        assert (said.p95 >= values[:, None]).all()


def test_a_replay_with_what_hosts_foresaw_is_judged_live() -> None:
    values = [np.random.default_rng(seed).random(60) for seed in (0, 1)]
    ahead = [np.full((60, 2, 1), np.nan) for _ in values]
    for each, told in zip(values, ahead, strict=True):
        for j, horizon in enumerate(SETTINGS.horizons):
            told[:-horizon, j, 0] = each[horizon:]
    with_host, alone = replay(values, SETTINGS, outside=ahead), replay(values, SETTINGS)
    for each, ours, theirs in zip(values, with_host, alone, strict=True):
        missed = [np.abs(said.points[20:59, 0] - each[21:]).mean() for said in (ours, theirs)]
        assert missed[0] < 0.3 * missed[1]


@pytest.fixture(scope="module")
def gru() -> DemandArtefact:
    return train_demand([sawtooth(100, 9, 0)], SETTINGS, ("gru",), FEW)["gru"]


def test_an_artefact_comes_back_as_it_was_saved(tmp_path: Path, gru: DemandArtefact) -> None:
    save_artefact(gru, tmp_path / "gru.npz")
    found = load_artefact(tmp_path / "gru.npz")
    assert (found.kind, found.horizons, found.card) == ("gru", (1, 5), {"series": 1, "ticks": 100, "seed": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["gru.npz"]
    for name, array in gru.arrays.items():
        assert np.array_equal(array, found.arrays[name])


def test_broken_files_are_told_from_artefacts(tmp_path: Path, gru: DemandArtefact) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "broken.npz"
    save_artefact(gru, whole)
    content = whole.read_bytes()
    lacking = {name: array for name, array in gru.arrays.items() if name != "head.bias"}
    unsaid = {"card": np.array("{}"), "horizons": np.array([1])}
    for write in (
        lambda: path.write_bytes(content[: len(content) // 2]),
        lambda: path.write_bytes(b""),
        lambda: path.write_text("weights"),
        lambda: np.savez(path, **unsaid),
        lambda: save_artefact(DemandArtefact("gru", (1, 5), lacking, {}), path),
        lambda: np.savez(path, card=np.array([object()], dtype=object)),
    ):
        write()
        with pytest.raises(BrokenArtefact, match=r"broken\.npz"):
            load_artefact(path)


def test_experts_for_something_else_are_refused(gru: DemandArtefact) -> None:
    with pytest.raises(ValueError, match=r"made for horizons \[1, 5\]"):
        gru.expert((1, 2), 1)
    with pytest.raises(ValueError, match="features_version"):
        GruExpert(dict(gru.arrays) | {"features_version": np.array([0])}, (1, 5), 1)
    with pytest.raises(ValueError, match=r"head\.weight"):
        GruExpert(dict(gru.arrays) | {"head.weight": np.full((2, 32), np.nan)}, (1, 5), 1)


def test_features_of_a_single_value_are_finite() -> None:
    first = moments(1, 2)[0]
    assert (first.history[:, 1:] == np.float32(FAR)).all()
    found = features(first)
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 1.0


def test_what_a_growing_job_does_next_is_learnt_across_the_change_of_its_unit() -> None:
    values = np.concatenate([np.full(40, 1.0), np.full(30, 3.0), np.full(30, 12.0)]) * 2**30
    settings = MixtureSettings(horizons=(1, 5), last=40, gains=(0.3,), most=1e6, steps=True)
    examples = collect([values], settings, [memory_units(values)])
    (moves,), (inputs,) = examples.moves, examples.inputs
    assert len(moves) == len(values)
    assert moves[39] == pytest.approx([2 * 2**30, 2 * 2**30])
    assert moves[67] == pytest.approx([0.0, 9 * 2**30])
    assert inputs[70, 0] == pytest.approx(12 * 2**30)  # the level, not its part of the unit
    assert (inputs[70, 1:21] == 0.0).all()  # the past was forgotten with the old unit


def loading(start: int, tail: int) -> np.ndarray:
    """Memory of a program that always loads the same: 1 GiB, then 6, then 20."""
    levels = [1.0] * start + [6.0] * 5 + [20.0] * tail
    return np.array(levels) * 2**30


def test_a_trained_expert_that_was_best_in_training_is_believed_before_it_has_proved_itself() -> None:
    settings = MixtureSettings(horizons=(1, 5), last=40, gains=(0.3,), gate_prior=10.0, most=1e6, steps=True)
    training = [loading(30, 90) for _ in range(12)]
    options = TrainingOptions(trees=60, tree_rate=0.3)
    examples = collect(training, settings, [memory_units(each) for each in training])
    trees = fit_demand(examples, settings, ("trees",), options)["trees"]
    own, persistence, *_ = trees.arrays["expected"]
    assert own[1] < 0.8 * persistence[1]
    held = loading(30, 60)
    units = [memory_units(held)]
    served = replay([held], settings, lambda rows: [trees.expert((1, 5), rows)], units)[0]
    alone = replay([held], settings, units=units)[0]
    missed = [np.abs(said.points[20:-5, 1] - held[25:]).mean() for said in (served, alone)]
    assert missed[0] < 0.8 * missed[1]


def test_trees_learn_rare_moves_among_many_that_are_none() -> None:
    inputs = (np.arange(600) % 20 == 0).astype(np.float32)[:, None]
    moves = 3.0 * inputs[:, 0]
    plain = HistGradientBoostingRegressor(loss="absolute_error", max_iter=30, learning_rate=0.3, early_stopping=False)
    plain.fit(inputs, untied(moves, np.random.default_rng(0)))
    assert plain.predict(np.array([[0.0], [1.0]])) == pytest.approx([0.0, 3.0], abs=0.1)


def test_a_trained_expert_that_errs_is_given_up() -> None:
    training = [sawtooth(150, 11, seed) for seed in range(4)]
    trees = train_demand(training, SETTINGS, ("trees",), TrainingOptions(trees=20, tree_rate=0.3))["trees"]
    wrong = dict(trees.arrays) | {"value": np.asarray(trees.arrays["value"]) * -4.0}
    held = sawtooth(250, 11, 9)
    missed = []
    for experts in ((), (TreesExpert(wrong, (1, 5)),)):
        mixture, errors = SeriesMixture(SETTINGS, 1, experts), []
        for tick, value in enumerate(held[:-1]):
            said = mixture.step(np.array([0]), np.array([value], dtype=np.float32))
            errors.append(abs(said[0, 0] - held[tick + 1]))
        missed.append(float(np.mean(errors[150:])))
    assert missed[1] < 1.25 * missed[0] + 0.01


def test_losses_found_in_training_must_fit() -> None:
    trees = train_demand([sawtooth(100, 9, 0), sawtooth(90, 9, 1)], SETTINGS, ("trees",), FEW)["trees"]
    assert np.asarray(trees.arrays["expected"]).shape == (4, 2)
    for wrong in (np.zeros((3, 2)), np.full((4, 2), np.nan), np.full((4, 2), -1.0)):
        with pytest.raises(ValueError, match=r"expected: .* is not accepted"):
            TreesExpert(dict(trees.arrays) | {"expected": wrong}, (1, 5))


def test_trees_must_be_whole() -> None:
    trees = train_demand([sawtooth(100, 9, 0), sawtooth(90, 9, 1)], SETTINGS, ("trees",), FEW)["trees"]
    for name in ("feature", "threshold", "left", "right", "value", "start", "base"):
        array = np.asarray(trees.arrays[name])
        wrong = [array[:1], array * 0 - 7] if array.dtype.kind == "i" else [array[:1], array * np.nan, array + np.inf]
        for damaged in wrong:
            with pytest.raises(ValueError, match=f"{name}|trees point outside|same shape"):
                TreesExpert(dict(trees.arrays) | {name: damaged}, (1, 5))
