"""The commands ``cotenant evaluate …``: how good a recipe is on groups it has not seen, and how good a model is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cotenant import _render
from cotenant._models import RegistryFolder, full_version, note_licence, open_registry, told
from cotenant._train import (
    Experts,
    GpuType,
    Licence,
    PairDataArgument,
    PairForm,
    Seed,
    SeriesDataArgument,
    SeriesForm,
    SharingMode,
    Updates,
    chosen,
    expert_kinds,
    progress_bars,
    read_pairs,
    read_series,
)
from cotenant.forecasting.datasets.model_card import NOT_STATED
from cotenant.scheduler.errors import CotenantError

if TYPE_CHECKING:
    from cotenant.forecasting.datasets.model_card import DataSource
    from cotenant.forecasting.datasets.series import ValueSeries
    from cotenant.forecasting.training.scores import FoldScore

evaluate = typer.Typer(
    no_args_is_help=True, help="Judge a way of training on groups that it has not seen, and a trained model."
)

Version = Annotated[str | None, typer.Option("--version", help="Also score this version as it is ('shipped' too).")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")]
_RATIO, _P95 = "MAE / persistence", "p95 coverage, "
_LEGEND = (
    "error: mean absolute error by that of 'it stays as it is' (below 1: better); untrained, average: the same of what "
    "serves without training, and of a running average\n"
    "worst: the series with the largest such ratio; p95: part of the values below the forecast 95 % quantile; +n: so "
    "many windows ahead"
)
_MEASURE = NOT_STATED  # nothing is kept of the data, so no licence need be known


@evaluate.command("interference")
def evaluate_interference(
    *,
    data: PairDataArgument,
    version: Version = None,
    groups: Annotated[str, typer.Option("--groups", help="What is held out: family or job.")] = "family",
    form: PairForm = None,
    mode: SharingMode = None,
    gpu_type: GpuType = None,
    licence: Licence = None,
    registry: RegistryFolder = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Judge the fit of interference by holding out families or jobs, beside simpler predictors."""
    with told():
        from cotenant.forecasting.datasets.registry import load_interference  # noqa: PLC0415 - imports numpy
        from cotenant.forecasting.training import judging, recipes  # noqa: PLC0415 - imports scikit-learn and torch

        read = read_pairs(data, form, mode, licence or _MEASURE, gpu_type)
        observations, shared = recipes.pooled(read)
        opened = open_registry(registry)
        frozen, card = None, None
        if version is not None:
            name = full_version(opened, "interference", version)
            models, card = load_interference(opened, name), opened.card("interference", name)
            frozen = judging.frozen_interference(name, models, observations)
        with progress_bars() as progress:
            folds, held = recipes.judged_interference(
                observations, recipes.recipe(shared), chosen("groups", groups, recipes.GROUPS), seed, progress
            )
    warnings = [] if card is None else judging.known_data(card, [each.source for each in read])
    _report("interference", {f"held-out {held}": (folds, frozen)}, [each.source for each in read], warnings, json_file)
    if card is not None:
        note_licence(card)


@evaluate.command("demand")
def evaluate_demand(
    *,
    data: SeriesDataArgument,
    version: Version = None,
    experts: Experts = "gru,tcn,trees",
    updates: Updates = 400,
    form: SeriesForm = None,
    licence: Licence = None,
    registry: RegistryFolder = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Judge the training of demand experts by holding out sources, beside simpler forecasters."""
    with told():
        from cotenant.forecasting.datasets.registry import load_demand  # noqa: PLC0415 - imports numpy
        from cotenant.forecasting.training import judging, recipes  # noqa: PLC0415 - imports scikit-learn and torch
        from cotenant.forecasting.training.demand_fit import TrainingOptions  # noqa: PLC0415

        kinds = expert_kinds(experts)
        read = read_series(data, form, licence or _MEASURE)
        options = TrainingOptions(seed=seed, updates=updates)
        opened = open_registry(registry)
        loaded, card, name = None, None, ""
        if version is not None:
            name = full_version(opened, "demand", version)
            loaded, card = load_demand(opened, name), opened.card("demand", name)
        found: dict[str, tuple[Sequence[FoldScore], FoldScore | None]] = {}
        with progress_bars() as progress:
            for quantity, series in recipes.by_quantity(read).items():
                mine = recipes.expert_kinds(kinds)[quantity]
                if not series or not mine:
                    continue
                hold = recipes.held_out(quantity, series)
                frozen = None if loaded is None else judging.frozen_demand(name, quantity, loaded, hold)
                found[quantity] = (recipes.judged_demand(quantity, hold, mine, options, progress), frozen)
    warnings = [] if card is None else judging.known_data(card, [each.source for each in read])
    programs = programs_of(series for each in read for series in (*each.util, *each.memory))
    _report("demand", found, [each.source for each in read], warnings, json_file, programs=programs)
    if card is not None:
        note_licence(card)


def _report(
    kind: str,
    found: Mapping[str, tuple[Sequence[FoldScore], FoldScore | None]],
    sources: Sequence[DataSource],
    warnings: Sequence[str],
    json_file: Path | None,
    *,
    programs: Mapping[str, str] | None = None,
) -> None:
    from cotenant.forecasting.training.scores import combined  # noqa: PLC0415

    record: dict[str, Any] = {"kind": kind, "data": [asdict(each) for each in sources], "warnings": list(warnings)}
    for title, (folds, frozen) in found.items():
        whole = combined(folds)
        rows = [*folds, whole]
        table = _table(title, rows, frozen) if programs is None else _demand_table(title, rows, frozen, programs)
        _render.out().print(table)
        record[title] = {
            "folds": [_plain(fold) for fold in folds],
            "all": _plain(whole),
            "version": None if frozen is None else _plain(frozen),
        }
    for text in warnings:
        _render.note(f"warning: {text}")
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise CotenantError(f"json: {json_file} cannot be written: {error.strerror}") from error


def _demand_table(
    title: str, rows: Sequence[FoldScore], frozen: FoldScore | None, programs: Mapping[str, str]
) -> RenderableType:
    """Return the table of forecasts of one quantity, in columns that fit a terminal, and what these are."""
    ahead = [name.removeprefix(_P95) for name in rows[0].metrics if name.startswith(_P95)]
    steps = [each.removesuffix(" ahead") for each in ahead]
    columns = {
        "error": _RATIO,
        "untrained": f"untrained mixture, {_RATIO}",
        "average": f"EWMA, {_RATIO}",
        **{f"worst +{step}": f"worst series / persistence, {each}" for step, each in zip(steps, ahead, strict=True)},
        **{f"p95 +{step}": f"{_P95}{each}" for step, each in zip(steps, ahead, strict=True)},
    }
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, overflow="fold", max_width=48)
    for name in ("rows", *columns):
        table.add_column(name, justify="right", overflow="fold")
    for row in (*rows, *([] if frozen is None else [frozen])):
        style = "bold" if row is rows[-1] else ("cyan" if row is frozen else "")
        known = {**row.baselines, **row.metrics}
        cells = [f"{known[name]:.3f}" if name in known else "-" for name in columns.values()]
        group = ", ".join(programs.get(word, word) for word in row.group.split(", "))
        table.add_row(_render.plain(group), str(row.rows), *cells, style=style)
    return Group(table, Text(_LEGEND, "dim"))


def programs_of(series: Iterable[ValueSeries]) -> dict[str, str]:
    """Name the sources that are fingerprints of programs by a job that ran each of them."""
    jobs: dict[str, list[str]] = {}
    for each in series:
        job, on, _ = each.name.partition(" on ")
        if on and job != each.source and job not in jobs.setdefault(each.source, []):
            jobs[each.source].append(job)
    return {
        source: f"{source} ({ran[0]}{f' and {len(ran) - 1} more' if len(ran) > 1 else ''})"
        for source, ran in jobs.items()
    }


def _table(title: str, rows: Sequence[FoldScore], frozen: FoldScore | None) -> Table:
    metrics, baselines = list(rows[0].metrics), list(rows[0].baselines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, overflow="fold", max_width=48)
    for name in ("rows", *metrics, *baselines):
        table.add_column(name, justify="right", overflow="fold")
    for row in (*rows, *([] if frozen is None else [frozen])):
        style = "bold" if row is rows[-1] else ("cyan" if row is frozen else "")
        values = [row.metrics.get(name) for name in metrics] + [row.baselines.get(name) for name in baselines]
        cells = ["-" if value is None else f"{value:.4f}" for value in values]
        table.add_row(_render.plain(row.group), str(row.rows), *cells, style=style)
    return table


def _plain(score: FoldScore) -> dict[str, Any]:
    return {
        "group": score.group,
        "rows": score.rows,
        "metrics": dict(score.metrics),
        "baselines": dict(score.baselines),
    }
