"""The utilisation rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import profile

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile
from cotenant.placement.objective import packing_saving

RULE = UtilisationRule()

# Pairs of training jobs on one core of the cpu device: sum of solo utilisations, measured saving.
MEASURED_PAIRS = [
    (0.50, 0.47),
    (0.82, 0.48),
    (1.04, 0.43),
    (1.28, 0.33),
    (1.41, 0.19),
    (1.65, 0.05),
    (1.78, 0.16),
    (1.87, -0.03),
    (1.91, -0.12),
]

members = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def mids(*utils: float) -> list[float]:
    return [prediction.mid for prediction in RULE.predict([profile(util) for util in utils], "any")]


@pytest.mark.parametrize(
    ("utils", "slowdowns"),
    [
        ((0.9,), (1.0,)),
        ((0.3, 0.3), (1.015, 1.015)),
        ((0.5, 0.5), (1.068, 1.068)),
        ((1.0, 1.0), (2.1875, 2.1875)),
        ((0.33, 0.96), (1.048, 1.549)),
        ((0.0, 1.0), (1.05, 1.0)),
        ((0.4, 0.4, 0.4), (1.3, 1.3, 1.3)),
    ],
)
def test_slowdown_table(utils: tuple[float, ...], slowdowns: tuple[float, ...]) -> None:
    assert [1 / mid for mid in mids(*utils)] == pytest.approx(slowdowns, abs=1e-3)


def test_error_on_the_first_pairs_is_what_the_docstring_says() -> None:
    errors = [packing_saving(mids(total / 2, total / 2)) - saving for total, saving in MEASURED_PAIRS]
    plain = [0.5 if total < 1 else 1 - total / 2 for total, _ in MEASURED_PAIRS]
    assert sum(map(abs, errors)) / len(errors) == pytest.approx(0.043, abs=0.001)
    assert sum(errors) / len(errors) == pytest.approx(0.011, abs=0.001)
    misses = [abs(guess - saving) for guess, (_, saving) in zip(plain, MEASURED_PAIRS, strict=True)]
    assert sum(misses) / len(misses) == pytest.approx(0.074, abs=0.001)


def test_saturated_pairs_are_predicted_to_lose() -> None:
    assert packing_saving(mids(0.95, 0.95)) < 0.0 < packing_saving(mids(0.6, 0.6))


def test_the_heavy_job_pays() -> None:
    light, heavy = RULE.predict([profile(0.33), profile(0.96)], "any")
    assert light.high > 0.9  # with fair division it is hardly hurt
    assert light.mid > heavy.mid > heavy.low


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -0.01, -250.0, 2.5])
def test_an_absurd_utilisation_counts_as_the_whole_gpu(absurd: float) -> None:
    assert mids(0.5, absurd)[0] == mids(0.5, 1.0)[0]


def test_an_unknown_job_counts_as_the_whole_gpu() -> None:
    known = RULE.predict([profile(0.5), profile(1.0)], "any")
    unknown = RULE.predict([profile(0.5), replace(UNKNOWN_PROFILE, util_mean=0.1)], "any")
    assert [p.mid for p in unknown] == [p.mid for p in known]
    assert "nothing is known of" in unknown[0].reason


def test_the_reason_names_the_numbers() -> None:
    assert RULE.predict([profile(0.33), profile(0.95)], "any")[0].reason == "sum of utilisations 1.28"
    assert RULE.predict([profile(0.33)], "any")[0].reason == "alone on the GPU"


@given(members)
def test_predictions_are_ordered_and_in_range(utils: list[float]) -> None:
    predictions = RULE.predict([profile(util) for util in utils], "any")
    assert len(predictions) == len(utils)
    for prediction in predictions:
        assert 0.0 < prediction.low <= prediction.mid <= prediction.high <= 1.0


@given(members, st.data())
def test_more_demand_of_a_neighbour_never_predicts_less_slowdown(utils: list[float], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(utils) - 1))
    more = [*utils]
    more[which] = data.draw(st.floats(utils[which], 1.0))
    before = RULE.predict([profile(util) for util in utils], "any")
    after = RULE.predict([profile(util) for util in more], "any")
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if i != which:
            assert new.mid <= old.mid + 1e-12
            assert new.low <= old.low + 1e-12
            assert new.high <= old.high + 1e-12


@given(members, st.floats(0.0, 1.0))
def test_a_further_neighbour_never_predicts_less_slowdown(utils: list[float], extra: float) -> None:
    assert all(new <= old + 1e-12 for old, new in zip(mids(*utils), mids(*utils, extra), strict=False))


odd = st.floats(0.0, 1.2) | st.sampled_from([0.0, 1e-300, float("nan"), -1.0, float("inf")])
one = st.builds(profile, odd, source=st.sampled_from(["history", "hints", "class", "unknown"]))


@given(st.integers(1, 9).flatmap(lambda size: st.lists(st.lists(one, min_size=size, max_size=size), min_size=1)))
def test_many_sets_in_arrays_are_predicted_as_one_after_the_other(sets: list[list[DemandProfile]]) -> None:
    said = RULE.predict_arrays(sets, "any")
    assert [said.of(row) for row in range(len(sets))] == [list(RULE.predict(each, "any")) for each in sets]
    assert said.sound().all()
