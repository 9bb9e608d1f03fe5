"""Loaders of recorded utilisation and memory over time, cut into the series that forecasters learn from.

Two formats: ``nvidia-smi --query-gpu=timestamp,power.draw,utilization.gpu,memory.used --format=csv`` in a loop, whose
rows of several GPUs are interleaved; and the pod metrics of a public cluster trace, one row per pod and minute.
A reading that cannot be read is NaN, never 0.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cotenant.forecasting.datasets.published import as_numbers

Floats = npt.NDArray[np.float64]

MIB = float(1 << 20)
BURST_GAP_S = 0.05  # rows of one reading of all GPUs follow each other faster than this
BRIDGED_S = 10.0  # a silence up to here is filled in; a longer one, or a clock that jumped, ends what belongs together
POD_GAP_S = 180.0  # a pod silent for longer counts as a new series
SMI_COLUMNS = ("timestamp", "power.draw", "utilization.gpu", "memory.used")
POD_COLUMNS = ("container_ip", "timestamp_anon", "value")


@dataclass(frozen=True, slots=True)
class DeviceSeries:
    """Readings of one GPU in order of time.

    Attributes:
        source: Name of the file it was read from; the group that a hold-out must keep together.
        device: Position of the GPU among the file's GPUs.
        seconds: Times of the readings, Unix seconds, shape (n,).
        util: Utilisation in [0, 1], shape (n,); NaN = not read.
        memory_bytes: Device memory in use, shape (n,); NaN = not read.
        power_w: Power, shape (n,); NaN = not read.
    """

    source: str
    device: int
    seconds: Floats
    util: Floats
    memory_bytes: Floats
    power_w: Floats


@dataclass(frozen=True, slots=True)
class ValueSeries:
    """One quantity at (nearly) equal steps: ``source`` is the group of a hold-out, ``values`` of shape (n,)."""

    source: str
    name: str
    values: Floats


def read_nvidia_smi(path: Path) -> list[DeviceSeries]:
    """Read one recording; its rows may have units behind the numbers, and its GPUs are told apart by their order.

    Rows come in bursts, one row per GPU. Bursts with more or fewer rows than most are dropped: nobody can say which
    GPU is missing.

    Args:
        path: A CSV file, gzip-compressed if its name says so.

    Raises:
        ValueError: A column is missing, or no row can be read.
    """
    table = pd.read_csv(path, skipinitialspace=True, dtype=str)
    found = {wanted: next((c for c in table.columns if c.split(" ")[0] == wanted), None) for wanted in SMI_COLUMNS}
    missing = [wanted for wanted, column in found.items() if column is None]
    if missing:
        raise ValueError(f"{path.name}: no column {', '.join(missing)}; found {', '.join(map(str, table.columns))}")
    stamps = pd.to_datetime(table[found["timestamp"]], errors="coerce", format="mixed")
    frame = pd.DataFrame({name: _numbers(table[found[name]]) for name in SMI_COLUMNS[1:]})
    frame["seconds"] = (stamps - pd.Timestamp(0)) / pd.Timedelta(seconds=1)
    frame = frame.dropna().reset_index(drop=True)
    if frame.empty:
        raise ValueError(f"{path.name}: no row has a time and numbers for {', '.join(SMI_COLUMNS[1:])}")
    burst = (frame["seconds"].diff().abs().fillna(1.0) > BURST_GAP_S).cumsum()
    frame["device"] = frame.groupby(burst).cumcount()
    size = frame.groupby(burst)["device"].transform("size")
    usual = int(frame.groupby(burst).size().mode().iloc[0])
    frame = frame[size == usual]
    return [_device(path.name, int(str(device)), rows) for device, rows in frame.groupby("device")]


def windows(series: DeviceSeries, window_s: float = 1.0) -> tuple[Floats, Floats]:
    """Cut a recording into windows aligned to whole multiples of ``window_s``.

    Returns:
        Mean utilisation and largest memory in bytes per window, each of shape (windows,). Windows without a reading
        are filled in linearly between their neighbours; of a silence of more than ``BRIDGED_S`` one NaN remains.
    """
    index, window = np.unique(np.floor(series.seconds / window_s).astype(np.int64), return_inverse=True)
    missing = np.diff(index, prepend=index[0] - 1) - 1
    broken = missing * window_s > BRIDGED_S
    place = np.cumsum(np.where(broken, 2, missing + 1)) - 1
    frame = pd.DataFrame({"util": series.util, "memory": series.memory_bytes}).groupby(place[window])
    whole = pd.concat([frame["util"].mean(), frame["memory"].max()], axis=1).reindex(range(int(place[-1]) + 1))
    filled = whole.interpolate().to_numpy(dtype=np.float64)
    filled[place[broken] - 1] = np.nan
    return filled[:, 0], filled[:, 1]


def read_pod_metric(path: Path, scale: float = 1.0, shortest: int = 200) -> list[ValueSeries]:
    """Read one metric of the pods of a cluster trace from its ``.csv`` or ``.tar.gz``.

    Args:
        path: A CSV file with the columns ``container_ip``, ``timestamp_anon`` (s) and ``value``, or an archive of one.
        scale: What a value is divided by.
        shortest: Series of fewer values are left out.

    Returns:
        One series per pod and uninterrupted stretch (gaps up to ``POD_GAP_S``), by pod and time.

    Raises:
        ValueError: A column is missing or holds no numbers, or an archive does not hold exactly one file.
    """
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            content = archive.extractfile(members[0]) if len(members) == 1 else None
            if content is None:
                raise ValueError(f"{path.name}: holds {len(members)} files; give an archive of one CSV file")
            table = pd.read_csv(content)
    else:
        table = pd.read_csv(path)
    missing = [column for column in POD_COLUMNS if column not in table.columns]
    if missing:
        raise ValueError(f"{path.name}: no column {', '.join(missing)}; found {', '.join(map(str, table.columns))}")
    for column in POD_COLUMNS[1:]:
        table[column] = _finite(path, column, table[column])
    series: list[ValueSeries] = []
    for pod, rows in table.sort_values(["container_ip", "timestamp_anon"]).groupby("container_ip"):
        breaks = np.flatnonzero(rows["timestamp_anon"].diff().to_numpy() > POD_GAP_S)
        parts: Sequence[Floats] = np.split(rows["value"].to_numpy(dtype=np.float64) / scale, breaks)
        series += [ValueSeries(str(pod), f"{pod}/{i}", part) for i, part in enumerate(parts) if len(part) > shortest]
    return series


def _finite(path: Path, name: str, column: pd.Series[Any]) -> Floats:
    numbers = as_numbers(column).to_numpy(dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        shown = f"{column.iloc[bad[0]]!s:.40}"
        raise ValueError(f"{path.name}: line {bad[0] + 2}: column {name!r}: {shown} is not accepted; give a number")
    return numbers


def _numbers(column: pd.Series[str]) -> Floats:
    digits = column.astype(str).str.extract(r"(-?\d+(?:\.\d+)?)", expand=False)
    return pd.to_numeric(digits, errors="coerce").to_numpy(dtype=np.float64)


def _device(source: str, device: int, rows: pd.DataFrame) -> DeviceSeries:
    rows = rows.sort_values("seconds", kind="stable")
    return DeviceSeries(
        source=source,
        device=device,
        seconds=rows["seconds"].to_numpy(dtype=np.float64),
        util=rows["utilization.gpu"].to_numpy(dtype=np.float64) / 100.0,
        memory_bytes=rows["memory.used"].to_numpy(dtype=np.float64) * MIB,
        power_w=rows["power.draw"].to_numpy(dtype=np.float64),
    )
