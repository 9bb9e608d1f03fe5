"""Whether a job will make its deadline: what it still has to run, at the present speed and alone.

How long a job runs alone on its fastest GPU type is its hint ``expected_duration``; what it has done of that is summed
up from its measured step rate relative to the one it has alone (before it is measured: from the predicted one), and on
GPUs of a slower type it does less in proportion. A job that runs longer than its hint said has an unknown time left.

A deadline is *at risk* when at the present speed less than ``MARGIN`` of the time needed is left to spare, although
alone on its GPUs the job would make it: then more of its GPUs helps, and neighbours yield. It is *lost* when even that
would not help, and then nobody yields any more. An escalated job stays so until twice the margin is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cotenant.scheduler.core.model import Hints, Job, JobState, Progress

MARGIN = 0.2
NOTED_SPEED_CHANGE = 0.02
SLOWEST = 0.01


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a deadline.

    Attributes:
        left_s: Time until the deadline, seconds; negative once it is over.
        needs_s: What the job still has to run at its present speed; None = not known.
        alone_s: The same alone on its GPUs.
        at_risk: It may be missed, but need not be.
        lost: It cannot be met.
        running: The job runs.
    """

    left_s: float
    needs_s: float | None
    alone_s: float | None
    at_risk: bool
    lost: bool
    running: bool


def done_s(progress: Progress, now: float) -> float:
    """Return how many seconds' worth of running alone on its fastest GPU type the job has done."""
    return progress.done_s + progress.alone * progress.speed * max(0.0, now - progress.at)


def at_speed(progress: Progress, speed: float, now: float) -> Progress:
    """Return the progress of a job that goes at this speed (1 = as alone on its GPUs) from now on."""
    if abs(speed - progress.speed) < NOTED_SPEED_CHANGE:
        return progress
    return Progress(done_s(progress, now), now, max(SLOWEST, speed), progress.alone)


def attained_s(job: Job, progress: Progress | None, now: float) -> float:
    """Return what a job has done in all its runs that counts, in seconds' worth of running alone.

    Where no speed was summed up (a job that does not say how long it runs), its time on GPUs.
    """
    if progress is not None:
        return done_s(progress, now)
    since = runs_since(job)
    return job.done_s + (0.0 if since is None else now - since)


def runs_since(job: Job) -> float | None:
    """Return since when all of the job has run, Unix seconds; None when it does not."""
    return job.started_at if job.lease is not None and job.started_hosts.issuperset(job.hosts) else None


def remaining_alone_s(hints: Hints, progress: Progress | None, now: float) -> float | None:
    """Return what the job still has to run if it were alone on its GPUs, seconds; None when that is not known."""
    if progress is None:
        return left_of(hints, 0.0)
    left_s = left_of(hints, done_s(progress, now))
    return None if left_s is None else left_s / progress.alone


def left_of(hints: Hints, done: float) -> float | None:
    """Return what is left of a job that has done so much, seconds alone; None when that is not known."""
    left_s = None if hints.expected_duration_s is None else hints.expected_duration_s - done
    return left_s if left_s is not None and left_s > 0.0 else None


def expected_end(job: Job, progress: Progress | None, limit: float, now: float) -> tuple[float, float] | None:
    """Return when a job is expected to end and when at the latest, Unix seconds; None when nobody knows.

    At the latest: slowed down by ``limit``, as it accepts, from now on. A job that is only about to start starts now.
    """
    if job.state is JobState.STOPPING:
        return now, now
    left_s = remaining_alone_s(job.spec.hints, progress, now)
    if left_s is None:
        return None
    return now + left_s / (progress.speed if progress else 1.0), now + left_s * limit


def ends(jobs: Iterable[tuple[Job, Progress | None]]) -> tuple[float, float, float]:
    """Return when jobs on one GPU, given with their progress, are expected to end.

    Returns:
        When the first and the last of those end that run, Unix seconds (infinity and minus infinity: none runs; nobody
        knows: the last is infinity), and how long those take that start now (minus infinity: none does).
    """
    first, last, starting = math.inf, -math.inf, -math.inf
    for job, progress in jobs:
        expected_s = job.spec.hints.expected_duration_s
        if job.state is JobState.STOPPING:
            continue
        if expected_s is None:
            last = math.inf
        elif progress is None:
            starting = max(starting, expected_s)
        else:
            end = progress.at + (expected_s - progress.done_s) / (progress.alone * progress.speed)
            first, last = min(first, end), max(last, end)
    return first, last, starting


def likely_left_s(hints: Hints, done: float) -> float:
    """Return what to expect where nobody knows: that the job has as much left as it has done, seconds alone.

    For run times with a heavy tail, as those of training jobs are, that is the right order of magnitude.
    """
    left_s = left_of(hints, done)
    return done if left_s is None else left_s


def waiting_outlook(hints: Hints, now: float, done: float = 0.0) -> Outlook | None:
    """Return what is expected of the deadline of a job that starts now, alone; None without a deadline.

    Args:
        hints: Its hints.
        now: Unix seconds.
        done: What it has done and saved before, in seconds' worth of running alone.
    """
    if hints.deadline_s is None:
        return None
    left_s = left_of(hints, done)
    return _outlook(hints.deadline_s - now, left_s, left_s, MARGIN, running=False)


def running_outlook(job: Job, progress: Progress | None, now: float) -> Outlook | None:
    """Return what is expected of the deadline of a job that runs; None without a deadline."""
    hints = job.spec.hints
    if hints.deadline_s is None:
        return None
    alone_s = remaining_alone_s(hints, progress, now)
    needs_s = alone_s / progress.speed if alone_s is not None and progress is not None else alone_s
    margin = 2.0 * MARGIN if job.at_risk else MARGIN
    return _outlook(hints.deadline_s - now, needs_s, alone_s, margin, running=True)


def _outlook(left_s: float, needs_s: float | None, alone_s: float | None, margin: float, *, running: bool) -> Outlook:
    lost = left_s <= 0.0 if alone_s is None else alone_s > left_s
    at_risk = not lost and needs_s is not None and needs_s * (1.0 + margin) > left_s
    return Outlook(left_s, needs_s, alone_s, at_risk, lost, running)


def tell(outlook: Outlook) -> str:
    """Say it for people: "deadline in 10 min; needs 14 min at the present speed: at risk"."""
    left, needs = outlook.left_s, outlook.needs_s
    if left <= 0.0:
        return f"deadline missed {span(-left)} ago"
    if needs is None:
        return f"deadline in {span(left)}; how long the job still needs is not known"
    if outlook.lost:
        alone = span(outlook.alone_s or 0.0)
        where = "even alone on its GPUs" if outlook.running else "even if it starts now"
        return f"deadline in {span(left)}; needs {alone} {where}: cannot be met"
    speed = "at the present speed" if outlook.running else "once it runs"
    return f"deadline in {span(left)}; needs {span(needs)} {speed}" + (": at risk" if outlook.at_risk else "")


def span(seconds: float) -> str:
    """Return a duration in the largest unit of which there are at least two."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
