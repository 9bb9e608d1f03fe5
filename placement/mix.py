"""What jobs typically ask for, learnt from those that came, and what it makes free parts of GPUs worth.

Kinds of jobs are counted, older ones less and less. What a job of a part of a GPU is worth, in GPUs, is its dual price
in the linear program of cutting stock (Gilmore and Gomory, "A linear programming approach to the cutting-stock
problem", Operations Research 1961): the fewest GPUs that take jobs as they typically come. A free part is worth what
the jobs are worth together that fit it best. So a job of 0.47 of a GPU costs half of one on an idle GPU, and no more
where 0.53 is left; where 0.6 is left, it costs what a better suited job would have been worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cotenant.placement.fleet import Floats, Integers

WHOLE = 100  # parts of a GPU are counted in hundredths
CPUS_STEP = 2000  # thousandths of a processor: kinds differ by no less
PART_STEP = 5  # hundredths of a GPU: those that placements look at differ by no less
MEMORY_OF = 2000  # jobs: one that came so many jobs ago counts 1/e
MOST_KINDS = 64  # that are counted
MOST_USED = 32  # that placements look at, the most common ones
PRICED_EVERY = 256  # jobs, and sooner at the start
_GROWTH = 1.0 / (1.0 - 1.0 / MEMORY_OF)
_TOO_LARGE = 1e100
_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs that ask for about the same.

    Attributes:
        gpus: GPUs, all on one host.
        part: Of each GPU, hundredths; several GPUs are whole ones.
        cpus: Processors of a host for each GPU, thousandths.
    """

    gpus: int
    part: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What is typically asked for, as placements use it.

    Attributes:
        gpus: GPUs of each kind of job, shape (kinds,).
        part: Part of a GPU of each, hundredths, rounded up to ``PART_STEP``.
        cpus: Processors for each GPU, thousandths.
        common: How common each is; they add up to at most 1.
        worth: What a part of a GPU is worth that is free, in GPUs, by hundredths, shape (101,).
    """

    gpus: Integers
    part: Integers
    cpus: Integers
    common: Floats
    worth: Floats


@dataclass(frozen=True, slots=True)
class Counts:
    """What is remembered of the jobs that came.

    Attributes:
        kinds: How often each kind came, older ones counting less.
        unit: What a job that comes now adds to that.
        jobs: Number of jobs that came.
        priced: How often parts of a GPU were asked for when they were priced last: hundredths, and counts.
    """

    kinds: tuple[tuple[Kind, float], ...] = ()
    unit: float = 1.0
    jobs: int = 0
    priced: tuple[tuple[int, float], ...] = ()


class Mix:
    """Learns from the jobs that come what is typically asked for.

    Args:
        counts: What was remembered earlier.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        counts = counts or Counts()
        self._kinds = dict(counts.kinds)
        self._unit, self._jobs, self._priced = counts.unit, counts.jobs, counts.priced
        self._worth = worth_of(dict(self._priced))
        self._demand: Demand | None = None

    def counts(self) -> Counts:
        """Return what is to be remembered."""
        return Counts(tuple(self._kinds.items()), self._unit, self._jobs, self._priced)

    @property
    def jobs(self) -> int:
        """Number of jobs that came."""
        return self._jobs

    def note(self, kind: Kind) -> None:
        """Count a job."""
        self._unit *= _GROWTH
        self._jobs += 1
        self._kinds[kind] = self._kinds.get(kind, 0.0) + self._unit
        if self._unit > _TOO_LARGE:
            self._kinds = {each: count / self._unit for each, count in self._kinds.items()}
            self._unit = 1.0
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[min((each for each in self._kinds if each != kind), key=self._kinds.__getitem__)]
        if self._jobs % PRICED_EVERY == 0 or self._jobs & (self._jobs - 1) == 0:  # at first at every power of two
            self._price()
        self._demand = None

    def demand(self) -> Demand | None:
        """Return what is typically asked for; None when nobody has asked for anything."""
        if self._demand is None and self._kinds:
            alike: dict[Kind, float] = {}
            for kind, count in self._kinds.items():
                coarse = replace(kind, part=-(-kind.part // PART_STEP) * PART_STEP)
                alike[coarse] = alike.get(coarse, 0.0) + count
            used = sorted(alike, key=lambda kind: -alike[kind])[:MOST_USED]
            counts, total = np.array([alike[kind] for kind in used]), sum(alike.values())
            gpus, part, cpus = np.array([(kind.gpus, kind.part, kind.cpus) for kind in used], dtype=np.int64).T
            self._demand = Demand(gpus, part, cpus, counts / total, self._worth)
        return self._demand

    def _price(self) -> None:
        parts: dict[int, float] = {}
        for kind, count in self._kinds.items():
            if kind.gpus == 1 and kind.part < WHOLE:
                parts[kind.part] = parts.get(kind.part, 0.0) + count / self._unit
        self._priced = tuple(sorted(parts.items()))
        self._worth = worth_of(parts)


def worth_of(parts: Mapping[int, float]) -> Floats:
    """Return what free parts of a GPU are worth, in GPUs, by hundredths, shape (101,); a whole GPU is worth 1.

    Args:
        parts: How often parts of a GPU are asked for, by hundredths below 100.
    """
    sizes = sorted(parts)
    worth = np.zeros(WHOLE + 1)
    if sizes:
        wanted = np.array([parts[size] for size in sizes])
        patterns = [
            [WHOLE // size if row == column else 0 for row, size in enumerate(sizes)] for column in range(len(sizes))
        ]
        for _ in range(_ROUNDS):
            prices = _prices(patterns, wanted)
            worth, better = _filled(sizes, prices)
            if worth[WHOLE] <= 1.0 + 1e-6:
                break
            patterns.append(better)
    worth[WHOLE] = 1.0
    return np.round(worth, 6)


def _prices(patterns: list[list[int]], wanted: Floats) -> list[float]:
    """Return the dual prices of covering what is wanted with the fewest GPUs, each filled by one of the patterns."""
    from scipy.optimize import linprog  # noqa: PLC0415 - takes long to import, and few need it

    covers = np.array(patterns, dtype=np.float64).T
    found = linprog(np.ones(len(patterns)), A_ub=-covers, b_ub=-wanted, method="highs-ds")
    prices: list[float] = np.maximum(-found.ineqlin.marginals, 0.0).tolist()
    return prices


def _filled(sizes: list[int], prices: list[float]) -> tuple[Floats, list[int]]:
    """Return what jobs of these sizes and prices are worth together in a part of a GPU, and the best of a whole one."""
    worth, last = [0.0] * (WHOLE + 1), [-1] * (WHOLE + 1)
    for room in range(1, WHOLE + 1):
        worth[room] = worth[room - 1]
        for number, size in enumerate(sizes):
            if size <= room and worth[room - size] + prices[number] > worth[room] + 1e-9:
                worth[room], last[room] = worth[room - size] + prices[number], number
    best, room = [0] * len(sizes), WHOLE
    while room > 0:
        if last[room] < 0:
            room -= 1
        else:
            best[last[room]] += 1
            room -= sizes[last[room]]
    return np.array(worth), best
