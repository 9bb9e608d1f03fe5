"""One self-contained HTML page of simulations: figures, distributions, utilisation over time, who ran where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from cotenant.scheduler.simulation.errors import counted
from cotenant.scheduler.simulation.results import Result, gpu_types
from cotenant.scheduler.simulation.truth import NoInterference, Truth
from cotenant.scheduler.simulation.workload import GIB, Cluster
from cotenant.scheduler.simulation.world import Stint

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")  # Okabe and Ito's
DASHES = ("solid", "dash", "dot")  # of the first eight policies, the next ones, …
_POINTS = 400  # of a curve
_FEW = 5  # of what comes in whole numbers: each has its tick
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
table { border-collapse: collapse; font-size: .85rem; margin-bottom: 12px; }
th, td { padding: 5px 6px; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; }
td { white-space: nowrap; }
.conditions td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
tbody tr:nth-child(even) { background: var(--stripe); }
.wide { overflow-x: auto; }
.chart { width: 100%; overflow-x: auto; overflow-y: hidden; margin-bottom: 14px; }
.chart > div { min-width: 340px; }
@media (max-width: 900px) { .wide::before { content: "goes on to the right →"; display: block; position: sticky;
  left: 0; color: var(--soft); font-size: .85rem; } }
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
    ("crashes", lambda s: f"{s['failures']:,}"),
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
        f"{counted(len(world.runs), 'job')} on {_hardware(world.cluster)}. Virtual time; {_speeds(world.truth)}. "
        "All figures of this page are in each policy's summary.json."
    )
    sections = (_figures, _distributions, _over_time, _gantt, _conditions)
    body = "\n".join("".join(section(results)) for section in sections)
    remarks = dict.fromkeys(remark for result in results for remark in result.remarks)
    told = "\n".join(f"<p class='remark'>{escape(each)}.</p>" for each in (*remarks, *failed))
    title, source = escape(world.trace.name), escape(source)
    return _PAGE.substitute(plotly=get_plotlyjs(), title=title, source=source, remarks=told, body=body)


def _hardware(cluster: Cluster) -> str:
    """Name GPUs, their types and memory, and hosts."""
    types = gpu_types(cluster)
    kinds = "" if len(types) == 1 else f" ({', '.join(f'{count:,} {kind}' for kind, count in types.items())})"
    memory = sorted({node.memory_bytes / GIB for node in cluster.nodes})
    amounts = f"{memory[0]:,.4g}" + (f" to {memory[-1]:,.4g}" if len(memory) > 1 else "")
    gpus = counted(cluster.gpus, next(iter(types)) if kinds == "" and "gpu" not in types else "GPU")
    return f"{gpus}{kinds} with {amounts} GiB in {counted(len(cluster.nodes), 'host')}"


def _speeds(truth: Truth) -> str:
    if isinstance(truth, NoInterference):
        return "jobs that share a GPU run as if alone"
    return "the speeds of jobs that share a GPU follow from measured pairs"


def _conditions(results: Sequence[Result]) -> Iterator[str]:
    conditions = results[0].conditions
    if conditions:
        yield "<h2>Conditions</h2><table class='conditions'><tbody>"
        yield "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in conditions.items())
        yield "</tbody></table>"


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
                    line=_line(place),
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
                line=_line(place) | {"shape": "hv"},
            )
        top = max((max(getattr(result.world.timeline, name), default=0) for result in results), default=0)
        figure.update_yaxes(range=[0.0, 1.05 * max(1, top)], dtick=1 if top <= _FEW else None)
        yield _chart(figure)


def _gantt(results: Sequence[Result]) -> Iterator[str]:
    world = results[0].world
    shown = _shown_gpus(world.cluster, world.gpu_type)
    some = "" if len(shown) == world.cluster.gpus else f"{len(shown)} of the {counted(world.cluster.gpus, 'GPU')}. "
    yield f"<h2>Who ran where</h2><p>{some}All pictures have one scale of time.</p>"
    end = max((stint.end for result in results for stint in result.world.stints), default=0.0) / 3600.0
    row_of = {gpu: row for row, gpu in enumerate(shown)}
    for result in results:
        stints = sorted(result.world.stints, key=lambda stint: stint.start)
        bars = [(row_of[gpu], stint) for stint in stints for gpu in stint.gpus if gpu in row_of]
        if bars:
            yield _chart(_bars(result, bars, [_named(world.gpu_type, gpu) for gpu in shown], end))


def _bars(result: Result, bars: Sequence[tuple[int, Stint]], names: Sequence[str], end: float) -> go.Figure:
    """Draw stretches of time, in order of their starts, by row; what is too much for a picture is marked."""
    runs, title = result.world.runs, escape(result.policy)
    figure = _figure("hours", "GPU", 75 + 16 * max(3, len(names)))
    if len(bars) > _GANTT_BARS:
        cut = bars[_GANTT_BARS][1].start / 3600.0
        title += f": the first {_GANTT_BARS:,} of {len(bars):,} stretches of time, to hour {cut:,.3g}"
        figure.add_vrect(x0=cut, x1=end, fillcolor="#7f7f7f", opacity=0.25, line_width=0)
    bars = bars[:_GANTT_BARS]
    figure.add_bar(
        base=[stint.start / 3600.0 for _, stint in bars],
        x=[(stint.end - stint.start) / 3600.0 for _, stint in bars],
        y=[row for row, _ in bars],
        orientation="h",
        marker={"color": [COLOURS[stint.run % len(COLOURS)] for _, stint in bars], "opacity": 0.6},
        hovertext=[runs[stint.run].job.job_id for _, stint in bars],
        hoverinfo="text",
        showlegend=False,
    )
    figure.update_xaxes(range=[0.0, end])
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=list(names), range=[-0.5, len(names) - 0.5])
    figure.update_layout(barmode="overlay", title={"text": title, "font": {"size": 14}})
    return figure


def _shown_gpus(cluster: Cluster, kinds: Sequence[str]) -> list[int]:
    """Return the first GPUs of every type, as many of each as there is room for."""
    if cluster.gpus <= _GANTT_GPUS:
        return list(range(cluster.gpus))
    left = dict.fromkeys(kinds, max(1, _GANTT_GPUS // len(set(kinds))))
    found: list[int] = []
    rest: list[int] = []
    for gpu, kind in enumerate(kinds):
        left[kind] -= 1
        (found if left[kind] >= 0 else rest).append(gpu)
    found = found[:_GANTT_GPUS]
    return sorted(found + rest[: _GANTT_GPUS - len(found)])


def _named(kinds: Sequence[str], gpu: int) -> str:
    return f"{gpu}" if len(set(kinds)) == 1 else f"{escape(kinds[gpu])} {gpu}"


def _line(place: int) -> dict[str, str]:
    """Return how the curve of a policy looks; no two of them alike."""
    return {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]}


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
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0},
    )
    return figure


def _chart(figure: go.Figure) -> str:
    html: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return f'<div class="chart">{html}</div>'


def _seconds(value: float) -> str:
    return f"{value:,.0f} s"
