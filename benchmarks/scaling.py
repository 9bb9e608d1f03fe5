"""A cluster that follows the demand against clusters of fixed sizes: how long jobs take, and what the nodes cost.

Made-up days of jobs: 24 hours, five times as many arrivals by day as by night, run times of a few minutes to a few
hours (log-normal, median 15 min), 80 % of the jobs on one GPU, others on two to eight; utilisations from .2 to .95.
Nodes of 8 GPUs join 180 s after they are asked for, and cost from then until they are given back. What decides is what
ships: the same core, and the same decision about the cluster's size as in the running system.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from common import Row, options, write_report

from cotenant.configs.settings import ScalingSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import DemandProfile
from cotenant.scheduler.simulation.elastic import ElasticShell
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.simulate import Scenario, shipped_core
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Trace, TraceJob, even_cluster, trace_of

DAY_S = 86_400.0
PER_NODE = 8
LARGEST = 64  # GPUs
JOIN_S = 180.0
UTILS = (0.2, 0.35, 0.5, 0.7, 0.95)


def day(jobs: int, seed: int) -> Trace:
    """Return a day with so many jobs."""
    rng = np.random.default_rng(seed)
    made: list[TraceJob] = []
    while len(made) < jobs:
        at = float(rng.uniform(0.0, DAY_S))
        if rng.random() > 0.2 + 0.8 * np.sin(np.pi * at / DAY_S) ** 4:  # most at noon
            continue
        util = float(rng.choice(UTILS))
        seconds = float(np.clip(rng.lognormal(np.log(900.0), 1.0), 60.0, 4 * 3600.0))
        gpus = int(rng.choice((1, 2, 4, 8), p=(0.8, 0.08, 0.07, 0.05)))
        made.append(
            TraceJob(f"j{len(made)}", at, gpus, seconds, f"u{util}", round(util * 20 * GIB), util, None, seconds)
        )
    return trace_of("day", made)


def pairs() -> dict[tuple[str, str], float]:
    """Return how fast each workload is beside each other, as the rule has it that was fitted to measured pairs."""
    profiles = {f"u{util}": DemandProfile(util, util, None, source="history") for util in UTILS}
    return {
        (one, other): UtilisationRule().predict([profiles[one], profiles[other]], "gpu")[0].mid
        for one in profiles
        for other in profiles
    }


def rows_of(trace: Trace, case: str) -> Iterator[Row]:
    """Yield the figures of every size of the cluster."""
    utils = {job.workload: job.util or 0.0 for job in trace.jobs}
    baseline: tuple[float, float] | None = None
    for gpus in (LARGEST, LARGEST // 2, LARGEST // 4):
        scenario = Scenario(trace, even_cluster(gpus, PER_NODE), PairTable(pairs(), utils))
        result = shipped_core(scenario)
        hours = _last(result) / 3600.0 * gpus / PER_NODE
        baseline = baseline or (result.summary()["jct_s"]["mean"], hours)
        yield from _figures(case, f"{gpus} GPUs all the time", result, hours)
    scenario = Scenario(trace, even_cluster(LARGEST, PER_NODE), PairTable(pairs(), utils))
    world = scenario.world()
    rules = ScalingSettings(enabled=True, least_gpus=PER_NODE, most_gpus=LARGEST)
    shell = ElasticShell(world, rules, JOIN_S)
    world.run(shell)
    result = Result("cotenant", world, 0.0, shell.notes)
    yield from _figures(case, "cotenant", result, shell.node_hours)
    assert baseline is not None
    jct_s, hours = result.summary()["jct_s"]["mean"], shell.node_hours
    yield Row(
        case, "cotenant", f"node-hours against {LARGEST} GPUs all the time", hours / baseline[1], "1", goal="<= 0.7"
    )
    yield Row(
        case, "cotenant", f"completion against {LARGEST} GPUs all the time", jct_s / baseline[0], "1", goal="<= 1.2"
    )


def _last(result: Result) -> float:
    return max(run.ended_at or 0.0 for run in result.world.runs)


def _figures(case: str, method: str, result: Result, hours: float) -> Iterator[Row]:
    summary = result.summary()
    yield Row(case, method, "mean completion", summary["jct_s"]["mean"], "s")
    yield Row(case, method, "mean queueing", summary["queue_s"]["mean"], "s")
    yield Row(case, method, "p99 queueing", summary["queue_s"]["p99"], "s")
    yield Row(case, method, "node-hours", hours, "h")


def main() -> None:
    """Run the benchmark."""
    arguments = options(str(__doc__).partition("\n")[0]).parse_args()
    rows: list[Row] = []
    for jobs in (400,) if arguments.quick else (400, 800):
        rows += rows_of(day(jobs, seed=1), f"a day of {jobs} jobs")
    write_report("scaling", rows, arguments.json)


if __name__ == "__main__":
    main()
