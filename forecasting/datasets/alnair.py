"""The data set of the specification "AI workloads resource utilization characterization".

Source: github.com/CentaurusInfra/alnair, folder open-data/gpu-sharing (Apache-2.0): single runs of TensorFlow programs
on a Tesla P100. Beside its ``Dataset.csv`` three more files are read where they are there: the authors' table with
interpolated rows, their measured pairs, and directional slowdowns under MPS (transcribed from result tables).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cotenant.forecasting.characterisation.coldstart import normalised
from cotenant.forecasting.characterisation.tables import MEMORY, UTIL, Pairs, Role, Runs
from cotenant.forecasting.datasets.runs import make_pairs, make_runs, read_table, require
from cotenant.forecasting.datasets.schema import DataError

Array = npt.NDArray[np.float64]

DATASET = "Dataset.csv"
SYNTHETIC = "synthetic_and_real_175.csv"
PAIRS = "pairs_table_III_IV_transcribed.csv"
DIRECTED = "mps_slowdown_matrix_transcribed.csv"
DEVICE_MEMORY_BYTES = 16280 * 2.0**20  # Tesla P100, as nvidia-smi gives it

_REQUIRED = ("Model", "Dataset", "Epoch", "BS", "Run_Env", "MGUP", "MGMAP")
_BERT = re.compile(r"bert.*L-(\d+)_H-(\d+)_A-(\d+)")
_TASK = re.compile(r"(?P<name>.+)_bs(?P<batch>\d+)(_ep\d+)?")
_ALIASES = {"rl": "reinforcementlearning", "imageseg": "imagesegmentation"}
_GPU = ("GPU", "GTSAMP", "MGUP", "MGMAP")
_DERIVED = {"GPU_Util_%_ran"}  # = MGUP − Min_GPU_Util_%

# Weights of the networks in the authors' programs. The five image classifiers: their TF-Hub feature vectors (no top).
# DCGAN, segmentation (MobileNetV2 and four up-sampling blocks) and CartPole (4-100-50-2): counted from the layers.
_PARAMETERS: Mapping[str, float] = {
    "mobilenet": 3.23e6,
    "nasnetmobile": 4.27e6,
    "efficientnetv2": 20.3e6,
    "resnet50": 23.6e6,
    "inceptionv3": 21.8e6,
    "dcgan": 2.54e6,
    "imagesegmentation": 6.50e6,
    "reinforcementlearning": 5652.0,
}
_VOCABULARY, _POSITIONS = 30522, 512


@dataclass(frozen=True, slots=True)
class Alnair:
    """What there is of the data set.

    Attributes:
        runs: The single runs.
        pairs: The measured pairs, with the authors' clusters and reported figures; None without the file.
        synthetic: Target → architecture → (batch sizes, values) of the authors' table; empty without the file.
        parameters: Architecture → weights, as entered here.
    """

    runs: Runs
    pairs: Pairs | None
    synthetic: Mapping[str, Mapping[str, tuple[Array, Array]]]
    parameters: Mapping[str, float]


def load_alnair(source: Path) -> Alnair:
    """Load the data set.

    Args:
        source: Its folder, or its ``Dataset.csv``.

    Raises:
        DataError: A file cannot be read, lacks a column, is empty, or has a value that is not accepted.
    """
    folder, file = (source, source / DATASET) if source.is_dir() else (source.parent, source)
    runs = load_runs(file)
    pairs = load_pairs(folder / PAIRS) if (folder / PAIRS).exists() else None
    if pairs is not None and (folder / DIRECTED).exists():
        pairs = Pairs(pairs.table, load_directed(folder / DIRECTED))
    synthetic = load_synthetic(folder / SYNTHETIC, runs) if (folder / SYNTHETIC).exists() else {}
    known = runs.table.groupby("architecture")["parameters"].first()
    return Alnair(runs, pairs, synthetic, {str(name): float(value) for name, value in known.items()})


def load_runs(file: Path) -> Runs:
    """Load ``Dataset.csv``: all its numbers are features, the spread of the utilisation is marked as derived."""
    table = read_table(file)
    require(file.name, table, _REQUIRED)
    if table["Model"].isna().any():
        raise DataError(
            f"{file.name}: column 'Model', row {int(table['Model'].isna().argmax()) + 1}: it is empty; give a name"
        )
    models = table["Model"].astype(str).str.strip()
    names = [_architecture(name) for name in models]
    rows = table.drop(columns=["ID", "Model", "Dataset"], errors="ignore").rename(
        columns={"BS": "batch", "MGUP": UTIL, "MGMAP": MEMORY, "Epoch": "epochs"}
    )
    rows["family"] = [family for family, _, _ in names]
    rows["architecture"] = [architecture for _, architecture, _ in names]
    rows["parameters"] = [parameters for _, _, parameters in names]
    rows["high_ram"] = rows.pop("Run_Env").astype(str).str.strip().eq("High-RAM").astype(float)
    roles: dict[str, Role] = {"epochs": "before", "high_ram": "before"}
    for name in rows.columns:
        if name in _DERIVED:
            roles[str(name)] = "derived"
        elif name not in roles:
            roles[str(name)] = "gpu" if any(part in str(name) for part in _GPU) else "host"
    return make_runs(rows, file.name, DEVICE_MEMORY_BYTES, roles)


def load_pairs(file: Path) -> Pairs:
    """Load the pairs: tasks such as ``ResNet50_bs20`` with seconds alone and together, and what was reported."""
    table = read_table(file)
    renamed = {
        "task1": "a",
        "task2": "b",
        "cluster1": "cluster_a",
        "cluster2": "cluster_b",
        "solo1_s": "solo_a_s",
        "solo2_s": "solo_b_s",
        "packed1_s": "packed_a_s",
        "packed2_s": "packed_b_s",
    }
    reported = {
        "slowdown1_pct_reported": "reported_slowdown_a",
        "slowdown2_pct_reported": "reported_slowdown_b",
        "packing_saving_pct_reported": "reported_saving",
    }
    require(file.name, table, (*renamed, *reported))
    rows = table[[*renamed, *reported]].rename(columns=renamed | reported)
    rows[list(reported.values())] /= 100.0
    return make_pairs(rows, file.name)


def load_directed(file: Path) -> pd.DataFrame:
    """Load the slowdowns under MPS as util, peer_util (percent, alone) and slowdown (1 = none)."""
    table = read_table(file)
    renamed = {"gpu_util_pct": "util", "peer_gpu_util_pct": "peer_util", "slowdown_ratio": "slowdown"}
    require(file.name, table, renamed)
    return table[list(renamed)].rename(columns=renamed).astype(float)


def load_synthetic(file: Path, runs: Runs) -> dict[str, dict[str, tuple[Array, Array]]]:
    """Load the authors' table: models are numbered in the order in which the runs name them."""
    table = read_table(file)
    require(file.name, table, ("Model", "Batch Size", "MGUP", "MGMAP"))
    order = list(dict.fromkeys(runs.table["architecture"]))
    found: dict[str, dict[str, tuple[Array, Array]]] = {UTIL: {}, MEMORY: {}}
    for number, rows in table.groupby("Model"):
        index = int(str(number)) - 1
        if index >= len(order):
            raise DataError(f"{file.name}: column 'Model': {number} is not accepted; there are {len(order)} models")
        if len(rows) > 1:
            batch = rows["Batch Size"].to_numpy(dtype=float)
            for target, column in ((UTIL, "MGUP"), (MEMORY, "MGMAP")):
                found[target][order[index]] = (batch, rows[column].to_numpy(dtype=float))
    return found


def task_of(name: str, runs: Runs) -> tuple[str, float] | None:
    """Return (architecture, batch size) of a task of the pairs, such as ``RL_bs1024_ep5000``; None when unknown."""
    match = _TASK.fullmatch(name)
    if match is None:
        return None
    wanted = normalised(match["name"])
    wanted = _ALIASES.get(wanted, wanted)
    for architecture in runs.table["architecture"].unique():
        if normalised(architecture) == wanted:
            return str(architecture), float(match["batch"])
    return None


def _architecture(model: str) -> tuple[str, str, float]:
    """Return (family, architecture, weights)."""
    if (match := _BERT.search(model)) is None:
        return model, model, _PARAMETERS.get(normalised(model), float("nan"))
    layers, hidden, heads = map(int, match.groups())
    embeddings = (_VOCABULARY + _POSITIONS + 2) * hidden + 2 * hidden
    weights = embeddings + layers * (12 * hidden**2 + 13 * hidden) + hidden**2 + hidden
    return "SmallBERT", f"SmallBERT L{layers}H{hidden}A{heads}", float(weights)
