"""Readers of the traces that others published, one for each form.

Every reader checks every row. A row that is no job (a pod that never ran) is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cotenant.scheduler.simulation.errors import Place, TraceError
from cotenant.scheduler.simulation.rows import LeftOut, Row, open_text, read_table
from cotenant.scheduler.simulation.workload import Cluster, Node, TraceJob

MIB = 1 << 20
_MOST_MIB = 1e9  # of a GPU: a petabyte
Jobs = Iterator[tuple[Place, TraceJob | LeftOut]]


def workload_key(model: str, batch: object = "", amp: object = "") -> str:
    """Return the key under which measured pairs of a configuration are found."""
    return "/".join(str(part) for part in (model, batch, amp) if part != "")


def philly_week(path: Path) -> Jobs:
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
                duration_s=row.seconds("duration", above=True),
                workload=workload_key(row.text("model"), row.whole("batchsize", 1), row.whole("amp")),
                memory_bytes=round(row.number("gmem", most=_MOST_MIB) * MIB),
                util=None if util is None else min(1.0, util / 100.0),
                membw_util=None if membw is None else min(1.0, membw / 100.0),
                estimate_s=row.optional_seconds("estimate_s"),
                user=str(row.fields.get("user") or ""),
            ),
        )


def philly_sia(path: Path) -> Jobs:
    """The Philly job log as Sia's authors publish it: arrivals, run times and GPUs only."""
    for row in read_table(path):
        yield (
            row.line,
            TraceJob(
                job_id=f"row-{row.line}",
                submit_s=row.time("timestamp"),
                gpus=row.whole("num_gpus", 1),
                duration_s=row.seconds("duration", above=True),
                user=str(row.fields.get("cluster") or ""),
            ),
        )


def muri(path: Path) -> Jobs:
    """The traces of Muri: times in milliseconds, ``resource_time_1`` is the GPU's part of an iteration."""
    for row in read_table(path):
        iteration_ms = row.number("iteration_time", above=True)
        yield (
            row.line,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=row.seconds("submit_time", 1e3),
                gpus=row.whole("num_gpu", 1),
                duration_s=row.seconds("duration", 1e3, above=True),
                workload=muri_key(row),
                util=min(1.0, row.number("resource_time_1") / iteration_ms),
            ),
        )


def muri_key(row: Row) -> str:
    """Return the workload of a row of Muri's traces: on more GPUs a program spends its time otherwise."""
    return workload_key(row.text("model_name"), row.whole("batch_size", 1), f"x{row.whole('num_gpu', 1)}")


def muri_testbed(path: Path) -> Jobs:
    """The jobs of a run on Muri's testbed, as its scheduler logs them: ``duration`` is the run time asked for, alone.

    What became of them there (start, end, executed time) is not read.
    """
    for row in read_table(path):
        yield (
            row.line,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=row.seconds("submit_time"),
                gpus=row.whole("num_gpu", 1),
                duration_s=row.seconds("duration", above=True),
            ),
        )


def tiresias(path: Path) -> Jobs:
    """The job lists of Tiresias: times in seconds; on more GPUs a model is another workload."""
    for row in read_table(path):
        gpus = row.whole("num_gpu", 1)
        yield (
            row.line,
            TraceJob(
                job_id=row.text("job_id"),
                submit_s=row.seconds("submit_time"),
                gpus=gpus,
                duration_s=row.seconds("duration", above=True),
                workload=workload_key(row.text("model_name"), f"x{gpus}"),
            ),
        )


GAVEL_COLUMNS = (
    "job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir", "total_steps", "scale_factor",
    "priority_weight", "slo", "arrival",
)  # fmt: skip


def gavel(path: Path) -> Jobs:
    """Gavel's traces: tab-separated, no head. ``duration_s`` is the number of steps until a truth gives their speed.

    The workload is the job type with its number of GPUs, as the table of measured throughputs has it.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            words = line.rstrip("\n").split("\t")
            if len(words) not in (len(GAVEL_COLUMNS), len(GAVEL_COLUMNS) - 1):
                raise TraceError(path, number, "columns", len(words), f"{len(GAVEL_COLUMNS)} tab-separated columns")
            if len(words) == len(GAVEL_COLUMNS) - 1:  # without the column "needs_data_dir"
                words.insert(4, "0")
            row = Row(path, number, dict(zip(GAVEL_COLUMNS, words, strict=True)))
            gpus = row.whole("scale_factor", 1)
            yield (
                number,
                TraceJob(
                    job_id=f"row-{number}",
                    submit_s=row.seconds("arrival"),
                    gpus=gpus,
                    duration_s=row.number("total_steps", above=True),
                    workload=workload_key(row.text("job_type"), f"x{gpus}"),
                    weight=row.number("priority_weight", above=True),
                ),
            )


def openb(path: Path) -> Jobs:
    """Alibaba's openb pods that ask for GPUs; a pod that never ended counts to the end of the log.

    ``util`` is the part of a GPU it asks for (``gpu_milli``); the trace does not say device memory. The processors it
    asks for (``cpu_milli``) are divided among its GPUs.
    """
    for row in read_table(path):
        if row.whole("num_gpu") == 0:
            continue
        if "creation_time" not in row.fields:
            raise TraceError(path, 1, "columns", "creation_time missing", "a pod list with creation and deletion times")
        created, ran_s = _life(row)
        if ran_s == 0.0 or not row.has("scheduled_time"):
            yield row.line, LeftOut("pods that never ran")
            continue
        yield (
            row.line,
            TraceJob(
                job_id=row.text("name"),
                submit_s=created,
                gpus=row.whole("num_gpu", 1),
                duration_s=ran_s,
                workload=str(row.fields.get("gpu_spec") or ""),
                util=min(1.0, row.number("gpu_milli", above=True) / 1000.0),
                cpus=cpus_of(row),
            ),
        )


def dlrm(path: Path) -> Jobs:
    """Alibaba's instances of disaggregated recommendation models (2025) that ask for GPUs.

    Who was there before the log begins counts from its beginning, who is there when it ends to its end: what is beyond
    it is not known.
    """
    rows = list(read_table(path))
    stamps = ("creation_time", "scheduled_time", "deletion_time")
    end = max((row.seconds(name) for row in rows for name in stamps if row.has(name)), default=0.0)
    for row in rows:
        gpus = row.whole("gpu_request")
        if gpus == 0:
            continue
        created, ran_s = _life(row, 0.0, end)
        if ran_s == 0.0:
            yield row.line, LeftOut("instances that never ran")
            continue
        yield (
            row.line,
            TraceJob(
                job_id=row.text("instance_sn"),
                submit_s=created,
                gpus=gpus,
                duration_s=ran_s,
                workload=row.text("app_name"),
                cpus=(row.optional("cpu_request") or 0.0) / gpus or None,
            ),
        )


def _life(row: Row, begin: float | None = None, end: float | None = None) -> tuple[float, float]:
    """Return when something was created and how long it ran, in seconds.

    Args:
        row: Of a table with the columns creation_time, scheduled_time and deletion_time.
        begin: When it was created where the row does not say; None = it must say.
        end: The same of its deletion.
    """
    created = row.seconds("creation_time") if begin is None or row.has("creation_time") else begin
    deleted = row.seconds("deletion_time") if end is None or row.has("deletion_time") else end
    if deleted < created:
        raise row.error("deletion_time", row.fields["deletion_time"], f"a time not before creation_time {created:g}")
    scheduled = row.optional_seconds("scheduled_time")
    if scheduled is None:
        scheduled = created
    elif not created <= scheduled <= deleted:
        words = f"a time from creation_time {created:g} to deletion_time {deleted:g}"
        raise row.error("scheduled_time", row.fields["scheduled_time"], words)
    return created, deleted - scheduled


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
