"""The cluster as it will be once those have left, and are placed, that rebalancing has decided about so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from cotenant.configs.settings import RebalanceSettings, Settings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.constraints import MOST_PREDICTED
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.fleet import Flags, Floats, Integers, Part
from cotenant.placement.moving import Pace, Together, paces
from cotenant.placement.objective import slowness
from cotenant.placement.processors import keep_for
from cotenant.placement.statement import Statement
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request
from cotenant.scheduler.core.accounts import asked_of, held_of
from cotenant.scheduler.core.attempts import MOST_GPUS, Attempt
from cotenant.scheduler.core.deadlines import attained_s, likely_left_s
from cotenant.scheduler.core.freezable import places_of, reach
from cotenant.scheduler.core.interruptions import tell
from cotenant.scheduler.core.model import Ending, Interruption, Job, JobState
from cotenant.scheduler.core.priority import held_value
from cotenant.scheduler.core.quotas import Quotas, is_limited
from cotenant.scheduler.core.requests import leaves_within_s
from cotenant.scheduler.core.turn import Turn

WORTH = 1.5  # what a move saves must be so many times what it costs
REST = 5.0  # a job is left alone for so many times the cost of a move
CLAIM_SLACK_S = 30.0  # beyond the grace period of those who leave


def has_rested(job: Job, now: float, rules: RebalanceSettings) -> bool:
    """Whether a job has had its GPUs for so long that it may be asked to leave them again."""
    return job.lease is not None and now - job.lease.granted_at >= REST * rules.move_cost_s


def loses_nothing(job: Job, settings: Settings) -> bool:
    """Whether a job that saves finds its checkpoint again: of one on several hosts no single host has it all."""
    return settings.checkpoints.directory is not None or len(job.hosts) == 1


class Board:
    """A statement over the present cluster; ``close`` it, since it works on the state's own fleet.

    Attributes:
        turn: Takes the decisions.
        state: The state.
        now: Unix seconds.
        rules: The settings of rebalancing.
        standing: What priority values rest on.
        statement: The GPUs as they will be.
        taken: Jobs that leave their GPUs.
        predictor: Predicts how jobs on one GPU slow each other down.
        packing: How jobs are packed.
        closed: By position, whether somebody has a claim on the GPU, or it is held.
    """

    def __init__(self, turn: Turn, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
        self.turn, self.state, self.now = turn, turn.state, turn.now
        self.rules = turn.state.settings.rebalance
        self.standing = turn.state.standing()
        self.statement = Statement(turn.state.fleet())
        self.taken: set[str] = set()
        self._policy, self.predictor = policy, predictor
        self.packing = turn.state.settings.placement
        self._places: dict[str, tuple[str, ...]] = {}  # of jobs that are placed elsewhere on the board
        # What does not change on the board is worked out once.
        self._leased: dict[str, tuple[str, ...]] = {}  # GPUs of jobs that stay where they are
        self._left_s: dict[str, float] = {}
        self._slower: dict[tuple[str, tuple[str, ...]], float] = {}
        self._weights: dict[str, float] = {}
        self._slower_on: dict[tuple[str, str], float] = {}
        self._together = Together(predictor)
        self._without: dict[tuple[int, str], tuple[GpuView, GpuView]] = {}  # by identity of the first, kept for it
        self.closed = self._now_closed()
        self._shared = turn.state.settings.checkpoints.directory is not None
        self._silent = {host_id for host_id, host in turn.state.hosts.items() if not host.reachable}

    def close(self) -> None:
        """Take back what was only imagined."""
        self.statement.rollback()
        keep_for(self.statement.fleet, ())

    # -- looking ----------------------------------------------------------------------------------------------------

    def movable(self, among: Iterable[str] | None = None) -> list[Job]:
        """Return the running jobs that lose nothing, have had their rest, and would hear of it, in order of submission.

        Args:
            among: Ids of the only jobs to look at; None = all.
        """
        found = self.state.savers.ids(self.movable_rows(among))
        return [self.state.jobs[job_id] for job_id in found if job_id not in self.taken]

    def movable_rows(self, among: Iterable[str] | None = None) -> Integers:
        """Return the same as rows of the state's savers; some of them may be taken already."""
        savers = self.state.savers
        rows = savers.running(among)
        rows = rows[self.now - savers.granted_at(rows) >= REST * self.rules.move_cost_s]  # see has_rested
        rows = rows if self._shared else rows[savers.on_one_host(rows)]  # see loses_nothing
        if not self._silent:
            return rows
        hears = [self._silent.isdisjoint(self.state.jobs[job_id].hosts) for job_id in savers.ids(rows)]
        return rows[np.array(hears, dtype=np.bool_)]

    def look_when_rested(self) -> None:
        """Have rebalancing look again when the next of the running jobs that save has had its rest."""
        rest_s, running = REST * self.rules.move_cost_s, (self.state.jobs[job_id] for job_id in self.state.savers)
        rested_at = (job.lease.granted_at + rest_s for job in running if job.lease)
        if (next_at := min((at for at in rested_at if at > self.now), default=None)) is not None:
            self.state.moves.look(next_at)

    def sharing(self) -> dict[str, None]:
        """Return the jobs on GPUs that carry several, each once, in order."""
        fleet = self.statement.fleet
        crowded = np.flatnonzero(fleet.crowd > 1).tolist()
        return {resident.job_id: None for place in crowded for resident in fleet[place].residents}

    def within_reach(self, job: Job, places: Integers) -> Integers:
        """Return those of these GPUs where the job finds its checkpoint again."""
        fleet = self.statement.fleet
        if job.freezes:
            return np.intersect1d(places, reach(self.state, fleet, job))
        if self._shared:
            return places
        near = [fleet.of_host(host_id) for host_id in job.hosts]
        return np.intersect1d(places, np.concatenate(near)) if near else places[:0]

    def finds_checkpoint(self, job: Job, gpu_ids: Collection[str]) -> bool:
        """Whether the job can continue from its checkpoint on these GPUs, or go on there once it is frozen."""
        places = self.positions(gpu_ids)
        return len(self.within_reach(job, places)) == len(places)

    def left_s(self, job_id: str) -> float:
        """Return how long the job is expected to run on, alone, seconds."""
        if not self._left_s:
            savers = self.state.savers
            rows = savers.running()
            self._left_s.update(zip(savers.ids(rows), savers.left_s(rows, self.now).tolist(), strict=True))
        left_s = self._left_s.get(job_id)
        if left_s is None:
            job = self.state.jobs[job_id]
            left_s = likely_left_s(job.spec.hints, attained_s(job, self.state.progress.get(job_id), self.now))
            self._left_s[job_id] = left_s
        return left_s

    def weight(self, job_id: str) -> float:
        """Return the weight of a job."""
        weight = self._weights.get(job_id)
        if weight is None:
            weight = self._weights[job_id] = self.state.request_of(self.state.jobs[job_id]).weight
        return weight

    def value(self, job: Job) -> float:
        """Return the priority value by which a running job keeps its GPUs."""
        return held_value(job, self.state.progress.get(job.spec.job_id), self.now, self.standing)

    def values(self, rows: Integers) -> Floats:
        """Return the same of many, given as rows of the state's savers."""
        savers = self.state.savers
        values = savers.values(rows, self.now, self.standing)
        dated = np.flatnonzero(savers.dated(rows))
        values[dated] = [self.value(self.state.jobs[job_id]) for job_id in savers.ids(rows[dated])]
        return values

    def places(self, job_id: str) -> tuple[str, ...]:
        """Return the GPUs of a job; of one that ends since a host is gone, those of the others."""
        found = self._places.get(job_id) or self._leased.get(job_id)
        if found is None:
            lease, fleet = self.state.jobs[job_id].lease, self.statement.fleet
            gpu_ids = (share.gpu_id for share in (lease.shares if lease else ()))
            found = self._leased[job_id] = tuple(filter(fleet.has, gpu_ids))
        return found

    def residents(self, gpu_ids: Sequence[str]) -> dict[str, None]:
        """Return the jobs on these GPUs, each once, in order."""
        return {resident.job_id: None for gpu_id in gpu_ids for resident in self.statement.gpu(gpu_id).residents}

    def positions(self, gpu_ids: Iterable[str]) -> Integers:
        """Return the positions of these GPUs in the fleet, ascending."""
        return np.array(sorted(map(self.statement.fleet.position, gpu_ids)), dtype=np.int64)

    def others(self, places: Integers, gpu_ids: Iterable[str]) -> Integers:
        """Return these positions without those of some GPUs."""
        stays = np.ones(len(self.statement.fleet), dtype=np.bool_)
        stays[self.positions(gpu_ids)] = False
        return places[stays[places]]

    def open_to(self, job: Job, places: Integers) -> Integers:
        """Return those of these GPUs that are open to the job."""
        open_ = places[~self.closed[places]]
        only = places_of(self.state, self.statement.fleet, job)
        return open_ if only is None else np.intersect1d(open_, only)

    def over_limit(self, job: Job) -> NoFit | None:
        """Return why the job's tenant or queue could not start it now, were it off its GPUs; None when it could."""
        quotas = self._quotas_without(job)
        return None if quotas is None else quotas.refusal(self.state.request_of(job), job.spec.hints)

    def startable(self, jobs: Sequence[Job]) -> list[Job]:
        """Return those of these waiting jobs that their tenants and queues could start together."""
        quotas, found = self._quotas(), list[Job]()
        for job in jobs:
            request, hints = self.state.request_of(job), job.spec.hints
            if quotas.refusal(request, hints) is None:
                quotas.expect(request, hints)
                found.append(job)
        return found

    def _quotas_without(self, job: Job) -> Quotas | None:
        """Return what tenants and queues will hold, the job aside; None when no limit applies to it."""
        limited = is_limited(self.state.settings.scheduling, job.spec.hints)
        return self._quotas(job.spec.job_id) if limited else None

    def _quotas(self, aside: str = "") -> Quotas:
        """Return what tenants and queues will hold, one job aside.

        Whoever GPUs are kept for will have them, besides or instead of what it has. Those who leave for somebody else
        are counted until they are gone.
        """
        quotas = Quotas(self.state.accounts, self.state.settings, self.statement.fleet)
        goes = {job_id: claim.gpu_ids for job_id, claim in self.state.moves.claims.items()} | self._places
        if aside:
            goes[aside] = ()
        for job, gpu_ids in ((self.state.jobs[job_id], gpu_ids) for job_id, gpu_ids in goes.items()):
            views = [self.statement.gpu(gpu_id) for gpu_id in gpu_ids if self.statement.fleet.has(gpu_id)]
            gets = sum(asked_of(self.state.request_of(job), view, self.packing) for view in views)
            quotas.count(job.spec.hints, gets - held_of(job, self.state.gpus), bool(views) - (job.lease is not None))
        return quotas

    def _within_limits(self, job: Job, places: Integers) -> Integers:
        """Return those of these GPUs on which the job's tenant or queue would not hold more than it may."""
        quotas, request = self._quotas_without(job), self.state.request_of(job)
        if quotas is None:
            return places
        if quotas.refusal(request, job.spec.hints) is not None:
            return places[:0]
        allowed = quotas.within(request, job.spec.hints, Part(self.statement.fleet, places, why=False))
        return places[[view.schedulable for view in allowed]]

    def empty(self) -> Integers:
        """Return the GPUs that carry nobody and that nobody has a claim on."""
        fleet = self.statement.fleet
        return np.flatnonzero((fleet.crowd == 0) & fleet.schedulable & ~self.closed)

    def paces(self, job_ids: Iterable[str], without: str | None = None) -> dict[str, Pace]:
        """Return how these jobs are predicted to go, or would if one other left its GPUs."""
        gpus_of = self._gpus_of if without is None else lambda job_id: self._gpus_without(job_id, without)
        return paces(job_ids, gpus_of, self._together, self.slower_on)

    def slower(self, job_id: str) -> float:
        """Return how many times longer a job takes alone on its GPUs than on its fastest type."""
        key = job_id, self.places(job_id)
        slower = self._slower.get(key)
        if slower is None:
            slower = max((self.slower_on(job_id, view.gpu_type) for view in self._gpus_of(job_id)), default=1.0)
            self._slower[key] = slower
        return slower

    def slower_on(self, job_id: str, gpu_type: str) -> float:
        """Return how many times longer a job takes alone on this GPU type than on its fastest."""
        slower = self._slower_on.get((job_id, gpu_type))
        if slower is None:
            request = self.state.request_of(self.state.jobs[job_id])
            slower = self._slower_on[job_id, gpu_type] = slowness(gpu_type, request, self.packing)
        return slower

    def _gpus_of(self, job_id: str) -> list[GpuView]:
        return [self.statement.gpu(gpu_id) for gpu_id in self.places(job_id)]

    def _gpus_without(self, job_id: str, leaves: str) -> list[GpuView]:
        return [self._view_without(view, leaves) for view in self._gpus_of(job_id)]

    def _view_without(self, view: GpuView, leaves: str) -> GpuView:
        key = id(view), leaves
        if key not in self._without:
            stay = tuple(resident for resident in view.residents if resident.job_id != leaves)
            self._without[key] = view, view.carrying(stay)
        return self._without[key][1]

    # -- imagining --------------------------------------------------------------------------------------------------

    def evict(self, job_id: str) -> None:
        """Take a job off its GPUs."""
        self.statement.evict(job_id, self.places(job_id))

    def place(self, job: Job, places: Integers) -> Placement | None:
        """Place a job that has no GPUs on some of these; None when it does not fit.

        Args:
            job: The job.
            places: Positions of the GPUs in the fleet, ascending.
        """
        request, open_ = self.state.request_of(job), self._within_limits(job, self.open_to(job, places))
        if len(open_) < request.gpus:
            return None
        answer = self._answer(job, open_, why=False)
        if not isinstance(answer, Placement):
            return None
        self.statement.place(request, answer)
        self._places[job.spec.job_id] = tuple(share.gpu_id for share in answer.shares)
        return answer

    def why_not(self, job: Job, places: Integers) -> Sequence[FitError]:
        """Return why a job that has no GPUs fits none of these, which are open to it; empty when it does."""
        answer = self.over_limit(job) or self._answer(job, places, why=True)
        return answer.errors if isinstance(answer, NoFit) else ()

    def _answer(self, job: Job, places: Integers, *, why: bool) -> Placement | NoFit:
        gpus, request = Part(self.statement.fleet, places, why=why), self.state.request_of(job)
        return self._policy.place(request, gpus, self.predictor, self.packing, request.gpus)

    def take_back(self, mark: int, job_id: str) -> None:
        """Undo everything since a checkpoint of the statement, the placement of this job included."""
        self.statement.rollback(mark)
        self._places.pop(job_id, None)

    def attempt(self, request: Request, job: Job, places: Integers, leaving: Iterable[str]) -> Attempt | None:
        """Return all that decides whether the job finds a place on some GPUs once enough of others have left.

        Args:
            request: What the job asks, whoever it is.
            job: The job.
            places: Positions of the GPUs.
            leaving: Ids of those who could leave, in order.

        Returns:
            None when it rests on more: on processors that jobs on other GPUs hold, on which GPUs are looked at, or on
            what its tenant or queue holds.
        """
        fleet = self.statement.fleet
        most = MOST_GPUS if fleet.demand is None else MOST_PREDICTED
        if request.cpus or len(places) > most or self._quotas_without(job) is not None:
            return None
        return Attempt(
            request=request,
            places=places.tobytes(),
            views=tuple(map(fleet.views.__getitem__, places.tolist())),
            open_places=self.open_to(job, places).tobytes(),
            leaving=tuple(leaving),
            predictor=self.predictor,
            packing=self.packing,
        )

    # -- deciding ---------------------------------------------------------------------------------------------------

    def leave(self, job: Job, why: Interruption, reason: str = "") -> None:
        """Have a job leave its GPUs; it waits for others, or goes where it was placed on the board."""
        job_id = job.spec.job_id
        if job_id in self._places:
            self.keep(job_id, [job])
        self.taken.add(job_id)
        self.turn.stop(job, Ending(JobState.QUEUED, reason or tell(why), interruption=why))

    def keep(self, job_id: str, leaving: Sequence[Job]) -> None:
        """Keep the GPUs on which a job was placed on the board for it until those who leave are gone.

        It may need nobody to leave: who has left for another had more GPUs than that one wanted.
        """
        gpu_ids, settings = self._places[job_id], self.state.settings
        before = [
            other for gpu_id in gpu_ids for other in self.state.residents(gpu_id) if other.spec.job_id in self.taken
        ]
        grace = max((leaves_within_s(other, settings) for other in [*leaving, *before]), default=0.0)
        self.state.moves.claim(job_id, gpu_ids, self.now + grace + CLAIM_SLACK_S)
        self.closed = self._now_closed()

    def _now_closed(self) -> Flags:
        """Return which GPUs somebody has a claim on, or are held; the processors these wait for are kept too."""
        state, fleet = self.state, self.statement.fleet
        wishes = [(job_id, claim.gpu_ids) for job_id, claim in state.moves.claims.items()]
        wishes += [(state.reservation.job_id, state.reservation.gpu_ids)] if state.reservation else []
        keep_for(fleet, [(state.jobs[job_id].spec.hints.cpus or 0.0, gpu_ids) for job_id, gpu_ids in wishes])
        reserved = state.reservation.gpu_ids if state.reservation else ()
        closed = np.zeros(len(fleet), dtype=np.bool_)
        closed[[fleet.position(gpu_id) for gpu_id in (*state.moves.claimed(), *reserved) if fleet.has(gpu_id)]] = True
        return closed
