"""The jobs on GPUs that have a deadline, as arrays: whose share is to weigh more, or less, as time goes by."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cotenant.configs.settings import SchedulingSettings
from cotenant.placement.fleet import Flags
from cotenant.scheduler.core.columns import NamedColumns
from cotenant.scheduler.core.deadlines import MARGIN
from cotenant.scheduler.core.model import Job, Progress
from cotenant.scheduler.core.priority import HELD_CHANGE, RISK_POINTS, SLACK_SCALE_S

_UNKNOWN = math.nan


class Dated:
    """The jobs that hold GPUs and have a deadline, one row each."""

    def __init__(self) -> None:
        self._rows = NamedColumns(
            seq=int, deadline=float, expected=float, done=float, at=float, speed=float, alone=float, urgency=float,
            at_risk=bool,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self._rows.ids)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the jobs, in no order."""
        return iter(self._rows.ids)

    def follow(self, job: Job, progress: Progress | None) -> None:
        """Take in what has changed about a job, or forget it when it is none of them any more."""
        job_id, hints = job.spec.job_id, job.spec.hints
        if job.lease is None or hints.deadline_s is None:
            self._rows.remove(job_id)
            return
        row = self._rows.stale(job_id, progress, hints, job.urgency, job.at_risk)
        if row is None:
            return
        done, at, speed = (0.0, math.inf, 1.0) if progress is None else (progress.done_s, progress.at, progress.speed)
        self._rows.fill(
            row,
            seq=job.seq,
            deadline=hints.deadline_s,
            expected=_UNKNOWN if hints.expected_duration_s is None else hints.expected_duration_s,
            done=done,
            at=at,
            speed=speed,
            alone=1.0 if progress is None else progress.alone,
            urgency=job.urgency,
            at_risk=job.at_risk,
        )

    def stirred(self, now: float, settings: SchedulingSettings) -> list[str]:
        """Return those of whom ``running_outlook`` and ``held_urgency`` now say something else, by submission."""
        rows = np.flatnonzero(self._stirred(now, settings))
        return [self._rows.ids[row] for row in rows[np.argsort(self._rows.integers("seq")[rows])].tolist()]

    def _stirred(self, now: float, settings: SchedulingSettings) -> Flags:
        columns = self._rows
        was_at_risk, before, speed = columns.flags("at_risk"), columns.floats("urgency"), columns.floats("speed")
        left_s, alone = columns.floats("deadline") - now, columns.floats("alone")
        done = columns.floats("done") + alone * speed * np.maximum(0.0, now - columns.floats("at"))
        alone_s = (columns.floats("expected") - done) / alone
        known = alone_s > 0.0  # never so for those that do not say
        lost = np.where(known, alone_s > left_s, left_s <= 0.0)
        margin = np.where(was_at_risk, 2.0 * MARGIN, MARGIN)
        at_risk = ~lost & known & (alone_s / speed * (1.0 + margin) > left_s)
        slack_s = np.maximum(0.0, left_s - np.where(known, alone_s, 0.0))
        fresh = settings.urgency_weight * (SLACK_SCALE_S / (SLACK_SCALE_S + slack_s))
        fresh = fresh + np.where(at_risk, RISK_POINTS, 0.0)
        risk_changed = at_risk != was_at_risk
        moved = np.where(lost, before != 0.0, (np.abs(fresh - before) >= HELD_CHANGE) & (fresh != before))
        return np.asarray(risk_changed | moved)
