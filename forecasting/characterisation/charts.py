"""The charts of the characterisation's page, as pieces of HTML made from its report.

Colours of text and grid come from the page's style sheet, so that the charts follow light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from cotenant.forecasting.characterisation.tables import MEMORY, TARGET_NAMES, TARGETS, UTIL

CLEAR = "rgba(0,0,0,0)"
FAINT = "rgba(128,128,128,0.55)"
CLASS_COLOURS = (
    "#4c9f70",
    "#2f81f7",
    "#d1495b",
    "#b07aa1",
    "#edae49",
    "#00798c",
    "#8d6b94",
    "#6c757d",
    "#e07a5f",
    "#3d405b",
)
ROLE_COLOURS = {"before": "#2f81f7", "gpu": "#b07aa1", "host": "#8a8f98", "derived": "#d1495b"}
ROLE_NAMES = {
    "before": "known before the run",
    "gpu": "measured on the GPU",
    "host": "measured on the host",
    "derived": "contains the target",
}
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star", "hexagon", "bowtie")
ABSCISSA_COLOURS = {"log2": "#2f81f7", "batch": "#b07aa1", "rank": "#edae49"}
ABSCISSA_NAMES = {"log2": "log2(batch)", "batch": "batch", "rank": "number of the point"}
SHOWN_FEATURES = 14


def runs_chart(report: Mapping[str, Any]) -> str:
    """Return all runs in the plane of both targets, coloured by cluster, one symbol per family."""
    rows, labels = report["data"]["rows"], report["clusters"]["labels"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure = go.Figure()
    for label in sorted(set(labels)):  # first: behind the families they would begin anywhere in a row
        _legend_entry(figure, f"cluster {label}", "circle", _colour(label))
    for index, family in enumerate(families):
        mine = [(row, label) for row, label in zip(rows, labels, strict=True) if row["family"] == family]
        figure.add_scatter(
            x=[row[UTIL] for row, _ in mine],
            y=[row[MEMORY] for row, _ in mine],
            text=[f"{row['architecture']}, batch {row['batch']:g}<br>cluster {label}" for row, label in mine],
            mode="markers",
            showlegend=False,
            hovertemplate="%{text}<br>%{x:.1f} % utilisation, %{y:.1f} % memory<extra></extra>",
            marker={
                "symbol": SYMBOLS[index % len(SYMBOLS)],
                "size": 10,
                "color": [_colour(label) for _, label in mine],
                "line": {"width": 1, "color": FAINT},
            },
        )
        _legend_entry(figure, family, SYMBOLS[index % len(SYMBOLS)], FAINT)
    _percent_axes(figure, "max GPU utilisation", "max GPU memory allocated")
    return _chart(figure, "runs", 460, legend=True)


def sweep_chart(report: Mapping[str, Any]) -> str:
    """Return what speaks for how many clusters: distortion, silhouette, gap and stability over k."""
    titles = ("mean distance to the centre", "silhouette", "gap statistic", "stability: ● seeds, ◆ 80 % of runs")
    figure = make_subplots(rows=1, cols=4, subplot_titles=titles, horizontal_spacing=0.055)
    counts = report["clusters"]["sweeps"]["standard"]["counts"]
    k = [count["k"] for count in counts]
    series = ("distortion", "silhouette", "gap")
    for column, name in enumerate(series, start=1):
        errors = {"array": [count["gap_spread"] for count in counts], "thickness": 1} if name == "gap" else None
        y = [count[name] for count in counts]
        figure.add_scatter(x=k, y=y, error_y=errors, mode="lines+markers", line={"color": "#2f81f7"}, row=1, col=column)
    for name, colour, symbol in (
        ("seed_agreement", "#2f81f7", "circle"),
        ("subsample_agreement", "#b07aa1", "diamond"),
    ):
        y, marker = [count[name] for count in counts], {"symbol": symbol, "size": 8}
        figure.add_scatter(x=k, y=y, mode="lines+markers", line={"color": colour}, marker=marker, row=1, col=4)
    for column in range(1, 5):
        figure.add_vline(x=report["clusters"]["k"], line={"color": FAINT, "dash": "dot"}, row=1, col=column)
    figure.update_xaxes(dtick=1, title_text="clusters", **_AXIS)
    figure.update_yaxes(**_AXIS)
    return _chart(figure, "sweep", 300)


def features_chart(report: Mapping[str, Any]) -> str:
    """Return the features with the best average ranks, their ranks when a family is left out as whiskers."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=[TARGET_NAMES[t] for t in TARGETS], horizontal_spacing=0.16)
    for column, target in enumerate(TARGETS, start=1):
        scores = [s for s in report["selection"][target]["features"] if s["average_rank"] is not None]
        shown = scores[:SHOWN_FEATURES][::-1]
        figure.add_bar(
            x=[_strength(score) for score in shown],
            y=[_shortened(score["name"]) for score in shown],
            orientation="h",
            marker={"color": [ROLE_COLOURS[score["role"]] for score in shown]},
            text=[_rank(score) for score in shown],
            textposition="auto",
            customdata=[[s["pearson"], s["spearman"], s["kendall"], ROLE_NAMES[s["role"]]] for s in shown],
            hovertemplate="%{y} (%{customdata[3]})<br>Pearson %{customdata[0]:.2f}, Spearman %{customdata[1]:.2f}, "
            "Kendall %{customdata[2]:.2f}<extra></extra>",
            row=1,
            col=column,
        )
    figure.update_xaxes(range=[0, 1], title_text="mean of the three |coefficients|", **_AXIS)
    figure.update_yaxes(automargin=True, fixedrange=True)
    return _chart(figure, "features", 90 + 27 * SHOWN_FEATURES)


def _rank(score: Mapping[str, Any]) -> str:
    """Return the average rank, with its span when a family is left out where there was another one."""
    if score["rank_low"] is None or score["rank_high"] is None:
        return f"{score['average_rank']:.1f}"
    return f"{score['average_rank']:.1f} ({score['rank_low']:.0f}–{score['rank_high']:.0f})"


def curves_chart(report: Mapping[str, Any]) -> str:
    """Return both targets over the batch size with the best interpolation, one colour per architecture."""
    sections = [(target, _section(report["synthesis"][target])) for target in TARGETS]
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[TARGET_NAMES[t] for t, _ in sections], horizontal_spacing=0.07
    )
    names = list(dict.fromkeys(curve["name"] for _, section in sections for curve in section.get("curves", [])))
    for column, (_, section) in enumerate(sections, start=1):
        for curve in section.get("curves", []):
            colour = CLASS_COLOURS[names.index(curve["name"]) % len(CLASS_COLOURS)]
            shared: dict[str, Any] = {"name": curve["name"], "legendgroup": curve["name"], "row": 1, "col": column}
            figure.add_scatter(
                x=curve["drawn_batch"], y=curve["drawn_value"], mode="lines", line={"color": colour, "width": 1.5},
                showlegend=False, hoverinfo="skip", **shared,
            )  # fmt: skip
            figure.add_scatter(
                x=curve["batch"], y=curve["value"], mode="markers", marker={"color": colour, "size": 7},
                showlegend=column == 1, hovertemplate="batch %{x:g}: %{y:.1f} %", **shared,
            )  # fmt: skip
    figure.update_xaxes(type="log", dtick=1, title_text="batch size", **_AXIS)
    figure.update_yaxes(range=[-3, 103], ticksuffix=" %", **_AXIS)
    return _chart(figure, "curves", 420, legend=True)


def interpolation_chart(report: Mapping[str, Any]) -> str:
    """Return the error of every interpolation on held-out measured points, by abscissa."""
    sections = [(target, _section(report["synthesis"][target])) for target in TARGETS]
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[TARGET_NAMES[t] for t, _ in sections], horizontal_spacing=0.07
    )
    for column, (_, section) in enumerate(sections, start=1):
        for abscissa, colour in ABSCISSA_COLOURS.items():
            scores = [score for score in section.get("scores", []) if score["abscissa"] == abscissa]
            figure.add_bar(
                x=[score["method"] for score in scores],
                y=[score["interior"]["mae"] for score in scores],
                name=f"over {ABSCISSA_NAMES[abscissa]}",
                legendgroup=abscissa,
                showlegend=column == 1,
                marker={"color": colour},
                text=[f"{score['interior']['mae']:.1f}" for score in scores],
                textposition="outside",
                customdata=[_errors_text(score) for score in scores],
                hovertemplate="%{x}<br>%{customdata}",
                cliponaxis=False,
                row=1,
                col=column,
            )
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(type="log", range=[0.1, 1.75], tickvals=[2, 3, 5, 10, 20, 30, 50], **_AXIS)
    figure.update_yaxes(title_text="mean absolute error, percentage points", row=1, col=1)
    return _chart(figure, "interpolation", 400, legend=True)


def savings_chart(report: Mapping[str, Any]) -> str:
    """Return every pair's saving against the most it could save, within and across clusters."""
    section = report["interference"]
    labels = _labels(section)
    figure = go.Figure()
    for across, name, colour in ((True, "across clusters", "#2f81f7"), (False, "within one cluster", "#d1495b")):
        mine = [pair for pair in section["pairs"] if (labels.get(pair["a"]) != labels.get(pair["b"])) is across]
        figure.add_scatter(
            x=[100 * pair["bound"] for pair in mine],
            y=[100 * pair["saving"] for pair in mine],
            text=[f"{pair['a']} + {pair['b']}" for pair in mine],
            customdata=[100 * pair["rate_saving"] for pair in mine],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 9, "line": {"width": 1, "color": FAINT}},
            hovertemplate="%{text}<br>saves %{y:.1f} % of at most %{x:.1f} %; %{customdata:.1f} % while both run"
            "<extra></extra>",
        )
    figure.add_scatter(
        x=[0, 50],
        y=[0, 50],
        mode="lines",
        line={"color": FAINT, "dash": "dot"},
        name="no interference",
        hoverinfo="skip",
    )
    _percent_axes(figure, "most that could be saved: min(S) / (S₁ + S₂)", "packing saving", 52)
    return _chart(figure, "savings", 440, legend=True)


def slowdowns_chart(report: Mapping[str, Any], threshold: float) -> str:
    """Return slowdown against the larger of both utilisations, for the pairs and the second matrix."""
    section = report["interference"]
    figure = go.Figure()
    for key, name, colour in (("directed", "pairs", "#2f81f7"), ("second_directed", "second matrix (MPS)", "#edae49")):
        rows = section.get(key, [])
        if rows:
            figure.add_scatter(
                x=[max(row["util"], row["peer_util"]) for row in rows],
                y=[row["slowdown"] for row in rows],
                text=[f"{row['util']:.0f} % beside {row['peer_util']:.0f} %" for row in rows],
                mode="markers",
                name=name,
                marker={"color": colour, "size": 8, "opacity": 0.75, "line": {"width": 1, "color": FAINT}},
                hovertemplate="%{text}<br>slowed down %{y:.2f} times<extra></extra>",
            )
    figure.add_vline(x=threshold, line={"color": FAINT, "dash": "dot"})
    figure.add_hline(y=1.1, line={"color": FAINT, "dash": "dot"})
    figure.update_xaxes(title_text="larger of both utilisations alone", ticksuffix=" %", **_AXIS)
    figure.update_yaxes(title_text="slowdown while both run", ticksuffix=" ×", type="log", dtick=0.30103, **_AXIS)
    return _chart(figure, "slowdowns", 420, legend=True)


def prediction_chart(report: Mapping[str, Any]) -> str:
    """Return the error of the best model of every feature set on families it had not seen."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=[TARGET_NAMES[t] for t in TARGETS], horizontal_spacing=0.22)
    for column, target in enumerate(TARGETS, start=1):
        best: dict[str, Mapping[str, Any]] = {}
        for score in report["prediction"][target]:
            if score["features"] not in best or score["mae"] < best[score["features"]]["mae"]:
                best[score["features"]] = score
        shown = sorted(best.values(), key=lambda score: -score["mae"])
        figure.add_bar(
            x=[score["mae"] for score in shown],
            y=[_feature_set(score) for score in shown],
            orientation="h",
            marker={"color": ["#8a8f98" if score["model"] == "mean" else "#2f81f7" for score in shown]},
            text=[f"{score['mae']:.1f}" for score in shown],
            textposition="auto",
            hovertemplate="%{y}: %{x:.2f} percentage points<extra></extra>",
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="mean absolute error, percentage points", **_AXIS)
    figure.update_yaxes(automargin=True, fixedrange=True)
    return _chart(figure, "prediction", 300)


_AXIS: dict[str, Any] = {"gridcolor": FAINT, "zeroline": False, "fixedrange": True}


def _feature_set(score: Mapping[str, Any]) -> str:
    return "training mean" if score["model"] == "mean" else f"{score['features']}<br>({score['model']})"


def _labels(section: Mapping[str, Any]) -> Mapping[str, int]:
    compared: Any = next((section["by"][name] for name in ("given", "own") if name in section["by"]), "")
    found: Mapping[str, int] = {} if isinstance(compared, str) else compared["labels"]
    return found


def _section(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {}


def _strength(score: Mapping[str, Any]) -> float:
    return sum(abs(float(score[name])) for name in ("pearson", "spearman", "kendall")) / 3


def _errors_text(score: Mapping[str, Any]) -> str:
    inner, outer, own = score["interior"], score["extrapolated"], score["self_consistency"]
    return (
        f"between measured: MAE {inner['mae']:.2f}, RMSE {inner['rmse']:.2f}, MSE {inner['mse']:.1f}<br>"
        f"extrapolated: MAE {outer['mae']:.1f}<br>self-consistency: MAE {own['mae']:.2f}"
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"


def _colour(label: int) -> str:
    return CLASS_COLOURS[label % len(CLASS_COLOURS)]


def _legend_entry(figure: Any, name: str, symbol: str, colour: str) -> None:
    marker = {"symbol": symbol, "color": colour, "size": 10}
    figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)


def _percent_axes(figure: Any, x: str, y: str, end: float = 103) -> None:
    figure.update_xaxes(title_text=x, range=[-3, end], ticksuffix=" %", **_AXIS)
    figure.update_yaxes(title_text=y, range=[-3, end], ticksuffix=" %", **_AXIS)


def _chart(figure: Any, name: str, height: int, legend: bool = False) -> str:
    figure.update_layout(
        **{"template": "none", "height": height, "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "showlegend": legend},
        **{"dragmode": False, "hovermode": "closest", "font": {"family": "system-ui, sans-serif", "size": 12}},
        margin={"l": 60, "r": 12, "t": 30, "b": 48},
        legend={"orientation": "h", "y": 1.06, "yanchor": "bottom", "x": 0},
        hoverlabel={"bgcolor": "#24292f", "bordercolor": "#24292f", "font": {"color": "#ffffff"}, "align": "left"},
    )
    figure.update_annotations(font={"size": 13})
    config = {"responsive": True, "displayModeBar": False}
    chart = plotly.io.to_html(figure, config=config, include_plotlyjs=False, full_html=False, div_id=name)
    return f'<div class="chart">{chart}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML already, all but the first column are numbers."""
    cells = "".join(f"<th{'' if i == 0 else ' class=number'}>{name}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{'' if i == 0 else ' class=number'}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
