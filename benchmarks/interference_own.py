"""Our own measurements, pair by pair: measured against predicted slowdown, and triples from pairs."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row, spread_over
from interference_sets import Case

from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import CAPACITY_LOSS, FULL_LOSS_AT, SHARING_COST, UtilisationRule
from cotenant.forecasting.training.interference import fit_pairs
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction

CLOSE = 0.1  # of n
LOSSES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
COSTS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One job in one set: what was measured, and what was predicted without any pair of its family."""

    measured: Observation
    ours: ThroughputPrediction
    rule: ThroughputPrediction
    plain: float  # 1 / max(1, sum of utilisations)


def pairs(case: Case) -> list[Predicted]:
    """Every measured pair, in order of set and job."""
    found = [each for each in case.measured if len(each.others) == 1]
    return _without_the_family(case, sorted(found, key=lambda each: (_set(each), each.focal.fingerprint)))


def of_pairs(case: Case, found: list[Predicted]) -> Iterator[Row]:
    """How far predicted slowdowns and savings are from the measured ones, over all pairs."""
    label, groups = f"{case.name}, all pairs, LOF", _by_family([each.measured for each in found])
    n = np.array([min(1.0, each.measured.throughput) for each in found])
    for method, predict in _methods().items():
        guess = np.array([predict(each) for each in found])
        slowdown = 1 / guess - 1 / n
        yield _over(label, method, "MAE of n", np.abs(guess - n), groups)
        yield _over(label, method, "mean error of n", guess - n, groups)
        yield _over(label, method, "MAE of the slowdown", np.abs(slowdown), groups)
        yield _over(label, method, "mean error of the slowdown", slowdown, groups)
        yield _over(label, method, f"predictions of n within {CLOSE}", np.abs(guess - n) <= CLOSE, groups)
        errors, families = _saving_errors(found, n, guess)
        yield _over(label, method, "MAE of the saving", np.abs(errors), families)
        yield _over(label, method, "mean error of the saving", errors, families)
    inside = [each.ours.low <= min(1.0, each.measured.throughput) <= each.ours.high for each in found]
    overlap = [each.ours.low <= each.measured.high and min(1.0, each.measured.low) <= each.ours.high for each in found]
    yield _over(label, "cotenant", "coverage of the 80 % interval", np.array(inside), groups)
    yield _over(label, "cotenant", "measured and predicted intervals overlap", np.array(overlap), groups)


def _by_family(rows: list[Observation]) -> list[np.ndarray]:
    """The numbers of the rows of every family of focal jobs: they err together."""
    families = np.array([each.focal.family for each in rows])
    return [np.flatnonzero(families == name) for name in dict.fromkeys(families)]


def _over(case: str, method: str, metric: str, values: np.ndarray, groups: list[np.ndarray]) -> Row:
    """A mean, with its spread over the groups."""
    spread = spread_over(groups, lambda rows: float(np.mean(values[rows])))
    return Row(case, method, metric, float(np.mean(values)), "1", spread)


def of_triples(case: Case) -> Iterator[Row]:
    """Sets of three from pairs: with every pair of the focal job's family unseen, and with all pairs measured."""
    triples = [each for each in case.measured if len(each.others) == 2]
    if not triples:
        return
    truth, groups = np.array([min(1.0, each.throughput) for each in triples]), _by_family(triples)
    whole = LearnedInterference({triples[0].gpu_type: fit_pairs(case.ours, case.mode)})
    known = [whole.predict([each.focal, *each.others], each.gpu_type)[0] for each in triples]
    by_pair = {
        (each.focal.fingerprint, each.others[0].fingerprint): each for each in case.measured if len(each.others) == 1
    }
    for label, found in (
        ("focal family unseen", [each.ours for each in _without_the_family(case, triples)]),
        ("all pairs known", known),
    ):
        yield from _judged(f"{case.name}, triples, {label}", found, truth, groups)
    name = f"{case.name}, triples, all pairs known"
    complete = [each for each in triples if all(key in by_pair for key in _pairs_of_set(each))]
    products = [math.prod(min(1.0, by_pair[key].throughput) for key in _pairs_of_set(each)) for each in complete]
    errors = np.abs(np.array([min(1.0, each.throughput) for each in complete]) - np.array(products))
    yield _over(name, "product of the measured pairs", "MAE of n", errors, _by_family(complete))
    rule = UtilisationRule()
    guesses = [rule.predict([each.focal, *each.others], each.gpu_type)[0].mid for each in triples]
    yield _over(name, "UtilisationRule", "MAE of n", np.abs(truth - np.array(guesses)), groups)
    yield Row(name, "cotenant", "rows", float(len(triples)), "rows")


def of_lessons(case: Case) -> Iterator[Row]:
    """What one measured triple of a job, its family unseen, teaches of the job's pairs with other families."""
    pairs = [each for each in case.measured if len(each.others) == 1]
    predictors, asked, before, after = _unseen(case), [], [], []
    for triple in (each for each in case.measured if len(each.others) == 2):
        predictor = predictors[triple.focal.family]
        told = predictor.with_evidence([triple])
        for each in pairs:
            other = each.others[0]
            if each.focal.fingerprint == triple.focal.fingerprint and other.family != triple.focal.family:
                asked.append(each)
                for known, found in ((predictor, before), (told, after)):
                    found.append(known.predict([each.focal, other], each.gpu_type)[0])
    if not asked:
        return
    truth, groups = np.array([min(1.0, each.throughput) for each in asked]), _by_family(asked)
    for label, predictions in (("nothing", before), ("one triple", after)):
        name = f"{case.name}, pairs of a job of an unseen family, {label} measured"
        yield from _judged(name, predictions, truth, groups)


def _judged(case: str, found: list[ThroughputPrediction], truth: np.ndarray, groups: list[np.ndarray]) -> Iterator[Row]:
    """Error of the predictions, and how many of their intervals hold the truth."""
    errors = np.abs(truth - np.array([each.mid for each in found]))
    yield _over(case, "cotenant", "MAE of n", errors, groups)
    inside = [each.low <= n <= each.high for each, n in zip(found, truth, strict=True)]
    yield _over(case, "cotenant", "coverage of the 80 % interval", np.array(inside), groups)


def of_rule(case: Case) -> Iterator[Row]:
    """The rule with its two numbers as they are, and fitted to half of the families; on the other half, every split."""
    found = [each for each in case.measured if len(each.others) == 1]
    n = np.array([min(1.0, each.throughput) for each in found])
    sets = np.array([_set(each) for each in found])
    families = np.array([[each.focal.family, each.others[0].family] for each in found])
    guesses = {numbers: _rule(found, *numbers) for numbers in itertools.product(LOSSES, COSTS)}
    errors: dict[str, list[tuple[float, float]]] = {}
    for half in itertools.combinations(sorted(set(families.ravel())), len(set(families.ravel())) // 2):
        here, there = np.isin(families, half).all(axis=1), ~np.isin(families, half).any(axis=1)
        best = min(guesses, key=lambda numbers: _pair_errors(n[here], guesses[numbers][here], sets[here])[1])
        for name, numbers in (
            ("as it is", (CAPACITY_LOSS, SHARING_COST)),
            ("fitted", best),
            ("before, 0.08", (0.08, 0.05)),
        ):
            errors.setdefault(name, []).append(_pair_errors(n[there], guesses[numbers][there], sets[there]))
    for name, values in errors.items():
        for metric, each in zip(("MAE of n", "MAE of the saving"), np.array(values).T, strict=True):
            label = f"{case.name}, the rule on half of the families"
            yield Row(label, f"UtilisationRule, {name}", metric, float(each.mean()), "1", float(each.std(ddof=1)))


def _rule(found: list[Observation], loss: float, cost: float) -> np.ndarray:
    u, v = (
        np.array([_util(job) for job in side]) for side in zip(*((e.focal, e.others[0]) for e in found), strict=True)
    )
    capacity = 1.0 - loss * np.minimum(1.0, np.minimum(u, v) / FULL_LOSS_AT)
    part = np.minimum(u, np.maximum(capacity - v, capacity / 2.0))
    return np.asarray(part / u / (1.0 + cost * v))


def _pair_errors(n: np.ndarray, guess: np.ndarray, sets: np.ndarray) -> tuple[float, float]:
    """Mean absolute errors of n and of the saving."""
    rows = [np.flatnonzero(sets == name) for name in np.unique(sets)]
    saving = [abs(1.0 / n[both].sum() - 1.0 / guess[both].sum()) for both in rows if len(both) == 2]
    return float(np.mean(np.abs(guess - n))), float(np.mean(saving))


def write_pairs(path: Path, found: list[Predicted]) -> None:
    """One line per pair and job as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        ends = ("low", "n", "high")
        writer.writerow(
            [
                *("gpu_type", "pair", "job", "family", "neighbour", "neighbour_family"),
                *(f"measured_{end}" for end in ends),
                *(f"predicted_{end}" for end in ends),
                *("rule_n", "measured_slowdown", "predicted_slowdown"),
            ]
        )
        for each in found:
            seen, ours = each.measured, each.ours
            numbers = (seen.low, seen.throughput, seen.high, ours.low, ours.mid, ours.high, each.rule.mid)
            slowdowns = (1.0 / seen.throughput, 1.0 / ours.mid)
            other = seen.others[0]
            writer.writerow(
                [
                    *(seen.gpu_type, _set(seen), seen.focal.fingerprint, seen.focal.family),
                    *(other.fingerprint, other.family),
                    *(f"{value:.4f}" for value in (*numbers, *slowdowns)),
                ]
            )


def _unseen(case: Case) -> dict[str, LearnedInterference]:
    """Per family a predictor that saw no pair of it."""
    table = case.ours
    names = np.array(table.jobs.families)
    return {
        family: LearnedInterference(
            {
                case.measured[0].gpu_type: fit_pairs(
                    table.rows(~((names == family)[table.focal] | (names == family)[table.other])), case.mode
                )
            }
        )
        for family in sorted({each.focal.family for each in case.measured})
    }


def _without_the_family(case: Case, wanted: list[Observation]) -> list[Predicted]:
    predictors = _unseen(case)
    rule = UtilisationRule()
    return [
        Predicted(
            each,
            predictors[each.focal.family].predict([each.focal, *each.others], each.gpu_type)[0],
            rule.predict([each.focal, *each.others], each.gpu_type)[0],
            1.0 / max(1.0, math.fsum(_util(job) for job in (each.focal, *each.others))),
        )
        for each in wanted
    ]


def _methods() -> dict[str, object]:
    return {
        "cotenant": lambda each: each.ours.mid,
        "UtilisationRule": lambda each: each.rule.mid,
        "utilisation rule": lambda each: each.plain,
    }


def _saving_errors(found: list[Predicted], n: np.ndarray, guess: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Predicted − measured packing saving, 1 − 1/Σ n, of every pair of which both jobs were measured; and by family."""
    rows: dict[str, list[int]] = {}
    for row, each in enumerate(found):
        rows.setdefault(_set(each.measured), []).append(row)
    both = np.array([each for each in rows.values() if len(each) == 2])
    errors = 1.0 / n[both].sum(axis=1) - 1.0 / guess[both].sum(axis=1)
    return errors, _by_family([found[row].measured for row in both[:, 0]])


def _pairs_of_set(each: Observation) -> list[tuple[str, str]]:
    return [(each.focal.fingerprint, other.fingerprint) for other in each.others]


def _set(each: Observation) -> str:
    return "+".join(sorted(job.fingerprint for job in (each.focal, *each.others)))


def _util(job: DemandProfile) -> float:
    return 1.0 if job.source == "unknown" else job.util_mean
