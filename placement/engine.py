"""Where a job goes: one small class per policy, all behind ``PlacementPolicy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.types import GpuView, NoFit, Placement, Request


class PlacementPolicy(Protocol):
    """Decides which GPUs a job gets. Pure: same input, same answer; nothing is remembered between calls."""

    name: str

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """Return shares for the job, or every reason why there are none.

        Args:
            request: What the job asks.
            gpus: Every GPU of the cluster with what it carries now, also those that take nothing new.
            predictor: Predicts how jobs on one GPU slow each other down.
            settings: How jobs are packed.
            waiting_gpus: Number of GPUs all waiting jobs ask for together, this job included (>= request.gpus).
        """
        ...


def policy(name: str) -> PlacementPolicy:
    """Return the policy with that name.

    Raises:
        ValueError: No policy has that name; the message lists those that exist.
    """
    raise NotImplementedError(name)
