"""Which visits a run makes, in which order: any prefix of the list tells as much as its time allows.

Pure: no clock, no files, no chance. Every workload alone comes first, since nothing can be compared without it. Then
come pairs, ordered by a greedy choice: each workload first meets a light, a medium and a heavy partner, then pairs of
families that have not met, and among equals the pair that adds most to the information matrix of a regression on both
members' utilisation alone (D-optimality). Other modes, sets of three and repetitions follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from benchmarks.colocation.records import SOLO_WINDOWS

UNKNOWN_UTILISATION = 0.5
LEAST_SUBSET = 6  # pairs measured in a mode other than the first, at least
_RIDGE = 1e-3  # keeps the information matrix invertible before it has full rank

Stage = Literal["alone", "pairs", "other modes", "threes", "again"]
Shares = tuple[float, ...]
ProcessKey = tuple[str, int, str, float | None]  # workload, instance, mode, share that is fixed at its start


@dataclass(frozen=True, slots=True)
class Visit:
    """One set of workloads in one mode on one occasion.

    Attributes:
        mode: The sharing mode.
        members: Names of the workloads; one may be there more than once.
        shares: A share per member in (0, 1], or None where nothing is capped.
        occasion: Which repetition this is, from 1.
        stage: The part of the plan it belongs to.
    """

    mode: str
    members: tuple[str, ...]
    shares: Shares | None
    occasion: int
    stage: Stage

    @property
    def name(self) -> str:
        """For example ``"timeslice/a+b#1"`` or, with shares, ``"mps_cap:70-30/a+b#1"``."""
        shares = "" if self.shares is None else ":" + "-".join(f"{100 * share:.0f}" for share in self.shares)
        return f"{self.mode}{shares}/{'+'.join(self.members)}#{self.occasion}"

    @property
    def windows(self) -> int:
        """How many windows it takes: three alone; for a set twice (each member alone, then all together)."""
        return SOLO_WINDOWS if len(self.members) == 1 else 2 * (len(self.members) + 1)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the order of the visits depends on.

    Attributes:
        family: The workload's family.
        utilisation: Its utilisation alone, a fraction; None before it is measured.
    """

    family: str
    utilisation: float | None = None


@dataclass(frozen=True, slots=True)
class ModeShares:
    """A sharing mode.

    Attributes:
        name: Its name.
        shares: The shares that a pair is measured with; ``(None,)`` where nothing is capped.
        restarts: Whether a process with a share must be started with it.
    """

    name: str
    shares: tuple[Shares | None, ...] = (None,)
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take, in seconds; ``parallel`` processes start at a time."""

    window_s: float = 3.0
    settle_s: float = 0.5
    gap_s: float = 0.1
    extras_s: float = 3.0
    start_s: float = 6.0
    parallel: int = 2

    def visit_s(self, visit: Visit) -> float:
        """Length of a visit whose processes are warm."""
        extras_s = self.extras_s if len(visit.members) == 1 else 0.0
        return visit.windows * (self.window_s + self.settle_s + self.gap_s) + extras_s


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan depends on.

    Attributes:
        workloads: The workloads by name.
        modes: The sharing modes; the first is the one in which every pair is measured.
        budget_s: Seconds that may be used; None: as many as it takes.
        matrix_only: Whether to end when every workload and every pair has been measured in the first mode.
        timing: How long things take.
        occasion: The number of this repetition, from 1.
        done: Names of visits that need not be made.
        widths: Width of the measured interval of a pair's saving, by the pair's sorted names.
        warm: Processes that run already.
    """

    workloads: Mapping[str, Traits]
    modes: Sequence[ModeShares]
    budget_s: float | None
    matrix_only: bool = False
    timing: Timing = field(default_factory=Timing)
    occasion: int = 1
    done: frozenset[str] = frozenset()
    widths: Mapping[tuple[str, str], float] = field(default_factory=dict)
    warm: frozenset[ProcessKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done.

    Attributes:
        visits: The visits, in order.
        seconds: How long they take.
        left_out: How many more visits would be made with more time.
        all_seconds: How long everything would take.
    """

    visits: tuple[Visit, ...]
    seconds: float
    left_out: int
    all_seconds: float


class BudgetTooSmall(ValueError):
    """Not even the first visit fits into ``budget_s``; ``needed_s`` is the least that would do."""

    def __init__(self, budget_s: float, needed_s: float) -> None:
        super().__init__(f"{budget_s:.0f} s are left and the next visit takes {needed_s:.0f} s")
        self.budget_s = budget_s
        self.needed_s = needed_s


def make_plan(request: Request) -> Plan:
    """Order the visits that are still to be made and cut them at the time budget.

    Raises:
        BudgetTooSmall: There is something to do, and not even the first visit fits.
    """
    todo = [visit for visit in all_visits(request) if visit.name not in request.done]
    if request.matrix_only:
        todo = [visit for visit in todo if visit.stage in ("alone", "pairs")]
    running = set(request.warm)
    visits: list[Visit] = []
    seconds = all_seconds = 0.0
    for number, visit in enumerate(todo):
        fresh = processes_of(visit, request.modes) - running
        running |= fresh
        all_seconds += request.timing.visit_s(visit) + len(fresh) * request.timing.start_s / request.timing.parallel
        if request.budget_s is not None and all_seconds > request.budget_s:
            if number == 0:
                raise BudgetTooSmall(request.budget_s, all_seconds)
            continue
        visits.append(visit)
        seconds = all_seconds
    return Plan(tuple(visits), seconds, len(todo) - len(visits), all_seconds)


def all_visits(request: Request) -> Iterator[Visit]:
    """Every visit worth making, most informative first; what is done already included."""
    names = sorted(request.workloads)
    base, *others = request.modes
    occasion = request.occasion
    pairs = pair_order(request.workloads)
    for name in names:
        yield Visit(base.name, (name,), None, occasion, "alone")
    for pair, shares in _with_shares(pairs, base.shares):
        yield Visit(base.name, pair, shares, occasion, "pairs")
    subset = pairs[: max(LEAST_SUBSET, len(names))]
    for mode in others:
        for pair, shares in _with_shares(subset, mode.shares):
            yield Visit(mode.name, pair, shares, occasion, "other modes")
    if None in base.shares:
        for triple in triple_order(request.workloads, len(names) // 2):
            yield Visit(base.name, triple, None, occasion, "threes")
    widest = sorted(pairs, key=lambda pair: -request.widths.get(pair, 0.0))
    for pair, shares in _with_shares(widest, base.shares):
        yield Visit(base.name, pair, shares, occasion + 1, "again")


def pair_order(workloads: Mapping[str, Traits]) -> list[tuple[str, str]]:
    """Every unordered pair, a workload with itself included, the most informative first.

    As long as some workload has not met a partner of some weight, every pair chosen adds such a meeting; so all have
    met all three weights after at most three pairs per workload.
    """
    weight = weight_classes(workloads)
    left = list(itertools.combinations_with_replacement(sorted(workloads), 2))
    features = {pair: _features(workloads, pair) for pair in left}
    size = len(next(iter(features.values()), np.zeros(1)))
    inverse = np.eye(size) / _RIDGE
    met: set[tuple[str, int]] = set()
    families: set[tuple[str, str]] = set()
    uses = dict.fromkeys(workloads, 0)
    order: list[tuple[str, str]] = []
    while left:
        gains = np.log1p([features[pair] @ inverse @ features[pair] for pair in left])
        best = (-1.0, left[0])
        for pair, gain in zip(left, gains / gains.max(), strict=True):
            first, second = pair
            meetings = len({(first, weight[second]), (second, weight[first])} - met)
            new_families = _families(workloads, pair) not in families
            balance = 1.0 / (1.0 + uses[first] + uses[second])
            score = meetings + 0.4 * new_families + 0.3 * float(gain) + 0.2 * balance
            if score > best[0] + 1e-9:
                best = (score, pair)
        chosen = best[1]
        left.remove(chosen)
        order.append(chosen)
        met |= {(chosen[0], weight[chosen[1]]), (chosen[1], weight[chosen[0]])}
        families.add(_families(workloads, chosen))
        for name in chosen:
            uses[name] += 1
        # Sherman-Morrison: the inverse after adding the chosen pair's outer product.
        along = inverse @ features[chosen]
        inverse = inverse - np.outer(along, along) / (1.0 + features[chosen] @ along)
    return order


def weight_classes(workloads: Mapping[str, Traits]) -> dict[str, int]:
    """0 (light), 1 (medium) or 2 (heavy) for each workload: thirds by utilisation alone."""
    ranked = sorted(workloads, key=lambda name: (_utilisation(workloads[name]), name))
    return {name: 3 * rank // len(ranked) for rank, name in enumerate(ranked)}


def triple_order(workloads: Mapping[str, Traits], count: int) -> list[tuple[str, str, str]]:
    """Up to ``count`` sets of three different workloads whose summed utilisation covers the whole range evenly."""
    left = list(itertools.combinations(sorted(workloads), 3))
    sums = {triple: sum(_utilisation(workloads[name]) for name in triple) for triple in left}
    uses = dict.fromkeys(workloads, 0)
    order: list[tuple[str, str, str]] = []
    for number in range(min(count, len(left))):
        target = min(sums.values()) + _halving(number) * (max(sums.values()) - min(sums.values()))
        chosen = min(left, key=lambda triple: (abs(sums[triple] - target) + 0.2 * sum(uses[n] for n in triple), triple))
        left.remove(chosen)
        order.append(chosen)
        for name in chosen:
            uses[name] += 1
    return order


def processes_of(visit: Visit, modes: Sequence[ModeShares]) -> set[ProcessKey]:
    """The processes a visit needs: an uncapped one per member, and one with its share where the mode asks for that."""
    mode = next(mode for mode in modes if mode.name == visit.mode)
    keys: set[ProcessKey] = set()
    for slot, name in enumerate(visit.members):
        instance = visit.members[:slot].count(name)
        keys.add((name, instance, visit.mode, None))
        if mode.restarts and visit.shares is not None:
            keys.add((name, instance, visit.mode, visit.shares[slot]))
    return keys


def _with_shares(
    pairs: Sequence[tuple[str, str]], shares: Sequence[Shares | None]
) -> Iterator[tuple[tuple[str, str], Shares | None]]:
    """Each pair with each share: in the first round one share a pair, in turn, then the others."""
    for turn in range(len(shares)):
        for number, pair in enumerate(pairs):
            chosen = shares[(number + turn) % len(shares)]
            mirrored = chosen is not None and pair[0] == pair[1] and chosen[0] < chosen[-1]
            if not (mirrored and tuple(reversed(chosen or ())) in shares):
                yield pair, chosen


def _features(workloads: Mapping[str, Traits], pair: tuple[str, str]) -> np.ndarray:
    low, high = sorted(_utilisation(workloads[name]) for name in pair)
    return np.array([1.0, low, high, low * high, max(0.0, low + high - 1.0)])


def _families(workloads: Mapping[str, Traits], pair: tuple[str, str]) -> tuple[str, str]:
    first, second = sorted(workloads[name].family for name in pair)
    return first, second


def _utilisation(traits: Traits) -> float:
    return UNKNOWN_UTILISATION if traits.utilisation is None else traits.utilisation


def _halving(number: int) -> float:
    """0, 1, 1/2, 1/4, 3/4, 1/8 …: every prefix covers [0, 1] evenly."""
    if number < 2:
        return float(number)
    level = (number - 1).bit_length()
    return (2 * (number - 1 - (1 << (level - 1))) + 1) / (1 << level)
