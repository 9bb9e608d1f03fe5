"""Shows the demo's figures: one HTML page that opens offline, and four tables for the terminal.

The report is the JSON-able dict that ``demo.py`` also saves as ``report.json``. Times in it are seconds since the start
of their mode. A figure that is missing (null) is shown as "n/a", never as 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from string import Template

from demo_charts import BAND, MODE_COLOURS, gantt, scatter, set_scatter, utilisation
from demo_values import (
    MODES,
    NA,
    PACKED,
    Row,
    change,
    hours,
    mean,
    mode_of,
    names,
    number,
    over_limit,
    part_of,
    percent,
    plain,
    prediction_error,
    ratio,
    rows_of,
    seconds,
    series_of,
)
from demo_versus import (
    BOTH_JOB_COLUMNS,
    DEMAND_COLUMNS,
    FIGURE_COLUMNS,
    SET_COLUMNS,
    Column,
    counted,
    demand_rows,
    figure_rows,
    job_rows,
    served,
    verdict,
)
from plotly.offline import get_plotlyjs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

PAGE = Path(__file__).with_suffix(".html")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")  # Okabe and Ito's
LISTED = 30  # longer lists fold the rest away

MODE_COLUMNS: tuple[Column, ...] = (
    ("mode", lambda row: plain(row["mode"]), False),
    ("makespan", lambda row: seconds(row["makespan_s"]), True),
    ("makespan change", lambda row: change(row["change"]), True),
    ("mean completion", lambda row: seconds(row["mean_completion_s"]), True),
    ("device hours", lambda row: hours(row["device_hours"]), True),
    ("device busy", lambda row: percent(row["utilisation"]), True),
    ("jobs succeeded", lambda row: plain(row["succeeded"]), True),
)
JOB_COLUMNS: tuple[Column, ...] = (
    ("job", lambda job: plain(job.get("name")), False),
    ("family", lambda job: plain(job.get("family")).replace("_", " "), False),
    ("solo steps/s", lambda job: ratio(job.get("solo_rate")), True),
    ("shared steps/s", lambda job: ratio(job.get("shared_rate")), True),
    ("slowdown measured", lambda job: ratio(job.get("slowdown_measured")), True),
    ("slowdown predicted", lambda job: ratio(job.get("slowdown_predicted")), True),
    ("slowdown allowed", lambda job: ratio(job.get("max_slowdown")), True),
    ("error", lambda job: change(prediction_error(job)), True),
)
PAGE_JOB_COLUMNS: tuple[Column, ...] = (
    *JOB_COLUMNS,
    ("solo utilisation", lambda job: percent(job.get("utilisation")), True),
    ("ran beside", lambda job: names(job.get("neighbours")), False),
)

AGAINST = {**MODES, "first": "its first predictors"}
VERSUS = "First predictors against the present ones"
FOREIGN_CORES = 0.6  # Ray and cotenant themselves use 0.2 to 0.3


def write_html(report: Row, path: Path) -> None:
    """Write the report as one self-contained HTML file; nothing is loaded from elsewhere when it is opened."""
    page = Template(PAGE.read_text(encoding="utf-8")).substitute(page_parts(report), plotly=get_plotlyjs())
    path.write_text(page, encoding="utf-8")


def render_console(report: Row) -> RenderableType:
    """Return the headline and the tables, for a terminal of 80 columns or more."""
    return Group(
        Text(headline(report) + "\n"),
        _console_table("Modes", MODE_COLUMNS, mode_rows(report)),
        "",
        _console_table("Jobs, alone and packed with the present predictors", JOB_COLUMNS, rows_of(report, "jobs")),
        "",
        _console_table(VERSUS, FIGURE_COLUMNS, figure_rows(report)),
        "",
        _console_table(
            "Demand, forecast on the same windows: error of p50, coverage of p95", DEMAND_COLUMNS, demand_rows(report)
        ),
    )


def headline(report: Row) -> str:
    """Return what was measured, in sentences."""
    packed = mode_of(report, "cotenant")
    return (
        f"Packed by cotenant with its present predictors, {len(rows_of(report, 'jobs'))} training jobs were all done "
        f"after {seconds(packed.get('makespan_s'))}: {_against_others(report, 'makespan_s')}. "
        f"A job was done {seconds(packed.get('mean_completion_s'))} after its submission on average: "
        f"{_against_others(report, 'mean_completion_s')}. "
        f"Packing saved {percent(report.get('packing_saving_measured'))} of the device time; "
        f"{percent(report.get('packing_saving_predicted'))} was predicted. "
        f"Unfairness (largest slowdown over smallest) was {ratio(report.get('unfairness'))}. "
        f"{verdict(report)}"
        f"{_slower_than_allowed(report)}{_disturbed(report)}"
    )


def _slower_than_allowed(report: Row) -> str:
    names = [plain(job.get("name")) for job in rows_of(report, "jobs") if over_limit(job)]
    return f" Slower than it allows: {', '.join(names)}." if names else ""


def _disturbed(report: Row) -> str:
    """Return a warning when something else used the machine: then these figures are about that, too."""
    cores = [number(mode_of(report, name).get("foreign_cores")) for name in MODES]
    most = max((value for value in cores if value is not None), default=0.0)
    if most <= FOREIGN_CORES:
        return ""
    return (
        f" Do not trust these figures: other work used up to {most:.1f} cores of this machine meanwhile. "
        "Run it again when the machine is idle."
    )


def _against_others(report: Row, figure: str) -> str:
    """Return how a time in mode cotenant compares with the other modes."""
    ours, parts = number(mode_of(report, "cotenant").get(figure)), []
    for name in (name for name in MODES if name != "cotenant"):
        theirs = number(mode_of(report, name).get(figure))
        if ours is None or not theirs:
            comparison = "not comparable with"
        elif abs(gain := 1 - ours / theirs) < 0.005:
            comparison = "the same as with"
        else:
            comparison = f"{percent(abs(gain))} {'sooner' if gain > 0 else 'later'} than with"
        parts.append(f"{comparison} {AGAINST[name]} ({seconds(theirs)})")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def mode_rows(report: Row) -> list[Row]:
    """Return the table of modes: what was measured, and the makespan against one job per device."""
    base = number(mode_of(report, "exclusive").get("makespan_s"))
    rows: list[Row] = []
    for name, title in MODES.items():
        mode = mode_of(report, name)
        makespan, runs = number(mode.get("makespan_s")), rows_of(mode, "runs")
        until = math.inf if makespan is None else makespan
        succeeded = sum(run.get("state") == "SUCCEEDED" for run in runs)
        rows.append(
            {
                "mode": title,
                "makespan_s": makespan,
                "change": makespan / base - 1 if makespan is not None and base else None,
                "mean_completion_s": mode.get("mean_completion_s"),
                "device_hours": mode.get("device_hours"),
                "utilisation": mean(
                    mean(busy for at, busy in points if at <= until) for points in series_of(mode).values()
                ),
                "succeeded": f"{succeeded} of {len(runs)}" if runs else None,
            }
        )
    return rows


def page_parts(report: Row) -> dict[str, str]:
    """Return the pieces of HTML that the page's template names; every text of the report is escaped in them."""
    colours, end, jobs = _family_colours(report), _latest(report), rows_of(report, "jobs")
    error = mean(None if (error := prediction_error(job)) is None else abs(error) for job in jobs)
    return {
        "headline": escape(headline(report)),
        "failures": _failures(report),
        "modes": _table(MODE_COLUMNS, mode_rows(report)),
        "legend": "".join(
            f'<li><span style="background:{colour}"></span>{escape(family)}</li>' for family, colour in colours.items()
        ),
        "gantts": "".join(
            f"<h3>{escape(title.capitalize())}</h3>{gantt(name, mode_of(report, name), colours, end)}"
            for name, title in MODES.items()
        ),
        "utilisation": utilisation(report, end),
        "over_limit": escape(", ".join(plain(job.get("name")) for job in jobs if over_limit(job)) or "none"),
        "jobs": _table(PAGE_JOB_COLUMNS, jobs),
        "band": percent(BAND),
        "error": percent(error),
        "scatter": scatter(jobs, colours),
        "versus": VERSUS,
        "counted": escape(counted(report)),
        "served": escape(served(report)),
        "figures": _table(FIGURE_COLUMNS, figure_rows(report)),
        "predictors": "".join(
            f'<li><span style="background:{MODE_COLOURS[name]}"></span>{MODES[name].rpartition(", ")[2]}</li>'
            for name in PACKED
        ),
        "set_scatter": set_scatter(rows_of(part_of(report, "sets"), "rows")),
        "sets": _table(SET_COLUMNS, rows_of(part_of(report, "sets"), "rows")),
        "both_jobs": _table(BOTH_JOB_COLUMNS, job_rows(report)),
        "demand": _table(DEMAND_COLUMNS, demand_rows(report)),
        "decisions": _reasons(report, "decisions", "No decision was recorded."),
        "refusals": _reasons(report, "refusals", "No job had to wait."),
        "context": "".join(_context(report, title) for title in ("machine", "versions", "settings")),
        "seconds": seconds(report.get("seconds")),
    }


def _console_table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading, _, is_number in columns:
        lines = heading.replace(" ", "\n", 1)  # so that all columns fit
        whole = is_number or heading == "job"  # a narrow terminal cuts the other texts short
        table.add_column(lines, justify="right" if is_number else "left", no_wrap=whole)
    for row in rows:
        cells = (Text(cell(row), no_wrap=True, overflow="ellipsis") for _, cell, _ in columns)
        table.add_row(*cells, style="red" if over_limit(row) else None)
    return table


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    kinds = ["number" if is_number else "words" for *_, is_number in columns]
    head = "".join(
        f'<th class="{kind}">{escape(heading)}</th>' for kind, (heading, *_) in zip(kinds, columns, strict=True)
    )
    body = ""
    for row in rows:
        cells = "".join(  # data-label: the cell's heading where the screen is too narrow for columns
            f'<td class="{kind}" data-label="{escape(heading)}"><span>{escape(cell(row))}</span></td>'
            for kind, (heading, cell, _) in zip(kinds, columns, strict=True)
        )
        body += f'<tr class="over">{cells}</tr>' if over_limit(row) else f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _reasons(report: Row, key: str, nothing: str) -> str:
    items = []
    for row in rows_of(report, key):
        at = f'<span class="at">{seconds(row["at_s"])}</span> ' if "at_s" in row else ""
        items.append(f"<li>{at}<b>{escape(plain(row.get('job')))}</b>: {escape(plain(row.get('text')))}</li>")
    if not items:
        return f"<p>{escape(nothing)}</p>"
    rest = "".join(items[LISTED:])
    more = f"<details><summary>{len(items) - LISTED} more</summary><ul>{rest}</ul></details>" if rest else ""
    return f'<div class="reasons"><ul>{"".join(items[:LISTED])}</ul>{more}</div>'


def _family_colours(report: Row) -> dict[str, str]:
    rows = [*rows_of(report, "jobs"), *(run for name in MODES for run in rows_of(mode_of(report, name), "runs"))]
    families = dict.fromkeys(plain(row.get("family")) for row in rows)
    return dict(zip(families, cycle(COLOURS), strict=False))


def _latest(report: Row) -> float:
    """Return the end of the time scale that all modes share, in seconds."""
    modes = [mode_of(report, name) for name in MODES]
    times = [number(mode.get("makespan_s")) for mode in modes]
    times += [number(run.get(key)) for mode in modes for run in rows_of(mode, "runs") for key in ("start_s", "end_s")]
    return max((time for time in times if time is not None and time > 0), default=1.0)


def _failures(report: Row) -> str:
    failed = [
        f"{plain(run.get('name'))} ({title}: {plain(run.get('state'))})"
        for name, title in MODES.items()
        for run in rows_of(mode_of(report, name), "runs")
        if run.get("state") != "SUCCEEDED"
    ]
    return f'<p class="warning">Jobs that did not succeed: {escape("; ".join(failed))}.</p>' if failed else ""


def _context(report: Row, title: str) -> str:
    pairs = (report.get(title) or {}).items()
    text = ", ".join(f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs)
    return f"<p><b>{title.capitalize()}</b>: {escape(text) or NA}</p>"
