"""The command ``cotenant characterise``. Everything heavy is imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant._options import writable_folder
from cotenant.scheduler.errors import CotenantError, NotAccepted

if TYPE_CHECKING:
    from cotenant.forecasting.characterisation.pipeline import Inputs

GIB = 2.0**30
REPORT_JSON, REPORT_HTML, CLASSES_JSON = "report.json", "report.html", "classes.json"


def characterise(
    *,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="Folder or file of measured runs, or 'cpu' (docs/characterisation.md)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html, report.json and classes.json.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns", metavar="OURS=THEIRS", help="Name of a column in a file of another form; repeatable."
        ),
    ] = None,
    pairs: Annotated[Path | None, typer.Option("--pairs", help="Table of measured pairs, with --columns.")] = None,
    device_memory: Annotated[
        float | None, typer.Option("--device-memory", metavar="GIB", min=0.001, help="Memory of the device in GiB.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="Sharing mode of a co-location data set; default: timeslice, else its first."),
    ] = None,
    clusters: Annotated[int, typer.Option("--clusters", min=2, max=10, help="Number of clusters and classes.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and predictors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as plain JSON.")] = False,
) -> None:
    """Characterise workloads: which features matter, batch-size curves, clusters, and how they interfere."""
    from cotenant.forecasting.characterisation.page import render  # noqa: PLC0415 - imports plotly
    from cotenant.forecasting.datasets.schema import DataError  # noqa: PLC0415 - imports pandas

    writable_folder(out)
    try:
        inputs = read_inputs(data, _mapping(columns or ()), pairs, device_memory, mode)
        report = full_report(inputs, clusters, quick)
    except DataError as error:
        raise CotenantError(str(error)) from error
    try:
        (out / REPORT_JSON).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (out / REPORT_HTML).write_text(render(report), encoding="utf-8")
        if not isinstance(report["cold_start"], str):
            text = json.dumps(report["cold_start"], indent=1, allow_nan=False)
            (out / CLASSES_JSON).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CotenantError(f"out: {out} cannot be written: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(report["findings"], indent=2))
        return
    for finding in report["findings"]:
        typer.echo(f"{finding['verdict']}: {finding['claim']} ({finding['why'].rstrip('.')})")
    typer.echo(f"written: {out / REPORT_HTML}")


def read_inputs(
    data: Path,
    columns: dict[str, str] | None = None,
    pairs: Path | None = None,
    device_memory_gib: float | None = None,
    mode: str | None = None,
) -> Inputs:
    """Read any of the accepted forms: the alnair data set, a co-location data set, or any table with ``columns``.

    Raises:
        DataError: What is there cannot be used.
        CotenantError: Nothing is there.
    """
    from cotenant.forecasting.characterisation.pipeline import Inputs  # noqa: PLC0415 - imports scikit-learn
    from cotenant.forecasting.datasets import alnair, runs  # noqa: PLC0415
    from cotenant.forecasting.datasets.colocation import load_colocation, shipped  # noqa: PLC0415

    memory = None if device_memory_gib is None else device_memory_gib * GIB
    if not data.exists():
        if str(data) in shipped() and not columns:
            return Inputs(*runs.own_runs(load_colocation(str(data)), mode))
        raise CotenantError(
            f"data: {data} does not exist; give a folder, a file, or a shipped name ({', '.join(shipped())})"
        )
    if columns:
        found = None if pairs is None else runs.read_pairs(pairs)
        return Inputs(runs.read_runs(data, columns, memory), found)
    if (data / alnair.DATASET).exists() or data.name == alnair.DATASET:
        loaded = alnair.load_alnair(data)
        return Inputs(loaded.runs, loaded.pairs, lambda name: alnair.task_of(name, loaded.runs), loaded.synthetic)
    if data.is_dir():
        own, together = runs.own_runs(load_colocation(data), mode)
        return Inputs(own, together)
    found = None if pairs is None else runs.read_pairs(pairs)
    return Inputs(runs.read_runs(data, {}, memory), found)


def full_report(inputs: Inputs, clusters: int = 3, quick: bool = False) -> dict[str, Any]:
    """Return the report with cold-start classes and how good they are for runs that they have not seen."""
    from dataclasses import asdict, replace  # noqa: PLC0415

    from cotenant.forecasting.characterisation.pipeline import characterise as pipeline  # noqa: PLC0415
    from cotenant.forecasting.training import coldstart  # noqa: PLC0415

    known, why = inputs, ""
    try:
        known = replace(inputs, classes=coldstart.fit(inputs.runs, clusters))
    except ValueError as error:
        why = str(error)
    report = pipeline(known, clusters, quick)
    if why:
        report["cold_start"] = why
        return report
    scores: dict[str, Any] = {}
    tests = {"unseen families": coldstart.unseen_families, "unseen batch sizes": coldstart.unseen_batches}
    for name, test in tests.items():
        try:
            scores[name] = asdict(test(inputs.runs, clusters))
        except ValueError as error:
            scores[name] = str(error)
    report["cold_start_scores"] = scores
    return report


def _mapping(said: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in said]
    for ours, sign, theirs in pairs:
        if not (ours and sign and theirs):
            raise NotAccepted("columns", f"{ours}{sign}{theirs}", "OURS=THEIRS, for example batch=batch_size")
    return {ours: theirs for ours, _, theirs in pairs}
