"""What must hold after every event. A violation is a bug in the core; the message tells the story that led to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from cotenant.placement.fleet import Fleet
from cotenant.placement.types import GpuView
from cotenant.scheduler.core.accounts import held_of, name_of, waits
from cotenant.scheduler.core.deadlines import attained_s, likely_left_s, running_outlook
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.priority import had_waited_s, held_urgency, held_value
from cotenant.scheduler.core.state import InvariantViolation, State
from cotenant.scheduler.core.transitions import HISTORY_LENGTH, TRANSITIONS, story

MAX_OVERLOOKED_CYCLES = 3
TOLERANCE = 1e-9

_LEASED = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})


def check(state: State) -> None:
    """Check every invariant.

    * Per GPU, the memory shares add up to at most its usable memory and the compute shares to at most 1.
    * A job holds a lease exactly while it is STARTING, RUNNING or STOPPING, with its own id and epoch: a suspended
      job holds nothing of any GPU.
    * GPUs are claimed only for jobs that wait or are being moved, each GPU for one of them.
    * A job is being frozen only while it is STOPPING, to go on later; a frozen one either waits, and holds nothing but
      its host's memory, or is about to go on there in its old epoch, at a newer revision.
    * A job has an ending exactly while it is STOPPING, and only a lease that is can be given back.
    * Its history is a path through the transition table that ends in its present state.
    * No job waits for more than ``MAX_OVERLOOKED_CYCLES`` cycles beside an idle GPU that fits it.
    * The indices, the GPUs that are kept, and what tenants and queues are counted to hold, say what the records say.

    That a terminal state never changes and that neither epochs nor, in an epoch, revisions ever go backwards is checked
    by ``State.put``.

    Raises:
        InvariantViolation: One of them does not hold.
    """
    for job in state.jobs.values():
        _check_job(job)
        _check_frozen(state, job)
    for gpu_id in state.gpus:
        view = state.view(gpu_id)
        if not all(state.jobs[r.job_id].state is JobState.STOPPING for r in view.residents):
            check_view(view)  # a GPU that shrank is over-full until the evicted jobs are gone
    for job_id, cycles in state.overlooked.items():
        if cycles > MAX_OVERLOOKED_CYCLES:
            raise _violation(state.jobs[job_id], f"has waited for {cycles} cycles beside an idle GPU that fits it")
    _check_claims(state)
    _check_indices(state)
    for gpu_id in state.gpus:
        if (kept := state.view(gpu_id)) != (anew := state.view_anew(gpu_id)):
            raise InvariantViolation(f"GPU {gpu_id} is kept as {kept}, the records say {anew}")


def _check_claims(state: State) -> None:
    sets = {frozenset(claim.gpu_ids) for claim in state.moves.claims.values()}  # of two that come together: the same
    claimed = [gpu_id for each in sets for gpu_id in each]
    if len(set(claimed)) != len(claimed):
        raise InvariantViolation(f"GPUs are claimed twice: {state.moves.claims}")
    for job_id in state.moves.claims:
        job = state.jobs[job_id]
        if job.state not in (JobState.QUEUED, JobState.STOPPING):
            raise _violation(job, "claims GPUs although it neither waits nor is being moved")


def check_view(view: GpuView) -> None:
    """Check the shares on one GPU.

    Raises:
        InvariantViolation: More is promised than there is, or a share is empty.
    """
    shares = [resident.share for resident in view.residents]
    owners = [resident.job_id for resident in view.residents]
    listed = "\n".join(
        f"  {owner}: {share.memory_bytes} bytes, {share.compute} compute"
        for owner, share in zip(owners, shares, strict=True)
    )
    memory = sum(share.memory_bytes for share in shares)
    compute = math.fsum(share.compute for share in shares)
    if memory > view.memory_bytes:
        raise InvariantViolation(f"GPU {view.gpu_id}: {memory} bytes promised of {view.memory_bytes}:\n{listed}")
    if compute > 1.0 + TOLERANCE:
        raise InvariantViolation(f"GPU {view.gpu_id}: compute shares add up to {compute}:\n{listed}")
    if any(not 0.0 < share.compute <= 1.0 or share.memory_bytes < 0 for share in shares):
        raise InvariantViolation(f"GPU {view.gpu_id}: a share is outside (0, 1] or of negative size:\n{listed}")
    if len(set(owners)) != len(owners):
        raise InvariantViolation(f"GPU {view.gpu_id}: a job holds two shares of it:\n{listed}")


def check_processors(fleet: Fleet, gpu_ids: Iterable[str]) -> None:
    """Check the hosts of these GPUs, which were given to jobs that take processors.

    A host that has fewer processors than before may be over-full, but is given to nobody else then.

    Raises:
        InvariantViolation: The jobs of a host take more processors than it has.
    """
    places = np.array([fleet.position(gpu_id) for gpu_id in gpu_ids], dtype=np.int64)
    for host in np.unique(fleet.host[places]).tolist():
        left = int(fleet.spare()[host] + fleet.kept[host])
        if left < 0:
            name = fleet.views[int(fleet.on_hosts(np.array([host]))[0])].host_id
            raise InvariantViolation(f"host {name}: its jobs take {-left / 1000.0:g} processors more than it has")


def _check_job(job: Job) -> None:
    leased = job.state in _LEASED
    if (job.lease is not None) != leased:
        raise _violation(job, f"is {job.state} and {'holds a' if job.lease else 'has no'} lease")
    if job.lease is not None and (job.lease.job_id, job.lease.epoch) != (job.spec.job_id, job.epoch):
        raise _violation(job, f"at epoch {job.epoch} holds the lease of {job.lease.job_id!r} at {job.lease.epoch}")
    if (job.ending is not None) != (job.state is JobState.STOPPING):
        raise _violation(job, f"is {job.state} and its ending is {job.ending}")
    if job.given_back and (job.state is not JobState.STOPPING or job.spec.kind != "lease"):
        raise _violation(job, "is given back although it is no lease that is being taken away")
    if job.state is JobState.RUNNING and not job.started_hosts.issuperset(job.hosts):
        raise _violation(job, f"is running although only {sorted(job.started_hosts)} of {job.hosts} started")
    states = [change.state for change in job.history]
    if not states or states[-1] is not job.state or len(states) > HISTORY_LENGTH:
        raise _violation(job, f"is {job.state} with a history of {len(states)} changes that does not end there")
    for before, after in pairwise(states):
        if after not in TRANSITIONS[before]:
            raise _violation(job, f"went from {before} to {after}")


def _check_frozen(state: State, job: Job) -> None:
    goes_on = job.ending is not None and not job.ending.state.terminal and job.ending.interruption is not None
    if job.freezing and not goes_on:
        raise _violation(job, f"is {job.state} and being frozen, and its ending is {job.ending}")
    if job.freezes and (job.lease is None or len(job.hosts) != 1):
        raise _violation(job, f"could be frozen with {job.lease} on {job.hosts}")
    frozen = job.frozen
    if frozen is None:
        return
    if frozen.host_id not in state.hosts:
        raise _violation(job, f"is frozen on host {frozen.host_id}, which is not there")
    if job.lease is None and job.state not in (JobState.QUEUED, JobState.SUSPENDED):
        raise _violation(job, f"is {job.state} and frozen")
    if job.lease is not None and (
        job.state not in (JobState.STARTING, JobState.STOPPING)
        or job.hosts != (frozen.host_id,)
        or job.lease.revision <= frozen.revision
    ):
        raise _violation(job, f"is {job.state} with {job.lease}, and frozen with {frozen}")


def _undated(job: Job) -> Job:
    return replace(job, spec=replace(job.spec, hints=replace(job.spec.hints, deadline_s=None)))


def _check_savers(state: State) -> None:
    """The arrays say what the records do, to the last bit."""
    savers, now, standing = state.savers, state.now, state.standing()
    rows = savers.running()
    jobs = [state.jobs[job_id] for job_id in savers.ids(rows)]
    done = [attained_s(job, state.progress.get(job.spec.job_id), now) for job in jobs]
    want = {
        "order": [job.seq for job in state.in_order(savers) if job.state is JobState.RUNNING],
        "done": done,
        "left": [likely_left_s(job.spec.hints, each) for job, each in zip(jobs, done, strict=True)],
        "waited": [had_waited_s(job) for job in jobs],
        "value": [held_value(_undated(job), state.progress.get(job.spec.job_id), now, standing) for job in jobs],
    }
    have = {
        "order": savers.seqs(rows),
        "done": savers.attained_s(rows, now),
        "left": savers.left_s(rows, now),
        "waited": savers.waited_s(rows),
        "value": savers.values(rows, now, standing),
    }
    for name, values in want.items():
        if have[name].tolist() != values:
            raise InvariantViolation(f"savers: {name!r} is {have[name].tolist()}, the jobs say {values}")


def _check_dated(state: State) -> None:
    """The arrays say of the same jobs that their deadlines weigh otherwise now as the records do."""
    rules, want = state.settings.scheduling, list[str]()
    for job in state.in_order(state.dated):
        outlook = running_outlook(job, state.progress.get(job.spec.job_id), state.now)
        changed = outlook is not None and outlook.at_risk != job.at_risk
        if outlook and (changed or held_urgency(job.urgency, outlook, rules, risk_changed=changed) != job.urgency):
            want.append(job.spec.job_id)
    if (have := state.dated.stirred(state.now, rules)) != want:
        raise InvariantViolation(f"dated: {have} are stirred, the jobs say {want}")


def _check_indices(state: State) -> None:
    jobs = state.jobs.values()
    _check_accounts(state)
    want = {
        "queued": {job.spec.job_id for job in jobs if job.state is JobState.QUEUED},
        "pending": {job.spec.job_id for job in jobs if job.state is JobState.PENDING},
        "suspended": {job.spec.job_id for job in jobs if job.state is JobState.SUSPENDED},
        "savers": {job.spec.job_id for job in jobs if job.lease is not None and job.saves},
        "leased": {job.spec.job_id for job in jobs if job.lease is not None},
        "delayed": {job.spec.job_id for job in jobs if job.state is JobState.QUEUED and job.not_before > 0.0},
        "freezing": {job.spec.job_id for job in jobs if job.freezing},
        "frozen": {job.spec.job_id for job in jobs if job.frozen is not None},
        "starting": {job.spec.job_id for job in jobs if job.state is JobState.STARTING},
        "dated": {job.spec.job_id for job in jobs if job.lease is not None and job.spec.hints.deadline_s is not None},
    }
    have = {name: set(getattr(state, name)) for name in want}
    _check_line(state, want["queued"])
    for name, ids in want.items():
        if have[name] != ids:
            raise InvariantViolation(f"index {name!r} is off by {sorted(have[name] ^ ids)}")
    _check_savers(state)
    _check_dated(state)
    on_gpu: dict[str, set[str]] = {}
    for job in jobs:
        for share in job.lease.shares if job.lease else ():
            on_gpu.setdefault(share.gpu_id, set()).add(job.spec.job_id)
    if {gpu_id: ids for gpu_id, ids in state.on_gpu.items() if ids} != on_gpu:
        raise InvariantViolation(f"index 'on_gpu' says {state.on_gpu}, the leases say {on_gpu}")


def _check_line(state: State, queued: set[str]) -> None:
    line = state.line
    if len(line) != len(queued) or any(job_id not in line for job_id in queued):
        raise InvariantViolation(f"the line of waiting jobs has {len(line)}, of {len(queued)} queued")
    for job_id in queued:
        job, row = state.jobs[job_id], line.row(job_id)
        if line.job_id(row) != job_id or line.ask_of(job_id).key != state.key_of(job):
            raise InvariantViolation(f"the line is off for job {job_id!r}")


def _check_accounts(state: State) -> None:
    for kind, accounts in state.accounts.by_kind.items():
        counts: dict[str, tuple[float, int, int]] = {}
        for job in state.jobs.values():
            if job.lease is not None or waits(job):
                name = name_of(job.spec.hints, kind)
                held, jobs, waiting = counts.get(name, (0.0, 0, 0))
                leased = job.lease is not None
                counts[name] = (held + held_of(job, state.gpus), jobs + leased, waiting + (not leased))
        for name, account in accounts.items():
            want = counts.pop(name, (0.0, 0, 0))
            if (account.held, account.jobs, account.waiting) != want:
                raise InvariantViolation(f"{kind} {name} is counted as {account}, its jobs say {want}")
        if counts:
            raise InvariantViolation(f"no account of {kind} {sorted(counts)}")


def _violation(job: Job, what: str) -> InvariantViolation:
    return InvariantViolation(f"job {job.spec.job_id!r} {what}. Its history:\n{story(job)}")


__all__ = ["InvariantViolation", "check", "check_processors", "check_view"]
