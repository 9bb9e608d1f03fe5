"""The peers' own work in our simulator: first whether it reproduces the peers' published runs, then who does best.

Reproduction: FIFO, SJF, QSSF, Tiresias and SRTF on the Philly week (10,650 jobs, 304 GPUs) against what Lucid's own
simulator says for them. Jobs submitted in the same second have no order of their own (1,298 of them have company), and
FIFO's figure hangs on it; it is therefore the mean over several orders, with the spread between them. Suspending costs
40 s of work, 60 s above 8 GPUs, as there.

The other parts are described where they are: ``peers_philly.py``, ``peers_gavel.py``, ``peers_muri.py`` and
``peers_openb.py``. A part is run with ``--only``; ``--case`` and ``--method`` choose among its simulations, and with
``--add`` the rows of the JSON file that were not measured again are kept. All of it takes hours.

Needs the traces (``--data``, ``$COTENANT_DATA`` or ``../shared/data`` beside the checkout); they are only read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row, options, write_report
from peers_gavel import gavel
from peers_muri import muri
from peers_openb import openb
from peers_philly import philly
from peers_work import COMPLETION, MAKESPAN, PROCESSOR, QUEUEING, Part, Selection, data_folder, kept

from cotenant.scheduler.simulation.simulate import Scenario, simulate
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.workload import Trace, even_cluster
from cotenant.scheduler.simulation.world import Costs

GPUS = 304
LUCID_COSTS = Costs(restart_s=40.0, wide_restart_s=60.0, wide_above=8)
QUICK = ("sjf",)  # of the reproduction
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


def shuffled(trace: Trace, seed: int) -> Trace:
    """The trace with jobs of the same second in another order."""
    jobs = list(trace.jobs)
    np.random.default_rng(seed).shuffle(jobs)  # type: ignore[arg-type]
    return Trace(trace.name, tuple(sorted(jobs, key=lambda job: job.submit_s)))


def reproduction(selection: Selection) -> Iterator[Row]:
    """Ours beside theirs, and the difference. The short version is one policy, in full."""
    trace = load(selection.data / "traces" / "peer_runs" / "philly_week.csv.gz")
    case = "Philly week, 304 GPUs, the peers' policies without sharing"
    for name, theirs in THEIRS.items():
        if not selection.wants(case, name) or (selection.quick and name not in QUICK):
            continue
        orders = ORDERS if name == "fifo" and not selection.quick else 1
        results = [
            simulate(Scenario(shuffled(trace, seed) if seed else trace, even_cluster(GPUS), costs=LUCID_COSTS), name)
            for seed in range(orders)
        ]
        found = [result.summary() for result in results]
        ours = {
            COMPLETION: [s["jct_s"]["mean"] for s in found],
            QUEUEING: [s["queue_s"]["mean"] for s in found],
            "p99 completion": [s["jct_s"]["p99"] for s in found],
            MAKESPAN: [s["makespan_s"] for s in found],
        }
        published = (theirs.jct_s, theirs.queue_s, theirs.p99_s, theirs.makespan_s)
        for (metric, values), value in zip(ours.items(), published, strict=True):
            yield Row(case, f"{name}, Lucid's simulator", metric, float(value), "s")
            spread = float(np.std(values)) if orders > 1 else None
            yield Row(case, f"{name}, ours", metric, float(np.mean(values)), "s", spread)
        difference = abs(float(np.mean(ours[COMPLETION])) / theirs.jct_s - 1.0)
        yield Row(case, name, "difference of mean completion", difference, "1", goal=f"<= {theirs.within}")
        seconds = float(np.mean([result.seconds for result in results]))
        yield Row(case, name, PROCESSOR, seconds, "s", goal=f"<= {theirs.run_s:g}")


PARTS: Mapping[str, Part] = {
    "reproduction": reproduction,
    "philly": philly,
    "gavel": gavel,
    "muri": muri,
    "openb": openb,
}


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with traces/ (default: $COTENANT_DATA or ../shared/data)")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part only")
    parser.add_argument("--case", default="", metavar="REGEX", help="only cases in whose name this is found")
    parser.add_argument("--method", default="", metavar="REGEX", help="only methods in whose name this is found")
    parser.add_argument("--add", action="store_true", help="keep the rows of the JSON file that are not measured again")
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    if not (data / "traces" / "peer_runs").exists():
        print(f"peers: skipped, there is no {data}; give --data or set COTENANT_DATA", file=sys.stderr)
        return
    selection = Selection(data, arguments.quick, arguments.case, arguments.method)
    rows = [row for name, part in PARTS.items() if arguments.only in (None, name) for row in part(selection)]
    earlier = kept(arguments.json, rows) if arguments.add else []
    write_report("peers", [*earlier, *rows], arguments.json)


if __name__ == "__main__":
    main()
