"""What guaranteed compute leaves to others is part of what is predicted for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, SETTINGS, gpu, profile, request, resident

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.throughputs import as_arrays, predict_arrays
from cotenant.placement.engine import policy
from cotenant.placement.guarantees import bounded, bounded_on, mids_on
from cotenant.placement.moving import Together, paces
from cotenant.placement.types import NoFit, Placement, Resident

RULE = UtilisationRule()
FRACTIONS = st.floats(0.0, 1.0)


def refused(resident_: Resident, **asked: float) -> tuple[str, float] | None:
    """Why a job may not join the resident, and by what; None when it may."""
    view = gpu("g0", resident_)
    asked_for = request(util=asked.pop("util", 0.15), memory=GIB, **asked)
    answer = policy("cotenant").place(asked_for, [view], RULE, SETTINGS, 1)
    if isinstance(answer, Placement):
        return None
    assert isinstance(answer, NoFit)
    (error,) = answer.errors
    return error.kind, error.needed


def test_a_guarantee_that_would_squeeze_a_neighbour_below_what_it_uses_is_refused() -> None:
    kind, slowdown = refused(resident("input-bound", 0.33, max_slowdown=1.2), compute=0.9) or ("", 0.0)
    assert kind == "slowdown_neighbour"
    assert slowdown >= 3.3 - 1e-9  # it would have 0.1 of the 0.33 it uses


def test_a_guarantee_that_leaves_a_neighbour_what_it_uses_is_none_of_its_business() -> None:
    assert refused(resident("input-bound", 0.33, max_slowdown=1.2), compute=0.6) is None
    assert refused(resident("input-bound", 0.33, max_slowdown=1.2)) is None


def test_a_job_is_not_put_where_guarantees_leave_it_too_little() -> None:
    kind, slowdown = refused(resident("promised", 0.15, min_compute=0.9), util=0.5, max_slowdown=1.5) or ("", 0.0)
    assert kind == "slowdown_self"
    assert slowdown >= 5.0 - 1e-9


def test_its_own_guarantee_is_what_a_job_has_at_least() -> None:
    members = [resident("a", 0.5, min_compute=0.5), resident("b", 0.9, min_compute=0.5)]
    alone = [replace(each, min_compute=0.0) for each in members]
    said = RULE.predict([each.profile for each in alone], "test-gpu")
    a, b = bounded_on(said, members)
    assert a == said[0]
    assert b.mid == pytest.approx(min(said[1].mid, 0.5 / 0.9))


@given(st.lists(st.tuples(st.floats(0.0, 1.0), FRACTIONS), min_size=1, max_size=4))
def test_nobody_is_promised_more_than_guarantees_leave(jobs: list[tuple[float, float]]) -> None:
    total = max(1.0, sum(kept for _, kept in jobs))
    kept = [each / total for _, each in jobs]
    profiles = [profile(util) for util, _ in jobs]
    said = predict_arrays(RULE, [profiles], "test-gpu")
    found = bounded(said, [profiles], [kept])
    assert found.sound().all()
    assert (found.mid <= said.mid).all()
    for place, ((util, _), own) in enumerate(zip(jobs, kept, strict=True)):
        left = max(own, 1.0 - (sum(kept) - own), 0.02)
        assert found.mid[0, place] * util <= left + 1e-9
    view = gpu("g0", *(resident(str(i), min_compute=g, known=profiles[i]) for i, g in enumerate(kept)))
    assert mids_on(RULE, [view]) == [pytest.approx(found.mid[0].tolist(), abs=1e-12)]
    pace = paces([r.job_id for r in view.residents], lambda _: [view], Together(RULE), lambda *_: 1.0)
    assert [each.n for each in pace.values()] == mids_on(RULE, [view])[0]


@given(st.lists(FRACTIONS, min_size=1, max_size=4))
def test_without_guarantees_nothing_changes(utils: list[float]) -> None:
    profiles = [profile(util) for util in utils]
    said = as_arrays([RULE.predict(profiles, "test-gpu")])
    assert bounded(said, [profiles], [[0.0] * len(utils)]) is said


def test_the_reason_names_what_is_left() -> None:
    members = [resident("a", 0.33), resident("b", 0.15, min_compute=0.9)]
    a, b = bounded_on(RULE.predict([each.profile for each in members], "test-gpu"), members)
    assert a.reason == "guarantees leave it 0.10 of the GPU, of which it would use 0.33"
    assert "guarantees" not in b.reason
