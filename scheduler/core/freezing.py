"""Jobs that the CUDA driver freezes: their processes stay on their host, held still, and their GPUs are free."""

from __future__ import annotations

from cotenant.scheduler.core.events import FreezeFailed, JobFrozen
from cotenant.scheduler.core.turn import Turn


def job_frozen(turn: Turn, event: JobFrozen) -> None:
    """Nothing is frozen yet."""
    turn.state.ignore("stale epoch")


def freeze_failed(turn: Turn, event: FreezeFailed) -> None:
    """Nothing is frozen yet."""
    turn.state.ignore("stale epoch")
