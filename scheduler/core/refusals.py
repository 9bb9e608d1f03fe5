"""What refused a job, as people are told: GPUs that are held for another are not out of order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotenant.placement.types import FitError
from cotenant.scheduler.core.state import State


def told_apart(state: State, errors: Sequence[FitError]) -> Sequence[FitError]:
    """Tell GPUs that are held or kept for another job from those that are not available.

    To a placement both take nobody.
    """
    held = state.reservation is not None or bool(state.moves.claims)
    if not held or all(error.kind != "not_schedulable" for error in errors):
        return errors
    closed = sum(not state.view(gpu_id).schedulable for gpu_id in state.gpus)
    found: list[FitError] = []
    for error in errors:
        if error.kind != "not_schedulable":
            found.append(error)
            continue
        out_of_order = min(error.count, closed)
        closed -= out_of_order
        if out_of_order:
            found.append(replace(error, count=out_of_order))
        if error.count > out_of_order:
            found.append(replace(error, kind="held", count=error.count - out_of_order))
    return found
