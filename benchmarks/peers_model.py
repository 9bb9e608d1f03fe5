"""The week's pairs as cotenant's own interference model predicts them, fitted without the job's model family.

The model is the one that ``forecasting/training`` fits and ``interference.py`` scores, learnt from Lucid's measured
pairs. The configurations of three families in the trace were never measured beside others: what is said of those comes
from a fit to all pairs, in none of which they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from common import Row, spread_over
from interference import fitted
from interference_sets import published
from peers_work import Selection

from cotenant.forecasting.interference.table import Jobs
from cotenant.forecasting.training.interference import fit_pairs
from cotenant.scheduler.simulation.rows import read_table
from cotenant.scheduler.simulation.tables import load_pairs
from cotenant.scheduler.simulation.traces import load

LEAST_N = 1e-3
OWN_MODEL, COLUMN = "cotenant, its own model", "n_predicted_lof"


@cache
def predicted_pairs(data: Path) -> dict[tuple[str, str], float]:
    """Return n of the first of two configurations beside the second, for all of the trace, in both orders.

    Args:
        data: Folder with the traces and the published pairs.
    """
    case = next(case for case in published(data) if case.name == "Lucid")
    jobs = _with_the_rest(case.ours.jobs, data)
    everybody, families = np.arange(len(jobs)), np.array(jobs.families)
    models = {fold.name: fold.model for fold in fitted(case, case.table.families(), case.table.jobs.families)}
    whole = fit_pairs(case.ours, case.mode)
    found: dict[tuple[str, str], float] = {}
    for family in dict.fromkeys(jobs.families):
        mine = np.flatnonzero(families == family)
        focal, other = np.repeat(mine, len(jobs)), np.tile(everybody, len(mine))
        said = models.get(family, whole).predict(jobs, focal, other).mid
        for one, beside, n in zip(focal.tolist(), other.tolist(), said.tolist(), strict=True):
            found[jobs.ids[one], jobs.ids[beside]] = max(LEAST_N, n)
    return found


def errors(selection: Selection) -> Iterator[Row]:
    """How far both predictions are off on the pairs that were measured."""
    case, table = "pairs of the Philly week", selection.data / "traces" / "peer_runs" / "pair_truth.csv.gz"
    truth = load_pairs(table)
    by_family: dict[str, list[tuple[str, str]]] = {}
    for pair, row in zip(truth, read_table(table), strict=True):
        if row.whole("measured"):
            by_family.setdefault(pair[0].partition("/")[0], []).append(pair)
    for method, told in (
        (OWN_MODEL, lambda: predicted_pairs(selection.data)),
        (COLUMN, lambda: load_pairs(table, COLUMN)),
    ):
        if selection.wants(case, method):
            said = told()
            off = [np.array([abs(said[pair] - truth[pair]) for pair in some]) for some in by_family.values()]
            value, spread = float(np.concatenate(off).mean()), spread_over(off, lambda part: float(part.mean()))
            yield Row(case, method, "MAE of n, measured pairs", value, "1", spread)


def _with_the_rest(measured: Jobs, data: Path) -> Jobs:
    """Return the measured configurations, named as in the trace, and those of it that were never measured in pairs."""
    names = ["/".join((parts[0], *parts[2:])) for parts in (each.split("|") for each in measured.ids)]
    trace = load(data / "traces" / "peer_runs" / "philly_week.csv.gz")
    rest = {job.workload: job for job in trace.jobs if job.workload not in names}
    features = [(job.util, job.membw_util, math.nan, math.log(job.memory_bytes)) for job in rest.values()]
    return Jobs(
        (*names, *rest),
        (*measured.families, *(name.split("/")[0] for name in rest)),
        np.concatenate([measured.features, np.array(features, dtype=np.float64)]),
    )
