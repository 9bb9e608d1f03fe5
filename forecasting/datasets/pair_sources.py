"""Measured pairs from any of the accepted forms, as observations with their origin and licence."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from cotenant.forecasting.characterisation.tables import MEMORY as MEMORY_PERCENT
from cotenant.forecasting.characterisation.tables import UTIL as UTIL_PERCENT
from cotenant.forecasting.datasets import alnair
from cotenant.forecasting.datasets.bridge import observations
from cotenant.forecasting.datasets.colocation import load_colocation, shipped
from cotenant.forecasting.datasets.model_card import NOT_STATED, DataSource
from cotenant.forecasting.datasets.pairs import (
    GAVEL_GPUS,
    load_alnair_mps,
    load_alnair_pairs,
    load_gavel,
    load_gpulet,
    load_lucid,
)
from cotenant.forecasting.datasets.raw import WINDOWS_FILE
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.tables import not_measured
from cotenant.forecasting.interference.model import LEAST
from cotenant.forecasting.interference.observations import INTERVAL_SIGMAS, MOST_THROUGHPUT, Observation
from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, PairTable
from cotenant.forecasting.types import DemandProfile

PairFormat = Literal["suite", "lucid", "gavel", "gpulet", "alnair-mps", "alnair-pairs"]
PAIR_FORMATS: tuple[PairFormat, ...] = get_args(PairFormat)
Mode = Literal["timeslice", "mps"]

OWN_LICENCE = "Apache-2.0"  # of the measurements that come with the package
_LICENCES: Mapping[PairFormat, str] = {
    "lucid": "S-Lab License 1.0: non-commercial use only",
    "gavel": "MIT",
    "gpulet": NOT_STATED,
    "alnair-mps": "Apache-2.0",
    "alnair-pairs": "Apache-2.0",
}
_FOLDERS: Mapping[str, PairFormat] = {  # a file that only a folder of this form has
    WINDOWS_FILE: "suite",
    "pairs.parquet": "suite",
    "colocate_info.csv": "lucid",
    "mem_util.csv": "gpulet",
    "mem_util.csv.gz": "gpulet",
}
# As GPUs announce themselves.
RTX_3090, P100 = "NVIDIA GeForce RTX 3090", "Tesla P100-PCIE-16GB"
_NOT_TOLD = "GPU type not told"  # Gpulet's tables do not name theirs
_GAVEL_TYPES = {"v100": "Tesla V100-SXM2-16GB", "p100": "Tesla P100-PCIE-16GB", "k80": "Tesla K80"}


@dataclass(frozen=True, slots=True)
class PairData:
    """Measured pairs and where they come from.

    Attributes:
        source: Their origin; ``rows`` is the number of observations.
        observations: What was measured.
        mode: How the GPU was shared.
    """

    source: DataSource
    observations: tuple[Observation, ...]
    mode: Mode


def read_pair_data(
    path: Path | str,
    form: PairFormat | None = None,
    mode: Mode | None = None,
    licence: str | None = None,
    gpu_type: str | None = None,
) -> PairData:
    """Read measured pairs.

    Args:
        path: A folder of the measurement suite (a run or its tables), the name of a shipped data set, or a file or
            folder of one of the published forms.
        form: Which form it has; None finds out.
        mode: How the GPU was shared; of a suite's measurements those of this mode are taken. None: as the form says,
            of a suite's measurements time slicing.
        licence: Licence of the data in words; needed where the form does not tell, else kept beside what it tells.
        gpu_type: The GPU type, where the form has one and it is not right; of a suite's measurements the one to take.

    Raises:
        DataError: There is nothing, it cannot be used, or its licence is not known.
    """
    path = path if isinstance(path, str) and path in shipped() else Path(path)
    form = form or pair_format(path)
    mode = mode or ("mps" if form in {"alnair-mps", "gpulet"} else "timeslice")
    found = _from_suite(path, mode, gpu_type) if form == "suite" else _READERS[form](Path(path), gpu_type)
    known = OWN_LICENCE if isinstance(path, str) else _LICENCES.get(form)
    licence = None if isinstance(path, str) else licence  # of what ships there is no doubt; it speaks of other data
    source = DataSource(
        f"{Path(path).name}: {_WORDS[form]}, {_types(found)}, {mode}",
        needed_licence(licence, known, path),
        pairs_fingerprint(found),
        len(found),
    )
    return PairData(source, tuple(found), mode)


def pair_format(path: Path | str) -> PairFormat:
    """Find out which form the data have.

    Raises:
        DataError: None of the known ones.
    """
    if isinstance(path, str):
        return "suite"
    if not path.exists():
        raise DataError(f"{path}: there is nothing; give a folder, a file, or a shipped name ({', '.join(shipped())})")
    if path.is_dir():
        found = next((form for name, form in _FOLDERS.items() if (path / name).exists()), None)
        if found is not None:
            return found
    elif path.name.endswith((".json", ".json.gz")):
        return "gavel"
    elif path.suffix == ".csv":
        columns = _columns(path)
        if "slowdown_ratio" in columns:
            return "alnair-mps"
        if "packed1_s" in columns:
            return "alnair-pairs"
    raise DataError(f"{path}: its form is not known; say which with --format: {', '.join(PAIR_FORMATS)}")


def pairs_fingerprint(found: Iterable[Observation]) -> str:
    """Return the SHA-256 of what was measured of whom, whatever the order."""
    lines = [
        "\t".join([each.gpu_type, each.focal.fingerprint, *(job.fingerprint for job in each.others), f"{number:.9g}"])
        for each in found
        for number in (each.throughput, each.focal.util_mean)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def needed_licence(said: str | None, known: str | None, path: Path | str) -> str:
    """Return the licence of data; one that is known stays, with what is said beside it.

    Args:
        said: What the user says that it is.
        known: Under which the data were published; ``NOT_STATED`` gives way to what is said.
        path: The data, for errors.

    Raises:
        DataError: It is not known: a model is of no use to others when nobody knows what its data permit.
    """
    said = (said or "").strip()
    if known is not None and known != NOT_STATED:
        return known if said in {"", known, NOT_STATED} else f"{known}; said to be: {said}"
    if not (said or known):
        raise DataError(
            f"{path}: the licence of these data is not known; give it in words with --licence, for example "
            "--licence 'our own measurements'"
        )
    return said or str(known)


def observations_of(table: PairTable, gpu_type: str) -> list[Observation]:
    """Make observations of a table of pairs; what it does not tell of a job stays unknown."""
    jobs = [_profile(table, row) for row in range(len(table.jobs))]
    found = []
    rows = zip(table.focal, table.other, table.throughput.tolist(), table.noise.tolist(), strict=True)
    for focal, other, measured, noise in rows:
        n, half = min(max(measured, LEAST), MOST_THROUGHPUT), noise * INTERVAL_SIGMAS / 2.0
        low, high = min(n, max(LEAST, n - half)), max(n, min(MOST_THROUGHPUT, n + half))
        found.append(Observation(gpu_type, jobs[focal], (jobs[other],), n, low, high))
    return found


def _profile(table: PairTable, row: int) -> DemandProfile:
    known = dict(zip(table.names, table.jobs.features[row].tolist(), strict=True))
    known = {name: value for name, value in known.items() if math.isfinite(value)}
    util, step, memory = known.get(UTIL), known.get(STEP), known.get(MEMORY)
    return DemandProfile(
        util_mean=1.0 if util is None else util,
        util_p95=1.0 if util is None else util,
        memory_bytes=None if memory is None else round(math.exp(memory)),
        solo_step_rate=None if step is None else math.exp(-step),
        source="unknown" if util is None else "history",
        membw_util=known.get(BANDWIDTH),
        fingerprint=table.jobs.ids[row],
        family=table.jobs.families[row],
    )


def _from_suite(path: Path | str, mode: Mode, gpu_type: str | None) -> list[Observation]:
    from cotenant.forecasting.training.interference import from_suite  # noqa: PLC0415 - training imports data sets

    tables = load_colocation(path)
    types = tables.gpu_types if gpu_type is None else [gpu_type]
    measured = {(str(row.gpu_type), str(row.mode)) for row in tables.pairs.itertuples()}
    wanted = [each for each in types if (each, mode) in measured]
    if not wanted:
        raise not_measured(str(path), mode, gpu_type, measured)
    return [each for name in wanted for each in from_suite(observations(tables, mode, name))]


def _from_lucid(path: Path, gpu_type: str | None) -> list[Observation]:
    return observations_of(load_lucid(path if path.is_dir() else path.parent), gpu_type or RTX_3090)


def _from_mps_matrix(path: Path, gpu_type: str | None) -> list[Observation]:
    return observations_of(load_alnair_mps(path), gpu_type or P100)


def _from_alnair_pairs(path: Path, gpu_type: str | None) -> list[Observation]:
    """Read the packed run times; what the jobs do alone comes from the runs, where they lie beside."""
    table = load_alnair_pairs(path)
    if not (path.parent / alnair.DATASET).exists():
        raise DataError(
            f"{path}: it does not tell what the jobs do alone; put {alnair.DATASET} of the same data set beside it"
        )
    runs = alnair.load_runs(path.parent / alnair.DATASET)
    alone = {
        (str(row.architecture), float(str(row.batch))): (getattr(row, UTIL_PERCENT), getattr(row, MEMORY_PERCENT))
        for row in runs.table.itertuples()
    }
    features = []
    for name in table.jobs.ids:
        task = alnair.task_of(name, runs)
        util, memory = (math.nan, math.nan) if task is None else alone.get(task, (math.nan, math.nan))
        size = memory / 100.0 * (runs.device_memory_bytes or math.nan)
        features.append([util / 100.0, math.log(size) if size > 0.0 else math.nan])
    named = PairTable(
        (UTIL, MEMORY),
        type(table.jobs)(table.jobs.ids, table.jobs.families, pd.DataFrame(features).to_numpy(dtype="float64")),
        table.focal,
        table.other,
        table.throughput,
    )
    return observations_of(named, gpu_type or P100)


def _from_gavel(path: Path, gpu_type: str | None) -> list[Observation]:
    types = {key: name for key, name in _GAVEL_TYPES.items() if gpu_type in {None, key, name}}
    if not types:
        raise DataError(f"{path}: gpu_type: {gpu_type!r} is not accepted; give one of {', '.join(_GAVEL_TYPES)}")
    found = []
    for key in GAVEL_GPUS:
        if key in types:
            table = load_gavel(path, key)
            rates = -table.jobs.features[:, [table.names.index("log_rate")]]
            jobs = type(table.jobs)(table.jobs.ids, table.jobs.families, rates)
            found += observations_of(PairTable((STEP,), jobs, table.focal, table.other, table.throughput), types[key])
    return found


def _from_gpulet(path: Path, gpu_type: str | None) -> list[Observation]:
    return observations_of(load_gpulet(path if path.is_dir() else path.parent), gpu_type or _NOT_TOLD)


_READERS: Mapping[PairFormat, Callable[[Path, str | None], list[Observation]]] = {
    "lucid": _from_lucid,
    "gavel": _from_gavel,
    "gpulet": _from_gpulet,
    "alnair-mps": _from_mps_matrix,
    "alnair-pairs": _from_alnair_pairs,
}
_WORDS: Mapping[PairFormat, str] = {
    "suite": "measurement suite",
    "lucid": "Lucid's pairs",
    "gavel": "Gavel's pairs",
    "gpulet": "Gpulet's pairs",
    "alnair-mps": "Alnair's matrix of slowdowns",
    "alnair-pairs": "Alnair's packed run times",
}


def _types(found: Iterable[Observation]) -> str:
    return " and ".join(sorted({each.gpu_type for each in found})) or "nothing measured"


def _columns(path: Path) -> list[str]:
    try:
        return [str(name) for name in pd.read_csv(path, nrows=0).columns]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: it cannot be read as a table: {error}") from error


__all__ = [
    "OWN_LICENCE",
    "PAIR_FORMATS",
    "Mode",
    "PairData",
    "PairFormat",
    "needed_licence",
    "observations_of",
    "pair_format",
    "pairs_fingerprint",
    "read_pair_data",
]
