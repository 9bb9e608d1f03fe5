"""The tables that the characterisation works on, whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

Role = Literal["before", "gpu", "host", "derived"]

UTIL, MEMORY = "util_max", "memory_max"
TARGETS: tuple[str, ...] = (UTIL, MEMORY)
TARGET_NAMES: Mapping[str, str] = {UTIL: "max GPU utilisation", MEMORY: "max GPU memory allocated"}
RUN_COLUMNS: tuple[str, ...] = ("run", "family", "architecture", "kind", "batch", *TARGETS)
PAIR_COLUMNS: tuple[str, ...] = ("a", "b", "solo_a_s", "solo_b_s", "packed_a_s", "packed_b_s")


@dataclass(frozen=True, slots=True)
class Runs:
    """Single runs, one row each.

    Attributes:
        table: Columns ``RUN_COLUMNS`` (``util_max`` and ``memory_max`` in percent, ``batch`` in samples per step) and
            ``parameters`` (trainable and frozen weights of the model; NA when unknown) and one per feature.
            ``architecture`` names one model: its runs form one curve over the batch size. ``family`` is what is held
            out together.
        features: Feature column → its role: "before" (known before the run), "gpu", "host" (measured during the run)
            or "derived" (contains the target by definition, never used to predict it).
        source: Where the rows come from, for reports.
        device_memory_bytes: Memory of the device the percentages refer to; None when unknown.
        gpu_types: The GPU types they were measured on, as GPUs announce themselves; empty when unknown.
    """

    table: pd.DataFrame
    features: Mapping[str, Role]
    source: str
    device_memory_bytes: float | None = None
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of runs that shared a device, one row per pair.

    Attributes:
        table: Columns ``PAIR_COLUMNS`` (seconds); optional ``family_a``, ``batch_a``, ``cluster_a`` and the same for b.
            ``n_a`` and ``n_b`` (normalised throughput) where it was measured as a rate.
        directed: Optional directional slowdowns: ``util`` and ``peer_util`` (percent, alone), ``slowdown`` (1 = none).
    """

    table: pd.DataFrame
    directed: pd.DataFrame = field(default_factory=pd.DataFrame)
