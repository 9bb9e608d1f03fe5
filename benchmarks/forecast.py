"""Demand forecasts against their baselines on recorded series, leave one file out.

Reads recorded series under ``$COTENANT_DATA``/series (or ``../shared/data/series`` beside the checkout) and says so
where there are none. ``--quick`` takes the untrained mixture on a part of the series; ``--only`` takes the sets whose
names contain a text. Every baseline is computed in the same run on the same windows: persistence, an exponentially
weighted average tuned on the training series, the median of the last values, boosted trees (scikit-learn's) on lags,
and the simple forecaster that keeps weighted histories. Experts are trained on other files than those they are judged
on, with several seeds: their spreads are over these. In all else nothing is drawn that matters: spreads are over the
recordings, drawn anew (``common.spread_over``).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import Row, options, spread_over, write_report
from forecast_sets import Floats, SeriesSet, baselines, constants, data_folder, load

from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.engine import MixtureSettings
from cotenant.forecasting.demand.hostside import WIDTH, HostAnalogues
from cotenant.forecasting.demand.mixture import MEMORY_SCALES
from cotenant.forecasting.training.demand_artefact import Kind
from cotenant.forecasting.training.demand_fit import TrainingOptions, collect, fit_demand
from cotenant.forecasting.training.demand_replay import Replayed, memory_units, replay
from cotenant.forecasting.types import Signature

SEEDS = 3
FAR = 60  # s
MIB = 2.0**20
NO_LOSS = {"pp": 0.05, "MiB": 1.0, "GiB": 0.001}  # added to both errors of a raw ratio: a series may never move
RESOLUTION = {"pp": 1.0, "MiB": 2.0, "GiB": 2.0 / 1024.0}  # of readings: errors below it count as it
LEAST_MEMORY = {"MiB": 64.0, "GiB": 1.0 / 16.0}
UNTRAINED, WITH_HOST, FULL = "cotenant, untrained", "cotenant, as served", "cotenant, trained"
NETS, ALL = "cotenant, trained networks", "cotenant, trained networks and trees"
HISTORY = "weighted history"
KINDS: dict[str, tuple[Kind, ...]] = {FULL: ("trees",), NETS: ("gru", "tcn"), ALL: ("gru", "tcn", "trees")}

Found = dict[int, Floats]  # by position of the series
Forecaster = MixtureForecaster | EwQuantileForecaster


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Points and 95th percentiles (ticks, horizons) of the test series, in the units of the set."""

    points: Found
    p95: Found


def settings_of(data: SeriesSet) -> MixtureSettings:
    """Return what the mixture is told about a set: the settings of the running system but for the ticks."""
    if data.unit != "pp":
        return replace(MEMORY_SCALES[0][1], horizons=data.horizons, resolution=RESOLUTION[data.unit])
    if len(data.horizons) == 3:  # ten samples a second: the same seconds in more ticks
        return MixtureSettings(data.horizons, last=600, gains=(0.2, 0.05, 0.015))
    return MixtureSettings(data.horizons)


def units(data: SeriesSet, values: Floats) -> Floats:
    """Return the unit of a series at every tick, as the forecaster finds it: memory is measured by its beginning."""
    return np.ones(len(values)) if data.unit == "pp" else memory_units(values, LEAST_MEMORY[data.unit])


def run(data: SeriesSet, held: list[int], experts=None, outside: Found | None = None) -> Forecasts:  # type: ignore[no-untyped-def]
    """Run one mixture over test series, all at once, tick by tick; ``experts`` makes further ones for a table size."""
    series = [data.series[position].values for position in held]
    beside = None if outside is None else [outside[position] for position in held]
    more = {} if experts is None else {"experts": experts}
    said: list[Replayed] = replay(
        series, settings_of(data), units=[units(data, values) for values in series], outside=beside, **more
    )
    return Forecasts(
        {position: each.points for position, each in zip(held, said, strict=True)},
        {position: each.p95 for position, each in zip(held, said, strict=True)},
    )


def host_predictions(data: SeriesSet) -> Found:
    """Return the host's predictions at every window, (windows, horizons, width); of the last one where it missed."""
    series = [(i, each.samples, each.ends) for i, each in enumerate(data.series)]
    known = sorted(((i, s, e) for i, s, e in series if s is not None and e is not None), key=lambda x: -len(x[1]))
    host = HostAnalogues(len(known), data.horizons)
    said = [np.empty((len(samples), len(data.horizons), WIDTH), dtype=np.float32) for _, samples, _ in known]
    for tick in range(len(known[0][1])):
        rows = np.arange(sum(len(samples) > tick for _, samples, _ in known))
        host.take(rows, np.array([[known[row][1][tick]] for row in rows], dtype=np.float32))
        now = host.predict(rows)
        for row in rows:
            said[row][tick] = now[row]
    last = [np.maximum.accumulate(np.maximum(ends, 0)) for _, _, ends in known]
    return {position: said[row][last[row]].astype(np.float64) for row, (position, _, _) in enumerate(known)}


def trained(data: SeriesSet, seed: int, outside: Found | None, methods: tuple[str, ...]) -> dict[str, Forecasts]:
    """Forecast every fold with experts that were trained on the others; each is fitted once for all methods."""
    settings, whole = settings_of(data), {method: Forecasts({}, {}) for method in methods}
    # A series is never changed by others, so what an expert would have been told is found once for all folds.
    training = data.training()
    examples = collect(training, settings, [units(data, each) for each in training])
    kinds = tuple(dict.fromkeys(kind for method in methods for kind in KINDS[method]))
    for known, held in data.folds():
        artefacts = fit_demand(examples.of(known), settings, kinds, TrainingOptions(seed=seed))
        for method, found in whole.items():
            chosen = [artefacts[kind] for kind in KINDS[method]]
            said = run(data, held, lambda rows, c=chosen: [e.expert(settings.horizons, rows) for e in c], outside)
            found.points.update(said.points)
            found.p95.update(said.p95)
        print(f"  {data.name}: trained without {data.series[held[0]].group}, seed {seed}", file=sys.stderr)
    return whole


def judge(data: SeriesSet, horizon: int, method: str, predictions: Mapping[int, Floats]) -> Iterator[Row]:
    """Score predictions at the scored ticks of every test series: MAE over all, every file, and the worst series."""
    errors: dict[str, list[Floats]] = {}
    ratios: dict[str, list[list[float]]] = {}
    for position, predicted in predictions.items():
        first, end = data.scored(position, horizon)
        values = data.series[position].values
        missed = np.abs(predicted - values[first + horizon :]) * data.scale
        stayed = np.abs(values[first:end] - values[first + horizon :]) * data.scale
        errors.setdefault(drawn(data, position), []).append(missed)
        none, least = NO_LOSS[data.unit], RESOLUTION[data.unit]
        resolved = float(np.maximum(missed, least).mean() / np.maximum(stayed, least).mean())
        raw = float((missed.mean() + none) / (stayed.mean() + none))
        ratios.setdefault(drawn(data, position), []).append([raw, resolved])
    ours = method.startswith("cotenant")
    goal = (
        f"<= {data.goals[data.horizons.index(horizon)]}" if ours and data.goals and horizon in data.horizons else None
    )
    case = f"{data.name}, {horizon} {data.tick}"

    def row(groups: list[Floats], metric: str, unit: str, figure: Callable[[Floats], float], goal: str | None) -> Row:
        value, spread = figure(np.concatenate(groups)), spread_over(groups, figure)
        return Row(case, method, metric, value, unit, spread, goal)

    yield row([np.concatenate(each) for each in errors.values()], "MAE", data.unit, mean, goal)
    if ours:
        groups = [np.array(each) for each in ratios.values()]
        worst = "worst series, MAE / persistence"
        yield row(groups, worst, "1", lambda r: float(r[:, 0].max()), "<= 1.05")
        worst = "worst series, errors of at least the resolution"
        yield row(groups, worst, "1", lambda r: float(r[:, 1].max()), "<= 1.05")
        yield row(groups, "series over 1.05 times persistence", "1", lambda r: mean(r[:, 0] > 1.05), None)
    if method in ("persistence", FULL) and not data.by_time:
        for group, own in sorted(errors.items()):
            yield Row(case, method, f"MAE, {group.partition('.')[0]} held out", _mean(own), data.unit)


def judge_p95(data: SeriesSet, horizon: int, method: str, high: Mapping[int, Floats]) -> Iterator[Row]:
    """Score 95th percentiles: coverage, the worst series, pinball loss against persistence plus a constant."""
    parts: dict[str, list[Floats]] = {}  # rows of series, hit, loss, the baseline's loss
    goals = method.startswith("cotenant")
    plain = constants(data, horizon, (0.95,))
    for position, quantile in high.items():
        first, end = data.scored(position, horizon)
        values = data.series[position].values
        truth = values[first + horizon :]
        lost = pinball(truth, quantile), pinball(truth, values[first:end] + plain[position])
        rows = np.column_stack([np.full(len(truth), position), truth <= quantile, *lost])
        parts.setdefault(drawn(data, position), []).append(rows)
    groups, case = [np.concatenate(each) for each in parts.values()], f"{data.name}, {horizon} {data.tick}"
    for metric, figure, goal in (
        ("p95 coverage", lambda r: mean(r[:, 1]), None),
        ("p95 coverage, distance from 0.95", lambda r: abs(mean(r[:, 1]) - 0.95), "<= 0.01"),
        ("p95 coverage, worst series", lambda r: float(shares(r[:, 0], r[:, 1]).min()), ">= 0.92"),
        ("p95 pinball / (persistence + constant)", lambda r: mean(r[:, 2]) / mean(r[:, 3]), "<= 0.5"),
    ):
        value, spread = figure(np.concatenate(groups)), spread_over(groups, figure)
        yield Row(case, method, metric, value, "1", spread, goal if goals else None)


def drawn(data: SeriesSet, position: int) -> str:
    """Return what a series is drawn together with for spreads: its file, or itself where all are of one."""
    return str(position) if data.by_time else data.series[position].group


def shares(series: Floats, hits: Floats) -> Floats:
    """Return the share of hits of every series, (series,), from rows of series numbers and hits."""
    _, place = np.unique(series, return_inverse=True)
    found: Floats = np.bincount(place, hits) / np.bincount(place)
    return found


def pinball(truth: Floats, quantile: Floats) -> Floats:
    """Return the pinball loss at 0.95."""
    return np.maximum(0.95 * (truth - quantile), 0.05 * (quantile - truth))


def forecasts(data: SeriesSet, method: str, found: Forecasts) -> Iterator[Row]:
    """Score all horizons of one method."""
    for j, horizon in enumerate(data.horizons):
        spans = {position: data.scored(position, horizon) for position in found.points}
        scored = {position: span for position, span in spans.items() if span[1] > span[0]}
        yield from judge(data, horizon, method, {i: found.points[i][a:b, j] for i, (a, b) in scored.items()})
        yield from judge_p95(data, horizon, method, {i: found.p95[i][a:b, j] for i, (a, b) in scored.items()})


def over_seeds(data: SeriesSet, outside: Found | None, seeds: int, methods: tuple[str, ...]) -> Iterator[Row]:
    """Score the mixture with trained experts over all seeds: means, with the deviation between seeds as spread."""
    runs = []
    for seed in range(seeds):
        said = trained(data, seed, outside, methods)
        runs.append([row for method, found in said.items() for row in forecasts(data, method, found)])
    for same in zip(*runs, strict=True):
        values = [row.value for row in same]
        spread = statistics.stdev(values) if seeds > 1 else same[0].spread
        yield replace(same[0], value=statistics.fmean(values), spread=spread)


def through_windows(data: SeriesSet, forecaster: Forecaster, horizons: tuple[int, ...]) -> Forecasts:
    """Run a forecaster as the system serves it: one window a second of every series."""
    names = [f"job-{i}" for i in range(len(data.series))]
    shape = [(len(each.values), len(horizons)) for each in data.series]
    found = Forecasts(
        {i: np.full(s, np.nan) for i, s in enumerate(shape)}, {i: np.full(s, np.nan) for i, s in enumerate(shape)}
    )
    for second in range(max(ticks for ticks, _ in shape)):
        here = {i: float(each.values[second]) for i, each in enumerate(data.series) if len(each.values) > second}
        forecaster.observe_batch([window(names[i], second, util, MIB) for i, util in here.items()])
        for i, said in enumerate(forecaster.forecast_batch([names[i] for i in here]).values()):
            position = list(here)[i]
            found.points[position][second] = [said.util[h].p50 for h in horizons]
            found.p95[position][second] = [said.util[h].p95 for h in horizons]
    return found


def as_served(data: SeriesSet) -> Iterator[Row]:
    """Score the simple forecaster at all horizons, and a minute ahead ours and persistence too."""
    far = replace(data, horizons=(*data.horizons, FAR), goals=())
    yield from forecasts(far, HISTORY, through_windows(far, EwQuantileForecaster(), far.horizons))
    far = replace(far, horizons=(FAR,))
    ours = through_windows(far, MixtureForecaster(), far.horizons)
    yield from (replace(row, goal=None) for row in forecasts(far, UNTRAINED, ours))
    last = {i: data.series[i].values[slice(*far.scored(i, FAR))] for i in ours.points}
    yield from judge(far, FAR, "persistence", {i: values for i, values in last.items() if len(values)})


def peak_memory(data: SeriesSet) -> Iterator[Row]:
    """Score the memory that a reservation for the next 5 s would be made of."""
    case = f"{data.name}, peak until 5 s"
    short: dict[str, list[bool]] = {
        "cotenant, p99 at 5 s": [],
        "cotenant, peak until the end": [],
        "largest so far": [],
    }
    waste: dict[str, list[float]] = {name: [] for name in short}
    forecaster, names = MixtureForecaster(), [f"job-{i}" for i in range(len(data.series))]
    for second in range(max(len(each.values) for each in data.series) - 5):
        held = {i: each.values for i, each in enumerate(data.series) if len(each.values) > second + 5}
        forecaster.observe_batch(
            [window(names[i], second, 0.5, float(values[second]) * MIB) for i, values in held.items()]
        )
        said = forecaster.forecast_batch([names[i] for i in held])
        for i, values in held.items():
            if second < data.scored(i, 5)[0]:
                continue
            top = float(values[: second + 1].max())
            truth = max(top, float(values[second + 1 : second + 6].max()))
            forecast = said[names[i]]
            wanted = (max(forecast.memory[5].p99 / MIB, 1.02 * top), forecast.peak_memory_bytes / MIB, top)
            for name, reserved in zip(short, wanted, strict=True):
                short[name].append(truth > reserved)
                waste[name].append(max(0.0, reserved / truth - 1.0))
    for name, missed in short.items():
        goals = ("<= 0.01", "<= 0.12") if name.startswith("cotenant") else (None, None)
        yield Row(case, name, "under-forecast", float(np.mean(missed)), "1", goal=goals[0])
        yield Row(case, name, "waste", float(np.mean(waste[name])), "1", goal=goals[1])


def window(job_id: str, second: int, util: float, memory: float) -> Signature:
    """Return a window of a second."""
    return Signature(job_id, "gpu", float(second), 1.0, 10, util, util, memory, memory, None, 0.0, None, 0, 1.0)


def measure(data: SeriesSet, quick: bool, seeds: int, methods: tuple[str, ...]) -> list[Row]:
    """Return all figures of one set; says what it cost."""
    torch.set_num_threads(1)
    begin = time.process_time()
    rows = list(figures(data, quick, seeds, methods))
    print(f"{data.name}: {time.process_time() - begin:.0f} s of processor time", file=sys.stderr)
    return rows


def figures(data: SeriesSet, quick: bool, seeds: int, methods: tuple[str, ...]) -> Iterator[Row]:
    """Yield all figures of one set."""
    print(f"{data.name}: {len(data.series)} series", file=sys.stderr)
    every = list(range(len(data.series)))
    for horizon in data.horizons:
        if quick:
            spans = {i: data.scored(i, horizon) for i in every}
            last = {i: data.series[i].values[a:b] for i, (a, b) in spans.items() if b > a}
            yield from judge(data, horizon, "persistence", last)
        else:
            for method, found in baselines(data, horizon).items():
                yield from judge(data, horizon, method, found)
    yield from forecasts(data, UNTRAINED, run(data, every))
    outside = None
    if all(each.samples is not None for each in data.series):
        outside = host_predictions(data)
        yield from forecasts(data, WITH_HOST, run(data, every, outside=outside))
        if not quick:
            yield from as_served(data)
    if not quick:
        yield from over_seeds(data, outside, seeds, methods)
    if data.unit == "MiB":
        yield from peak_memory(data)


def main() -> None:
    """Measure and report."""
    parser = options(__doc__ or "")
    parser.add_argument("--only", metavar="TEXT", default="", help="only sets whose names contain this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="train with so many seeds (%(default)s)")
    parser.add_argument("--networks", action="store_true", help="train GRU and TCN too; minutes a fold and seed")
    parser.add_argument("--processes", type=int, default=1, help="measure so many sets at once (%(default)s)")
    args = parser.parse_args()
    sets = [data for data in load(data_folder(), args.quick) if args.only in data.name]
    if not sets:
        print(f"no recorded series named *{args.only}* under {data_folder()}: nothing measured", file=sys.stderr)
        return
    if args.quick:  # the goals are for all series
        sets = [replace(data, series=data.series[:: 2 if len(data.series) < 20 else 6], goals=()) for data in sets]
    methods = (FULL, NETS, ALL) if args.networks else (FULL,)
    with ProcessPoolExecutor(args.processes) as pool:
        measured = pool.map(measure, sets, repeat(args.quick), repeat(args.seeds), repeat(methods))
        rows = [row for found in measured for row in found]
    write_report("forecast", rows, args.json)


def mean(rows: npt.NDArray[Any]) -> float:
    """Return the mean."""
    return float(rows.mean())


def _mean(parts: list[Floats]) -> float:
    return mean(np.concatenate(parts))


if __name__ == "__main__":
    main()
