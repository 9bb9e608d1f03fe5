"""Reads traces of jobs from the files in which they are published, and from cotenant's own form.

Every loader checks every row: a number that cannot be, a job that needs no time, an id that comes twice is an error
that names file, line, field and value. Files may be compressed with gzip.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cotenant.scheduler.simulation.errors import Place, TraceError, named
from cotenant.scheduler.simulation.published import (
    GAVEL_COLUMNS,
    Jobs,
    dlrm,
    gavel,
    muri,
    muri_testbed,
    openb,
    philly_sia,
    philly_week,
    tiresias,
)
from cotenant.scheduler.simulation.rows import LONGEST_S, SHORTEST_S, LeftOut, Row, open_text, read_table
from cotenant.scheduler.simulation.workload import MOST_GPUS, Trace, TraceJob, trace_of

OWN_FORMAT, OWN_VERSION = "cotenant-trace", 1
_LIMITS: Mapping[str, tuple[float, float]] = {  # of what no simulation could count with, in every form
    "gpus": (1, MOST_GPUS),
    "duration_s": (SHORTEST_S, math.inf),
    "memory_bytes": (0, 2**60),
    "weight": (1e-6, 1e6),
    "cpus": (0.001, 4096),
}


def load(path: Path, form: str | None = None) -> Trace:
    """Read a trace.

    Args:
        path: The file.
        form: One of ``FORMATS``; None = told by the file's own columns.

    Raises:
        TraceError: The file is not such a trace, or a row of it cannot be used.
        OSError: The file cannot be read.
    """
    name = form or recognise(path)
    loader = FORMATS.get(name)
    if loader is None:
        raise TraceError(path, None, "format", name, f"one of {', '.join(FORMATS)}")
    rows = list(loader(path))
    jobs = [(place, job) for place, job in rows if isinstance(job, TraceJob)]
    if not jobs:
        raise TraceError(path, None, "rows", 0, "at least one job")
    left_out = Counter(row.why for _, row in rows if isinstance(row, LeftOut))
    trace = trace_of(path.name.removesuffix(".gz").rpartition(".")[0] or path.name, _unique(path, jobs))
    return replace(trace, left_out=dict(left_out), counts="steps" if name == GAVEL else "seconds")


_OWN = {
    "job_id", "submit_s", "gpus", "duration_s", "workload", "memory_bytes", "util", "membw_util", "estimate_s", "user",
    "weight", "max_slowdown", "cpus",
}  # fmt: skip


_NEEDED = {"job_id", "submit_s", "duration_s"}


def own(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """cotenant's own form (``docs/simulation.md``): jobs with the fields of ``TraceJob``, as JSON or as a table."""
    with open_text(path) as lines:
        is_json = lines.readline().lstrip().startswith(("{", "["))
    for row in _listed(path) if is_json else read_table(path):
        unknown = sorted(set(row.fields) - _OWN)
        if unknown:
            line, name = (None, row.line) if isinstance(row.line, str) else (1, "columns")
            raise TraceError(path, line, name, unknown[0], f"only {', '.join(sorted(_OWN))}")
        yield row.line, _own_job(row)


def _listed(path: Path) -> Iterator[Row]:
    """Yield the jobs of a JSON file, each field a number or a text."""
    document = _json(path)
    if not isinstance(document, dict) or document.get("format") != OWN_FORMAT:
        raise TraceError(path, None, "format", _part(document, "format"), repr(OWN_FORMAT))
    if document.get("version") != OWN_VERSION:
        raise TraceError(path, None, "version", document.get("version"), str(OWN_VERSION))
    jobs = document.get("jobs")
    if not isinstance(jobs, list):
        raise TraceError(path, None, "jobs", type(jobs).__name__, "a list of jobs")
    for number, fields in enumerate(jobs):
        place = f"jobs[{number}]"
        if not isinstance(fields, dict):
            raise TraceError(path, None, place, fields, "an object")
        row = Row(path, place, fields)
        for name, value in fields.items():
            if name in _OWN and (isinstance(value, bool) or not isinstance(value, str | int | float | None)):
                raise row.error(name, value, "a number or a text")
        yield row


def _own_job(row: Row) -> TraceJob:
    util, membw = row.optional("util"), row.optional("membw_util")
    for name, value in (("util", util), ("membw_util", membw)):
        if value is not None and value > 1.0:
            raise row.error(name, value, "a fraction in [0, 1]")
    weight = row.optional("weight", above=True)
    return TraceJob(
        job_id=row.text("job_id"),
        submit_s=row.seconds("submit_s"),
        gpus=row.whole("gpus", 1) if row.has("gpus") else 1,
        duration_s=row.seconds("duration_s", above=True),
        workload=str(row.fields.get("workload") or ""),
        memory_bytes=row.whole("memory_bytes") if row.has("memory_bytes") else 0,
        util=util,
        membw_util=membw,
        estimate_s=row.optional_seconds("estimate_s"),
        user=str(row.fields.get("user") or ""),
        weight=1.0 if weight is None else weight,
        max_slowdown=row.optional("max_slowdown", 1.0),
        cpus=row.optional("cpus", above=True),
    )


def _json(path: Path) -> object:
    with open_text(path) as lines:
        try:
            document: object = json.load(lines)
        except json.JSONDecodeError as error:
            raise TraceError(path, error.lineno, "file", error.msg, "JSON") from error
        except UnicodeDecodeError:
            raise  # open_text says what it is
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise TraceError(path, None, "file", str(error), "JSON that can be read") from error
    return document


def write_own(trace: Trace, path: Path) -> None:
    """Write a trace in cotenant's own form; ``own`` reads it back equal."""
    jobs = [{name: getattr(job, name) for name in sorted(_OWN)} for job in trace.jobs]
    text = json.dumps({"format": OWN_FORMAT, "version": OWN_VERSION, "jobs": jobs}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


GAVEL = "gavel"
FORMATS: Mapping[str, Callable[[Path], Jobs]] = {
    OWN_FORMAT: own,
    "philly-week": philly_week,
    "philly-sia": philly_sia,
    "muri": muri,
    "muri-testbed": muri_testbed,
    "tiresias": tiresias,
    GAVEL: gavel,
    "openb": openb,
    "dlrm": dlrm,
}
_COLUMNS = {  # by which a form is known; the first one counts
    "philly-week": {"submit_time", "gpu_num", "duration", "model", "batchsize", "amp"},
    "philly-sia": {"timestamp", "duration", "num_gpus"},
    "muri": {"num_gpu", "submit_time", "iteration_time", "resource_time_1"},
    "muri-testbed": {"num_gpu", "submit_time", "duration", "executed_time", "JCT"},
    "tiresias": {"num_gpu", "submit_time", "duration", "iterations", "model_name"},
    "openb": {"num_gpu", "gpu_milli"},
    "dlrm": {"instance_sn", "app_name", "gpu_request", "scheduled_time"},
    OWN_FORMAT: _NEEDED,
}


def recognise(path: Path) -> str:
    """Return which of ``FORMATS`` a file has, told by its columns.

    Raises:
        TraceError: None of them.
        OSError: The file cannot be read.
    """
    with open_text(path) as lines:
        head = lines.readline()
    if head.lstrip().startswith(("{", "[")):
        return OWN_FORMAT
    if len(head.split("\t")) in (len(GAVEL_COLUMNS), len(GAVEL_COLUMNS) - 1):
        return GAVEL
    columns = set(head.strip().split(","))
    for name, own_columns in _COLUMNS.items():
        if own_columns <= columns:
            return name
    raise TraceError(path, 1, "columns", head.strip()[:80], f"the head of one of {', '.join(FORMATS)}")


def _unique(path: Path, jobs: Sequence[tuple[Place, TraceJob]]) -> list[TraceJob]:
    """Count time from the first submission on; refuse an id that comes twice and a submission in the far future."""
    seen: dict[str, Place] = {}
    for line, job in jobs:
        _limited(path, line, job)
        if job.job_id in seen:
            raise TraceError(path, line, "job_id", job.job_id, f"an id that {named(seen[job.job_id])} does not have")
        seen[job.job_id] = line
    start = min(job.submit_s for _, job in jobs)
    shifted = [(place, replace(job, submit_s=job.submit_s - start)) for place, job in jobs]
    for place, job in shifted:
        if job.submit_s > LONGEST_S:
            words = f"a time at most {LONGEST_S:g} s after the first submission"
            raise TraceError(path, place, "submission", f"{job.submit_s:g} s after the first", words)
    return [job for _, job in shifted]


def _limited(path: Path, place: Place, job: TraceJob) -> None:
    """Refuse a job with a number that is outside ``_LIMITS``."""
    for name, (least, most) in _LIMITS.items():
        value = getattr(job, name)
        if value is not None and not least <= value <= most:
            words = f"a number of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
            raise TraceError(path, place, name, value, words)


def _part(document: object, name: str) -> object:
    return document.get(name) if isinstance(document, dict) else type(document).__name__
