"""Interference prediction on published pairs: the learned model beside every baseline, on jobs and families held out.

Protocols: LOF = all pairs with a job of one model family leave the training set and are predicted; LOJ = the same for
one job; 20 % row = one job's pairs leave but for a random fifth of its partners. A pair is held out once for either
job: "MAE" scores the mean of the two predictions, as the reference protocol does (that flatters every method by
about .003), "MAE, one fold" only the prediction made without the job whose throughput it is.

Needs the measurements (``--data``, ``$COTENANT_DATA`` or ``../shared/data`` beside the checkout); they are only read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import Row, options, write_report
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from cotenant.forecasting.datasets.bridge import observations
from cotenant.forecasting.datasets.colocation import load_colocation, shipped
from cotenant.forecasting.datasets.pairs import GAVEL_GPUS, load_alnair_mps, load_gavel, load_lucid
from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.observations import FEATURES, pairs_of
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Ints, Jobs, PairTable
from cotenant.forecasting.training.interference import LEAST_ROWS, fit_pairs, from_suite
from cotenant.forecasting.types import DemandProfile

Floats = NDArray[np.float64]
SEEDS = (0, 1, 2)
SEEN = 0.2  # of a new job's partners
RANKS = (0, 1, 2, 3)
UNMEASURED = ("PPO", "TD3")  # Lucid's victims whose published throughput is exactly 1 everywhere
GOALS = {
    "Lucid": {"LOF": 0.040, "LOJ": 0.030, "20 % row": 0.025},
    "Alnair MPS": {"LOF": 0.050, "LOJ": 0.038},
    "Gavel v100": {"LOF": 0.170, "LOJ": 0.074, "20 % row": 0.077},
    "Gavel p100": {"LOF": 0.066, "LOJ": 0.033, "20 % row": 0.028},
    "Gavel k80": {"LOF": 0.047, "LOJ": 0.027, "20 % row": 0.018},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One data set: all its features for the trees, those that the model takes, and how the GPU was shared."""

    name: str
    table: PairTable
    features: tuple[str, ...]
    mode: str | None

    @property
    def ours(self) -> PairTable:
        """The table with the model's features only."""
        columns = [self.table.names.index(name) for name in self.features]
        jobs = self.table.jobs
        return PairTable(
            self.features,
            Jobs(jobs.ids, jobs.families, jobs.features[:, columns]),
            self.table.focal,
            self.table.other,
            self.table.throughput,
            self.table.noise,
        )

    @property
    def truth(self) -> Floats:
        """What is predicted: throughput, at most 1."""
        return np.clip(self.table.throughput, 0.0, 1.0)


@dataclass(slots=True)
class Folds:
    """Predictions of held-out rows, summed over the folds in which a row is held out."""

    rows: int
    total: Floats = field(init=False)
    count: Floats = field(init=False)
    focal_fold: Floats = field(init=False)
    inside: dict[str, list[Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total, self.count = np.zeros(self.rows), np.zeros(self.rows)
        self.focal_fold = np.full(self.rows, np.nan)

    def add(self, rows: Ints, mids: Floats, is_focal: NDArray[np.bool_]) -> None:
        """Take in one fold: its rows, their predictions, and which of them have the held-out group as focal job."""
        self.total[rows] += mids
        self.count[rows] += 1
        self.focal_fold[rows[is_focal]] = mids[is_focal]

    @property
    def mean(self) -> Floats:
        """Per row the mean prediction of its folds."""
        return self.total / self.count


Regress = Callable[[Ints, Ints], Floats]


def folds(table: PairTable, groups: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Every group with the rows to learn from and the rows held out."""
    for group in np.unique(groups[np.concatenate([table.focal, table.other])]):
        touched = table.touched(groups, int(group))
        yield int(group), np.flatnonzero(~touched), np.flatnonzero(touched)


def job_groups(table: PairTable) -> Ints:
    """Every job a group of its own."""
    return np.arange(len(table.jobs), dtype=np.intp)


# ---------------------------------------- the learned model


@dataclass(frozen=True, slots=True)
class Ours:
    """The learned model's held-out predictions: by family, by job, and of a new job partly seen (per seed)."""

    family: Folds
    job: Folds
    partly: list[tuple[Floats, Floats]]


def learned(case: Case, only_families: bool = False) -> Ours:
    """Fit once per family held out; jobs of that family are then held out one by one from the fit that knows the rest.

    The second step conditions the fit on the family's other jobs in closed form. Mean, kernel and trust in rows stay
    those found without the family, so they never saw the job.
    """
    table, truth = case.ours, case.truth
    groups, jobs = table.families(), job_groups(table)
    family, job = Folds(len(table)), Folds(len(table))
    seen: dict[int, tuple[list[Floats], list[Floats]]] = {seed: ([], []) for seed in SEEDS}
    for group, train, test in folds(table, groups):
        model = fit_pairs(table.rows(train), case.mode)
        found = model.predict(table.jobs, table.focal[test], table.other[test])
        family.add(test, found.mid, groups[table.focal[test]] == group)
        name = table.jobs.families[int(np.flatnonzero(groups == group)[0])]
        family.inside[name] = [_inside(found.low, truth[test], found.high)]
        if only_families:
            continue
        whole = model.with_evidence(table.rows(test))
        posterior = whole.posterior()
        origin = np.concatenate([train, test])  # rows of ``whole`` in terms of ``table``
        focal, other = table.focal[origin], table.other[origin]
        for held in np.flatnonzero(groups == group):
            rows = np.flatnonzero((focal == held) | (other == held))
            if not len(rows):
                continue
            found = whole.without(rows, posterior).predict(table.jobs, focal[rows], other[rows])
            job.add(origin[rows], found.mid, jobs[focal[rows]] == held)
            job.inside[str(held)] = [_inside(found.low, truth[origin[rows]], found.high)]
            for seed in SEEDS:
                rows = _unseen(seed, int(held), focal, other, len(jobs))
                found = whole.without(rows, posterior).predict(table.jobs, focal[rows], other[rows])
                seen[seed][0].append(truth[origin[rows]])
                seen[seed][1].append(found.mid)
    partly = [(np.concatenate(a), np.concatenate(b)) for a, b in seen.values() if a]
    return Ours(family, job, partly)


def _unseen(seed: int, held: int, focal: Ints, other: Ints, jobs: int) -> Ints:
    """Rows of the held-out job whose partner was not drawn; the draw depends on seed and job only."""
    drawn = np.random.default_rng([seed, held]).random(jobs) < SEEN
    return np.flatnonzero(((focal == held) & ~drawn[other]) | ((other == held) & ~drawn[focal]))


def _inside(low: Floats, truth: Floats, high: Floats) -> Floats:
    return ((low - 1e-9 <= truth) & (truth <= high + 1e-9)).astype(np.float64)


# ---------------------------------------- baselines


def constant(case: Case) -> Regress:
    """The mean of the training pairs."""
    return lambda train, test: np.full(len(test), case.truth[train].mean())


def trees(case: Case) -> Regress:
    """Gradient-boosted trees (scikit-learn's, standing for LightGBM) on both jobs' features and their combinations."""
    values = case.table.jobs.features
    a, b = values[case.table.focal], values[case.table.other]
    inputs = np.hstack([a, b, a + b, np.minimum(a, b), a - b])
    leaf = 5 if len(case.table) < 400 else 10

    def predict(train: Ints, test: Ints) -> Floats:
        model = HistGradientBoostingRegressor(
            max_iter=200, learning_rate=0.05, max_leaf_nodes=15, min_samples_leaf=leaf, early_stopping=False
        )
        return np.clip(model.fit(inputs[train], case.truth[train]).predict(inputs[test]), 0.0, 1.0)

    return predict


def rules(case: Case) -> dict[str, Floats]:
    """What needs no training: the first predictor, and 1 − half of the utilisation above 100 %."""
    if UTIL not in case.table.names:
        return {}
    util = case.table.jobs.features[:, case.table.names.index(UTIL)]
    u, v = util[case.table.focal], util[case.table.other]
    rule = UtilisationRule()
    profiles = [DemandProfile(float(each), float(each), None, source="history") for each in np.clip(util, 0.0, 1.0)]
    pairs = zip(case.table.focal, case.table.other, strict=True)
    first = np.array([rule.predict([profiles[a], profiles[b]], "any")[0].mid for a, b in pairs])
    return {"utilisation rule": first, "half of the excess": 1.0 - np.clip(u + v - 1.0, 0.0, 1.0) / 2.0}


def completion(case: Case, rank: int, seed: int) -> tuple[Floats, Floats]:
    """Low-rank completion of the matrix of throughputs, one new job at a time with a fifth of its partners seen."""
    table = case.table
    size = len(table.jobs)
    total, count = np.zeros((size, size)), np.zeros((size, size))
    np.add.at(total, (table.focal, table.other), case.truth)
    np.add.at(count, (table.focal, table.other), 1.0)
    matrix = total / np.maximum(count, 1.0)
    truth, guess = [], []
    for held in range(size):
        rows = _unseen(seed, held, table.focal, table.other, size)
        if not len(rows):
            continue
        known = count > 0
        known[table.focal[rows], table.other[rows]] = False
        filled = np.clip(_complete(matrix, known, rank, seed), 0.0, 1.0)
        truth.append(case.truth[rows])
        guess.append(filled[table.focal[rows], table.other[rows]])
    return np.concatenate(truth), np.concatenate(guess)


def _complete(matrix: Floats, known: NDArray[np.bool_], rank: int, seed: int) -> Floats:
    """Row and column means plus ``rank`` factors by alternating ridge regressions."""
    weight = known.astype(np.float64)
    mean = matrix[known].mean()
    row, column = np.zeros(len(matrix)), np.zeros(len(matrix))
    for _ in range(20):
        row = (weight * (matrix - mean - column)).sum(1) / (weight.sum(1) + 1.0)
        column = (weight * (matrix - mean - row[:, None])).sum(0) / (weight.sum(0) + 1.0)
    base = mean + row[:, None] + column
    if rank == 0:
        return base
    rest, ridge = weight * (matrix - base), 0.3 * np.eye(rank)
    right = np.random.default_rng(seed).normal(0.0, 0.1, (len(matrix), rank))
    left = right
    for _ in range(15):
        left = np.linalg.solve(np.einsum("ij,jk,jl->ikl", weight, right, right) + ridge, (rest @ right)[..., None])[
            ..., 0
        ]
        right = np.linalg.solve(np.einsum("ji,jk,jl->ikl", weight, left, left) + ridge, (rest.T @ left)[..., None])[
            ..., 0
        ]
    return base + left @ right.T


# ---------------------------------------- figures


def regret(case: Case, predicted: Floats) -> float:
    """Mean loss in min(n of both) when every job with more than ten measured partners takes the best predicted one."""
    truth = np.minimum(case.truth[0::2], case.truth[1::2])
    guess = np.minimum(predicted[0::2], predicted[1::2])
    a, b = case.table.focal[0::2], case.table.other[0::2]
    losses = []
    for job in range(len(case.table.jobs)):
        mine = np.flatnonzero((a == job) | (b == job))
        if len(mine) > 10:
            losses.append(truth[mine].max() - truth[mine][np.argmax(guess[mine])])
    return float(np.mean(losses))


def mae(truth: Floats, predicted: Floats) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(truth - predicted)))


def r2(truth: Floats, predicted: Floats) -> float:
    """Share of the variance explained."""
    return float(1.0 - np.sum((truth - predicted) ** 2) / np.sum((truth - truth.mean()) ** 2))


def of_ours(case: Case, ours: Ours) -> Iterator[Row]:
    """The learned model's figures, with the goals."""
    goals = GOALS.get(case.name, {})
    for protocol, held in (("LOF", ours.family), ("LOJ", ours.job)):
        if not held.count.any():
            continue
        label, goal = f"{case.name}, {protocol}", goals.get(protocol)
        yield Row(label, "cotenant", "MAE", mae(case.truth, held.mean), "1", goal=f"<= {goal}" if goal else None)
        own = ~np.isnan(held.focal_fold)
        yield Row(label, "cotenant", "MAE, one fold", mae(case.truth[own], held.focal_fold[own]), "1")
        r2_goal = ">= 0.66" if label == "Lucid, LOF" else None
        yield Row(label, "cotenant", "R²", r2(case.truth, held.mean), "1", goal=r2_goal)
        yield from _coverage(label, held, protocol)
    if ours.partly:
        errors = [mae(truth, guess) for truth, guess in ours.partly]
        goal = goals.get("20 % row")
        value, spread = statistics.mean(errors), statistics.stdev(errors)
        yield Row(f"{case.name}, 20 % row", "cotenant", "MAE", value, "1", spread, f"<= {goal}" if goal else None)
    if case.name == "Lucid":
        yield from _lucid_extras(case, ours.family)


def _coverage(label: str, held: Folds, protocol: str) -> Iterator[Row]:
    """Coverage of the 80 % intervals: overall within 2 points of 80 %, no family below 65 %."""
    parts = {name: np.concatenate(values) for name, values in held.inside.items()}
    overall = float(np.mean(np.concatenate(list(parts.values()))))
    yield Row(label, "cotenant", "coverage of the 80 % interval", overall, "1")
    yield Row(label, "cotenant", "that coverage, off from 0.80 by", abs(overall - 0.8), "1", goal="<= 0.02")
    if protocol == "LOF":
        name, worst = min(((name, float(values.mean())) for name, values in parts.items()), key=lambda each: each[1])
        yield Row(label, "cotenant", f"coverage, worst family ({name})", worst, "1", goal=">= 0.65")


def _lucid_extras(case: Case, held: Folds) -> Iterator[Row]:
    families = np.array(case.table.jobs.families)[case.table.focal]
    real = ~np.isin(families, UNMEASURED)
    yield Row("Lucid, LOF", "cotenant", "MAE without PPO/TD3 victims", mae(case.truth[real], held.mean[real]), "1")
    yield Row("Lucid, LOF", "cotenant", "best partner: regret in min(n)", regret(case, held.mean), "1", goal="<= 0.024")


def of_baselines(case: Case, protocols: tuple[str, ...]) -> Iterator[Row]:
    """The baselines' figures on the same folds."""
    table = case.table
    for protocol, groups in (("LOF", table.families()), ("LOJ", job_groups(table))):
        if protocol not in protocols:
            continue
        predicted = dict(rules(case))
        for name, regress in (("constant", constant(case)), ("gradient-boosted trees", trees(case))):
            held = Folds(len(table))
            for group, train, test in folds(table, groups):
                held.add(test, regress(train, test), groups[table.focal[test]] == group)
            predicted[name] = held.mean
        for name, values in predicted.items():
            yield Row(f"{case.name}, {protocol}", name, "MAE", mae(case.truth, values), "1")
            yield Row(f"{case.name}, {protocol}", name, "R²", r2(case.truth, values), "1")
            if case.name == "Lucid" and protocol == "LOF" and name != "constant":
                yield Row("Lucid, LOF", name, "best partner: regret in min(n)", regret(case, values), "1")
    if "20 % row" in protocols:
        for rank in RANKS:
            errors = [mae(*completion(case, rank, seed)) for seed in SEEDS]
            label = f"completion, rank {rank}"
            value, spread = statistics.mean(errors), statistics.stdev(errors)
            yield Row(f"{case.name}, 20 % row", label, "MAE", value, "1", spread)


def cost(case: Case, sets: int = 2000) -> Iterator[Row]:
    """Processor time of one candidate pair, predicted one by one and many at once."""
    table = case.ours
    predictor = LearnedInterference(
        {"gpu": fit_pairs(table.rows(np.arange(0, len(table), 1 + len(table) // 800)), case.mode)}
    )
    column = {name: table.jobs.features[:, k] for k, name in enumerate(table.names)}
    profiles = [
        DemandProfile(
            util_mean=float(column[UTIL][k]),
            util_p95=float(column[UTIL][k]),
            memory_bytes=int(np.exp(column[MEMORY][k])) if MEMORY in column else None,
            solo_step_rate=float(np.exp(-column[STEP][k])),
            source="history",
            membw_util=float(column[BANDWIDTH][k]) if BANDWIDTH in column else None,
            family=table.jobs.families[k],
        )
        for k in range(len(table.jobs))
    ]
    order = np.random.default_rng(0).permutation(len(profiles) ** 2)[:sets]
    pairs = [[profiles[k // len(profiles)], profiles[k % len(profiles)]] for k in order]
    for label, work, count in (
        ("one by one", lambda: _one_by_one(LearnedInterference(predictor.models), pairs[:200]), 200),
        ("asked again", lambda: _one_by_one(predictor, pairs[:200]), 200),
        (f"{len(pairs)} at once", lambda: predictor.predict_many(pairs, "gpu"), len(pairs)),
    ):
        times = []
        for _ in range(3):
            begin = time.process_time()
            work()
            times.append((time.process_time() - begin) / count * 1e6)
        yield Row(f"cost, {len(table.names)} features", "cotenant", f"candidate pair, {label}", min(times), "µs")


def _one_by_one(predictor: LearnedInterference, sets: list[list[DemandProfile]]) -> None:
    for members in sets:
        predictor.predict(members, "gpu")


def cases(data: Path) -> Iterator[Case]:
    """The published data sets."""
    folder = data / "interference"
    yield Case("Lucid", load_lucid(folder / "lucid"), (UTIL, BANDWIDTH, STEP, MEMORY), "timeslice")
    yield Case(
        "Alnair MPS", load_alnair_mps(folder / "alnair/mps_slowdown_matrix_transcribed.csv"), (UTIL, STEP), "mps"
    )
    for gpu in GAVEL_GPUS:
        table = load_gavel(folder / "gavel/simulation_throughputs.json.gz", gpu)
        yield Case(f"Gavel {gpu}", table, ("log_rate", "log_v100_k80", "log_v100_p100"), None)


def own_cases(sources: list[str]) -> Iterator[Case]:
    """Our own measurements (shipped names or folders), one case per GPU type and sharing mode."""
    for source in sources:
        tables = load_colocation(source)
        for gpu_type, mode in sorted(set(zip(tables.pairs["gpu_type"], tables.pairs["mode"], strict=True))):
            found = from_suite(observations(tables, mode, gpu_type))
            table = pairs_of(found, FEATURES)
            kept = tuple(name for k, name in enumerate(FEATURES) if np.isfinite(table.jobs.features[:, k]).all())
            table = pairs_of(found, kept)  # the trees accept no column that is missing throughout
            case = Case(f"own, {gpu_type}, {mode}", table, kept, mode if mode in {"timeslice", "mps"} else None)
            smallest = min((len(train) for _, train, _ in folds(table, table.families())), default=0)
            if smallest >= LEAST_ROWS:
                yield case
            else:
                print(f"interference: skipped {case.name}: too few pairs for a hold-out", file=sys.stderr)


def thinned(case: Case) -> Case:
    """A third of the pairs, both directions of each."""
    pairs = np.arange(0, len(case.table), 2)[::3]
    return Case(case.name, case.table.rows(np.sort(np.concatenate([pairs, pairs + 1]))), case.features, case.mode)


def figures(arguments: argparse.Namespace, data: Path) -> Iterator[Row]:
    """All figures; ``--quick``: a third of Lucid's pairs, families only."""
    if arguments.quick:
        case = thinned(next(cases(data)))
        yield from of_ours(case, learned(case, only_families=True))
        yield from of_baselines(case, ("LOF",))
        return
    published = [*cases(data)]
    for case in (*published, *own_cases([*shipped(), *arguments.own])):
        protocols = ("LOF", "LOJ") if case.name == "Alnair MPS" else ("LOF", "LOJ", "20 % row")
        yield from of_ours(case, learned(case))
        yield from of_baselines(case, protocols)
    for case in published[:2]:
        yield from cost(case)


def main() -> None:
    parser = options("Interference prediction on published pairs, beside every baseline; families and jobs held out.")
    parser.add_argument(
        "--data", type=Path, help="folder with interference/ (default: $COTENANT_DATA or ../shared/data)"
    )
    parser.add_argument(
        "--own", action="append", default=[], metavar="DIR", help="further own measurements; repeatable"
    )
    arguments = parser.parse_args()
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = arguments.data or Path(os.environ.get("COTENANT_DATA", beside))
    if not (data / "interference").is_dir():
        print(
            f"interference: skipped, there is no {data}/interference; give --data or set COTENANT_DATA", file=sys.stderr
        )
        return
    write_report("interference", list(figures(arguments, data)), arguments.json)


if __name__ == "__main__":
    main()
