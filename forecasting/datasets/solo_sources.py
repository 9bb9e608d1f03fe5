"""Programs measured alone, as published: memory, and what else was told. Nothing here is fitted on them.

The cold start and the characterisation need the largest utilisation of a run (``run_sources.py``); these tables tell
the mean or none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cotenant.forecasting.datasets.model_card import NOT_STATED, DataSource
from cotenant.forecasting.datasets.pair_sources import needed_licence
from cotenant.forecasting.datasets.published import (
    FRACTION,
    MIB,
    PERCENT,
    read_csv,
    read_json,
)
from cotenant.forecasting.datasets.schema import DataError

SoloFormat = Literal["carma", "gpumemnet", "miso"]
SOLO_FORMATS: tuple[SoloFormat, ...] = get_args(SoloFormat)

_MOST_MIB = float(1 << 30)  # a pebibyte
_MEMORY_MIB = (1.0, _MOST_MIB)
_BATCH, _PARAMETERS = (1.0, 1e9), (1.0, 1e15)
_COUNTS = ("Batch Size", "Total Parameters")
_CARMA_BATCH = re.compile(r"_(?:--batch_size|-b)_([1-9][0-9]{0,8})(?=_|$)")
_MISO_BATCH = re.compile(r"[1-9][0-9]{0,8}")
_GPUMEMNET_SHAPE = re.compile(r"_arch:([a-z]+)_")


@dataclass(frozen=True, slots=True)
class SoloRun:
    """One program alone on a GPU. None = not told.

    Attributes:
        program: What ran, with its arguments.
        model: Its model, or the family of models.
        memory_bytes: Largest device memory in use.
        batch: Samples per step.
        parameters: Number of weights.
        util_mean: Mean utilisation in [0, 1].
        sm_active: Mean part of the time in which multiprocessors had work, in [0, 1].
        sm_occupancy: Mean part of the warps they can hold that were there, in [0, 1].
        estimate_bytes: Device memory that torch's FakeTensor mode foretold.
    """

    program: str
    model: str
    memory_bytes: int
    batch: int | None = None
    parameters: int | None = None
    util_mean: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    estimate_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SoloData:
    """Programs measured alone and where they come from.

    Attributes:
        source: Their origin; ``rows`` is the number of runs.
        runs: What was measured, as the file orders it.
    """

    source: DataSource
    runs: tuple[SoloRun, ...]


def read_solo_data(path: Path, form: SoloFormat, licence: str | None = None) -> SoloData:
    """Read programs measured alone.

    Args:
        path: CARMA's summary or GPUMemNet's table (CSV, plain or compressed), or MISO's memory by model and batch
            (JSON).
        form: Which of them it is.
        licence: Licence of the data in words, where it is not the published one.

    Raises:
        DataError: The file is not of this form, has no rows, or a value is missing or not accepted.
    """
    read, words, known = _FORMS[form]
    runs = tuple(read(path))
    source = DataSource(
        f"{path.name}: {words}", needed_licence(licence, known, path), solo_fingerprint(runs), len(runs)
    )
    return SoloData(source, runs)


def solo_fingerprint(runs: Iterable[SoloRun]) -> str:
    """Return the SHA-256 of what was measured of whom, whatever the order."""
    lines = sorted("\t".join(map(repr, astuple(run))) for run in runs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _carma(path: Path) -> Iterable[SoloRun]:
    memory, estimate = "Max memory.used [MB]", "Faketensor Estimate [MB]"  # its GB are these / 1024: MiB
    limits = {memory: _MEMORY_MIB, estimate: (1e-6, _MOST_MIB), "batch_size": _BATCH}
    texts = ("Model", "Run folder", "Time")
    optional = (estimate, "batch_size")
    for row in _rows(read_csv(path, (*texts, memory), limits, optional=optional, whole=("batch_size",))):
        program = str(row["Run folder"]).removeprefix(f"{row['Time']}_")
        said = _CARMA_BATCH.search(program)
        yield SoloRun(
            program,
            str(row["Model"]),
            round(row[memory] * MIB),
            batch=_whole(row["batch_size"]) or (int(said[1]) if said else None),
            estimate_bytes=_whole(row[estimate], MIB),
        )


def _gpumemnet(path: Path) -> Iterable[SoloRun]:
    memory, util = "Max GPU Memory (MiB)", "Avg GPUTL"
    measured = {memory: _MEMORY_MIB, "Batch Size": _BATCH, "Total Parameters": _PARAMETERS}
    optional = {util: PERCENT, "Avg SMACT": FRACTION, "Avg SMOCC": FRACTION}
    frame = read_csv(path, ("Filename", *measured), measured | optional, optional=tuple(optional), whole=_COUNTS)
    for row in _rows(frame):
        program = str(row["Filename"]).removesuffix(".out")
        shape = _GPUMEMNET_SHAPE.search(program)
        yield SoloRun(
            program,
            f"MLP, {shape[1]}" if shape else "MLP",
            round(row[memory] * MIB),
            _whole(row["Batch Size"]),
            _whole(row["Total Parameters"]),
            util_mean=None if row[util] is None else row[util] / 100.0,
            sm_active=row["Avg SMACT"],
            sm_occupancy=row["Avg SMOCC"],
        )


def _miso(path: Path) -> Iterable[SoloRun]:
    document = read_json(path)
    if not isinstance(document, dict) or not document:
        raise DataError(f"{path}: it is not an object of models with their memory by batch")
    for model, batches in document.items():
        if not isinstance(batches, dict):
            raise DataError(f"{path}: {model!r}: {batches!r:.40} is not accepted; give MiB by batch")
        for batch, memory in batches.items():
            if not _MISO_BATCH.fullmatch(batch):
                raise DataError(f"{path}: {model!r}: batch {batch!r:.40} is not accepted; give a whole number from 1")
            number = type(memory) in {int, float}
            if not number or not _MEMORY_MIB[0] <= memory <= _MEMORY_MIB[1]:
                raise DataError(
                    f"{path}: {model!r}, batch {batch}: {memory!r:.40} is not accepted; "
                    f"give MiB from {_MEMORY_MIB[0]:g} to {_MEMORY_MIB[1]:g}"
                )
            yield SoloRun(f"{model}_train{batch}", model, round(memory * MIB), int(batch))


def _rows(frame: Any) -> Iterable[dict[str, Any]]:
    """The rows of a table; what is missing is None."""
    for row in frame.to_dict("records"):
        yield {name: None if value != value else value for name, value in row.items()}  # noqa: PLR0124 - NaN


def _whole(value: float | None, unit: float = 1.0) -> int | None:
    return None if value is None else round(value * unit)


_FORMS: Mapping[SoloFormat, tuple[Callable[[Path], Iterable[SoloRun]], str, str]] = {
    "carma": (_carma, "CARMA's single runs", "Apache-2.0"),
    "gpumemnet": (_gpumemnet, "GPUMemNet's single runs", NOT_STATED),
    "miso": (_miso, "MISO's memory by model and batch", "MIT"),
}

__all__ = ["SOLO_FORMATS", "SoloData", "SoloFormat", "SoloRun", "read_solo_data", "solo_fingerprint"]
