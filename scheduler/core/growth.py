"""Saying why a running job's shares do not grow to what it is seen to need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotenant.placement.explain import memory_text
from cotenant.placement.resize import MEMORY_SLACK, ResizeMemory, held_back, memory_target
from cotenant.placement.types import Share
from cotenant.scheduler.core.allocations import room_on
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.snapshot import Usage
from cotenant.scheduler.core.state import State


def refused_growth(state: State, job: Job) -> list[str]:
    """Return, per GPU, what the job would have now if nothing stood in the way, and what does."""
    told: list[str] = []
    for share in job.lease.shares if job.lease else ():
        usage = state.usage.get(job.spec.job_id, {}).get(share.gpu_id)
        if usage is not None and share.gpu_id in state.gpus:  # else its host has lost it, and the job is leaving
            told += [*_compute(state, job, share, usage), *_memory(state, job, share, usage)]
    return told


def _compute(state: State, job: Job, share: Share, usage: Usage) -> Iterator[str]:
    rules = state.settings.resize
    held = _remembered(state, share).held.get(job.spec.job_id)
    if held is None or not held_back(usage.signal, rules) or held.demand < share.compute + rules.min_change:
        return
    why = _fixed(state) or room_on(state, job, share, "compute").why
    often = usage.signal.throttled_fraction or 0.0
    yield (
        f"held back {often:.0%} of the time on {share.gpu_id}: "
        f"would use compute {held.demand:.2f}, has {share.compute:.2f}; {why}"
    )


def _memory(state: State, job: Job, share: Share, usage: Usage) -> Iterator[str]:
    residents = state.view(share.gpu_id).residents
    resident = next(each for each in residents if each.job_id == job.spec.job_id)
    peak = _remembered(state, share).memory_peak.get(job.spec.job_id)
    unlimited = replace(resident, most_memory=None)
    wanted = memory_target(unlimited, usage.signal, peak, state.settings.placement.memory_margin)
    if wanted is None or wanted <= share.memory_bytes * (1.0 + MEMORY_SLACK):
        return
    why = _fixed(state) or room_on(state, job, share, "memory").why
    yield f"needs {memory_text(wanted)} on {share.gpu_id}, has {memory_text(share.memory_bytes)}; {why}"


def _remembered(state: State, share: Share) -> ResizeMemory:
    return state.resize_memory.get(share.gpu_id, ResizeMemory())


def _fixed(state: State) -> str:
    if state.settings.placement.policy == "static":
        return "shares are slots of fixed size here (placement.policy: static)"
    return "" if state.settings.resize.enabled else "shares do not follow use (resize.enabled)"
