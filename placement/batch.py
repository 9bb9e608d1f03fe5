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

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.placement.constraints import basic_error, with_hinted_profile
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.fleet import Fleet
from cotenant.placement.guarantees import bounded_on
from cotenant.placement.mix import Demand
from cotenant.placement.objective import cautious, packing_saving, score, slowness
from cotenant.placement.room import free_parts
from cotenant.placement.shares import TOLERANCE, floor_of, memory_need, thousandths
from cotenant.placement.statement import Statement, resident_of
from cotenant.placement.types import GpuView, NoFit, Placement, Request, Resident, Share

MOST_JOBS = 24  # of a batch that change places: the work grows with their square
MOST_CHANGES = 48
PLACING_IS_WORTH = 10.0  # more than any change of a score: who can be placed is placed

MOST_WAITING = 8  # jobs without a place that are tried
SPARE_GPUS = 4  # empty GPUs that jobs may move to

_Crew = frozenset[int]


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


@dataclass(frozen=True, slots=True)
class _Change:
    """New crews of one or two or three GPUs; ``bonus`` counts for a job that gets a place."""

    crews: Mapping[int, _Crew]
    bonus: float = 0.0


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
    crews: list[_Crew]
    waiting: list[int]
    predictor: InterferencePredictor
    settings: PlacementSettings
    spare: Mapping[str, int] = field(default_factory=dict)
    demand: Demand | None = None
    _worth: dict[tuple[int, _Crew], float] = field(default_factory=dict)

    def improve(self) -> bool:
        """Make the best change while there is one; return whether anything changed."""
        changed = False
        for _ in range(MOST_CHANGES):
            changes = list(self._changes())
            self._weigh({(gpu, crew) for change in changes for gpu, crew in change.crews.items()})
            gains = [self._gain(change) for change in changes]
            best = max(range(len(changes)), key=lambda i: (gains[i], -i), default=None)
            change = changes[best] if best is not None and gains[best] > TOLERANCE else self._chain()
            if change is None:
                break
            for gpu, crew in change.crews.items():
                self.crews[gpu] = crew
            placed = frozenset[int]().union(*self.crews)
            self.waiting = [job for job in self.waiting if job not in placed]
            changed = True
        return changed

    def _changes(self) -> Iterator[_Change]:
        """Yield every change that may be an improvement; which are possible turns out when they are weighed."""
        where = {job: gpu for gpu, crew in enumerate(self.crews) for job in crew}
        different = list(self._different())
        for turn, job in enumerate(self.waiting):
            bonus = PLACING_IS_WORTH * (1.0 - 0.01 * turn)
            for gpu in different:
                yield _Change({gpu: self.crews[gpu] | {job}}, bonus)
            for other, gpu in where.items():
                left = self.crews[gpu] - {other} | {job}
                for to in different:
                    if to != gpu:
                        yield _Change({gpu: left, to: self.crews[to] | {other}}, bonus)
        for job, gpu in where.items():
            last = len(self.crews[gpu]) == 1 and not self.gpus[gpu].residents
            for to in different:
                # Nobody waits: a GPU that falls idle serves nobody, and being alone is protection that costs nothing.
                idles = last and not self.waiting and bool(self.crews[to] or self.gpus[to].residents)
                if to != gpu and not (idles and self.settings.packing_bias < 1.0):
                    yield _Change({gpu: self.crews[gpu] - {job}, to: self.crews[to] | {job}})
            for other, to in where.items():
                if job < other and gpu != to:
                    yield _Change({gpu: self.crews[gpu] - {job} | {other}, to: self.crews[to] - {other} | {job}})

    def _chain(self) -> _Change | None:
        """Return how a job that waits can be placed when two others make room one after the other; None when not.

        The job takes the place of one, that one the place of a second, and the second goes to a third GPU. Only crews
        that were weighed already are made up.
        """
        where = {job: gpu for gpu, crew in enumerate(self.crews) for job in crew}
        different = list(self._different())
        best: tuple[float, _Change] | None = None
        for job in self.waiting:
            for first, a in where.items():
                crew_a = self.crews[a] - {first} | {job}
                if self._worth.get((a, crew_a), -math.inf) == -math.inf:
                    continue
                for second, b in where.items():
                    crew_b = self.crews[b] - {second} | {first}
                    if a == b or self._worth.get((b, crew_b), -math.inf) == -math.inf:
                        continue
                    for c in different:
                        if c in {a, b} or (c, self.crews[c] | {second}) not in self._worth:
                            continue
                        change = _Change({a: crew_a, b: crew_b, c: self.crews[c] | {second}}, PLACING_IS_WORTH)
                        gain = self._gain(change)
                        if gain > TOLERANCE and (best is None or gain > best[0]):
                            best = gain, change
            if best is not None:
                return best[1]
        return None

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

    def _gain(self, change: _Change) -> float:
        then = math.fsum(self._worth[gpu, crew] for gpu, crew in change.crews.items())
        if then == -math.inf or not self._has_processors(change.crews):
            return -math.inf
        now = math.fsum(self._worth[gpu, self.crews[gpu]] for gpu in change.crews)
        return change.bonus + then - now

    def _has_processors(self, crews: Mapping[int, _Crew]) -> bool:
        """Whether the hosts have processors for everybody when these GPUs have these crews."""
        if not self.spare:
            return True
        left = {host_id: self.spare[host_id] for host_id in {self.gpus[number].host_id for number in crews}}
        for number, (gpu, crew) in enumerate(zip(self.gpus, self.crews, strict=True)):
            if gpu.host_id in left:
                left[gpu.host_id] -= sum(thousandths(self.jobs[job].cpus) for job in crews.get(number, crew))
        return min(left.values()) >= 0

    def _weigh(self, wanted: set[tuple[int, _Crew]]) -> None:
        """Find out what these crews are worth on these GPUs: the score, or minus infinity where they may not be."""
        asked = sorted(
            (key for key in wanted | set(enumerate(self.crews)) if key not in self._worth),
            key=lambda key: (key[0], sorted(key[1])),
        )
        members = {key: self._members(*key) for key in asked}
        possible = [key for key in asked if members[key] is not None]
        sets = [(self.gpus[key[0]].gpu_type, [each.profile for each in members[key] or ()]) for key in possible]
        self._worth.update(dict.fromkeys(asked, -math.inf))
        for key, predicted in zip(possible, predict_sets(self.predictor, sets), strict=True):
            together = members[key] or ()
            said = bounded_on(predicted, together)
            self._worth[key] = self._score(self.gpus[key[0]], together, said, key[1])

    def _members(self, number: int, crew: _Crew) -> tuple[Resident, ...] | None:
        """Return everybody on the GPU with this crew; None when anything but the interference forbids it."""
        gpu = self.gpus[number]
        for job in sorted(crew):
            request = self.jobs[job]
            need = memory_need(request, gpu, self.settings.memory_margin)
            if basic_error(request, gpu, need) is not None:
                return None
            newcomer = resident_of(with_hinted_profile(request), Share(gpu.gpu_id, need, 0.0), gpu.gpu_type)
            gpu = gpu.carrying((*gpu.residents, newcomer))
        promised = math.fsum(floor_of(resident.min_compute) for resident in gpu.residents)
        crowded = len(gpu.residents) > self.settings.max_jobs_per_gpu or promised > 1.0 + TOLERANCE
        return None if crew and len(gpu.residents) > 1 and crowded else gpu.residents

    def _score(
        self, gpu: GpuView, members: Sequence[Resident], predicted: Sequence[ThroughputPrediction], crew: _Crew
    ) -> float:
        throughputs = [prediction.mid for prediction in predicted]
        if crew and len(members) > 1:
            limits = zip(members, predicted, strict=True)
            confidence = self.settings.confidence
            if any(1.0 / cautious(each, confidence) > member.max_slowdown + TOLERANCE for member, each in limits):
                return -math.inf
            if packing_saving(throughputs) <= 0.0:
                return -math.inf
        bias = self.settings.packing_bias
        slower = math.fsum(slowness(gpu.gpu_type, self.jobs[job], self.settings) - 1.0 for job in crew)
        found = score(throughputs, bias, [member.weight for member in members]) - (1.0 - bias) * slower
        if self.demand is None:
            return found
        left = free_parts(Fleet([gpu.carrying(tuple(members))]))[0]
        return found + bias * (float(self.demand.worth[left]) - packing_saving(throughputs))
