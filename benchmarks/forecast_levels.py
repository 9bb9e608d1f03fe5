"""Every level and every horizon that is forecast: coverage and pinball loss, and the peak until the end.

Recorded series as in ``forecast.py``, read from the same place. The GPU recordings run through the forecaster as the
system serves it, a window a second, with what hosts foresee: 1, 2, 5, 60 and 300 s ahead (none is long enough for 900).
The pods' readings, one in 57 s, run through the mixture that serves the far horizons: 57, 285 and 912 s ahead.

Baselines of the same run and the same windows: *persistence + constant*, the last value plus the quantile at that
level of what persistence missed on the training series (other files; of the pods the first part of each), and the
simple forecaster's weighted history. The forecaster learns nothing but from the past of the series itself, and nothing
in it is drawn: spreads are over the series, drawn anew by recordings (``common.spread_over``); *trained* has trees
fitted to the other files too, with several seeds, and spreads over these.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch
from common import Row, options, spread_over, write_report
from forecast import MIB, SEEDS, Forecaster, Found, drawn, host_predictions, settings_of, shares, units, window
from forecast_sets import Floats, SeriesSet, constants, data_folder, load

from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.engine import Expert, MixtureSettings
from cotenant.forecasting.demand.hostside import Foreseen
from cotenant.forecasting.demand.mixture import MEMORY_SCALES, UTIL_SCALES
from cotenant.forecasting.training.demand_fit import TrainingOptions, collect, fit_demand
from cotenant.forecasting.training.demand_replay import replay
from cotenant.forecasting.types import LEVELS, Quantiles

Figure = Callable[[Floats], float]

SERVED_S = (1, 2, 5, 60, 300)
MINUTES = (1, 5, 16)  # of 57 s
NAMES = tuple(f"p{100 * level:.0f}" for level in LEVELS)
GIB = 2.0**30
AT, BELOW, LOST, PLAIN_LOST = (1 + part * len(LEVELS) for part in range(4))  # see Groups
SERVED, TRAINED, HISTORY, PLAIN = "cotenant", "cotenant, trained", "weighted history", "persistence + constant"


@dataclass(frozen=True, slots=True)
class Said:
    """Quantiles of every series, (ticks, horizons, levels) each in the units of the set, and its largest forecasts.

    Attributes:
        quantiles: By position of the series.
        peaks: Memory until the end, shape (ticks,); empty where that is not asked.
    """

    quantiles: Found
    peaks: Found


def served(data: SeriesSet, forecaster: Forecaster, outside: Found | None) -> Said:
    """Run a forecaster as the system does, one window a second of every series at once."""
    names = [f"job-{i}" for i in range(len(data.series))]
    shape = (len(data.horizons), len(LEVELS))
    quantiles = {i: np.full((len(each.values), *shape), np.nan) for i, each in enumerate(data.series)}
    peaks = {i: np.full(len(each.values), np.nan) for i, each in enumerate(data.series)}
    factor = {"MiB": MIB, "GiB": GIB}.get(data.unit, 1.0)  # bytes
    for second in range(max(map(len, peaks.values()))):
        here = [i for i, each in enumerate(data.series) if len(each.values) > second]
        now = [float(data.series[i].values[second]) for i in here]
        windows = [
            window(names[i], second, value, MIB) if data.unit == "pp" else window(names[i], second, 0.5, value * factor)
            for i, value in zip(here, now, strict=True)
        ]
        if isinstance(forecaster, MixtureForecaster):
            forecaster.observe_batch(windows, outside and _foreseen(outside, here, second))
        else:
            forecaster.observe_batch(windows)
        found = forecaster.forecast_batch([names[i] for i in here])
        for i in here:
            each = found[names[i]]
            wanted = each.util if data.unit == "pp" else each.memory
            quantiles[i][second] = np.array([_row(wanted[h]) for h in data.horizons]) / factor
            peaks[i][second] = each.peak_memory_bytes / factor
    return Said(quantiles, peaks if data.unit != "pp" else {})


def replayed(
    data: SeriesSet,
    settings: MixtureSettings,
    held: Sequence[int],
    outside: Found | None,
    experts: Callable[[int], Sequence[Expert]] | None = None,
) -> Found:
    """Run one mixture over test series, all at once, tick by tick."""
    series = [data.series[i].values for i in held]
    more = {} if experts is None else {"experts": experts}
    beside = None if outside is None else [outside[i] for i in held]
    said = replay(series, settings, units=[units(data, each) for each in series], outside=beside, **more)
    return {i: each.quantiles for i, each in zip(held, said, strict=True)}


def trained(data: SeriesSet, seed: int, outside: Found | None) -> Found:
    """Forecast every fold with trees that were fitted to the others."""
    settings, training, found = settings_of(data), data.training(), Found()
    examples = collect(training, settings, [units(data, each) for each in training])
    for known, held in data.folds():
        artefacts = fit_demand(examples.of(known), settings, ("trees",), TrainingOptions(seed=seed))
        found |= replayed(
            data, settings, held, outside, lambda rows, a=artefacts: [a["trees"].expert(settings.horizons, rows)]
        )
    return found


def judge(data: SeriesSet, horizon: int, method: str, said: Found) -> Iterator[Row]:
    """Score what was said (ticks, levels) of one horizon: every level alone, then all of them."""
    case, groups = f"{data.name}, {horizon} {data.tick}", Groups(data, horizon, said)
    if not groups.rows:
        return
    ours = method.startswith("cotenant")
    for k, (level, name) in enumerate(zip(LEVELS, NAMES, strict=True)):
        goals = ("<= 0.01", ">= 0.92", "<= 0.5") if ours and level == 0.95 else (None, None, None)
        yield groups.row(case, method, f"{name} covers", covers(k))
        yield groups.row(case, method, f"{name} is above", covers(k, BELOW))
        if method == PLAIN:
            continue
        yield groups.row(case, method, f"{name} covers, distance from {level:g}", distance(k, level), goals[0])
        yield groups.row(case, method, f"{name} off, ties left out", off(k, level))
        worst, which = (least, "covers, worst series") if level > 0.5 else (most, "is above, worst series")
        yield groups.row(case, method, f"{name} {which}", worst(k), goals[1])
        yield groups.row(case, method, f"{name} pinball / ({PLAIN})", ratio([k]), goals[2])
    if method != PLAIN:
        yield groups.row(case, method, f"pinball of all levels / ({PLAIN})", ratio([*range(len(LEVELS))]))


class Groups:
    """What was said of every recording, one row a forecast.

    Columns: the series; by level whether what came is at or below the quantile, whether it is below it, the loss, and
    the baseline's loss.
    """

    def __init__(self, data: SeriesSet, horizon: int, said: Found) -> None:
        plain, by_group = constants(data, horizon, LEVELS), dict[str, list[Floats]]()
        for position, quantiles in said.items():
            first, end = data.scored(position, horizon)
            if end <= first:
                continue
            values = data.series[position].values
            truth, guess = values[first + horizon :, None], quantiles[first:end]
            other = values[first:end, None] + plain[position]
            series = np.full((end - first, 1), position)
            parts = (series, truth <= guess, truth < guess, pinball(truth, guess), pinball(truth, other))
            by_group.setdefault(drawn(data, position), []).append(np.concatenate(parts, axis=1))
        self.rows = [np.concatenate(each) for each in by_group.values()]

    def row(self, case: str, method: str, metric: str, figure: Figure, goal: str | None = None) -> Row:
        """Make a figure with its spread."""
        value = figure(np.concatenate(self.rows))
        return Row(case, method, metric, value, "1", spread_over(self.rows, figure), goal)


def covers(k: int, part: int = AT) -> Figure:
    """How much of what came is at or below a quantile, or below it."""
    return lambda rows: float(rows[:, part + k].mean())


def distance(k: int, level: float) -> Figure:
    """How far what is at or below a quantile is from what it says."""
    return lambda rows: abs(float(rows[:, AT + k].mean()) - level)


def off(k: int, level: float) -> Figure:
    """The same of readings that often are exactly the quantile: 0 where the level lies between below and at most."""
    return lambda rows: max(0.0, float(rows[:, BELOW + k].mean()) - level, level - float(rows[:, AT + k].mean()))


def least(k: int) -> Figure:
    """What an upper quantile covers of the series of which it covers the least."""
    return lambda rows: float(shares(rows[:, 0], rows[:, AT + k]).min())


def most(k: int) -> Figure:
    """How much lies below a lower quantile in the series of which most does."""
    return lambda rows: float(shares(rows[:, 0], rows[:, BELOW + k]).max())


def ratio(levels: list[int]) -> Figure:
    """Pinball losses over the baseline's; 1 where neither loses anything."""
    own, plain = np.array(levels) + LOST, np.array(levels) + PLAIN_LOST

    def figure(rows: Floats) -> float:
        lost = rows[:, plain].mean()
        return float(rows[:, own].mean() / lost) if lost else 1.0

    return figure


def pinball(truth: Floats, quantiles: Floats) -> Floats:
    """Return the losses of quantiles at ``LEVELS``, shapes (n, 1) and (n, levels)."""
    levels = np.array(LEVELS)
    return np.maximum(levels * (truth - quantiles), (1.0 - levels) * (quantiles - truth))


def until_the_end(data: SeriesSet, peaks: Found) -> Iterator[Row]:
    """Score reservations for the rest of the recording, begun at every scored tick, and the baselines of one number."""
    case, rows = f"{data.name}, peak until the end", dict[str, dict[str, list[Floats]]]()
    for training, held in data.folds():
        elsewhere = max(float(each.max()) for i, each in enumerate(data.training()) if i in training)
        for i in held:
            values, first = data.series[i].values, data.scored(i, 1)[0]
            top = np.maximum.accumulate(values)
            truth = np.maximum(top, np.maximum.accumulate(values[::-1])[::-1])[first:-1]
            methods = {
                "cotenant": peaks[i][first:-1],
                "largest so far": top[first:-1],
                "largest so far + 25 %": 1.25 * top[first:-1],
                "largest elsewhere": np.full(len(truth), elsewhere),
            }
            for method, reserved in methods.items():
                over = np.maximum(0.0, reserved / np.maximum(truth, 1e-9) - 1.0)
                rows.setdefault(method, {}).setdefault(drawn(data, i), []).append(
                    np.column_stack([truth > reserved, over])
                )
    for method, by_group in rows.items():
        groups = [np.concatenate(each) for each in by_group.values()]
        for metric, figure in (("under-forecast", missed), ("waste", wasted)):
            yield Row(case, method, metric, figure(np.concatenate(groups)), "1", spread_over(groups, figure))


def missed(rows: Floats) -> float:
    """How many of the reservations (n, 2) are too small."""
    return float(rows[:, 0].mean())


def wasted(rows: Floats) -> float:
    """How much is reserved beyond what was needed."""
    return float(rows[:, 1].mean())


def figures(data: SeriesSet, seeds: int) -> Iterator[Row]:
    """Yield all figures of one set."""
    near = not data.by_time
    outside = host_predictions(data) if near and all(each.samples is not None for each in data.series) else None
    far = replace(data, horizons=SERVED_S if near else MINUTES, goals=())
    every = range(len(data.series))
    if near:
        said = served(far, MixtureForecaster(), outside)
        methods = {SERVED: said.quantiles, HISTORY: served(far, EwQuantileForecaster(), None).quantiles}
    else:
        scales = UTIL_SCALES if data.unit == "pp" else MEMORY_SCALES
        settings = replace(scales[-1][1], horizons=MINUTES, resolution=settings_of(data).resolution)
        said = served(replace(far, horizons=(1,)), MixtureForecaster(), None) if data.unit != "pp" else Said({}, {})
        methods = {SERVED: replayed(far, settings, every, None)}
    plain = {i: np.zeros((len(data.series[i].values), len(far.horizons), len(LEVELS))) for i in every}
    for j, horizon in enumerate(far.horizons):
        for i, constant in constants(far, horizon, LEVELS).items():
            plain[i][:, j] = data.series[i].values[:, None] + constant
        for method, found in {**methods, PLAIN: plain}.items():
            yield from judge(far, horizon, method, {i: each[:, j] for i, each in found.items()})
    if said.peaks:
        yield from until_the_end(far, said.peaks)
    yield from over_seeds(data, outside, seeds)


def over_seeds(data: SeriesSet, outside: Found | None, seeds: int) -> Iterator[Row]:
    """Score the mixture with trained trees at its own horizons: means over seeds, spread over seeds."""
    runs: list[list[Row]] = []
    for seed in range(seeds):
        found = trained(data, seed, outside)
        said = [{i: each[:, j] for i, each in found.items()} for j in range(len(data.horizons))]
        runs.append([row for h, each in zip(data.horizons, said, strict=True) for row in judge(data, h, TRAINED, each)])
    for same in zip(*runs, strict=True):
        values = [row.value for row in same]
        spread = statistics.stdev(values) if seeds > 1 else same[0].spread
        yield replace(same[0], value=statistics.fmean(values), spread=spread)


def measure(data: SeriesSet, seeds: int) -> list[Row]:
    """Return all figures of one set."""
    torch.set_num_threads(1)
    lengths = sorted(len(each.values) for each in data.series)
    print(f"{data.name}: {len(lengths)} series of {lengths[0]} to {lengths[-1]} ticks", file=sys.stderr)
    return list(figures(data, seeds))


def main() -> None:
    """Measure and report."""
    parser = options(__doc__ or "")
    parser.add_argument("--only", metavar="TEXT", default="", help="only sets whose names contain this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="train with so many seeds (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="measure so many sets at once (%(default)s)")
    args = parser.parse_args()
    sets = [data for data in load(data_folder(), args.quick) if args.only in data.name and "100 ms" not in data.name]
    if not sets:
        print(f"no recorded series named *{args.only}* under {data_folder()}: nothing measured", file=sys.stderr)
        return
    if args.quick:
        sets = [replace(data, series=data.series[:: 2 if len(data.series) < 20 else 6]) for data in sets]
    with ProcessPoolExecutor(args.processes) as pool:
        rows = [row for found in pool.map(measure, sets, repeat(0 if args.quick else args.seeds)) for row in found]
    write_report("forecast_levels", rows, args.json)


def _foreseen(outside: Found, here: Sequence[int], second: int) -> Foreseen:
    return {(f"job-{i}", "gpu"): tuple(outside[i][second].ravel().tolist()) for i in here}


def _row(quantiles: Quantiles) -> tuple[float, ...]:
    return (quantiles.p10, quantiles.p50, quantiles.p90, quantiles.p95, quantiles.p99)


if __name__ == "__main__":
    main()
