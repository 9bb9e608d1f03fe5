"""Notices simulations that would go on for ever: steps follow steps, and no work gets done."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cotenant.scheduler.simulation.errors import counted

if TYPE_CHECKING:
    from cotenant.scheduler.simulation.world import Run, World

_EVERY = 500  # steps from one look to the next
_PATIENCE = 10  # looks in a row without any progress


class Watch:
    """Counts looks since a job ended or came, or since there was less work left than ever before in that time.

    Work left alone would not do: whoever is suspended or crashes has more of it than before.
    """

    def __init__(self) -> None:
        self._counts = (-1, -1)
        self._least = math.inf
        self._looks = 0

    def stuck(self, world: World) -> bool:
        """Return whether nothing has come of many steps; to be asked after every step."""
        if world.steps % _EVERY:
            return False
        counts = (world.unfinished, world.coming)
        if counts != self._counts or not (world.running or world.waiting_count):
            self._counts, self._least, self._looks = counts, math.inf, 0
            return False
        left = math.fsum(world.remaining_now(run) for run in world.runs)
        self._looks = 0 if left < self._least else self._looks + 1
        self._least = min(self._least, left)
        return self._looks >= _PATIENCE


def stalled(world: World) -> str:
    """Say that nothing happens any more."""
    waiting = _unfinished(world)
    some = ", ".join(run.job.job_id for run in waiting[:5]) + (" …" if len(waiting) > 5 else "")
    have = "has" if len(waiting) == 1 else "have"
    return f"at {world.now:,.0f} s nothing happens any more and {counted(len(waiting), 'job')} {have} not ended: {some}"


def fruitless(world: World) -> str:
    """Say that no work gets done, of which job that is plainest, and what to change."""
    unfinished = _unfinished(world)
    run = max(unfinished, key=lambda run: (run.failures + run.suspensions, run.running))
    said = f"at {world.now:,.0f} s no work has been done for {_EVERY * _PATIENCE:,} steps"
    return f"{said}: job {run.job.job_id} (one of {len(unfinished)}) {_why(run, world)}"


def _why(run: Run, world: World) -> str:
    faults, cost_s = world.faults, world.costs.of(run.job.gpus)
    if max(run.failures, run.suspensions) < _PATIENCE:
        return "is not started; give more GPUs, another policy or, where hosts are lost, a longer node_mtbf"
    if run.suspensions > run.failures:
        return (
            f"has been suspended {run.suspensions:,} times at {cost_s:g} s of work each; "
            "give a smaller restart cost or another policy"
        )
    return (
        f"has crashed {run.failures:,} times and does not get to its next checkpoint, for which it must run "
        f"{min(faults.checkpoint_s, run.job.duration_s) + cost_s:g} s, the restart included; "
        "give a longer time between crashes (job_mtbf, node_mtbf) or a smaller restart cost"
    )


def _unfinished(world: World) -> list[Run]:
    never = {run.index for run in world.unplaceable}
    return [run for run in world.runs if run.ended_at is None and run.index not in never]
