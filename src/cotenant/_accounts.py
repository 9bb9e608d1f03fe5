"""The commands ``accounts`` and ``settings``: who may have, holds and has used how much; what may be changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from cotenant import _render

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.tuning import Changes
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


def change(client: Client, changes: Changes) -> tuple[TuningView, TuningView]:
    """Change settings, and say what that does beyond what was asked: tables that shrink, jobs that fail of it.

    Returns:
        The settings before and after.
    """
    note_dropped(client, changes)
    before = client.tuning()
    waiting = {job.job_id for job in client.jobs(active_only=True) if not job.shares}
    view = client.change_tuning(changes)
    for job in client.jobs() if waiting else ():
        if job.job_id in waiting and job.not_placeable:
            _render.note(f"warning: job {job.job_id} waited and has failed: {job.reason}")
    return before, view


def note_dropped(client: Client, changes: Changes) -> None:
    """Say which names a table has now and the one in its place has not: a table is replaced as a whole."""
    wanted = {(section, key): new for section, keys in changes.items() for key, new in keys.items()}
    tables = {name: new for name, new in wanted.items() if name in _TABLES and isinstance(new, dict)}
    now = client.tuning().model_dump(mode="json") if tables else {}
    for (section, key), new in tables.items():
        if gone := [name for name in now[section][key] if name not in new]:
            _render.note(
                f"warning: {section}.{key} is replaced as a whole and does not name {', '.join(gone)} any more: "
                f"what was set there {_TABLES[section, key]}"
            )


_TABLES = {
    ("scheduling", "queues"): "is gone, and other_queues counts",
    ("scheduling", "tenants"): "is gone, and other_tenants counts",
    ("placement", "speeds"): "is gone",
}


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
    return _lines(f"{name}={value}" for name, value in _values(view).items())


def news(before: TuningView, after: TuningView, changes: Changes) -> RenderableType:
    """Return the settings that were to be changed, one a line, as they were and as they are."""
    old, new = _values(before), _values(after)
    names = [f"{section}.{key}" for section, keys in changes.items() for key in keys]
    told = (f"{name}={new[name]} ({'was ' + old[name] if new[name] != old[name] else 'as before'})" for name in names)
    return _lines(told)


def _values(view: TuningView) -> dict[str, str]:
    """Return all settings by name, as they are given."""
    return {
        f"{section}.{key}": value if isinstance(value, str) else json.dumps(value)
        for section, values in view.model_dump(mode="json").items()
        for key, value in values.items()
    }


def _lines(lines: Iterable[str]) -> Text:
    return Text("\n".join(_render.plain(line) for line in lines))
