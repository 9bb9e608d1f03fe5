"""Jobs that the CUDA driver freezes: their processes stay on their host, held still, and their GPUs are free.

Such a job keeps its epoch, and what lets it go on is a lease with a newer revision: every command and answer is of one
(epoch, revision). Once its processes are gone it starts over, with a new epoch.
"""

from __future__ import annotations

from dataclasses import replace

from cotenant.scheduler.core.deadlines import span
from cotenant.scheduler.core.events import FreezeFailed, JobExited, JobFrozen, JobMissing
from cotenant.scheduler.core.freezable import STUCK_S, can_freeze, can_thaw
from cotenant.scheduler.core.frozen import Frozen
from cotenant.scheduler.core.model import Ending, Host, Interruption, Job, JobState
from cotenant.scheduler.core.outgrown import ended_well
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn, unfrozen

MOST_CUT = 2  # freezes that were cut short, after which it is not tried again: it may be what cuts them short
FREEZE_TIMEOUT_S = 600.0  # hosts give up before: beyond that a driver hangs, and with it the processes


def job_frozen(turn: Turn, event: JobFrozen) -> None:
    """Its GPUs are free, and it goes where it was to go.

    One that was believed to run, since a command to freeze it came through late, waits to go on: that is how it is.
    """
    job = _meant(turn, event)
    if job is None:
        return
    if job.ending is not None and not job.freezing:
        turn.state.ignore("freezing of a job that is to end")
        return
    before = job.interruption or Interruption("asked", turn.now)
    late = Ending(JobState.QUEUED, "it was frozen late", interruption=before)
    turn.settle_frozen(job, job.ending or late, max(0, event.memory_bytes), event.revision)
    _end_stranded(turn)  # its GPUs may have gone meanwhile


def freeze_failed(turn: Turn, event: FreezeFailed) -> None:
    """It goes on where it is, and is not frozen again; what is to end anyway does, and what has lost its GPU has to."""
    job = _meant(turn, event)
    if job is None:
        return
    if not job.freezing or job.ending is None:
        turn.state.ignore("freezing of a job that is to end")
    elif lost := _lost_place(turn.state, job):
        why = f"it could not be frozen ({event.reason}), and {lost}"
        turn.stop_anyway(job if event.again else replace(job, unfreezable=why), unfrozen(job.ending, why))
    else:
        turn.go_on(job, event.reason, again=event.again and job.freezes_cut < MOST_CUT)


def _lost_place(state: State, job: Job) -> str:
    """Say why the job cannot stay on its GPUs, as things are since it was to leave them; empty when it can."""
    for share in job.lease.shares if job.lease else ():
        gpu = state.gpus.get(share.gpu_id)
        if gpu is None or gpu.host_id not in job.hosts:
            return f"GPU {share.gpu_id} is gone"
        if gpu.fault:
            return f"GPU {share.gpu_id}: {gpu.fault}"
        if sum(resident.share.memory_bytes for resident in state.view(share.gpu_id).residents) > gpu.memory_bytes:
            return f"GPU {share.gpu_id} has less memory"
    return ""


def _meant(turn: Turn, event: JobFrozen | FreezeFailed) -> Job | None:
    """Return the job, if the event is about the lease that it has now."""
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is not None and event.revision < job.granted_revision:
        turn.state.ignore("stale revision")
        return None
    return job


def lost_while_frozen(turn: Turn, event: JobExited | JobMissing) -> bool:
    """Whether these are processes that were frozen, and waited: then the job starts over, once it may.

    One that had done its work when it was frozen has ended.
    """
    job = turn.state.jobs.get(event.job_id)
    if job is None or job.lease is not None or job.frozen is None or job.epoch != event.epoch:
        return False
    if isinstance(event, JobExited) and event.exit_code == 0 and not event.stopped:
        done = advance(job, JobState.SUCCEEDED, turn.now, event.reason or "exit code 0")
        turn.state.put(replace(done, frozen=None, exit_code=0))
        ended_well(turn.state, job)
        turn.dirty = True
        return True
    said = event.reason if isinstance(event, JobExited) else "they are not there any more"
    lose(turn, job, job.frozen.ends or f"its frozen processes have ended: {said or 'nobody knows why'}")
    return True


def lose(turn: Turn, job: Job, reason: str) -> None:
    """Note that the processes of a frozen job that holds no lease are gone: it starts over, or stays suspended."""
    before = job.interruption or Interruption("asked", turn.now)
    lost = replace(before, lost=reason)
    turn.state.put(replace(job, frozen=None, done_s=0.0, interruption=lost, reason=f"starts over: {reason}"))
    turn.dirty = True


def blamed(job: Job, reason: str) -> Job:
    """Return a job whose processes have ended; if they were being frozen, or had just been, it is not tried again."""
    if job.freezing:
        return replace(job, unfreezable=f"its processes ended while they were being frozen: {reason}")
    if job.frozen is not None:
        return replace(job, unfreezable=f"it could not go on once it was frozen: {reason}")
    return job


def may_freeze_anew(turn: Turn, host: Host) -> None:
    """Bring in line what follows from the GPUs that a host has now: who can be frozen there, and who can go on."""
    state = turn.state
    for job in state.on_host(host.host_id):
        freezes = can_freeze(state, job, job.lease.shares if job.lease else ())
        if freezes != job.freezes:
            state.put(replace(job, freezes=freezes))
    _end_stranded(turn)


def _end_stranded(turn: Turn) -> None:
    """End frozen processes whose hosts have no GPUs any more on which they could go on: then their jobs start over."""
    state = turn.state
    for job in state.in_order(state.frozen):
        frozen = job.frozen
        if job.lease is None and frozen is not None and not frozen.ends and not can_thaw(state, job):
            _end(
                turn,
                job,
                frozen,
                f"host {state.hosts[frozen.host_id].name} has no GPUs any more on which it could go on",
            )


def _end(turn: Turn, job: Job, frozen: Frozen, reason: str) -> None:
    """End the processes of a job that is frozen and holds no lease: then it starts over."""
    turn.end_frozen(job, reason)
    turn.state.put(replace(job, frozen=replace(frozen, ends=reason), reason=reason))


def end_stuck(turn: Turn) -> None:
    """End frozen processes that wait for GPUs none of which has worked for long: nobody knows whether they ever will.

    Those that somebody has suspended wait for him, and not for GPUs.
    """
    state = turn.state
    for job in state.in_order(state.frozen):
        frozen = job.frozen
        if job.lease is not None or frozen is None or frozen.ends:
            continue
        stuck = job.state is JobState.QUEUED and not can_thaw(state, job, working=True)
        if stuck != (frozen.stuck_since is not None):
            state.put(replace(job, frozen=replace(frozen, stuck_since=turn.now if stuck else None)))
        elif frozen.stuck_since is not None and turn.now - frozen.stuck_since > STUCK_S:
            name = state.hosts[frozen.host_id].name
            _end(turn, job, frozen, f"no GPU of host {name} on which it could go on has worked for {span(STUCK_S)}")


def stop_late_freezes(turn: Turn) -> None:
    """End what should have been frozen long ago: whether a driver that hangs has frozen it, nobody knows."""
    for job in turn.state.in_order(turn.state.freezing):
        if job.ending is not None and turn.now - job.history[-1].at > FREEZE_TIMEOUT_S:
            why = f"it was not frozen within {FREEZE_TIMEOUT_S:g} s"
            turn.stop_anyway(replace(job, unfreezable=why), unfrozen(job.ending, why))
