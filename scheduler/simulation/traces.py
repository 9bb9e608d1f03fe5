"""Reads traces of jobs from the files in which they are published, and from cotenant's own form.

Every loader checks every row: a number that cannot be, a job that needs no time, an id that comes twice is an error
that names file, line, field and value. Files may be compressed with gzip.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cotenant.scheduler.simulation.errors import Place, TraceError, named
from cotenant.scheduler.simulation.workload import Cluster, Node, Trace, TraceJob, trace_of

MIB = 1 << 20
OWN_FORMAT, OWN_VERSION = "cotenant-trace", 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, read field by field.

    Attributes:
        path: The file.
        line: Line in it, from 1, or the name of the place.
        fields: The values as text, by column.
    """

    path: Path
    line: Place
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field that must not be empty."""
        value = self.fields.get(name)
        if value is None or value == "":
            raise self.error(name, value, "a value")
        return str(value)

    def number(self, name: str, least: float = 0.0, *, above: bool = False) -> float:
        """Return a finite number of at least ``least`` (``above``: greater than it)."""
        words = f"a number {'above' if above else 'of at least'} {least:g}"
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise self.error(name, text, words) from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise self.error(name, text, words)
        return value

    def optional(self, name: str, least: float = 0.0, *, above: bool = False) -> float | None:
        """Return a number, or None where the field is empty or missing."""
        return None if self.fields.get(name) in (None, "") else self.number(name, least, above=above)

    def whole(self, name: str, least: int = 0) -> int:
        """Return a whole number of at least ``least``."""
        value = self.number(name, least)
        if value != int(value):
            raise self.error(name, self.fields[name], f"a whole number of at least {least}")
        return int(value)

    def time(self, name: str) -> float:
        """Return a date and time (ISO 8601, UTC unless it says otherwise) as Unix seconds."""
        text = self.text(name)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise self.error(name, text, "a date and time such as 2017-10-01 00:00:45") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def error(self, name: str, value: object, accepted: str) -> TraceError:
        """Return the error for this field."""
        return TraceError(self.path, self.line, name, value, accepted)


def load(path: Path, form: str | None = None) -> Trace:
    """Read a trace.

    Args:
        path: The file.
        form: One of ``FORMATS``; None = told by the file's own columns.

    Raises:
        TraceError: The file is not such a trace, or a row of it cannot be used.
        OSError: The file cannot be read.
    """
    name = form or _recognise(path)
    loader = FORMATS.get(name)
    if loader is None:
        raise TraceError(path, None, "format", name, f"one of {', '.join(FORMATS)}")
    try:
        jobs = list(loader(path))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
        raise TraceError(path, None, "file", path.name, f"a text file that can be read ({error})") from error
    if not jobs:
        raise TraceError(path, None, "rows", 0, "at least one job")
    return trace_of(path.name.removesuffix(".gz").rpartition(".")[0] or path.name, _unique(path, jobs))


def workload_key(model: str, batch: object = "", amp: object = "") -> str:
    """Return the key under which measured pairs of a configuration are found."""
    return "/".join(str(part) for part in (model, batch, amp) if part != "")


def philly_week(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """Arrivals of a cluster with a measured configuration for every job (the form of Lucid's full job log).

    ``submit_time`` is a date and time, ``gpu_util`` and ``gmem_util`` are percentages, ``gmem`` is MiB a GPU;
    ``estimate_s`` may be missing.
    """
    start: float | None = None
    for row in read_table(path):
        at = row.time("submit_time")
        start = at if start is None else min(start, at)
        util, membw = row.optional("gpu_util"), row.optional("gmem_util")
        yield (
            row.line,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=at,
                gpus=row.whole("gpu_num", 1),
                duration_s=row.number("duration", above=True),
                workload=workload_key(row.text("model"), row.whole("batchsize", 1), row.whole("amp")),
                memory_bytes=round(row.number("gmem") * MIB),
                util=None if util is None else min(1.0, util / 100.0),
                membw_util=None if membw is None else min(1.0, membw / 100.0),
                estimate_s=row.optional("estimate_s"),
                user=str(row.fields.get("user") or ""),
            ),
        )


def philly_sia(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """The Philly job log as Sia's authors publish it: arrivals, run times and GPUs only."""
    for row in read_table(path):
        yield (
            row.line,
            TraceJob(
                job_id=f"row-{row.line}",
                submit_s=row.time("timestamp"),
                gpus=row.whole("num_gpus", 1),
                duration_s=row.number("duration", above=True),
                user=str(row.fields.get("cluster") or ""),
            ),
        )


def muri(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """The traces of Muri: times in milliseconds, ``resource_time_1`` is the GPU's part of an iteration."""
    for row in read_table(path):
        iteration_ms = row.number("iteration_time", above=True)
        yield (
            row.line,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=row.number("submit_time") / 1e3,
                gpus=row.whole("num_gpu", 1),
                duration_s=row.number("duration", above=True) / 1e3,
                workload=muri_key(row),
                util=min(1.0, row.number("resource_time_1") / iteration_ms),
            ),
        )


def muri_key(row: Row) -> str:
    """Return the workload of a row of Muri's traces: on more GPUs a program spends its time otherwise."""
    return workload_key(row.text("model_name"), row.whole("batch_size", 1), f"x{row.whole('num_gpu', 1)}")


_GAVEL = (
    "job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir", "total_steps", "scale_factor",
    "priority_weight", "slo", "arrival",
)  # fmt: skip


def gavel(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """Gavel's traces: tab-separated, no head. ``duration_s`` is the number of steps until a truth gives their speed.

    The workload is the job type with its number of GPUs, as the table of measured throughputs has it.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            words = line.rstrip("\n").split("\t")
            if len(words) not in (len(_GAVEL), len(_GAVEL) - 1):
                raise TraceError(path, number, "columns", len(words), f"{len(_GAVEL)} tab-separated columns")
            if len(words) == len(_GAVEL) - 1:  # without the column "needs_data_dir"
                words.insert(4, "0")
            row = Row(path, number, dict(zip(_GAVEL, words, strict=True)))
            gpus = row.whole("scale_factor", 1)
            yield (
                number,
                TraceJob(
                    job_id=f"row-{number}",
                    submit_s=row.number("arrival"),
                    gpus=gpus,
                    duration_s=row.number("total_steps", above=True),
                    workload=workload_key(row.text("job_type"), f"x{gpus}"),
                    weight=row.number("priority_weight", above=True),
                ),
            )


def openb(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """Alibaba's openb pods that ask for GPUs; a pod that never ended counts to the end of the log.

    ``util`` is the part of a GPU it asks for (``gpu_milli``); the trace does not say device memory. The processors it
    asks for (``cpu_milli``) are divided among its GPUs.
    """
    rows = [row for row in read_table(path) if row.whole("num_gpu") > 0]
    if rows and "creation_time" not in rows[0].fields:
        raise TraceError(path, 1, "columns", "creation_time missing", "a pod list with creation and deletion times")
    for row in rows:
        created, deleted = row.number("creation_time"), row.number("deletion_time")
        if deleted <= created:
            raise row.error("deletion_time", row.fields["deletion_time"], f"a time after creation_time {created:g}")
        yield (
            row.line,
            TraceJob(
                job_id=row.text("name"),
                submit_s=created,
                gpus=row.whole("num_gpu", 1),
                duration_s=deleted - created,
                workload=str(row.fields.get("gpu_spec") or ""),
                util=min(1.0, row.number("gpu_milli", above=True) / 1000.0),
                cpus=cpus_of(row),
            ),
        )


def cpus_of(row: Row) -> float | None:
    """Return the processor cores per GPU of a row of openb's pods; None when it asks for none."""
    return (row.optional("cpu_milli") or 0.0) / 1000.0 / row.whole("num_gpu", 1) or None


def openb_nodes(path: Path, memory_bytes: int) -> Cluster:
    """Read the hosts with GPUs of Alibaba's openb node list.

    Args:
        path: The file.
        memory_bytes: Of every GPU: the list does not say.

    Raises:
        TraceError: A row of it cannot be used.
        OSError: The file cannot be read.
    """
    return Cluster(
        tuple(
            Node(
                row.text("sn"),
                row.whole("gpu"),
                row.text("model"),
                memory_bytes,
                row.number("cpu_milli", above=True) / 1000.0,
            )
            for row in read_table(path)
            if row.whole("gpu") > 0
        )
    )


_OWN = {
    "job_id", "submit_s", "gpus", "duration_s", "workload", "memory_bytes", "util", "membw_util", "estimate_s", "user",
    "weight", "max_slowdown", "cpus",
}  # fmt: skip


def own(path: Path) -> Iterator[tuple[Place, TraceJob]]:
    """cotenant's own form (``docs/simulation.md``): JSON, one list of jobs with the fields of ``TraceJob``."""
    with open_text(path) as lines:
        try:
            document = json.load(lines)
        except json.JSONDecodeError as error:
            raise TraceError(path, error.lineno, "file", error.msg, "JSON") from error
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
        row = Row(path, place, {key: value for key, value in fields.items() if not isinstance(value, bool)})
        unknown = sorted(set(fields) - _OWN)
        if unknown:
            raise TraceError(path, None, place, unknown[0], f"only {', '.join(sorted(_OWN))}")
        util, membw = row.optional("util"), row.optional("membw_util")
        for name, value in (("util", util), ("membw_util", membw)):
            if value is not None and value > 1.0:
                raise row.error(name, value, "a fraction in [0, 1]")
        weight = row.optional("weight", above=True)
        yield (
            place,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=row.number("submit_s"),
                gpus=1 if fields.get("gpus") is None else row.whole("gpus", 1),
                duration_s=row.number("duration_s", above=True),
                workload=str(fields.get("workload") or ""),
                memory_bytes=0 if fields.get("memory_bytes") is None else row.whole("memory_bytes"),
                util=util,
                membw_util=membw,
                estimate_s=row.optional("estimate_s"),
                user=str(fields.get("user") or ""),
                weight=1.0 if weight is None else weight,
                max_slowdown=row.optional("max_slowdown", 1.0),
                cpus=row.optional("cpus", above=True),
            ),
        )


def write_own(trace: Trace, path: Path) -> None:
    """Write a trace in cotenant's own form; ``own`` reads it back equal."""
    jobs = [{name: getattr(job, name) for name in sorted(_OWN)} for job in trace.jobs]
    text = json.dumps({"format": OWN_FORMAT, "version": OWN_VERSION, "jobs": jobs}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


Loader = Callable[[Path], Iterator[tuple[Place, TraceJob]]]
FORMATS: Mapping[str, Loader] = {
    OWN_FORMAT: own,
    "philly-week": philly_week,
    "philly-sia": philly_sia,
    "muri": muri,
    "gavel": gavel,
    "openb": openb,
}
_COLUMNS = {  # columns that only this form has
    "philly-week": {"submit_time", "gpu_num", "duration", "model", "batchsize", "amp"},
    "philly-sia": {"timestamp", "duration", "num_gpus"},
    "muri": {"num_gpu", "submit_time", "iteration_time", "resource_time_1"},
    "openb": {"num_gpu", "gpu_milli"},
}


def _recognise(path: Path) -> str:
    with open_text(path) as lines:
        head = lines.readline()
    if head.lstrip().startswith(("{", "[")):
        return OWN_FORMAT
    if len(head.split("\t")) in (len(_GAVEL), len(_GAVEL) - 1):
        return "gavel"
    columns = set(head.strip().split(","))
    for name, own_columns in _COLUMNS.items():
        if own_columns <= columns:
            return name
    tables = ", ".join(name for name in FORMATS if name != OWN_FORMAT)
    raise TraceError(
        path, 1, "columns", head.strip()[:80], f"the head of one of {tables}, or {OWN_FORMAT}, which is JSON"
    )


def open_text(path: Path) -> Any:
    """Open a text file, plain or compressed with gzip."""
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def read_table(path: Path) -> Iterator[Row]:
    """Read a CSV table with a head, row by row.

    Raises:
        TraceError: A row has more or fewer fields than the head.
    """
    with open_text(path) as lines:
        reader = csv.DictReader(lines)
        for fields in reader:
            if None in fields or None in fields.values():
                count = len(reader.fieldnames or ())
                raise TraceError(path, reader.line_num, "columns", "too many or too few", f"{count} as in the head")
            yield Row(path, reader.line_num, fields)


def _unique(path: Path, jobs: Sequence[tuple[Place, TraceJob]]) -> list[TraceJob]:
    """Count time from the first submission on; refuse an id that comes twice."""
    seen: dict[str, Place] = {}
    for line, job in jobs:
        if job.job_id in seen:
            raise TraceError(path, line, "job_id", job.job_id, f"an id that {named(seen[job.job_id])} does not have")
        seen[job.job_id] = line
    start = min(job.submit_s for _, job in jobs)
    return [_shifted(job, start) for _, job in jobs]


def _shifted(job: TraceJob, start: float) -> TraceJob:
    return job if start == 0.0 else replace(job, submit_s=job.submit_s - start)


def _part(document: object, name: str) -> object:
    return document.get(name) if isinstance(document, dict) else type(document).__name__
