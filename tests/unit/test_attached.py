"""What is told on stderr to who stays with a job: what it waits for, and that its deadline is in danger."""

from __future__ import annotations

import pytest
from fake_client import job_view

from cotenant._attach import Told
from cotenant.scheduler.core.deadlines import Outlook, tell
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.views import JobView

QUEUED, RUNNING = JobState.QUEUED, JobState.RUNNING


def waiting(waits: str, deadline: str = "") -> JobView:
    return job_view("j", QUEUED, reason="waiting for a place", waits=waits, deadline=deadline)


def dated(left_s: float, needs_s: float | None, *, at_risk: bool = False, lost: bool = False) -> str:
    return tell(Outlook(left_s, needs_s, needs_s, at_risk, lost, running=True))


FINE, LATER = dated(6000.0, 600.0), dated(5000.0, 600.0)
RISK, LOST, MISSED = dated(600.0, 590.0, at_risk=True), dated(600.0, 700.0, lost=True), dated(-200.0, 60.0, lost=True)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ([waiting("1 GPU: busy")], ["QUEUED: 1 GPU: busy"]),
        ([waiting("")], ["QUEUED: waiting for a place"]),
        ([waiting(""), waiting("1 GPU: busy")], ["QUEUED: waiting for a place", "QUEUED: 1 GPU: busy"]),
        ([waiting("1 GPU: 3.0 GiB short"), waiting("1 GPU: 2.0 GiB short")], ["QUEUED: 1 GPU: 3.0 GiB short"]),
        (
            [waiting("1 GPU: busy"), job_view("j", RUNNING), waiting("2 GPUs: busy")],
            ["QUEUED: 1 GPU: busy", "QUEUED: 2 GPUs: busy"],
        ),
        ([job_view("j", JobState.SUSPENDED, reason="suspended by user")], ["SUSPENDED: suspended by user"]),
        ([waiting("1 GPU: busy", FINE), waiting("1 GPU: busy", LATER)], ["QUEUED: 1 GPU: busy"]),
        ([waiting("1 GPU: busy", FINE), waiting("1 GPU: busy", RISK)], ["QUEUED: 1 GPU: busy", f"QUEUED: {RISK}"]),
        ([waiting("1 GPU: busy", LOST)], [f"QUEUED: 1 GPU: busy; {LOST}"]),
        (
            [job_view("j", RUNNING, deadline=deadline) for deadline in (FINE, RISK, RISK, LOST, LOST, MISSED, MISSED)],
            [f"RUNNING: {deadline}" for deadline in (RISK, LOST, MISSED)],
        ),
        ([job_view("j", RUNNING, deadline=dated(600.0, None)), job_view("j", RUNNING)], []),
    ],
)
def test_news_are_told_once(views: list[JobView], said: list[str]) -> None:
    told, lines = Told(), []
    for view in views:
        told.look(view, lines.append)
    assert lines == [f"j: {line}" for line in said]
