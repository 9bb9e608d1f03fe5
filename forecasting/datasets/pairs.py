"""Loaders of published co-location measurements: each becomes a ``PairTable``.

Formats: the tables of Lucid (``single_data.csv``, ``colocate_info.csv``), the throughput file of Gavel (JSON, gzipped
or not), the tables of a reproduction of Gpulet (``inference.csv``, ``interference.csv``, ``mem_util.csv``), a matrix of
slowdowns under MPS and a table of packed run times as transcribed from the Alnair project's pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.forecasting.datasets.published import MIB, PERCENT, POSITIVE, read_csv, read_json
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Jobs, PairTable

GAVEL_GPUS = ("v100", "p100", "k80")
_NORMALISED = (1e-9, 10.0)  # noise carries a throughput a little above 1; ten times as fast as alone is a mistake
_LEAST = 1e-3  # a published throughput of 0 means: did not move; a rate of 0 has no logarithm
_BATCH = (1.0, 1e9)
_GPULET_USE = ("mem_util", "l2_util")  # percent
_LUCID_JOB = ("model", "dataset", "batchsize", "amp")


def load_lucid(folder: Path) -> PairTable:
    """Read Lucid's pairs: rows 2k and 2k + 1 are the two directions of pair k.

    Features: utilisation, bandwidth utilisation, log of the step time in s (batch / samples per s), log of the memory
    in bytes.

    Args:
        folder: With ``single_data.csv`` and ``colocate_info.csv``.

    Raises:
        DataError: A file or column is missing, or a pair names a job without a solo run.
    """
    numbers = {
        "batchsize": POSITIVE,
        "speed": POSITIVE,
        "gpu_util": PERCENT,
        "gmem_util": PERCENT,
        "gmem": POSITIVE,
    }
    solo = read_csv(folder / "single_data.csv", (*_LUCID_JOB, "speed", "gpu_util", "gmem_util", "gmem"), numbers)
    pairs = read_csv(
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
        raise DataError(f"{folder / 'colocate_info.csv'}: no solo run of {strangers[0]} in single_data.csv")
    families = {name: name.split("|")[0] for name in known}
    return _table((UTIL, BANDWIDTH, STEP, MEMORY), known, families, rows)


def load_alnair_mps(path: Path) -> PairTable:
    """Read the directional matrix of slowdowns under MPS. Features: utilisation, log of the step time in s.

    Raises:
        DataError: The file or a column is missing.
    """
    columns = ("job", "batch", "gpu_util_pct", "solo_us_per_10steps")
    frame = read_csv(
        path,
        (*columns, "peer", "peer_batch", "peer_gpu_util_pct", "peer_solo_us_per_10steps", "slowdown_ratio"),
        {
            "gpu_util_pct": PERCENT,
            "peer_gpu_util_pct": PERCENT,
            "solo_us_per_10steps": POSITIVE,
            "peer_solo_us_per_10steps": POSITIVE,
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
        DataError: The file or a column is missing.
    """
    seconds = ("solo1_s", "solo2_s", "packed1_s", "packed2_s")
    frame = read_csv(path, ("task1", "task2", *seconds), dict.fromkeys(seconds, POSITIVE))
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
        DataError: The file is missing or is not of this format.
    """
    if gpu not in GAVEL_GPUS:
        raise DataError(f"gpu {gpu!r} is not accepted; give one of {', '.join(GAVEL_GPUS)}")
    raw = _gavel_json(path)
    jobs = [job for job in raw[gpu] if job.endswith(", 1)")]
    title = {job: re.sub(r"^\('|', 1\)$", "", job) for job in jobs}
    family = {job: name.split(" (")[0] for job, name in title.items()}
    batch = {job: _batch(name) for job, name in title.items()}
    try:
        solo = {(kind, job): max(float(raw[kind][job]["null"]), _LEAST) for kind in GAVEL_GPUS for job in jobs}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: no solo rate: {error}") from error
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


def load_gpulet(folder: Path) -> PairTable:
    """Read Gpulet's pairs: inference under MPS, the victim with a part of the GPU and its peer with the rest.

    A job is a model with its batch and its part, ``vgg19:4@20%``; its throughput is divided by what it has alone with
    the same batch and part. Features: bandwidth utilisation (of DRAM; NaN where ``mem_util.csv`` does not tell), log of
    the step time in s (batch / requests per s). There is no utilisation.

    Args:
        folder: With ``inference.csv``, ``interference.csv`` and ``mem_util.csv``, gzipped or not.

    Raises:
        DataError: A file is missing or is not of this format, or a pair names a job without a solo run.
    """
    alone, traffic = _gpulet(folder, "inference", ("throughput", "latency")), _gpulet(folder, "mem_util", _GPULET_USE)
    pairs = _gpulet(folder, "interference", ("throughput", "latency"), ("peer", "peer_batch"))
    used = {
        _gpulet_id(row.model, row.batch, row.mps_pct): float(row.mem_util) / 100.0
        for row in traffic.itertuples(index=False)
    }
    rates: dict[str, float] = {}
    known: dict[str, list[float]] = {}
    families: dict[str, str] = {}
    for row in alone.itertuples(index=False):
        job = _gpulet_id(row.model, row.batch, row.mps_pct)
        rates[job], families[job] = float(row.throughput), str(row.model)
        known[job] = [used.get(job, math.nan), math.log(float(row.batch) / float(row.throughput))]
    rows: list[tuple[str, str, float]] = []
    for line, row in enumerate(pairs.itertuples(index=False), 1):
        a = _gpulet_id(row.model, row.batch, row.mps_pct)
        b = _gpulet_id(row.peer, row.peer_batch, 100.0 - float(row.mps_pct))
        where = f"{_gpulet_file(folder, 'interference')}: line {line}"
        if stranger := next((job for job in (a, b) if job not in known), None):
            raise DataError(f"{where}: no solo run of {stranger} in inference.csv")
        normalised = float(row.throughput) / rates[a]
        if normalised > _NORMALISED[1]:
            raise DataError(
                f"{where}: column 'throughput': {row.throughput} is not accepted; {a} has {rates[a]:g} alone, "
                f"give at most {_NORMALISED[1]:g} times that"
            )
        rows.append((a, b, normalised))
    return _table((BANDWIDTH, STEP), known, families, rows)


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


def _gavel_json(path: Path) -> dict[str, Any]:
    raw = read_json(path)
    missing = [kind for kind in GAVEL_GPUS if not isinstance(raw, dict) or not isinstance(raw.get(kind), dict)]
    if missing:
        raise DataError(f"{path}: GPU type {missing[0]!r} is missing; expected {', '.join(GAVEL_GPUS)}")
    return dict(raw)


def _gpulet(folder: Path, name: str, values: Sequence[str], peer: Sequence[str] = ()) -> Any:
    """Read a table without a head: the job, its peer, then every value after its name; the last column is a mark."""
    keys = ("model", "batch", "mps_pct", *peer)
    names = (*keys, *(part for value in values for part in (f"{value}:", value)), "mark")
    limits = {"batch": _BATCH, "peer_batch": _BATCH, "mps_pct": (1.0, 99.0 if peer else 100.0)}
    limits |= dict.fromkeys(values, PERCENT if values == _GPULET_USE else POSITIVE)
    path = _gpulet_file(folder, name)
    frame = read_csv(path, names[:-1], limits, names=names)
    for value in values:
        strange = np.flatnonzero((frame[f"{value}:"] != value).to_numpy())
        if len(strange):
            said = frame[f"{value}:"].iloc[strange[0]]
            raise DataError(f"{path}: line {int(strange[0]) + 1}: {said!s:.40} is not accepted before {value!r}")
    return frame


def _gpulet_file(folder: Path, name: str) -> Path:
    packed = folder / f"{name}.csv.gz"
    return packed if packed.exists() else folder / f"{name}.csv"


def _gpulet_id(model: object, batch: Any, mps_pct: Any) -> str:
    return f"{model}:{float(batch):g}@{float(mps_pct):g}%"


def _lucid_id(model: object, dataset: object, batch: object, amp: object) -> str:
    return f"{model}|{dataset}|{batch}|{amp}"


def _batch(title: str) -> float:
    found = re.search(r"batch size (\d+)", title)
    return float(found.group(1)) if found else 1.0
