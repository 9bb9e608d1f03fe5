"""Loaders of published co-location measurements: each becomes a ``PairTable``.

Formats: the tables of Lucid (``single_data.csv``, ``colocate_info.csv``), the throughput file of Gavel (JSON, gzipped
or not), a matrix of slowdowns under MPS and a table of packed run times as transcribed from the Alnair project's pages.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Jobs, PairTable

MIB = float(1 << 20)
GAVEL_GPUS = ("v100", "p100", "k80")
_PERCENT = (0.0, 100.0)
_POSITIVE = (1e-9, 1e15)
_NORMALISED = (1e-9, 10.0)  # noise carries a throughput a little above 1; ten times as fast as alone is a mistake
_LEAST = 1e-3  # a published throughput of 0 means: did not move; a rate of 0 has no logarithm
_LUCID_JOB = ("model", "dataset", "batchsize", "amp")


class PairFileError(ValueError):
    """A file of measured pairs that cannot be used; the message names the file and what is missing."""


def load_lucid(folder: Path) -> PairTable:
    """Read Lucid's pairs: rows 2k and 2k + 1 are the two directions of pair k.

    Features: utilisation, bandwidth utilisation, log of the step time in s (batch / samples per s), log of the memory
    in bytes.

    Args:
        folder: With ``single_data.csv`` and ``colocate_info.csv``.

    Raises:
        PairFileError: A file or column is missing, or a pair names a job without a solo run.
    """
    numbers = {
        "batchsize": _POSITIVE,
        "speed": _POSITIVE,
        "gpu_util": _PERCENT,
        "gmem_util": _PERCENT,
        "gmem": _POSITIVE,
    }
    solo = _csv(folder / "single_data.csv", (*_LUCID_JOB, "speed", "gpu_util", "gmem_util", "gmem"), numbers)
    pairs = _csv(
        folder / "colocate_info.csv",
        [f"{name}{k}" for k in (1, 2) for name in (*_LUCID_JOB, "speed")],
        {"speed1": _NORMALISED, "speed2": _NORMALISED},
    )
    known: dict[str, list[float]] = {}
    for row in solo.itertuples(index=False):
        key = _lucid_id(row.model, row.dataset, row.batchsize, row.amp)
        step = math.log(float(row.batchsize) / float(row.speed))
        known[key] = [float(row.gpu_util) / 100.0, float(row.gmem_util) / 100.0, step, math.log(float(row.gmem) * MIB)]
    rows: list[tuple[str, str, float]] = []
    for row in pairs.itertuples(index=False):
        a = _lucid_id(row.model1, row.dataset1, row.batchsize1, row.amp1)
        b = _lucid_id(row.model2, row.dataset2, row.batchsize2, row.amp2)
        rows += [(a, b, float(row.speed1)), (b, a, float(row.speed2))]
    strangers = sorted({name for a, b, _ in rows for name in (a, b)} - set(known))
    if strangers:
        raise PairFileError(f"{folder / 'colocate_info.csv'}: no solo run of {strangers[0]} in single_data.csv")
    families = {name: name.split("|")[0] for name in known}
    return _table((UTIL, BANDWIDTH, STEP, MEMORY), known, families, rows)


def load_alnair_mps(path: Path) -> PairTable:
    """Read the directional matrix of slowdowns under MPS. Features: utilisation, log of the step time in s.

    Raises:
        PairFileError: The file or a column is missing.
    """
    columns = ("job", "batch", "gpu_util_pct", "solo_us_per_10steps")
    frame = _csv(
        path,
        (*columns, "peer", "peer_batch", "peer_gpu_util_pct", "peer_solo_us_per_10steps", "slowdown_ratio"),
        {
            "gpu_util_pct": _PERCENT,
            "peer_gpu_util_pct": _PERCENT,
            "solo_us_per_10steps": _POSITIVE,
            "peer_solo_us_per_10steps": _POSITIVE,
            "slowdown_ratio": (0.1, 1e6),
        },
    )
    known: dict[str, list[float]] = {}
    families: dict[str, str] = {}
    rows: list[tuple[str, str, float]] = []
    for row in frame.itertuples(index=False):
        a, b = f"{row.job}:{row.batch}", f"{row.peer}:{row.peer_batch}"
        known[a] = [float(row.gpu_util_pct) / 100.0, math.log(float(row.solo_us_per_10steps) / 1e7)]
        known[b] = [float(row.peer_gpu_util_pct) / 100.0, math.log(float(row.peer_solo_us_per_10steps) / 1e7)]
        families |= {a: str(row.job), b: str(row.peer)}
        rows.append((a, b, 1.0 / float(row.slowdown_ratio)))
    return _table((UTIL, STEP), known, families, rows)


def load_alnair_pairs(path: Path) -> PairTable:
    """Read the packed run times: throughput = solo time / packed time, both directions; it has no features.

    Raises:
        PairFileError: The file or a column is missing.
    """
    seconds = ("solo1_s", "solo2_s", "packed1_s", "packed2_s")
    frame = _csv(path, ("task1", "task2", *seconds), dict.fromkeys(seconds, _POSITIVE))
    rows: list[tuple[str, str, float]] = []
    for row in frame.itertuples(index=False):
        rows.append((str(row.task1), str(row.task2), float(row.solo1_s) / float(row.packed1_s)))
        rows.append((str(row.task2), str(row.task1), float(row.solo2_s) / float(row.packed2_s)))
    known: dict[str, list[float]] = {name: [] for a, b, _ in rows for name in (a, b)}
    return _table((), known, {name: name.split("_")[0] for name in known}, rows)


def load_gavel(path: Path, gpu: str) -> PairTable:
    """Read Gavel's single-GPU pairs on one GPU type; pairs that do not fit are left out.

    There is no utilisation. Features: log of the batch, log of the solo rate on this GPU type, logs of the ratios of
    solo rates between types, and for every type logs of steps and samples per second and the samples' rate
    relative to the family's best batch size.

    Args:
        path: ``simulation_throughputs.json``, gzipped or not.
        gpu: One of ``GAVEL_GPUS``.

    Raises:
        PairFileError: The file is missing or is not of this format.
    """
    if gpu not in GAVEL_GPUS:
        raise PairFileError(f"gpu {gpu!r} is not accepted; give one of {', '.join(GAVEL_GPUS)}")
    raw = _gavel_json(path)
    jobs = [job for job in raw[gpu] if job.endswith(", 1)")]
    title = {job: re.sub(r"^\('|', 1\)$", "", job) for job in jobs}
    family = {job: name.split(" (")[0] for job, name in title.items()}
    batch = {job: _batch(name) for job, name in title.items()}
    try:
        solo = {(kind, job): max(float(raw[kind][job]["null"]), _LEAST) for kind in GAVEL_GPUS for job in jobs}
    except (KeyError, TypeError) as error:
        raise PairFileError(f"{path}: no solo rate: {error}") from error
    known: dict[str, list[float]] = {}
    for job in jobs:
        samples = {kind: solo[kind, job] * batch[job] for kind in GAVEL_GPUS}
        same = [each for each in jobs if family[each] == family[job]]
        best = {kind: max(solo[kind, each] * batch[each] for each in same) for kind in GAVEL_GPUS}
        rates = {kind: math.log(solo[kind, job]) for kind in GAVEL_GPUS}
        known[title[job]] = [
            math.log(batch[job]),
            rates[gpu],
            rates["v100"] - rates["k80"],
            rates["v100"] - rates["p100"],
            *rates.values(),
            *(math.log(value) for value in samples.values()),
            *(samples[kind] / best[kind] for kind in GAVEL_GPUS),
        ]
    rows = [
        (title[a], title[b], max(_LEAST, float(raw[gpu][a][b][0]) / solo[gpu, a]))
        for a in jobs
        for b in jobs
        if b in raw[gpu][a] and float(raw[gpu][a][b][0]) > 0.0
    ]
    names = ("log_batch", "log_rate", "log_v100_k80", "log_v100_p100")
    every = tuple(f"{what}_{kind}" for what in ("log_rate", "log_samples", "saturation") for kind in GAVEL_GPUS)
    return _table((*names, *every), known, {title[job]: family[job] for job in jobs}, rows)


def _table(
    names: tuple[str, ...],
    known: Mapping[str, Sequence[float]],
    families: Mapping[str, str],
    rows: Sequence[tuple[str, str, float]],
) -> PairTable:
    used = sorted({name for a, b, _ in rows for name in (a, b)})
    place = {name: k for k, name in enumerate(used)}
    features = np.array([known[name] for name in used], dtype=np.float64).reshape(len(used), len(names))
    return PairTable(
        names,
        Jobs(tuple(used), tuple(families[name] for name in used), features),
        np.array([place[a] for a, _, _ in rows], dtype=np.intp),
        np.array([place[b] for _, b, _ in rows], dtype=np.intp),
        np.array([value for *_, value in rows], dtype=np.float64),
    )


def _csv(path: Path, columns: Sequence[str], limits: Mapping[str, tuple[float, float]]) -> Any:
    """Read the columns of a table; ``limits`` are those of the numbers among them."""
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise PairFileError(f"{path}: cannot be read: {error}") from error
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise PairFileError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
    if frame.empty:
        raise PairFileError(f"{path}: it has no rows")
    for name in columns:
        values = frame[name]
        bad = np.flatnonzero(values.isna().to_numpy())
        if len(bad):
            raise PairFileError(f"{path}: line {int(bad[0]) + 2}: column {name!r} is empty")
        if name in limits:
            least, most = limits[name]
            bad = np.flatnonzero(~pd.to_numeric(values, errors="coerce").between(least, most).to_numpy())
            if len(bad):
                raise PairFileError(
                    f"{path}: line {int(bad[0]) + 2}: column {name!r}: {values.iloc[bad[0]]!s:.40} is not accepted; "
                    f"give a number from {least:g} to {most:g}"
                )
    return frame


def _gavel_json(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        raw = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise PairFileError(f"{path}: cannot be read: {error}") from error
    missing = [kind for kind in GAVEL_GPUS if not isinstance(raw, dict) or not isinstance(raw.get(kind), dict)]
    if missing:
        raise PairFileError(f"{path}: GPU type {missing[0]!r} is missing; expected {', '.join(GAVEL_GPUS)}")
    return dict(raw)


def _lucid_id(model: object, dataset: object, batch: object, amp: object) -> str:
    return f"{model}|{dataset}|{batch}|{amp}"


def _batch(title: str) -> float:
    found = re.search(r"batch size (\d+)", title)
    return float(found.group(1)) if found else 1.0
