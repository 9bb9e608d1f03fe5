"""How fast programs are on MIG instances, as MISO's authors publish it (MIT): a table of slice, model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cotenant.forecasting.datasets.published import POSITIVE, read_csv
from cotenant.forecasting.datasets.schema import DataError

_TIME = "median_iter_s"


@dataclass(frozen=True, slots=True)
class MigSpeeds:
    """One program on the MIG instances of a GPU.

    Attributes:
        model: Its model.
        batch: Samples per step.
        step_s: GPU type → seconds per step alone on such an instance; without those on which it was not measured (it
            did not fit).
        speeds: GPU type → how fast it is alone, relative to its fastest: what ``placement.types.Request.speeds`` takes.
    """

    model: str
    batch: int
    step_s: Mapping[str, float]
    speeds: Mapping[str, float]


def load_mig_speeds(path: Path, product: str) -> tuple[MigSpeeds, ...]:
    """Read the speeds of MIG slices.

    Args:
        path: CSV, plain or compressed, with ``mig_slice`` (``3g.20gb``), ``model``, ``batch`` and ``median_iter_s``.
        product: The GPU, as it announces itself (``NVIDIA A100-SXM4-40GB``); its instances add ``MIG`` and their slice.

    Raises:
        DataError: It cannot be read, has no rows, a value is missing or not accepted, or a slice comes twice.
    """
    limits = {"batch": (1.0, 1e9), _TIME: POSITIVE}
    frame = read_csv(path, ("mig_slice", "model", *limits), limits, whole=("batch",))
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line, row in enumerate(frame.itertuples(index=False), 2):
        steps = found.setdefault((str(row.model), int(row.batch)), {})
        gpu_type = f"{product} MIG {row.mig_slice}"
        if gpu_type in steps:
            raise DataError(
                f"{path}: line {line}: column 'mig_slice': {row.mig_slice} comes twice for {row.model} with batch "
                f"{row.batch}"
            )
        steps[gpu_type] = float(row.median_iter_s)
    return tuple(
        MigSpeeds(model, batch, steps, {each: min(steps.values()) / step for each, step in steps.items()})
        for (model, batch), steps in found.items()
    )


__all__ = ["MigSpeeds", "load_mig_speeds"]
