"""The jobs on GPUs that save their state, as arrays: those that may be asked to leave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from cotenant.placement.fleet import Flags, Floats, Integers
from cotenant.scheduler.core.columns import NamedColumns
from cotenant.scheduler.core.deadlines import runs_since
from cotenant.scheduler.core.model import Job, JobState, Progress
from cotenant.scheduler.core.priority import (
    AGE_WORTH_A_CLASS_S,
    SIZE_SCALE_S,
    Standing,
    had_waited_s,
    lasting_parts,
    paces_of,
    size_part,
)

_UNKNOWN = math.nan


class Savers:
    """The jobs that hold GPUs and lose nothing by being interrupted, one row each."""

    def __init__(self) -> None:
        self._rows = NamedColumns(
            seq=int, gpus=int, running=bool, one_host=bool, dated=bool, granted_at=float, waited=float, points=float,
            critical=float, expected=float, done=float, speed=float, at=float, tenant=int, queue=int,
        )  # fmt: skip
        self._names: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self._rows.ids)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the jobs, in no order."""
        return iter(self._rows.ids)

    def follow(self, job: Job, progress: Progress | None) -> None:
        """Take in what has changed about a job, or forget it when it is none of them any more."""
        if job.lease is None or not job.saves:
            self._rows.remove(job.spec.job_id)
            return
        job_id, hints = job.spec.job_id, job.spec.hints
        row = self._rows.stale(  # besides what never changes
            job_id, progress, job.state, job.hosts, job.started_hosts, job.started_at, job.done_s, job.queued_at,
            job.lease.granted_at,
        )  # fmt: skip
        if row is None:
            return  # most changes of a job are none of these
        points, critical, _ = lasting_parts(job)
        since = runs_since(job)
        idle = (job.done_s, 0.0, 0.0) if since is None else (job.done_s, 1.0, since)
        done, speed, at = idle if progress is None else (progress.done_s, progress.alone * progress.speed, progress.at)
        self._rows.fill(
            row,
            seq=job.seq,
            gpus=hints.gpus,
            running=job.state is JobState.RUNNING,
            one_host=len(job.hosts) == 1,
            dated=hints.deadline_s is not None,
            granted_at=job.lease.granted_at,
            waited=had_waited_s(job),
            points=points,
            critical=critical,
            expected=_UNKNOWN if hints.expected_duration_s is None else hints.expected_duration_s,
            done=done,
            speed=speed,
            at=at,
            tenant=self._names.setdefault(hints.tenant, len(self._names)),
            queue=self._names.setdefault(hints.queue, len(self._names)),
        )

    def running(self, among: Iterable[str] | None = None) -> Integers:
        """Return the rows of those that run, in order of submission.

        Args:
            among: Ids of the only jobs to look at; None = all.
        """
        rows = np.arange(len(self)) if among is None else self._rows.rows_of(among)
        rows = rows[self._rows.flags("running")[rows]]
        return rows[np.argsort(self._rows.integers("seq")[rows])]

    def ids(self, rows: Integers) -> list[str]:
        """Return the ids of the jobs in these rows."""
        return [self._rows.ids[row] for row in rows.tolist()]

    def seqs(self, rows: Integers) -> Integers:
        """Return their order of submission."""
        return self._rows.integers("seq")[rows]

    def gpus(self, rows: Integers) -> Integers:
        """Return how many GPUs each has."""
        return self._rows.integers("gpus")[rows]

    def points(self, rows: Integers) -> Floats:
        """Return the points of their priority classes."""
        return self._rows.floats("points")[rows]

    def dated(self, rows: Integers) -> Flags:
        """Return which have a deadline."""
        return self._rows.flags("dated")[rows]

    def on_one_host(self, rows: Integers) -> Flags:
        """Return which have all their GPUs on one host."""
        return self._rows.flags("one_host")[rows]

    def granted_at(self, rows: Integers) -> Floats:
        """Return since when they have had their GPUs, Unix seconds."""
        return self._rows.floats("granted_at")[rows]

    def waited_s(self, rows: Integers) -> Floats:
        """Return ``priority.had_waited_s`` of each."""
        return self._rows.floats("waited")[rows]

    def attained_s(self, rows: Integers, now: float) -> Floats:
        """Return ``deadlines.attained_s`` of each."""
        columns = self._rows
        since: Floats = np.maximum(0.0, now - columns.floats("at")[rows])
        return columns.floats("done")[rows] + columns.floats("speed")[rows] * since

    def left_s(self, rows: Integers, now: float) -> Floats:
        """Return ``deadlines.likely_left_s`` of each, after what it has attained."""
        done = self.attained_s(rows, now)
        left = self._rows.floats("expected")[rows] - done
        return np.where(left > 0.0, left, done)

    def is_open_ended(self, rows: Integers, now: float) -> Flags:
        """Return of which nobody knows how long they still run, so that more is expected the longer they do."""
        return ~(self._rows.floats("expected")[rows] > self.attained_s(rows, now))

    def values(self, rows: Integers, now: float, standing: Standing) -> Floats:
        """Return ``priority.held_value`` of each, its deadline left out."""
        columns, rules, done = self._rows, standing.settings, self.attained_s(rows, now)
        tenants = np.array([standing.tenants.get(name, 1.0) for name in self._names])
        queues = np.array([standing.queues.get(name, 1.0) for name in self._names])
        left = columns.floats("expected")[rows] - done
        left = np.where(left > 0.0, left, np.maximum(SIZE_SCALE_S, done))
        size = size_part(SIZE_SCALE_S / (SIZE_SCALE_S + columns.integers("gpus")[rows] * left), rules)
        total = columns.floats("points")[rows] + rules.criticality_weight * columns.floats("critical")[rows]
        total = total + rules.size_weight * size
        fair = 0.5 * (tenants[columns.integers("tenant")[rows]] + queues[columns.integers("queue")[rows]])
        total = total + rules.fair_share_weight * fair
        waited = np.maximum(0.0, columns.floats("waited")[rows])
        value: Floats = total + paces_of(size) * waited / AGE_WORTH_A_CLASS_S
        return value
