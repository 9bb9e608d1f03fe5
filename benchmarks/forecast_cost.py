"""What one update of 10,000 jobs costs on one core: the forecaster as served, and further experts on top."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from common import Row

from cotenant.forecasting.demand.engine import Expert, MixtureSettings, SeriesMixture
from cotenant.forecasting.demand.mixture import UTIL_SCALES, MixtureForecaster
from cotenant.forecasting.training.demand_artefact import KINDS
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand
from cotenant.forecasting.types import Signature

JOBS = 10_000
STEADY, RESTLESS = "one job in ten moves its memory", "every job moves its memory"
FEW_JOBS = 2_000  # for a quick look
SETTLED = 150  # ticks until every lag of the analogues is known: before that an update costs more

Floats = npt.NDArray[np.float64]


def cost(quick: bool) -> Iterator[Row]:
    """Processor time of one second's work (not wall time: other work on the machine does not count)."""
    jobs, repeats = (FEW_JOBS, 10) if quick else (JOBS, 20)
    case = f"{jobs} jobs, processor time"
    for (load_name, part), values in served(jobs, repeats).items():
        goal = "<= 100" if part == "update" and load_name == STEADY and not quick else None
        spread = statistics.stdev(values)
        yield Row(f"{case}, {load_name}", "cotenant", part, statistics.median(values), "ms", spread, goal)
    settings = UTIL_SCALES[0][1]
    for kind, expert in experts(settings, jobs):
        values = expert_times(settings, expert, jobs, repeats)
        yield Row(case, "cotenant", f"{kind} on top", statistics.median(values), "ms", statistics.stdev(values))


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


def served(jobs: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Return milliseconds per update, and per forecast of all jobs, of the forecaster as the system serves it."""
    forecaster, names = MixtureForecaster(), [f"job-{i}" for i in range(jobs)]
    times: dict[tuple[str, str], list[float]] = {}
    steady, restless = load(jobs, 0.1), load(jobs, 1.0)
    for second in range(SETTLED + 2 * repeats):
        name = STEADY if second < SETTLED + repeats else RESTLESS
        util, memory = next(steady if name == STEADY else restless)
        batch = [
            Signature(name, "gpu", float(second), 1.0, 10, u, u, m, m, 10.0, 0.0, 0.0, 0, 1.0)
            for name, u, m in zip(names, util.tolist(), memory.tolist(), strict=True)
        ]
        begin = time.process_time()
        forecaster.observe_batch(batch)
        spent = (time.process_time() - begin) * 1e3
        if second >= SETTLED:
            times.setdefault((name, "update"), []).append(spent)
    for _ in range(3):
        begin = time.process_time()
        forecaster.forecast_batch(names)
        times.setdefault((STEADY, "forecasts as objects"), []).append((time.process_time() - begin) * 1e3)
    return times


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
    for (util, _), _ in zip(load(jobs, 0.0), range(repeats), strict=False):
        mixture.step(rows, util.astype(np.float32))
    return clock.times[3:]


class _Timed:
    """An expert and a stop-watch."""

    def __init__(self, expert: Expert) -> None:
        self._expert, self.name, self.width = expert, expert.name, expert.width
        self.times: list[float] = []
        self.resize, self.clear = expert.resize, expert.clear

    def step(self, moment):  # type: ignore[no-untyped-def]
        begin = time.process_time()
        said = self._expert.step(moment)
        self.times.append((time.process_time() - begin) * 1e3)
        return said
