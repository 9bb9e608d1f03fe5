"""The first demand forecaster: cost for 10,000 jobs on one core, and error on recorded utilisation.

The error part needs recorded series (nvidia-smi every 100 ms; files ``gpu_100ms/*.csv.gz`` under ``--data`` or
``$COTENANT_DATA``/series) and is skipped where they are absent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from common import Row, options, write_report

from cotenant.forecasting.demand import EwQuantileForecaster
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import Signature

JOBS = 10_000
HORIZONS = (1, 2, 5, 60)
SAMPLES_PER_WINDOW = 10


def window(job_id: str, second: int, util: float, memory: float) -> Signature:
    """One window of one second of a job that is alone."""
    return Signature(
        job_id=job_id,
        gpu_id="gpu",
        start_s=float(second),
        window_s=1.0,
        samples=SAMPLES_PER_WINDOW,
        util_mean=util,
        util_peak=util,
        memory_bytes=memory,
        memory_peak_bytes=memory,
        step_rate=10.0,
        throttled_fraction=0.0,
        host_cores=0.0,
        neighbours=0,
        compute_share=1.0,
    )


def cost(repeats: int) -> Iterator[Row]:
    """Processor time of one second's work for 10,000 jobs (not wall time: other work on the machine does not count)."""
    rng = np.random.default_rng(0)
    forecaster, book = EwQuantileForecaster(), ProfileBook()
    names = [f"job-{i}" for i in range(JOBS)]
    times: dict[str, list[float]] = {"observe": [], "forecast": [], "profiles": []}
    for second in range(repeats + 3):
        utils, memories = rng.random(JOBS), rng.random(JOBS) * 2.0**33
        batch = [window(n, second, u, m) for n, u, m in zip(names, utils.tolist(), memories.tolist(), strict=True)]
        marks = [time.process_time()]
        forecaster.observe_batch(batch)
        marks.append(time.process_time())
        forecaster.forecast_batch(names)
        marks.append(time.process_time())
        for signature in batch:
            book.observe(signature, signature.job_id)
        marks.append(time.process_time())
        if second >= 3:  # the first rounds grow the tables
            for name, begin, end in zip(times, marks, marks[1:], strict=False):
                times[name].append((end - begin) * 1e3)
    goals = {"observe": "<= 100"}
    for name, values in times.items():
        spread = statistics.stdev(values)
        yield Row(
            f"{JOBS} jobs, processor time", "cotenant", name, statistics.median(values), "ms", spread, goals.get(name)
        )


@dataclass(frozen=True, slots=True)
class Series:
    """Mean utilisation of each second of one GPU, fraction."""

    name: str
    util: list[float]


def read(path: Path) -> list[Series]:
    """Cut one recording into windows of a second per GPU. Its rows are interleaved, one per GPU in turn."""
    frame = pd.read_csv(path, skipinitialspace=True)
    column = next(name for name in frame.columns if name.startswith("utilization.gpu"))
    util = frame[column].astype(str).str.rstrip(" %").astype(float).to_numpy() / 100.0
    gpus = 8 if path.name.startswith("h100") else 2
    rows = len(util) // gpus // SAMPLES_PER_WINDOW * SAMPLES_PER_WINDOW
    table = util[: rows * gpus].reshape(rows // SAMPLES_PER_WINDOW, SAMPLES_PER_WINDOW, gpus).mean(axis=1)
    kind = "H100" if gpus == 8 else "Titan X"
    return [Series(kind, table[:, gpu].tolist()) for gpu in range(gpus) if table[:, gpu].max() > 0.05]


def error(series: list[Series], limit: int) -> Iterator[Row]:
    """Forecast every second of every series and compare with what came."""
    for kind in sorted({each.name for each in series}):
        misses: dict[tuple[str, int], list[float]] = {}
        covered: dict[int, list[bool]] = {}
        for each in (one for one in series if one.name == kind):
            util = each.util[:limit]
            forecaster = EwQuantileForecaster()
            for second, value in enumerate(util):
                forecaster.observe(window("job", second, value, 1.0))
                forecast = forecaster.forecast("job")
                for horizon in HORIZONS if forecast and second >= 10 else ():
                    if second + horizon < len(util):
                        truth = util[second + horizon]
                        misses.setdefault(("cotenant", horizon), []).append(abs(forecast.util[horizon].p50 - truth))
                        misses.setdefault(("persistence", horizon), []).append(abs(value - truth))
                        covered.setdefault(horizon, []).append(truth <= forecast.util[horizon].p95 + 0.005)
        for (method, horizon), values in sorted(misses.items(), key=lambda item: item[0][1]):
            yield Row(f"{kind}, {horizon} s ahead", method, "MAE of utilisation", statistics.fmean(values), "1")
        for horizon, hits in covered.items():
            yield Row(f"{kind}, {horizon} s ahead", "cotenant", "coverage of p95", statistics.fmean(hits), "1")


def main() -> None:
    """Measure and report."""
    parser: argparse.ArgumentParser = options(__doc__ or "")
    parser.add_argument("--data", type=Path, help="folder with gpu_100ms/*.csv.gz")
    args = parser.parse_args()
    rows = list(cost(10 if args.quick else 50))
    root = args.data or Path(os.environ.get("COTENANT_DATA", "data")) / "series"
    files = sorted((root / "gpu_100ms").glob("*.csv.gz"))
    if files:
        series = [each for path in files for each in read(path)]
        rows += error(series[::4] if args.quick else series, 600 if args.quick else 3600)
    else:
        print(f"no recordings under {root}/gpu_100ms: error not measured", file=sys.stderr)
    write_report("forecast_demand", rows, args.json)


if __name__ == "__main__":
    main()
