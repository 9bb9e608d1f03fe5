"""What interference predictions are compared with, and the figures that everybody is judged by."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np
from common import Row, spread_over
from interference_sets import Case, Folds, folds, job_groups, pair_rows
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.interference.table import UTIL, Floats, Ints
from cotenant.forecasting.types import DemandProfile

SEEDS = (0, 1, 2, 3, 4)  # of the draw of what is seen of a new job
TREE_SEEDS = (0, 1, 2)
SEEN = 0.2  # of a new job's partners
RANKS = (0, 1, 2, 3)
UNMEASURED = ("PPO", "TD3")  # Lucid's victims whose published throughput is exactly 1 everywhere
ENOUGH_PARTNERS = 10  # for a job's choice of partner to mean anything

Regress = Callable[[Ints, Ints], Floats]


def mae(truth: Floats, predicted: Floats) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(truth - predicted)))


def r2(truth: Floats, predicted: Floats) -> float:
    """Share of the variance explained."""
    return float(1.0 - np.sum((truth - predicted) ** 2) / np.sum((truth - truth.mean()) ** 2))


def regrets(case: Case, predicted: Floats) -> list[Floats]:
    """Losses in min(n of both) when every job with more than ten measured partners takes the best predicted one.

    One array per family of the choosing jobs; none where no job has as many partners.
    """
    pairs = pair_rows(case.table)
    truth = np.array([case.truth[list(rows)].min() for rows in pairs])
    guess = np.array([predicted[list(rows)].min() for rows in pairs])
    a, b = (np.array([side[rows[0]] for rows in pairs]) for side in (case.table.focal, case.table.other))
    losses: dict[str, list[float]] = {}
    for job, family in enumerate(case.table.jobs.families):
        mine = np.flatnonzero((a == job) | (b == job))
        if len(mine) > ENOUGH_PARTNERS:
            losses.setdefault(family, []).append(truth[mine].max() - truth[mine][np.argmax(guess[mine])])
    return [np.array(each) for each in losses.values()]


def by_family(case: Case) -> list[Ints]:
    """The rows of every family of focal jobs: they err together."""
    families = np.array(case.table.jobs.families)[case.table.focal]
    return [np.flatnonzero(families == family) for family in dict.fromkeys(families)]


def spread_of(case: Case, figure: Callable[[Floats, Floats], float], predicted: Floats) -> float | None:
    """The spread over families of ``figure`` of truth and prediction, where there is a prediction."""

    def of(rows: Ints) -> float:
        return figure(case.truth[rows], predicted[rows])

    known = [rows[np.isfinite(predicted[rows])] for rows in by_family(case)]
    return spread_over([rows for rows in known if len(rows)], of)


def scores(case: Case, label: str, method: str, every: list[Folds], goals: dict[str, str] | None = None) -> list[Row]:
    """Both scorings, R², the regret, and Lucid's without the victims that were probably never measured.

    Args:
        case: The data set.
        label: Its name and the protocol.
        method: Whose predictions.
        every: One per seed; the mean over seeds is the value, their standard deviation the spread. Where there is only
            one, nothing is random: the spread is over the families of the focal jobs.
        goals: By metric.
    """
    values: dict[str, list[float]] = {}
    spreads: dict[str, float | None] = {}
    for held in every:
        for name, figure, predicted in _figures(case, held):
            known = np.isfinite(predicted)
            values.setdefault(name, []).append(figure(case.truth[known], predicted[known]))
            spreads[name] = spread_of(case, figure, predicted) if len(every) == 1 else None
        for name, predicted in _choices(held) if method != "constant" and (held.count > 0).all() else ():
            losses = regrets(case, predicted)
            if losses:
                values.setdefault(name, []).append(float(np.mean(np.concatenate(losses))))
                spreads[name] = spread_over(losses, lambda rows: float(rows.mean())) if len(every) == 1 else None
    return [
        Row(
            label,
            method,
            name,
            statistics.mean(each),
            "1",
            statistics.stdev(each) if len(each) > 1 else spreads[name],
            (goals or {}).get(name),
        )
        for name, each in values.items()
    ]


def _figures(case: Case, held: Folds) -> Iterator[tuple[str, Callable[[Floats, Floats], float], Floats]]:
    """Name, how to work it out, and predictions; NaN where they do not count."""
    yield "MAE", mae, held.mean
    yield "MAE, one fold", mae, held.focal_fold
    yield "R²", r2, held.mean
    yield "R², one fold", r2, held.focal_fold
    real = ~np.isin(np.array(case.table.jobs.families)[case.table.focal], UNMEASURED)
    if not real.all():
        yield "MAE without PPO/TD3 victims", mae, np.where(real, held.mean, np.nan)


def _choices(held: Folds) -> Iterator[tuple[str, Floats]]:
    yield "best partner: regret in min(n)", held.mean
    for how, shown in (("halfway to the low end", held.cautious), ("by the expected n", held.expected)):
        if shown is not None:
            yield f"best partner, chosen {how}: regret in min(n)", shown


def unseen(seed: int, held: int, focal: Ints, other: Ints, jobs: int) -> Ints:
    """Rows of the held-out job whose partner was not drawn; the draw depends on seed and job only."""
    drawn = np.random.default_rng([seed, held]).random(jobs) < SEEN
    return np.flatnonzero(((focal == held) & ~drawn[other]) | ((other == held) & ~drawn[focal]))


def constant(case: Case) -> Regress:
    """The mean of the training pairs."""
    return lambda train, test: np.full(len(test), case.truth[train].mean())


def trees(case: Case, seed: int) -> Regress:
    """Gradient-boosted trees (scikit-learn's, standing for LightGBM) on both jobs' features and their combinations."""
    values = case.table.jobs.features
    a, b = values[case.table.focal], values[case.table.other]
    inputs = np.hstack([a, b, a + b, np.minimum(a, b), a - b])
    leaf = 5 if len(case.table) < 400 else 10

    def predict(train: Ints, test: Ints) -> Floats:
        model = HistGradientBoostingRegressor(
            max_iter=200,
            learning_rate=0.05,
            max_leaf_nodes=15,
            min_samples_leaf=leaf,
            max_features=0.8,
            early_stopping=False,
            random_state=seed,
        )
        return np.clip(model.fit(inputs[train], case.truth[train]).predict(inputs[test]), 0.0, 1.0)

    return predict


def profiles(case: Case) -> list[DemandProfile]:
    """The jobs as far as rules look at them."""
    util = case.table.jobs.features[:, case.table.names.index(UTIL)]
    return [DemandProfile(float(each), float(each), None, source="history") for each in np.clip(util, 0.0, 1.0)]


def rules(case: Case) -> dict[str, Floats]:
    """What needs no training: the sum of utilisations, half of its excess, and our own rule, which is the fallback."""
    if UTIL not in case.table.names:
        return {}
    util = case.table.jobs.features[:, case.table.names.index(UTIL)]
    total = util[case.table.focal] + util[case.table.other]
    rule, jobs = UtilisationRule(), profiles(case)
    pairs = zip(case.table.focal, case.table.other, strict=True)
    return {
        "utilisation rule": np.minimum(1.0, 1.0 / np.maximum(total, 1e-6)),
        "half of the excess": 1.0 - np.clip(total - 1.0, 0.0, 1.0) / 2.0,
        "UtilisationRule": np.array([rule.predict([jobs[a], jobs[b]], "any")[0].mid for a, b in pairs]),
    }


def of_baselines(case: Case, protocols: tuple[str, ...]) -> Iterator[Row]:
    """The baselines' figures on the same folds."""
    table = case.table
    grouped = {"LOF": table.families(), "LOJ": job_groups(table)}
    for protocol in (each for each in protocols if each in grouped):
        label, groups = f"{case.name}, {protocol}", grouped[protocol]
        for name, values in rules(case).items():
            held = Folds(len(table))
            rows = np.arange(len(table))
            held.add(rows, values, np.ones(len(table), dtype=np.bool_))
            yield from scores(case, label, name, [held])
        regressions = {"constant": [constant(case)], "trees": [trees(case, seed) for seed in TREE_SEEDS]}
        for name, regress in regressions.items():
            yield from scores(case, label, name, [_held(case, groups, each) for each in regress])
    if "20 % row" in protocols:
        yield from _completions(case)


def _held(case: Case, groups: Ints, regress: Regress) -> Folds:
    held = Folds(len(case.table))
    for group, train, test in folds(case.table, groups):
        held.add(test, regress(train, test), groups[case.table.focal[test]] == group)
    return held


def _completions(case: Case) -> Iterator[Row]:
    label = f"{case.name}, 20 % row"
    for rank in RANKS:
        errors = [mae(*completion(case, rank, seed)) for seed in SEEDS]
        yield Row(label, f"completion, rank {rank}", "MAE", statistics.mean(errors), "1", statistics.stdev(errors))


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
        rows = unseen(seed, held, table.focal, table.other, size)
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
