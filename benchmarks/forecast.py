"""Demand forecasts against their baselines on recorded series, leave one file out, and their cost for 10,000 jobs.

Reads recorded series under ``$COTENANT_DATA``/series (or ``../shared/data/series`` beside the checkout); without them
only the cost is measured. ``--quick`` takes the untrained mixture on a part of the series. The persistence, EWMA and
boosted-tree baselines (scikit-learn's, standing for LightGBM) are computed in the same run on the same windows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import Row, options, write_report
from forecast_cost import cost
from forecast_sets import Floats, SeriesSet, baselines, constant, data_folder, load

from cotenant.forecasting.demand.engine import Expert, MixtureSettings, SeriesMixture
from cotenant.forecasting.demand.hostside import WIDTH, HostAnalogues
from cotenant.forecasting.demand.mixture import MEMORY_GATE_PRIOR, MEMORY_ROOM, MixtureForecaster
from cotenant.forecasting.training.demand_artefact import KINDS
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand
from cotenant.forecasting.types import LEVELS, Signature

SEEDS = (0, 1)
UPDATES = 150
MIB = 2.0**20
P95 = LEVELS.index(0.95)
NO_LOSS = {"pp": 0.05, "MiB": 1.0, "GiB": 0.001}  # added to both errors of a ratio: below it nobody cares
LEAST_MEMORY = {"MiB": 64.0, "GiB": 1.0 / 16.0}


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Points (ticks, horizons) and 95th percentiles of the test series by position, in the units of the set."""

    points: dict[int, Floats]
    p95: dict[int, Floats]


def settings_of(data: SeriesSet) -> MixtureSettings:
    """Return what the mixture is told about a set: the settings of the running system but for the ticks."""
    if data.unit != "pp":
        return MixtureSettings(data.horizons, first_span=0.15, gate_prior=MEMORY_GATE_PRIOR, most=1e6)
    if len(data.horizons) == 3:  # ten samples a second: the same seconds in more ticks
        return MixtureSettings(data.horizons, last=600, gains=(0.2, 0.05, 0.015))
    return MixtureSettings(data.horizons)


def units(data: SeriesSet, values: Floats) -> Floats:
    """Return the unit of a series at every tick, as the forecaster finds it: memory is measured by its beginning."""
    if data.unit == "pp":
        return np.ones(len(values))
    found = np.empty(len(values))
    unit = MEMORY_ROOM * max(LEAST_MEMORY[data.unit], float(values[0]))
    for tick, value in enumerate(values):
        if value > MEMORY_ROOM * unit:
            unit = MEMORY_ROOM * float(value)
        found[tick] = unit
    return found


def run(
    data: SeriesSet,
    held: Sequence[int],
    experts: Callable[[int], Sequence[Expert]] = lambda _: (),
    outside: dict[int, Floats] | None = None,
) -> Forecasts:
    """Run one mixture over test series, all at once, tick by tick."""
    order = sorted(held, key=lambda position: -len(data.series[position].values))
    settings, lengths = settings_of(data), [len(data.series[position].values) for position in order]
    width = 0 if outside is None else next(iter(outside.values())).shape[2]
    mixture = SeriesMixture(settings, len(order), experts(len(order)), width)
    unit = [units(data, data.series[position].values) for position in order]
    points = {position: np.full((lengths[row], len(data.horizons)), np.nan) for row, position in enumerate(order)}
    p95 = {position: found.copy() for position, found in points.items()}
    for tick in range(lengths[0]):
        rows = np.arange(sum(length > tick for length in lengths))
        for row in rows:
            if tick and unit[row][tick] != unit[row][tick - 1]:
                mixture.clear(int(row))
        now = np.array([data.series[order[row]].values[tick] / unit[row][tick] for row in rows], dtype=np.float32)
        beside = None if outside is None else np.stack([outside[order[row]][tick] for row in rows])
        said, high = mixture.step(rows, now, outside=beside), mixture.quantiles(rows)[:, :, P95]
        for row in rows:
            points[order[row]][tick], p95[order[row]][tick] = said[row] * unit[row][tick], high[row] * unit[row][tick]
    return Forecasts(points, p95)


def host_predictions(data: SeriesSet) -> dict[int, Floats]:
    """Return the host's predictions at every window, (windows, horizons, width); of the last one where it missed."""
    series = [(i, each.samples, each.ends) for i, each in enumerate(data.series)]
    known = sorted(((i, s, e) for i, s, e in series if s is not None and e is not None), key=lambda x: -len(x[1]))
    host = HostAnalogues(len(known), data.horizons)
    said = [np.empty((len(samples), len(data.horizons), WIDTH), dtype=np.float32) for _, samples, _ in known]
    for tick in range(len(known[0][1])):
        rows = np.arange(sum(len(samples) > tick for _, samples, _ in known))
        host.take(rows, np.array([known[row][1][tick] for row in rows], dtype=np.float32))
        now = host.predict(rows)
        for row in rows:
            said[row][tick] = now[row]
    last = [np.maximum.accumulate(np.maximum(ends, 0)) for _, _, ends in known]
    return {position: said[row][last[row]].astype(np.float64) for row, (position, _, _) in enumerate(known)}


def trained(data: SeriesSet, seed: int) -> Iterator[tuple[list[int], Callable[[int], list[Expert]]]]:
    """Yield per fold the test series and the experts trained on the others."""
    settings = settings_of(data)
    for training, held in data.folds():
        parts = [part for values in training for part in in_units(data, values)]
        kinds = KINDS if data.unit == "pp" else ("trees",)
        artefacts = train_demand(parts, settings, kinds, TrainingOptions(seed=seed, updates=UPDATES))
        print(f"  {data.name}: trained without {data.series[held[0]].group}, seed {seed}", file=sys.stderr)
        yield held, lambda rows, found=artefacts: [each.expert(settings.horizons, rows) for each in found.values()]


def in_units(data: SeriesSet, values: Floats) -> list[Floats]:
    """Cut a series where its unit changes and return the parts in units."""
    unit = units(data, values)
    breaks = np.flatnonzero(np.diff(unit)) + 1
    return np.split(values / unit, breaks)


def judge(data: SeriesSet, horizon: int, method: str, predictions: dict[int, Floats]) -> Iterator[Row]:
    """Score predictions at the scored ticks of every test series: MAE over all, and the worst series."""
    errors, ratios = [], []
    for position, predicted in predictions.items():
        first, end = data.scored(position, horizon)
        values = data.series[position].values
        missed = np.abs(predicted - values[first + horizon :]) * data.scale
        stayed = np.abs(values[first:end] - values[first + horizon :]) * data.scale
        errors.append(missed)
        none = NO_LOSS[data.unit]
        ratios.append((missed.mean() + none) / (stayed.mean() + none))
    ours = method.startswith("cotenant")
    goal = f"<= {data.goals[data.horizons.index(horizon)]}" if ours and data.goals else None
    case = f"{data.name}, {horizon} {data.tick}"
    yield Row(case, method, "MAE", float(np.concatenate(errors).mean()), data.unit, goal=goal)
    if ours:
        yield Row(case, method, "worst series, MAE / persistence", float(max(ratios)), "1", goal="<= 1.05")


def at_scored(data: SeriesSet, horizon: int, found: dict[int, Floats]) -> dict[int, Floats]:
    """Pick the scored ticks of one horizon out of forecasts (ticks, horizons)."""
    j = data.horizons.index(horizon)
    spans = {position: data.scored(position, horizon) for position in found}
    return {position: found[position][first:end, j] for position, (first, end) in spans.items() if end > first}


def judge_p95(data: SeriesSet, horizon: int, method: str, high: dict[int, Floats]) -> Iterator[Row]:
    """Score 95th percentiles: coverage, the worst series, pinball loss against persistence plus a constant."""
    hits, ours, plain = [], [], []
    for position, quantile in high.items():
        first, end = data.scored(position, horizon)
        values = data.series[position].values
        truth = values[first + horizon :]
        hits.append(truth <= quantile)
        ours.append(pinball(truth, quantile))
        plain.append(pinball(truth, values[first:end] + constant(data, horizon, position, 0.95)))
    covered, case = float(np.concatenate(hits).mean()), f"{data.name}, {horizon} {data.tick}"
    yield Row(case, method, "p95 coverage", covered, "1")
    yield Row(case, method, "p95 coverage, distance from 0.95", abs(covered - 0.95), "1", goal="<= 0.01")
    yield Row(case, method, "p95 coverage, worst series", float(min(h.mean() for h in hits)), "1", goal=">= 0.92")
    loss = float(np.concatenate(ours).mean() / np.concatenate(plain).mean())
    yield Row(case, method, "p95 pinball / (persistence + constant)", loss, "1", goal="<= 0.5")


def pinball(truth: Floats, quantile: Floats) -> Floats:
    """Return the pinball loss at 0.95."""
    return np.maximum(0.95 * (truth - quantile), 0.05 * (quantile - truth))


def forecasts(data: SeriesSet, method: str, found: Forecasts) -> Iterator[Row]:
    """Score all horizons of one of our methods."""
    for horizon in data.horizons:
        yield from judge(data, horizon, method, at_scored(data, horizon, found.points))
        yield from judge_p95(data, horizon, method, at_scored(data, horizon, found.p95))


def with_training(data: SeriesSet, outside: dict[int, Floats] | None) -> list[Row]:
    """Score the mixture with trained experts over all seeds: means, with the deviation between seeds as spread."""
    runs = []
    for seed in SEEDS:
        whole = Forecasts({}, {})
        for held, experts in trained(data, seed):
            part = run(data, held, experts, outside)
            whole.points.update(part.points)
            whole.p95.update(part.p95)
        runs.append(list(forecasts(data, "cotenant, trained", whole)))
    rows = []
    for same in zip(*runs, strict=True):
        values = [row.value for row in same]
        rows.append(replace(same[0], value=statistics.fmean(values), spread=statistics.stdev(values)))
    return rows


def peak_memory(data: SeriesSet) -> Iterator[Row]:
    """Score the memory that a reservation for the next 5 s would be made of."""
    short, waste = [], []
    forecaster, names = MixtureForecaster(), [f"job-{i}" for i in range(len(data.series))]
    for second in range(max(len(each.values) for each in data.series) - 5):
        held = {i: each.values for i, each in enumerate(data.series) if len(each.values) > second + 5}
        forecaster.observe_batch([_window(names[i], second, float(values[second])) for i, values in held.items()])
        said = forecaster.forecast_batch([names[i] for i in held])
        for i, values in held.items():
            if second < data.scored(i, 5)[0]:
                continue
            top = float(values[: second + 1].max())
            wanted = max(said[names[i]].memory[5].p99 / MIB, 1.02 * top)
            truth = max(top, float(values[second + 1 : second + 6].max()))
            short.append(truth > wanted)
            waste.append(wanted / truth - 1.0)
    yield Row(f"{data.name}, peak until 5 s", "cotenant", "under-forecast", float(np.mean(short)), "1", goal="<= 0.01")
    yield Row(f"{data.name}, peak until 5 s", "cotenant", "waste", float(np.mean(waste)), "1", goal="<= 0.12")


def _window(job_id: str, second: int, mebibytes: float) -> Signature:
    held = mebibytes * MIB
    return Signature(job_id, "gpu", float(second), 1.0, 10, 0.5, 0.5, held, held, None, 0.0, None, 0, 1.0)


def measure(data: SeriesSet, quick: bool) -> Iterator[Row]:
    """Yield all figures of one set."""
    print(f"{data.name}: {len(data.series)} series", file=sys.stderr)
    if not quick:
        for horizon in data.horizons:
            for method, found in baselines(data, horizon).items():
                yield from judge(data, horizon, method, found)
    else:
        for horizon in data.horizons:
            last = np.array([each.values for each in data.series], dtype=object)
            found = {i: np.asarray(v[slice(*data.scored(i, horizon))], dtype=float) for i, v in enumerate(last)}
            yield from judge(data, horizon, "persistence", found)
    every = list(range(len(data.series)))
    yield from forecasts(data, "cotenant", run(data, every))
    outside = None
    if all(each.samples is not None for each in data.series):
        outside = host_predictions(data)
        yield from forecasts(data, "cotenant, 10 Hz analogues", run(data, every, outside=outside))
    if not quick and len(data.horizons) == 2:
        yield from with_training(data, outside)
    if data.unit == "MiB":
        yield from peak_memory(data)


def main() -> None:
    """Measure and report."""
    args = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    rows = list(cost(args.quick))
    sets = load(data_folder(), args.quick)
    if not sets:
        print(f"no recorded series under {data_folder()}: errors not measured", file=sys.stderr)
    for data in sets:
        part = data
        if args.quick:  # the goals are for all series
            part = replace(data, series=data.series[:: 2 if len(data.series) < 20 else 6], goals=())
        rows += measure(part, args.quick)
        print(f"  {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    write_report("forecast", rows, args.json)


if __name__ == "__main__":
    main()
