"""How far placing jobs is from the best there is: one by one, improved as a batch, and exact, on small random cases.

Jobs are drawn from our own measured pairs, and the predictor says what was measured, so that only the choosing is
judged. All wait at once for empty GPUs. The exact answer is an integer program over all sets of jobs that one GPU may
carry: as many jobs as possible, then the largest sum of scores.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from common import Row, options, write_report
from measured_pairs import GPU_TYPE, MeasuredPairs, load
from scipy.optimize import Bounds, LinearConstraint, milp

from cotenant.configs.settings import PlacementSettings
from cotenant.placement.batch import PLACING_IS_WORTH, rearrange
from cotenant.placement.engine import policy
from cotenant.placement.fleet import Fleet
from cotenant.placement.objective import packing_saving, score
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Request

GIB = 1 << 30
SEED = 11
METHODS = ("one by one", "batch", "exact")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one method made of one case: jobs placed, sum of the GPUs' scores and of n, seconds taken."""

    placed: int
    score: float
    work: float
    seconds: float

    @property
    def value(self) -> float:
        """What is compared: who is placed counts more than any score."""
        return self.placed * PLACING_IS_WORTH + self.score


def cases(pairs: MeasuredPairs, count: int, gpus: int, jobs: int) -> Iterator[tuple[list[GpuView], list[Request]]]:
    """Random jobs that wait for so many empty GPUs."""
    rng = np.random.default_rng(SEED)
    names = sorted(pairs.profiles)
    for _ in range(count):
        drawn = [pairs.profiles[names[i]] for i in rng.integers(len(names), size=jobs)]
        limits = rng.choice([1.25, 1.5, 2.0], size=jobs)
        yield (
            [GpuView(f"g{i}", "h0", GPU_TYPE, 16 * GIB) for i in range(gpus)],
            [Request(f"j{i}", 1, GIB, None, each, float(limits[i])) for i, each in enumerate(drawn)],
        )


def ours(
    pairs: MeasuredPairs, gpus: list[GpuView], jobs: list[Request], settings: PlacementSettings, batch: bool
) -> Outcome:
    """The shipped policy, with or without looking at the batch."""
    begun = time.process_time()
    engine, statement = policy("cotenant"), Statement(gpus)
    placed: list[tuple[Request, Placement]] = []
    waiting: list[Request] = []
    for number, job in enumerate(jobs):
        left = len(jobs) - number
        answer = engine.place(job, statement.fleet, pairs, settings, left)
        if isinstance(answer, Placement):
            statement.place(job, answer)
            placed.append((job, answer))
        else:
            waiting.append(job)
    if batch:
        placed = rearrange(engine, Fleet(gpus), placed, waiting, predictor=pairs, settings=settings) or placed
    seconds = time.process_time() - begun
    carried: dict[str, list[Request]] = {}
    for job, answer in placed:
        carried.setdefault(answer.shares[0].gpu_id, []).append(job)
    return _outcome(pairs, list(carried.values()), settings, seconds)


def exact(pairs: MeasuredPairs, gpus: list[GpuView], jobs: list[Request], settings: PlacementSettings) -> Outcome:
    """The best there is: which sets of jobs share a GPU, as an integer program."""
    begun = time.process_time()
    sets = [
        members
        for size in range(1, settings.max_jobs_per_gpu + 1)
        for members in itertools.combinations(range(len(jobs)), size)
        if _allowed(pairs, [jobs[i] for i in members])
    ]
    worth = np.array([_score(pairs, [jobs[i] for i in each], settings) + PLACING_IS_WORTH * len(each) for each in sets])
    once = np.array([[float(job in each) for each in sets] for job in range(len(jobs))])
    limits = LinearConstraint(np.vstack([once, np.ones(len(sets))]), ub=[1.0] * len(jobs) + [float(len(gpus))])
    found = milp(-worth, constraints=limits, bounds=Bounds(0.0, 1.0), integrality=np.ones(len(sets)))
    if not found.success:
        raise RuntimeError(f"the integer program was not solved: {found.message}")
    chosen = [[jobs[i] for i in sets[number]] for number in np.flatnonzero(found.x > 0.5)]
    return _outcome(pairs, chosen, settings, time.process_time() - begun)


def _throughputs(pairs: MeasuredPairs, members: Sequence[Request]) -> list[float]:
    return [each.mid for each in pairs.predict([job.profile for job in members], GPU_TYPE)]


def _allowed(pairs: MeasuredPairs, members: Sequence[Request]) -> bool:
    n = _throughputs(pairs, members)
    slow = any(1.0 / value > job.max_slowdown + 1e-9 for value, job in zip(n, members, strict=True))
    return len(members) == 1 or (not slow and packing_saving(n) > 0.0)


def _score(pairs: MeasuredPairs, members: Sequence[Request], settings: PlacementSettings) -> float:
    return score(_throughputs(pairs, members), settings.packing_bias)


def _outcome(
    pairs: MeasuredPairs, carried: Sequence[Sequence[Request]], settings: PlacementSettings, seconds: float
) -> Outcome:
    return Outcome(
        sum(map(len, carried)),
        math.fsum(_score(pairs, members, settings) for members in carried),
        math.fsum(n for members in carried for n in _throughputs(pairs, members)),
        seconds,
    )


def rows(pairs: MeasuredPairs, count: int, gpus: int, jobs: int, most: int) -> Iterator[Row]:
    """The figures of one size of case."""
    settings = PlacementSettings(max_jobs_per_gpu=most)
    found: dict[str, list[Outcome]] = {method: [] for method in METHODS}
    for cluster, asked in cases(pairs, count, gpus, jobs):
        found["one by one"].append(ours(pairs, cluster, asked, settings, batch=False))
        found["batch"].append(ours(pairs, cluster, asked, settings, batch=True))
        found["exact"].append(exact(pairs, cluster, asked, settings))
    case = f"{jobs} jobs, {gpus} GPUs, up to {most} a GPU"
    for method in METHODS:
        mine, best = found[method], found["exact"]
        who = method if method == "exact" else "cotenant" if method == "batch" else "cotenant, one by one"
        as_good = np.mean([a.value >= b.value - 1e-6 for a, b in zip(mine, best, strict=True)])
        missing = np.array([b.placed - a.placed for a, b in zip(mine, best, strict=True)], dtype=np.float64)
        equal = [(a, b) for a, b in zip(mine, best, strict=True) if a.placed == b.placed]
        gap = np.array([(b.score - a.score) / gpus for a, b in equal])
        yield Row(case, who, "cases solved as well as possible", float(as_good), "1")
        yield Row(case, who, "jobs placed, part of what is possible", _part(mine, best, "placed"), "1")
        yield Row(case, who, "work done per second, part of the exact answer's", _part(mine, best, "work"), "1")
        yield Row(case, who, "jobs left waiting that could be placed", float(missing.mean()), "jobs")
        yield Row(case, who, "score missed per GPU, where as many are placed", float(gap.mean()), "1", float(gap.std()))
        yield Row(case, who, "processor time", float(np.mean([each.seconds for each in mine])) * 1e3, "ms")


def _part(mine: Sequence[Outcome], best: Sequence[Outcome], what: str) -> float:
    return float(sum(getattr(each, what) for each in mine) / sum(getattr(each, what) for each in best))


def main() -> None:
    """Run the benchmark."""
    arguments = options(str(__doc__).partition("\n")[0]).parse_args()
    pairs = load()
    count = 20 if arguments.quick else 200
    sizes = ((3, 6, 2), (4, 8, 2), (6, 12, 2), (4, 10, 3))
    write_report("gap", [row for size in sizes for row in rows(pairs, count, *size)], arguments.json)


if __name__ == "__main__":
    main()
