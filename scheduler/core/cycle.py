"""One scheduling cycle, as numbered steps over an immutable snapshot.

1. take the snapshot; 2. order the queue; 3. propose a place for each waiting job through reversible statements;
4. check the invariants of what was proposed; 5. commit; 6. emit commands and explanations (the turn collects the
commands; explanations are the jobs' fit errors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.forecasting.types import DemandProfile, InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.explain import explain
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement
from cotenant.scheduler.core.invariants import check_view
from cotenant.scheduler.core.model import Hints, Job, JobState
from cotenant.scheduler.core.priority import ordered
from cotenant.scheduler.core.state import Snapshot, State
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn
from cotenant.scheduler.core.waiting import fits_idle, has_waited_long, held_for, idle_gpus

_Ask = tuple[Hints, int | None, DemandProfile | None, str, str | None]


@dataclass(slots=True)
class Plan:
    """What a cycle wants to do.

    Attributes:
        placed: Placements in the order in which they were found, each resting on those before it.
        refused: Why each other waiting job has to wait.
        gpus: The GPUs as they will be.
        held: GPUs kept free of newcomers for a job that has waited too long, with the reason.
    """

    placed: list[Placement] = field(default_factory=list)
    refused: dict[str, NoFit] = field(default_factory=dict)
    gpus: tuple[GpuView, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)


def run_cycle(turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
    """Place what can be placed now and note why the rest waits."""
    state = turn.state
    state.cycle += 1
    # 1. snapshot
    snapshot = state.snapshot()
    if not snapshot.hosts_known:
        state.refused = {}
        return
    # 2. order the queue
    queue = ordered(snapshot.waiting, snapshot.now)
    # 3. propose
    plan = propose(state, snapshot, queue, policy, predictor)
    # 4. check
    touched = {share.gpu_id for placement in plan.placed for share in placement.shares}
    for view in plan.gpus:
        if view.gpu_id in touched:
            check_view(view)
    # 5. commit and 6. emit
    for placement in plan.placed:
        _commit(turn, placement)
    _explain(turn, plan)
    _count_overlooked(state, queue, plan)


def propose(
    state: State,
    snapshot: Snapshot,
    queue: Sequence[Job],
    policy: PlacementPolicy,
    predictor: InterferencePredictor,
) -> Plan:
    """Find places for the jobs in queue order, without changing anything.

    Jobs that ask for the same thing get the same refusal: within one cycle GPUs only fill up, so what did not fit
    before does not fit later.
    """
    settings = snapshot.settings.placement
    statement = Statement(snapshot.gpus)
    views: Sequence[GpuView] = snapshot.gpus
    waiting_gpus = sum(job.spec.hints.gpus for job in queue)
    refusals: dict[_Ask, NoFit] = {}
    plan = Plan()
    for job in queue:
        # Unmeasured, a job is what its hints say; measured, its program counts too: its pairs may have been.
        measured = state.measured_profile(job)
        program = job.spec.fingerprint if measured else ""
        ask = (job.spec.hints, job.memory_hint_corrected, measured or job.profile, program, job.spec.pinned_host)
        refusal = refusals.get(ask)
        if refusal is None:
            request = state.request_of(job)
            answer = policy.place(request, on_allowed_host(job, views), predictor, settings, waiting_gpus)
            if isinstance(answer, Placement):
                statement.place(request, answer)
                views = _without(statement.view(), plan.held)
                plan.placed.append(answer)
                waiting_gpus -= request.gpus
                continue
            refusal = refusals[ask] = answer
        plan.refused[job.spec.job_id] = refusal
        if not plan.held and not refusal.never and has_waited_long(job, snapshot.now):
            allowed = on_allowed_host(job, views)
            plan.held = held_for(job, state.request_of(job), allowed, settings.memory_margin, snapshot.now)
            views = _without(views, plan.held)
    plan.gpus = statement.view()
    return plan


def on_allowed_host(job: Job, views: Sequence[GpuView]) -> Sequence[GpuView]:
    """Return the GPUs of the hosts on which the job may run."""
    pinned = job.spec.pinned_host
    return views if pinned is None else [view for view in views if view.host_id == pinned]


def _without(views: Sequence[GpuView], held: Mapping[str, str]) -> Sequence[GpuView]:
    """Return the views with the held GPUs closed to newcomers."""
    if not held:
        return views
    return [replace(v, schedulable=False, note=held[v.gpu_id]) if v.gpu_id in held else v for v in views]


def _commit(turn: Turn, placement: Placement) -> None:
    for neighbour_id, share in placement.squeezed:
        neighbour = turn.state.jobs[neighbour_id]
        turn.resize(neighbour, {share.gpu_id: share}, f"makes room for job {placement.job_id}")
    turn.grant(turn.state.jobs[placement.job_id], placement.shares, placement.reason)


def _explain(turn: Turn, plan: Plan) -> None:
    """Note why each refused job waits; end those that no device of this cluster could ever take."""
    state = turn.state
    state.refused = {job_id: refusal.errors for job_id, refusal in plan.refused.items()}
    for job_id, refusal in plan.refused.items():
        job = state.jobs[job_id]
        if refusal.never and _could_never_run(job):
            reason = f"no device of this cluster could ever take it: {explain(refusal.errors)}"
            ended = advance(job, JobState.FAILED, turn.now, reason)
            examples = tuple({error.kind: error for error in reversed(refusal.errors)}.values())
            state.put(replace(ended, fit_errors=examples, not_placeable=True))


def _could_never_run(job: Job) -> bool:
    """A job that ran before waits for the host that took it to come back, unless it has outgrown that since."""
    return job.epoch == 0 or job.overruns > 0


def _count_overlooked(state: State, queue: Sequence[Job], plan: Plan) -> None:
    """Count for how many cycles each job has waited although an idle GPU fits it (see invariants)."""
    if state.settings.placement.policy == "static":  # an idle GPU is not a whole place there
        state.overlooked = {}
        return
    idle = idle_gpus(plan.gpus, plan.held)
    margin = state.settings.placement.memory_margin
    counts: dict[str, int] = {}
    for job in queue if idle else ():
        job_id = job.spec.job_id
        if job_id in state.queued and fits_idle(state.request_of(job), on_allowed_host(job, idle), margin):
            counts[job_id] = state.overlooked.get(job_id, 0) + 1
    state.overlooked = counts
