"""The command ``predictions``: what predicts, how good it was lately, what is being learnt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cotenant import _render

if TYPE_CHECKING:
    from cotenant.scheduler.views import DemandScoreView, PredictionsView

DOC = "Say what predicts, how good the predictions were lately, and what is being learnt; of one job: its forecasts."
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
    return Group(table, Text("error: of the utilisation, percentage points", "dim"))


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
