"""One scheduling cycle, as numbered steps.

1. take the GPUs as they are; 2. order the queue; 3. propose a place for each waiting job through reversible statements;
4. check the invariants of what was proposed; 5. commit; 6. emit commands and explanations (the turn collects the
commands; explanations are what the asks of the waiting jobs were told).

Steps 2 and 3 look at what may have changed since the last cycle only (see ``walk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.fleet import Fleet, Part
from cotenant.placement.types import FitError, NoFit, Placement
from cotenant.scheduler.core.freezable import places_of
from cotenant.scheduler.core.invariants import check_processors, check_view
from cotenant.scheduler.core.line import Ask
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.proposal import Plan, Proposal
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn
from cotenant.scheduler.core.unmet import hopeless, lasting
from cotenant.scheduler.core.waiting import fits_idle
from cotenant.scheduler.core.walk import walk

_NO_DEVICE = "no device of this cluster could ever take it"


def run_cycle(turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
    """Place what can be placed now and note why the rest waits."""
    state = turn.state
    state.cycle += 1
    if not state.hosts:
        state.line.forget()
        return
    if not len(state.line):
        state.floor.changed = set(state.moves.claimed()) & state.gpus.keys()
        state.reservation, state.overlooked = None, {}
        return
    # 1. the GPUs as they are
    proposal = Proposal(state, policy, predictor, state.waiting_gpus())
    # 2. order the queue and 3. propose
    hopeless = walk(proposal)
    # 4. check
    for view in proposal.plan.gpus:
        check_view(view)
    counted = (each for each in proposal.plan.placed if state.jobs[each.job_id].spec.hints.cpus)
    check_processors(proposal.fleet, [share.gpu_id for placement in counted for share in placement.shares])
    overlooked, held_up = _overlooked(state, proposal), _hopeless_anyway(turn, proposal)
    proposal.take_back()
    # 5. commit and 6. emit
    for placement in proposal.plan.placed:
        _commit(turn, placement)
    state.reservation = proposal.plan.held.reservation
    for ask in hopeless:
        _give_up(turn, ask)
    for job, refusal in held_up:
        _fail(turn, job, lasting(refusal), _NO_DEVICE)
    state.overlooked = {job_id: count for job_id, count in overlooked.items() if job_id in state.queued}


def propose(state: State, queue: Sequence[Job], policy: PlacementPolicy, predictor: InterferencePredictor) -> Plan:
    """Find places for the jobs in this order, without changing anything, and say why each other one has to wait.

    Jobs that GPUs are kept or held for come first. Jobs that ask for the same thing get the same refusal: within one
    cycle GPUs and quotas only fill up, so what did not fit before does not fit later.
    """
    proposal = Proposal(state, policy, predictor, sum(job.spec.hints.gpus for job in queue))
    holder = state.reservation.job_id if state.reservation else None
    try:
        rest = [job for job in queue if not proposal.offer_claimed(job)]
        for job in sorted(rest, key=lambda job: job.spec.job_id != holder):
            proposal.offer(job)
        proposal.exchange([job for job in queue if job.spec.job_id in proposal.plan.refused], queue)
        return proposal.plan
    finally:
        proposal.take_back()


def _commit(turn: Turn, placement: Placement) -> None:
    for neighbour_id, share in placement.squeezed:
        neighbour = turn.state.jobs[neighbour_id]
        turn.resize(neighbour, {share.gpu_id: share}, f"makes room for job {placement.job_id}")
    turn.grant(turn.state.jobs[placement.job_id], placement.shares, placement.reason)


def _give_up(turn: Turn, ask: Ask) -> None:
    """End the jobs with this ask, which no device of this cluster could ever take."""
    state, refusal = turn.state, ask.refusal
    if refusal is None:
        return
    what, errors = "the quota does not allow it" if ask.over_quota else _NO_DEVICE, lasting(refusal)
    for job in state.in_order(ask.jobs):
        if _could_never_run(job, ask, errors, turn.now):
            _fail(turn, job, errors, what)


def _fail(turn: Turn, job: Job, errors: Sequence[FitError], what: str) -> None:
    why = f"{what}: {hopeless(job, errors, len(turn.state.gpus))}"
    examples = tuple({error.kind: error for error in reversed(errors)}.values())
    turn.state.put(replace(advance(job, JobState.FAILED, turn.now, why), fit_errors=examples, not_placeable=True))


def _hopeless_anyway(turn: Turn, proposal: Proposal) -> list[tuple[Job, NoFit]]:
    """Return the jobs that have just come and wait for their tenant's or queue's sake, but nothing could ever take.

    Once the limit lets them start they count as jobs that could have been taken before, and would wait for a host that
    never was.
    """
    line, known, found = turn.state.line, dict[int, NoFit | None](), list[tuple[Job, NoFit]]()
    for job in (turn.state.jobs[job_id] for job_id in turn.came if job_id in line):
        ask = line.ask_of(job.spec.job_id)
        if not ask.over_quota or (ask.refusal is not None and ask.refusal.never) or job.epoch > 0:
            continue
        if ask.number not in known:
            known[ask.number] = proposal.never(job)
        if (refusal := known[ask.number]) is not None:
            found.append((job, refusal))
    return found


def _could_never_run(job: Job, ask: Ask, errors: Sequence[FitError], now: float) -> bool:
    """Whether a job that nothing could take is to end.

    One that ran before, or has waited since the cluster could have taken it, waits for the lost host to come back,
    unless it is the job that has changed: it has outgrown what it had, or its program was measured to need more.
    """
    if job.frozen is not None:
        return False
    if job.epoch > 0:
        return job.overruns > 0
    judged_before = job.history[-1].at < now
    measured = job.spec.hints.gpu_memory is None and any(error.kind == "memory_never" for error in errors)
    return not judged_before or ask.over_quota or measured


def _overlooked(state: State, proposal: Proposal) -> dict[str, int]:
    """Count for how many cycles each job has waited although an idle GPU fits it (see invariants)."""
    fleet, counts = proposal.fleet, dict[str, int]()
    idle = np.flatnonzero((fleet.crowd == 0) & fleet.schedulable)
    if not len(idle) or state.settings.placement.policy == "static":  # an idle GPU is not a whole place there
        return counts
    largest = _largest_gang(fleet, idle)
    placed = {placement.job_id for placement in proposal.plan.placed}
    for ask in state.line.refusals():
        # Under a limit, an idle GPU may be one on which it would hold more than it may.
        if ask.limited or state.line.gpus_of(ask) > largest[ask.one_host]:
            continue
        waiting = [job_id for job_id in ask.jobs if job_id not in placed and state.jobs[job_id].not_before <= state.now]
        if waiting and _fits_idle(state, state.jobs[waiting[0]], fleet, idle):
            counts.update((job_id, state.overlooked.get(job_id, 0) + 1) for job_id in waiting)
    return counts


def _largest_gang(fleet: Fleet, idle: NDArray[np.int64]) -> dict[bool, int]:
    """Return how many of the idle GPUs a job could have at most, on one host or not."""
    return {True: int(np.bincount(fleet.host[idle]).max()), False: len(idle)}


def _fits_idle(state: State, job: Job, fleet: Fleet, idle: NDArray[np.int64]) -> bool:
    only = places_of(state, fleet, job)
    places = idle if only is None else np.intersect1d(idle, only)
    return fits_idle(state.request_of(job), Part(fleet, places), state.settings.placement.memory_margin)
