"""Trained demand experts that are damaged or misbehave: refused when they are loaded, contained when they serve."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import window
from registering import card

from cotenant.forecasting.datasets.registry import DEMAND_HORIZONS, ModelFileError, Registry, load_demand
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.demand.arrays import Array
from cotenant.forecasting.demand.engine import Moment
from cotenant.forecasting.demand.guarded import GuardedForecaster
from cotenant.forecasting.demand.mixture import UTIL_SCALES
from cotenant.forecasting.demand.trial import SERIES, UnfitExpert, check_serves
from cotenant.forecasting.training.demand_artefact import (
    KINDS,
    BrokenArtefact,
    DemandArtefact,
    Kind,
    load_artefact,
    save_artefact,
)
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand

NEAR = UTIL_SCALES[0][1]


@cache
def trained() -> dict[Kind, DemandArtefact]:
    series = [np.tile([0.1, 0.9, 0.5], 40), np.tile([0.2, 0.8, 0.5, 0.1], 40)]
    return train_demand(series, NEAR, KINDS, TrainingOptions(updates=2, trees=5, leaves=7))


def harmed(array: np.ndarray, how: str) -> np.ndarray:
    """The array as nobody who trained it would have written it."""
    with np.errstate(all="ignore"):
        return {
            "shorter": lambda: array.ravel()[:-1] if array.ndim < 2 else array[:-1],
            "longer": lambda: np.concatenate([array, array]) if array.ndim else np.array([array, array]),
            "narrower": lambda: array[..., :-1] if array.ndim > 1 else array.ravel()[:0],
            "turned": lambda: array.T if array.ndim > 1 else -array,
            "whole numbers": lambda: (array * 1000).astype(np.int64),
            "words": lambda: array.astype(str),
            "nothing": lambda: np.zeros_like(array),
            "huge": lambda: array * np.float64(1e30),
            "no numbers": lambda: array.astype(float) * np.nan,
            "complex": lambda: array.astype(np.complex128),
        }[how]()


HOW = ("shorter", "longer", "narrower", "turned", "whole numbers", "words", "nothing", "huge", "no numbers", "complex")
PLACES = st.deferred(
    lambda: st.sampled_from([(kind, name) for kind in KINDS for name in sorted(trained()[kind].arrays)])
)


@settings(deadline=None, max_examples=150)
@given(PLACES, st.sampled_from(HOW))
def test_a_damaged_expert_is_refused_or_does_no_harm(place: tuple[Kind, str], how: str) -> None:
    kind, name = place
    sound = trained()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = DemandArtefact(
            kind, sound.horizons, {**sound.arrays, name: harmed(np.asarray(sound.arrays[name]), how)}, sound.card
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"util-{kind}.npz"
            save_artefact(wrong, path)
            try:
                loaded = load_artefact(path)
                check_serves(loaded.expert(DEMAND_HORIZONS, SERIES), NEAR)
            except ValueError:
                return
        served = GuardedForecaster(lambda: MixtureForecaster([loaded.expert(DEMAND_HORIZONS, 64)]))
        for second in range(30):
            served.observe(window(second, (0.1, 0.9, 0.5)[second % 3]))
            served.forecast("job")
    assert served.faults == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_expert_is_fit(kind: Kind) -> None:
    check_serves(trained()[kind].expert(DEMAND_HORIZONS, SERIES), NEAR)


def test_weights_that_do_not_belong_together_are_no_model_that_could_be_activated(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    gru = trained()["gru"]
    weights = np.asarray(gru.arrays["gru.weight_ih"])[:, :-1]
    wrong = DemandArtefact("gru", gru.horizons, {**gru.arrays, "gru.weight_ih": weights}, gru.card)
    name = registry.add("demand", card(kind="demand"), lambda folder: save_artefact(wrong, folder / "util-gru.npz"))
    for use in (load_demand, lambda registry, name: registry.activate("demand", name)):
        with pytest.raises(ModelFileError, match=r"util-gru\.npz: it cannot be asked"):
            use(registry, name)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 255)), max_size=6),
    st.sampled_from((1.0, 1.0, 0.9, 0.3)),
)
def test_a_damaged_file_is_no_expert(kind: Kind, changes: list[tuple[float, int]], part: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"util-{kind}.npz"
        save_artefact(trained()[kind], path)
        content = bytearray(path.read_bytes())
        for place, value in changes:
            content[int(place * len(content))] = value
        path.write_bytes(content[: int(part * len(content))])
        with contextlib.suppress(BrokenArtefact, OSError):
            load_artefact(path)


def test_an_array_that_no_memory_holds_is_no_expert(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 45,)})
    path = tmp_path / "util-gru.npz"
    save_artefact(trained()["gru"], path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("more.npy", header.getvalue())
    with pytest.raises(BrokenArtefact, match=r"util-gru\.npz"):
        load_artefact(path)


class Odd:
    """An expert that says once what it should not."""

    name, width, expected = "odd", 1, None

    def __init__(self, said: float, at: int) -> None:
        self._said, self._left = said, at

    def resize(self, rows: int) -> None: ...

    def clear(self, row: int) -> None: ...

    def step(self, moment: Moment) -> Array:
        self._left -= 1
        said = np.repeat(moment.history[:, :1, None], len(DEMAND_HORIZONS), axis=1)
        return np.full_like(said, self._said) if self._left == 0 else said


@pytest.mark.parametrize("said", [math.nan, math.inf, -math.inf, 1e38, -1e38, -5.0, 7.0])
def test_what_an_expert_once_said_wrong_is_contained(said: float) -> None:
    served = GuardedForecaster(lambda: MixtureForecaster([Odd(said, 20)]))
    usual = MixtureForecaster([Odd(0.0, -1)])
    for second in range(400):
        value = (0.1, 0.9, 0.5)[second % 3]
        for forecaster in (served, usual):
            forecaster.observe(window(second, value))
        served.forecast("job")
    assert served.faults == ()
    forecast, expected = served.forecast("job"), usual.forecast("job")
    assert forecast is not None
    assert expected is not None
    for horizon in DEMAND_HORIZONS:
        assert forecast.util[horizon].p50 == pytest.approx(expected.util[horizon].p50, abs=0.1)


@pytest.mark.parametrize("said", [math.nan, math.inf])
def test_an_expert_that_says_no_number_is_not_fit(said: float) -> None:
    with pytest.raises(UnfitExpert, match="finite"):
        check_serves(Odd(said, 5), NEAR)
