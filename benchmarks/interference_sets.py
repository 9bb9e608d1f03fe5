"""The measured pairs that ``interference.py`` is scored on, and how groups of jobs are held out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cotenant.forecasting.datasets.bridge import observations
from cotenant.forecasting.datasets.colocation import load_colocation
from cotenant.forecasting.datasets.pairs import GAVEL_GPUS, load_alnair_mps, load_gavel, load_lucid
from cotenant.forecasting.interference.observations import FEATURES, Observation, pairs_of
from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Floats, Ints, Jobs, PairTable
from cotenant.forecasting.training.interference import LEAST_ROWS, from_suite

GAVEL_FEATURES = ("log_rate", "log_v100_k80", "log_v100_p100")


@dataclass(frozen=True, slots=True)
class Case:
    """One data set.

    Attributes:
        name: For the reports.
        table: Pairs with all their features, which the trees get.
        features: Those that the model takes.
        mode: How the GPU was shared, see ``fit_pairs``.
        architectures: Of the jobs, where they are finer than the families; () otherwise.
        measured: What the table was made from; larger sets too. () for published tables.
    """

    name: str
    table: PairTable
    features: tuple[str, ...]
    mode: str | None
    architectures: tuple[str, ...] = ()
    measured: tuple[Observation, ...] = ()

    @property
    def ours(self) -> PairTable:
        """The table with the model's features only."""
        columns = [self.table.names.index(name) for name in self.features]
        jobs = self.table.jobs
        return replace(self.table, names=self.features, jobs=Jobs(jobs.ids, jobs.families, jobs.features[:, columns]))

    @property
    def truth(self) -> Floats:
        """What is predicted: throughput, at most 1."""
        return np.clip(self.table.throughput, 0.0, 1.0)


@dataclass(slots=True)
class Folds:
    """Predictions of held-out rows, summed over the folds in which a row is held out."""

    rows: int
    total: Floats = field(init=False)
    lows: Floats | None = None
    highs: Floats | None = None
    count: Floats = field(init=False)
    focal_fold: Floats = field(init=False)
    inside: dict[str, list[Floats]] = field(default_factory=dict)
    widths: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total, self.count = np.zeros(self.rows), np.zeros(self.rows)
        self.focal_fold = np.full(self.rows, np.nan)

    def add(
        self,
        rows: Ints,
        mids: Floats,
        is_focal: NDArray[np.bool_],
        ends: tuple[Floats, Floats] | None = None,
    ) -> None:
        """Take in one fold: its rows, their predictions, which of them have the held-out group as focal job, and low
        and high ends where there are any.
        """
        if ends is not None:
            if self.lows is None or self.highs is None:
                self.lows, self.highs = np.zeros(self.rows), np.zeros(self.rows)
            self.lows[rows] += ends[0]
            self.highs[rows] += ends[1]
        self.total[rows] += mids
        self.count[rows] += 1
        self.focal_fold[rows[is_focal]] = mids[is_focal]

    def add_interval(self, group: str, low: Floats, truth: Floats, high: Floats) -> None:
        """Note which of a group's rows lie inside their intervals."""
        self.inside.setdefault(group, []).append(((low - 1e-9 <= truth) & (truth <= high + 1e-9)).astype(np.float64))
        self.widths.append(high - low)

    @property
    def mean(self) -> Floats:
        """Per row the mean prediction of its folds; NaN where it was in none."""
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1.0), np.nan)

    @property
    def cautious(self) -> Floats | None:
        """Per row halfway between prediction and low end; None where there are no intervals."""
        return None if self.lows is None else (self.mean + self.lows / np.maximum(self.count, 1.0)) / 2.0

    @property
    def expected(self) -> Floats | None:
        """Per row the mean of what may be, not the middle; None where there are no intervals.

        From the 10 %, 50 % and 90 % quantiles by Swanson's rule, .3, .4 and .3. A throughput cannot exceed 1, so an
        uncertain one near 1 has less to win than to lose.
        """
        if self.lows is None or self.highs is None:
            return None
        return 0.4 * self.mean + 0.3 * (self.lows + self.highs) / np.maximum(self.count, 1.0)


def folds(table: PairTable, groups: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Every group with the rows to learn from and the rows held out."""
    for group in np.unique(groups[np.concatenate([table.focal, table.other])]):
        touched = table.touched(groups, int(group))
        if not touched.all():
            yield int(group), np.flatnonzero(~touched), np.flatnonzero(touched)


def job_groups(table: PairTable) -> Ints:
    """Every job a group of its own."""
    return np.arange(len(table.jobs), dtype=np.intp)


def published(data: Path) -> Iterator[Case]:
    """The published data sets; none where there is no such folder."""
    folder = data / "interference"
    if not folder.is_dir():
        return
    yield Case("Lucid", load_lucid(folder / "lucid"), (UTIL, BANDWIDTH, STEP, MEMORY), "timeslice")
    yield Case(
        "Alnair MPS", load_alnair_mps(folder / "alnair/mps_slowdown_matrix_transcribed.csv"), (UTIL, STEP), "mps"
    )
    for gpu in GAVEL_GPUS:
        table = load_gavel(folder / "gavel/simulation_throughputs.json.gz", gpu)
        yield Case(f"Gavel {gpu}", table, GAVEL_FEATURES, None)


def own_cases(sources: list[str]) -> Iterator[Case]:
    """Our own measurements (shipped names or folders), one case per GPU type and sharing mode."""
    for source in sources:
        tables = load_colocation(source)
        architecture = dict(zip(tables.solo["member"], tables.solo["architecture"], strict=True))
        for gpu_type, mode in sorted(set(zip(tables.pairs["gpu_type"], tables.pairs["mode"], strict=True))):
            found = tuple(from_suite(observations(tables, mode, gpu_type)))
            table = pairs_of(found, FEATURES)
            kept = tuple(name for k, name in enumerate(FEATURES) if np.isfinite(table.jobs.features[:, k]).all())
            table = pairs_of(found, kept)  # the trees accept no column that is missing throughout
            architectures = tuple(str(architecture[name]) for name in table.jobs.ids)
            sharing = mode if mode in {"timeslice", "mps"} else None
            case = Case(f"own, {gpu_type}, {mode}", table, kept, sharing, architectures, found)
            smallest = min((len(train) for _, train, _ in folds(table, table.families())), default=0)
            if smallest >= LEAST_ROWS:
                yield case
            else:
                print(f"interference: skipped {case.name}: too few pairs for a hold-out", file=sys.stderr)


def thinned(case: Case) -> Case:
    """A third of the pairs, both directions of each."""
    pairs = np.arange(0, len(case.table), 2)[::3]
    return replace(case, table=case.table.rows(np.sort(np.concatenate([pairs, pairs + 1]))))


def blanked(table: PairTable, names: tuple[str, ...], jobs: NDArray[np.bool_]) -> Jobs:
    """The table's jobs, of which those marked lack some features."""
    values = np.array(table.jobs.features)
    for name in names:
        values[jobs, table.names.index(name)] = np.nan
    return replace(table.jobs, features=values)


def pair_rows(table: PairTable) -> list[tuple[int, ...]]:
    """The rows of every unordered pair of jobs."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, (a, b) in enumerate(zip(table.focal.tolist(), table.other.tolist(), strict=True)):
        rows.setdefault((min(a, b), max(a, b)), []).append(row)
    return [tuple(each) for each in rows.values()]
