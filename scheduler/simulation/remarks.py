"""What whoever reads a simulation's figures must know of its input."""

from __future__ import annotations

from cotenant.scheduler.simulation.workload import Trace


def remarks(trace: Trace) -> list[str]:
    """Return what the input leaves out, one text each."""
    return [f"left out of the trace: {what} ({count:,})" for what, count in trace.left_out.items()]
