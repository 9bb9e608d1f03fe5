"""What programs were found to need once a run had too little memory: later runs of them start with it.

A run that ran out of memory, or outgrew a GPU that had no room, is tried once more with more. What it got then is the
least that later runs of the program reserve, those that wait included. Runs are of one program when they have the same
fingerprint, tenant and working directory: nobody's jobs reserve more because of what a stranger's did. Leases without a
name are of no program.

It is learnt once: no failure of a run that already started with it raises it further, so a program that takes whatever
it gets does not get more each time. It counts for runs with the hint that proved too small, and for those without one:
whoever gives another hint has changed his mind since, and that one counts, until it proves too small as well. What is
measured of a program counts beside it as ever. A run that ends well and never used what had been too little, although
it was given more, has it forgotten.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cotenant.forecasting.types import Signature
from cotenant.placement.explain import memory_text
from cotenant.scheduler.core.model import Job, Outgrown
from cotenant.scheduler.core.state import KEPT_FINGERPRINTS, State
from cotenant.scheduler.fingerprint import NAMELESS


def program_of(job: Job) -> str | None:
    """Return the key that what is learnt is kept by; None when the job is of no program."""
    spec = job.spec
    return None if spec.fingerprint == NAMELESS else "\n".join((spec.hints.tenant, spec.fingerprint, spec.cwd))


def learn(state: State, job: Job, had_bytes: int, wanted_bytes: int) -> None:
    """Note that a run had too little, and what is right instead; runs of its program that wait get it too."""
    program, known = program_of(job), _known(state, job)
    if program is None:
        return
    state.outgrown.pop(program, None)  # the last one that was seen comes last
    hint = job.spec.hints.gpu_memory
    state.outgrown[program] = known or Outgrown(job.spec.job_id, had_bytes, wanted_bytes, hint)
    if len(state.outgrown) > KEPT_FINGERPRINTS:
        del state.outgrown[next(iter(state.outgrown))]
    for waiting in _waiting(state, job):
        state.put(start_with(state, waiting))


def note_use(state: State, job: Job, signature: Signature) -> Job:
    """Return the job with the most memory that it was measured at on a GPU, where something was learnt that counts."""
    peak = signature.memory_peak_bytes
    if peak is None or peak <= (job.memory_used_bytes or 0) or _known(state, job) is None:
        return job
    job = replace(job, memory_used_bytes=math.ceil(peak))
    state.put(job)
    return job


def ended_well(state: State, job: Job) -> None:
    """Forget what was learnt when a run that started with it has not needed it; runs that wait do without it as well.

    A run that itself had too little before says nothing: what it used then may have been over between two readings.
    """
    known, used = _known(state, job), job.memory_used_bytes
    if known is None or job.overruns or used is None or used >= (job.spec.hints.gpu_memory or known.had_bytes):
        return
    state.outgrown.pop(program_of(job) or "")
    for waiting in _waiting(state, job):
        if waiting.epoch == 0:  # it has never run: it has learnt nothing itself
            state.put(replace(waiting, memory_hint_corrected=None))


def start_with(state: State, job: Job) -> Job:
    """Return the job with what its program was found to need, where neither its hint nor what was measured is more."""
    known = _known(state, job)
    if known is None:
        return job
    largest = max((gpu.memory_bytes for gpu in state.gpus.values()), default=known.memory_bytes)
    needed = min(known.memory_bytes, largest)
    if needed <= max(known.had_bytes, _planned(state, job)):
        return job  # also where no GPU has more than it had: then it fails in its own words
    return replace(job, memory_hint_corrected=needed)


def _known(state: State, job: Job) -> Outgrown | None:
    """Return what was learnt that counts for the job."""
    program, hint = program_of(job), job.spec.hints.gpu_memory
    known = None if program is None else state.outgrown.get(program)
    return known if known is not None and hint in (None, known.hint_bytes) else None


def _waiting(state: State, job: Job) -> list[Job]:
    """Return the runs of the job's program that wait, in order of submission."""
    program = program_of(job)
    return [each for each in state.in_order(state.line.of_program(job.spec.fingerprint)) if program_of(each) == program]


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
    known = _known(state, job)
    if known is None or job.memory_hint_corrected is None:
        return []
    hint = job.spec.hints.gpu_memory
    instead = "" if hint is None else f" instead of the {memory_text(hint)} of its hint"
    whose = "it" if known.job_id == job.spec.job_id else f"an earlier run of its program, job {known.job_id},"
    reserved, had = memory_text(job.memory_hint_corrected), memory_text(known.had_bytes)
    return [f"{reserved} of memory reserved per GPU{instead}: {whose} had too little with {had}"]
