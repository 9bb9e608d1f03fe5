"""What is read of a state: a picture of it, and the last measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import Signature
from cotenant.placement.resize import UsageSignal
from cotenant.placement.types import GpuView
from cotenant.scheduler.core.model import Job


@dataclass(frozen=True, slots=True)
class Usage:
    """What was last measured of one job on one GPU, and what follows from it for its share."""

    signature: Signature
    signal: UsageSignal
    measured_at: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable picture of a state, taken at the start of a scheduling cycle.

    Attributes:
        now: Unix seconds.
        settings: The settings in force.
        waiting: Jobs that may be placed now, in order of submission.
        gpus: All GPUs with their residents.
        hosts_known: At least one host is known.
    """

    now: float
    settings: Settings
    waiting: tuple[Job, ...]
    gpus: tuple[GpuView, ...]
    hosts_known: bool
