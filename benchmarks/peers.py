"""The peers' own work in our simulator: first whether it reproduces the peers' published runs, then who does best.

Reproduction: FIFO, SJF, QSSF, Tiresias and SRTF on the Philly week (10,650 jobs, 304 GPUs) against what Lucid's own
simulator says for them. Jobs submitted in the same second have no order of their own (1,298 of them have company), and
FIFO's figure hangs on it; it is therefore the mean over several orders, with the spread between them. Suspending costs
40 s of work, 60 s above 8 GPUs, as there.

Gavel's traces on 8 V100, 16 P100 and 24 K80: its max-min policies in Gavel's own simulator and in ours. They are told
the true throughputs. Where the smallest throughput leaves a choice ours takes the largest sum, so the two differ.

Needs the traces (``--data``, ``$COTENANT_DATA`` or ``../shared/data`` beside the checkout); they are only read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row, options, write_report

from cotenant.scheduler.core.models import only
from cotenant.scheduler.simulation.policies.gavel import Gavel
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.simulate import CORE, Scenario, baseline, simulate
from cotenant.scheduler.simulation.tables import GavelTruth, load_pairs, utilisations
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Trace, even_cluster, mixed_cluster
from cotenant.scheduler.simulation.world import Costs

GPUS = 304
USABLE_GIB = 23
LUCID_COSTS = Costs(restart_s=40.0, wide_restart_s=60.0, wide_above=8)
ORDERS = 20  # of jobs submitted in the same second


@dataclass(frozen=True, slots=True)
class Theirs:
    """What Lucid's simulator says: seconds, and how close ours must come."""

    jct_s: float
    queue_s: float
    p99_s: float
    makespan_s: float
    run_s: float
    within: float


THEIRS: Mapping[str, Theirs] = {
    "fifo": Theirs(33_829, 29_057, 114_590, 689_901, 100, 0.02),
    "sjf": Theirs(12_024, 7_253, 129_621, 681_352, 184, 0.02),
    "qssf": Theirs(10_547, 5_775, 123_101, 711_260, 211, 0.02),
    "tiresias": Theirs(6_734, 1_950, 124_662, 681_521, 94, 0.05),
    "srtf": Theirs(6_289, 1_480, 134_520, 701_459, 396, 0.05),
}
GAVEL_GPUS = (("v100", 8), ("p100", 16), ("k80", 24))
GAVEL_THEIRS = {  # trace, packed: mean completion and total, s
    ("max_min_fairness", False): (14_623, 63_945),
    ("max_min_fairness", True): (14_049, 63_818),
    ("minimize_makespan", True): (32_528, 64_178),
}
PACKING = ("static", "first-fit", "best-fit", "threshold", "lucid")


def shuffled(trace: Trace, seed: int) -> Trace:
    """The trace with jobs of the same second in another order."""
    jobs = list(trace.jobs)
    np.random.default_rng(seed).shuffle(jobs)  # type: ignore[arg-type]
    return Trace(trace.name, tuple(sorted(jobs, key=lambda job: job.submit_s)))


def reproduction(trace: Trace, quick: bool) -> Iterator[Row]:
    """Ours beside theirs, and the difference."""
    for name, theirs in THEIRS.items():
        orders = (3 if quick else ORDERS) if name == "fifo" else 1
        results = [
            simulate(Scenario(shuffled(trace, seed) if seed else trace, even_cluster(GPUS), costs=LUCID_COSTS), name)
            for seed in range(orders)
        ]
        found = [result.summary() for result in results]
        case = "Philly week, 304 GPUs, the peers' policies"
        ours = {
            "mean completion": [s["jct_s"]["mean"] for s in found],
            "mean queueing": [s["queue_s"]["mean"] for s in found],
            "p99 completion": [s["jct_s"]["p99"] for s in found],
            "makespan": [s["makespan_s"] for s in found],
        }
        published = (theirs.jct_s, theirs.queue_s, theirs.p99_s, theirs.makespan_s)
        for (metric, values), value in zip(ours.items(), published, strict=True):
            yield Row(case, f"{name}, Lucid's simulator", metric, float(value), "s")
            spread = float(np.std(values)) if orders > 1 else None
            yield Row(case, f"{name}, ours", metric, float(np.mean(values)), "s", spread)
        difference = abs(float(np.mean(ours["mean completion"])) / theirs.jct_s - 1.0)
        yield Row(case, name, "difference of mean completion", difference, "1", goal=f"<= {theirs.within}")
        seconds = float(np.mean([result.seconds for result in results]))
        yield Row(case, name, "processor time of a simulation", seconds, "s", goal=f"<= {theirs.run_s:g}")


def gavel(data: Path) -> Iterator[Row]:
    """Rounds with a linear program, told the true throughputs."""
    truth = GavelTruth(data / "interference" / "gavel" / "simulation_throughputs.json.gz")
    for (name, packed), (jct_s, total_s) in GAVEL_THEIRS.items():
        trace = truth.in_seconds(load(data / "traces" / "gavel" / f"{name}.trace", "gavel"))
        scenario = Scenario(trace, mixed_cluster(GAVEL_GPUS), truth, Costs(0.0, 0.0))
        result = baseline(scenario, Gavel(truth, packed=packed))
        summary = result.summary()
        case = f"Gavel's {name}, max-min fairness{', packed' if packed else ''}"
        yield Row(case, "Gavel's simulator", "mean completion", float(jct_s), "s")
        yield Row(case, "ours", "mean completion", summary["jct_s"]["mean"], "s")
        yield Row(case, "Gavel's simulator", "makespan", float(total_s), "s")
        yield Row(case, "ours", "makespan", summary["makespan_s"], "s")
        difference = abs(summary["jct_s"]["mean"] / jct_s - 1.0)
        goal = "<= 0.05" if name == "max_min_fairness" else None
        yield Row(case, "gavel", "difference of mean completion", difference, "1", goal=goal)
        yield Row(case, "gavel", "processor time of a simulation", result.seconds, "s")


def sharing(data: Path, trace: Trace, quick: bool) -> Iterator[Row]:
    """Policies that share GPUs, with measured slowdowns that they do not see; 60 s of work for a suspension."""
    path = data / "traces" / "peer_runs" / "pair_truth.csv.gz"
    utils = utilisations(trace)
    gpus = GPUS
    if quick:
        trace, gpus = Trace(trace.name, trace.jobs[:1000]), 32
    scenario = Scenario(trace, even_cluster(gpus, memory_bytes=USABLE_GIB * GIB), PairTable(load_pairs(path), utils))
    known = TablePredictor(PairTable(load_pairs(path, "n_predicted_lof"), utils))
    for name in (*PACKING, CORE):
        result = simulate(scenario, name, only(known))
        case = f"Philly week, {len(trace.jobs):,} jobs, {gpus} GPUs, truthful slowdowns"
        yield from figures(case, result)


def figures(case: str, result: Result) -> Iterator[Row]:
    """What counts of one simulation."""
    summary, method = result.summary(), result.policy
    yield Row(case, method, "mean completion", summary["jct_s"]["mean"], "s")
    yield Row(case, method, "p99 completion", summary["jct_s"]["p99"], "s")
    yield Row(case, method, "mean queueing", summary["queue_s"]["mean"], "s")
    yield Row(case, method, "run / duration, mean", summary["slowdown"]["mean"], "1")
    yield Row(case, method, "run / duration, p99", summary["slowdown"]["p99"], "1")
    yield Row(case, method, "GPU time saved", summary["saving"], "1")
    yield Row(case, method, "processor time of a simulation", result.seconds, "s")


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with traces/ (default: $COTENANT_DATA or ../shared/data)")
    parser.add_argument("--only", choices=("reproduction", "gavel", "sharing"), help="one part only")
    arguments = parser.parse_args()
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = arguments.data or Path(os.environ.get("COTENANT_DATA", beside))
    week = data / "traces" / "peer_runs" / "philly_week.csv.gz"
    if not week.exists():
        print(f"peers: skipped, there is no {week}; give --data or set COTENANT_DATA", file=sys.stderr)
        return
    trace = load(week)
    rows: list[Row] = []
    if arguments.only in (None, "reproduction"):
        rows += reproduction(trace, arguments.quick)
    if arguments.only in (None, "gavel"):
        rows += gavel(data)
    if arguments.only in (None, "sharing"):
        rows += sharing(data, trace, arguments.quick)
    write_report("peers", rows, arguments.json)


if __name__ == "__main__":
    main()
