"""Gavel's two traces on 8 V100, 16 P100 and 24 K80: first the reproduction, then ours; 60 s of work for a move.

Gavel's own max-min policies in Gavel's simulator and in ours: they are told the true throughputs, alone and in pairs.
Where the smallest throughput leaves a choice ours takes the largest sum, so the two differ.

Ours is the shipped core, on the jobs at once with the aim makespan too: told the throughputs alone on every type (as
after earlier runs of the programs) and, of pairs, the truth; or only the mean of all pairs, and then what it measures.
Beside it stands an integer program over jobs, pairs and types that the simulator has and the core has not: what
assigning everybody anew at every change, gangs over several hosts too, is worth. When the last of the jobs at once can
end at the earliest says a linear program that may divide all time as it likes, told lengths and pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import numpy as np
from common import Row
from peers_work import COMPLETION, MAKESPAN, Selection, changed, figures

from cotenant.placement.shares import TOLERANCE
from cotenant.scheduler.core.choices import Choices
from cotenant.scheduler.core.models import only
from cotenant.scheduler.core.prices import prices_of_work
from cotenant.scheduler.simulation.policies.assignment import Assignment
from cotenant.scheduler.simulation.policies.gavel import Gavel
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.simulate import Scenario, baseline, shipped_core
from cotenant.scheduler.simulation.tables import GavelTruth
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Cluster, Trace, TraceJob, even_cluster, mixed_cluster
from cotenant.scheduler.simulation.world import Costs

GPUS = (("v100", 8), ("p100", 16), ("k80", 24))
SMALL, LARGE = GIB, 7 * GIB  # what a job uses: two that do not run on a K80 still fit any other GPU
MEMORY = {"v100": 16 * GIB, "p100": 16 * GIB, "k80": 6 * GIB}
USUAL_ERROR = 0.2
QUICK_JOBS = 20
TOLD, LEARNS = "cotenant, told the pairs, job lengths", "cotenant, learns the pairs, job lengths"
UNKNOWN = "cotenant, told the pairs, no job lengths"
COMPLETION_AIM, MAKESPAN_AIM = "completion", "makespan"
USUAL_LIMIT = 1.5  # times: the accepted slowdown where nobody says another
PATIENT = 2.0  # times, that jobs accept to be slowed down in place of the usual 1.5
JCT, TOTAL = "max_min_fairness", "minimize_makespan"
CASES = {JCT: "Gavel's 96 jobs", TOTAL: "Gavel's 100 jobs at once"}
THEIRS = {  # policies in Gavel's simulator: mean completion and total, s
    JCT: {
        "fifo": (35_905, 196_524),
        "fifo_packed": (19_495, 72_320),
        "gandiva": (17_379, 67_405),
        "max_min_fairness_perf": (14_623, 63_945),
        "max_min_fairness_packed": (14_049, 63_818),
        "finish_time_fairness_packed": (14_609, 65_153),
    },
    TOTAL: {
        "fifo_perf": (40_258, 90_701),
        "gandiva": (35_075, 75_994),
        "min_total_duration_perf": (63_775, 64_721),
        "min_total_duration_packed": (61_981, 63_032),
        "max_min_fairness_packed": (32_528, 64_178),
    },
}
GAMMAS = {JCT: {"no job lengths": 0.0, "job lengths": 0.5}, TOTAL: {"job lengths": -0.5}}
GOALS = {
    (JCT, "no job lengths"): {COMPLETION: "<= 12000"},
    (JCT, "job lengths"): {COMPLETION: "<= 11600"},
    (TOTAL, "job lengths"): {MAKESPAN: "<= 58500"},
    (TOTAL, "predicted"): {MAKESPAN: "<= 59500"},
}


def gavel(selection: Selection) -> Iterator[Row]:
    """Theirs as published, theirs in our simulator, ours."""
    truth = GavelTruth(selection.data / "interference" / "gavel" / "simulation_throughputs.json.gz")
    for name, whole in CASES.items():
        case = selection.named(whole, f"the first {QUICK_JOBS} of")
        for who, (jct_s, total_s) in () if selection.quick else THEIRS[name].items():
            yield Row(case, f"{who}, Gavel's simulator", COMPLETION, float(jct_s), "s")
            yield Row(case, f"{who}, Gavel's simulator", MAKESPAN, float(total_s), "s")
        trace = truth.in_seconds(load(selection.data / "traces" / "gavel" / f"{name}.trace", "gavel"))
        if selection.quick:
            trace = Trace(trace.name, trace.jobs[:QUICK_JOBS])
        if name == TOTAL:
            yield from _earliest(selection, case, trace, truth)
        yield from _reproduced(selection, case, name, trace, truth)
        yield from _assigned(selection, case, name, trace, truth)
        yield from _shipped(selection, case, name, trace, truth)


def _earliest(selection: Selection, case: str, trace: Trace, truth: GavelTruth) -> Iterator[Row]:
    """When all is done at the earliest: with any pairs, and with those that slow nobody down beyond the usual limit."""
    for most, limit in ((math.inf, "any pairs"), (USUAL_LIMIT, f"nobody slowed down more than {USUAL_LIMIT:g} times")):
        method = f"linear program, {limit}"
        if selection.wants(case, method):
            yield Row(case, method, MAKESPAN, _bound(trace, truth, most), "s")


def _bound(trace: Trace, truth: GavelTruth, most: float) -> float:
    """Return the optimum of ``prices_of_work``'s program: by duality the sum of prices times what is left."""
    jobs, found = trace.jobs, list[tuple[float, ...]]()
    alone = np.array([[truth.alone(job.workload, kind, job.gpus) for kind, _ in GPUS] for job in jobs])
    fastest = alone.max(axis=1)
    speed = alone / fastest[:, None]
    for part, (kind, _) in enumerate(GPUS):
        able = np.flatnonzero(alone[:, part] > 0.0).tolist()
        found += [(one, -1, part, speed[one, part], 0.0) for one in able]
        for one, other in itertools.combinations(able, 2):
            if jobs[one].gpus == jobs[other].gpus:
                n = truth.together((jobs[one].workload, jobs[other].workload), kind)
                if min(n) * most >= 1.0 - TOLERANCE and sum(n) > 1.0:
                    found.append((one, other, part, speed[one, part] * n[0], speed[other, part] * n[1]))
    first, second, parts = np.array([each[:3] for each in found], dtype=np.int64).T
    speeds = np.array([each[3:] for each in found]).T
    left_s = np.array([job.duration_s for job in jobs]) / fastest
    gpus, there = np.array([job.gpus for job in jobs]), np.array([count for _, count in GPUS])
    return float(prices_of_work(Choices(first, second, parts, *speeds), left_s, gpus, there) @ left_s)


def _reproduced(selection: Selection, case: str, name: str, trace: Trace, truth: GavelTruth) -> Iterator[Row]:
    for packed in (False, True):
        who = f"max_min_fairness_{'packed' if packed else 'perf'}"
        if who not in THEIRS[name] or not selection.wants(case, who):
            continue
        free = Scenario(trace, mixed_cluster(GPUS), truth, Costs(0.0, 0.0))
        result = baseline(free, Gavel(truth, packed=packed))
        yield from figures(case, f"{who}, ours", [result])
        if not selection.quick:
            difference = abs(result.summary()["jct_s"]["mean"] / THEIRS[name][who][0] - 1.0)
            goal = "<= 0.05" if name == JCT else None
            yield Row(case, f"{who}, ours", "difference of mean completion", difference, "1", goal=goal)


def _assigned(selection: Selection, case: str, name: str, trace: Trace, truth: GavelTruth) -> Iterator[Row]:
    for knows, gamma in GAMMAS[name].items():
        method = f"integer program (simulator only), {knows}"
        if selection.wants(case, method):
            result = baseline(Scenario(trace, mixed_cluster(GPUS), truth), Assignment(truth, gamma))
            yield from figures(case, method, [result], None if selection.quick else GOALS.get((name, knows)))


def _shipped(selection: Selection, case: str, name: str, trace: Trace, truth: GavelTruth) -> Iterator[Row]:
    for aim, most in (
        (COMPLETION_AIM, None),
        *(((MAKESPAN_AIM, None), (MAKESPAN_AIM, PATIENT)) if name == TOTAL else ()),
    ):
        yield from _aimed(selection, case, name, trace, truth, aim, most)


def _aimed(  # noqa: PLR0917 - the arguments of ``_shipped``, and what it varies
    selection: Selection, case: str, name: str, trace: Trace, truth: GavelTruth, aim: str, most: float | None
) -> Iterator[Row]:
    """With one aim, and jobs that accept to be slowed down as usual (None) or up to another factor."""
    limit = {} if most is None else {"default_max_slowdown": most}
    speeds = {kind: truth.usual_speeds()[kind] for kind, _ in GPUS}
    settings = changed({"placement": {"speeds": speeds, **limit}, "scheduling": {"aim": aim}})
    suffix = ("" if aim == COMPLETION_AIM else f", aim {aim}") + (
        "" if most is None else f", slowed down {most:g} times"
    )
    sized = Trace(trace.name, tuple(replace(job, memory_bytes=_memory(job, truth)) for job in trace.jobs))
    nodes = (even_cluster(gpus, gpu_type=kind, memory_bytes=MEMORY[kind]).nodes for kind, gpus in GPUS)
    cluster = Cluster(tuple(replace(node, name=f"{node.gpu_type}-{node.name}") for some in nodes for node in some))
    completed: dict[str, float] = {}
    for method, predictor, knows in (
        (UNKNOWN, TablePredictor(truth, error=0.0), "no job lengths"),
        (TOLD, TablePredictor(truth, error=0.0), "job lengths"),
        (LEARNS, TablePredictor(_usual(truth), error=USUAL_ERROR), "predicted"),
    ):
        if not selection.wants(case, method + suffix) or (most is not None and method != TOLD):
            continue  # whoever is not told the pairs would try such as were never measured: of jobs of unequal size
        jobs = sized
        if method != UNKNOWN:
            jobs = Trace(trace.name, tuple(replace(job, estimate_s=job.duration_s) for job in sized.jobs))
        result = shipped_core(
            Scenario(jobs, cluster, truth), settings=settings, models=only(predictor), known_programs=True
        )
        aims_at_it = (name == TOTAL) == (aim == MAKESPAN_AIM)
        goals = GOALS.get((name, knows)) if aims_at_it and not selection.quick else None
        yield from figures(case, method + suffix, [result], goals)
        completed[method] = result.summary()["jct_s"]["mean"]
        if method == LEARNS and TOLD in completed:
            goal = "<= 1.02" if name == JCT and not selection.quick else None
            against = completed[LEARNS] / completed[TOLD]
            yield Row(case, method + suffix, "completion against told the pairs", against, "1", goal=goal)


def _memory(job: TraceJob, truth: GavelTruth) -> int:
    """Return memory that keeps a job off the types it has no speed on: the trace does not say what jobs use."""
    runs_everywhere = all(truth.alone(job.workload, kind, job.gpus) > 0.0 for kind, _ in GPUS)
    return SMALL if runs_everywhere else LARGE


def _usual(truth: GavelTruth) -> PairTable:
    """Return what is known of pairs before any was measured: the mean of all."""
    known = [n for table in truth.pairs.values() for n in table.values() if n > 0.0]
    return PairTable({}, default=fmean(known))
