"""Further questions to the learned model: new jobs, missing features, other GPU types, cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from common import Row, spread_over
from interference_baselines import by_family, mae, r2, rules, spread_of
from interference_sets import Case, folds
from numpy.typing import NDArray

from cotenant.forecasting.interference.learned import OTHER_TYPE_WIDENS, LearnedInterference
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Floats, Ints, Jobs, PairTable
from cotenant.forecasting.profiles import on_type
from cotenant.forecasting.training.interference import fit_pairs
from cotenant.forecasting.types import DemandProfile

OBSERVED = (0, 1, 2, 5)  # pairs of a new job
ONLINE_SEEDS = 3
EVIDENCE = 2000  # observations on top of a model
NEW_JOBS = 60  # they are of
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """Truth and prediction of some rows."""

    truth: Floats
    low: Floats
    mid: Floats
    high: Floats


def together(parts: list[Seen]) -> Seen:
    """All of them as one."""
    return Seen(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("truth", "low", "mid", "high")))


def lacking(features: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Which features to do without: each of those beside the utilisation, and all of these."""
    if UTIL not in features:
        return []
    beside = tuple(name for name in features if name != UTIL)
    return [*dict.fromkeys([*((name,) for name in beside), beside])]


def first_pairs(
    seed: int, held: int, focal: Ints, other: Ints, family: NDArray[np.bool_]
) -> Iterator[tuple[int, Ints, Ints]]:
    """How a new job of an unseen family becomes known: number of its pairs seen, rows to predict, rows still hidden.

    Partners are of other families and seen in an order drawn by seed and job. The rows to predict are those of the job
    beside partners that are never seen, whatever the number. Seeds from ``ONLINE_SEEDS`` on give nothing.
    """
    if seed >= ONLINE_SEEDS:
        return
    mine = ((focal == held) & ~family[other]) | ((other == held) & ~family[focal])
    partner = np.where(focal == held, other, focal)
    partners = np.unique(partner[mine])
    order = np.random.default_rng([seed, held, 1]).permutation(partners)
    ask = np.flatnonzero(mine & ~np.isin(partner, order[: max(OBSERVED)]))
    touched = family[focal] | family[other]
    for count in OBSERVED if len(ask) else ():
        shown = mine & np.isin(partner, order[:count])
        yield count, ask, np.flatnonzero(touched & ~shown)


def online_curve(name: str, online: Mapping[int, Mapping[int, list[Seen]]]) -> Iterator[Row]:
    """Error and coverage by the number of observed pairs."""
    for count, by_seed in online.items():
        label = f"{name}, new job of an unseen family, {count} pairs observed"
        errors, inside = [], []
        for parts in by_seed.values():
            seen = together(parts)
            errors.append(mae(seen.truth, seen.mid))
            inside.append(float(np.mean((seen.low - 1e-9 <= seen.truth) & (seen.truth <= seen.high + 1e-9))))
        for metric, values in (("MAE", errors), ("coverage of the 80 % interval", inside)):
            yield Row(label, "cotenant", metric, statistics.mean(values), "1", statistics.stdev(values))


def across_types(cases: list[Case]) -> Iterator[Row]:
    """One GPU type predicted from the others, pooled as ``fit_interference`` pools them; families seen or held out."""
    for target in cases:
        pool = _pooled([case for case in cases if case is not target])
        here = _renamed(target)
        elsewhere = _same_pair_elsewhere(target, [case for case in cases if case is not target])
        label = f"{target.name} from the other types"
        model = fit_pairs(pool)
        found = model.predict(here.jobs, here.focal, here.other)
        truth, known = target.truth, np.isfinite(elsewhere)
        yield from _scored(target, f"{label}, families known there", found.mid)
        low, high = (found.mid + OTHER_TYPE_WIDENS * (end - found.mid) for end in (found.low, found.high))
        inside = (low - 1e-9 <= truth) & (truth <= high + 1e-9)
        metric, spread = "coverage of the widened 80 % interval", spread_over(by_family(target), _part(inside))
        yield Row(f"{label}, families known there", "cotenant", metric, float(inside.mean()), "1", spread)
        for method, values in (
            ("same pair there", elsewhere),
            ("constant", np.full(len(truth), pool.throughput.mean())),
        ):
            spread = spread_of(target, mae, np.where(known, values, np.nan))
            yield Row(f"{label}, families known there", method, "MAE", mae(truth[known], values[known]), "1", spread)
        both, rows = pool.jobs.joined(here.jobs), len(pool)
        merged = PairTable(
            pool.names,
            both,
            np.concatenate([pool.focal, here.focal + len(pool.jobs)]),
            np.concatenate([pool.other, here.other + len(pool.jobs)]),
            np.concatenate([pool.throughput, here.throughput]),
        )
        total, count = np.zeros(len(here)), np.zeros(len(here))
        for _, train, test in folds(merged, merged.families()):
            new = test[test >= rows] - rows
            if len(new):
                model = fit_pairs(merged.rows(train[train < rows]))
                total[new] += model.predict(here.jobs, here.focal[new], here.other[new]).mid
                count[new] += 1
        spread = spread_of(target, mae, total / count)
        yield Row(f"{label}, LOF", "cotenant", "MAE", mae(truth, total / count), "1", spread)


def across_sets(case: Case, others: list[Case]) -> Iterator[Row]:
    """Our own pairs from models of other people's, with the features that both have; no job or family in common."""
    for other in others:
        shared = tuple(name for name in case.features if name in other.features)
        theirs, ours = replace(other, features=shared).ours, replace(case, features=shared).ours
        strangers = Jobs(tuple("" for _ in ours.jobs.ids), tuple("" for _ in ours.jobs.ids), ours.jobs.features)
        found = fit_pairs(theirs, other.mode).predict(strangers, ours.focal, ours.other)
        yield from _scored(case, f"{case.name}, from {other.name}", found.mid)
    for name, values in rules(case).items():
        spread = spread_of(case, mae, values)
        yield Row(f"{case.name}, from nothing", name, "MAE", mae(case.truth, values), "1", spread)


def _scored(case: Case, label: str, predicted: Floats) -> Iterator[Row]:
    for metric, figure in (("MAE", mae), ("R²", r2)):
        spread = spread_of(case, figure, predicted)
        yield Row(label, "cotenant", metric, figure(case.truth, predicted), "1", spread)


def _part(inside: NDArray[np.bool_]) -> Callable[[Ints], float]:
    return lambda rows: float(inside[rows].mean())


def _renamed(case: Case) -> PairTable:
    table = case.ours
    return replace(table, jobs=replace(table.jobs, ids=tuple(on_type(name, case.name) for name in table.jobs.ids)))


def _pooled(cases: list[Case]) -> PairTable:
    tables = [_renamed(case) for case in cases]
    jobs, focal, other = tables[0].jobs, [tables[0].focal], [tables[0].other]
    for table in tables[1:]:
        focal.append(table.focal + len(jobs))
        other.append(table.other + len(jobs))
        jobs = jobs.joined(table.jobs)
    throughput = np.concatenate([table.throughput for table in tables])
    return PairTable(tables[0].names, jobs, np.concatenate(focal), np.concatenate(other), throughput)


def _same_pair_elsewhere(target: Case, cases: list[Case]) -> Floats:
    known: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        ids = case.table.jobs.ids
        for a, b, n in zip(case.table.focal, case.table.other, case.truth, strict=True):
            known.setdefault((ids[a], ids[b]), []).append(float(n))
    ids = target.table.jobs.ids
    pairs = zip(target.table.focal, target.table.other, strict=True)
    return np.array([statistics.mean(known.get((ids[a], ids[b]), [float("nan")])) for a, b in pairs])


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
        metric = f"candidate pair, {label}"
        yield _cost(f"cost, {len(table.names)} features", metric, _process_times(work), 1e6 / count, "µs")


def evidence_cost(case: Case) -> Iterator[Row]:
    """Processor time of learning from many measurements of new jobs on top of a model, and of asking afterwards."""
    gpu_type = case.measured[0].gpu_type
    base = LearnedInterference({gpu_type: fit_pairs(case.ours, case.mode)})
    evidence = _made_up_evidence(gpu_type)
    told = base.with_evidence(evidence)
    label = f"cost, {len(case.table)} rows and {len(evidence)} observations"
    strangers = [_made_up(f"stranger-{k}", 0.05 + 0.009 * k) for k in range(100)]

    sets = [[each, evidence[k].focal] for k, each in enumerate(strangers)]

    def ask() -> None:
        fresh = LearnedInterference.predict_many  # remembers nothing
        for members in sets:
            fresh(told, [members], gpu_type)

    whole = _process_times(lambda: base.with_evidence(evidence))
    yield _cost(label, "with_evidence, all at once", whole, 1e3, "ms")
    yield _cost(label, "a new pair, one by one", _process_times(ask), 1e3 / len(sets), "ms")
    more = [replace(evidence[0], focal=strangers[0])]
    yield _cost(label, "with_evidence, one more", _process_times(lambda: told.with_evidence(more)), 1e3, "ms")


def _cost(label: str, metric: str, seconds: list[float], scale: float, unit: str) -> Row:
    """The least of the times: what else the machine did only adds to them."""
    return Row(label, "cotenant", metric, scale * min(seconds), unit, scale * statistics.stdev(seconds))


def _process_times(work: Callable[[], object]) -> list[float]:
    work()  # what is remembered from then on counts as such
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return times


def _made_up(name: str, util: float) -> DemandProfile:
    return DemandProfile(util, util, 1 << 28, 20.0, 60.0, "history", fingerprint=name, family=f"family {len(name) % 5}")


def _made_up_evidence(gpu_type: str) -> list[Observation]:
    """Different ordered pairs of made-up jobs, as the rule says, with noise."""
    rng, rule = np.random.default_rng(0), UtilisationRule()
    jobs = [_made_up(f"new-{k}", float(util)) for k, util in enumerate(rng.uniform(0.1, 1.0, NEW_JOBS))]
    found = []
    for k in rng.permutation(NEW_JOBS**2)[:EVIDENCE]:
        a, b = jobs[k // NEW_JOBS], jobs[k % NEW_JOBS]
        n = float(np.clip(rule.predict([a, b], gpu_type)[0].mid + rng.normal(0.0, 0.03), 0.1, 1.0))
        found.append(Observation(gpu_type, a, (b,), n, n - 0.02, n + 0.02, 60.0))
    return found


def _one_by_one(predictor: LearnedInterference, sets: list[list[DemandProfile]], gpu_type: str = "gpu") -> None:
    for members in sets:
        predictor.predict(members, gpu_type)
