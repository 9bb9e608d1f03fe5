"""What the forecasting benchmark is measured on: recorded series, hold-outs, and the baselines of the same run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingRegressor

from cotenant.forecasting.datasets.series import read_nvidia_smi, read_pod_metric, windows
from cotenant.forecasting.training.demand_fit import untied

Floats = npt.NDArray[np.float64]

MOST_ROWS = 20_000  # the baseline trees learn from at most so many windows, drawn at random
TREES = 150


@dataclass(frozen=True, slots=True)
class Recorded:
    """One series: ``group`` stays together in a hold-out; ``start`` is where its test part begins."""

    group: str
    values: Floats
    start: int = 0
    samples: Floats | None = None  # 100 ms samples behind the windows …
    ends: npt.NDArray[np.intp] | None = None  # … and the last sample of each window (−1: no sample in it)


@dataclass(frozen=True, slots=True)
class SeriesSet:
    """Series of one kind, what is asked of them and what is wanted.

    Attributes:
        name: For the report.
        unit: Unit of the MAE.
        scale: Values times this are in ``unit``.
        most: Largest value.
        horizons: Ticks ahead.
        tick: Name of a tick.
        lags: Values before the first forecast that is scored, as in the reference protocol.
        goals: MAE wanted per horizon, in ``unit``.
        by_time: Train on the first part of every series, not on other files.
    """

    name: str
    unit: str
    scale: float
    most: float
    horizons: tuple[int, ...]
    tick: str
    lags: int
    goals: tuple[float, ...]
    series: list[Recorded]
    by_time: bool = False

    def training(self) -> list[Floats]:
        """Return of every series what may be learnt from when it is not held out."""
        return [each.values[: each.start] if self.by_time else each.values for each in self.series]

    def folds(self) -> Iterator[tuple[set[int], list[int]]]:
        """Yield positions of (training series, test series): leave one file out, or the first part of each."""
        every = range(len(self.series))
        if self.by_time:
            yield set(every), list(every)
            return
        for group in sorted({each.group for each in self.series}):
            held = [i for i in every if self.series[i].group == group]
            yield set(every) - set(held), held

    def scored(self, position: int, horizon: int) -> tuple[int, int]:
        """Return first and one-past-last tick at which a forecast ``horizon`` ahead is scored."""
        each = self.series[position]
        first = each.start + self.lags - 1
        enough = len(each.values) - each.start >= self.lags + horizon + 5
        return (first, len(each.values) - horizon) if enough else (0, 0)


def data_folder() -> Path:
    """Return the folder with recorded series."""
    beside = Path(__file__).parent.parent.parent / "shared" / "data"
    return Path(os.environ.get("COTENANT_DATA", beside)) / "series"


def load(root: Path, quick: bool) -> list[SeriesSet]:
    """Read all sets under ``root``; with ``quick`` only two of the recorded kinds."""
    sets = []
    for kind, pattern, util, memory, raw in (
        ("Titan X", "titanx*.gz", (3.3, 7.9), None, (3.4, 7.6, 15.0)),
        ("H100", "h100*.gz", (0.90, 2.75), (105.0, 405.0), None),
    ):
        files = sorted((root / "gpu_100ms").glob(pattern))
        devices = [device for path in files for device in read_nvidia_smi(path)]
        if not devices:
            continue
        cut = [windows(device) for device in devices]
        utils = [
            Recorded(device.source, util_mean, samples=device.util, ends=_ends(device.seconds, len(util_mean)))
            for device, (util_mean, _) in zip(devices, cut, strict=True)
        ]
        sets.append(SeriesSet(f"{kind} util 1 s", "pp", 100.0, 1.0, (1, 5), "s", 20, util, utils))
        if memory is not None and not quick:
            held = [Recorded(device.source, top / 2**20) for device, (_, top) in zip(devices, cut, strict=True)]
            sets.append(SeriesSet(f"{kind} memory 1 s", "MiB", 1.0, 82_000.0, (1, 5), "s", 20, memory, held))
        if raw is not None and not quick:
            samples = [Recorded(device.source, device.util) for device in devices]
            sets.append(SeriesSet(f"{kind} util 100 ms", "pp", 100.0, 1.0, (1, 10, 50), "×100 ms", 30, raw, samples))
    return sets if quick else sets + _pods(root / "alibaba_genai_2026")


def _pods(folder: Path) -> list[SeriesSet]:
    sets = []
    for name, metric, scale, unit, factor, most, goals in (
        ("GenTD26 util", "gpu_duty_cycle", 100.0, "pp", 100.0, 1.0, (1.55, 1.80)),
        ("GenTD26 memory", "gpu_memory_used_bytes", 2.0**30, "GiB", 1.0, 1e4, (0.198, 0.48)),
    ):
        path = folder / f"pod_{metric}_anon.tar.gz"
        if path.exists():
            series = [
                Recorded(each.source, each.values, start=int(0.7 * len(each.values)))
                for each in read_pod_metric(path, scale)
            ]
            sets.append(SeriesSet(name, unit, factor, most, (1, 5), "×57 s", 20, goals, series, by_time=True))
    return sets


def _ends(seconds: Floats, count: int) -> npt.NDArray[np.intp]:
    index = np.floor(seconds).astype(np.int64)
    ends = np.full(count, -1, dtype=np.intp)
    ends[index - index[0]] = np.arange(len(index))
    return ends


def baselines(data: SeriesSet, horizon: int, seed: int = 0) -> dict[str, dict[int, Floats]]:
    """Return method → test series → predictions at the scored ticks, every fold trained on its training series."""
    found: dict[str, dict[int, Floats]] = {
        name: {} for name in ("persistence", "EWMA", "median", "trees L1", "trees L2")
    }
    for training, held in data.folds():
        pasts, nexts = _examples([data.training()[i] for i in sorted(training)], horizon, data.lags)
        rng = np.random.default_rng(seed)
        if len(pasts) > MOST_ROWS:
            drawn = rng.choice(len(pasts), MOST_ROWS, replace=False)
            pasts, nexts = pasts[drawn], nexts[drawn]
        gain = min(np.arange(0.05, 1.01, 0.05), key=lambda a: float(np.abs(_ewma(pasts, a) - nexts).mean()))
        models = {
            name: HistGradientBoostingRegressor(
                loss=loss,
                max_iter=TREES,
                max_leaf_nodes=31,
                learning_rate=0.05,
                min_samples_leaf=50,
                early_stopping=False,
                random_state=seed,
            ).fit(_inputs(pasts), untied(nexts - pasts[:, -1], rng))
            for name, loss in (("trees L1", "absolute_error"), ("trees L2", "squared_error"))
        }
        for position in held:
            first, end = data.scored(position, horizon)
            if end <= first:
                continue
            values = data.series[position].values
            past = np.lib.stride_tricks.sliding_window_view(values, data.lags)[first - data.lags + 1 :][: end - first]
            found["persistence"][position] = past[:, -1]
            found["EWMA"][position] = _ewma(past, gain)
            found["median"][position] = np.median(past, axis=1)
            for name, model in models.items():
                found[name][position] = np.clip(past[:, -1] + model.predict(_inputs(past)), 0.0, data.most)
    return found


def constants(data: SeriesSet, horizon: int, levels: Sequence[float]) -> dict[int, Floats]:
    """Return per test series the quantiles of what persistence missed on the training series of its fold, (levels,)."""
    found: dict[int, Floats] = {}
    for training, held in data.folds():
        known = [each for i, each in enumerate(data.training()) if i in training]
        missed = np.concatenate([each[horizon:] - each[:-horizon] for each in known if len(each) > horizon])
        found |= dict.fromkeys(held, np.quantile(missed, levels))
    return found


def _examples(training: Sequence[Floats], horizon: int, lags: int) -> tuple[Floats, Floats]:
    pasts, nexts = [], []
    for values in training:
        if len(values) >= lags + horizon + 5:
            pasts.append(np.lib.stride_tricks.sliding_window_view(values, lags)[: len(values) - lags - horizon + 1])
            nexts.append(values[lags + horizon - 1 :])
    return np.concatenate(pasts), np.concatenate(nexts)


def _inputs(past: Floats) -> Floats:
    last = past[:, -1:]
    return np.column_stack(
        [
            past,
            past[:, -5:].mean(axis=1),
            past.mean(axis=1),
            past.std(axis=1),
            past.max(axis=1),
            past.min(axis=1),
            past[:, -1] - past[:, -2],
            (past < 0.05).mean(axis=1),
            past - last,
        ]
    )


def _ewma(past: Floats, gain: float) -> Floats:
    weights = gain * (1.0 - gain) ** np.arange(past.shape[1] - 1, -1, -1)
    weights[0] += 1.0 - weights.sum()
    return past @ weights
