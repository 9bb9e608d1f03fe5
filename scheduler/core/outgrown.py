"""What programs were found to need once a run had too little memory: later runs of them start with it.

A run that ran out of memory, or outgrew a GPU that had no room, is tried once more with more. What it got then is kept
by program and is the least that later runs reserve, those that wait included, whatever their hint says. It is learnt
once: no failure of a run that already started with it raises it further, so a program that takes whatever it gets
does not get more each time. Only a hint above it, which somebody gave since then, may turn out too small as well; and
what is measured of a program counts beside it as ever.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cotenant.placement.explain import memory_text
from cotenant.scheduler.core.model import Job, Outgrown
from cotenant.scheduler.core.state import KEPT_FINGERPRINTS, State


def learn(state: State, job: Job, had_bytes: int, wanted_bytes: int) -> None:
    """Note that a run had too little, and what is right instead; runs of its program that wait get it too."""
    program, hint = job.spec.fingerprint, job.spec.hints.gpu_memory or 0
    known = state.outgrown.pop(program, None)
    if known is None or hint > known.memory_bytes:
        known = Outgrown(job.spec.job_id, had_bytes, wanted_bytes)
    state.outgrown[program] = known  # the last one that was seen
    if len(state.outgrown) > KEPT_FINGERPRINTS:
        del state.outgrown[next(iter(state.outgrown))]
    for waiting in state.in_order(state.line.of_program(program)):
        state.put(start_with(state, waiting))


def start_with(state: State, job: Job) -> Job:
    """Return the job with what its program was found to need, where neither its hint nor what was measured is more."""
    known = state.outgrown.get(job.spec.fingerprint)
    if known is None:
        return job
    largest = max((gpu.memory_bytes for gpu in state.gpus.values()), default=known.memory_bytes)
    needed = min(known.memory_bytes, largest)
    if needed <= max(known.had_bytes, _planned(state, job)):
        return job  # also where no GPU has more than it had: then it fails in its own words
    return replace(job, memory_hint_corrected=needed)


def _planned(state: State, job: Job) -> float:
    """Return the bytes reserved for the job by its own overrun, its hint or its forecast; inf = a whole GPU."""
    if job.memory_hint_corrected is not None:
        return job.memory_hint_corrected
    if job.spec.hints.gpu_memory is not None:
        return job.spec.hints.gpu_memory
    peak = state.profile_of(job).memory_bytes
    return math.inf if peak is None else math.ceil(peak * (1.0 + state.settings.placement.memory_margin))


def tell(state: State, job: Job) -> list[str]:
    """Say when a job reserves more than its hint or its forecast because it, or an earlier run, had too little."""
    known = state.outgrown.get(job.spec.fingerprint)
    if known is None or job.memory_hint_corrected is None:
        return []
    hint = job.spec.hints.gpu_memory
    instead = "" if hint is None else f" instead of the {memory_text(hint)} of its hint"
    whose = "it" if known.job_id == job.spec.job_id else f"an earlier run of its program, job {known.job_id},"
    reserved, had = memory_text(job.memory_hint_corrected), memory_text(known.had_bytes)
    return [f"{reserved} of memory reserved per GPU{instead}: {whose} had too little with {had}"]
