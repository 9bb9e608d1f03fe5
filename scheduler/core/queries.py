"""Looking at the core: pure, read-only views of a state for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from cotenant.forecasting.types import InterferencePredictor, Signature
from cotenant.placement import types as placement
from cotenant.placement.explain import explain as fold
from cotenant.placement.explain import memory_text, would_help
from cotenant.placement.objective import packing_saving
from cotenant.scheduler.core.accounts import KINDS, name_of, terms_of
from cotenant.scheduler.core.cycle import Plan, propose
from cotenant.scheduler.core.deadlines import running_outlook, span, tell, waiting_outlook
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.model import Colocation, Gpu, Job, JobSpec, JobState
from cotenant.scheduler.core.priority import ordered, parts
from cotenant.scheduler.core.requests import described
from cotenant.scheduler.core.state import State
from cotenant.scheduler.views import (
    ColocationView,
    Explanation,
    GpuView,
    HistoryView,
    HostView,
    JobView,
    PlannedJob,
    PlanView,
    ShareView,
    UsageView,
)

NO_HOST = "no GPU host is known yet"


def job(state: State, job_id: str, controls: Mapping[str, str] | None = None) -> JobView:
    """Return one job.

    Args:
        state: The state.
        job_id: The job.
        controls: Per job, what holds its share and what cannot be held, in words (the shell knows).

    Raises:
        KeyError: No job with that id.
    """
    return _job_view(state, state.jobs[job_id], (controls or {}).get(job_id, ""))


def jobs(
    state: State, *, active_only: bool = False, limit: int | None = None, controls: Mapping[str, str] | None = None
) -> list[JobView]:
    """Return jobs, newest first.

    Args:
        state: The state.
        active_only: Leave out those that have ended.
        limit: At most so many; None = all.
        controls: As for ``job``.
    """
    known = [job for job in reversed(state.jobs.values()) if not (active_only and job.state.terminal)]
    return [_job_view(state, job, (controls or {}).get(job.spec.job_id, "")) for job in known[:limit]]


def gpus(state: State) -> list[GpuView]:
    """Return all GPUs with what they carry, in the order in which they were announced."""
    return [_gpu_view(state, gpu) for gpu in state.gpus.values()]


def hosts(state: State) -> list[HostView]:
    """Return all hosts. What only the shell knows (``claim``, ``note``) is left empty."""
    return [
        HostView(
            host_id=host.host_id,
            name=host.name,
            reachable=host.reachable,
            gpus=[gpu.gpu_id for gpu in state.gpus.values() if gpu.host_id == host.host_id],
            joined_at=host.joined_at,
            last_report_at=state.reported_at.get(host.host_id),
            claim="",
            note="",
        )
        for host in state.hosts.values()
    ]


def attached(state: State) -> list[str]:
    """Return the ids of the active jobs that a client must keep renewing, in order of submission."""
    active = state.in_order(state.pending | state.queued | state.leased)
    return [job.spec.job_id for job in active if job.spec.attached]


def location(state: State, job_id: str) -> list[tuple[str, int]]:
    """Return (host id, epoch) for every host that holds the job or held it last.

    Raises:
        KeyError: No job with that id.
    """
    job = state.jobs[job_id]
    return [(host_id, job.epoch) for host_id in job.hosts]


def predicted_throughput(job: Job, now: float) -> float | None:
    """Return the job's predicted normalised throughput, averaged over the time it ran; None when it never did."""
    spans = [((now if line.end is None else line.end) - line.start, line.predicted) for line in job.colocation_log]
    total_s = sum(seconds for seconds, _ in spans)
    return sum(seconds * predicted for seconds, predicted in spans) / total_s if total_s > 0.0 else None


# -- explanations ---------------------------------------------------------------------------------------------------


def explain(state: State, job_id: str, now: float, controls: str = "") -> Explanation:
    """Say why a job is where it is and, when it waits, what would help.

    Args:
        state: The state.
        job_id: The job.
        now: Unix seconds.
        controls: What holds the job's share and what cannot be held, in words (the shell knows).

    Raises:
        KeyError: No job with that id.
    """
    job = state.jobs[job_id]
    details: list[str] = []
    summary = f"{job.state}: {job.reason}"
    if job.state is JobState.PENDING or (job.state is JobState.QUEUED and not state.hosts):
        summary = f"waits: {NO_HOST}"
    elif job.state is JobState.QUEUED:
        summary, details = _why_it_waits(state, job, now)
    elif job.lease is not None:
        details = [*_where_it_is(state, job), *([f"control: {controls}"] if controls else [])]
    if not job.state.terminal:
        details.extend(_deadline(state, job, now))
        details.extend(_accounts(state, job))
        details.extend(_where_numbers_come_from(state, job))
    details.extend(f"{_ago(now - change.at)}  {change.state}: {change.reason}" for change in job.history)
    helps = would_help(job.fit_errors or state.refused.get(job_id, ()))
    return Explanation(job_id=job_id, state=job.state, summary=summary, details=details, would_help=helps)


def _ago(seconds: float) -> str:
    """Return how long ago something was, in its largest whole unit and, below a minute, in tenths of a second."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.1f} s ago"


def _why_it_waits(state: State, job: Job, now: float) -> tuple[str, list[str]]:
    left_s = job.not_before - now
    if left_s > 0.0:
        return f"waits {left_s:.0f} s before the next try", [job.reason]
    standing = state.standing()
    queue = ordered((state.jobs[job_id] for job_id in state.queued), now, standing)
    place = next(i for i, other in enumerate(queue, start=1) if other.spec.job_id == job.spec.job_id)
    errors = state.refused.get(job.spec.job_id, ())
    why = fold(errors) if errors else "it has not been looked at yet"
    details = [f"number {place} of {len(queue)} in the queue", f"has waited {max(0.0, now - job.queued_at):.0f} s"]
    value = parts(job, now, standing)
    made_of = ", ".join(f"{name} {part:.2f}" for name, part in value.items() if part)
    details.append(f"priority value {sum(value.values()):.2f}: {made_of}")
    held = state.reservation
    if held is not None and held.job_id == job.spec.job_id:
        when = "" if held.starts_by is None else f", expected in {span(max(0.0, held.starts_by - now))}"
        details.append(f"{', '.join(held.gpu_ids)} held for it{when}")
    return f"waits: {why}", details


def _where_it_is(state: State, job: Job) -> list[str]:
    details: list[str] = []
    for share in job.lease.shares if job.lease else ():
        beside = [other.spec.job_id for other in state.residents(share.gpu_id) if other is not job]
        company = f"beside {', '.join(beside)}" if beside else "alone"
        details.append(f"on {share.gpu_id} {company}: compute {share.compute:.2f}, {memory_text(share.memory_bytes)}")
    if job.predicted is not None:
        details.append(f"predicted slowdown {1.0 / job.predicted:.2f}")
    return details


def _deadline(state: State, job: Job, now: float) -> list[str]:
    """Say whether the job will make its deadline; nothing without one."""
    if job.lease is None:
        outlook = waiting_outlook(job.spec.hints, now)
    else:
        outlook = running_outlook(job, state.progress.get(job.spec.job_id), now)
    return [] if outlook is None else [tell(outlook)]


def _accounts(state: State, job: Job) -> list[str]:
    """Say what the job's tenant and queue hold, where there is a limit."""
    told: list[str] = []
    for kind in KINDS:
        name = name_of(job.spec.hints, kind)
        terms, account = terms_of(state.settings.scheduling, kind, name), state.accounts.by_kind[kind].get(name)
        held, running = (account.held, account.jobs) if account else (0.0, 0)
        limits = [f"{held:.2f} of {terms.most_gpus:g} GPUs"] if terms.most_gpus is not None else []
        limits += [f"{running} of {terms.most_jobs} jobs"] if terms.most_jobs is not None else []
        told += [f"{kind} {name} holds {' and '.join(limits)}"] if limits else []
    return told


def _where_numbers_come_from(state: State, job: Job) -> list[str]:
    """Say what a job that was never measured is planned with, when that is a cold-start class."""
    profile, classes = state.profile_of(job), state.models.cold_start
    if profile.source != "class":
        return []
    memory = "" if profile.memory_bytes is None else f" and {memory_text(profile.memory_bytes)}"
    planned = f"planned with utilisation {profile.util_p95:.2f}{memory}"
    if classes is None:
        return [f"never measured: {planned}, from cold-start classes that are no longer in use"]
    found = classes.describe(described(job.spec.hints))
    return [f"never measured: {planned}, from cold-start class {found.class_id}, level {found.level}: {found.reason}"]


# -- what would happen ----------------------------------------------------------------------------------------------


def plan(core: Core, specs: Sequence[JobSpec], *, packing_bias: float | None = None, now: float) -> PlanView:
    """Say what would happen to these jobs if they were submitted now. Nothing is changed.

    The very code of the scheduling cycle runs, over a snapshot, with the jobs that wait already.

    Args:
        core: The core.
        specs: The hypothetical jobs; their ids do not matter.
        packing_bias: Try this one instead of the one in force.
        now: Unix seconds.
    """
    snapshot = core.state.snapshot()
    if packing_bias is not None:
        changed = {"packing_bias": packing_bias}
        packing = snapshot.settings.placement.model_validate(snapshot.settings.placement.model_dump() | changed)
        snapshot = replace(snapshot, settings=snapshot.settings.model_copy(update={"placement": packing}))
    imagined = [_imagine(core.state, spec, number, now) for number, spec in enumerate(specs)]
    queue = ordered((*snapshot.waiting, *imagined), now, core.state.standing())
    found = propose(core.state, snapshot, queue, core.policy, core.predictor)
    throughputs = [_predict(view, core.predictor) for view in found.gpus]
    ids = {job.spec.job_id for job in imagined}
    shared = [n for n in throughputs if len(n) > 1 and not ids.isdisjoint(n)]
    # Over several GPUs: 1 - (GPU time together) / (GPU time alone), which is 1 - 1/sum(n) for one of them.
    mean = sum(sum(n.values()) for n in shared) / len(shared) if shared else None
    return PlanView(
        jobs=[_planned(core.state, job, found, throughputs) for job in imagined],
        packing_saving_predicted=None if mean is None else packing_saving([mean]),
    )


def _imagine(state: State, spec: JobSpec, number: int, now: float) -> Job:
    spec = replace(spec, job_id=f"planned {number}: {spec.name}")
    return Job(spec, JobState.QUEUED, queued_at=now, seq=state.next_seq + number)


def _predict(view: placement.GpuView, predictor: InterferencePredictor) -> dict[str, float]:
    members = view.residents
    predictions = predictor.predict([member.profile for member in members], view.gpu_type) if members else ()
    return {member.job_id: p.mid for member, p in zip(members, predictions, strict=True)}


def _planned(state: State, job: Job, found: Plan, throughputs: Sequence[Mapping[str, float]]) -> PlannedJob:
    job_id = job.spec.job_id
    placed = next((p for p in found.placed if p.job_id == job_id), None)
    refusal = found.refused.get(job_id)
    why_not = fold(refusal.errors) if refusal and state.hosts else NO_HOST
    here = [n for n in throughputs if job_id in n]
    waits = "never" if state.hosts and refusal and refusal.never else "later"
    return PlannedJob(
        name=job.spec.name,
        placeable="now" if placed else waits,
        shares=[_share_view(state, share) for share in placed.shares] if placed else [],
        slowdown_predicted=max((1.0 / n[job_id] for n in here), default=None),
        neighbours={other: 1.0 / value for n in here for other, value in n.items() if other != job_id},
        explanation=placed.reason if placed else why_not,
    )


# -- records to views -----------------------------------------------------------------------------------------------


def _job_view(state: State, job: Job, controls: str) -> JobView:
    spec, usage = job.spec, _usage_view(state, job, controls)
    predicted = predicted_throughput(job, state.now) if job.state.terminal else job.predicted
    solo = job.profile.solo_step_rate if job.profile else None
    rate = usage.step_rate if usage else None
    return JobView(
        job_id=spec.job_id,
        name=spec.name,
        kind=spec.kind,
        state=job.state,
        command=list(spec.command),
        hints=asdict(spec.hints),
        fingerprint=spec.fingerprint,
        submitted_at=spec.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        exit_code=job.exit_code,
        reason=job.reason,
        restarts=job.restarts,
        epoch=job.epoch,
        shares=[_share_view(state, share) for share in job.lease.shares] if job.lease else [],
        usage=usage,
        slowdown_predicted=1.0 / predicted if predicted else None,
        slowdown_measured=solo / rate if solo and rate else None,
        solo_step_rate=solo,
        not_placeable=job.not_placeable,
        waits=_waits(state, job),
        deadline="" if job.state.terminal else "".join(_deadline(state, job, state.now)),
        history=[HistoryView(at=change.at, state=change.state, reason=change.reason) for change in job.history],
        colocations=[_colocation_view(line) for line in job.colocation_log],
    )


def _waits(state: State, job: Job) -> str:
    errors = state.refused.get(job.spec.job_id, ()) if job.state is JobState.QUEUED else ()
    return fold(errors) if errors else ""


def _colocation_view(line: Colocation) -> ColocationView:
    return ColocationView(
        start=line.start,
        end=line.end,
        gpu_id=line.gpu_id,
        neighbours=list(line.neighbours),
        slowdown_predicted=1.0 / line.predicted,
    )


def _usage_view(state: State, job: Job, controls: str) -> UsageView | None:
    """The job's GPUs together: mean utilisation, all memory, the slowest step rate, the worst throttling."""
    usage = list(state.usage.get(job.spec.job_id, {}).values())
    if not usage:
        return None
    windows = [one.signature for one in usage]
    utils = _known(windows, "util_mean")
    return UsageView(
        util_mean=sum(utils) / len(utils) if utils else None,
        memory_bytes=_sum(_known(windows, "memory_bytes")),
        step_rate=min(_known(windows, "step_rate"), default=None),
        throttled_fraction=max(_known(windows, "throttled_fraction"), default=None),
        measured_at=max(one.measured_at for one in usage),
        controls=controls,
    )


def _gpu_view(state: State, gpu: Gpu) -> GpuView:
    view = state.view(gpu.gpu_id)
    windows = [
        state.usage[job.spec.job_id][gpu.gpu_id].signature
        for job in state.residents(gpu.gpu_id)
        if gpu.gpu_id in state.usage.get(job.spec.job_id, {})
    ]
    return GpuView(
        gpu_id=gpu.gpu_id,
        host_id=gpu.host_id,
        gpu_type=gpu.gpu_type,
        index=gpu.index,
        memory_bytes=gpu.memory_bytes,
        memory_reserved_bytes=sum(resident.share.memory_bytes for resident in view.residents),
        compute_granted=sum(resident.share.compute for resident in view.residents),
        util=_sum(_known(windows, "util_mean")),
        memory_used_bytes=_sum(_known(windows, "memory_bytes")),
        healthy=gpu.healthy,
        jobs=[resident.job_id for resident in view.residents],
    )


def _share_view(state: State, share: placement.Share) -> ShareView:
    gpu = state.gpus.get(share.gpu_id)
    return ShareView(
        gpu_id=share.gpu_id,
        host_id=gpu.host_id if gpu else "",
        memory_bytes=share.memory_bytes,
        compute=share.compute,
    )


def _known(windows: Sequence[Signature], name: str) -> list[float]:
    """The readings that are there; a missing one is left out, never taken for 0."""
    readings = [getattr(window, name) for window in windows]
    return [float(reading) for reading in readings if reading is not None]


def _sum(readings: Sequence[float]) -> float | None:
    return sum(readings) if readings else None
