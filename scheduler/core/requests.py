"""What a job's hints come to: what it asks of placement, and what it is like."""

from __future__ import annotations

from cotenant.configs.settings import Settings
from cotenant.forecasting.characterisation.coldstart import Descriptors
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Request
from cotenant.scheduler.core.model import Hints, Job
from cotenant.scheduler.core.priority import share_weight


def described(hints: Hints) -> Descriptors:
    """Return what the hints say of the program, as cold-start classes take it."""
    return Descriptors(hints.model_family, hints.model, batch=hints.batch_size, parameters=hints.parameters)


def max_slowdown(hints: Hints, settings: Settings) -> float:
    """Return the largest slowdown the job accepts."""
    return settings.placement.default_max_slowdown if hints.max_slowdown is None else hints.max_slowdown


def request_of(job: Job, profile: DemandProfile, settings: Settings) -> Request:
    """Return what a job asks of placement.

    Args:
        job: The job; memory learnt from an overrun replaces its hint.
        profile: What is known of its demand.
        settings: The settings in force.
    """
    hints, corrected = job.spec.hints, job.memory_hint_corrected
    group = () if hints.group is None else (f"group:{hints.group}",)
    return Request(
        job_id=job.spec.job_id,
        gpus=hints.gpus,
        memory_bytes=hints.gpu_memory if corrected is None else corrected,
        compute=hints.compute,
        profile=profile,
        max_slowdown=max_slowdown(hints, settings),
        exclusive=hints.isolation == "hard",
        one_host=hints.gang == "host",
        weight=share_weight(hints, job.urgency, settings.scheduling),
        labels=frozenset((f"tenant:{hints.tenant}", *group)),
        anti_affinity=frozenset(hints.anti_affinity.split(",") if hints.anti_affinity else ()),
    )
