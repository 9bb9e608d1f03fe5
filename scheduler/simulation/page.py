"""One self-contained HTML page of simulations: figures, distributions, utilisation over time, who ran where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from cotenant.scheduler.simulation.results import Result

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")  # Okabe and Ito's
_POINTS = 400  # of a curve
_GANTT_GPUS, _GANTT_BARS = 32, 1500  # more is unreadable

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cotenant: simulation of $title</title>
<style>
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --line: #d5dae0; --stripe: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --page: #0f1419; --line: #343b44; --stripe: #171d24; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 12px; }
h2 { font-size: 1.25rem; margin: 40px 0 8px; padding-top: 14px; border-top: 1px solid var(--line); }
p { margin: 0 0 12px; max-width: 90ch; }
.soft { color: var(--soft); }
.remark { border-left: 4px solid #d55e00; padding-left: 10px; }
table { border-collapse: collapse; font-size: .9rem; margin-bottom: 12px; }
th, td { padding: 5px 12px 5px 8px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
tbody tr:nth-child(even) { background: var(--stripe); }
.wide { overflow-x: auto; }
.chart { width: 100%; overflow-x: auto; overflow-y: hidden; margin-bottom: 14px; }
.chart > div { min-width: 700px; }
.infolayer text, .xaxislayer-above text, .yaxislayer-above text, .legendtext { fill: var(--ink) !important; }
.gridlayer path { stroke: var(--line) !important; }
</style>
<script>$plotly</script>
</head>
<body>
<main>
<h1>Simulation of $title</h1>
<p class="soft">$source</p>
$remarks
$body
</main>
</body>
</html>
""")

_FIGURES: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("completion, mean", lambda s: _seconds(s["jct_s"]["mean"])),
    ("p50", lambda s: _seconds(s["jct_s"]["p50"])),
    ("p99", lambda s: _seconds(s["jct_s"]["p99"])),
    ("queueing, mean", lambda s: _seconds(s["queue_s"]["mean"])),
    ("run / duration, mean", lambda s: f"{s['slowdown']['mean']:.3f}"),
    ("p99", lambda s: f"{s['slowdown']['p99']:.2f}"),
    ("makespan", lambda s: _seconds(s["makespan_s"])),
    ("GPU hours saved", lambda s: f"{100 * s['saving']:.1f} %"),
    ("GPUs occupied", lambda s: f"{100 * s['occupied']:.1f} %"),
    ("their utilisation", lambda s: "not known" if s["utilisation"] is None else f"{100 * s['utilisation']:.1f} %"),
    ("Jain", lambda s: f"{s['jain']:.3f}"),
    ("treated unfairly", lambda s: f"{100 * s['finish_time_fairness']['unfair']:.1f} %"),
    ("suspensions", lambda s: f"{s['suspensions']:,}"),
)


def render(results: Sequence[Result], failed: Sequence[str] = ()) -> str:
    """Return the page of simulations of the same trace on the same cluster.

    Args:
        results: One of each policy.
        failed: What became of policies that have no result, one text each.

    Raises:
        ValueError: There is no result.
    """
    if not results:
        raise ValueError("results: none were given; give at least one")
    world = results[0].world
    source = (
        f"{len(world.runs):,} jobs on {world.cluster.gpus:,} GPUs of {len(world.cluster.nodes):,} hosts. Virtual time; "
        "speeds of jobs that share a GPU come from the truth table the policies do not see. All figures of this page "
        "are in each policy's summary.json."
    )
    sections = (_figures, _distributions, _over_time, _gantt)
    body = "\n".join("".join(section(results)) for section in sections)
    remarks = dict.fromkeys(remark for result in results for remark in result.remarks)
    told = "\n".join(f"<p class='remark'>{escape(each)}.</p>" for each in (*remarks, *failed))
    return _PAGE.substitute(
        plotly=get_plotlyjs(), title=escape(world.trace.name), source=source, remarks=told, body=body
    )


def _figures(results: Sequence[Result]) -> Iterator[str]:
    yield "<h2>Figures</h2><div class='wide'><table><thead><tr><th>policy</th>"
    yield "".join(f"<th>{name}</th>" for name, _ in _FIGURES) + "</tr></thead><tbody>"
    for result in results:
        summary = result.summary()
        yield f"<tr><td>{escape(result.policy)}</td>"
        if summary["ended"]:
            yield "".join(f"<td>{show(summary)}</td>" for _, show in _FIGURES)
        else:
            yield f"<td colspan='{len(_FIGURES)}'>no job ended</td>"
        yield "</tr>"
    yield "</tbody></table></div>"
    for result in results:
        if result.world.unplaceable:
            yield f"<p>{len(result.world.unplaceable)} jobs need more than the whole cluster and never ran.</p>"
            break


def _distributions(results: Sequence[Result]) -> Iterator[str]:
    yield "<h2>Distributions</h2><p>Part of the jobs (vertical) that stay below a value (horizontal).</p>"
    for column, words, log in (
        ("jct_s", "completion time, s", True),
        ("queue_s", "queueing, s (+1)", True),
        ("slowdown", "run time / time alone", False),
    ):
        figure = _figure(words, "part of the jobs", 320)
        for place, result in enumerate(results):
            values = result.jobs()[column].dropna().to_numpy()
            if len(values):
                levels = np.linspace(0.0, 1.0, _POINTS)
                shift = 1.0 if column == "queue_s" else 0.0
                figure.add_scatter(
                    x=np.maximum(np.quantile(values, levels), 0.0) + shift,
                    y=levels,
                    name=result.policy,
                    line={"color": COLOURS[place % len(COLOURS)]},
                )
        if log:
            figure.update_xaxes(type="log")
        yield _chart(figure)


def _over_time(results: Sequence[Result]) -> Iterator[str]:
    yield "<h2>Over time</h2>"
    for name, words in (
        ("occupied", "GPUs with a job"),
        ("shared", "GPUs with several jobs"),
        ("waiting", "waiting jobs"),
    ):
        figure = _figure("hours", words, 260)
        for place, result in enumerate(results):
            line = result.world.timeline
            at = np.array(line.at)
            if not len(at):
                continue
            grid = np.linspace(at[0], at[-1], _POINTS)
            values = np.array(getattr(line, name))[np.searchsorted(at, grid, side="right") - 1]
            figure.add_scatter(
                x=grid / 3600.0,
                y=values,
                name=result.policy,
                line={"color": COLOURS[place % len(COLOURS)], "shape": "hv"},
            )
        yield _chart(figure)


def _gantt(results: Sequence[Result]) -> Iterator[str]:
    yield f"<h2>Who ran where</h2><p>The first {_GANTT_GPUS} GPUs, at most {_GANTT_BARS:,} stretches of time.</p>"
    for result in results:
        world = result.world
        bars = sorted(
            ((gpu, stint) for stint in world.stints for gpu in stint.gpus if gpu < _GANTT_GPUS),
            key=lambda bar: bar[1].start,
        )[:_GANTT_BARS]
        if not bars:
            continue
        figure = _figure("hours", "GPU", 60 + 14 * min(_GANTT_GPUS, world.cluster.gpus))
        figure.add_bar(
            base=[stint.start / 3600.0 for _, stint in bars],
            x=[(stint.end - stint.start) / 3600.0 for _, stint in bars],
            y=[gpu for gpu, _ in bars],
            orientation="h",
            marker={"color": [COLOURS[stint.run % len(COLOURS)] for _, stint in bars], "opacity": 0.6},
            hovertext=[world.runs[stint.run].job.job_id for _, stint in bars],
            hoverinfo="text",
            showlegend=False,
        )
        figure.update_layout(barmode="overlay", title={"text": escape(result.policy), "font": {"size": 14}})
        yield _chart(figure)


def _figure(x: str, y: str, height: int) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 20, "t": 30, "b": 45},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis_title=x,
        yaxis_title=y,
        showlegend=True,
    )
    return figure


def _chart(figure: go.Figure) -> str:
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
    return f'<div class="chart">{html}</div>'


def _seconds(value: float) -> str:
    return f"{value:,.0f} s"
