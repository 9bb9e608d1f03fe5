"""Reads what is known of sharing: measured pairs, and Gavel's measured throughputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from cotenant.scheduler.simulation.errors import TraceError
from cotenant.scheduler.simulation.published import muri_key, workload_key
from cotenant.scheduler.simulation.rows import LONGEST_S, SHORTEST_S, open_text, read_table
from cotenant.scheduler.simulation.truth import PairTable, Truth
from cotenant.scheduler.simulation.workload import Cluster, Trace, TraceJob

_Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Throughputs = dict[str, dict[str, dict[str, _Rate | tuple[_Rate, _Rate]]]]
_ADAPTER: TypeAdapter[_Throughputs] = TypeAdapter(_Throughputs)
_PAIR = ("workload", "neighbour", "model", "batchsize", "amp", "peer", "peer_batchsize", "peer_amp")
_MOST_N = 1.5  # of a pair as measured: noise, more than that is an error


def load_pairs(path: Path, column: str = "n") -> dict[tuple[str, str], float]:
    """Read measured pairs: n of the first of two workloads beside the second.

    The file is a CSV table with the columns ``model, batchsize, amp, peer, peer_batchsize, peer_amp`` and one or more
    of throughputs, or with ``workload, neighbour`` and throughputs.

    Args:
        path: The file.
        column: The column to read.

    Raises:
        TraceError: A row cannot be used.
    """
    pairs: dict[tuple[str, str], float] = {}
    for row in read_table(path):
        if column not in row.fields or column in _PAIR:
            others = ", ".join(str(name) for name in row.fields if name not in _PAIR)
            raise TraceError(path, None, "column", column, f"one that it has beside the pair: {others or 'none'}")
        if "workload" in row.fields:
            key = (row.text("workload"), row.text("neighbour"))
        else:
            key = (
                workload_key(row.text("model"), row.whole("batchsize"), row.whole("amp")),
                workload_key(row.text("peer"), row.whole("peer_batchsize"), row.whole("peer_amp")),
            )
        if key in pairs:
            raise row.error("pair", " beside ".join(key), "every ordered pair once")
        n = row.number(column, above=True)
        if n > _MOST_N:
            raise row.error(column, n, f"a normalised throughput above 0 and at most {_MOST_N:g} (above 1 counts as 1)")
        pairs[key] = min(1.0, n)
    if not pairs:
        raise TraceError(path, None, "rows", 0, "at least one pair")
    return pairs


def utilisations(trace: Trace) -> Mapping[str, float]:
    """Return the mean utilisation of each workload of which every job says it."""
    seen: dict[str, list[float]] = {}
    unknown: set[str] = set()
    for job in trace.jobs:
        if job.util is None:
            unknown.add(job.workload)
        else:
            seen.setdefault(job.workload, []).append(job.util)
    return {name: sum(utils) / len(utils) for name, utils in seen.items() if name not in unknown}


class GavelTruth:
    """Steps per second measured on three GPU types, alone and in pairs (Gavel, OSDI '20).

    A workload is a job type with its number of GPUs. The reference type of a trace's durations is ``reference``.

    Attributes:
        reference: The GPU type on which ``duration_s`` is meant.
        rates: Steps per second alone, by workload and GPU type; 0 = does not fit.
        pairs: By GPU type, n of the first of two workloads beside the second; 0 = they do not fit together.

    Args:
        path: ``simulation_throughputs.json``, plain or compressed with gzip.
        reference: The GPU type on which ``duration_s`` is meant.
    """

    def __init__(self, path: Path, reference: str = "v100") -> None:
        self.path, self.reference = path, reference
        self.rates: dict[tuple[str, str], float] = {}
        self.pairs: dict[str, dict[tuple[str, str], float]] = {}
        for gpu_type, table in _throughputs(path).items():
            pairs = self.pairs[gpu_type] = {}
            for name, row in table.items():
                one, alone = _gavel_key(path, name), row.get("null")
                if not isinstance(alone, float):
                    raise TraceError(path, f"{gpu_type} {name}", "null", alone, "the steps per second alone")
                self.rates[one, gpu_type] = alone
                for other, both in row.items():
                    if isinstance(both, tuple) and alone > 0.0:
                        pairs[one, _gavel_key(path, other)] = min(1.0, both[0] / alone)
        self._tables = {gpu_type: PairTable(pairs) for gpu_type, pairs in self.pairs.items()}
        if reference not in self._tables:
            raise TraceError(path, None, "reference", reference, f"one of {', '.join(self._tables)}")

    def alone(self, workload: str, gpu_type: str, gpus: int) -> float:
        """See ``Truth.alone``; 0 where the workload does not run on such GPUs."""
        base = self.rates.get((workload, self.reference), 0.0)
        return self.rates.get((workload, gpu_type), 0.0) / base if base > 0.0 else 0.0

    def together(self, workloads: tuple[str, ...], gpu_type: str) -> tuple[float, ...]:
        """See ``Truth.together``."""
        return self._tables[gpu_type].together(workloads, gpu_type)

    def usual_speeds(self) -> dict[str, float]:
        """Return the speed of each GPU type relative to the reference: the geometric mean over what runs on both."""
        logs: dict[str, list[float]] = {gpu_type: [] for gpu_type in self._tables}
        for (workload, gpu_type), rate in self.rates.items():
            base = self.rates.get((workload, self.reference), 0.0)
            if rate > 0.0 and base > 0.0:
                logs[gpu_type].append(math.log(rate / base))
        return {gpu_type: math.exp(fmean(found)) for gpu_type, found in logs.items() if found}

    def in_seconds(self, trace: Trace) -> Trace:
        """Return a Gavel trace with its numbers of steps turned into seconds on the reference type.

        Raises:
            TraceError: The table does not have a job, or not on the reference type, or a job takes too long or no time.
        """
        return replace(trace, jobs=tuple(self._timed(job) for job in trace.jobs), counts="seconds")

    def _timed(self, job: TraceJob) -> TraceJob:
        rate = self.rates.get((job.workload, self.reference), 0.0)
        what = f"{job.workload} on {self.reference}"
        if not rate > 0.0:
            raise TraceError(self.path, what, "steps per second", rate, f"a rate above 0: job {job.job_id} needs it")
        seconds = job.duration_s / rate
        if seconds > LONGEST_S:
            words = f"at most {LONGEST_S * rate:g}: at {rate:g} a second they take {LONGEST_S:g} s"
            raise TraceError(self.path, what, f"steps of job {job.job_id}", job.duration_s, words)
        if seconds < SHORTEST_S:
            words = f"at least {SHORTEST_S * rate:g}: at {rate:g} a second they take {SHORTEST_S:g} s"
            raise TraceError(self.path, what, f"steps of job {job.job_id}", job.duration_s, words)
        return replace(job, duration_s=seconds)


def keep_off(trace: Trace, cluster: Cluster, truth: Truth) -> tuple[Trace, Cluster]:
    """Return both with such memory that no job fits GPUs of a type on which it does not run.

    A truth says on which types a job does not run, not what memory it uses: types on which some job does not run have a
    quarter of their memory, and every such job uses a byte more than that.
    """

    def stays_off(job: TraceJob) -> bool:
        return any(truth.alone(job.workload, each, job.gpus) <= 0.0 for each in types)

    types = {node.gpu_type for node in cluster.nodes}
    small = {each for each in types for job in trace.jobs if truth.alone(job.workload, each, job.gpus) <= 0.0}
    if not small:
        return trace, cluster
    quarter = max(node.memory_bytes for node in cluster.nodes if node.gpu_type in small) // 4
    jobs = tuple(replace(job, memory_bytes=quarter + 1) if stays_off(job) else job for job in trace.jobs)
    nodes = (replace(node, memory_bytes=quarter) if node.gpu_type in small else node for node in cluster.nodes)
    return replace(trace, jobs=jobs), Cluster(tuple(nodes))


def _throughputs(path: Path) -> _Throughputs:
    try:
        with open_text(path) as lines:
            return _ADAPTER.validate_json(lines.read())
    except ValidationError as error:
        first = error.errors()[0]
        place = " ".join(str(part) for part in first["loc"][:3]) or None
        form = "steps per second by GPU type and job: alone (null), and of both beside each other job"
        raise TraceError(path, place, "throughputs", first["msg"], form) from error


def _gavel_key(path: Path, name: str) -> str:
    """Turn ``('ResNet-18 (batch size 128)', 4)`` into the workload of the trace."""
    words, _, gpus = name.strip("()").rpartition(",")
    if not gpus.strip().isdecimal():
        raise TraceError(path, None, "job", name, "a job type with its number of GPUs: ('LM (batch size 5)', 1)")
    return workload_key(words.strip().strip("'\""), f"x{int(gpus)}")


class StageTruth:
    """Jobs that take turns on three resources of a machine: storage and processors, GPU, network (Muri, SIGCOMM '22).

    A job uses a resource for a part of each of its iterations. A set whose parts add up to at most 1 on every resource
    runs as if alone; otherwise the most wanted resource is shared out and everybody is slowed down alike. That is the
    perfect interleaving Muri aims at: what a real machine does lies below.

    Args:
        path: One of Muri's traces, with ``iteration_time`` and ``resource_time_0`` to ``resource_time_2``.
    """

    def __init__(self, path: Path) -> None:
        self.parts: dict[str, tuple[float, ...]] = {}
        for row in read_table(path):
            whole = row.number("iteration_time", above=True)
            parts = tuple(min(1.0, row.number(f"resource_time_{each}") / whole) for each in range(3))
            self.parts[muri_key(row)] = parts

    def alone(self, workload: str, gpu_type: str, gpus: int) -> float:
        """See ``Truth.alone``."""
        return 1.0

    def together(self, workloads: tuple[str, ...], gpu_type: str) -> tuple[float, ...]:
        """See ``Truth.together``."""
        wanted = [sum(self.parts[workload][each] for workload in workloads) for each in range(3)]
        return (1.0 / max(1.0, *wanted),) * len(workloads)
