"""The record of who a job ran with and what was predicted, so that predictions can be held against measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.guarantees import mids_on
from cotenant.placement.types import Resident
from cotenant.scheduler.core.deadlines import span
from cotenant.scheduler.core.model import Colocation, Job
from cotenant.scheduler.core.records import replace
from cotenant.scheduler.core.state import State

LOG_LENGTH = 100
MOST_NAMED = 8
NOTED_CHANGE = 0.02  # a prediction that moves by less does not start a new line


def refresh(state: State, gpu_ids: Iterable[str], predictor: InterferencePredictor, now: float) -> None:
    """Predict anew for every resident of these GPUs and note what changed.

    Args:
        state: The state, changed in place.
        gpu_ids: The GPUs; those no longer known are skipped.
        predictor: Predicts how neighbours slow each other down.
        now: Unix seconds.
    """
    views = [view for gpu_id in gpu_ids if gpu_id in state.gpus and (view := state.view(gpu_id)).residents]
    for view, together in zip(views, mids_on(predictor, views), strict=True):
        for member, n in zip(view.residents, together, strict=True):
            _note(state, member, view.residents, n, now)


def close_log(log: tuple[Colocation, ...], now: float) -> tuple[Colocation, ...]:
    """Return the log with its open lines ended now."""
    return tuple(line if line.end is not None else replace(line, end=now) for line in log)


def tell(job: Job) -> list[str]:
    """Say beside whom a job that has ended ran, and for how long, the longest first."""
    by_gpu: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in job.colocation_log:
        for other in line.neighbours if line.end is not None else ():
            by_gpu[other, line.gpu_id] += (line.end or line.start) - line.start
    beside: dict[str, float] = {}
    for (other, _), seconds in by_gpu.items():
        beside[other] = max(seconds, beside.get(other, 0.0))
    told = [f"{other} for {span(seconds)}" for other, seconds in sorted(beside.items(), key=lambda each: -each[1])]
    more = [f"{len(told) - MOST_NAMED} more"] if len(told) > MOST_NAMED else []
    return [f"shared its GPUs with {', '.join([*told[:MOST_NAMED], *more])}"] if told else []


def _note(state: State, member: Resident, members: tuple[Resident, ...], predicted: float, now: float) -> None:
    job = state.jobs[member.job_id]
    neighbours = tuple(other.job_id for other in members if other.job_id != member.job_id)
    gpu_id = member.share.gpu_id
    line = _open_line(job, gpu_id)
    if line and line.neighbours == neighbours and abs(line.predicted - predicted) < NOTED_CHANGE:
        return
    log = [replace(old, end=now) if old is line else old for old in job.colocation_log]
    log.append(Colocation(now, gpu_id, neighbours, predicted))
    if len(log) > LOG_LENGTH:
        oldest = next((old for old in log if old.end is not None), log[0])
        log.remove(oldest)
    slowest = min(old.predicted for old in log if old.end is None)
    state.put(replace(job, colocation_log=tuple(log), predicted=slowest))


def _open_line(job: Job, gpu_id: str) -> Colocation | None:
    return next((line for line in job.colocation_log if line.gpu_id == gpu_id and line.end is None), None)
