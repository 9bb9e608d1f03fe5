"""What is forecast of a job that was never seen, before its first sample, from what its hints and its program say.

Ours: the cold-start class of the hints model, model_family, batch_size and parameters, fitted without what is held
out; its middle is judged as a point, its 95th percentile as the forecaster hands it out once it was primed with it.
Baselines of the same folds: the mean of all other runs, a line over the one hint that every job has (the batch size),
and the whole GPU, which is what counts where nothing is known.

Data: the published runs of alnair (``interference/alnair`` under ``--data``, ``$COTENANT_DATA`` or ``../shared/data``
beside the checkout; without it only ours) and the shipped measurements. Held out: a model family, an architecture of
a family with several, or a batch size between two others. Nothing here is drawn: spreads are over what is held out
(``common.spread_over``). The fit's own seed only numbers the classes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import Row, options, spread_over, write_report

from cotenant.forecasting.characterisation.coldstart import QUANTILES, ColdStartClasses, Descriptors
from cotenant.forecasting.characterisation.tables import MEMORY, UTIL, Runs
from cotenant.forecasting.coldstart_profile import profile_from
from cotenant.forecasting.datasets.alnair import DATASET, load_alnair
from cotenant.forecasting.datasets.run_sources import read_run_data
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.training.coldstart import fit
from cotenant.forecasting.training.coldstart_recipe import class_count
from cotenant.forecasting.types import DemandProfile

MIB = 2.0**20
LOW, MIDDLE, HIGH, HIGHEST = (QUANTILES.index(level) for level in (0.1, 0.5, 0.9, 0.95))
ALNAIR = "alnair P100"
KNOWN_BEFORE = {UTIL: 25.5, MEMORY: 28.1}  # points: the best error known from features known before the run
WHOLE = "whole GPU (nothing known)"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Said:
    """What one method says of n held-out runs of one quantity, in its unit."""

    point: Floats
    high: Floats
    low80: Floats | None = None
    high80: Floats | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """One group of runs held out: what was measured of them and who said what, per quantity."""

    truth: dict[str, Floats]
    said: dict[str, dict[str, Said]]


@dataclass(frozen=True, slots=True)
class Quantity:
    """Column of the runs, name and unit of the figures, and what 100 % of the column is in that unit."""

    column: str
    name: str
    unit: str
    whole: float


def folds(runs: Runs, protocol: str) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield which runs are held out together."""
    table = runs.table
    family, architecture = table["family"].to_numpy(str), table["architecture"].to_numpy(str)
    if protocol == "unseen family":
        for name in dict.fromkeys(family):
            yield family == name
    elif protocol == "unseen architecture of a known family":
        for name in dict.fromkeys(architecture):
            own = architecture == name
            if (family[~own] == family[own][0]).any():
                yield own
    else:
        curves = architecture + table["kind"].to_numpy(str)
        for name in dict.fromkeys(curves):
            batches = table["batch"].to_numpy(float)
            for batch in np.unique(batches[curves == name])[1:-1]:
                yield (curves == name) & (batches == batch)


def quantities(runs: Runs) -> tuple[Quantity, Quantity]:
    """Return the two that a job needs before it can share a GPU."""
    whole = float(runs.device_memory_bytes or 0.0) / MIB
    return Quantity(UTIL, "utilisation", "pp", 100.0), Quantity(MEMORY, "memory", "MiB", whole)


def fold(runs: Runs, held: npt.NDArray[np.bool_]) -> Fold:
    """Fit on the others and ask everybody."""
    rest, wanted = runs.table[~held].reset_index(drop=True), runs.table[held]
    types = runs.gpu_types or ("gpu",)  # what is not said is known here: all runs are of one
    model = replace(fit(replace(runs, table=rest), class_count(len(rest))), gpu_types=types)
    jobs = [_descriptors(row) for row in wanted.to_dict("records")]
    truth, said = {}, {}
    for each in quantities(runs):
        known = rest[each.column].to_numpy(float) / 100.0 * each.whole
        batch, new = np.log2(rest["batch"].to_numpy(float)), np.log2(wanted["batch"].to_numpy(float))
        line = np.polynomial.Polynomial.fit(batch, known, 1)
        missed = known - line(batch)
        truth[each.name] = wanted[each.column].to_numpy(float) / 100.0 * each.whole
        guess = np.clip(line(new), 0.0, each.whole)
        everything = np.full(len(wanted), each.whole)
        said[each.name] = {
            "cotenant": ours(model, jobs, each),
            "mean of all": Said(
                np.full(len(wanted), known.mean()), np.full(len(wanted), float(np.quantile(known, 0.95)))
            ),
            "batch size alone": Said(guess, np.minimum(each.whole, guess + np.quantile(missed, 0.95))),
            WHOLE: Said(everything, everything),
        }
    return Fold(truth, said)


def ours(model: ColdStartClasses, jobs: list[Descriptors], quantity: Quantity) -> Said:
    """Return the class's middle and interval, and as its p95 what a primed forecaster says before any window."""
    device = model.device_memory_bytes / MIB
    rows, high = [], []
    for job in jobs:
        found = model.describe(job)
        rows.append(
            [100.0 * value for value in found.util_p95]
            if quantity.column == UTIL
            else [value / MIB for value in found.memory_bytes]
        )
        profile = profile_from(job, None, None, model, model.gpu_types[0])
        high.append(_forecast(profile, quantity, device))
    quantiles = np.array(rows)
    return Said(quantiles[:, MIDDLE], np.array(high), quantiles[:, LOW], quantiles[:, HIGH])


def _forecast(profile: DemandProfile, quantity: Quantity, device: float) -> float:
    """Return p95 of the forecast there is before the first window; the whole GPU where there is none."""
    forecaster = MixtureForecaster()
    forecaster.prime("job", profile)
    forecast = forecaster.forecast("job")
    if forecast is None:
        return 100.0 if quantity.column == UTIL else device
    far = max(forecast.util)
    return 100.0 * forecast.util[far].p95 if quantity.column == UTIL else forecast.memory[far].p95 / MIB


def _descriptors(row: dict[str, object]) -> Descriptors:
    size = row.get("parameters")
    known = isinstance(size, float) and np.isfinite(size)
    return Descriptors(
        str(row["family"]),
        str(row["architecture"]),
        str(row["kind"]),
        float(str(row["batch"])),
        float(str(size)) if known else None,
    )


def figures(runs: Runs, name: str) -> Iterator[Row]:
    """Yield all figures of one table of runs."""
    for protocol in ("unseen family", "unseen architecture of a known family", "unseen batch size between two others"):
        found = [fold(runs, held) for held in folds(runs, protocol)]
        if not found:
            print(f"coldstart: {name}: {protocol}: no runs to hold out", file=sys.stderr)
            continue
        for quantity in quantities(runs):
            case = f"{name}, {protocol}, {quantity.name}"
            yield Row(case, "cotenant", "runs", float(sum(len(each.truth[quantity.name]) for each in found)), "runs")
            for method in found[0].said[quantity.name]:
                yield from scores(case, method, quantity, found)


def scores(case: str, method: str, quantity: Quantity, found: list[Fold]) -> Iterator[Row]:
    """Yield the errors of the point and what its 95th percentile covers and wastes."""
    rows = []
    for each in found:
        said, truth = each.said[quantity.name][method], each.truth[quantity.name]
        low = truth if said.low80 is None else said.low80
        high = truth if said.high80 is None else said.high80
        rows.append(np.column_stack([truth, said.point, said.high, low, high]))

    def row(metric: str, unit: str, figure: Callable[[Floats], float], goal: str | None = None) -> Row:
        return Row(case, method, metric, figure(np.concatenate(rows)), unit, spread_over(rows, figure), goal)

    best = KNOWN_BEFORE[quantity.column] / 100.0 * quantity.whole  # in points of the published data set's device
    goal = f"<= {best:.5g}" if method == "cotenant" and case.startswith(f"{ALNAIR}, unseen family") else None
    yield row("MAE", quantity.unit, lambda r: float(np.abs(r[:, 0] - r[:, 1]).mean()), goal)
    yield row("p95 covers", "1", lambda r: float((r[:, 0] <= r[:, 2] + 1e-9).mean()))
    yield row("p95, pinball", quantity.unit, lambda r: float(pinball(r[:, 0], r[:, 2]).mean()))
    yield row("p95, mean", quantity.unit, lambda r: float(r[:, 2].mean()))
    if method == "cotenant":
        yield row("80 % interval covers", "1", lambda r: float(((r[:, 3] <= r[:, 0]) & (r[:, 0] <= r[:, 4])).mean()))
        yield row("80 % interval, mean width", quantity.unit, lambda r: float((r[:, 4] - r[:, 3]).mean()))


def pinball(truth: Floats, quantile: Floats) -> Floats:
    """Return the pinball loss at 0.95."""
    return np.maximum(0.95 * (truth - quantile), 0.05 * (quantile - truth))


def without_sizes(runs: Runs) -> Runs:
    """Return the runs as jobs name them that do not say how many parameters they have."""
    return replace(runs, table=runs.table.assign(parameters=np.nan))


def sources(data: Path) -> Iterator[tuple[str, Runs]]:
    """Yield names and runs."""
    folder = data / "interference" / "alnair"
    if (folder / DATASET).exists():
        runs = load_alnair(folder).runs
        yield ALNAIR, runs
        yield f"{ALNAIR}, parameters not said", without_sizes(runs)
    else:
        print(f"coldstart: alnair skipped, no {folder / DATASET}; give --data or set COTENANT_DATA", file=sys.stderr)
    yield "own, one core", without_sizes(read_run_data("cpu").runs)  # the sizes of its models were not written down


def main() -> None:
    """Measure and report."""
    parser = options(__doc__ or "")
    parser.add_argument("--data", type=Path, default=None, help="folder with interference/alnair")
    arguments = parser.parse_args()
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = arguments.data or Path(os.environ.get("COTENANT_DATA", beside))
    rows = [row for name, runs in sources(data) for row in figures(runs, name)]
    write_report("coldstart", rows, arguments.json)


if __name__ == "__main__":
    main()
