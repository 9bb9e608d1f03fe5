"""Looking at a whole batch of jobs at once: who goes with whom, after each found a place one after the other.

One job after the other is fair to the order of the queue, but the first one takes the partner that the second one
needed, and the last one is left alone. Nobody of the batch has started yet, so nothing is lost by changing places: from
what was found one by one, the best single change is made, again and again, while there is one. Changes are: a job that
waits takes the place of another that can go elsewhere (or that can, once a third has gone elsewhere), two jobs swap
GPUs, one job moves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.constraints import with_hinted_profile
from cotenant.placement.crews import Crew, Key, Worths
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.fleet import Flags, Fleet, Floats, Integers
from cotenant.placement.mix import Demand
from cotenant.placement.shares import TOLERANCE, thousandths
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement, Request

MOST_JOBS = 24  # of a batch that change places: the work grows with their square
MOST_CHANGES = 48
PLACING_IS_WORTH = 10.0  # more than any change of a score: who can be placed is placed

MOST_WAITING = 8  # jobs without a place that are tried
SPARE_GPUS = 4  # empty GPUs that jobs may move to


def rearrange(
    policy: PlacementPolicy,
    before: Fleet,
    placed: Sequence[tuple[Request, Placement]],
    waiting: Sequence[Request],
    *,
    fixed: Collection[str] = (),
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> list[tuple[Request, Placement]] | None:
    """Let jobs that were placed one after the other change places, where that is better for all of them together.

    Args:
        policy: Places one job.
        before: The GPUs before any of the jobs was placed.
        placed: The jobs with their placements, in the order they were found in. Those of several GPUs, those that do
            not share and those nothing is known of stay where they are, and so does whoever is beside them.
        waiting: Jobs that found no place, in order of the queue.
        fixed: Ids of jobs that must not change places, since not every GPU is open to them.
        predictor: Predicts how jobs on one GPU slow each other down.
        settings: How jobs are packed.

    Returns:
        All jobs that have a place now, in an order in which each placement rests on those before it; None when nothing
        is better.
    """
    still = [each for each in placed if each[0].job_id in fixed or not _movable(each[0], settings)]
    taken = {share.gpu_id for _, placement in still for share in placement.shares}
    moving = [each for each in placed if each not in still and each[1].shares[0].gpu_id not in taken]
    # A GPU is looked at with all jobs that were placed there, or not at all.
    cut = {placement.shares[0].gpu_id for _, placement in moving[MOST_JOBS:]}
    moving = [each for each in moving[:MOST_JOBS] if each[1].shares[0].gpu_id not in cut]
    trying = [each for each in waiting if each.job_id not in fixed and _movable(each, settings)][:MOST_WAITING]
    used = list(dict.fromkeys(placement.shares[0].gpu_id for _, placement in moving))
    if len(moving) + len(trying) < 2 or not used:
        return None
    gpus = [before[before.position(gpu_id)] for gpu_id in used]
    gpus.extend(_spare(before, {share.gpu_id for _, placement in placed for share in placement.shares}))
    rows = {gpu.gpu_id: row for row, gpu in enumerate(gpus)}
    jobs = [*(request for request, _ in moving), *trying]
    crews = [frozenset[int]()] * len(gpus)
    for number, (_, placement) in enumerate(moving):
        crews[rows[placement.shares[0].gpu_id]] |= {number}
    moved = {request.job_id for request, _ in moving}
    kept = [each for each in placed if each[0].job_id not in moved]
    spare = _spare_processors(before, gpus, kept) if any(job.cpus for job in jobs) else {}
    batch = Batch(jobs, gpus, crews, list(range(len(moving), len(jobs))), predictor, settings, spare, before.demand)
    if not batch.improve():
        return None
    again = _placed_again(policy, batch)
    return None if again is None else [*kept, *again]


def _spare(fleet: Fleet, used: Collection[str]) -> list[GpuView]:
    """Return a few of the GPUs that are empty and stay so."""
    empty = np.flatnonzero((fleet.crowd == 0) & fleet.schedulable)[: SPARE_GPUS + len(used)].tolist()
    return [fleet[place] for place in empty if fleet[place].gpu_id not in used][:SPARE_GPUS]


def _spare_processors(
    fleet: Fleet, gpus: Sequence[GpuView], placed: Sequence[tuple[Request, Placement]]
) -> dict[str, int]:
    """Return the processors the hosts of these GPUs have left, in thousandths, once these jobs are placed."""
    there = fleet.spare()
    spare = {gpu.host_id: int(there[fleet.number_of(gpu.host_id)]) for gpu in gpus}
    for request, placement in placed:
        for share in placement.shares:
            host_id = fleet[fleet.position(share.gpu_id)].host_id
            if host_id in spare:
                spare[host_id] -= thousandths(request.cpus)
    return spare


def _movable(request: Request, settings: PlacementSettings) -> bool:
    """Whether a job may share, and enough is known of it to say with whom."""
    profile = with_hinted_profile(request).profile
    known = profile.source != "unknown" and (profile.source != "history" or profile.observed_s >= settings.profile_s)
    return request.gpus == 1 and not request.exclusive and known


def _placed_again(policy: PlacementPolicy, batch: Batch) -> list[tuple[Request, Placement]] | None:
    """Place every job on the GPU the batch found for it; None when the policy does not agree."""
    found: list[tuple[Request, Placement]] = []
    for gpu, crew in zip(batch.gpus, batch.crews, strict=True):
        statement = Statement([gpu])
        for number in sorted(crew):
            request = batch.jobs[number]
            answer = policy.place(request, statement.fleet, batch.predictor, batch.settings, len(batch.jobs))
            if isinstance(answer, NoFit):
                return None
            statement.place(request, answer)
            found.append((request, answer))
    return found


_Change = Mapping[int, Crew]
"""New crews of one or two or three GPUs."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Who is where while one change is looked for.

    Attributes:
        waiting: Numbers of the jobs that wait, in order of the queue.
        placed: Numbers of the others.
        at: The GPU of each of these.
        to: The GPUs to go to, of empty ones of the same kind only the first.
    """

    waiting: Integers
    placed: Integers
    at: Integers
    to: Integers


@dataclass(slots=True)
class Batch:
    """Jobs of one GPU each, and the GPUs they may change places on.

    Attributes:
        jobs: The jobs, in order of the queue.
        gpus: The GPUs without these jobs.
        crews: Which of the jobs are on each GPU, by their numbers.
        waiting: Numbers of those that have no place, in order of the queue.
        spare: By host, the processors for these jobs, in thousandths; empty when none of them asks for any.
        demand: What jobs typically ask for: then what is left to them counts instead of the saving; None = not known.
    """

    jobs: Sequence[Request]
    gpus: Sequence[GpuView]
    crews: list[Crew]
    waiting: list[int]
    predictor: InterferencePredictor
    settings: PlacementSettings
    spare: Mapping[str, int] = field(default_factory=dict)
    demand: Demand | None = None
    _worths: Worths = field(init=False)
    _weighed: set[int] = field(init=False, default_factory=set)  # GPUs for which the arrays below say what is
    _now: Floats = field(init=False)  # what the crew of each GPU is worth
    _with: Floats = field(init=False)  # the same with one job more, shape (GPUs, jobs)
    _without: Floats = field(init=False)  # what the GPU of each job is worth without it
    _instead: Floats = field(init=False)  # the same with another job in its place, shape (jobs, jobs)

    def __post_init__(self) -> None:
        """Nothing is weighed yet."""
        self._worths = Worths(self.jobs, self.gpus, self.predictor, self.settings, self.demand)
        gpus, jobs = len(self.gpus), len(self.jobs)
        self._now, self._with = np.zeros(gpus), np.zeros((gpus, jobs))
        self._without, self._instead = np.zeros(jobs), np.zeros((jobs, jobs))

    def improve(self) -> bool:
        """Make the best change while there is one; return whether anything changed."""
        changed = False
        for _ in range(MOST_CHANGES):
            now = self._round()
            self._weigh(now.to.tolist())
            change = self._best(now) or self._chain(now)
            if change is None:
                break
            for gpu, crew in change.items():
                self.crews[gpu] = crew
            self._weighed -= change.keys()
            placed = frozenset[int]().union(*self.crews)
            self.waiting = [job for job in self.waiting if job not in placed]
            changed = True
        return changed

    def _round(self) -> _Round:
        where = {job: gpu for gpu, crew in enumerate(self.crews) for job in crew}
        numbers = (self.waiting, list(where), list(where.values()), list(self._different()))
        return _Round(*(np.array(each, dtype=np.int64) for each in numbers))

    def _different(self) -> Iterator[int]:
        """Yield the GPUs, of empty ones of the same kind only the first."""
        seen: set[tuple[str, int, str]] = set()
        for number, (gpu, crew) in enumerate(zip(self.gpus, self.crews, strict=True)):
            if not gpu.residents and not crew:
                kind = (gpu.gpu_type, gpu.memory_bytes, gpu.host_id if self.spare else "")
                if kind in seen:
                    continue
                seen.add(kind)
            yield number

    def _weigh(self, gpus: Sequence[int]) -> None:
        """Find out what crews are worth on these GPUs: those of now, and such that differ by one job."""
        others = {
            gpu: [job for job in range(len(self.jobs)) if job not in self.crews[gpu]]
            for gpu in gpus
            if gpu not in self._weighed
        }
        keys = {gpu: list(self._near(gpu, them)) for gpu, them in others.items()}
        worth = iter(self._worths.of(key for each in keys.values() for key in each))
        for gpu, them in others.items():
            mine = list(self._leavers(gpu))
            table = np.fromiter(islice(worth, len(keys[gpu])), np.float64).reshape(1 + len(mine), 1 + len(them))
            self._now[gpu], self._without[mine] = table[0, 0], table[1:, 0]
            self._with[gpu, them], self._instead[np.ix_(mine, them)] = table[0, 1:], table[1:, 1:]
        self._weighed.update(others)

    def _near(self, gpu: int, others: Sequence[int]) -> Iterator[Key]:
        """Yield the crew of a GPU and the crews without one of it, each alone and then with each of the other jobs."""
        crew = self.crews[gpu]
        for stays in (crew, *(crew - {job} for job in self._leavers(gpu))):
            yield gpu, stays
            for job in others:
                yield gpu, stays | {job}

    def _leavers(self, gpu: int) -> Crew:
        """Return the jobs on a GPU that may go to another: none where that is the only one."""
        return self.crews[gpu] if len(self.gpus) > 1 else frozenset()

    # -- changes of one or two GPUs ---------------------------------------------------------------------------------

    def _best(self, now: _Round) -> _Change | None:
        """Return the change by which most is gained, the first of several; None when nothing is gained."""
        gains = self._gains(now)
        while len(gains) and gains[best := int(gains.argmax())] > TOLERANCE:
            change = self._change(now, best)
            if self._has_processors(change):
                return change
            gains[best] = -math.inf
        return None

    def _gains(self, now: _Round) -> Floats:
        """Return what changes gain, in the order of ``_change``; minus infinity where they are not possible."""
        waiting, placed, at, to = now.waiting, now.placed, now.at, now.to
        bonus = PLACING_IS_WORTH * (1.0 - 0.01 * np.arange(len(waiting)))
        here, there, elsewhere = self._now[at][:, None], self._now[to], at[:, None] != to
        arrives = self._with[to][:, placed].T
        joins = _gain(self._with[to][:, waiting].T, there, np.asarray(bonus[:, None]))
        leaves = self._instead[placed][:, waiting].T[:, :, None]
        makes_way = _gain(leaves + arrives, here + there, np.asarray(bonus[:, None, None]), elsewhere)
        moves = _gain(self._without[placed][:, None] + arrives, here + there, 0.0, elsewhere & ~self._idles(now))
        swapped = self._instead[placed][:, placed]
        swaps = _gain(swapped + swapped.T, here + here.T, 0.0, (placed[:, None] < placed) & (at[:, None] != at))
        of_waiting = np.hstack([joins, makes_way.reshape(len(waiting), len(placed) * len(to))])
        return np.concatenate([of_waiting.ravel(), np.hstack([moves, swaps]).ravel()])

    def _idles(self, now: _Round) -> Flags:
        """Return whether a job that goes to a GPU with others leaves an idle one, though nobody waits.

        Such a GPU serves nobody, and being alone is protection that costs nothing.
        """
        if len(now.waiting) or self.settings.packing_bias >= 1.0:
            return np.zeros((len(now.at), len(now.to)), dtype=np.bool_)
        residents = np.array([bool(gpu.residents) for gpu in self.gpus])
        crews = np.array([len(crew) for crew in self.crews])
        last = (crews[now.at] == 1) & ~residents[now.at]
        used = (crews[now.to] > 0) | residents[now.to]
        return np.asarray(last[:, None] & used)

    def _change(self, now: _Round, number: int) -> _Change:
        """Return a change by its number.

        For every job that waits: it goes to a GPU; it takes the place of another, which goes to a GPU. Then for every
        job with a place: it goes to another GPU; it changes places with another job.
        """
        crews, placed, at, to = self.crews, now.placed.tolist(), now.at.tolist(), now.to.tolist()
        turn, which = divmod(number, len(to) * (1 + len(placed)))
        if turn < len(now.waiting):
            job = int(now.waiting[turn])
            other, goes = divmod(which, len(to))
            if other == 0:
                return {to[goes]: crews[to[goes]] | {job}}
            gpu, leaves = at[other - 1], placed[other - 1]
            return {gpu: crews[gpu] - {leaves} | {job}, to[goes]: crews[to[goes]] | {leaves}}
        number -= len(now.waiting) * len(to) * (1 + len(placed))
        one, which = divmod(number, len(to) + len(placed))
        gpu, job = at[one], placed[one]
        if which < len(to):
            return {gpu: crews[gpu] - {job}, to[which]: crews[to[which]] | {job}}
        near, other = at[which - len(to)], placed[which - len(to)]
        return {gpu: crews[gpu] - {job} | {other}, near: crews[near] - {other} | {job}}

    # -- changes of three GPUs --------------------------------------------------------------------------------------

    def _chain(self, now: _Round) -> _Change | None:
        """Return how a job that waits can be placed when two others make room one after the other; None when not.

        The job takes the place of one, that one the place of a second, and the second goes to a third GPU.
        """
        placed, at, to = now.placed, now.at, now.to
        here, there, elsewhere = self._now[at], self._now[to], at[:, None] != to
        apart = (at[:, None] != at)[:, :, None] & elsewhere[:, None, :] & elsewhere
        follows, arrives = self._instead[placed][:, placed].T[:, :, None], self._with[to][:, placed].T
        before = here[:, None, None] + here[:, None] + there
        for job in now.waiting.tolist():
            rough = _gain(
                self._instead[placed, job][:, None, None] + follows + arrives, before, PLACING_IS_WORTH, apart
            )
            change = self._best_chain(now, job, rough)
            if change is not None:
                return change
        return None

    def _best_chain(self, now: _Round, job: int, rough: Floats) -> _Change | None:
        """Return the best chain for a job, the first of several.

        Args:
            now: Who is where.
            job: The job.
            rough: What is gained but for rounding errors, by who leaves first, who second, and where that one goes.
        """
        if self.spare:
            for chain in np.argwhere(rough > -np.inf).tolist():
                if not self._has_processors(self._chained(now, job, chain)):
                    rough[tuple(chain)] = -np.inf
        most = rough.max(initial=-np.inf)
        if most == -np.inf:
            return None
        near = np.argwhere(rough >= most - TOLERANCE).tolist()
        gains = [self._chain_gains(now, job, chain) for chain in near]
        best = gains.index(max(gains))
        return self._chained(now, job, near[best]) if gains[best] > TOLERANCE else None

    def _chain_gains(self, now: _Round, job: int, chain: Sequence[int]) -> float:
        first, second = now.placed[chain[0]], now.placed[chain[1]]
        a, b, c = now.at[chain[0]], now.at[chain[1]], now.to[chain[2]]
        then = math.fsum([self._instead[first, job], self._instead[second, first], self._with[c, second]])
        return PLACING_IS_WORTH + then - math.fsum([self._now[a], self._now[b], self._now[c]])

    def _chained(self, now: _Round, job: int, chain: Sequence[int]) -> _Change:
        crews, first, second = self.crews, int(now.placed[chain[0]]), int(now.placed[chain[1]])
        a, b, c = int(now.at[chain[0]]), int(now.at[chain[1]]), int(now.to[chain[2]])
        return {a: crews[a] - {first} | {job}, b: crews[b] - {second} | {first}, c: crews[c] | {second}}

    def _has_processors(self, crews: _Change) -> bool:
        """Whether the hosts have processors for everybody when these GPUs have these crews."""
        if not self.spare:
            return True
        left = {host_id: self.spare[host_id] for host_id in {self.gpus[number].host_id for number in crews}}
        for number, (gpu, crew) in enumerate(zip(self.gpus, self.crews, strict=True)):
            if gpu.host_id in left:
                left[gpu.host_id] -= sum(thousandths(self.jobs[job].cpus) for job in crews.get(number, crew))
        return min(left.values()) >= 0


def _gain(then: Floats, now: Floats, bonus: Floats | float = 0.0, may: Flags | None = None) -> Floats:
    """Return what changes gain with this bonus; minus infinity where they are not possible, or may not be."""
    possible = then > -np.inf if may is None else may & (then > -np.inf)
    return np.where(possible, bonus + np.where(possible, then, 0.0) - now, -np.inf)
