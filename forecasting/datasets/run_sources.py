"""Single runs from any of the accepted forms, with their origin and licence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from cotenant.forecasting.characterisation.tables import RUN_COLUMNS, Runs
from cotenant.forecasting.datasets import alnair
from cotenant.forecasting.datasets.colocation import load_colocation, shipped
from cotenant.forecasting.datasets.model_card import DataSource
from cotenant.forecasting.datasets.pair_sources import OWN_LICENCE, P100, needed_licence
from cotenant.forecasting.datasets.runs import own_runs, read_runs
from cotenant.forecasting.datasets.schema import DataError

_ALNAIR_LICENCE = "Apache-2.0"


@dataclass(frozen=True, slots=True, eq=False)
class RunData:
    """Single runs and where they come from.

    Attributes:
        source: Their origin.
        runs: What was measured; ``device_memory_bytes`` and ``gpu_types`` are known.
    """

    source: DataSource
    runs: Runs


def read_run_data(
    path: Path | str,
    mode: str | None = None,
    licence: str | None = None,
    gpu_type: str | None = None,
    device_memory_bytes: float | None = None,
) -> RunData:
    """Read single runs.

    Args:
        path: The name of a shipped data set, a folder of the measurement suite (a run or its tables), the folder of
            the alnair data, or any table with our column names (``docs/characterisation.md``).
        mode: Of a suite's measurements, how the GPU was shared meanwhile; None = time slicing, where it was measured.
        licence: Licence of the data in words; needed where the form does not tell, else kept beside what it tells.
        gpu_type: The GPU type, as GPUs announce themselves. Of a suite's measurements the one to take; needed where
            the form does not tell.
        device_memory_bytes: Memory of the device, where the form does not tell.

    Raises:
        DataError: There is nothing, it cannot be used, or its licence or GPU type is not known.
    """
    path = path if isinstance(path, str) and path in shipped() else Path(path)
    known = OWN_LICENCE if isinstance(path, str) else None
    if isinstance(path, Path) and not path.exists():
        raise DataError(f"{path}: there is nothing; give a folder, a file, or a shipped name ({', '.join(shipped())})")
    if isinstance(path, Path) and (path.name == alnair.DATASET or (path / alnair.DATASET).exists()):
        runs, known = replace(alnair.load_alnair(path).runs, gpu_types=(gpu_type or P100,)), _ALNAIR_LICENCE
    elif isinstance(path, str) or path.is_dir():
        runs, _ = own_runs(load_colocation(path), mode, gpu_type)
    else:
        if gpu_type is None:
            raise DataError(f"{path}: its GPU type is not known; give it with --gpu-type, as the GPU announces itself")
        runs = replace(read_runs(path, {}, device_memory_bytes), gpu_types=(gpu_type,))
    if runs.device_memory_bytes is None and device_memory_bytes is None:
        raise DataError(f"{path}: the memory of its device is not known; give it with --device-memory")
    runs = replace(runs, device_memory_bytes=runs.device_memory_bytes or device_memory_bytes)
    source = DataSource(
        f"{Path(path).name}: single runs, {', '.join(runs.gpu_types)}",
        needed_licence(None if isinstance(path, str) else licence, known, path),
        runs_fingerprint(runs),
        len(runs.table),
    )
    return RunData(source, runs)


def runs_fingerprint(runs: Runs) -> str:
    """Return the SHA-256 of what was measured of whom, whatever the order."""
    names = [name for name in (*RUN_COLUMNS, "util_mean", "parameters") if name in runs.table]
    lines = [
        "\t".join(f"{value:.9g}" if isinstance(value, float) else str(value) for value in row)
        for row in runs.table[names].itertuples(index=False)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


__all__ = ["RunData", "read_run_data", "runs_fingerprint"]
