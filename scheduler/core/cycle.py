"""One scheduling cycle, as numbered steps over an immutable snapshot.

1. take the snapshot; 2. order the queue; 3. propose a place for each waiting job through reversible statements;
4. check the invariants of what was proposed; 5. commit; 6. emit commands and explanations (the turn collects the
commands; explanations are the jobs' fit errors).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.batch import MOST_WAITING, rearrange
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.explain import explain
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement, Request
from cotenant.scheduler.core.invariants import check_view
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.priority import ordered
from cotenant.scheduler.core.quotas import QUOTA_KINDS, Quotas
from cotenant.scheduler.core.requests import ask_of
from cotenant.scheduler.core.snapshot import Snapshot
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.transitions import advance
from cotenant.scheduler.core.turn import Turn
from cotenant.scheduler.core.waiting import (
    NOTHING_HELD,
    Held,
    Wish,
    fits_idle,
    has_waited_long,
    hold,
    idle_gpus,
    renewed,
    reserve,
)

MOST_EXCHANGED = 64  # placements of one cycle; beyond, it is long enough as it is
_Ask = tuple[object, ...]


@dataclass(slots=True)
class Plan:
    """What a cycle wants to do.

    Attributes:
        placed: Placements in the order in which they were found, each resting on those before it.
        refused: Why each other waiting job has to wait.
        over_quota: Those of them whose tenant or queue may not start them.
        limited: Those of them to which any limit of a tenant or queue applies.
        gpus: The GPUs as they will be.
        held: GPUs kept for a job that has waited too long.
    """

    placed: list[Placement] = field(default_factory=list)
    refused: dict[str, NoFit] = field(default_factory=dict)
    over_quota: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)
    gpus: tuple[GpuView, ...] = ()
    held: Held = NOTHING_HELD


def run_cycle(turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
    """Place what can be placed now and note why the rest waits."""
    state = turn.state
    state.cycle += 1
    state.moves.expire(turn.now)
    # 1. snapshot
    snapshot = state.snapshot()
    if not snapshot.hosts_known:
        state.refused = {}
        return
    # 2. order the queue
    queue = ordered(snapshot.waiting, snapshot.now, state.standing())
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
    state.reservation = plan.held.reservation
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

    Jobs that GPUs are kept or held for come first. Jobs that ask for the same thing get the same refusal: within one
    cycle GPUs and quotas only fill up, so what did not fit before does not fit later.
    """
    proposal = _Proposal(state, snapshot, policy, predictor, sum(job.spec.hints.gpus for job in queue))
    rest = [job for job in queue if not proposal.offer_claimed(job)] if state.moves.claims else queue
    holder = state.reservation.job_id if state.reservation else None
    for job in (job for job in rest if job.spec.job_id == holder):
        proposal.offer(job)
    for job in rest:
        if job.spec.job_id != holder:
            proposal.offer(job)
    proposal.exchange(queue)
    proposal.plan.gpus = proposal.statement.view()
    return proposal.plan


class _Proposal:
    """A cycle's statement, and what has to be known to extend it by one job after another."""

    def __init__(
        self,
        state: State,
        snapshot: Snapshot,
        policy: PlacementPolicy,
        predictor: InterferencePredictor,
        waiting_gpus: int,
    ) -> None:
        self.plan = Plan()
        self.statement = Statement(snapshot.gpus)
        self._state, self._snapshot, self._policy, self._predictor = state, snapshot, policy, predictor
        self._packing = snapshot.settings.placement
        self._waiting_gpus = waiting_gpus
        self.claimants: set[str] = set()  # placed on GPUs that were kept for them
        self._quotas = Quotas(state.accounts, snapshot.settings, snapshot.gpus)
        self._fleet = state.fleet.bring_to(snapshot.gpus)  # as the next job may use them: what is held is closed
        self._refusals: dict[_Ask, NoFit] = {}
        self._show_claimed(state.moves.claimed())

    def offer_claimed(self, job: Job) -> bool:
        """Place a job on the GPUs that are kept for it; False when there are none, or not all of them are free yet."""
        claim = self._state.moves.claims.get(job.spec.job_id)
        if claim is None or not set(claim.gpu_ids) <= self._state.gpus.keys():
            return False
        views = [self.statement.gpu(gpu_id) for gpu_id in claim.gpu_ids]
        request = self._state.request_of(job)
        if self._over_quota(job, request) is not None:
            return False
        answer = self._policy.place(request, views, self._predictor, self._packing, request.gpus)
        if not isinstance(answer, Placement):
            return False
        self.claimants.add(job.spec.job_id)
        self._show_claimed({gpu: owner for gpu, owner in self.plan.held.claimed.items() if owner != job.spec.job_id})
        self._take(job, request, answer)
        return True

    def _show_claimed(self, claimed: Mapping[str, str]) -> None:
        before, self.plan.held = self.plan.held.claimed, replace(self.plan.held, claimed=claimed)
        self._show(gpu_id for gpu_id in {**before, **claimed} if gpu_id in self._state.gpus)

    def offer(self, job: Job) -> None:
        """Place the job, or note why it has to wait."""
        ask = self._ask(job)
        refusal = self._refusals.get(ask)
        if refusal is None:
            request = self._state.request_of(job)
            answer = self._over_quota(job, request) or self._place(job, request)
            if isinstance(answer, Placement):
                self._take(job, request, answer)
                return
            refusal = self._refusals[ask] = answer
        self.plan.refused[job.spec.job_id] = refusal
        if self._quotas.limits(job.spec.hints):
            self.plan.limited.add(job.spec.job_id)
        if any(error.kind in QUOTA_KINDS for error in refusal.errors):
            self.plan.over_quota.add(job.spec.job_id)
            self._waiting_gpus -= job.spec.hints.gpus
        elif not refusal.never and self.plan.held.reservation is None:
            self._hold_for(job)

    def exchange(self, queue: Sequence[Job]) -> None:
        """Let jobs that were placed in this cycle change places, where that is better for all of them together."""
        plan, statement = self.plan, self.statement
        if (
            not self._policy.exchanges
            or plan.held.reservation is not None
            or not 0 < len(plan.placed) <= MOST_EXCHANGED
        ):
            return
        jobs = {job.spec.job_id: job for job in queue}
        late = (job for job_id, job in jobs.items() if job_id in plan.refused and job_id not in plan.over_quota)
        waiting = [self._state.request_of(job) for job in itertools.islice(late, MOST_WAITING)]
        if len(plan.placed) + len(waiting) < 2:
            return
        placed = [(self._state.request_of(jobs[each.job_id]), each) for each in plan.placed]
        fixed = [
            request.job_id
            for request in (*waiting, *(request for request, _ in placed))
            if request.job_id in self.claimants
            or jobs[request.job_id].only_host
            or self._quotas.limits(jobs[request.job_id].spec.hints)
        ]
        statement.rollback()
        self._show(share.gpu_id for each in plan.placed for share in each.shares)
        better = rearrange(
            self._policy, self._fleet, placed, waiting, fixed=fixed, predictor=self._predictor, settings=self._packing
        )
        for request, placement in better or placed:
            statement.place(request, placement)
            plan.refused.pop(request.job_id, None)
        plan.placed = [placement for _, placement in better or placed]

    def _ask(self, job: Job) -> _Ask:
        """Return what decides whether a job finds a place: where two are alike, so are their refusals."""
        hints, state = job.spec.hints, self._state
        leaves = hints.expected_duration_s if self.plan.held.open_until else None
        return *ask_of(job, state.measured_profile(job), by_queue=self._quotas.limits(hints)), leaves

    def _over_quota(self, job: Job, request: Request) -> NoFit | None:
        return self._quotas.refusal(request, job.spec.hints)

    def _place(self, job: Job, request: Request) -> Placement | NoFit:
        hints, waiting_gpus = job.spec.hints, max(self._waiting_gpus, request.gpus)
        backfills = bool(self.plan.held.open_until) and hints.expected_duration_s is not None
        if backfills:
            self._show_held(self._snapshot.now + (hints.expected_duration_s or 0.0) * request.max_slowdown)
        views = self._quotas.within(request, hints, on_allowed_host(job, self._fleet))
        answer = self._policy.place(request, views, self._predictor, self._packing, waiting_gpus)
        if backfills:
            self._show_held()
        return answer

    def _show_held(self, leaves_at: float | None = None) -> None:
        """Show the held GPUs as a job sees them that is gone at that time (None = nobody knows when)."""
        reservation = self.plan.held.reservation
        self._show(reservation.gpu_ids if reservation else (), leaves_at)

    def _show(self, gpu_ids: Iterable[str], leaves_at: float | None = None) -> None:
        views = self.statement.view()
        for gpu_id in gpu_ids:
            self._fleet.put(self.plan.held.seen(views[self._fleet.position(gpu_id)], leaves_at))

    def _take(self, job: Job, request: Request, placement: Placement) -> None:
        self._quotas.take(request, job.spec.hints, placement)
        self.statement.place(request, placement)
        self._show(share.gpu_id for share in placement.shares)
        self.plan.placed.append(placement)
        self._waiting_gpus -= request.gpus

    def _hold_for(self, job: Job) -> None:
        """Hold GPUs for a job that was just refused, if it has waited long and no other has a reservation."""
        state, now = self._state, self._snapshot.now
        old = state.reservation
        mine = old is not None and old.job_id == job.spec.job_id
        if not mine and not has_waited_long(job, now):
            return
        request = state.request_of(job)
        wish = Wish(job.spec.job_id, request, self._packing.memory_margin)
        allowed = self._quotas.within(request, job.spec.hints, on_allowed_host(job, self._fleet))
        if old is not None and mine:
            found = renewed(old, wish, allowed, state.end_of, now)
        else:
            found = reserve(wish, allowed, state.end_of, now)
        if found is not None:
            self.plan.held = replace(hold(found, job, allowed, state.end_of, now), claimed=self.plan.held.claimed)
            self._show_held()


def on_allowed_host(job: Job, views: Sequence[GpuView]) -> Sequence[GpuView]:
    """Return the GPUs of the hosts on which the job may run."""
    pinned = job.only_host
    return views if pinned is None else [view for view in views if view.host_id == pinned]


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
            what = (
                "the quota does not allow it"
                if job_id in plan.over_quota
                else "no device of this cluster could ever take it"
            )
            reason = f"{what}: {explain(refusal.errors)}"
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
        if job_id in plan.limited:  # an idle GPU may be one on which it would hold more than it may
            continue
        if job_id in state.queued and fits_idle(state.request_of(job), on_allowed_host(job, idle), margin):
            counts[job_id] = state.overlooked.get(job_id, 0) + 1
    state.overlooked = counts
