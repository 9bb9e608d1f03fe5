"""Interference prediction on published pairs: the learned model beside every baseline, on jobs and families held out.

Protocols: LOF = all pairs with a job of one model family leave the training set and are predicted; LOA = the same for
an architecture, where families are coarser; LOJ = the same for one job; 20 % row = one job's pairs leave but for a
random fifth of its partners. A pair is held out once for either job: "MAE" scores the mean of the two predictions, as
the reference protocol does (that flatters every method by about .003), "MAE, one fold" only the prediction made
without the job whose throughput it is.

Spreads: over seeds where something is drawn (trees, completion, what is seen of a new job), else over the held-out
groups (``common.spread_over``), of costs over repetitions.

With ``--json FILE`` every measured pair of our own data stands beside its prediction in ``FILE``-pairs.csv.

Published pairs are read from ``--data``, ``$COTENANT_DATA`` or ``../shared/data`` beside the checkout; without them
only our own, which come with the package, are scored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import interference_own as own
import interference_studies as studies
import numpy as np
from common import Row, options, spread_over, write_report
from interference_baselines import SEEDS, mae, of_baselines, scores, spread_of, unseen
from interference_sets import Case, Folds, blanked, folds, own_cases, published, thinned
from numpy.typing import NDArray

from cotenant.forecasting.datasets.colocation import shipped
from cotenant.forecasting.interference.model import PairModel
from cotenant.forecasting.interference.table import UTIL, Ints, group_numbers
from cotenant.forecasting.training.interference import fit_pairs

GOALS = {
    "Lucid": {"LOF": 0.040, "LOJ": 0.030, "20 % row": 0.025},
    "Alnair MPS": {"LOF": 0.050, "LOJ": 0.038},
    "Gavel v100": {"LOF": 0.170, "LOJ": 0.074, "20 % row": 0.077},
    "Gavel p100": {"LOF": 0.066, "LOJ": 0.033, "20 % row": 0.028},
    "Gavel k80": {"LOF": 0.047, "LOJ": 0.027, "20 % row": 0.018},
}
FURTHER_GOALS = {"Lucid, LOF": {"R²": ">= 0.66", "best partner: regret in min(n)": "<= 0.024"}}


@dataclass(slots=True)
class Ours:
    """The learned model's held-out predictions.

    Attributes:
        family: By family.
        job: By job.
        partly: Of a new job partly seen: per seed what every job gave.
        online: Of a new job of an unseen family, by how many of its pairs were seen: per seed likewise.
        blind: By family, where what is predicted lacks some features.
    """

    family: Folds
    job: Folds
    partly: dict[int, list[studies.Seen]] = field(default_factory=dict)
    online: dict[int, dict[int, list[studies.Seen]]] = field(default_factory=dict)
    blind: dict[tuple[str, ...], Folds] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fold:
    """A model fitted without a group of jobs, the rows it learnt from and those it did not."""

    model: PairModel
    train: Ints
    test: Ints
    out: NDArray[np.bool_]  # per job: is it of the group?
    name: str

    def into(self, held: Folds, case: Case, lacking: tuple[str, ...] = ()) -> None:
        """Predict the rows held out, of which the group's jobs lack some features."""
        table, test = case.ours, self.test
        jobs = blanked(table, lacking, self.out) if lacking else table.jobs
        found = self.model.predict(jobs, table.focal[test], table.other[test])
        held.add(test, found.mid, self.out[table.focal[test]], (found.low, found.high))
        held.add_interval(self.name, found.low, case.truth[test], found.high)


def fitted(case: Case, groups: Ints, names: tuple[str, ...]) -> Iterator[Fold]:
    """Fit without every group in turn."""
    for group, train, test in folds(case.table, groups):
        name = names[int(np.flatnonzero(groups == group)[0])]
        yield Fold(fit_pairs(case.ours.rows(train), case.mode), train, test, groups == group, name)


def learned(case: Case, only_families: bool = False) -> Ours:
    """Fit once per family held out; jobs of that family are then held out one by one from the fit that knows the rest.

    The second step conditions the fit on the family's other jobs in closed form. Mean, kernel and trust in rows stay
    those found without the family, so they never saw the job.
    """
    ours = Ours(Folds(len(case.table)), Folds(len(case.table)))
    for fold in fitted(case, case.table.families(), case.table.jobs.families):
        fold.into(ours.family, case)
        if only_families:
            continue
        for lacking in studies.lacking(case.features):
            fold.into(ours.blind.setdefault(lacking, Folds(len(case.table))), case, lacking)
        _one_by_one(ours, case, fold)
    return ours


def by_architecture(case: Case) -> Folds:
    """Hold out every architecture; its family may be known from others."""
    held = Folds(len(case.table))
    for fold in fitted(case, group_numbers(case.architectures), case.architectures):
        fold.into(held, case)
    return held


def _one_by_one(ours: Ours, case: Case, fold: Fold) -> None:
    table, truth = case.ours, case.truth
    whole = fold.model.with_evidence(table.rows(fold.test))
    posterior = whole.posterior()
    origin = np.concatenate([fold.train, fold.test])  # rows of ``whole`` in terms of ``table``
    focal, other = table.focal[origin], table.other[origin]

    def predict(rows: Ints, hidden: Ints) -> studies.Seen:
        found = whole.without(hidden, posterior).predict(table.jobs, focal[rows], other[rows])
        return studies.Seen(truth[origin[rows]], found.low, found.mid, found.high)

    for held in np.flatnonzero(fold.out).tolist():
        rows = np.flatnonzero((focal == held) | (other == held))
        if not len(rows):
            continue
        found = predict(rows, rows)
        ours.job.add(origin[rows], found.mid, focal[rows] == held, (found.low, found.high))
        ours.job.add_interval(str(held), found.low, found.truth, found.high)
        for seed in SEEDS:
            rows = unseen(seed, held, focal, other, len(table.jobs))
            ours.partly.setdefault(seed, []).append(predict(rows, rows))
            for count, rows, hidden in studies.first_pairs(seed, held, focal, other, fold.out):
                ours.online.setdefault(count, {}).setdefault(seed, []).append(predict(rows, hidden))


def of_ours(case: Case, ours: Ours) -> Iterator[Row]:
    """The learned model's figures, with the goals."""
    goals = GOALS.get(case.name, {})
    for protocol, held in (("LOF", ours.family), ("LOJ", ours.job)):
        if not held.count.any():
            continue
        label = f"{case.name}, {protocol}"
        wanted = {"MAE": f"<= {goals[protocol]}"} if protocol in goals else {}
        yield from scores(case, label, "cotenant", [held], wanted | FURTHER_GOALS.get(label, {}))
        yield from coverage(label, held, "family" if protocol == "LOF" else None)
    if ours.partly:
        errors = [mae(seen.truth, seen.mid) for seen in map(studies.together, ours.partly.values())]
        goal = goals.get("20 % row")
        value, spread = statistics.mean(errors), statistics.stdev(errors)
        yield Row(f"{case.name}, 20 % row", "cotenant", "MAE", value, "1", spread, f"<= {goal}" if goal else None)
    yield from studies.online_curve(case.name, ours.online)
    for lacking, held in ours.blind.items():
        label = f"{case.name}, LOF, the new jobs lack {' and '.join(lacking)}"
        yield Row(label, "cotenant", "MAE", mae(case.truth, held.mean), "1", spread_of(case, mae, held.mean))
        spread = spread_over(_inside(held), _mean)
        yield Row(label, "cotenant", "coverage of the 80 % interval", _overall(held), "1", spread)


def coverage(label: str, held: Folds, kind: str | None) -> Iterator[Row]:
    """Coverage of the 80 % intervals: overall within 2 points of 80 %, no family below 65 %; and how wide they are."""
    overall, groups = _overall(held), _inside(held)
    yield Row(label, "cotenant", "coverage of the 80 % interval", overall, "1", spread_over(groups, _mean))
    spread = spread_over(groups, lambda rows: abs(_mean(rows) - 0.8))
    yield Row(label, "cotenant", "that coverage, off from 0.80 by", abs(overall - 0.8), "1", spread, "<= 0.02")
    width, spread = _mean(np.concatenate(held.widths)), spread_over(held.widths, _mean)
    yield Row(label, "cotenant", "width of the 80 % interval", width, "1", spread)
    if kind:
        names, parts = [*held.inside], np.array([_mean(rows) for rows in groups])
        worst, spread = int(parts.argmin()), spread_over([*parts[:, None]], lambda rows: float(rows.min()))
        metric = f"coverage, worst {kind} ({names[worst]})"
        yield Row(label, "cotenant", metric, float(parts[worst]), "1", spread, ">= 0.65")


def _inside(held: Folds) -> list[NDArray[np.float64]]:
    return [np.concatenate(values) for values in held.inside.values()]


def _overall(held: Folds) -> float:
    return _mean(np.concatenate(_inside(held)))


def _mean(rows: NDArray[np.float64]) -> float:
    return float(np.mean(rows))


def figures(arguments: argparse.Namespace, data: Path) -> Iterator[Row]:
    """All figures; ``--quick``: a third of Lucid's pairs and our own, families only."""
    if arguments.quick:
        for case in [*map(thinned, [*published(data)][:1]), *own_cases(shipped())]:
            yield from of_ours(case, learned(case, only_families=True))
            yield from of_baselines(case, ("LOF",))
        return
    cases = [*published(data)]
    ours = [*own_cases([*shipped(), *arguments.own])]
    for case in (*cases, *ours):
        protocols = ("LOF", "LOJ") if case.name == "Alnair MPS" else ("LOF", "LOJ", "20 % row")
        yield from of_ours(case, learned(case))
        yield from of_baselines(case, protocols)
    for case in ours:
        held = by_architecture(case)
        label = f"{case.name}, LOA"
        yield from scores(case, label, "cotenant", [held])
        yield from coverage(label, held, "architecture")
        pairs = own.pairs(case)
        yield from own.of_pairs(case, pairs)
        yield from own.of_triples(case)
        yield from own.of_lessons(case)
        yield from own.of_rule(case)
        if arguments.json:
            own.write_pairs(arguments.json.with_name(f"{arguments.json.stem}-pairs.csv"), pairs)
    yield from studies.across_types([case for case in cases if case.name.startswith("Gavel")])
    for case in ours:
        yield from studies.across_sets(case, [each for each in cases if UTIL in each.table.names])
    for case in cases[:2]:
        yield from studies.cost(case)
    for case in ours:
        yield from studies.evidence_cost(case)


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
            f"interference: published pairs skipped, there is no {data}/interference; give --data or set COTENANT_DATA",
            file=sys.stderr,
        )
    write_report("interference", list(figures(arguments, data)), arguments.json)


if __name__ == "__main__":
    main()
