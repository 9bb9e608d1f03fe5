"""The priority value of a job: who is offered a place first, and how much its share weighs against its neighbours'.

``value = class + w_u U + w_c C + w_s S + w_f F + risk + pace waited / 900 s``, highest first, where

* class is 0 for low, 1 for normal, 2 for high;
* U, urgency in [0, 1], is ``600 / (600 + laxity)`` with ``laxity = deadline - now - what it still has to run`` in
  seconds (not below 0); 0 without a deadline. (Least laxity first: Mok, 1983.)
* C, criticality in [0, 1], is the hint; 0.5 when not said;
* S, smallness in (0, 1], is ``3600 / (3600 + GPUs * left)``, an hour of one GPU counting half, where left is what the
  job is expected to have left: its expected duration less what it has done and saved, or where that is not known as
  much as it has done, and an hour at least. Where the last end of all is aimed at (setting ``aim``), 1 - S counts;
* F, fair share in (0, 1], is the mean of the factors of its tenant and its queue (see ``accounts.fair_share``);
* risk is 1 while the deadline is at risk but can still be met (see ``deadlines``), else 0;
* waited is the time the job has spent in the queue, over all its tries, and pace is ``max(2 S, SLOWEST_PACE)``: who
  wants little gets impatient sooner (after highest response ratio next, Brinch Hansen 1971), and an hour of one GPU
  at the pace of 1. It counts without limit. The least pace, that of 2,000 GPU-hours, only bounds what may be said:
  where much more is wanted than there is, jobs that all are at it would be served in the order of arrival.

With the default weights U, C and S together are worth less than one class, and F one class at most. Ties go to the job
submitted first.

Nobody starves: apart from waiting, values lie in an interval of width ``2 + w_u + w_c + w_s + w_f + 1``, so who has
waited ``900 s`` times that width over its pace (``overtaking_s``) is ahead of everybody who comes after that, as long
as these have not waited for long themselves; and for the first of those who waited long, GPUs are held (see
``waiting``).

A job that runs has a value as well, by which it keeps its GPUs against others (see ``rebalancing``): with what it still
has to run now, and the time it waited before. What counts against it is a waiting job's importance: its value without
the time it has waited. So waiting protects, and never harms others.

The weight of a share is ``2 ** (class - 1 + w_c (C - 1/2) + w_s (S - 1/2) + urgency)``, where urgency is
``w_u U + risk`` as held by the job: it follows only once it is off by ``HELD_CHANGE``, so that shares do not move with
every second. A plain job weighs 1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np

from cotenant.configs.settings import SchedulingSettings
from cotenant.placement.fleet import Floats
from cotenant.scheduler.core.deadlines import (
    MARGIN,
    Outlook,
    attained_s,
    left_of,
    likely_left_s,
    running_outlook,
    waiting_outlook,
)
from cotenant.scheduler.core.model import Hints, Job, Progress

CLASS_POINTS: Mapping[str, float] = {"low": 0.0, "normal": 1.0, "high": 2.0}
AGE_WORTH_A_CLASS_S = 900.0  # of a job that wants one GPU for an hour
SLOWEST_PACE = 0.001
SLACK_SCALE_S = 600.0
SIZE_SCALE_S = 3600.0  # GPU-seconds
NEUTRAL = 0.5  # criticality of a job that says nothing, and smallness of one that wants one GPU for an hour
RISK_POINTS = 1.0
PARTS = ("class", "urgency", "criticality", "size", "fair share", "deadline at risk", "waiting")
HELD_CHANGE = 0.25
HEAVIEST = 16.0

_DEFAULT = SchedulingSettings()

Sized = TypeVar("Sized", float, Floats)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the order of the queue rests on besides the jobs.

    Attributes:
        settings: The weights.
        tenants: Fair-share factor by tenant; one that is not named has used nothing: 1.
        queues: The same by queue.
    """

    settings: SchedulingSettings = _DEFAULT
    tenants: Mapping[str, float] = field(default_factory=dict)
    queues: Mapping[str, float] = field(default_factory=dict)

    def fair(self, hints: Hints) -> float:
        """Return the fair-share factor of a job, in (0, 1]."""
        return 0.5 * (self.tenants.get(hints.tenant, 1.0) + self.queues.get(hints.queue, 1.0))


ALIKE = Standing()


def score(job: Job, now: float, standing: Standing = ALIKE) -> float:
    """Return how much the job deserves the next place; larger is earlier."""
    return reduce(operator.add, _terms(job, now, standing))  # from left to right, as ``Line.scores`` adds


def parts(job: Job, now: float, standing: Standing = ALIKE) -> dict[str, float]:
    """Return what the value of a waiting job is made of, by name."""
    return dict(zip(PARTS, _terms(job, now, standing), strict=True))


def in_words(job: Job, now: float, standing: Standing = ALIKE) -> str:
    """Say what the value of a waiting job is and what it is made of."""
    value = parts(job, now, standing)
    hints = job.spec.hints
    assumed = {
        "criticality": " (not said)" if hints.criticality is None else "",
        "size": " (duration not said)" if hints.expected_duration_s is None else "",
    }
    if standing.settings.aim == "makespan":
        assumed["size"] += " (long jobs first: aim makespan)"
    made_of = ", ".join(f"{name} {part:.2f}{assumed.get(name, '')}" for name, part in value.items() if part)
    return f"priority value {sum(value.values()):.2f}: {made_of}"


def importance(job: Job, now: float, standing: Standing = ALIKE) -> float:
    """Return the value of a waiting job without the time it has waited."""
    return sum(_terms(job, now, standing)[:-1])


def held_value(job: Job, progress: Progress | None, now: float, standing: Standing = ALIKE) -> float:
    """Return how much a job that runs deserves to keep its GPUs.

    Args:
        job: The job; holds a lease.
        progress: How far it is, where that is summed up.
        now: Unix seconds.
        standing: What the order of the queue rests on.
    """
    outlook = None if job.spec.hints.deadline_s is None else running_outlook(job, progress, now)
    return sum(_valued(job, outlook, attained_s(job, progress, now), had_waited_s(job), standing))


def had_waited_s(job: Job) -> float:
    """Return how long a job that runs had waited, over all its tries, when it got its GPUs; 0 when it has none."""
    return job.lease.granted_at - job.queued_at if job.lease else 0.0


def _terms(job: Job, now: float, standing: Standing) -> tuple[float, ...]:
    outlook = None if job.spec.hints.deadline_s is None else waiting_outlook(job.spec.hints, now, job.done_s)
    return _valued(job, outlook, job.done_s, now - job.queued_at, standing)


def _valued(job: Job, outlook: Outlook | None, done: float, waited_s: float, standing: Standing) -> tuple[float, ...]:
    hints, settings = job.spec.hints, standing.settings
    size = size_part(_smallness(hints, done), settings)
    return (
        CLASS_POINTS[hints.priority],
        settings.urgency_weight * urgency_of(outlook),
        settings.criticality_weight * _criticality(hints),
        settings.size_weight * size,
        settings.fair_share_weight * standing.fair(hints),
        RISK_POINTS if outlook is not None and outlook.at_risk else 0.0,
        pace_of(size) * max(0.0, waited_s) / AGE_WORTH_A_CLASS_S,
    )


def ordered(jobs: Iterable[Job], now: float, standing: Standing = ALIKE) -> list[Job]:
    """Return the jobs in the order in which they are offered a place."""
    return sorted(jobs, key=lambda job: (-score(job, now, standing), job.seq))


def size_part(smallness: Sized, settings: SchedulingSettings) -> Sized:
    """Return the part of a value that rests on the size of a job, or of many: its smallness, or its largeness."""
    return smallness if settings.aim == "completion" else 1.0 - smallness


def pace_of(size: float) -> float:
    """Return how fast a job gets impatient, against one that wants one GPU for an hour, in [``SLOWEST_PACE``, 2]."""
    return max(SLOWEST_PACE, 2.0 * size)


def paces_of(sizes: Floats) -> Floats:
    """Return ``pace_of`` of many."""
    return np.maximum(SLOWEST_PACE, 2.0 * sizes)


def overtaking_s(settings: SchedulingSettings, pace: float) -> float:
    """Return how long a job of this pace has to wait before everybody who comes starts out behind it."""
    weights = settings.urgency_weight + settings.criticality_weight + settings.size_weight + settings.fair_share_weight
    classes = CLASS_POINTS["high"] - CLASS_POINTS["low"]
    return AGE_WORTH_A_CLASS_S * (classes + weights + RISK_POINTS) / pace


def urgency_of(outlook: Outlook | None) -> float:
    """Return the urgency of a job's deadline, in [0, 1]; 0 without one."""
    if outlook is None:
        return 0.0
    return SLACK_SCALE_S / (SLACK_SCALE_S + max(0.0, outlook.left_s - (outlook.alone_s or 0.0)))


def held_urgency(before: float, outlook: Outlook, settings: SchedulingSettings, *, risk_changed: bool) -> float:
    """Return the urgency with which a running job's share weighs from now on."""
    if outlook.lost:
        return 0.0  # nobody yields to what cannot be met any more
    fresh = settings.urgency_weight * urgency_of(outlook) + (RISK_POINTS if outlook.at_risk else 0.0)
    return fresh if risk_changed or abs(fresh - before) >= HELD_CHANGE else before


def share_weight(hints: Hints, urgency: float, settings: SchedulingSettings) -> float:
    """Return the weight of a job's share against its neighbours', in [1 / 16, 16]."""
    level = (
        CLASS_POINTS[hints.priority]
        - 1.0
        + settings.criticality_weight * (_criticality(hints) - NEUTRAL)
        + settings.size_weight * (size_part(_smallness(hints), settings) - NEUTRAL)
        + urgency
    )
    return float(min(HEAVIEST, max(1.0 / HEAVIEST, 2.0 ** min(level, 64.0))))


def lasting_parts(job: Job) -> tuple[float, float, float]:
    """Return the parts of a value that never change while a job waits: class, criticality and smallness."""
    hints = job.spec.hints
    return CLASS_POINTS[hints.priority], _criticality(hints), _smallness(hints, job.done_s)


def pressing_parts(left_s: Floats, alone_s: Floats) -> tuple[Floats, Floats]:
    """Return urgency and risk of jobs with a deadline that would start now.

    Args:
        left_s: Time until the deadlines, seconds, shape (jobs,).
        alone_s: Expected run times alone, NaN where not known, same shape.
    """
    known = ~np.isnan(alone_s)
    urgency = SLACK_SCALE_S / (SLACK_SCALE_S + np.maximum(0.0, left_s - np.where(known, alone_s, 0.0)))
    at_risk = known & (alone_s <= left_s) & (alone_s * (1.0 + MARGIN) > left_s)
    return urgency, np.where(at_risk, RISK_POINTS, 0.0)


def _criticality(hints: Hints) -> float:
    return NEUTRAL if hints.criticality is None else hints.criticality


def _smallness(hints: Hints, done: float = 0.0) -> float:
    left_s = likely_left_s(hints, done)
    if left_of(hints, done) is None:
        left_s = max(SIZE_SCALE_S, left_s)
    return SIZE_SCALE_S / (SIZE_SCALE_S + hints.gpus * left_s)
