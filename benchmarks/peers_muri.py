"""Muri's traces 1 and 2 on 64 GPUs: jobs that use different resources take turns on the same GPUs.

The published figures are of Muri's own simulator. Ours here lets a set run as if alone as long as no resource is wanted
more than all the time (perfect interleaving, Muri's aim), and tells that to our scheduler, as Muri's policies are told.
Thousands of trace 2's jobs wait for most of a year, which takes the core many hours of a processor: it gets the first
1,000 jobs, as our baselines do besides the whole.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common import Row
from peers_work import COMPLETION, Selection, figures, heartbeat

from cotenant.scheduler.core.models import only
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.shell import Delays
from cotenant.scheduler.simulation.simulate import Scenario, baseline, shipped_core
from cotenant.scheduler.simulation.tables import StageTruth
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.workload import Trace, even_cluster

GPUS = 64
QUICK = (("trace1", 100), ("trace2", 100))
TRACES = (("trace1", None), ("trace2", None), ("trace2", 1000))  # and how many jobs of it
PEERS = ("srtf", "tiresias")
DELAYS = Delays(tick_s=3600.0)  # the jobs run for weeks
OURS = ("cotenant", "cotenant, told run times")


def published(folder: Path, name: str, case: str) -> Iterator[Row]:
    """What Muri's simulator says of a trace."""
    with (folder / "muri_published_sim.csv").open(newline="") as lines:
        for line in csv.DictReader(lines):
            if (line["metric"], line["trace"]) == ("JCT", name):
                yield Row(case, f"{line['policy']}, Muri's simulator", COMPLETION, float(line["value_seconds"]), "s")


def muri(selection: Selection) -> Iterator[Row]:
    """What was published, our baselines, ours."""
    folder = selection.data / "traces" / "muri"
    for name, first in QUICK if selection.quick else TRACES:
        case = f"Muri's {name}, {GPUS} GPUs"
        if first is not None:
            case = f"the first {first:,} jobs of {case}"
        if first is None:
            yield from published(folder, name, case)
        path = folder / f"{name}.csv.gz"
        trace, truth = load(path, "muri"), StageTruth(path)
        trace = Trace(trace.name, trace.jobs[:first])
        for method in (*PEERS, *OURS):
            if not selection.wants(case, method) or (method in OURS and (name, first) == ("trace2", None)):
                continue
            jobs = trace
            if method == OURS[1]:
                jobs = Trace(trace.name, tuple(replace(job, estimate_s=job.duration_s) for job in trace.jobs))
            scenario = Scenario(jobs, even_cluster(GPUS), truth, look=heartbeat(f"{case}, {method}"))
            if method in POLICIES:
                yield from figures(case, method, [baseline(scenario, POLICIES[method]())])
            else:
                told = only(TablePredictor(truth, error=0.0))
                yield from figures(case, method, [shipped_core(scenario, models=told, delays=DELAYS)])
