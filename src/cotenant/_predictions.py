"""The command ``predictions``: what predicts, how good it was lately, what is being learnt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cotenant import _render

if TYPE_CHECKING:
    from cotenant.scheduler.views import DemandScoreView, ForecastView, PredictionsView, QuantilesView

DOC = (
    "Say what predicts, how good the predictions were lately, and what is being learnt; of one job: what it is "
    "forecast to use, and how good such forecasts of it were."
)
Job = Annotated[str | None, typer.Argument(metavar="[JOB]", help="A running job; default: all of them.")]


def shown(view: PredictionsView) -> RenderableType:
    """Return the answer of ``predictions``."""
    parts: list[RenderableType] = [
        Text.assemble((f"{kind}: ", "bold"), _render.plain(what)) for kind, what in sorted(view.serving.items())
    ]
    parts += [Text(f"warning: {_render.plain(warning)}", "yellow") for warning in view.warnings]
    parts += [Text(f"drift: {_render.plain(drift)}", "yellow") for drift in view.drift]
    parts += [Text(""), Text("Demand forecasts, lately", "bold"), demand(view.demand)]
    parts += [Text(""), Text(f"Throughput beside others, lately (evidence: {view.evidence} sets)", "bold")]
    parts.append(_slowdowns(view))
    parts += [Text(""), *_trainings(view)]
    return Group(*parts)


def of_job(forecast: ForecastView | None, scores: Sequence[DemandScoreView]) -> RenderableType:
    """Return the answer of ``predictions JOB``."""
    if forecast is None and not scores:
        return _forecast(None)[0]
    return Group(*_forecast(forecast), Text(""), Text("Its forecasts, lately", "bold"), demand(scores))


def as_json(forecast: ForecastView | None, scores: Sequence[DemandScoreView]) -> dict[str, Any]:
    """Return the answer of ``predictions JOB --json``."""
    return {
        "forecast": None if forecast is None else forecast.model_dump(mode="json"),
        "scores": [each.model_dump(mode="json") for each in scores],
    }


def _forecast(view: ForecastView | None) -> list[RenderableType]:
    if view is None:
        return [Text("no forecast: it has no GPU or has ended, or nothing was measured of it there yet")]
    age, about = max(0.0, time.time() - view.measured_at), "~" * view.memory_estimated
    return [
        Text.assemble(("forecast by: ", "bold"), _render.plain(view.served_by)),
        Text(f"from {view.windows} measured windows, the last {age:.1f} s ago; per GPU"),
        Text(""),
        Text("Utilisation, were it never held back", "bold"),
        _quantiles(view.util, _render.percent, estimated=view.util_estimated),
        Text(""),
        Text("Memory", "bold"),
        _quantiles(view.memory, _render.size, estimated=view.memory_estimated),
        *([Text(f"largest until it ends: {about}{_render.size(view.peak_memory_bytes)}")] if view.memory else []),
    ]


def _quantiles(
    rows: Sequence[QuantilesView], shown_as: Callable[[float | None], str], *, estimated: bool
) -> RenderableType:
    """Return one row a horizon; "~" marks what rests on an estimate."""
    if not rows:
        return Text("cannot be read on its GPUs, so none is forecast", "dim")
    table = _render.FittingTable("AHEAD", "P10", "P50", "P90", "P95", "P99")
    for each in rows:
        values = (each.p10, each.p50, each.p90, each.p95, each.p99)
        table.row(_render.span(each.horizon_s), *(f"{'~' * estimated}{shown_as(value)}" for value in values))
    return table


def demand(scores: Sequence[DemandScoreView]) -> RenderableType:
    """Return the table of demand forecasts, one row a horizon."""
    if not scores:
        return Text("nothing scored yet: a forecast is scored when its moment comes")
    table = _render.FittingTable(
        *("AHEAD", "SCORED", "ERROR", "OF LAST VALUE", "P95 HOLDS", "MEMORY OVER P99", "MEMORY WASTE"),
        spare=("MEMORY OVER P99", "SCORED"),
    )
    for each in scores:
        table.row(
            _render.span(each.horizon_s),
            str(each.scored),
            _points(each.util_error),
            _points(each.util_persistence_error),
            _render.percent(each.util_coverage_p95),
            _render.percent(each.memory_violations),
            _render.percent(each.memory_waste),
        )
    # Looked at after one horizon only: a column would be empty in every other row.
    peaks = [
        Text(
            f"memory peaks: {100.0 * each.memory_peaks_under:.1f}% of the forecasts of the largest memory until the "
            f"end were exceeded within {_render.span(each.horizon_s)}"
        )
        for each in scores
        if each.memory_peaks_under is not None
    ]
    return Group(table, Text("error: of the utilisation, percentage points", "dim"), *peaks)


def _slowdowns(view: PredictionsView) -> RenderableType:
    if not view.slowdowns:
        return Text("nothing scored yet: jobs must run alone, then share a GPU for ten seconds")
    table = _render.FittingTable("GPU TYPE", "SCORED", "ERROR", "OF THE RULE", "BIAS", "80 % INTERVAL HOLDS")
    for each in view.slowdowns:
        table.row(
            each.gpu_type,
            str(each.scored),
            f"{each.error:.3f}",
            f"{each.rule_error:.3f}",
            f"{each.bias:+.3f}",
            _render.percent(each.coverage),
        )
    return Group(table, Text("error: of the normalised throughput n = 1 / slowdown", "dim"))


def _trainings(view: PredictionsView) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"training now: {_render.plain(view.training) or 'nothing'}")]
    for each in view.trainings:
        ago = _render.span(max(0.0, time.time() - each.at))
        end = f" {each.version}, {'adopted' if each.adopted else 'not adopted'}" if each.version else ""
        lines.append(Text(_render.plain(f"trained {ago} ago: {each.kind}{end}: {each.reason}")))
    return lines


def _points(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100.0 * fraction:.1f}"
