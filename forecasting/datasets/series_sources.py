"""Recorded demand from any of the accepted forms, as series with their origin and licence."""

from __future__ import annotations

import hashlib
import tarfile
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from cotenant.forecasting.datasets.model_card import DataSource
from cotenant.forecasting.datasets.pair_sources import needed_licence
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.series import (
    MIB,
    DeviceSeries,
    ValueSeries,
    read_nvidia_smi,
    read_pod_metric,
    windows,
)
from cotenant.forecasting.datasets.signature_store import FINGERPRINT, SignatureFileError, load_signatures

SeriesFormat = Literal["signatures", "nvidia-smi", "genai"]
SERIES_FORMATS: tuple[SeriesFormat, ...] = get_args(SeriesFormat)
GENAI_LICENCE = "cluster-trace-v2026-GenAI: research use"
GENAI_TICK_S = 57.0
MOST_BYTES = float(1 << 50)
MOST_UTIL, MOST_PERCENT = 1.1, 110.0  # a little above 1 is rounding
FEW_ABSURD = 0.01  # of the readings: a driver that slipped; more is another unit or another column
LEAST_TICKS = 60  # windows a job must have to be worth learning from

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SeriesData:
    """Recorded series and where they come from.

    Attributes:
        source: Their origin; ``rows`` is the number of ticks.
        util: Utilisation in [0, 1]; the ``source`` of a series is what a hold-out keeps together.
        memory: Device memory in bytes.
        tick_s: Seconds from one value to the next.
    """

    source: DataSource
    util: tuple[ValueSeries, ...]
    memory: tuple[ValueSeries, ...]
    tick_s: float


def read_series_data(path: Path, form: SeriesFormat | None = None, licence: str | None = None) -> SeriesData:
    """Read recorded demand.

    Args:
        path: A signature store; a file of ``nvidia-smi``, or a folder of such; a metric of the pods of a cluster trace
            (its name tells which), or a folder of such.
        form: Which form it has; None finds out.
        licence: Licence of the data in words; needed where the form does not tell, else kept beside what it tells.

    Raises:
        DataError: There is nothing, it cannot be used, or its licence is not known.
    """
    form = form or series_format(path)
    if form == "signatures":
        util, memory, tick_s = *from_signatures(path), 1.0
    elif form == "nvidia-smi":
        util, memory, tick_s = *_from_nvidia_smi(path), 1.0
    else:
        util, memory, tick_s = *_from_genai(path), GENAI_TICK_S
    ticks = sum(len(each.values) for each in (util or memory))
    if not ticks:
        raise DataError(f"{path}: there is no series of at least {LEAST_TICKS} values in it")
    groups = len({each.source for each in (util or memory)})
    source = DataSource(
        f"{path.name}: {_WORDS[form]}, {len(util or memory)} series of {groups} sources",
        needed_licence(licence, GENAI_LICENCE if form == "genai" else None, path),
        series_fingerprint([*util, *memory]),
        ticks,
    )
    return SeriesData(source, tuple(util), tuple(memory), tick_s)


def series_format(path: Path) -> SeriesFormat:
    """Find out which form the data have.

    Raises:
        DataError: None of the known ones.
    """
    if not path.exists():
        raise DataError(f"{path}: there is nothing; give a folder or a file")
    if path.is_dir():
        if any(path.glob("date=*")):
            return "signatures"
        if _pod_files(path):
            return "genai"
        if _smi_files(path):
            return "nvidia-smi"
    elif path.name.endswith(".tar.gz"):
        return "genai"
    elif path.name.endswith((".csv", ".csv.gz")):
        return "genai" if "container_ip" in _first_line(path) else "nvidia-smi"
    raise DataError(f"{path}: its form is not known; say which with --format: {', '.join(SERIES_FORMATS)}")


def series_fingerprint(series: Iterable[ValueSeries]) -> str:
    """Return the SHA-256 of series, whatever their order."""
    parts = sorted(f"{each.source}\t{each.name}\t".encode() + each.values.tobytes() for each in series)
    return hashlib.sha256(b"\n".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def newest(series: Sequence[ValueSeries], most_ticks: int) -> list[ValueSeries]:
    """Return the newest series, the last ones, that have together at most so many ticks; the first is cut."""
    kept: list[ValueSeries] = []
    for each in reversed(series):
        if most_ticks <= 0:
            break
        kept.append(replace(each, values=each.values[-most_ticks:]))
        most_ticks -= len(each.values)
    return kept[::-1]


def from_signatures(root: Path, since: float | None = None) -> tuple[list[ValueSeries], list[ValueSeries]]:
    """Make series of the windows of a signature store: one per job and GPU, of one value per window.

    A window in which the job was held back by its own share shows less than the job wants: its utilisation is divided
    by the rest of the time, as the forecaster does. Missing windows are NaN. The source of a series is the fingerprint
    of the job's program, else the job.

    Args:
        root: The store.
        since: Unix seconds; only windows that began then or later.

    Returns:
        Series of utilisation, and of memory, in order of the first window of their source, then their own.

    Raises:
        DataError: There is no store, or a newer cotenant wrote it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files that cannot be read are left out
            frame = load_signatures(root, since=since)
    except (FileNotFoundError, SignatureFileError) as error:
        raise DataError(str(error)) from error
    frame = frame[(frame["window_s"] > 0.0) & np.isfinite(frame["start_s"])]
    util: list[ValueSeries] = []
    memory: list[ValueSeries] = []
    source_of = frame[FINGERPRINT].where(frame[FINGERPRINT].astype(bool), frame["job_id"]).astype(str)
    order = {source: place for place, source in enumerate(dict.fromkeys(source_of))}
    frame = frame.assign(source=source_of)
    for (source, job, gpu), rows in sorted(
        frame.groupby(["source", "job_id", "gpu_id"], sort=False),
        key=lambda each: (order[str(each[0][0])], float(each[1]["start_s"].iloc[0])),
    ):
        if len(rows) < LEAST_TICKS:
            continue
        name = f"{job} on {gpu}"
        held = rows["throttled_fraction"].fillna(0.0).clip(0.0, 0.99)
        wanted = (_sensible(rows["util_mean"], MOST_UTIL) / (1.0 - held)).clip(upper=1.0)
        for values, found in ((wanted, util), (_sensible(rows["memory_bytes"], MOST_BYTES), memory)):
            regular = _regular(rows["start_s"], rows["window_s"], values)
            if np.isfinite(regular).sum() >= LEAST_TICKS:
                found.append(ValueSeries(str(source), name, regular))
    return util, memory


def _sensible(values: pd.Series[Any], most: float) -> pd.Series[Any]:
    return values.where((values >= 0.0) & (values <= most))


def _regular(starts: pd.Series[Any], lengths: pd.Series[Any], values: pd.Series[Any]) -> Floats:
    """Put values at their place in time, one per window; NaN where there was none. Long silence becomes one gap."""
    length = float(lengths.median())
    ticks = np.round((starts.to_numpy(dtype=np.float64) - float(starts.iloc[0])) / length).astype(np.int64)
    steps = np.minimum(np.diff(ticks, prepend=ticks[0]), 2)  # however long it was, nothing is learnt across it
    place = np.cumsum(np.maximum(steps, 0))
    regular = np.full(int(place[-1]) + 1, np.nan)
    regular[place] = values.to_numpy(dtype=np.float64)
    return regular


def _from_nvidia_smi(path: Path) -> tuple[list[ValueSeries], list[ValueSeries]]:
    util, memory = [], []
    files = _smi_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: there is no .csv or .csv.gz in it")
    for file in files:
        for device in _read(file, lambda file=file: read_nvidia_smi(file)):
            sound = replace(
                device,
                util=_plausible(file, device, "utilization.gpu", device.util * 100.0, MOST_PERCENT) / 100.0,
                memory_bytes=_plausible(file, device, "memory.used", device.memory_bytes / MIB, MOST_BYTES / MIB) * MIB,
            )
            cut = windows(sound)
            name = f"GPU {device.device}"
            util.append(ValueSeries(device.source, name, cut[0].clip(max=1.0)))
            memory.append(ValueSeries(device.source, name, cut[1]))
    return util, memory


def _plausible(file: Path, device: DeviceSeries, column: str, values: Floats, most: float) -> Floats:
    """Return readings without those few that cannot be.

    Raises:
        DataError: They are not few.
    """
    absurd = ~((values >= 0.0) & (values <= most))
    if absurd.mean() > FEW_ABSURD:
        raise DataError(
            f"{file}: column {column!r}: {int(absurd.sum())} of {len(values)} readings of GPU {device.device} are not "
            f"accepted, the first is {values[absurd][0]:g}; give 0 to {most:g}"
        )
    return np.where(absurd, np.nan, values)


def _from_genai(path: Path) -> tuple[list[ValueSeries], list[ValueSeries]]:
    found: dict[str, list[ValueSeries]] = {"duty_cycle": [], "memory_used": []}
    for file in _pod_files(path) if path.is_dir() else [path]:
        metric = next((each for each in found if each in file.name), None)
        if metric is None:
            raise DataError(f"{file}: its name must tell the metric: {', '.join(found)}")
        most = MOST_PERCENT if metric == "duty_cycle" else MOST_BYTES
        for each in _read(file, lambda file=file: read_pod_metric(file)):
            bad = np.flatnonzero(~((each.values >= 0.0) & (each.values <= most)))
            if len(bad):
                raise DataError(
                    f"{file}: column 'value': {each.values[bad[0]]:g} of pod {each.source} is not accepted; "
                    f"give 0 to {most:g}"
                )
            scale = 100.0 if metric == "duty_cycle" else 1.0
            found[metric].append(replace(each, values=each.values / scale))
    return found["duty_cycle"], found["memory_used"]


def _read(file: Path, read: Any) -> Any:
    try:
        return read()
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        text = str(error)
        raise DataError(text if text.startswith(file.name) else f"{file}: cannot be read: {text}") from error


def _smi_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])


def _pod_files(folder: Path) -> list[Path]:
    names = ("*duty_cycle*.tar.gz", "*duty_cycle*.csv", "*memory_used*.tar.gz", "*memory_used*.csv")
    return sorted(path for name in names for path in folder.glob(name))


def _first_line(file: Path) -> str:
    return ",".join(map(str, _read(file, lambda: pd.read_csv(file, nrows=0)).columns))


_WORDS: Mapping[SeriesFormat, str] = {
    "signatures": "signature store",
    "nvidia-smi": "recordings of nvidia-smi",
    "genai": "pods of a cluster trace",
}

__all__ = [
    "SERIES_FORMATS",
    "SeriesData",
    "SeriesFormat",
    "from_signatures",
    "newest",
    "read_series_data",
    "series_fingerprint",
    "series_format",
]
