"""Making room for a job that has outgrown its memory share, so that no innocent neighbour runs out of memory."""

from __future__ import annotations

from cotenant.scheduler.core.interruptions import tell
from cotenant.scheduler.core.model import Ending, Interruption, Job, JobState
from cotenant.scheduler.core.priority import held_value
from cotenant.scheduler.core.turn import Turn


def make_memory(turn: Turn, job: Job, gpu_id: str, short_bytes: int) -> bool:
    """Have the least important neighbours leave that lose nothing by it; False when that is not enough, or not fair.

    A neighbour that is more important than the job stays when the job would lose nothing itself, and in any case when
    it is more important by the factor of the settings. What they leave goes to the job at once (``Turn``).

    Args:
        turn: The turn.
        job: The job that has outgrown its share.
        gpu_id: The GPU.
        short_bytes: How much is missing there.
    """
    state = turn.state
    standing, rules = state.standing(), state.settings.rebalance

    def value(other: Job) -> float:
        return held_value(other, state.progress.get(other.spec.job_id), turn.now, standing)

    def size(other: Job) -> int:
        shares = other.lease.shares if other.lease else ()
        return sum(share.memory_bytes for share in shares if share.gpu_id == gpu_id)

    neighbours = [other for other in state.residents(gpu_id) if other.spec.job_id != job.spec.job_id]
    coming = sum(size(other) for other in neighbours if _leaves_for(other, job))
    if coming >= short_bytes:
        return True  # they are on their way
    if not rules.enabled:
        return False
    most = value(job) * (1.0 if job.saves else rules.priority_factor)
    able = sorted(
        (value(other), -other.seq, other) for other in neighbours if other.saves and other.state is JobState.RUNNING
    )
    leaving: list[Job] = []
    for worth, _, other in able:
        if worth > most or coming >= short_bytes:
            break
        leaving.append(other)
        coming += size(other)
    if coming < short_bytes:
        return False
    for other in leaving:
        why = Interruption("memory", turn.now, job.spec.job_id, cost_s=rules.move_cost_s)
        turn.stop(other, Ending(JobState.QUEUED, tell(why), interruption=why))
    return True


def _leaves_for(other: Job, job: Job) -> bool:
    why = other.ending.interruption if other.ending else None
    return why is not None and why.kind == "memory" and why.for_job == job.spec.job_id
