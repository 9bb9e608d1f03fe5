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
SETTLED = 150  # ticks until every lag of the analogues is known: before that an update costs more

Floats = npt.NDArray[np.float64]


def cost(quick: bool) -> Iterator[Row]:
    """Processor time of one second's work (not wall time: other work on the machine does not count)."""
    case, repeats = f"{JOBS} jobs, processor time", 10 if quick else 30
    for moving, name in ((0.1, "one job in ten moves its memory"), (1.0, "every job moves its memory")):
        if quick and moving == 1.0:
            continue
        times = served(moving, 20 if quick else SETTLED, repeats)
        for part, values in times.items():
            goal = "<= 100" if part == "update" and moving < 1.0 else None
            spread = statistics.stdev(values)
            yield Row(f"{case}, {name}", "cotenant", part, statistics.median(values), "ms", spread, goal)
    settings = UTIL_SCALES[0][1]
    for kind, expert in experts(settings):
        values = expert_times(settings, expert, repeats)
        yield Row(case, "cotenant", f"{kind} on top", statistics.median(values), "ms", statistics.stdev(values))


def load(moving: float) -> Iterator[tuple[Floats, Floats]]:
    """Yield utilisation and memory of all jobs, second by second: periodic phases of each job's own, with noise."""
    rng = np.random.default_rng(0)
    period, phase = rng.uniform(5.0, 60.0, JOBS), rng.uniform(0.0, 2.0 * np.pi, JOBS)
    held, moves = rng.uniform(1.0, 30.0, JOBS) * 2.0**30, rng.random(JOBS) < moving
    second = 0
    while True:
        wave = np.sin(phase + 2.0 * np.pi * second / period) > 0.3
        util = np.clip(np.where(wave, 0.2, 0.85) + 0.05 * rng.standard_normal(JOBS), 0.0, 1.0)
        yield util, np.where(moves, held * (1.0 + 0.1 * rng.random(JOBS)), held)
        second += 1


def served(moving: float, settle: int, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds per update, and per forecast of all jobs, of the forecaster as the system serves it."""
    forecaster, names = MixtureForecaster(), [f"job-{i}" for i in range(JOBS)]
    times: dict[str, list[float]] = {"update": [], "forecasts as objects": []}
    for second, (util, memory) in zip(range(settle + repeats), load(moving), strict=False):
        batch = [
            Signature(name, "gpu", float(second), 1.0, 10, u, u, m, m, 10.0, 0.0, 0.0, 0, 1.0)
            for name, u, m in zip(names, util.tolist(), memory.tolist(), strict=True)
        ]
        begin = time.process_time()
        forecaster.observe_batch(batch)
        if second >= settle:
            times["update"].append((time.process_time() - begin) * 1e3)
        if second >= settle + repeats - 3:
            begin = time.process_time()
            forecaster.forecast_batch(names)
            times["forecasts as objects"].append((time.process_time() - begin) * 1e3)
    return times


def experts(settings: MixtureSettings) -> Iterator[tuple[str, Expert]]:
    """Yield every kind of trained expert for ``JOBS`` series, trained on next to nothing: the cost is the same."""
    few = np.stack([util[:8] for (util, _), _ in zip(load(0.0), range(200), strict=False)])
    artefacts = train_demand(list(few.T), settings, KINDS, TrainingOptions(updates=1))
    for kind, artefact in artefacts.items():
        yield kind, artefact.expert(settings.horizons, JOBS)


def expert_times(settings: MixtureSettings, expert: Expert, repeats: int) -> list[float]:
    """Return milliseconds per step of one expert inside a mixture of ``JOBS`` series."""
    clock = _Timed(expert)
    mixture, rows = SeriesMixture(settings, JOBS, (clock,)), np.arange(JOBS)
    for (util, _), _ in zip(load(0.0), range(repeats), strict=False):
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
