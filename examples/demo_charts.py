"""The charts of the demo's page, as pieces of HTML.

Colours of text and grid come from the page's style sheet, so that the charts follow light and dark. All charts over
time have the same scale, so that the shorter makespan is seen as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
import plotly.io
from demo_values import (
    MODES,
    PACKED,
    Row,
    mode_of,
    names,
    number,
    part_of,
    percent,
    plain,
    ratio,
    rows_of,
    seconds,
    series_of,
)
from plotly.subplots import make_subplots

MODE_COLOURS = {"exclusive": "#8a8f98", "static": "#b07aa1", "first": "#d9822b", "cotenant": "#2f81f7"}
SYMBOLS = {"first": "diamond", "cotenant": "circle"}
INKS = ("#ffffff", "#000000")
FAINT = "rgba(128,128,128,0.45)"
CLEAR = "rgba(0,0,0,0)"
TIME_MARGIN = {"l": 40, "r": 8, "t": 22, "b": 34}  # one for all, so that equal times lie below each other
LANE_PX = 25
PANEL_PX = 96  # one device's utilisation in one mode, with its title
HOVER_SPANS = 8
HOVER_WIDTH = 44  # characters
DEVICE_WIDTH = 28  # characters
BAND = 0.10  # half width of the band around the diagonal: what runs as short as the demo's can resolve


def lanes(runs: Iterable[Row]) -> list[tuple[int, Row]]:
    """Give every run the first lane that is free at its start, so that runs which overlap lie above each other.

    Args:
        runs: Runs of one device with numbers in ``start_s`` and ``end_s``.

    Returns:
        (lane, run), in the order of the starts.
    """
    free_at: list[float] = []
    placed = []
    for run in sorted(runs, key=lambda run: (run["start_s"], run["end_s"])):
        lane = next((lane for lane, free in enumerate(free_at) if free <= run["start_s"]), len(free_at))
        free_at[lane : lane + 1] = [run["end_s"]]
        placed.append((lane, run))
    return placed


def gantt(name: str, mode: Row, colours: Mapping[str, str], end: float) -> str:
    """Return who ran when on which device in one mode.

    Args:
        name: The mode.
        mode: What was measured in it.
        colours: Family → colour.
        end: The end of the time scale, in seconds.
    """
    by_device: dict[str, list[Row]] = {device: [] for device in sorted(series_of(mode))}
    for run in rows_of(mode, "runs"):
        start, stop = number(run.get("start_s")), number(run.get("end_s"))
        if start is not None:  # a job without an end did not finish: its bar goes on to the edge
            bar = {**run, "start_s": start, "end_s": end if stop is None else stop}
            by_device.setdefault(plain(run.get("device")), []).append(bar)
    if not any(by_device.values()):
        return "<p>No run was recorded.</p>"
    figure, top = go.Figure(), 0.0
    for device, runs in by_device.items():
        figure.add_annotation(text=_device(device), x=0, xref="paper", xanchor="left", y=top + 0.45, showarrow=False)
        placed = lanes(runs)
        for lane, run in placed:
            figure.add_trace(_bar(run, top + 1.3 + lane, colours[plain(run.get("family"))]))
        top += 2.0 + max((lane for lane, _ in placed), default=-1)
        figure.add_hline(y=top - 0.1, line={"color": FAINT, "width": 1})
    if (makespan := number(mode.get("makespan_s"))) is not None:
        figure.add_vline(x=makespan, line={"color": MODE_COLOURS[name], "width": 2, "dash": "dash"})
        figure.add_annotation(
            text=f"all done after {seconds(makespan)}",
            **{"x": makespan, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False},
        )
    figure.update_layout(barmode="overlay", margin=TIME_MARGIN)
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 10})  # a name that does not fit its bar is left out
    figure.update_xaxes(**_time_axis(end))
    figure.update_yaxes(range=[top, -0.1], visible=False, fixedrange=True)
    return _chart(figure, f"gantt-{name}", int(60 + LANE_PX * top))


def utilisation(report: Row, end: float) -> str:
    """Return every device's utilisation over time, one panel per mode and device."""
    panels = [
        (name, device, points)
        for name in MODES
        for device, points in sorted(series_of(mode_of(report, name)).items())
        if points
    ]
    if not panels:
        return "<p>No utilisation was recorded.</p>"
    figure = make_subplots(rows=len(panels), shared_xaxes=True, vertical_spacing=0.3 / len(panels))
    for row, (name, device, points) in enumerate(panels, start=1):
        # One line per stretch of readings: a line with gaps would be filled across them.
        for known, stretch in groupby(points, key=lambda point: point[1] is not None):
            if known:
                at, busy = zip(*stretch, strict=True)
                figure.add_scatter(
                    **{"x": at, "y": busy, "mode": "lines", "fill": "tozeroy", "row": row, "col": 1},
                    line={"color": MODE_COLOURS[name], "width": 1.5},
                    hovertemplate="%{x:.1f} s: %{y:.0%}<extra></extra>",
                )
        figure.add_annotation(
            text=f"{MODES[name]}: {_device(device)}",
            **{"x": 0, "xref": "x domain", "xanchor": "left", "y": 1, "yref": "y domain", "yanchor": "bottom"},
            **{"showarrow": False, "row": row, "col": 1},
        )
        if (makespan := number(mode_of(report, name).get("makespan_s"))) is not None:
            line = {"color": MODE_COLOURS[name], "width": 2, "dash": "dash"}
            figure.add_vline(x=makespan, line=line, row=row, col=1)
    top = max([1.0, *(busy for *_, points in panels for _, busy in points if busy is not None)])
    figure.update_xaxes(**_time_axis(end))
    figure.update_yaxes(range=[0, top * 1.05], tickvals=[0, 0.5, 1], tickformat=".0%", fixedrange=True, zeroline=False)
    figure.update_layout(margin=TIME_MARGIN)
    return _chart(figure, "utilisation", 56 + PANEL_PX * len(panels))


def scatter(jobs: Sequence[Row], colours: Mapping[str, str]) -> str:
    """Return predicted against measured slowdown, one point per job, with the diagonal."""
    points = []
    for job in jobs:
        measured, predicted = number(job.get("slowdown_measured")), number(job.get("slowdown_predicted"))
        if measured is not None and predicted is not None:
            box = _box(
                job.get("name"),
                plain(job.get("family")),
                f"measured {ratio(measured)}, predicted {ratio(predicted)}, allowed {ratio(job.get('max_slowdown'))}",
                f"ran beside {names(job.get('neighbours'))}",
            )
            points.append(Point(measured, predicted, colours[plain(job.get("family"))], "circle", box))
    if not points:
        return "<p>No job has both a measured and a predicted slowdown.</p>"
    return _agreement(points, "scatter", "slowdown measured", "slowdown predicted")


def set_scatter(rows: Sequence[Row]) -> str:
    """Return predicted against measured throughput of all members of all sets, one point per member and predictor."""
    points = []
    for row in rows:
        members = rows_of(row, "members")
        for name in PACKED:
            for place, member in enumerate(members):
                measured = number(member.get("measured"))
                predicted = number(part_of(member, "predicted").get(name))
                if measured is not None and predicted is not None:
                    box = _box(
                        member.get("name"),
                        f"beside {names([one.get('name') for i, one in enumerate(members) if i != place])}",
                        f"n measured {ratio(measured)}, {MODES[name].rpartition(', ')[2]}: {ratio(predicted)}",
                    )
                    points.append(Point(measured, predicted, MODE_COLOURS[name], SYMBOLS[name], box))
    if not points:
        return "<p>No set of jobs was together long enough to be compared.</p>"
    return _agreement(points, "sets", "n measured", "n predicted")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a chart of predicted (y) against measured (x)."""

    measured: float
    predicted: float
    colour: str
    symbol: str
    box: str


def _agreement(points: Sequence[Point], name: str, x_title: str, y_title: str) -> str:
    """Return points around the diagonal on which predictions are exact."""
    values = [value for point in points for value in (point.measured, point.predicted)]
    room = 0.06 * max(max(values) - min(values), 0.2)
    low, high = min(values) - room, max(values) + room
    figure = go.Figure()
    figure.add_scatter(
        x=[low, high, high, low],
        y=[low * (1 - BAND), high * (1 - BAND), high * (1 + BAND), low * (1 + BAND)],
        **{"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": "rgba(128,128,128,0.13)"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[low, high], y=[low, high], mode="lines", line={"color": FAINT, "dash": "dot"}, hoverinfo="skip"
    )
    for point in points:
        edge = {"width": 1, "color": "#ffffff"}
        figure.add_scatter(
            **{"x": [point.measured], "y": [point.predicted], "mode": "markers"},
            **{"hovertext": point.box, "hoverinfo": "text"},
            marker={"size": 12, "color": point.colour, "symbol": point.symbol, "line": edge},
        )
    axis = {"range": [low, high], "zeroline": False, "fixedrange": True, "tickformat": ".2f"}
    figure.update_xaxes(**axis, title=x_title)
    figure.update_yaxes(**axis, title=y_title)
    figure.update_layout(margin={"l": 58, "r": 8, "t": 8, "b": 48})
    return f'<div class="square">{_chart(figure, name, 420)}</div>'


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours (``#rrggbb``) as WCAG 2.2 defines it, from 1 to 21."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255.0 for place in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def text_on(colour: str) -> str:
    """Return the colour in which text on this one is read best: white or black, 4.58 at least (WCAG AA wants 4.5)."""
    return max(INKS, key=lambda ink: contrast(ink, colour))


def _bar(run: Row, y: float, colour: str) -> Any:
    return go.Bar(
        insidetextfont={"color": text_on(colour)},
        **{"orientation": "h", "y": [y], "width": 0.86, "marker": {"color": colour}},
        **{"base": [run["start_s"]], "x": [max(run["end_s"] - run["start_s"], 0.0)]},
        **{"text": [_text(run.get("name"))], "textposition": "inside", "insidetextanchor": "start", "textangle": 0},
        **{"hovertext": _hover(run), "hoverinfo": "text"},
    )


def _hover(run: Row) -> str:
    """Return what a bar's box says: the job, its share, its neighbours."""
    queued, start = number(run.get("queued_s")), number(run.get("start_s"))
    waited = start - queued if start is not None and queued is not None else None
    spans = [
        f"{seconds(part.get('start_s'))} to {seconds(part.get('end_s'))} beside {names(part.get('neighbours'))}: "
        f"slowdown {ratio(part.get('slowdown_predicted'))} predicted"
        for part in rows_of(run, "colocations")
        if part.get("neighbours")
    ]
    return _box(
        run.get("name"),
        f"{plain(run.get('family'))}, on {plain(run.get('device'))}",
        f"{seconds(start)} to {seconds(run.get('end_s'))}, waited {seconds(waited)}, {plain(run.get('state'))}",
        *([f"share of the device's compute: {percent(run['share'])}"] if "share" in run else []),
        *(spans[:HOVER_SPANS] or [f"neighbours: {names(run.get('neighbours'))}"]),
        *([f"and {len(spans) - HOVER_SPANS} more"] if len(spans) > HOVER_SPANS else []),
    )


def _box(title: object, *lines: str) -> str:
    """Return the text of a box that pops up: narrow enough for a phone."""
    parts = [part for line in lines for part in wrap(line, HOVER_WIDTH, break_on_hyphens=False)]
    return "<br>".join([f"<b>{_text(title)}</b>", *map(_text, parts)])


def _text(value: object) -> str:
    return escape(plain(value), quote=False)  # charts read a subset of HTML in their texts


def _device(name: str) -> str:
    """Return a device's name, its middle left out where it would not fit a phone."""
    return _text(name if len(name) <= DEVICE_WIDTH else f"{name[:10]}…{name[11 - DEVICE_WIDTH :]}")


def _time_axis(end: float) -> dict[str, Any]:
    return {"range": [0, end * 1.02], "ticksuffix": " s", "fixedrange": True, "zeroline": False, "nticks": 9}


def _chart(figure: Any, name: str, height: int) -> str:
    figure.update_layout(
        **{"template": "none", "height": height, "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "showlegend": False},
        **{"dragmode": False, "hovermode": "closest", "font": {"family": "system-ui, sans-serif", "size": 12}},
        hoverlabel={"bgcolor": "#24292f", "bordercolor": "#24292f", "font": {"color": "#ffffff"}, "align": "left"},
    )
    config = {"responsive": True, "displayModeBar": False}
    chart = plotly.io.to_html(figure, config=config, include_plotlyjs=False, full_html=False, div_id=name)
    return f'<div class="chart">{chart}</div>'
