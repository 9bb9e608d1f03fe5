"""The command ``cotenant train coldstart``: from measured single runs to cold-start classes in the model registry."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant import _render
from cotenant._models import RegistryFolder, told
from cotenant._train import Activate, AsJson, GpuType, Licence, Seed, SharingMode, keep, origin, progress_bars, train

GIB = 2.0**30


@train.command("coldstart")
def train_coldstart(
    *,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="A run of the measurement suite, a shipped data set, or a table of runs."),
    ],
    mode: SharingMode = None,
    gpu_type: GpuType = None,
    device_memory: Annotated[
        float | None, typer.Option("--device-memory", metavar="GIB", min=0.001, help="Memory of the device in GiB.")
    ] = None,
    licence: Licence = None,
    registry: RegistryFolder = None,
    activate: Activate = False,
    ship: Annotated[
        bool, typer.Option("--ship", help="For developers: it becomes the one that comes with this source tree.")
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit what to expect of jobs that never ran, to measured single runs."""
    with told():
        from cotenant.forecasting.datasets import registry as shelf  # noqa: PLC0415 - imports numpy
        from cotenant.forecasting.datasets.run_sources import read_run_data  # noqa: PLC0415 - imports pandas
        from cotenant.forecasting.training import coldstart_recipe  # noqa: PLC0415 - imports scikit-learn

        memory = None if device_memory is None else device_memory * GIB
        read = read_run_data(data, mode, licence, gpu_type, memory)
        with progress_bars() as progress:
            trained = coldstart_recipe.train_coldstart(read, origin(), seed=seed, progress=progress)
        if ship:
            shelf.write_shipped(shelf.SHIPPED_MODELS / trained.card.kind, trained.card, trained.write)
            _render.note(f"written: {shelf.SHIPPED_MODELS / trained.card.kind}")
            return
    keep(trained, registry, activate, as_json)


__all__ = ["train"]
