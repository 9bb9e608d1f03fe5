"""Sets of three or more from pairs: ends of the interval, and what the shipped data measured of triples."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cotenant.forecasting.datasets.bridge import observations
from cotenant.forecasting.datasets.colocation import load_colocation
from cotenant.forecasting.datasets.registry import SHIPPED, Registry, load_interference
from cotenant.forecasting.interference.composition import Wanted, composed
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction

DATA = Path(__file__).parents[2] / "forecasting" / "datasets" / "shipped" / "cpu"


def test_the_interval_holds_four_fifths_of_the_measured_triples(tmp_path: Path) -> None:
    predictor = load_interference(Registry(tmp_path), SHIPPED).predictor()
    triples = [each for each in observations(load_colocation(DATA), "timeslice") if len(each.members) == 3]
    told = [predictor.predict(each.profiles, each.gpu_type)[each.focal] for each in triples]
    inside = [one.low <= min(1.0, each.n) <= one.high for one, each in zip(told, triples, strict=True)]
    assert len(triples) == 20
    assert sum(inside) >= 16
    assert sum(one.high - one.low for one in told) / len(told) < 0.25


def test_the_measured_triples_are_predicted_better_than_by_the_rule_alone(tmp_path: Path) -> None:
    predictor, rule = load_interference(Registry(tmp_path), SHIPPED).predictor(), UtilisationRule()
    triples = [each for each in observations(load_colocation(DATA), "timeslice") if len(each.members) == 3]

    def error(of: InterferencePredictor) -> float:
        told = [of.predict(each.profiles, each.gpu_type)[each.focal].mid for each in triples]
        return sum(abs(mid - min(1.0, each.n)) for mid, each in zip(told, triples, strict=True)) / len(triples)

    assert error(predictor) < 0.9 * error(rule)


def test_light_jobs_are_spared_and_heavy_ones_pay() -> None:
    pairs = [ThroughputPrediction(0.9, 0.95, 1.0)] * 2
    light, heavy = composed(*wanted(0.1, 0.6, 0.6), pairs), composed(*wanted(0.9, 0.3, 0.3), pairs)
    assert light.mid > 0.8
    assert heavy.mid < 0.7


@given(
    utils=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=6),
    n=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5),
)
def test_nobody_fares_better_than_beside_any_one_of_the_others(utils: list[float], n: list[float]) -> None:
    pairs = [ThroughputPrediction(each, each, each) for each in n[: len(utils) - 1]]
    told = composed(*wanted(*utils), pairs)
    assert told.low <= told.mid <= told.high
    assert told.mid <= min(each.mid for each in pairs)


def wanted(*utils: float) -> tuple[Wanted, list[Wanted]]:
    focal, *others = (Wanted(util, util) for util in utils)
    return focal, others


def test_equal_jobs_cannot_all_be_spared() -> None:
    told = composed(*wanted(0.4, 0.4, 0.4, 0.4), [ThroughputPrediction(0.9, 1.0, 1.0)] * 3)
    assert told.mid < told.high < 0.7


def test_no_end_is_better_than_what_the_pairs_allow() -> None:
    told = composed(*wanted(0.4, 0.4, 0.4), [ThroughputPrediction(0.5, 0.55, 0.6)] * 2)
    assert told.high <= 1.0 / (1.0 + 2.0 * (1.0 / 0.6 - 1.0)) + 1e-9
