"""Which hint of a job that no device could ever take cannot be met, and what would be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from cotenant.placement.explain import at_most_memory, explain, memory_text
from cotenant.placement.types import FitError, FitErrorKind, NoFit
from cotenant.scheduler.core.model import Job


def hopeless(job: Job, errors: Sequence[FitError], gpus: int) -> str:
    """Say why nothing could ever take the job, and which of its hints cannot be met; arguments as of ``unmet``."""
    return "; ".join([explain(errors), *unmet(job, errors, gpus)])


def lasting(refusal: NoFit) -> tuple[FitError, ...]:
    """Return what of a refusal will not change: not what is short just now."""
    return tuple(error for error in refusal.errors if error.never) or refusal.errors


def unmet(job: Job, errors: Sequence[FitError], gpus: int) -> list[str]:
    """Name each hint that the cluster cannot meet, its value, and the most that it could.

    Args:
        job: The job.
        errors: Why nothing could ever take it.
        gpus: How many GPUs the cluster has.

    Returns:
        Sentences, "gpus: 3 cannot be met; give at most 2"; none where no hint is the cause.
    """
    lines = (_LINES[error.kind](job, error.available or 0.0, gpus) for error in errors if error.kind in _LINES)
    return list(dict.fromkeys(line for line in lines if line))


def _gpus(job: Job, available: float, gpus: int) -> str:
    hints = job.spec.hints
    if available < 1.0:
        return ""  # no number of them would do: another hint is the cause
    elsewhere = ", or gang cluster instead of host" if hints.gang == "host" and gpus >= hints.gpus else ""
    return f"gpus: {hints.gpus} cannot be met{_together(job)}; give at most {available:.0f}{elsewhere}"


def _together(job: Job) -> str:
    return " on one host" if job.spec.hints.gang == "host" and job.spec.hints.gpus > 1 else ""


def _memory(job: Job, available: float, _gpus: int) -> str:
    asked, most = job.spec.hints.gpu_memory, at_most_memory(available)
    if asked is not None and asked > available:
        return f"gpu_memory: {memory_text(asked)} cannot be met; give at most {most}"
    return f"gpu_memory: this program was measured to need more than the largest GPU has ({most})"


def _cpus(job: Job, available: float, _gpus: int) -> str:
    hints = job.spec.hints
    together = hints.gpus if hints.gang == "host" else 1
    each = f" for each of {together} GPUs{_together(job)}" if together > 1 else ""
    most = math.floor(available * 1000.0 / together) / 1000.0
    return f"cpus: {hints.cpus or 0.0:g} cannot be met{each}; give at most {most:g}"


def _instance(job: Job, _available: float, _gpus: int) -> str:
    return f"gpus: {job.spec.hints.gpus} cannot be met by MIG instances; give 1"


_LINES: Mapping[FitErrorKind, Callable[[Job, float, int], str]] = {
    "gpus_never": _gpus,
    "memory_never": _memory,
    "cpus_never": _cpus,
    "instance": _instance,
}
