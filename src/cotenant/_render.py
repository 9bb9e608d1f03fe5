"""How the command line shows things: Rich tables for people, plain JSON for programs, one red line for errors."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cotenant.actors.doctor import Check
    from cotenant.scheduler.views import Explanation, GpuView, HostView, JobView, PlanView, ShareView

_PIPED_WIDTH = 1000  # a pipe has no width of its own; rows must not be cut in it
_STATE_STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "STARTING": "cyan",
    "SUSPENDED": "yellow",
    "STOPPING": "yellow",
    "FAILED": "red",
    "CANCELLED": "magenta",
}
_BAR = 12


def out() -> Console:
    """Return a console on stdout."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def note(text: str) -> None:
    """Tell the user something that is not part of the output: one line on stderr."""
    _stderr(f"cotenant: {text}", "dim")


def problem(text: str) -> None:
    """Tell the user what went wrong and what to do: one red line on stderr."""
    _stderr(f"error: {text}", "red")


def _stderr(text: str, style: str) -> None:
    Console(file=sys.stderr, highlight=False).print(Text(plain(" ".join(text.split())), style), soft_wrap=True)


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print views as plain JSON."""
    content = [_as_json(item) for item in value] if isinstance(value, Sequence) else _as_json(value)
    print(json.dumps(content, indent=2))  # noqa: T201 - this is the output


def print_json_lists(**lists: Sequence[BaseModel]) -> None:
    """Print several lists of views as one plain JSON object."""
    print(json.dumps({name: [_as_json(view) for view in views] for name, views in lists.items()}, indent=2))  # noqa: T201


def _as_json(value: BaseModel | dict[str, Any]) -> Any:
    return value if isinstance(value, dict) else value.model_dump(mode="json")


def plain(text: str) -> str:
    """Replace what could steer a terminal: names and reasons come from other users."""
    return "".join(char if char.isprintable() else "�" for char in text)


# -- units ------------------------------------------------------------------------------------------------------------


def size(count: float | None) -> str:
    """Return bytes with a binary unit; "-" when the device does not say."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f}{unit}" if unit in {"B", "KiB", "MiB"} else f"{count:.1f}{unit}"


def percent(fraction: float | None) -> str:
    """Return a fraction as a percentage; "-" when unknown."""
    return "-" if fraction is None else f"{fraction * 100:.0f}%"


def number(value: float | None, suffix: str = "") -> str:
    """Return a number with two decimals; "-" when unknown."""
    return "-" if value is None else f"{value:.2f}{suffix}"


def span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount}{unit}")
    return "".join(parts[:2])


def _age(job: JobView, now: float) -> str:
    return span((job.ended_at or now) - (job.started_at or job.submitted_at))


def _shares(shares: Iterable[ShareView]) -> str:
    return ", ".join(f"{share.gpu_id} {percent(share.compute)} {size(share.memory_bytes)}" for share in shares) or "-"


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    *first, last = columns  # the last one is for people and gives way when the terminal is narrow
    for column in first:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    table.add_column(last, overflow="fold")
    return table


def _row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in cells))


def _state(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def jobs(views: Sequence[JobView]) -> RenderableType:
    """Return the table of ``ps``."""
    if not views:
        return Text("no jobs")
    now = time.time()
    table = _table("JOB", "NAME", "STATE", "SHARES", "UTIL", "STEPS/S", "SLOWDOWN", "TIME", "NOTE")
    for job in views:
        usage = job.usage
        measured, predicted = job.slowdown_measured, job.slowdown_predicted
        _row(
            table,
            job.job_id,
            job.name,
            _state(job.state),
            _shares(job.shares),
            percent(usage.util_mean if usage else None),
            number(usage.step_rate if usage else None),
            number(measured, "x") if measured is not None else number(predicted, "x predicted"),
            _age(job, now),
            (usage.controls if usage and job.state == "RUNNING" else "") or job.reason,
        )
    return table


def gpus(views: Sequence[GpuView]) -> RenderableType:
    """Return the table of ``gpus``."""
    if not views:
        return Text("no GPUs: 'cotenant doctor --cluster' says why")
    table = _table("GPU", "TYPE", "HOST", "UTIL", "MEMORY USED", "RESERVED", "OF", "COMPUTE", "JOBS")
    for gpu in views:
        _row(
            table,
            gpu.gpu_id if gpu.healthy else Text(f"{plain(gpu.gpu_id)} (lost)", "red"),
            gpu.gpu_type,
            gpu.host_id[:12],
            Text(_bar(gpu.util), "green"),
            size(gpu.memory_used_bytes),
            size(gpu.memory_reserved_bytes),
            size(gpu.memory_bytes),
            percent(gpu.compute_granted),
            ", ".join(gpu.jobs) or "-",
        )
    return table


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return "-"
    full = round(min(max(fraction, 0.0), 1.0) * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {percent(fraction)}"


def hosts(views: Sequence[HostView]) -> RenderableType:
    """Return the table of ``hosts``."""
    if not views:
        return Text("no hosts: 'cotenant doctor --cluster' says why")
    now = time.time()
    table = _table("HOST", "NAME", "STATE", "GPUS", "LAST REPORT", "CLAIM", "NOTE")
    for host in views:
        _row(
            table,
            host.host_id[:12],
            host.name,
            Text("reachable", "green") if host.reachable else Text("unreachable", "red"),
            str(len(host.gpus)),
            "-" if host.last_report_at is None else f"{span(now - host.last_report_at)} ago",
            host.claim,
            host.note,
        )
    return table


def explanation(view: Explanation) -> RenderableType:
    """Return the answer of ``explain``."""
    lines = [Text(f"{plain(view.job_id)}  ") + _state(view.state), Text(plain(view.summary))]
    lines += [Text(f"  {plain(line)}") for line in view.details]
    if view.would_help:
        lines += [Text("What would help:", "bold"), *(Text(f"  {plain(line)}") for line in view.would_help)]
    return Group(*lines)


def plan(view: PlanView) -> RenderableType:
    """Return the answer of ``plan``."""
    table = _table("JOB", "PLACEABLE", "SHARES", "SLOWDOWN", "NEIGHBOURS", "WHY")
    styles = {"now": "green", "later": "yellow", "never": "red"}
    for job in view.jobs:
        _row(
            table,
            job.name,
            Text(job.placeable, styles[job.placeable]),
            _shares(job.shares),
            number(job.slowdown_predicted, "x"),
            ", ".join(f"{name} {number(slowdown, 'x')}" for name, slowdown in job.neighbours.items()) or "-",
            job.explanation,
        )
    saving = Text(f"predicted packing saving: {percent(view.packing_saving_predicted)} (nothing was done)")
    return Group(table, saving)


def top(job_views: Sequence[JobView], gpu_views: Sequence[GpuView]) -> RenderableType:
    """Return one frame of ``top``: GPUs, then the jobs that have not ended."""
    counts = Counter(job.state for job in job_views)
    summary = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())) or "none"
    head = Text(f"cotenant {time.strftime('%H:%M:%S')}  GPUs: {len(gpu_views)}  jobs: {summary}", "bold")
    return Group(head, Text(""), gpus(gpu_views), Text(""), jobs(job_views))


def checks(found: Sequence[Check]) -> RenderableType:
    """Return the table of ``doctor``: what is wrong gets its cost and its fix below it."""
    table = _table("", "CHECK", "FOUND")
    for check in found:
        mark = (
            Text("ok", "green") if check.ok else Text("MISSING", "red") if check.essential else Text("warn", "yellow")
        )
        _row(table, mark, check.name, check.found)
        if not check.ok:
            _row(table, "", "", Text(f"cost: {plain(check.cost)}", "dim"))
            _row(table, "", "", Text(f"fix:  {plain(check.fix)}", "dim"))
    return table
