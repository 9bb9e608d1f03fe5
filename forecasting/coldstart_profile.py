"""What placement is told of a job that was never measured: its hints, completed from what comparable jobs needed."""

from __future__ import annotations

from dataclasses import replace

from cotenant.forecasting.characterisation.coldstart import ColdStart, Descriptors
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import DemandProfile


def profile_from(
    job: Descriptors, compute: float | None, memory: int | None, cold_start: ColdStart | None, gpu_type: str | None
) -> DemandProfile:
    """Return what is to be expected of a job before it runs; source "unknown" where that is not both demands.

    A hint always counts for the quantity it names; only what the hints leave open comes from the cold-start class, and
    only on a GPU type that it speaks of. The numbers of a class are the upper ends of its intervals, so a job shares a
    GPU unmeasured only where even those leave its neighbours the speed they were promised.

    Args:
        job: What its hints say of the program.
        compute: Compute hint in (0, 1] or None.
        memory: Memory hint in bytes or None.
        cold_start: The classes; None = there are none.
        gpu_type: The type of every GPU it may come to lie on; None = not known, or there are several.
    """
    hinted = from_hints(compute, memory)
    family = job.family or (
        "" if cold_start is None or job.architecture is None else cold_start.family_of(job.architecture)
    )
    hinted = replace(hinted, family=family)
    if hinted.source == "hints" or cold_start is None or gpu_type not in cold_start.gpu_types:
        return hinted
    expected = cold_start.prior(job)
    needed = memory if memory is not None or expected is None else expected.memory_bytes
    if expected is None or needed is None:
        return hinted
    if compute is not None:
        expected = replace(expected, util_mean=compute, util_p95=compute)
    return replace(expected, memory_bytes=needed, family=family)


__all__ = ["profile_from"]
