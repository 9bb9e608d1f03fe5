"""Predictions in arrays are those of one set after the other, to the last bit, and so is what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.throughputs import fsums, mids, predict_arrays
from cotenant.forecasting.types import DemandProfile, InterferencePredictor
from cotenant.placement.fleet import Fleet
from cotenant.placement.objective import cautious, packing_saving, score
from cotenant.placement.types import GpuView, Request, Resident, Share
from cotenant.scheduler.core.models import GuardedInterference
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.truth import PairTable

GIB = 1 << 30
NAMES = "abcde"
PAIRS = {(one, other): 0.5 + 0.017 * k + 0.07 * j for k, one in enumerate(NAMES) for j, other in enumerate(NAMES)}
UTIL = {name: 0.31 + 0.13 * k for k, name in enumerate(NAMES)}
TABLE = TablePredictor(PairTable(PAIRS, UTIL))


def job(name: str, util: float = 0.4) -> DemandProfile:
    return DemandProfile(util, util, GIB, 10.0, 60.0, "history", fingerprint=name)


def measured(n: float, one: str, *others: str) -> Observation:
    return Observation("x", job(one), tuple(job(other) for other in others), n, n - 0.02, n + 0.02, 60.0)


LEARNT = TABLE.with_evidence(
    [measured(0.71, "a", "b"), measured(0.55, "b", "a"), measured(0.62, "c", "d"), measured(0.41, "a", "c", "b")]
)
PREDICTORS: dict[str, InterferencePredictor] = {"table": TABLE, "learnt": LEARNT, "rule": UtilisationRule()}
profiles = st.builds(job, st.sampled_from([*NAMES, "stranger"]), st.sampled_from([0.1, 0.37, 0.8]))


@pytest.mark.parametrize("name", PREDICTORS)
@given(members=st.integers(1, 4), drawn=st.data())
def test_many_at_once_are_as_one_after_the_other(name: str, members: int, drawn: st.DataObject) -> None:
    sets = drawn.draw(st.lists(st.lists(profiles, min_size=members, max_size=members), min_size=1, max_size=6))
    plain = PREDICTORS[name]
    guarded, again = GuardedInterference(plain), GuardedInterference(plain)
    for predictor in (plain, guarded, guarded):  # what is remembered is what was said
        said = predict_arrays(predictor, sets, "x")
        assert [said.of(row) for row in range(len(sets))] == [list(again.predict(each, "x")) for each in sets]
        assert [list(plain.predict(each, "x")) for each in sets] == [said.of(row) for row in range(len(sets))]
    assert mids(guarded, [("x", each) for each in [*sets, []]]) == [*said.mid.tolist(), []]


@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=4))
def test_a_table_adds_up_what_each_neighbour_is_known_to_cost(names: list[str]) -> None:
    learnt = LEARNT._learnt
    assert learnt is not None
    n = PairTable(PAIRS, UTIL).together(tuple(names), "x")
    for member, said in enumerate(LEARNT.predict([job(name) for name in names], "x")):
        one, others = names[member], sorted(names[:member] + names[member + 1 :])
        shift = math.fsum(learnt.own.get(("x", one), 0.0) + learnt.caused.get(("x", other), 0.0) for other in others)
        mid = min(1.0, max(0.01, n[member] + shift))
        low, mid, high = learnt.sets.get(("x", one, tuple(others)), (max(0.01, mid - 0.07), mid, min(1.0, mid + 0.07)))
        assert (said.low, said.mid, said.high) == (low, mid, high)


@given(st.permutations([*"abcd"]))
def test_a_table_says_the_same_whatever_the_order(names: Sequence[str]) -> None:
    together = dict(zip(names, PairTable(PAIRS, UTIL).together(tuple(names), "x"), strict=True))
    expected = PairTable(PAIRS, UTIL)._compose(tuple(names))
    assert together == dict(zip(names, expected, strict=True))


@given(st.integers(1, 5), st.data())
def test_sums_are_exact(terms: int, drawn: st.DataObject) -> None:
    number = st.floats(-1e6, 1e6)
    rows = drawn.draw(st.lists(st.lists(number, min_size=terms, max_size=terms), min_size=1, max_size=5))
    assert fsums(np.array(rows)).tolist() == [math.fsum(row) for row in rows]


residents = st.lists(
    st.tuples(profiles, st.sampled_from([1.1, 1.5, 3.0]), st.sampled_from([0.5, 1.0, 1.7])), min_size=1, max_size=3
)


@given(st.lists(residents, min_size=1, max_size=5), profiles, st.sampled_from([0.5, 0.7, 0.9]), st.data())
def test_prospects_are_those_of_one_gpu_after_the_other(
    crews: list[list[tuple[DemandProfile, float, float]]], asks: DemandProfile, confidence: float, drawn: st.DataObject
) -> None:
    settings, predictor = PlacementSettings(confidence=confidence), GuardedInterference(LEARNT)
    request = Request("new", 1, None, None, asks, max_slowdown=1.6, weight=1.3)
    fleet = Fleet([_gpu(number, crew) for number, crew in enumerate(crews)])
    for _ in range(3):
        places = drawn.draw(st.lists(st.integers(0, len(crews) - 1), min_size=1, unique=True).map(sorted))
        _check(fleet, places, request, predictor, settings)
        changes = drawn.draw(st.integers(0, len(crews) - 1))
        fleet.put(_gpu(changes, drawn.draw(residents)))


def _gpu(number: int, crew: list[tuple[DemandProfile, float, float]]) -> GpuView:
    there = tuple(
        Resident(f"{number}-{k}", Share(f"g{number}", GIB, 0.2), known, limit, weight=weight)
        for k, (known, limit, weight) in enumerate(crew)
    )
    return GpuView(f"g{number}", "h", "x", 24 * GIB, there)


def _check(
    fleet: Fleet, places: list[int], request: Request, predictor: GuardedInterference, settings: PlacementSettings
) -> None:
    found = fleet.prospects.of(request, places, fleet.views, predictor, settings)
    bias, errors = settings.packing_bias, list(found.errors())
    gains = found.gain(request.weight, bias).tolist()
    refused = [place for place, good in zip(places, found.good.tolist(), strict=True) if not good]
    assert [error.gpu_id for error in errors] == [f"g{place}" for place in refused]
    for index, place in enumerate(places):
        there = fleet.views[place].residents
        known = [each.profile for each in there]
        before = [each.mid for each in predictor.predict(known, "x")]
        said = predictor.predict([*known, request.profile], "x")
        after = [each.mid for each in said]
        weights = [each.weight for each in there]
        lost = math.fsum(weight * (1.0 / n - 1.0) for weight, n in zip(weights, after, strict=False))
        slowdown = (lost + request.weight * (1.0 / after[-1] - 1.0)) / len(after)
        gain = bias * packing_saving(after) - (1.0 - bias) * slowdown - score(before, bias, weights)
        limits = [*(each.max_slowdown for each in there), request.max_slowdown]
        slowed = any(
            1.0 / cautious(each, settings.confidence) > limit + 1e-9 for each, limit in zip(said, limits, strict=True)
        )
        assert gains[index] == gain
        assert bool(found.good[index]) == (not slowed and packing_saving(after) > 0.0)
        assert list(found.after(index)) == list(said)
