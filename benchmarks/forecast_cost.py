"""What demand forecasts cost: one update of 10,000 jobs on one core, with every kind of expert, and the host's part.

Processor time of the process, not wall time: other work on the machine hardly counts, though it slows caches and cores.
The PRM's part is the forecaster as the system serves it, one window of every job per update. The host's part is
looking for likeness in the 10 Hz samples of its jobs, and is given as a fraction of one core.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from common import Row, options, write_report

from cotenant.actors.likeness import Likeness
from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.engine import Expert, MixtureSettings, Moment, SeriesMixture
from cotenant.forecasting.demand.hostside import HORIZONS, WIDTH
from cotenant.forecasting.demand.mixture import UTIL_SCALES
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.training.demand_artefact import KINDS
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand
from cotenant.forecasting.types import Signature

JOBS = 10_000
FEW_JOBS = 2_000  # for a quick look
JOBS_OF_HOST = 8
SETTLED = 150  # ticks until every lag of the analogues is known: before that an update costs more
GOAL = "<= 100"

Floats = npt.NDArray[np.float64]


def cost(quick: bool) -> Iterator[Row]:
    """Yield all figures."""
    jobs, repeats = (FEW_JOBS, 10) if quick else (JOBS, 20)
    case, goal = f"{jobs} jobs, one update", None if quick else GOAL
    quiet = served(MixtureForecaster(), jobs, 0.1, repeats)
    yield _row(case, "cotenant", "untrained, one job in ten moves its memory", quiet, goal)
    moving = served(MixtureForecaster(), jobs, 1.0, repeats)
    yield _row(case, "cotenant", "untrained, every job moves its memory", moving, goal)
    told = served(MixtureForecaster(), jobs, 0.1, repeats, foreseen=True)
    yield _row(case, "cotenant", "untrained, with what hosts foresee", told, goal)
    settings = UTIL_SCALES[0][1]
    for kind, expert in experts(settings, jobs):
        more = expert_times(settings, expert, jobs, repeats)
        yield _row(case, "cotenant", f"{kind} alone", more, None)
        # The two differ by some ms from run to run; their sum spares settling 10,000 jobs once more.
        both = [a + b for a, b in zip(quiet, more, strict=False)]
        yield _row(case, "cotenant", f"untrained + {kind}", both, goal)
    yield _row(case, "weighted history", "update", served(EwQuantileForecaster(), jobs, 0.1, repeats, settled=3), goal)
    for name, forecaster in (("cotenant", MixtureForecaster()), ("weighted history", EwQuantileForecaster())):
        yield _row(f"{jobs} jobs", name, "forecasts as objects", objects(forecaster, jobs), None)
    yield _row(f"{jobs} jobs", "cotenant", "profile book", profiles(jobs, repeats), None)
    one_host = served(MixtureForecaster(), JOBS_OF_HOST, 0.1, 200)
    yield _row(
        f"{JOBS_OF_HOST} jobs, one update", "cotenant", "untrained, one job in ten moves its memory", one_host, None
    )
    yield from host(20 if quick else 100)


def load(jobs: int, moving: float) -> Iterator[tuple[Floats, Floats]]:
    """Yield utilisation and memory of all jobs, second by second: periodic phases of each job's own, with noise."""
    rng = np.random.default_rng(0)
    period, phase = rng.uniform(5.0, 60.0, jobs), rng.uniform(0.0, 2.0 * np.pi, jobs)
    held, moves = rng.uniform(1.0, 30.0, jobs) * 2.0**30, rng.random(jobs) < moving
    second = 0
    while True:
        wave = np.sin(phase + 2.0 * np.pi * second / period) > 0.3
        util = np.clip(np.where(wave, 0.2, 0.85) + 0.05 * rng.standard_normal(jobs), 0.0, 1.0)
        yield util, np.where(moves, held * (1.0 + 0.1 * rng.random(jobs)), held)
        second += 1


def windows(jobs: int, second: int, util: Floats, memory: Floats) -> list[Signature]:
    """One window of a second of every job."""
    return [
        Signature(f"job-{i}", "gpu", float(second), 1.0, 10, u, u, m, m, 10.0, 0.0, 0.0, 0, 1.0)
        for i, (u, m) in enumerate(zip(util.tolist(), memory.tolist(), strict=True))
    ]


def served(
    forecaster: MixtureForecaster | EwQuantileForecaster,
    jobs: int,
    moving: float,
    repeats: int,
    *,
    foreseen: bool = False,
    settled: int = SETTLED,
) -> list[float]:
    """Return milliseconds per update of a forecaster that has seen ``settled`` windows of every job."""
    source, times = load(jobs, moving), []
    for second in range(settled + repeats):
        util, memory = next(source)
        batch = windows(jobs, second, util, memory)
        said = None
        if foreseen:
            said = {(f"job-{i}", "gpu"): (u,) * (len(HORIZONS) * WIDTH) for i, u in enumerate(util.tolist())}
        begin = time.process_time()
        forecaster.observe_batch(batch, said)
        times.append((time.process_time() - begin) * 1e3)
    return times[settled:]


def objects(forecaster: MixtureForecaster | EwQuantileForecaster, jobs: int) -> list[float]:
    """Return milliseconds for writing down the forecasts of all jobs."""
    util, memory = next(load(jobs, 0.1))
    forecaster.observe_batch(windows(jobs, 0, util, memory))
    names, times = [f"job-{i}" for i in range(jobs)], []
    for _ in range(4):
        begin = time.process_time()
        forecaster.forecast_batch(names)
        times.append((time.process_time() - begin) * 1e3)
    return times


def profiles(jobs: int, repeats: int) -> list[float]:
    """Return milliseconds for taking one window of every job into the book of profiles."""
    book, source, times = ProfileBook(), load(jobs, 0.1), []
    for second in range(3 + repeats):
        util, memory = next(source)
        batch = windows(jobs, second, util, memory)
        begin = time.process_time()
        for signature in batch:
            book.observe(signature, signature.job_id)
        times.append((time.process_time() - begin) * 1e3)
    return times[3:]


def experts(settings: MixtureSettings, jobs: int) -> Iterator[tuple[str, Expert]]:
    """Yield every kind of trained expert for ``jobs`` series, trained on next to nothing: the cost is the same."""
    few = np.stack([util for (util, _), _ in zip(load(8, 0.0), range(200), strict=False)])
    artefacts = train_demand(list(few.T), settings, KINDS, TrainingOptions(updates=1))
    for kind, artefact in artefacts.items():
        yield kind, artefact.expert(settings.horizons, jobs)


def expert_times(settings: MixtureSettings, expert: Expert, jobs: int, repeats: int) -> list[float]:
    """Return milliseconds per step of one expert inside a mixture of ``jobs`` series."""
    clock = _Timed(expert)
    mixture, rows = SeriesMixture(settings, jobs, (clock,)), np.arange(jobs)
    for (util, _), _ in zip(load(jobs, 0.0), range(3 + repeats), strict=False):
        mixture.step(rows, util.astype(np.float32))
    return clock.times[3:]


class _Timed:
    """An expert and a stop-watch."""

    def __init__(self, expert: Expert) -> None:
        self._expert, self.name, self.width = expert, expert.name, expert.width
        self.expected = expert.expected
        self.times: list[float] = []
        self.resize, self.clear = expert.resize, expert.clear

    def step(self, moment: Moment) -> npt.NDArray[np.float32]:
        begin = time.process_time()
        said = self._expert.step(moment)
        self.times.append((time.process_time() - begin) * 1e3)
        return said


def host(seconds: int) -> Iterator[Row]:
    """Yield what looking for likeness costs a host of eight jobs at 10 Hz, once a second asked what it foresees."""
    likeness, rng, times = Likeness(0.1, 10), np.random.default_rng(0), []
    keys = [(f"job-{i}", f"gpu-{i % 2}") for i in range(JOBS_OF_HOST)]
    warm_up = 70  # all lags known
    for second in range(warm_up + seconds):
        samples = rng.random((10, JOBS_OF_HOST)).tolist()
        begin = time.process_time()
        for i, sample in enumerate(samples):
            likeness.take(second + 0.1 * i, dict(zip(keys, sample, strict=True)))
        likeness.foreseen(second + 0.9)
        times.append(100.0 * (time.process_time() - begin))
    case = f"host agent, {JOBS_OF_HOST} jobs, 10 Hz"
    yield _row(case, "cotenant", "likeness in samples, share of one core", times[warm_up:], "< 1", unit="%")


def _row(case: str, method: str, metric: str, values: list[float], goal: str | None, *, unit: str = "ms") -> Row:
    return Row(case, method, metric, statistics.median(values), unit, statistics.stdev(values), goal)


def main() -> None:
    """Measure and report."""
    args = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in cost(args.quick):
        print(f"  {row.case}, {row.method}, {row.metric}: {row.value:.3g} {row.unit}", file=sys.stderr)
        rows.append(row)
    write_report("forecast_cost", rows, args.json)


if __name__ == "__main__":
    main()
