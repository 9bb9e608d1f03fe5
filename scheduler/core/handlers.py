"""What each event means: one function per event, called by ``Core.handle`` in the order of the events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cotenant.forecasting.types import DemandProfile, JobMeasurement, Signature
from cotenant.placement.explain import memory_text
from cotenant.placement.resize import UsageSignal
from cotenant.placement.types import Share
from cotenant.scheduler.core import outgrown
from cotenant.scheduler.core.allocations import resources_asked
from cotenant.scheduler.core.begun import begun
from cotenant.scheduler.core.deadlines import at_speed
from cotenant.scheduler.core.events import (
    ClientLost,
    EvidenceGathered,
    FreezeFailed,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobExited,
    JobFrozen,
    JobHeldBack,
    JobMissing,
    JobStarted,
    JobSubmitted,
    LeaseReturned,
    MeasurementsReported,
    MemoryOverrun,
    ModelsChanged,
    MoveRequested,
    ResourcesAsked,
    ResumeRequested,
    SettingsChanged,
    StartFailed,
    StopRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.evidence import evidence_gathered
from cotenant.scheduler.core.freezing import (
    FREEZE_TIMEOUT_S,
    blamed,
    end_stuck,
    freeze_failed,
    job_frozen,
    lose,
    lost_while_frozen,
    may_freeze_anew,
    stop_late_freezes,
)
from cotenant.scheduler.core.memoryguard import OVERRUN_MARGIN, make_memory, with_margin
from cotenant.scheduler.core.model import (
    UNBOUND,
    Ending,
    Host,
    Job,
    JobState,
    RestartPolicy,
    StateChange,
)
from cotenant.scheduler.core.moves import PATIENCE_S
from cotenant.scheduler.core.records import replace
from cotenant.scheduler.core.requests import NOTED_UTIL_CHANGE, max_slowdown
from cotenant.scheduler.core.sanity import plausible, plausible_bytes, sound
from cotenant.scheduler.core.snapshot import Usage
from cotenant.scheduler.core.steered import (
    client_lost,
    lease_returned,
    move_requested,
    resume_requested,
    stop_requested,
    suspend_requested,
)
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn

ON_LOSS: tuple[RestartPolicy, ...] = ("on_node_loss", "on_failure")
ON_FAILURE: tuple[RestartPolicy, ...] = ("on_failure",)
ALWAYS: tuple[RestartPolicy, ...] = ("never", "on_node_loss", "on_failure")
OUT_OF_MEMORY_GROWTH = 1.5  # memory given after an allocation failed, relative to what the job had
MEMORY_HORIZON_S = 60
UTIL_HORIZON_S = 5
FASTEST = 1.5  # more than alone by more than this is a mistake of what was measured alone


def job_submitted(turn: Turn, event: JobSubmitted) -> None:
    """Take the job in, once."""
    state, now, spec = turn.state, turn.now, event.spec
    if spec.job_id in state.jobs:
        state.ignore("submitted again")
        return
    job = Job(spec, JobState.PENDING, queued_at=now, seq=state.next_seq, reason="submitted")
    job = replace(job, history=(StateChange(now, JobState.PENDING, "submitted"),))
    job = outgrown.start_with(state, job)
    state.next_seq += 1
    state.note_kind(job)
    if state.hosts:
        job = advance(job, JobState.QUEUED, now, "waiting for a place")
        turn.came.append(spec.job_id)
        turn.dirty = True
    state.put(job)


def host_joined(turn: Turn, event: HostJoined) -> None:
    """Take in a host or its new look; evict jobs from GPUs that are gone, broken or shrank below what is reserved."""
    state = turn.state
    host = replace(event.host, reachable=True)
    before = state.hosts.get(host.host_id)
    evicted = _jobs_without_a_place(turn, host)
    state.put_host(host)
    turn.dirty = True
    for job in evicted:
        why = _why_evicted(job, host)
        still = job.interruption if job.frozen else None  # it is about to go on: it stays frozen instead
        stays = Ending(JobState.QUEUED, why, interruption=still) if still else None
        turn.stop(job, stays or turn.another_try(job, why, ON_LOSS, backoff=False, host_fault=True))
    may_freeze_anew(turn, host)
    if before is None:
        for job in state.in_order(state.pending):
            state.put(advance(job, JobState.QUEUED, turn.now, "waiting for a place"))
            turn.came.append(job.spec.job_id)


def _jobs_without_a_place(turn: Turn, host: Host) -> list[Job]:
    state, announced = turn.state, {gpu.gpu_id: sound(gpu) for gpu in host.gpus}
    before = state.hosts.get(host.host_id)
    gone: set[str] = set()
    for gpu_id in {*announced, *(gpu.gpu_id for gpu in (before.gpus if before else ()))}:
        gpu, new = state.gpus.get(gpu_id), announced.get(gpu_id)
        if gpu is None:
            continue
        reserved = sum(resident.share.memory_bytes for resident in state.view(gpu_id).residents)
        moved = new is not None and gpu.host_id != host.host_id
        dropped = new is None and gpu.host_id == host.host_id
        if moved or dropped or (new is not None and (new.fault or new.memory_bytes < reserved)):
            gone |= state.on_gpu.get(gpu_id, set())
    return [job for job in state.in_order(gone) if job.state is not JobState.STOPPING]


def _why_evicted(job: Job, host: Host) -> str:
    mine = {share.gpu_id for share in job.lease.shares} if job.lease else set()
    faults = [
        f"GPU {gpu.gpu_id} of host {host.name}: {gpu.fault}" for gpu in host.gpus if gpu.fault and gpu.gpu_id in mine
    ]
    return "; ".join(faults) or f"a GPU of host {host.name} it was on is gone or has less memory"


def host_unreachable(turn: Turn, event: HostUnreachable) -> None:
    """Nothing new goes to the host; its jobs keep their leases, since they may still run."""
    if event.host_id in turn.state.hosts:
        turn.state.set_unreachable(event.host_id)
        turn.dirty = True  # the explanations of waiting jobs change
    else:
        turn.state.ignore("unknown host")


def host_lost(turn: Turn, event: HostLost) -> None:
    """The host's jobs no longer run: another try elsewhere, or failure, as their restart policy says."""
    state = turn.state
    host = state.hosts.get(event.host_id)
    name = host.name if host else event.host_id
    reason = f"host {name} was lost: {event.reason}"
    for job in state.on_host(event.host_id):
        turn.leave(job, event.host_id, turn.another_try(job, reason, ON_LOSS, backoff=False, host_fault=True))
    state.drop_host(event.host_id)
    for job in state.in_order(state.queued | state.suspended):
        if job.anchor == event.host_id:
            state.put(replace(job, anchor=None))  # its checkpoint is lost, and it starts over elsewhere
        if job.frozen is not None and job.frozen.host_id == event.host_id:
            lose(turn, job, reason)
    turn.dirty = True


def job_started(turn: Turn, event: JobStarted) -> None:
    """The job runs once all its hosts have said so."""
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None or job.state is not JobState.STARTING:
        return
    same = job.frozen is not None and event.ceiling == UNBOUND  # the processes are those it had
    ceiling = job.ceiling if same else event.ceiling
    job = replace(job, started_hosts=job.started_hosts | {event.host_id}, ceiling=ceiling)
    if job.started_hosts.issuperset(job.hosts):
        job = advance(job, JobState.RUNNING, turn.now, "all its processes run")
        job = replace(job, started_at=turn.now, let_down=0, frozen=None, awaits_memory=False)
        if job.spec.hints.expected_duration_s is not None:
            turn.state.note_progress(job, begun(turn.state, job))
    turn.state.put(job)


def start_failed(turn: Turn, event: StartFailed) -> None:
    """Try again later when that makes sense; the job did not run, so its restart policy does not matter. Nor does it
    count as a restart when the host's services let it down.
    """
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None:
        return
    reason = f"could not be started: {event.reason}"
    policies = ALWAYS if event.retry else ()
    wait_s = event.retry_after_s
    ending = turn.another_try(job, reason, policies, exit_code=event.exit_code, backoff=True, wait_s=wait_s)
    turn.leave(blamed(job, event.reason), event.host_id, ending)


def job_exited(turn: Turn, event: JobExited) -> None:
    """Exit code 0 is success; anything else is another try or failure, as the restart policy says for its cause."""
    if lost_while_frozen(turn, event):
        return
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None:
        return
    code = event.exit_code
    if code == 0:
        ending = Ending(JobState.SUCCEEDED, event.reason or "exit code 0", exit_code=0)
        if job.ending is not None and not job.ending.state.terminal and not event.stopped:
            job = replace(job, ending=ending)  # it was done before it heard that it was to be suspended or moved
    else:
        reason = event.reason or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        policies = ON_LOSS if event.lost else ON_FAILURE
        ending = turn.another_try(job, reason, policies, exit_code=code, backoff=True, host_fault=event.lost)
        if event.out_of_memory and job.ending is None and job.frozen is None:
            job, ending = _out_of_memory(turn, job, reason, code)
        job = blamed(job, reason)
    turn.leave(job, event.host_id, ending, code)
    after = turn.state.jobs.get(job.spec.job_id)
    if after is not None and after.state is JobState.SUCCEEDED:
        outgrown.ended_well(turn.state, job)


def _out_of_memory(turn: Turn, job: Job, reason: str, code: int) -> tuple[Job, Ending]:
    """Let a job that its memory share was too small for try once more with more; whatever its restart policy."""
    had = _memory_of(job)
    largest = max((gpu.memory_bytes for gpu in turn.state.gpus.values()), default=0)
    if job.was_held or job.overruns or had >= largest:
        all_of_it = ", all that the largest GPU has" if had >= largest else "; give it more (hint gpu_memory)"
        why = f"{reason}: out of memory with {memory_text(had)}{all_of_it}"
        return job, Ending(JobState.FAILED, why, exit_code=code)
    wanted = with_margin(turn.state, job, had + 1, had * OUT_OF_MEMORY_GROWTH)
    outgrown.learn(turn.state, job, had, wanted)
    why = f"{reason}: out of memory with {memory_text(had)}; once more with {memory_text(wanted)}"
    ending = Ending(JobState.QUEUED, why)
    return replace(job, overruns=job.overruns + 1, memory_hint_corrected=wanted), ending


def _memory_of(job: Job) -> int:
    """Return the largest of the job's memory shares."""
    return max((share.memory_bytes for share in job.lease.shares), default=0) if job.lease else 0


def job_missing(turn: Turn, event: JobMissing) -> None:
    """A job that died without a word counts as lost with its node."""
    if lost_while_frozen(turn, event):
        return
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None:
        return
    reason = f"host {event.host_id} does not have it"
    ending = turn.another_try(job, reason, ON_LOSS, backoff=True, host_fault=True)
    if job.state is JobState.STARTING and event.host_id not in job.started_hosts:
        turn.stop(job, ending)  # its start may still be under way: only a stop behind it makes sure
    else:
        turn.leave(job, event.host_id, ending)


def memory_overrun(turn: Turn, event: MemoryOverrun) -> None:
    """Give the job more memory if there is room, or once neighbours that lose nothing by it have made some.

    Else try once more elsewhere with what was learnt, then give up. An estimate is reason enough for memory that nobody
    has, for the time that the job is there, and for nothing else.
    """
    if not plausible_bytes(event.used_bytes):
        turn.state.ignore("absurd measurement")
        return
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None or job.lease is None or job.state is JobState.STOPPING:
        return
    state, used = turn.state, event.used_bytes
    wanted = with_margin(state, job, used, used * OVERRUN_MARGIN)
    corrected = max(wanted, job.memory_hint_corrected or 0)
    grown: dict[str, Share] = {}
    for share in state.shares_on(job, event.host_id):
        view = state.view(share.gpu_id)
        free = view.memory_bytes - sum(resident.share.memory_bytes for resident in view.residents)
        size = min(wanted, share.memory_bytes + free)
        if size < used and event.estimated:
            continue
        if size < used:
            if make_memory(turn, job, share.gpu_id, used - size):
                state.put(replace(job, memory_hint_corrected=corrected, awaits_memory=True))
            else:
                _stop_for_overrun(turn, job, used, wanted)
            return
        if size > share.memory_bytes:
            grown[share.gpu_id] = replace(share, memory_bytes=size)
    if not event.estimated:
        job = replace(job, memory_hint_corrected=corrected, awaits_memory=False)
    turn.resize(job, grown, f"used {used} bytes, more than its share; there was room")


def _stop_for_overrun(turn: Turn, job: Job, used: int, wanted: int) -> None:
    reason = f"used {used} bytes of GPU memory, more than its share, and the GPU has no room for that"
    if job.was_held and not job.saves:
        ending = Ending(JobState.FAILED, reason)
    elif job.overruns:
        ending = Ending(JobState.FAILED, f"{reason}; it had been restarted with more memory before")
    else:
        ending = Ending(JobState.QUEUED, f"{reason}; once more with what it needs")
        outgrown.learn(turn.state, job, _memory_of(job), wanted)
    turn.stop(replace(job, overruns=job.overruns + 1, memory_hint_corrected=wanted), ending)


def measurements_reported(turn: Turn, event: MeasurementsReported) -> None:
    """Note what was measured and learnt; the shares of the GPUs concerned are looked at afterwards."""
    if event.host_id in turn.state.hosts:
        turn.state.reported_at[event.host_id] = turn.now
    for measurement in event.measurements:
        _measured(turn, measurement)


def models_changed(turn: Turn, event: ModelsChanged) -> None:
    """Have other models predict from now on; waiting jobs are looked at again."""
    if event.versions == turn.state.model_versions:
        return
    turn.state.model_versions = dict(sorted(event.versions.items()))
    turn.models_changed = turn.dirty = True
    turn.measured.update(dict.fromkeys(turn.state.gpus))


def _measured(turn: Turn, measurement: JobMeasurement) -> None:
    state, signature = turn.state, measurement.signature
    job = state.jobs.get(measurement.job_id)
    gpu_id = signature.gpu_id
    there = job is not None and job.lease is not None and any(s.gpu_id == gpu_id for s in job.lease.shares)
    if job is None or not there or gpu_id not in state.gpus:  # a GPU may be gone before its jobs are
        state.ignore("measurement of a job that is not there")
        return
    if not plausible(measurement):
        state.ignore("absurd measurement")
        return
    profile = state.identified(job.spec, _known(job, _within_the_device(measurement.profile)))
    _note_pace(turn, job, signature, profile)
    job = outgrown.note_use(state, job, signature)
    usage = Usage(signature, _signal(measurement, profile), turn.now)
    state.usage.setdefault(measurement.job_id, {})[gpu_id] = usage
    turn.measured[gpu_id] = None
    progress = state.progress.get(measurement.job_id)
    if progress is not None:
        state.note_progress(job, at_speed(progress, _speed(job, signature, profile), turn.now))
    told = measurement.profile
    if told.source == "history":  # what it was planned with may have been learnt on GPUs of another type
        read = told.memory_bytes == profile.memory_bytes
        learnt = profile if read else replace(profile, memory_bytes=told.memory_bytes)
        state.learn(job.spec.fingerprint, learnt, state.gpus[gpu_id].gpu_type)
    if profile != job.profile:
        turn.dirty = turn.dirty or _moves_placement(turn, job.profile, profile)
        state.put(replace(job, profile=profile))


def _speed(job: Job, signature: Signature, profile: DemandProfile) -> float:
    """Return how fast the job goes compared with running alone: as measured or, without step rates, as predicted."""
    if signature.step_rate and profile.solo_step_rate:
        return min(FASTEST, signature.step_rate / profile.solo_step_rate)
    return job.predicted or 1.0


def _note_pace(turn: Turn, job: Job, signature: Signature, profile: DemandProfile) -> None:
    """Note since when a job that shares is slowed down more than it accepts."""
    hurt_since = turn.state.moves.hurt_since
    shares = signature.neighbours and signature.step_rate and profile.solo_step_rate
    limit = max_slowdown(job.spec.hints, turn.state.settings)
    if shares and (profile.solo_step_rate or 0.0) > limit * (signature.step_rate or 0.0):
        since = hurt_since.setdefault(job.spec.job_id, turn.now)
        turn.state.moves.look(since + PATIENCE_S)
    else:
        hurt_since.pop(job.spec.job_id, None)


def _known(job: Job, measured: DemandProfile) -> DemandProfile:
    """Return what is known of a job: what cannot be read of it stays as it was planned with.

    So does a utilisation that is hinted at alone. A step rate was measured on GPUs of this type or is not known.
    """
    planned = job.profile
    if planned is None:
        return measured
    if measured.source != "unknown":
        return measured if measured.memory_bytes is not None else replace(measured, memory_bytes=planned.memory_bytes)
    memory = max((each.memory_bytes for each in (planned, measured) if each.memory_bytes is not None), default=None)
    return replace(planned, memory_bytes=memory, solo_step_rate=measured.solo_step_rate)


def _signal(measurement: JobMeasurement, profile: DemandProfile) -> UsageSignal:
    """Turn a measurement into what resizing looks at.

    While a job whose training is known has not begun to step, it is planned with what is known: what a program uses
    while it starts up says nothing about what it will need.
    """
    signature, forecast = measurement.signature, measurement.forecast
    util, memory = forecast.util.get(UTIL_HORIZON_S), forecast.memory.get(MEMORY_HORIZON_S)
    return UsageSignal(
        util_p95=util.p95 if util else profile.util_p95,
        util_mean=signature.util_mean,
        throttled_fraction=signature.throttled_fraction,
        memory_p99_bytes=memory.p99 if memory else None,
        memory_peak_bytes=signature.memory_peak_bytes,
        memory_p50_bytes=memory.p50 if memory else None,
        measured=signature.step_rate is not None or profile.source != "history" or profile.solo_step_rate is None,
    )


def _within_the_device(profile: DemandProfile) -> DemandProfile:
    """Rounding in a counter can show a little more than the whole device."""
    if profile.util_mean <= 1.0 and profile.util_p95 <= 1.0:
        return profile
    return replace(profile, util_mean=min(1.0, profile.util_mean), util_p95=min(1.0, profile.util_p95))


def _moves_placement(turn: Turn, old: DemandProfile | None, new: DemandProfile) -> bool:
    if old is None or old.source != new.source or old.from_shared != new.from_shared:
        return True
    enough_s = turn.state.settings.placement.profile_s
    return (
        (old.observed_s < enough_s) != (new.observed_s < enough_s)
        or abs(old.util_mean - new.util_mean) >= NOTED_UTIL_CHANGE
        or old.memory_bytes != new.memory_bytes
    )


def job_held_back(turn: Turn, event: JobHeldBack) -> None:
    """Divide the job's GPUs anew, at once: the rest of the signals of its last window still hold."""
    if not 0.0 <= event.throttled_fraction <= 1.0:
        turn.state.ignore("absurd measurement")
        return
    job = turn.current(event.job_id, event.epoch, event.host_id)
    if job is None or job.state is JobState.STOPPING:
        return
    usage = turn.state.usage.get(event.job_id, {})
    for share in turn.state.shares_on(job, event.host_id):
        known = usage.get(share.gpu_id)
        if known is not None:
            signal = replace(known.signal, throttled_fraction=event.throttled_fraction)
            usage[share.gpu_id] = replace(known, signal=signal)
            turn.measured[share.gpu_id] = None


def settings_changed(turn: Turn, event: SettingsChanged) -> None:
    """Put the new settings in force at once."""
    said = {name: getattr(event, name) for name in ("placement", "resize", "scheduling", "rebalance")}
    changed = {name: values for name, values in said.items() if values is not None}
    turn.state.set_settings(turn.state.settings.model_copy(update=changed))
    turn.measured.update(dict.fromkeys(turn.state.gpus))
    turn.dirty = True


def tick(turn: Turn, event: Tick) -> None:
    """Stop jobs whose start takes too long; they get another try. So do those that are not frozen in time or stuck."""
    stop_late_freezes(turn)
    end_stuck(turn)
    state = turn.state
    for job in state.in_order(state.starting):
        timeout_s = state.settings.lease.start_timeout_s
        if job.frozen is not None:  # gigabytes come back, and what it has done would be lost
            timeout_s = max(timeout_s, FREEZE_TIMEOUT_S)
        if job.lease and turn.now - job.lease.granted_at > timeout_s:
            reason = f"did not start within {timeout_s:g} s"
            turn.stop(job, turn.another_try(job, reason, ALWAYS, backoff=True))


HANDLERS: Mapping[type, Callable[[Turn, Any], None]] = {
    JobSubmitted: job_submitted,
    StopRequested: stop_requested,
    SuspendRequested: suspend_requested,
    ResumeRequested: resume_requested,
    MoveRequested: move_requested,
    LeaseReturned: lease_returned,
    ClientLost: client_lost,
    HostJoined: host_joined,
    HostUnreachable: host_unreachable,
    HostLost: host_lost,
    JobStarted: job_started,
    ResourcesAsked: resources_asked,
    StartFailed: start_failed,
    JobExited: job_exited,
    JobFrozen: job_frozen,
    FreezeFailed: freeze_failed,
    JobMissing: job_missing,
    MemoryOverrun: memory_overrun,
    JobHeldBack: job_held_back,
    MeasurementsReported: measurements_reported,
    ModelsChanged: models_changed,
    EvidenceGathered: evidence_gathered,
    SettingsChanged: settings_changed,
    Tick: tick,
}
