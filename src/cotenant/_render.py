"""How the command line shows things: Rich tables for people, plain JSON for programs, one red line for errors."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cotenant.actors.checks import Check
    from cotenant.scheduler.views import Explanation, FrozenView, GpuView, HostView, JobView, PlanView, ShareView

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
_RUNS = ("RUNNING", "STOPPING")
_PADDING = re.compile(r" +(?=\n)")
_BAR = 12
_GAP = 2  # between two columns
_JOB_ID_WIDTH = 26


class _Unpadded:
    """A file for a console that pads every line of a table: what is piped gets no blanks at the ends of lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write the text without blanks at the ends of its lines."""
        self._file.write(_PADDING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def out() -> Console:
    """Return a console on stdout."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    return Console(file=cast("IO[str]", _Unpadded(sys.stdout)), width=_PIPED_WIDTH, highlight=False)


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


def slowdown(factor: float | None) -> str:
    """Return how much slower than alone: "1.20x"; "<1x" where it is no slower.

    Neighbours speed nobody up: what was measured alone was another phase, or not yet exact.
    """
    return "-" if factor is None else "<1x" if round(factor, 2) < 1.0 else number(factor, "x")


def span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount}{unit}")
    return "".join(parts[:2])


def _ran(job: JobView, now: float) -> str:
    """Return how long a job has run since it was last started or thawed, saving included; "-" when it never ran."""
    if job.started_at is None:
        return "-"
    off = (change.at for change in job.history if change.at > job.started_at and change.state not in _RUNS)
    return span(next(off, job.ended_at or now) - job.started_at)


def _shares(shares: Iterable[ShareView]) -> str:
    return ", ".join(f"{share.gpu_id} {percent(share.compute)} {size(share.memory_bytes)}" for share in shares) or "-"


# -- tables -----------------------------------------------------------------------------------------------------------


class FittingTable:
    """Rows that fit where they are shown: a narrow terminal gets fewer columns instead of unreadable ones.

    The last column is for people and wraps.

    Args:
        columns: Headings.
        spare: Headings that may be left out, the first one first.
        last_width: Room to keep for the last column, in characters; less when nothing in it is as long.
    """

    def __init__(self, *columns: str, spare: Sequence[str] = (), last_width: int = 20) -> None:
        self._columns = columns
        self._spare = spare
        self._last_width = last_width
        self._rows: list[tuple[Text, ...]] = []

    def row(self, *cells: str | Text) -> None:
        """Add a row."""
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Build the table for a width."""
        shown = self._fitting(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in shown[:-1]:
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        table.add_column(shown[-1], overflow="fold")
        kept = [self._columns.index(name) for name in shown]
        for cells in self._rows:
            table.add_row(*(cells[position] for position in kept))
        yield table

    def _fitting(self, room: int) -> list[str]:
        """Return the columns to show."""
        widths = {
            name: max([len(name), *(cells[position].cell_len for cells in self._rows)])
            for position, name in enumerate(self._columns)
        }
        last = self._columns[-1]
        widths[last] = min(widths[last], max(self._last_width, len(last)))
        shown = list(self._columns)
        for name in self._spare:
            if sum(widths[column] for column in shown) + _GAP * (len(shown) - 1) <= room:
                break
            shown.remove(name)
        return shown


def _state(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def jobs(views: Sequence[JobView]) -> RenderableType:
    """Return the table of ``ps``."""
    if not views:
        return Text("no jobs")
    now = time.time()
    table = FittingTable(
        *("JOB", "NAME", "STATE", "UTIL", "STEPS/S", "SLOWDOWN", "AGE", "RAN", "SHARES OR REASON"),
        spare=("STEPS/S", "UTIL", "NAME", "SLOWDOWN", "AGE", "RAN"),
        last_width=28,
    )
    for job in views:
        usage = job.usage
        table.row(
            job.job_id,
            job.name,
            _state(job.state),
            _util(job),
            number(usage.step_rate if usage else None),
            _slowdown(job),
            span(now - job.submitted_at),
            _ran(job, now),
            _where(job),
        )
    return table


def _util(job: JobView) -> str:
    """Return the utilisation; "~" marks an estimate."""
    if job.usage is None or job.usage.util_mean is None:
        return "-"
    return f"{'~' if job.usage.util_estimated else ''}{percent(job.usage.util_mean)}"


def _slowdown(job: JobView) -> str:
    """Return the slowdown by neighbours as measured; "~" marks a prediction, which means nothing of what has ended."""
    if job.slowdown_measured is not None:
        return slowdown(job.slowdown_measured)
    if job.slowdown_predicted is None or job.ended_at is not None:
        return "alone" if job.shares and job.ended_at is None else "-"
    return f"~{slowdown(job.slowdown_predicted)}"


def _where(job: JobView) -> str:
    """Return a job's shares and, of a running one, what cannot be held; of all others why they wait or have ended.

    A deadline is told too.
    """
    controls = job.usage.controls if job.usage else ""
    told = controls if job.state == "RUNNING" and job.shares else job.waits or job.reason
    place = _shares(job.shares) if job.shares else _frozen(job.frozen) if job.frozen else ""
    where = ": ".join(part for part in (place, told) if part)
    return "; ".join(part for part in (where, job.deadline) if part) or "-"


def _frozen(frozen: FrozenView) -> str:
    takes = f", {size(frozen.memory_bytes)} of its memory" if frozen.memory_bytes else ""
    return f"frozen on {frozen.host}{takes}"


def gpus(views: Sequence[GpuView]) -> RenderableType:
    """Return the table of ``gpus``."""
    if not views:
        return Text("no GPUs: 'cotenant doctor --cluster' says why")
    table = FittingTable(
        *("GPU", "TYPE", "HOST", "UTIL", "MEMORY USED", "RESERVED", "OF", "COMPUTE", "JOBS"),
        spare=("TYPE", "HOST", "OF", "COMPUTE", "RESERVED"),
        last_width=_JOB_ID_WIDTH,
    )
    for gpu in views:
        table.row(
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
    table = FittingTable(
        "HOST", "NAME", "STATE", "GPUS", "CPUS RESERVED", "LAST REPORT", "NOTE",
        spare=("NAME", "LAST REPORT", "CPUS RESERVED"),
    )  # fmt: skip
    for host in views:
        table.row(
            host.host_id[:12],
            host.name,
            Text("reachable", "green") if host.reachable else Text("unreachable", "red"),
            str(len(host.gpus)),
            "-" if host.cpus is None else f"{host.cpus_reserved:g} of {host.cpus:g}",
            "-" if host.last_report_at is None else f"{span(now - host.last_report_at)} ago",
            "; ".join(part for part in (host.claim, host.note) if part),
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
    table = FittingTable(
        *("JOB", "PLACEABLE", "SHARES", "SLOWDOWN", "NEIGHBOURS", "WHY"), spare=("NEIGHBOURS", "SLOWDOWN", "SHARES")
    )
    styles = {"now": "green", "later": "yellow", "never": "red"}
    for job in view.jobs:
        table.row(
            job.name,
            Text(job.placeable, styles[job.placeable]),
            _shares(job.shares),
            slowdown(job.slowdown_predicted),
            ", ".join(f"{name} {slowdown(factor)}" for name, factor in job.neighbours.items()) or "-",
            job.explanation,
        )
    saving = view.packing_saving_predicted
    told = "" if saving is None else f"predicted packing saving: {percent(saving)}"
    if saving is None and view.jobs:
        told = "no packing saving is predicted: none of these jobs would share a GPU now"
    done = Text(f"{told} (nothing was done)" if told else "nothing was done")
    return Group(*([table] if view.jobs else []), *_affected(view), done)


def _affected(view: PlanView) -> list[RenderableType]:
    """Return what would be different for the jobs that are there already."""
    anyway = f"; {view.displaced} would not get their GPUs again as it is, either" if view.displaced else ""
    looked_at = f" ({view.reconsidered} of {view.running} running ones looked at{anyway})" if view.reconsidered else ""
    if not view.affected:
        return [Text(f"nothing would be different for the other jobs{looked_at}")]
    table = FittingTable("JOB", "NAME", "NOW", "THEN", "WHY", spare=("NAME",))
    words = {"now": "starts now", "later": "waits", "never": "never", "runs": "runs", "elsewhere": "elsewhere"}
    for job in view.affected:
        table.row(job.job_id, job.name, words[job.before], words[job.after], job.why)
    return [
        table,
        Text(f"jobs that run keep their places; 'then' is what they would get if placed anew{looked_at}", "dim"),
    ]


def top(job_views: Sequence[JobView], gpu_views: Sequence[GpuView]) -> RenderableType:
    """Return one frame of ``top``: GPUs, then the jobs that have not ended."""
    counts = Counter(job.state for job in job_views)
    summary = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())) or "none"
    head = Text(f"cotenant {time.strftime('%H:%M:%S')}  GPUs: {len(gpu_views)}  jobs: {summary}", "bold")
    return Group(head, Text(""), gpus(gpu_views), Text(""), jobs(job_views))


def checks(found: Sequence[Check]) -> RenderableType:
    """Return the table of ``doctor``: what is wrong gets its cost and its fix below it."""
    table = FittingTable("", "CHECK", "FOUND")
    for check in found:
        mark = (
            Text("ok", "green") if check.ok else Text("MISSING", "red") if check.essential else Text("warn", "yellow")
        )
        table.row(mark, check.name, check.found)
        if not check.ok:
            table.row("", "", Text(f"cost: {plain(check.cost)}", "dim"))
            table.row("", "", Text(f"fix:  {plain(check.fix)}", "dim"))
    return table
