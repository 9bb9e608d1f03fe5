"""The transition table and the function that follows it."""

from __future__ import annotations

import pytest
from scheduling import spec

from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.transitions import HISTORY_LENGTH, TRANSITIONS, InvalidTransition, advance

ALL = list(JobState)


def job_in(state: JobState) -> Job:
    return Job(spec("a"), state, queued_at=0.0)


@pytest.mark.parametrize("before", ALL)
@pytest.mark.parametrize("after", ALL)
def test_exactly_the_edges_of_the_table_can_be_taken(before: JobState, after: JobState) -> None:
    if after in TRANSITIONS[before]:
        moved = advance(job_in(before), after, 5.0, "why")
        assert (moved.state, moved.reason, moved.history[-1].at) == (after, "why", 5.0)
        assert moved.ended_at == (5.0 if after.terminal else None)
    else:
        with pytest.raises(InvalidTransition):
            advance(job_in(before), after, 5.0, "why")


def test_a_terminal_state_leads_nowhere() -> None:
    assert [state for state in ALL if not TRANSITIONS[state]] == [state for state in ALL if state.terminal]


def test_every_state_can_be_reached() -> None:
    assert {after for edges in TRANSITIONS.values() for after in edges} == set(ALL)


def test_the_error_tells_the_story() -> None:
    job = advance(job_in(JobState.QUEUED), JobState.CANCELLED, 7.0, "stopped by user")
    with pytest.raises(InvalidTransition) as caught:
        advance(job, JobState.RUNNING, 8.0, "late start")
    text = str(caught.value)
    assert "'a' cannot go from CANCELLED to RUNNING (late start)" in text
    assert "7.000 CANCELLED: stopped by user" in text


def test_the_history_is_bounded_and_keeps_the_newest() -> None:
    job = job_in(JobState.QUEUED)
    for number in range(HISTORY_LENGTH):
        job = advance(job, JobState.STARTING, float(number), f"start {number}")
        job = advance(job, JobState.QUEUED, float(number), f"back {number}")
    assert len(job.history) == HISTORY_LENGTH
    assert job.history[-1].reason == f"back {HISTORY_LENGTH - 1}"
