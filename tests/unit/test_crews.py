"""What a batch weighs in arrays is what one weighs crew by crew, and it makes the same changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from packing import GIB, request, resident
from packing import gpu as made_gpu

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.placement.batch import MOST_CHANGES, PLACING_IS_WORTH, Batch
from cotenant.placement.constraints import basic_error, with_hinted_profile
from cotenant.placement.crews import Crew, Worths
from cotenant.placement.fleet import Fleet
from cotenant.placement.guarantees import bounded_on
from cotenant.placement.mix import Demand, Kind, Mix
from cotenant.placement.objective import cautious, packing_saving, score, slowness
from cotenant.placement.room import free_parts
from cotenant.placement.shares import TOLERANCE, floor_of, memory_need, thousandths
from cotenant.placement.statement import resident_of
from cotenant.placement.types import GpuView, Request, Resident, Share

RULE = UtilisationRule()


@dataclass(frozen=True, slots=True)
class _Change:
    """New crews of one or two or three GPUs; ``bonus`` counts for a job that gets a place."""

    crews: Mapping[int, Crew]
    bonus: float = 0.0


@dataclass(slots=True)
class Plain:
    """``Batch`` in plain words: one change after the other, one crew after the other."""

    jobs: Sequence[Request]
    gpus: Sequence[GpuView]
    crews: list[Crew]
    waiting: list[int]
    predictor: InterferencePredictor
    settings: PlacementSettings
    spare: Mapping[str, int] = field(default_factory=dict)
    demand: Demand | None = None
    worth: dict[tuple[int, Crew], float] = field(default_factory=dict)

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
                if self.worth.get((a, crew_a), -math.inf) == -math.inf:
                    continue
                for second, b in where.items():
                    crew_b = self.crews[b] - {second} | {first}
                    if a == b or self.worth.get((b, crew_b), -math.inf) == -math.inf:
                        continue
                    for c in different:
                        if c in {a, b} or (c, self.crews[c] | {second}) not in self.worth:
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
        then = math.fsum(self.worth[gpu, crew] for gpu, crew in change.crews.items())
        if then == -math.inf or not self._has_processors(change.crews):
            return -math.inf
        now = math.fsum(self.worth[gpu, self.crews[gpu]] for gpu in change.crews)
        return change.bonus + then - now

    def _has_processors(self, crews: Mapping[int, Crew]) -> bool:
        """Whether the hosts have processors for everybody when these GPUs have these crews."""
        if not self.spare:
            return True
        left = {host_id: self.spare[host_id] for host_id in {self.gpus[number].host_id for number in crews}}
        for number, (gpu, crew) in enumerate(zip(self.gpus, self.crews, strict=True)):
            if gpu.host_id in left:
                left[gpu.host_id] -= sum(thousandths(self.jobs[job].cpus) for job in crews.get(number, crew))
        return min(left.values()) >= 0

    def _weigh(self, wanted: set[tuple[int, Crew]]) -> None:
        """Find out what these crews are worth on these GPUs: the score, or minus infinity where they may not be."""
        asked = sorted(
            (key for key in wanted | set(enumerate(self.crews)) if key not in self.worth),
            key=lambda key: (key[0], sorted(key[1])),
        )
        members = {key: self._members(*key) for key in asked}
        possible = [key for key in asked if members[key] is not None]
        sets = [(self.gpus[key[0]].gpu_type, [each.profile for each in members[key] or ()]) for key in possible]
        self.worth.update(dict.fromkeys(asked, -math.inf))
        for key, predicted in zip(possible, predict_sets(self.predictor, sets), strict=True):
            together = members[key] or ()
            said = bounded_on(predicted, together)
            self.worth[key] = self._score(self.gpus[key[0]], together, said, key[1])

    def _members(self, number: int, crew: Crew) -> tuple[Resident, ...] | None:
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
        self, gpu: GpuView, members: Sequence[Resident], predicted: Sequence[ThroughputPrediction], crew: Crew
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


@st.composite
def _jobs(draw: st.DrawFn, most: int) -> list[Request]:
    """Jobs of few kinds, so that some are alike."""
    labels, found = st.sampled_from([frozenset[str](), frozenset({"a"})]), list[Request]()
    for number in range(draw(st.integers(1, most))):
        util, limit = draw(st.sampled_from([0.1, 0.37, 0.6, 0.9])), draw(st.sampled_from([1.05, 1.3, 3.0]))
        compute, memory = draw(st.sampled_from([None, None, 0.2, 0.5])), draw(st.sampled_from([GIB, 6 * GIB]))
        job = request(f"j{number}", util, compute=compute, memory=memory, max_slowdown=limit)
        found.append(
            replace(
                job,
                weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
                labels=draw(labels),
                anti_affinity=draw(st.just(frozenset[str]()) | labels),
                shares_instance=draw(st.booleans()),
                cpus=draw(st.sampled_from([0.0, 1.0, 2.5])),
            )
        )
    return found


@st.composite
def _gpus(draw: st.DrawFn) -> list[GpuView]:
    found = list[GpuView]()
    for number in range(draw(st.integers(1, 5))):
        utils = draw(st.lists(st.sampled_from([0.2, 0.45]), max_size=2))
        kept = draw(st.sampled_from([0.0, 0.3]))
        residents = [
            resident(f"r{number}-{k}", util, min_compute=kept, max_slowdown=draw(st.sampled_from([1.2, 3.0])))
            for k, util in enumerate(utils)
        ]
        one = made_gpu(
            f"{draw(st.sampled_from(['', '', 'MIG-']))}g{number}",
            *residents,
            host=draw(st.sampled_from("ab")),
            memory=draw(st.sampled_from([8, 16])) * GIB,
            schedulable=draw(st.sampled_from([True, True, True, False])),
        )
        found.append(replace(one, gpu_type=draw(st.sampled_from(["slow", "fast"]))))
    return found


@st.composite
def _packings(draw: st.DrawFn) -> PlacementSettings:
    return PlacementSettings(
        max_jobs_per_gpu=draw(st.integers(1, 4)),
        packing_bias=draw(st.sampled_from([0.3, 0.5, 1.0])),
        confidence=draw(st.sampled_from([0.5, 0.9])),
        speeds=draw(st.sampled_from([{}, {"fast": 2.0, "slow": 1.0}])),
    )


_DEMAND = Mix()
for _part in (50, 50, 25):
    _DEMAND.note(Kind(1, _part, 0))


def _same(batch: Batch, plain: Plain) -> bool:
    """Whether both end up with the same crews, and find the same crews worth the same."""
    changed = plain.improve()
    assert batch.improve() == changed
    assert (batch.crews, batch.waiting) == (plain.crews, plain.waiting)
    worths = Worths(plain.jobs, plain.gpus, RULE, plain.settings, plain.demand)
    assert worths.of(plain.worth) == list(plain.worth.values())
    return changed


@settings(deadline=None)
@given(_jobs(most=7), _gpus(), _packings(), st.data())
def test_changes_in_arrays_are_those_made_one_by_one(
    jobs: list[Request], gpus: list[GpuView], packing: PlacementSettings, data: st.DataObject
) -> None:
    at = [data.draw(st.integers(-1, len(gpus) - 1)) for _ in jobs]
    crews = [frozenset(job for job, where in enumerate(at) if where == number) for number in range(len(gpus))]
    waiting = [job for job, where in enumerate(at) if where < 0]
    spare = data.draw(st.sampled_from([{}, {"a": 4000, "b": 9000}, {"a": 2000, "b": 4000}]))
    demand = data.draw(st.sampled_from([None, _DEMAND.demand()]))
    batch, plain = (
        kind(jobs, gpus, list(crews), list(waiting), RULE, packing, spare, demand) for kind in (Batch, Plain)
    )
    _same(batch, plain)


@settings(deadline=None, max_examples=200)
@given(st.permutations([16, 12, 8, 4]), st.lists(st.sampled_from([14, 10, 6, 3]), min_size=1, max_size=3), st.data())
def test_chains_in_arrays_are_those_made_one_by_one(sizes: list[int], waiting: list[int], data: st.DataObject) -> None:
    """One job on each GPU but the last, and others wait: what has the room must be left to those that need it."""
    held = [data.draw(st.sampled_from([need for need in (3, 6, 10, 14) if need <= size])) for size in sizes[:-1]]
    jobs = [
        request(f"j{number}", 0.1 + 0.02 * number, memory=need * GIB, cpus=1.0)
        for number, need in enumerate([*held, *waiting])
    ]
    gpus = [made_gpu(f"g{number}", memory=size * GIB, host="ab"[number % 2]) for number, size in enumerate(sizes)]
    crews = [*(frozenset({number}) for number in range(len(held))), frozenset[int]()]
    spare = data.draw(st.sampled_from([{}, {"a": 3000, "b": 1000}, {"a": 2000, "b": 3000}]))
    late = list(range(len(held), len(jobs)))
    packing = PlacementSettings(max_jobs_per_gpu=1)
    batch, plain = (kind(jobs, gpus, list(crews), late, RULE, packing, spare, None) for kind in (Batch, Plain))
    _same(batch, plain)


def test_two_make_room_one_after_the_other() -> None:
    jobs = [request(f"j{number}", memory=need * GIB) for number, need in enumerate((6, 3, 12))]
    gpus = [made_gpu(f"g{number}", memory=size * GIB) for number, size in enumerate((16, 8, 4))]
    crews, packing = [frozenset({0}), frozenset({1}), frozenset[int]()], PlacementSettings(max_jobs_per_gpu=1)
    batch, plain = (kind(jobs, gpus, list(crews), [2], RULE, packing) for kind in (Batch, Plain))
    assert _same(batch, plain)
    assert batch.crews == [{2}, {0}, {1}]
