"""A proposal: places for waiting jobs, one after the other, on the GPUs of the state, all of it to be taken back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.batch import MOST_WAITING, rearrange
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.fleet import Fleet, Floats, Integers, Part
from cotenant.placement.processors import keep_for, wait_for_others
from cotenant.placement.statement import Statement
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request
from cotenant.scheduler.core.freezable import places_of
from cotenant.scheduler.core.gone import empty_views, kinds_of
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.quotas import QUOTA_KINDS, Quotas
from cotenant.scheduler.core.requests import Key
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.waiting import (
    NOTHING_HELD,
    Held,
    Wish,
    free_at,
    has_waited_long,
    hold,
    renewed,
    reserve,
)

MOST_EXCHANGED = 64  # placements of one cycle; beyond, it is long enough as it is


@dataclass(slots=True)
class Plan:
    """What a cycle wants to do.

    Attributes:
        placed: Placements in the order in which they were found, each resting on those before it.
        refused: Why each other job that was offered has to wait; a walk along the line notes that elsewhere.
        gpus: The GPUs with new jobs as they will be.
        held: GPUs kept for a job that has waited too long.
    """

    placed: list[Placement] = field(default_factory=list)
    refused: dict[str, NoFit] = field(default_factory=dict)
    gpus: Sequence[GpuView] = ()
    held: Held = NOTHING_HELD


class Proposal:
    """A cycle's statement, and what has to be known to extend it by one job after another.

    Args:
        state: The state; its fleet shows what is proposed until ``take_back``.
        policy: Places one job.
        predictor: Predicts how jobs on one GPU slow each other down.
        waiting_gpus: GPUs that all waiting jobs ask for together.
    """

    def __init__(
        self, state: State, policy: PlacementPolicy, predictor: InterferencePredictor, waiting_gpus: int
    ) -> None:
        self.plan = Plan()
        self.state, self.policy, self.predictor = state, policy, predictor
        self.packing = state.settings.placement
        self.waiting_gpus = waiting_gpus
        self.fleet: Fleet = state.fleet()  # as the next job may use it: what is held is closed
        self.quotas = Quotas(state.accounts, state.settings, self.fleet)
        self.narrowed = False  # the last job was not allowed on some GPUs, because of what its tenant or queue holds
        self._statement = Statement(self.fleet)
        self._end_of = cache(state.end_of)  # nobody gets on meanwhile
        self._open: dict[str, GpuView] = {}  # held GPUs as they are
        self._closed: dict[str, tuple[GpuView, GpuView]] = {}  # the same, and as those see them that may not use them
        self._shown: set[str] = set()  # GPUs that do not look as the state says
        self._keeps: list[tuple[float, list[str]]] = []  # processors per GPU, and GPUs, that somebody waits for
        self.claimants: set[str] = set()  # placed on GPUs that were kept for them
        self._left: set[str] = set()  # GPUs with more room than before jobs changed places
        self._keep(state.moves.claimed())
        self._refusals: dict[tuple[Key, float | None], NoFit] = {}

    # -- one job after the other ------------------------------------------------------------------------------------

    def offer(self, job: Job) -> None:
        """Place the job, or note why it has to wait."""
        hints = job.spec.hints
        key = self.state.key_of(job)
        leaves = hints.expected_duration_s if self.plan.held.open_until else None
        refusal = self._refusals.get((key, leaves))
        if refusal is None:
            answer = self.answer(job)
            if isinstance(answer, Placement):
                return
            refusal = self._refusals[key, leaves] = answer
        self.plan.refused[job.spec.job_id] = refusal
        if is_over_quota(refusal):
            self.waiting_gpus -= hints.gpus
        elif not refusal.never and self.plan.held.reservation is None:
            self.hold_for(job)

    def offer_claimed(self, job: Job) -> bool:
        """Place a job on the GPUs that are kept for it; False when there are none, or not all of them are free yet."""
        claim = self.state.moves.claims.get(job.spec.job_id)
        if claim is None or not set(claim.gpu_ids) <= self.state.gpus.keys():
            return False
        request, claimed = self.state.request_of(job), self.plan.held.claimed
        if self.quotas.refusal(request, job.spec.hints) is not None:
            return False
        only = places_of(self.state, self.fleet, job)
        if only is not None and not set(map(self.fleet.position, claim.gpu_ids)) <= set(only.tolist()):
            return False
        self._keep({gpu: owner for gpu, owner in claimed.items() if gpu not in claim.gpu_ids})  # two may share one
        places = np.array(sorted(map(self.fleet.position, claim.gpu_ids)), dtype=np.int64)
        gpus = Part(self.fleet, places, why=False)
        answer = self.policy.place(request, gpus, self.predictor, self.packing, request.gpus)
        if not isinstance(answer, Placement):
            self._keep(claimed)
            return False
        self.claimants.add(job.spec.job_id)
        self._take(job, request, answer)
        return True

    def _keep(self, claimed: Mapping[str, str]) -> None:
        """Close the GPUs that are kept for somebody, given by whom; open those that are kept no longer."""
        for gpu_id in self.plan.held.claimed.keys() - claimed.keys():
            self.fleet.put(self._open.pop(gpu_id))
        for gpu_id in [each for each in claimed if each in self.state.gpus and each not in self._open]:
            self._open[gpu_id] = self.fleet[self.fleet.position(gpu_id)]
            self._shown.add(gpu_id)
        kept = {gpu: claimed[gpu] for gpu in claimed if gpu in self._open}
        self._note_held(replace(self.plan.held, claimed=kept))
        self.show_held()

    def answer(self, job: Job, places: Integers | None = None) -> Placement | NoFit:
        """Place the job and return where, or return why not.

        Args:
            job: The job.
            places: Positions of the only GPUs to look at: if it does not fit there, nobody asks why; None = all.
        """
        request = self.state.request_of(job)
        answer = self.quotas.refusal(request, job.spec.hints) or self._place(job, request, places)
        if isinstance(answer, Placement):
            self._take(job, request, answer)
        return answer

    def _place(self, job: Job, request: Request, places: Integers | None) -> Placement | NoFit:
        hints, waiting_gpus = job.spec.hints, max(self.waiting_gpus, request.gpus)
        backfills = bool(self.plan.held.open_until) and hints.expected_duration_s is not None
        if backfills:
            self.show_held(self.state.now + (hints.expected_duration_s or 0.0) * request.max_slowdown)
        gpus = self._open_to(job, request)
        self.narrowed = gpus is not self.fleet
        if places is not None and gpus is self.fleet:
            gpus = Part(self.fleet, places, why=False)
        answer = self.policy.place(request, gpus, self.predictor, self.packing, waiting_gpus)
        if backfills:
            self.show_held()
        return self._until_it_grows(job, answer) if isinstance(answer, NoFit) and answer.never else answer

    def never(self, job: Job) -> NoFit | None:
        """Return why nothing could ever take the job, whatever its tenant or queue holds; None when something could."""
        request, only = self.state.request_of(job), places_of(self.state, self.fleet, job)
        gpus = self.fleet if only is None else Part(self.fleet, only)
        answer = self.policy.place(request, gpus, self.predictor, self.packing, request.gpus)
        if not isinstance(answer, NoFit) or not answer.never:
            return None
        answer = self._until_it_grows(job, answer)
        return answer if answer.never else None

    def _until_it_grows(self, job: Job, refusal: NoFit) -> NoFit:
        """Return the refusal of a job as one to wait with if more GPUs may come, or such as were seen here before."""
        scaling = self.state.configured.scaling
        allowed = scaling.most_gpus is None or job.spec.hints.gpus <= scaling.most_gpus
        if not scaling.enabled or not allowed or job.only_host is not None:
            return refusal
        few = [error for error in refusal.errors if error.kind == "gpus_never" and (error.available or 0.0) > 0.0]
        if few:
            to_come = replace(few[0], kind="gpus_to_come", never=False)
        elif self._fitted_once(job):
            to_come = FitError("kind_to_come", None)
        else:
            return refusal
        rest = (each for each in refusal.errors if each.kind != "gpus_never")
        return NoFit(refusal.job_id, (to_come, *rest), never=False)

    def _fitted_once(self, job: Job) -> bool:
        """Whether a host that has left could have taken the job, or a share of one that may lie on several."""
        request = self.state.request_of(job)
        share = request if request.one_host else replace(request, gpus=1)
        for host in kinds_of(self.state.gone):
            views = [view for view in empty_views(host) if not (request.gpus > 1 and view.instance)]
            answer = self.policy.place(share, views, self.predictor, self.packing, share.gpus)
            if isinstance(answer, Placement):
                return True
        return False

    def _open_to(self, job: Job, request: Request) -> Sequence[GpuView]:
        """Return the GPUs the job may use; the fleet itself when it may use all."""
        only = places_of(self.state, self.fleet, job)
        allowed = self.fleet if only is None else Part(self.fleet, only)
        return self.quotas.within(request, job.spec.hints, allowed)

    def _take(self, job: Job, request: Request, placement: Placement) -> None:
        self.quotas.take(request, job.spec.hints, placement)
        self._put(request, placement)
        self.plan.placed.append(placement)
        self.waiting_gpus -= request.gpus

    def _put(self, request: Request, placement: Placement) -> None:
        held = [share.gpu_id for share in placement.shares if share.gpu_id in self._open]
        for gpu_id in held:
            self.fleet.put(self._open[gpu_id])
        self._statement.place(request, placement)
        self._shown.update(share.gpu_id for share in placement.shares)
        self._open.update((gpu_id, self.fleet[self.fleet.position(gpu_id)]) for gpu_id in held)
        self.show_held()

    # -- what is held -----------------------------------------------------------------------------------------------

    def show_held(self, leaves_at: float | None = None) -> None:
        """Show the held GPUs as a job sees them that is gone at that time (None = nobody knows when)."""
        for gpu_id, view in self._open.items():
            self.fleet.put(view if self.plan.held.lets_in(gpu_id, leaves_at) else self._as_closed(view))
        if self._keeps:
            keep_for(self.fleet, self._keeps)

    def _as_closed(self, view: GpuView) -> GpuView:
        known = self._closed.get(view.gpu_id)
        if known is None or known[0] is not view:
            known = self._closed[view.gpu_id] = view, self.plan.held.closed(view)
        return known[1]

    def _note_held(self, held: Held) -> None:
        """Note what is held, and for which jobs that GPUs are held or kept for the processors of the hosts are too."""
        jobs = self.state.jobs
        self.plan.held = held
        self._closed.clear()
        gpus: dict[str, list[str]] = {}
        for gpu_id, job_id in held.claimed.items():
            gpus.setdefault(job_id, []).append(gpu_id)
        if held.reservation is not None:
            gpus[held.reservation.job_id] = list(held.reservation.gpu_ids)
        before, wanted = self._keeps, ((jobs[job_id].spec.hints.cpus, gpu_ids) for job_id, gpu_ids in gpus.items())
        self._keeps = [(cpus, gpu_ids) for cpus, gpu_ids in wanted if cpus]
        if before and not self._keeps:
            keep_for(self.fleet, ())

    def unseen(self) -> set[str]:
        """Return the ids of the GPUs with more room than was offered.

        They are held or kept, or on hosts whose processors are, or jobs have left them when they changed places.
        """
        if not self._keeps:
            return self._left | self._open.keys()
        return {*self._left, *self._open, *self._of_hosts(np.flatnonzero(self.fleet.kept))}

    def _of_hosts(self, hosts: Integers) -> list[str]:
        """Return the ids of the GPUs of these hosts, given by number."""
        return [self.fleet[place].gpu_id for place in self.fleet.on_hosts(hosts).tolist()]

    def hold_for(self, job: Job) -> bool:
        """Hold GPUs for a job that was just refused, if it has waited long and no other has a reservation."""
        state, now = self.state, self.state.now
        old = state.reservation
        mine = old is not None and old.job_id == job.spec.job_id
        if not mine and not has_waited_long(job, now):
            return False
        request = state.request_of(job)
        wish = Wish(job.spec.job_id, request, self.packing.memory_margin)
        allowed = self._open_to(job, request)
        free = self._free_at() if allowed is self.fleet else None
        if old is not None and mine:
            found = renewed(old, wish, allowed, self._end_of, now, free)
        else:
            found = reserve(wish, allowed, self._end_of, now, free)
        if found is None:
            return False
        places = np.array([[self.fleet.position(gpu_id) for gpu_id in found.gpu_ids]], dtype=np.int64)
        suffices = not wait_for_others(self.fleet, request, places)[0]
        held = hold(found, job, allowed, self._end_of, now, suffices=suffices)
        self._note_held(replace(held, claimed=self.plan.held.claimed))
        self._open.update((gpu_id, self.fleet[self.fleet.position(gpu_id)]) for gpu_id in found.gpu_ids)
        self._shown.update(found.gpu_ids)
        self.show_held()
        return True

    def _free_at(self) -> Floats:
        """Return when each GPU is expected to be empty: those with new jobs are not as the state says."""
        free, now = self.state.free_at(), self.state.now
        for placement in self.plan.placed:
            for share in placement.shares:
                place = self.fleet.position(share.gpu_id)
                free[place] = free_at(self.fleet[place], self._end_of, now)
        return free

    # -- all of them together ---------------------------------------------------------------------------------------

    def exchange(self, late: Sequence[Job], queue: Iterable[Job]) -> Collection[str]:
        """Let jobs that were placed in this cycle change places, where that is better for all of them together.

        Args:
            late: Refused jobs, in order; the first few may take part.
            queue: All jobs that were offered, or at least those that were placed.

        Returns:
            Ids of those of the late jobs that have a place now.
        """
        plan, state = self.plan, self.state
        waiting = [job for job in late if not self._is_over_quota(job)][:MOST_WAITING]
        if (
            not self.policy.exchanges
            or plan.held.reservation is not None
            or not 0 < len(plan.placed) <= MOST_EXCHANGED
            or len(plan.placed) + len(waiting) < 2
        ):
            self._note_gpus()
            return ()
        found = {each.job_id: each for each in plan.placed}
        jobs = {job.spec.job_id: job for job in (*waiting, *(job for job in queue if job.spec.job_id in found))}
        placed = [(state.request_of(jobs[each.job_id]), each) for each in plan.placed]
        asked = [state.request_of(job) for job in waiting]
        fixed = [
            job_id
            for job_id, job in jobs.items()
            if job_id in self.claimants or job.only_host or self.quotas.limits(job.spec.hints)
        ]
        self._statement.rollback()
        better = rearrange(
            self.policy, self.fleet, placed, asked, fixed=fixed, predictor=self.predictor, settings=self.packing
        )
        if better is not None:
            self._note_left(placed, better)
        for request, placement in better or placed:
            self._put(request, placement)
            plan.refused.pop(request.job_id, None)
        plan.placed = [placement for _, placement in better or placed]
        self._note_gpus()
        return {each.job_id for each in plan.placed if each.job_id not in found}

    def _note_left(
        self, before: Iterable[tuple[Request, Placement]], after: Iterable[tuple[Request, Placement]]
    ) -> None:
        """Note which GPUs jobs have left: others were refused there for their sake, or on others of those hosts."""
        there = {(each.job_id, share.gpu_id) for _, each in after for share in each.shares}
        for request, placement in before:
            left = [share.gpu_id for share in placement.shares if (request.job_id, share.gpu_id) not in there]
            self._left.update(left)
            if request.cpus and left:
                self._left.update(self._of_hosts(self.fleet.host[[*map(self.fleet.position, left)]]))

    def _is_over_quota(self, job: Job) -> bool:
        refusal = self.plan.refused.get(job.spec.job_id)
        return refusal is not None and is_over_quota(refusal)

    def _note_gpus(self) -> None:
        """Note how the GPUs with new jobs look."""
        touched = dict.fromkeys(share.gpu_id for each in self.plan.placed for share in each.shares)
        self.plan.gpus = [self.fleet[self.fleet.position(gpu_id)] for gpu_id in touched]

    def take_back(self) -> None:
        """Make the fleet look as the state says."""
        if self._keeps:
            keep_for(self.fleet, ())
        for gpu_id in self._shown:
            self.fleet.put(self.state.view(gpu_id))


def is_over_quota(refusal: NoFit) -> bool:
    """Whether the tenant or the queue is in the way."""
    return any(error.kind in QUOTA_KINDS for error in refusal.errors)
