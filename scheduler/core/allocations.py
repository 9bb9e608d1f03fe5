"""The virtual GPU interface: what a job asks of its own lease while it runs, answered at once.

Amounts are per GPU of the job. Memory is reserved from what is free on its GPUs; compute is guaranteed from what the
other jobs there are not seen to need. Nobody else's share pays for it beyond that, and every answer is in the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cotenant.placement.explain import memory_text
from cotenant.placement.resize import memory_target
from cotenant.placement.shares import demand_of, floor_of, free_memory, round_down
from cotenant.placement.types import GpuView, Resident, Share
from cotenant.scheduler.core.accounts import KINDS, held_of, name_of, terms_of
from cotenant.scheduler.core.events import ResourcesAsked
from cotenant.scheduler.core.model import AnswerStatus, Job, JobState, Resource, ResourceAnswer
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import Turn

KEPT_ANSWERS = 16
NO_POWER = (
    "power belongs to whole GPUs, not to shares of them: an administrator limits it with enforcement.power_limit_w"
)
UNREAD = "what is in use cannot be read now"
RESTART = "its processes were capped when they started: more takes effect when it starts anew"


@dataclass(frozen=True, slots=True)
class Room:
    """What a job has of one resource on each of its GPUs, and what it could have.

    Attributes:
        share: What it has; of several GPUs the least.
        most: What that could grow to now.
        why: What stands in the way of more.
        guaranteed: What stays even when others want it.
        used: What it was last seen to use, the most of its GPUs; None = not measured.
        needed: The memory that it would be given again if it gave back more, the most of its GPUs; 0 = none.
        limit: What it has limited itself to; None = it has not.
    """

    share: float
    most: float
    why: str
    guaranteed: float
    used: float | None
    limit: float | None
    needed: int = 0


def room(state: State, job: Job, resource: Resource) -> Room | None:
    """Return what a job has and could have; None of power, and while it has no lease, or one of a GPU that is gone."""
    if job.lease is None or resource == "power":
        return None
    if any(share.gpu_id not in state.gpus for share in job.lease.shares):
        return None  # it is being stopped
    rooms = [room_on(state, job, share, resource) for share in job.lease.shares]
    tightest = min(rooms, key=lambda found: found.most - found.share)
    least = min(found.share for found in rooms)
    used = [found.used for found in rooms if found.used is not None]
    return replace(
        tightest,
        share=least,
        most=least + tightest.most - tightest.share,
        used=max(used) if used else None,
        needed=max(found.needed for found in rooms),
    )


def resources_asked(turn: Turn, event: ResourcesAsked) -> None:
    """Answer a job's request, once, and do what was granted."""
    state = turn.state
    job = state.jobs.get(event.job_id)
    if job is None or job.state.terminal:
        state.ignore("resources asked for a job that is not there")
        return
    if any(answer.request_id == event.request_id for answer in job.answers):
        state.ignore("resources asked again")
        return
    answer, changed = _decide(state, job, event)
    answer = replace(answer, at=turn.now)
    changed = replace(changed, answers=(*job.answers, answer)[-KEPT_ANSWERS:])
    shares = _new_shares(changed, event, answer)
    if shares and _over_quota(state, job, changed, shares):
        answer = replace(answer, status="refused", granted=0.0, reason=_over_quota(state, job, changed, shares))
        changed, shares = replace(job, answers=(*job.answers, answer)[-KEPT_ANSWERS:]), {}
    state.put(changed)
    if answer.status == "refused" or changed.lease is None:
        return
    if event.action == "release" and event.resource == "memory":
        _forget_peak(state, changed)
    turn.resize(changed, shares, f"the job's own {event.action}: {answer.reason}")
    turn.members_changed.update((share.gpu_id, None) for share in changed.lease.shares)


def _decide(state: State, job: Job, event: ResourcesAsked) -> tuple[ResourceAnswer, Job]:
    """Return the answer (its time still open) and the job as it is to be."""
    found = room(state, job, event.resource)
    refusal = _refusal(state, job, event)
    if refusal or found is None:
        return _answer(event, "refused", 0.0, refusal or NO_POWER), job
    if event.action == "limit":
        return _limit(job, event, found)
    return _request(job, event, found) if event.action == "request" else _release(job, event, found)


def _refusal(state: State, job: Job, event: ResourcesAsked) -> str:
    """Say why nothing can be done for the job at all; empty when something can."""
    if job.lease is None or job.epoch != event.epoch:
        return f"the lease of epoch {event.epoch} is not held any more"
    if job.state is JobState.STOPPING:
        return "the job is being stopped"
    if event.resource == "power":
        return NO_POWER
    if state.settings.placement.policy == "static":
        return "shares are slots of fixed size here (placement.policy: static)"
    return ""


def _request(job: Job, event: ResourcesAsked, found: Room) -> tuple[ResourceAnswer, Job]:
    assert event.amount is not None
    target = min(found.share + event.amount, found.most)
    if event.resource == "memory":
        granted: float = math.floor(target - found.share)
        wanted = replace(job.wanted, memory_bytes=int(found.share) + int(granted))
    else:
        target = round_down(target)
        granted = min(event.amount, target - found.share)
        wanted = replace(job.wanted, compute=target)
    if granted <= 0.0:
        return _answer(event, "refused", 0.0, found.why), job
    whole = granted >= event.amount - (0.0 if event.resource == "memory" else 1.0 / 4096)
    reason = "there is room for it" if whole else f"as much as there is room for: {found.why}"
    return _answer(event, "granted" if whole else "partly", granted, reason), replace(job, wanted=wanted)


def _release(job: Job, event: ResourcesAsked, found: Room) -> tuple[ResourceAnswer, Job]:
    assert event.amount is not None
    least: float
    if event.resource == "compute":
        least, held = 0.0, found.guaranteed
        why = "no compute is guaranteed to it: what it does not use goes to others by itself"
    else:
        least, held = found.needed, found.share
        in_use = UNREAD if found.used is None else f"{memory_text(found.used)} are in use"
        forecast = f"{memory_text(least)} with what is forecast and kept spare"
        why = f"{in_use}, {forecast}" if least else f"{in_use}; all that was reserved is given back"
    kept = max(held - event.amount, least)
    released = min(event.amount, held - kept)
    if released <= 0.0:
        return _answer(event, "refused", 0.0, why), job
    if event.resource == "compute":
        wanted = replace(job.wanted, compute=kept)
    else:
        released = math.floor(released)
        wanted = replace(job.wanted, memory_bytes=int(held) - int(released))
        job = replace(job, memory_hint_corrected=None)  # it knows better now than when it overran
    status: AnswerStatus = "granted" if released >= event.amount else "partly"
    reason = "given back" if status == "granted" else why if event.resource == "memory" else "all that was guaranteed"
    return _answer(event, status, released, reason), replace(job, wanted=wanted)


def _limit(job: Job, event: ResourcesAsked, found: Room) -> tuple[ResourceAnswer, Job]:
    amount = event.amount
    if event.resource == "compute":
        limits = replace(job.limits, compute=amount)
    elif amount is not None and found.used is not None and amount < found.used:
        why = f"{memory_text(found.used)} are in use, and only what is free can be taken"
        return _answer(event, "refused", 0.0, why), job
    else:
        limits = replace(job.limits, memory_bytes=None if amount is None else int(amount))
    reason = "there is no limit of its own any more" if amount is None else "the limit is set"
    return _answer(event, "granted", amount or 0.0, reason), replace(job, limits=limits)


def _answer(event: ResourcesAsked, status: AnswerStatus, granted: float, reason: str) -> ResourceAnswer:
    return ResourceAnswer(
        event.request_id, event.action, event.resource, event.amount, status=status, granted=granted, reason=reason
    )


def _new_shares(job: Job, event: ResourcesAsked, answer: ResourceAnswer) -> dict[str, Share]:
    """Return the shares whose memory changes at once. Compute follows when the GPUs are divided anew."""
    if answer.status == "refused" or event.resource != "memory" or job.lease is None:
        return {}
    changed = {}
    for share in job.lease.shares:
        size = share.memory_bytes
        if event.action == "request":
            size += int(answer.granted)
        elif event.action == "release":
            size -= int(answer.granted)
        elif event.amount is not None:
            size = min(size, int(event.amount))
        changed[share.gpu_id] = replace(share, memory_bytes=max(0, size))
    return changed


def _forget_peak(state: State, job: Job) -> None:
    """Have the memory it once used count for nothing, which would be reserved for it again.

    It is all that is known where nothing is read now.
    """
    for share in job.lease.shares if job.lease else ():
        memory = state.resize_memory.get(share.gpu_id)
        usage = state.usage.get(job.spec.job_id, {}).get(share.gpu_id)
        if memory is not None and usage is not None and usage.signature.memory_peak_bytes is not None:
            peaks = {job_id: peak for job_id, peak in memory.memory_peak.items() if job_id != job.spec.job_id}
            state.resize_memory[share.gpu_id] = replace(memory, memory_peak=peaks)


def _over_quota(state: State, job: Job, changed: Job, shares: dict[str, Share]) -> str:
    """Say which quota of the job's tenant or queue the change would exceed; empty when it exceeds none."""
    if changed.lease is None:
        return ""
    lease = replace(changed.lease, shares=tuple(shares.get(share.gpu_id, share) for share in changed.lease.shares))
    more = held_of(replace(changed, lease=lease), state.gpus) - held_of(job, state.gpus)
    if more <= 0.0:
        return ""
    for kind in KINDS:
        name = name_of(job.spec.hints, kind)
        most, account = (
            terms_of(state.settings.scheduling, kind, name).most_gpus,
            state.accounts.by_kind[kind].get(name),
        )
        if most is not None and account is not None and account.held + more > most:
            return f"{kind} {name} holds {account.held:.2f} of {most:g} GPUs, and this would be {more:.2f} more"
    return ""


def room_on(state: State, job: Job, share: Share, resource: Resource) -> Room:
    """Return what a job has and could have of memory or compute on one of its GPUs."""
    view = state.view(share.gpu_id)
    usage = state.usage.get(job.spec.job_id, {}).get(share.gpu_id)
    bounds = list(_held_back(state, job, share, resource))
    if resource == "memory":
        free = free_memory(view)
        bounds.append((share.memory_bytes + free, f"{memory_text(free)} are free on {share.gpu_id}"))
        most, why = min(bounds)
        used = usage.signature.memory_peak_bytes if usage else None
        guaranteed = float(min(share.memory_bytes, job.wanted.memory_bytes or 0))
        again = max(_needed_memory(state, view, job) or 0, math.ceil(used or 0.0))  # starting up, it has no need yet
        best, limit = max(most, share.memory_bytes), job.limits.memory_bytes
        return Room(share.memory_bytes, best, why, guaranteed, used, limit, again)
    needed = math.fsum(_needed(state, view, other) for other in view.residents if other.job_id != job.spec.job_id)
    others = f"the other jobs on {share.gpu_id} need {needed:.2f} of it" if needed else f"{share.gpu_id} has no more"
    bounds.append((1.0 - needed, others))
    most, why = min(bounds)
    used = usage.signature.util_mean if usage else None
    return Room(share.compute, max(most, share.compute), why, job.guarantee or 0.0, used, job.limits.compute)


def _needed_memory(state: State, view: GpuView, job: Job) -> int | None:
    """Return what usage-based resizing would reserve for it, had it never used more than now: it knows best.

    Where nothing is read now, what was read before counts.
    """
    usage = state.usage.get(job.spec.job_id, {}).get(view.gpu_id)
    if usage is None:
        return None
    resident = next(resident for resident in view.residents if resident.job_id == job.spec.job_id)
    alone = replace(resident, least_memory=0, most_memory=None)
    margin = state.settings.placement.memory_margin
    before, peak = state.resize_memory.get(view.gpu_id), usage.signature.memory_peak_bytes
    if peak is None and before is not None:
        peak = before.memory_peak.get(job.spec.job_id)
    return memory_target(alone, usage.signal, peak, margin)


def _needed(state: State, view: GpuView, other: Resident) -> float:
    """Return the compute of a GPU that a neighbour is planned with."""
    memory = state.resize_memory.get(view.gpu_id)
    held = memory.held.get(other.job_id) if memory else None
    demand = held.demand if held else demand_of(other.profile.util_p95, other.min_compute, 0.0)
    return max(floor_of(other.min_compute), min(demand, other.share.compute))


def _held_back(state: State, job: Job, share: Share, resource: Resource) -> Iterable[tuple[float, str]]:
    """Yield what holds the job back that is not on the GPU itself, as (most, why)."""
    memory = resource == "memory"
    limit = job.limits.memory_bytes if memory else job.limits.compute
    ceiling = job.ceiling.memory_bytes if memory else job.ceiling.compute
    if limit is not None:
        yield limit, "it has limited itself (set_resource_limits)"
    if ceiling is not None:
        yield ceiling, RESTART
    reserved = state.reservation
    if reserved is not None and share.gpu_id in reserved.gpu_ids and reserved.job_id != job.spec.job_id:
        yield share.memory_bytes if memory else share.compute, f"{share.gpu_id} is kept for a job that waited long"
