"""Looking at the core: pure, read-only views of a state for people and programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cotenant.forecasting.types import InterferencePredictor, Signature
from cotenant.placement import types as placement
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.explain import explain as fold
from cotenant.placement.explain import memory_text, would_help
from cotenant.scheduler.core import colocation, outgrown
from cotenant.scheduler.core.accounts import KINDS, Account, Kind, busy, fair_share, name_of, terms_of
from cotenant.scheduler.core.advice import more_help, outlook_of
from cotenant.scheduler.core.deadlines import Outlook, span, tell
from cotenant.scheduler.core.freezable import doubt
from cotenant.scheduler.core.growth import refused_growth
from cotenant.scheduler.core.interruptions import (
    ago,
    asked_for,
    freezable,
    frozen_view,
    interrupted,
    starts_over,
    stop_by,
    tell_frozen,
)
from cotenant.scheduler.core.model import Colocation, Gpu, Host, Job, JobState
from cotenant.scheduler.core.priority import in_words, ordered
from cotenant.scheduler.core.refusals import told_apart
from cotenant.scheduler.core.remedies import Remedies, remedies
from cotenant.scheduler.core.requests import described
from cotenant.scheduler.core.slowdowns import measured as measured_slowdown
from cotenant.scheduler.core.slowdowns import slowdown, tell_measured
from cotenant.scheduler.core.slowdowns import tell as tell_slowdown
from cotenant.scheduler.core.state import State
from cotenant.scheduler.views import (
    AccountView,
    ColocationView,
    Explanation,
    GpuView,
    HistoryView,
    HostView,
    JobView,
    ShareView,
    UsageView,
)

NO_HOST = "no GPU host is known yet"
SLOWER = 1.05  # times: less than this is no news of a job that has its GPUs to itself
MOST_NOTES = 8  # reasons why GPUs are not available that an explanation names


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
            cpus=host.cpus,
            cpus_reserved=_cpus_reserved(state, host),
            last_report_at=state.reported_at.get(host.host_id),
            claim="",
            note="",
        )
        for host in state.hosts.values()
    ]


def _cpus_reserved(state: State, host: Host) -> float:
    held = ((job.spec.hints.cpus, job) for job in state.on_host(host.host_id))
    return math.fsum(cpus * len(state.shares_on(job, host.host_id)) for cpus, job in held if cpus)


def accounts(state: State, now: float) -> list[AccountView]:
    """Return all tenants and queues that are named in the settings, have jobs or have used anything; by kind and name.

    Args:
        state: The state.
        now: Unix seconds.
    """
    return [view for kind in KINDS for view in _accounts_of(state, kind, now)]


def _accounts_of(state: State, kind: Kind, now: float) -> list[AccountView]:
    rules, known = state.settings.scheduling, state.accounts.by_kind[kind]
    named = rules.tenants if kind == "tenant" else rules.queues
    names = sorted({*named, *known})
    there = {name: known.get(name, Account()) for name in names}
    terms = {name: terms_of(rules, kind, name) for name in names}
    used = {name: account.used_at(now, rules.usage_half_life_s) for name, account in there.items()}
    counted = [name for name in names if busy(there[name]) or used[name] > 0.0]
    all_used, all_weight = sum(used.values()), sum(terms[name].weight for name in counted)
    factors = fair_share(known, {name: terms[name].weight for name in known}, now, rules.usage_half_life_s)
    return [
        AccountView(
            kind=kind,
            name=name,
            weight=terms[name].weight,
            most_gpus=terms[name].most_gpus,
            most_jobs=terms[name].most_jobs,
            held_gpus=there[name].held,
            running_jobs=there[name].jobs,
            waiting_jobs=there[name].waiting,
            used_gpu_s=used[name],
            used_fraction=used[name] / all_used if all_used > 0.0 else 0.0,
            entitled_fraction=terms[name].weight / all_weight if name in counted else 0.0,
            fair_share=factors.get(name, 1.0),
        )
        for name in names
    ]


def attached(state: State) -> list[str]:
    """Return the ids of the active jobs that a client must keep renewing, in order of submission."""
    active = state.in_order(state.pending | state.queued | state.suspended | state.leased)
    return [job.spec.job_id for job in active if job.spec.attached]


def location(state: State, job_id: str) -> list[tuple[str, int]]:
    """Return (host id, epoch) for every host that holds the job or held it last, then of its earlier runs, backwards.

    Raises:
        KeyError: No job with that id.
    """
    job = state.jobs[job_id]
    past = [(host_id, job.epoch - back) for back, host_id in enumerate(reversed(job.past_hosts), start=1)]
    return [(host_id, job.epoch) for host_id in job.hosts] + past


def predicted_throughput(job: Job, now: float) -> float | None:
    """Return the job's predicted normalised throughput, averaged over the time it ran; None when it never did."""
    spans = [((now if line.end is None else line.end) - line.start, line.predicted) for line in job.colocation_log]
    total_s = sum(seconds for seconds, _ in spans)
    return sum(seconds * predicted for seconds, predicted in spans) / total_s if total_s > 0.0 else None


# -- explanations ---------------------------------------------------------------------------------------------------


def explain(
    state: State,
    job_id: str,
    now: float,
    controls: str = "",
    *,
    predictor: InterferencePredictor | None = None,
    policy: PlacementPolicy | None = None,
) -> Explanation:
    """Say why a job is where it is and, when it waits or others slow it down too much, what would help.

    Args:
        state: The state.
        job_id: The job.
        now: Unix seconds.
        predictor: Says how its neighbours slow the job down; None = that is left out.
        controls: What holds the job's share and what cannot be held, in words (the shell knows).
        policy: Says where jobs could go; None = that is left out.

    Raises:
        KeyError: No job with that id.
    """
    job = state.jobs[job_id]
    details: list[str] = []
    cures = remedies(state, job, now, policy, predictor) if policy and predictor else Remedies()
    summary = f"{job.state}: {job.reason}"
    slower = slowdown(state, job, predictor) if predictor is not None else None
    if job.state is JobState.PENDING or (job.state is JobState.QUEUED and not state.hosts):
        summary = f"waits: {NO_HOST}"
    elif job.state is JobState.QUEUED:
        summary, details = _why_it_waits(state, job, now)
        details.extend(tell_frozen(state, job, now))
        details.extend(_closed(state, job, now))
    elif job.state is JobState.SUSPENDED:
        details = ["holds nothing of any GPU; 'cotenant resume' lets it go on", *tell_frozen(state, job, now)]
    elif job.lease is not None:
        details = [*_where_it_is(state, job), *(tell_slowdown(slower) if slower else ())]
        details += [
            *(tell_measured if has_neighbours(state, job) else _tell_alone)(state, job),
            *_estimated(state, job),
            *_unread(state, job),
            *cures.told,
        ]
        details += [*refused_growth(state, job), *asked_for(state, job, now)]
        details += [*freezable(state, job), *([f"control: {controls}"] if controls else [])]
    if not job.state.terminal:
        details.extend(interrupted(state, job, now))
        if job.lease is None and (why := doubt(state, job)):
            details.append(f"checkpoint: driver counts as none: {why}")
        details.extend(filter(None, [_deadline(outlook_of(state, job, now))]))
        details.extend(_accounts(state, job))
        details.extend(_where_numbers_come_from(state, job))
        details.extend(outgrown.tell(state, job))
    if job.state is JobState.FAILED and job.spec.kind == "command" and job.exit_code is not None:
        details.append(f"'cotenant logs {job_id}' shows what it printed")
    if job.state.terminal:
        details.extend(colocation.tell(job))
    details.extend(f"{ago(now - change.at)}  {change.state}: {change.reason}" for change in job.history)
    helps = would_help(job.fit_errors or told_apart(state, state.line.why(job_id)))
    if not job.state.terminal:
        helps.extend((*more_help(state, job, now, crowded=has_neighbours(state, job)), *cures.helps))
    return Explanation(
        job_id=job_id, state=job.state, summary=summary, details=details, would_help=helps, slowdown=slower
    )


def has_neighbours(state: State, job: Job) -> bool:
    """Return whether anybody else is on a GPU of the job, or was when it was last measured."""
    shares = job.lease.shares if job.lease else ()
    if any(each is not job for share in shares for each in state.residents(share.gpu_id)):
        return True
    return any(one.signature.neighbours for one in state.usage.get(job.spec.job_id, {}).values())


def _tell_alone(state: State, job: Job) -> list[str]:
    found = measured_slowdown(state, job)
    if found is None or found < SLOWER:
        return []
    return [
        f"no neighbour slows it, yet its steps take {found:.2f} times as long as when it was measured: its own share, "
        "another phase, or its host"
    ]


def _why_it_waits(state: State, job: Job, now: float) -> tuple[str, list[str]]:
    left_s = job.not_before - now
    if left_s > 0.0:
        return f"waits {left_s:.0f} s before the next try", [job.reason]
    standing = state.standing()
    queue = ordered((state.jobs[job_id] for job_id in state.queued), now, standing)
    place = next(i for i, other in enumerate(queue, start=1) if other.spec.job_id == job.spec.job_id)
    errors = state.line.why(job.spec.job_id)
    why = fold(told_apart(state, errors)) if errors else "it has not been looked at yet"
    details = [f"number {place} of {len(queue)} in the queue", f"has waited {max(0.0, now - job.queued_at):.0f} s"]
    details.append(in_words(job, now, standing))
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
    if job.spec.hints.cpus:
        details.append(f"{job.spec.hints.cpus:g} processors reserved for each GPU")
    why = [change.reason for change in job.history if change.state is JobState.STARTING]
    return [*details, f"placed at its start: {why[-1]}"] if why else details


def _estimated(state: State, job: Job) -> list[str]:
    """Say which of the job's readings the device said of itself only."""
    windows = [one.signature for one in state.usage.get(job.spec.job_id, {}).values()]
    flags = {
        "utilisation": any(window.util_estimated for window in windows),
        "memory": any(window.memory_estimated for window in windows),
    }
    estimates = [what for what, flag in flags.items() if flag]
    if not estimates:
        return []
    are = "are estimates" if len(estimates) > 1 else "is an estimate"
    return [f"{' and '.join(estimates)} {are}: the device says what it does as a whole, not by job"]


def _unread(state: State, job: Job) -> list[str]:
    """Say why hardly anybody can join a job that cannot be measured."""
    windows = [one.signature for one in state.usage.get(job.spec.job_id, {}).values()]
    profile = job.profile
    if not windows or profile is None or job.spec.hints.isolation == "hard":
        return []
    told = []
    if profile.source == "unknown" and all(window.util_mean is None for window in windows):
        told = ["utilisation cannot be read there: others join such a job only when it gives gpu_memory and compute"]
    hinted = job.spec.hints.gpu_memory is not None
    if profile.memory_bytes is None and not hinted and all(window.memory_bytes is None for window in windows):
        told += ["memory cannot be read there: what is reserved stays reserved, unless it gives gpu_memory"]
    return told


def _closed(state: State, job: Job, now: float) -> list[str]:
    """Say which GPUs do not take the job: those held for another that waited long, and those not available."""
    told: list[str] = []
    held = state.reservation
    if held is not None and held.job_id != job.spec.job_id:
        holder = state.jobs[held.job_id]
        when = "" if held.starts_by is None else f" and is to start in {span(max(0.0, held.starts_by - now))}"
        count = _count(len(held.gpu_ids))
        told.append(f"{count} held for job {held.job_id}, which has waited {span(now - holder.queued_at)}{when}")
    notes = Counter(view.note for view in map(state.view, state.gpus) if not view.schedulable)
    return told + [f"{_count(number)} not available: {note}" for note, number in notes.most_common(MOST_NOTES)]


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"


def _deadline(outlook: Outlook | None) -> str:
    """Say whether a job will make its deadline; nothing without one."""
    return "" if outlook is None else tell(outlook)


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


# -- records to views -----------------------------------------------------------------------------------------------


def _job_view(state: State, job: Job, controls: str) -> JobView:
    spec, usage, beside = job.spec, _usage_view(state, job, controls), has_neighbours(state, job)
    outlook = None if job.state.terminal else outlook_of(state, job, state.now)
    predicted = predicted_throughput(job, state.now) if job.state.terminal else job.predicted if beside else None
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
        shares=[share_view(state, share) for share in job.lease.shares] if job.lease else [],
        usage=usage,
        slowdown_predicted=1.0 / predicted if predicted else None,
        slowdown_measured=measured_slowdown(state, job) if beside else None,
        solo_step_rate=job.profile.solo_step_rate if job.profile else None,
        not_placeable=job.not_placeable,
        waits=_waits(state, job),
        starts_over=starts_over(state, job),
        stop_by=stop_by(state, job),
        frozen=frozen_view(state, job),
        unfreezable=job.unfreezable,
        no_freezing="" if job.state.terminal else doubt(state, job),
        deadline=_deadline(outlook),
        deadline_at_risk=outlook is not None and outlook.at_risk,
        history=[HistoryView(at=change.at, state=change.state, reason=change.reason) for change in job.history],
        colocations=[_colocation_view(line) for line in job.colocation_log],
    )


def _waits(state: State, job: Job) -> str:
    errors = state.line.why(job.spec.job_id) if job.state is JobState.QUEUED else ()
    return fold(told_apart(state, errors)) if errors else ""


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
        memory_bytes=_sum(windows, "memory_bytes"),
        step_rate=min(_known(windows, "step_rate"), default=None),
        throttled_fraction=max(_known(windows, "throttled_fraction"), default=None),
        measured_at=max(one.measured_at for one in usage),
        controls=controls,
        util_estimated=any(window.util_estimated for window in windows),
        memory_estimated=any(window.memory_estimated for window in windows),
    )


def _gpu_view(state: State, gpu: Gpu) -> GpuView:
    view, held = state.view(gpu.gpu_id), state.reservation
    windows = [
        state.usage[job.spec.job_id][gpu.gpu_id].signature
        for job in state.residents(gpu.gpu_id)
        if gpu.gpu_id in state.usage.get(job.spec.job_id, {})
    ]
    return GpuView(
        gpu_id=gpu.gpu_id,
        host_id=gpu.host_id,
        gpu_type=gpu.gpu_type,
        island=gpu.island,
        index=gpu.index,
        memory_bytes=gpu.memory_bytes,
        memory_reserved_bytes=sum(resident.share.memory_bytes for resident in view.residents),
        compute_granted=sum(resident.share.compute for resident in view.residents),
        util=_sum(windows, "util_mean"),
        memory_used_bytes=_sum(windows, "memory_bytes"),
        healthy=gpu.healthy,
        note=view.note,
        jobs=[resident.job_id for resident in view.residents],
        held_for=held.job_id if held is not None and gpu.gpu_id in held.gpu_ids else "",
    )


def share_view(state: State, share: placement.Share) -> ShareView:
    """Return one share with the host it lies on."""
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


def _sum(windows: Sequence[Signature], name: str) -> float | None:
    """The sum of the readings; None where one is missing: the rest would be taken for all of it."""
    readings = _known(windows, name)
    return sum(readings) if readings and len(readings) == len(windows) else None
