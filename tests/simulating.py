"""Short ways to make traces, clusters and simulations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cotenant.scheduler.simulation.desk import BaselinePolicy
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.simulate import Scenario, baseline
from cotenant.scheduler.simulation.truth import PairTable, Truth
from cotenant.scheduler.simulation.workload import GIB, Trace, TraceJob, even_cluster, trace_of
from cotenant.scheduler.simulation.world import Costs

NO_COST = Costs(0.0, 0.0)


def job(job_id: str, submit: float = 0.0, length: float = 100.0, gpus: int = 1, **rest: Any) -> TraceJob:
    """A job; keywords are fields of ``TraceJob``."""
    return TraceJob(job_id, submit, gpus, length, **rest)


def scenario(jobs: Iterable[TraceJob], gpus: int = 1, per_node: int = 8, **rest: Any) -> Scenario:
    """The jobs on equal GPUs of 24 GiB, without restart costs; keywords are fields of ``Scenario``."""
    return Scenario(trace_of("made-up", jobs), even_cluster(gpus, per_node), **({"costs": NO_COST} | rest))


def run(policy: str | BaselinePolicy, jobs: Iterable[TraceJob], gpus: int = 1, **rest: Any) -> Result:
    """Simulate a baseline policy."""
    made = POLICIES[policy]() if isinstance(policy, str) else policy
    return baseline(scenario(jobs, gpus, **rest), made)


def ends(result: Result) -> dict[str, float | None]:
    """When each job ended."""
    return {each.job.job_id: each.ended_at for each in result.world.runs}


def halves(*names: str, n: float = 0.5) -> Truth:
    """A truth in which every pair of these workloads runs at ``n``, also a workload beside itself."""
    return PairTable({(one, other): n for one in names for other in names})


def crowd(count: int = 60, seed: int = 1, largest: int = 4) -> Trace:
    """Jobs of three workloads with arrivals, sizes and memory drawn at random."""
    import numpy as np

    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(40.0, count))
    jobs = [
        job(
            f"j{index}",
            float(round(at[index])),
            float(rng.integers(30, 900)),
            int(rng.choice([1, 1, 1, 2, largest])),
            workload=str(rng.choice(["light", "medium", "heavy"])),
            memory_bytes=int(rng.integers(1, 12)) * GIB,
            estimate_s=float(rng.integers(30, 900)),
        )
        for index in range(count)
    ]
    utils = {"light": 0.2, "medium": 0.5, "heavy": 0.95}
    return trace_of("crowd", (_with_util(each, utils[each.workload]) for each in jobs))


def _with_util(each: TraceJob, util: float) -> TraceJob:
    from dataclasses import replace

    return replace(each, util=util)


CROWD_TRUTH = PairTable(
    {
        ("light", "light"): 1.0,
        ("light", "medium"): 0.95,
        ("light", "heavy"): 0.85,
        ("medium", "light"): 0.97,
        ("medium", "medium"): 0.9,
        ("medium", "heavy"): 0.6,
        ("heavy", "light"): 0.93,
        ("heavy", "medium"): 0.7,
        ("heavy", "heavy"): 0.5,
    },
    {"light": 0.2, "medium": 0.5, "heavy": 0.95},
)
