"""The commands ``accounts`` and ``settings``: who may have, holds and has used how much; what may be changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from cotenant import _render

if TYPE_CHECKING:
    from cotenant.scheduler.views import AccountView, TuningView

DOC = "List tenants and queues: limits, what they hold, what they used lately, their standing in the fair share."
SETTINGS_DOC = "Show the settings that may change while everything runs, or change some: placement.confidence=0.9."
Changed = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings; values in YAML.")]


def read_changes(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """Read settings given as ``section.key=value``; see ``scheduler.tuning``."""
    if not texts:
        return {}
    from cotenant.scheduler import tuning as settings  # noqa: PLC0415 - imports pydantic

    return settings.read_changes(texts)


def shown(views: Sequence[AccountView]) -> RenderableType:
    """Return the table of ``accounts``."""
    if not views:
        return Text("no tenant and no queue has had a job yet, and the settings name none")
    table = _render.FittingTable(
        *("KIND", "NAME", "WEIGHT", "GPUS HELD", "JOBS", "WAITING", "USED", "OF ALL", "ENTITLED", "FAIR SHARE"),
        spare=("WEIGHT", "USED"),
    )
    for each in views:
        table.row(
            each.kind,
            each.name,
            f"{each.weight:g}",
            f"{each.held_gpus:.2f}" + ("" if each.most_gpus is None else f" of {each.most_gpus:g}"),
            f"{each.running_jobs}" + ("" if each.most_jobs is None else f" of {each.most_jobs}"),
            str(each.waiting_jobs),
            f"{each.used_gpu_s / 3600.0:.1f} GPU h",
            _render.percent(each.used_fraction),
            _render.percent(each.entitled_fraction),
            f"{each.fair_share:.2f}",
        )
    return table


def tuning(view: TuningView) -> RenderableType:
    """Return the settings, one a line, as they are given."""
    lines = [
        f"{section}.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for section, values in view.model_dump(mode="json").items()
        for key, value in values.items()
    ]
    return Text("\n".join(_render.plain(line) for line in lines))
