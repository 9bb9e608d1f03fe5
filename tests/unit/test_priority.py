"""The priority value: its parts, its bound, and the weight of shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scheduling import spec

from cotenant.configs.settings import SchedulingSettings
from cotenant.scheduler.core.deadlines import waiting_outlook
from cotenant.scheduler.core.model import Hints, Job, JobState
from cotenant.scheduler.core.priority import (
    HELD_CHANGE,
    SLOWEST_PACE,
    Standing,
    held_urgency,
    in_words,
    lasting_parts,
    ordered,
    overtaking_s,
    pace_of,
    parts,
    score,
    share_weight,
)

NOW = 10_000.0
RULES = SchedulingSettings()


def waiting(job_id: str = "j", queued_at: float = NOW, **hints: Any) -> Job:
    return Job(spec(job_id, **hints), JobState.QUEUED, queued_at=queued_at)


@pytest.mark.parametrize(
    ("hints", "part", "want"),
    [
        ({"priority": "high"}, "class", 2.0),
        ({}, "urgency", 0.0),
        ({"deadline_s": NOW}, "urgency", 0.5),
        ({"deadline_s": NOW + 600.0}, "urgency", 0.25),
        ({"deadline_s": NOW + 1200.0, "expected_duration_s": 600.0}, "urgency", 0.25),
        ({}, "criticality", 0.125),
        ({"criticality": 1.0}, "criticality", 0.25),
        ({}, "size", 0.1),
        ({"gpus": 4}, "size", 0.04),
        ({"expected_duration_s": 3600.0}, "size", 0.1),
        ({"expected_duration_s": 900.0, "gpus": 4}, "size", 0.1),
        ({"expected_duration_s": 400.0}, "size", 0.18),
        ({"tenant": "t"}, "fair share", 0.625),
        ({"deadline_s": NOW + 1000.0, "expected_duration_s": 900.0}, "deadline at risk", 1.0),
        ({"deadline_s": NOW + 1000.0, "expected_duration_s": 800.0}, "deadline at risk", 0.0),
        ({"deadline_s": NOW + 1000.0, "expected_duration_s": 1100.0}, "deadline at risk", 0.0),
    ],
)
def test_parts(hints: dict[str, Any], part: str, want: float) -> None:
    standing = Standing(RULES, {"t": 0.25}, {})
    assert parts(waiting(**hints), NOW, standing)[part] == pytest.approx(want)


@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ({}, "criticality 0.12 (not said), size 0.10 (duration not said)"),
        ({"criticality": 0.5, "expected_duration_s": 3600.0}, "criticality 0.12, size 0.10"),
    ],
)
def test_what_was_not_said_is_not_told_as_if_it_were(hints: dict[str, Any], told: str) -> None:
    assert f": class 1.00, {told}, fair share" in in_words(waiting(**hints), NOW, Standing(RULES))


def test_weights_can_be_changed() -> None:
    job = waiting(deadline_s=NOW, criticality=1.0)
    none = SchedulingSettings(urgency_weight=0.0, criticality_weight=0.0, size_weight=0.0, fair_share_weight=0.0)
    assert score(job, NOW, Standing(none)) == 1.0
    assert parts(job, NOW, Standing(SchedulingSettings(urgency_weight=4.0)))["urgency"] == 4.0


hints = st.builds(
    Hints,
    gpus=st.integers(1, 64),
    priority=st.sampled_from(["low", "normal", "high"]),
    deadline_s=st.none() | st.floats(0.0, 1e6),
    criticality=st.none() | st.floats(0.0, 1.0),
    expected_duration_s=st.none() | st.floats(1.0, 1e6),
    tenant=st.sampled_from(["a", "b"]),
)
rules = st.builds(
    SchedulingSettings,
    urgency_weight=st.floats(0.0, 10.0),
    criticality_weight=st.floats(0.0, 10.0),
    size_weight=st.floats(0.0, 10.0),
    fair_share_weight=st.floats(0.0, 10.0),
)


@given(
    hints,
    hints,
    rules,
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1.0)),
)
def test_nobody_is_overtaken_by_those_who_have_not_waited_for_long_themselves(
    old: Hints, new: Hints, settings: SchedulingSettings, fair: tuple[float, float], more: tuple[float, float]
) -> None:
    standing = Standing(settings, dict(zip("ab", fair, strict=True)), {})
    more_s, part = more
    pace = pace_of(lasting_parts(_with(waiting("old"), old))[2])
    waited_s = overtaking_s(settings, pace) + 1.0 + more_s
    gains_most_s = pace * (waited_s - overtaking_s(settings, pace)) / pace_of(1.0)  # what a newcomer may have waited
    first = Job(spec("old"), JobState.QUEUED, queued_at=NOW, seq=0)
    second = Job(spec("new"), JobState.QUEUED, queued_at=NOW + waited_s - part * 0.999 * gains_most_s, seq=1)
    first, second = (_with(job, each) for job, each in ((first, old), (second, new)))
    assert [job.spec.job_id for job in ordered([second, first], NOW + waited_s, standing)] == ["old", "new"]


@pytest.mark.parametrize(
    ("hints", "pace"),
    [
        ({}, 1.0),  # an hour of one GPU is assumed
        ({"gpus": 3}, 0.5),
        ({"expected_duration_s": 3600.0}, 1.0),
        ({"expected_duration_s": 400.0}, 1.8),
        ({"expected_duration_s": 1e9}, SLOWEST_PACE),
    ],
)
def test_who_wants_little_gets_impatient_sooner(hints: dict[str, Any], pace: float) -> None:
    assert parts(waiting(**hints), NOW + 900.0)["waiting"] == pytest.approx(pace)


def _with(job: Job, given: Hints) -> Job:
    return replace(job, spec=replace(job.spec, hints=given))


@pytest.mark.parametrize(
    ("hints", "urgency", "want"),
    [
        ({}, 0.0, 1.0),
        ({"priority": "low"}, 0.0, 0.5),
        ({"priority": "high"}, 0.0, 2.0),
        ({}, 1.5, 2.0**1.5),
        ({"criticality": 1.0}, 0.0, 2.0**0.125),
        ({"expected_duration_s": 1e9}, 0.0, 2.0**-0.1),
        ({}, 1e6, 16.0),
        ({}, -1e6, 1 / 16),
    ],
)
def test_share_weights(hints: dict[str, Any], urgency: float, want: float) -> None:
    assert share_weight(Hints(**hints), urgency, RULES) == pytest.approx(want, rel=1e-4)


def test_the_urgency_of_a_share_follows_in_steps() -> None:
    held, changes = 0.0, 0
    for left_s in range(20_000, 0, -10):
        outlook = waiting_outlook(Hints(deadline_s=NOW + left_s), NOW)
        assert outlook is not None
        fresh = held_urgency(held, outlook, RULES, risk_changed=False)
        changes += fresh != held
        assert abs(fresh - RULES.urgency_weight * 600.0 / (600.0 + left_s)) < HELD_CHANGE
        held = fresh
    assert changes <= 2
