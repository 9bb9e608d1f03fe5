"""The first queue order: who is offered a place first.

``score = class + urgency + waited / 900 s``, highest first, where

* class is 0 for low, 1 for normal, 2 for high;
* urgency, below 1, is ``0.45 * (1 + criticality) * 600 / (600 + slack)`` with ``slack = deadline - now - expected
  duration`` in seconds (not below 0) and criticality 0.5 when not said; 0 without a deadline;
* waited is the time the job has spent in the queue, over all its tries. It counts without limit: a quarter of an hour
  is worth a class, so nothing starves.

Ties go to the job submitted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.scheduler.core.model import Job

CLASS_POINTS: Mapping[str, float] = {"low": 0.0, "normal": 1.0, "high": 2.0}
AGE_WORTH_A_CLASS_S = 900.0
SLACK_SCALE_S = 600.0
DEFAULT_CRITICALITY = 0.5


def score(job: Job, now: float) -> float:
    """Return how much the job deserves the next place; larger is earlier."""
    hints = job.spec.hints
    waited_s = max(0.0, now - job.queued_at)
    return CLASS_POINTS[hints.priority] + _urgency(job, now) + waited_s / AGE_WORTH_A_CLASS_S


def ordered(jobs: Iterable[Job], now: float) -> list[Job]:
    """Return the jobs in the order in which they are offered a place."""
    return sorted(jobs, key=lambda job: (-score(job, now), job.seq))


def _urgency(job: Job, now: float) -> float:
    hints = job.spec.hints
    if hints.deadline_s is None:
        return 0.0
    slack_s = max(0.0, hints.deadline_s - now - (hints.expected_duration_s or 0.0))
    criticality = DEFAULT_CRITICALITY if hints.criticality is None else hints.criticality
    return 0.45 * (1.0 + criticality) * SLACK_SCALE_S / (SLACK_SCALE_S + slack_s)
