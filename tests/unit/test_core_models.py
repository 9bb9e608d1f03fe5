"""Models in the core: which serve, what was measured here, what happens when one fails, and replay."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant.configs.settings import Settings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.evidence import KEPT_SETS, REMEMBERED_S, EvidenceBook
from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.scheduler.core import models as models_module
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, EvidenceGathered, ModelsChanged, Tick
from cotenant.scheduler.core.models import GuardedInterference, Models, only
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.ledger import Ledger
from cotenant.scheduler.journal.store import Journal


def job(name: str, util: float = 0.6) -> DemandProfile:
    return DemandProfile(util, util, 1 << 30, 10.0, 30.0, "history", fingerprint=name, family=name[:2])


def measured(focal: str, other: str, n: float = 0.8, seconds: float = 60.0, spread: float = 0.02) -> Observation:
    return Observation("x", job(focal), (job(other),), n, n - spread, n + spread, seconds)


class Constant:
    """Predicts one number; optionally something that is none, or nothing at all."""

    def __init__(self, n: float = 0.5, fault: str = "") -> None:
        self.name = f"constant {n}"
        self.n, self.fault = n, fault
        self.asked: list[tuple[DemandProfile, ...]] = []

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        self.asked.append(tuple(members))
        if self.fault == "raises":
            raise ZeroDivisionError("no jobs")
        if self.fault == "short":
            return []
        return [ThroughputPrediction(self.n, self.n, self.n)] * len(members)


def source(versions: Mapping[str, str]) -> Models:
    if versions.get("interference") == "half":
        return Models(interference=Constant(0.5), serving={"interference": "half"})
    if "interference" in versions:
        return Models(warnings=(f"no {versions['interference']}",))
    return Models()


def predicted(core: Core) -> float:
    return core.predictor.predict([job("a"), job("b")], "x")[0].mid


def test_the_rule_predicts_until_a_model_is_named_and_again_when_it_is_taken_away() -> None:
    core = Core(Settings(), source)
    rule = UtilisationRule().predict([job("a"), job("b")], "x")[0].mid
    assert predicted(core) == rule
    core.handle([ModelsChanged({"interference": "half"})], 1.0)
    assert predicted(core) == 0.5
    core.handle([ModelsChanged({})], 2.0)
    assert predicted(core) == rule


def test_a_model_that_cannot_be_used_leaves_a_warning_and_the_rule() -> None:
    core = Core(Settings(), source)
    core.handle([ModelsChanged({"interference": "gone"})], 1.0)
    assert core.warnings == ("no gone",)
    assert predicted(core) == UtilisationRule().predict([job("a"), job("b")], "x")[0].mid


@pytest.mark.parametrize("predictor", [Constant(fault="raises"), Constant(fault="short"), Constant(1.5), Constant(0.0)])
def test_a_predictor_that_fails_is_replaced_by_the_rule_and_told(predictor: InterferencePredictor) -> None:
    core = Core(Settings(), only(predictor))
    assert not core.warnings
    assert predicted(core) == UtilisationRule().predict([job("a"), job("b")], "x")[0].mid
    assert len(core.warnings) == 1
    assert "utilisation rule" in core.warnings[0]


def test_what_was_measured_here_changes_the_prediction_of_that_pair_only() -> None:
    core = Core(Settings(), only(LearnedInterference({})))
    before = predicted(core)
    other = core.predictor.predict([job("a"), job("c")], "x")[0].mid
    core.handle([EvidenceGathered((measured("a", "b", 0.91),))], 1.0)
    assert predicted(core) == pytest.approx(0.91)
    assert before != pytest.approx(0.91)
    assert core.predictor.predict([job("a"), job("c")], "x")[0].mid == other


def test_models_and_evidence_survive_a_snapshot() -> None:
    core = Core(Settings(), only(LearnedInterference({})))
    core.handle([ModelsChanged({"interference": "v"}), EvidenceGathered((measured("a", "b", 0.91),))], 1.0)
    again = Core.from_state(State.from_json(core.state.to_json()), only(LearnedInterference({})))
    assert again.state.model_versions == {"interference": "v"}
    assert predicted(again) == predicted(core)
    assert again.state.to_json() == core.state.to_json()


def test_models_and_evidence_survive_a_replay_of_the_journal(tmp_path: Path) -> None:
    events: list[Event] = [ModelsChanged({"interference": "half"}), EvidenceGathered((measured("a", "b"),)), Tick()]
    first = Ledger(Journal(f"sqlite:///{tmp_path / 'j.sqlite'}"), Settings(), source)
    first.take_in(events, 1.0)
    again = Ledger(Journal(f"sqlite:///{tmp_path / 'j.sqlite'}"), Settings(), source)
    assert predicted(again.core) == 0.5
    assert again.core.state.to_json() == first.core.state.to_json()


def test_profiles_that_differ_by_noise_ask_the_same_question() -> None:
    constant = Constant()
    guarded = GuardedInterference(constant)
    for noise in (0.0, 0.001, 0.003):
        guarded.predict([job("a", 0.6 + noise), job("b")], "x")
    assert len(set(constant.asked)) == 1


@given(st.lists(st.tuples(st.floats(0.05, 1.5), st.floats(0.5, 900.0)), min_size=1, max_size=12))
def test_evidence_is_one_line_a_set_within_what_was_measured(runs: list[tuple[float, float]]) -> None:
    book = EvidenceBook(measured("a", "b", n, seconds) for n, seconds in runs)
    (line,) = book.observations()
    assert min(n for n, _ in runs) - 1e-9 <= line.throughput <= max(n for n, _ in runs) + 1e-9
    assert line.seconds <= REMEMBERED_S + max(seconds for _, seconds in runs)


def test_contradictions_widen_the_interval_and_newer_measurements_win_in_time() -> None:
    book = EvidenceBook([measured("a", "b", 0.9), measured("a", "b", 0.5)])
    (line,) = book.observations()
    assert (line.low, line.high) == (pytest.approx(0.48), pytest.approx(0.92))
    for _ in range(60):
        book.add(measured("a", "b", 0.5))
    assert book.observations()[0].throughput == pytest.approx(0.5, abs=0.02)


def test_measurements_that_agree_narrow_the_interval() -> None:
    book = EvidenceBook([measured("a", "b", 0.80)])
    wide = book.observations()[0]
    for n in (0.81, 0.79, 0.80):
        book.add(measured("a", "b", n))
    (narrow,) = book.observations()
    assert narrow.high - narrow.low < 0.6 * (wide.high - wide.low)
    assert narrow.low < 0.80 < narrow.high


def test_evidence_is_bounded_and_forgets_the_longest_unmeasured() -> None:
    book = EvidenceBook(measured("a", f"b{k}") for k in range(KEPT_SETS))
    book.add(measured("a", "b0"))
    book.add(measured("a", "new"))
    names = [each.others[0].fingerprint for each in book.observations()]
    assert len(names) == KEPT_SETS
    assert "b0" in names
    assert "b1" not in names


def test_evidence_without_a_fingerprint_is_of_no_use() -> None:
    book = EvidenceBook([Observation("x", job(""), (job("b"),), 0.8, 0.7, 0.9, 60.0)])
    assert not len(book)


class OneBad(Constant):
    """Fails for sets that hold the job "bad"."""

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        answer = super().predict(members, gpu_type)
        return [] if any(member.fingerprint == "bad" for member in members) else answer


def test_many_sets_at_once_are_answered_as_one_by_one() -> None:
    sets = [[job("a"), job("b")], [job("a")], [job("c"), job("a"), job("b")], [job("a"), job("b")]]
    for predictor in (LearnedInterference({}), UtilisationRule(), Constant(0.7)):
        guarded = GuardedInterference(predictor)
        assert guarded.predict_many(sets, "x") == [GuardedInterference(predictor).predict(each, "x") for each in sets]
        asked = [("x", each) for each in [[], *sets]]
        assert predict_sets(guarded, asked) == predict_sets(predictor, asked)


def test_one_bad_answer_does_not_spoil_the_others() -> None:
    guarded = GuardedInterference(OneBad(0.5))
    rule = UtilisationRule().predict([job("a"), job("bad")], "x")
    assert guarded.predict_many([[job("a"), job("b")], [job("a"), job("bad")]], "x")[0][0].mid == 0.5
    assert guarded.predict_many([[job("a"), job("bad")]], "x")[0] == rule
    assert guarded.fault


def test_types_of_gpus_are_kept_apart() -> None:
    sets = [("x", [job("a"), job("b")]), ("y", [job("a"), job("b")]), ("x", [job("b"), job("a")])]
    informed_of_x = GuardedInterference(LearnedInterference({}, None, [measured("a", "b", 0.95)]))
    first, second, third = predict_sets(informed_of_x, sets)
    assert first[0].mid == third[1].mid == pytest.approx(0.95)
    assert second[0].mid != first[0].mid


@example(1.75e308, 10**30, 1.75e308)
@example(5e-324, 1, 5e-324)
@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.one_of(st.none(), st.integers(-(10**30), 10**30)),
    st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
)
def test_no_number_in_a_profile_stops_a_prediction(value: float, memory: int | None, rate: float | None) -> None:
    odd = DemandProfile(value, value, memory, rate, 30.0, "history", membw_util=value, fingerprint="odd")
    for predictor in (LearnedInterference({}), UtilisationRule()):
        for answer in GuardedInterference(predictor).predict([odd, job("b")], "x"):
            assert 0.0 < answer.low <= answer.mid <= answer.high <= 1.0


def test_what_is_remembered_is_bounded_and_forgetting_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = GuardedInterference(UtilisationRule())
    sets = [[job(f"a{k}", k / 50.0), job("b")] for k in range(50)]
    before = guarded.predict_many(sets, "x")
    monkeypatch.setattr(models_module, "REMEMBERED", 10)
    for k, each in enumerate(sets):
        assert guarded.predict(each, "x") == before[k]
    assert len(guarded._answers) <= 11
    assert UtilisationRule().predict([], "x") == []


def test_what_is_remembered_costs_the_collector_nothing() -> None:
    """A pass over a hundred thousand remembered answers would hold up the decision in which it happens."""
    guarded, profiles = GuardedInterference(UtilisationRule()), [job(f"job {k}", k / 64) for k in range(64)]

    def looked_at() -> int:
        return sum(len(each) for each in gc.get_objects() if type(each) is dict)

    guarded.predict_arrays(list(combinations(profiles[:2], 2)), "x")
    before = looked_at()
    pairs = list(combinations(profiles, 2))
    guarded.predict_arrays(pairs, "x")
    assert looked_at() - before < len(pairs) / 4  # the profiles, but not the answers about them
