"""The Philly week with truthful slowdowns: ours beside the peers' policies, on many and on few GPUs.

Every job has a measured configuration; what a pair really does is a table the policies do not see. Ours is told
predictions made without the job's model family (``n_predicted_lof``) and learns from what it measures: utilisation and
memory after 6 s, throughputs of jobs together after 60 s, with 3 % noise and a second of delay. A variant is told what
its own model predicts, fitted without the job's family too (``peers_model.py``), and one the truth, to show the
head-room. Suspending or moving costs 60 s of work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from common import Row
from peers_model import COLUMN, OWN_MODEL, errors, predicted_pairs
from peers_work import (
    COMPLETION,
    PROCESSOR,
    QUEUEING,
    SLOWDOWN,
    SLOWDOWN_P99,
    Goals,
    Selection,
    changed,
    figures,
    heartbeat,
    sample,
)

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.models import only
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.sensing import Sensing
from cotenant.scheduler.simulation.simulate import Scenario, baseline, shipped_core
from cotenant.scheduler.simulation.tables import load_pairs, utilisations
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Trace, even_cluster

USABLE_GIB = 23
FULL, HALF = 0.94, 0.5  # utilisation of heavy models and more, of light ones and less
PEERS = ("fifo", "sjf", "qssf", "tiresias", "srtf", "lucid", "threshold", "static", "first-fit", "best-fit")
PREEMPTING_AND_SHARING = ("tiresias", "srtf", "lucid", "threshold")
SEEDS = (1, 2, 3)
TOLD = "cotenant, told the truth"


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster and mix.

    Attributes:
        name: For people.
        gpus: Number of GPUs, eight on a host.
        heavy: Every job has one of the configurations that fill a GPU.
        light: Every job has one of those that use at most half of it.
        column: What is true, a column of the table of pairs.
        goals: By method.
        peers: Baselines to run.
        sampled: Only samples of the jobs, as many as the GPUs carry like all of them 304 GPUs.
        seeds: Numbers of the samples, or of the noise on what ours measures; the peers measure nothing.
    """

    name: str
    gpus: int
    heavy: bool = False
    light: bool = False
    column: str = "n"
    goals: Mapping[str, Goals] = field(default_factory=dict)
    peers: tuple[str, ...] = PEERS
    sampled: bool = False
    seeds: tuple[int, ...] = SEEDS


_OURS: Mapping[str, Goals] = {
    "cotenant": {},
    "cotenant, no estimates": {},
    "cotenant, never suspending": {},
    "cotenant, never suspending, no estimates": {},
    OWN_MODEL: {},
    TOLD: {},
}
QUICK = Case(
    "one sample of the Philly week, 8 GPUs", 8, goals=_OURS, peers=("srtf", "lucid"), sampled=True, seeds=SEEDS[:1]
)
CASES = (
    Case("samples of the Philly week, 32 GPUs", 32, goals=_OURS, sampled=True),
    Case(
        "samples of the Philly week, 32 GPUs, pessimistic truth",
        32,
        column="n_pessimistic",
        sampled=True,
        peers=PREEMPTING_AND_SHARING,
    ),
    Case(
        "samples of the Philly week, 32 GPUs, heavy models", 32, heavy=True, sampled=True, peers=PREEMPTING_AND_SHARING
    ),
    Case(
        "samples of the Philly week, 32 GPUs, light models", 32, light=True, sampled=True, peers=PREEMPTING_AND_SHARING
    ),
    Case(
        "Philly week, 304 GPUs",
        304,
        goals={
            "cotenant": {
                COMPLETION: "<= 4850",
                QUEUEING: "<= 40",
                SLOWDOWN: "<= 1.02",
                SLOWDOWN_P99: "<= 1.20",
                PROCESSOR: "<= 20",
            },
            "cotenant, no estimates": {COMPLETION: "<= 4870"},
            "cotenant, never suspending": {COMPLETION: "<= 5050"},
            "cotenant, never suspending, no estimates": {COMPLETION: "<= 5080"},
            OWN_MODEL: {},
        },
    ),
    Case("Philly week, 304 GPUs, pessimistic truth", 304, column="n_pessimistic", peers=("lucid", "threshold")),
    Case("Philly week, 304 GPUs, heavy models", 304, heavy=True, goals={"cotenant": {COMPLETION: "<= 5400"}}),
    Case("Philly week, 304 GPUs, light models", 304, light=True, peers=PREEMPTING_AND_SHARING),
    Case(
        "Philly week, 192 GPUs",
        192,
        goals={"cotenant": {COMPLETION: "<= 5350"}},
        peers=("srtf", "lucid"),
    ),
    Case(
        "Philly week, 160 GPUs",
        160,
        goals={
            "cotenant, 3 jobs a GPU": {COMPLETION: "<= 5500"},
            "cotenant, 2 jobs a GPU": {COMPLETION: "<= 6100"},
        },
        peers=("srtf", "lucid"),
    ),
)


def settings_of(method: str) -> Settings:
    """Return the settings of one of our methods: the defaults, but for what its name says."""
    changes: dict[str, dict[str, object]] = {}
    if "never suspending" in method:
        changes["rebalance"] = {"enabled": False}
    if "jobs a GPU" in method:
        changes["placement"] = {"max_jobs_per_gpu": int(method.split(" jobs a GPU", maxsplit=1)[0].rpartition(" ")[2])}
    return changed(changes)


def ours(case: Case) -> list[str]:
    """Return our methods for this case."""
    named = list(case.goals)
    return list(dict.fromkeys([*named, "cotenant"] + ([TOLD] if case.gpus == 304 else [])))


def week(selection: Selection, case: Case, seed: int) -> Trace:
    """Return the jobs of a case; ``seed``: number of the sample."""
    trace = load(selection.data / "traces" / "peer_runs" / "philly_week.csv.gz")
    if case.sampled:
        trace = sample(trace, case.gpus, seed)
    jobs = trace.jobs
    if case.heavy or case.light:  # every job becomes one of those, in turn: arrivals, sizes and run times stay
        fits = [j for j in trace.jobs if j.util is not None and (j.util >= FULL if case.heavy else j.util <= HALF)]
        kinds = itertools.cycle({job.workload: job for job in fits}.values())
        jobs = tuple(
            replace(job, workload=k.workload, util=k.util, membw_util=k.membw_util, memory_bytes=k.memory_bytes)
            for job, k in zip(jobs, kinds, strict=False)
        )
    return Trace(trace.name, jobs)


def simulate(selection: Selection, case: Case, method: str, seed: int = 0) -> Result:
    """Run one method on one case."""
    trace = week(selection, case, seed)
    if "no estimates" in method:
        trace = Trace(trace.name, tuple(replace(job, estimate_s=None) for job in trace.jobs))
    utils = utilisations(trace)
    table = selection.data / "traces" / "peer_runs" / "pair_truth.csv.gz"
    truth = PairTable(load_pairs(table, case.column), utils)
    cluster, look = even_cluster(case.gpus, memory_bytes=USABLE_GIB * GIB), heartbeat(f"{case.name}, {method}")
    scenario = Scenario(trace, cluster, truth, look=look)
    if method in POLICIES:
        return baseline(scenario, POLICIES[method]())
    told = TablePredictor(truth, error=0.0)
    if method != TOLD:
        own = predicted_pairs(selection.data) if method == OWN_MODEL else load_pairs(table, COLUMN)
        told = TablePredictor(PairTable(own, utils))
    return shipped_core(scenario, settings=settings_of(method), models=only(told), sensing=Sensing(seed=seed))


def philly(selection: Selection) -> Iterator[Row]:
    """How good predictions are; then every case, first ours, then the peers."""
    if not selection.quick:
        yield from errors(selection)
    for case in (QUICK,) if selection.quick else CASES:
        for method in (*ours(case), *case.peers):
            if selection.wants(case.name, method):
                seeds = case.seeds if case.sampled or method not in POLICIES else case.seeds[:1]
                results = [simulate(selection, case, method, seed) for seed in seeds]
                yield from figures(case.name, method, results, case.goals.get(method))
