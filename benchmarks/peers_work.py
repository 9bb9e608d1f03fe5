"""What the parts of ``peers.py`` share: the traces, the figures of a simulation, rows kept from earlier runs."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row

from cotenant.configs.settings import Settings
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.workload import Trace
from cotenant.scheduler.simulation.world import World

COMPLETION, QUEUEING, MAKESPAN = "mean completion", "mean queueing", "makespan"
SLOWDOWN, SLOWDOWN_P99 = "run / duration, mean", "run / duration, p99"
PROCESSOR = "processor time of a simulation"
Goals = Mapping[str, str]
WEEK_GPUS = 252  # on so many GPUs the week's jobs of at most 8 GPUs are the load that all are on its 304
LARGEST = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a part is to be run.

    Attributes:
        data: Folder with the traces.
        quick: A short version: less work under another name, without goals and published figures.
        case: Only cases in whose name this regular expression is found.
        method: Only methods in whose name this one is found.
    """

    data: Path
    quick: bool = False
    case: str = ""
    method: str = ""

    def wants(self, case: str, method: str) -> bool:
        """Whether this simulation is to be run."""
        return bool(re.search(self.case, case) and re.search(self.method, method))

    def named(self, case: str, short: str) -> str:
        """Return the name of a case: what is short of it, in a short version."""
        return f"{short} {case}" if self.quick else case


Part = Callable[[Selection], Iterator[Row]]


def heartbeat(name: str, every_s: float = 60.0) -> Callable[[World], None]:
    """Return what tells on standard error, about once a minute, how far a simulation is: some take an hour."""
    told_at = time.monotonic()

    def look(world: World) -> None:
        nonlocal told_at
        if time.monotonic() >= told_at + every_s:
            told_at = time.monotonic()
            ended, day = len(world.runs) - world.unfinished, world.now / 86_400.0
            print(f"{name}: {ended:,} of {len(world.runs):,} jobs have ended, day {day:.1f}", file=sys.stderr)

    return look


def data_folder(given: Path | None) -> Path:
    """Return the folder with the traces: as given, from the environment, or beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return given or Path(os.environ.get("COTENANT_DATA", beside))


def figures(case: str, method: str, results: Sequence[Result], goals: Goals | None = None) -> Iterator[Row]:
    """What counts of some simulations: the means, and the spread between them."""
    found = [dict(_figures(result)) for result in results]
    jct_s, queue_s = (np.mean([each[metric][0] for each in found]) for metric in (COMPLETION, QUEUEING))
    print(f"{case}: {method}: completion {jct_s:,.0f} s, queueing {queue_s:,.0f} s", file=sys.stderr, flush=True)
    for metric, (_, unit) in found[0].items():
        values = [each[metric][0] for each in found if metric in each]
        spread = float(np.std(values)) if len(values) > 1 else None
        yield Row(case, method, metric, float(np.mean(values)), unit, spread, goal=(goals or {}).get(metric))


def _figures(result: Result) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield name, value and unit of each figure of one simulation."""
    summary = result.summary()
    fair, queue = summary["finish_time_fairness"], summary["queue_s"]
    wide = [run for run in result.world.runs if run.job.gpus >= 32 and run.ended_at is not None]
    yield COMPLETION, (summary["jct_s"]["mean"], "s")
    yield "p99 completion", (summary["jct_s"]["p99"], "s")
    yield QUEUEING, (queue["mean"], "s")
    yield MAKESPAN, (summary["makespan_s"], "s")
    yield SLOWDOWN, (summary["slowdown"]["mean"], "1")
    yield SLOWDOWN_P99, (summary["slowdown"]["p99"], "1")
    yield "GPU time saved", (summary["saving"], "1")
    yield "GPUs occupied", (summary["occupied"], "1")
    yield "Jain fairness", (summary["jain"], "1")
    yield "jobs treated unfairly", (fair["unfair"], "1")
    yield "suspensions", (float(summary["suspensions"]), "1")
    yield PROCESSOR, (result.seconds, "s")
    if wide:
        waited = [(run.ended_at or 0.0) - run.job.submit_s - run.run_s for run in wide]
        yield "mean queueing of jobs of 32 GPUs and more", (sum(waited) / len(waited), "s")


def sample(trace: Trace, gpus: int, seed: int) -> Trace:
    """Return a random part of the Philly week's jobs that fit one host, as many as so many GPUs carry."""
    drawn = np.random.default_rng(seed).random(len(trace.jobs)) < gpus / WEEK_GPUS
    jobs = (job for job, mine in zip(trace.jobs, drawn, strict=True) if mine and job.gpus <= LARGEST)
    return Trace(f"{trace.name}, sample {seed}", tuple(jobs))


def changed(changes: Mapping[str, Mapping[str, object]]) -> Settings:
    """Return the default settings but for these, by section and name."""
    sections = {name: {**values, **changes.get(name, {})} for name, values in Settings().model_dump().items()}
    return Settings.model_validate(sections)


def kept(path: Path | None, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of an earlier report that were not measured again now (by case and method), with its commit."""
    if path is None or not path.exists():
        return []
    again = {(row.case, row.method) for row in rows}
    earlier = json.loads(path.read_text(encoding="utf-8"))
    rest = [row for row in earlier["rows"] if (row["case"], row["method"]) not in again]
    return [Row(**{"commit": earlier["commit"]} | row) for row in rest]
