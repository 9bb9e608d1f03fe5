"""What a simulation says: one row per job, and the figures that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cotenant.scheduler.simulation.remarks import remarks, remarks_on
from cotenant.scheduler.simulation.workload import Cluster
from cotenant.scheduler.simulation.world import Run, World

Floats = NDArray[np.float64]
_LEAST = 1e-9
_DUST = 1e-6


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace.

    Attributes:
        policy: Its name.
        world: The world at the end.
        seconds: Processor time the simulation took.
        notes: What the policy's engine has to say for itself, by name.
        conditions: What was asked for, by option: for whoever wants to have the same again.
    """

    policy: str
    world: World
    seconds: float
    notes: Mapping[str, Any]
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """What whoever reads these figures must know of the input."""
        trace = self.world.trace
        return [*remarks(trace, self.world.cluster, self.world.truth), *remarks_on(self.policy, trace)]

    def jobs(self) -> pd.DataFrame:
        """One row per job, in order of submission; a job that never ended has NaN where its end would count."""
        world = self.world
        fair = finish_time_fairness(world)
        names = [run.job.job_id for run in world.runs]
        return pd.DataFrame([_row(run, names) | {"finish_time_fairness": fair[run.index]} for run in world.runs])

    def summary(self) -> dict[str, Any]:
        """The figures, JSON-able; None where nothing ended."""
        world = self.world
        ended = [run for run in world.runs if run.ended_at is not None]
        out: dict[str, Any] = {
            "policy": self.policy,
            "trace": world.trace.name,
            "gpus": world.cluster.gpus,
            "gpu_types": gpu_types(world.cluster),
            "jobs": len(world.runs),
            "ended": len(ended),
            "unplaceable": len(world.unplaceable),
            "suspensions": sum(run.suspensions for run in world.runs),
            "failures": sum(run.failures for run in world.runs),
            "processor_s": round(self.seconds, 3),
        }
        if ended:
            out |= _times(ended) | _devices(world, ended) | _fairness(world, ended)
        return out | {"notes": dict(self.notes), "remarks": self.remarks, "conditions": dict(self.conditions)}

    def write(self, folder: Path) -> None:
        """Write ``jobs.parquet``, ``jobs.csv`` and ``summary.json`` into the folder.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        jobs = self.jobs()
        jobs.to_parquet(folder / "jobs.parquet", index=False)
        jobs.to_csv(folder / "jobs.csv", index=False)
        text = json.dumps(self.summary(), indent=1, allow_nan=False)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def gpu_types(cluster: Cluster) -> dict[str, int]:
    """Return the numbers of GPUs by type."""
    found: dict[str, int] = {}
    for node in cluster.nodes:
        found[node.gpu_type] = found.get(node.gpu_type, 0) + node.gpus
    return found


def _row(run: Run, names: list[str]) -> dict[str, Any]:
    job = run.job
    nan = float("nan")
    jct = nan if run.ended_at is None else run.ended_at - job.submit_s
    return {
        "job_id": job.job_id,
        "user": job.user,
        "workload": job.workload,
        "gpus": job.gpus,
        "duration_s": job.duration_s,
        "submit_s": job.submit_s,
        "start_s": nan if run.started_at is None else run.started_at,
        "end_s": nan if run.ended_at is None else run.ended_at,
        "jct_s": jct,
        "run_s": run.run_s,
        "queue_s": _no_dust(jct - run.run_s),
        "slowdown": run.run_s / job.duration_s if run.ended_at is not None else nan,
        "suspensions": run.suspensions,
        "failures": run.failures,
        "ran_with": " ".join(names[index] for index in run.ran_with),
    }


def _times(ended: list[Run]) -> dict[str, Any]:
    jct = np.array([_end(run) - run.job.submit_s for run in ended])
    queue = np.array([_no_dust(_end(run) - run.job.submit_s - run.run_s) for run in ended])
    slowdown = np.array([run.run_s / run.job.duration_s for run in ended])
    first = min(run.job.submit_s for run in ended)
    return {
        "jct_s": _spread(jct),
        "queue_s": _spread(queue),
        "makespan_s": max(_end(run) for run in ended) - first,
        "slowdown": _spread(slowdown),
    }


def _devices(world: World, ended: list[Run]) -> dict[str, Any]:
    """Return the figures of the GPUs; see docs/simulation.md for what each is."""
    line = world.timeline
    at = np.array(line.at)
    gaps = np.diff(at, append=at[-1])
    occupied, shared, busy, up = (
        float(np.dot(gaps, np.array(x))) for x in (line.occupied, line.shared, line.busy, line.up)
    )
    work = sum(run.job.gpus * run.job.duration_s for run in ended)
    return {
        "gpu_hours_occupied": occupied / 3600.0,
        "gpu_hours_shared": shared / 3600.0,
        "occupied": occupied / max(up, _LEAST),
        "utilisation": busy / max(up, _LEAST) if world.utils_known else None,
        "saving": _no_dust(1.0 - occupied / max(work, _LEAST)),
    }


def _fairness(world: World, ended: list[Run]) -> dict[str, Any]:
    rates = np.array([run.job.duration_s / max(_end(run) - run.job.submit_s, _LEAST) for run in ended])
    ratios = finish_time_fairness(world)
    known = ratios[~np.isnan(ratios)]
    return {
        "jain": jain(rates),
        "finish_time_fairness": _spread(known) | {"unfair": float(np.mean(known > 1.0 + _DUST))},
    }


def jain(values: Floats) -> float:
    """Return Jain's index of fairness, (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything."""
    return float(values.sum() ** 2 / (len(values) * np.dot(values, values)))


def finish_time_fairness(world: World) -> Floats:
    """Return for each job its completion time against an equal share of the cluster; NaN where it has not ended.

    The job alone on a 1/c-th of the cluster would take ``duration * c``, where c is the mean over its life of
    ``max(1, GPUs wanted by all present jobs / GPUs)`` (after Themis, NSDI '20). Above 1 the job was treated unfairly.
    """
    runs, gpus = world.runs, world.cluster.gpus
    present = [run for run in runs if run.ended_at is not None]
    if not present:
        return np.full(len(runs), np.nan)
    starts = np.array([run.job.submit_s for run in present])
    ends = np.array([_end(run) for run in present])
    wants = np.array([float(run.job.gpus) for run in present])
    at = np.concatenate([starts, ends])
    order = np.argsort(at, kind="stable")
    at = at[order]
    demand = np.cumsum(np.concatenate([wants, -wants])[order])
    contention = np.maximum(1.0, demand / gpus)
    area = np.concatenate([[0.0], np.cumsum(contention[:-1] * np.diff(at))])
    mean = (np.interp(ends, at, area) - np.interp(starts, at, area)) / np.maximum(ends - starts, _LEAST)
    alone = np.array([run.job.duration_s for run in present])
    ratios = np.full(len(runs), np.nan)
    ratios[[run.index for run in present]] = (ends - starts) / (alone * np.maximum(mean, 1.0))
    return ratios


def _no_dust(difference: float) -> float:
    """Return a difference of sums without what is left of their rounding, which would be told as "-0"."""
    return 0.0 if abs(difference) < _DUST else difference


def _end(run: Run) -> float:
    if run.ended_at is None:
        raise ValueError(f"job {run.job.job_id} has not ended")
    return run.ended_at


def _spread(values: Floats) -> dict[str, float]:
    p50, p90, p99 = (float(x) for x in np.percentile(values, (50, 90, 99)))
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(values.max())}
