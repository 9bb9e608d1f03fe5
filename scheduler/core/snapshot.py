"""The last measurements, and what waiting jobs were told."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.forecasting.types import Signature
from cotenant.placement.resize import UsageSignal
from cotenant.placement.types import NoFit


@dataclass(frozen=True, slots=True)
class Usage:
    """What was last measured of one job on one GPU, and what follows from it for its share."""

    signature: Signature
    signal: UsageSignal
    measured_at: float


@dataclass(frozen=True, slots=True)
class Told:
    """What some waiting jobs were told. ``settled``: as of the last cycle it holds for every GPU not changed since."""

    refusal: NoFit
    settled: bool
    over_quota: bool
    job_ids: tuple[str, ...]
