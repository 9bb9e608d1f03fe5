"""What a job's hints come to: what it asks of placement, and what it is like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from cotenant.configs.settings import Settings
from cotenant.forecasting.characterisation.coldstart import Descriptors
from cotenant.forecasting.coldstart_profile import profile_from
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Request
from cotenant.scheduler.core.commands import StopJob
from cotenant.scheduler.core.model import Bounds, Hints, Job
from cotenant.scheduler.core.models import Models
from cotenant.scheduler.core.priority import share_weight

REMEMBERED_EXPECTATIONS = 10_000
NOTED_UTIL_CHANGE = 0.02  # a profile that moves by less changes no placement
NOTED_RATE_CHANGE = 0.02  # the same of its step rate, relative
_NOISY: Mapping[str, Any] = {
    "util_mean": 0.0,
    "util_p95": 0.0,
    "membw_util": None,
    "solo_step_rate": None,
    "observed_s": 0.0,
}

# Hints that say who comes first and what becomes of the job, not where it fits.
_NO_MATTER: Mapping[str, Any] = {
    "priority": "normal",
    "deadline_s": None,
    "criticality": None,
    "expected_duration_s": None,
    "framework": None,
    "restart": "never",
    "operator_mix": None,
    "checkpoint": "none",
    "grace_s": None,
}


Bond = tuple[str, str, int]  # the only host, the only type of GPU there ("" = any), and bytes held there; -1 = it ends
Key = tuple[str, Hints, tuple[int | None, Bounds, Bounds], Bond | None, DemandProfile | None]
FREEZING_S = 150.0  # that freezing a job takes at most, as a rule: tens of gigabytes go to the host's memory


def described(hints: Hints) -> Descriptors:
    """Return what the hints say of the program, as cold-start classes take it."""
    return Descriptors(hints.model_family, hints.model, batch=hints.batch_size, parameters=hints.parameters)


class Expectations:
    """What is to be expected of jobs by their hints, remembered since every cycle asks."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], DemandProfile] = {}

    def of(self, hints: Hints, models: Models, gpu_type: str | None) -> DemandProfile:
        """Return the profile of a job with these hints, from these models, on GPUs of this type."""
        job = described(hints)
        question = (models, gpu_type, job, hints.compute, hints.gpu_memory)
        found = self._known.get(question)
        if found is None:
            if len(self._known) >= REMEMBERED_EXPECTATIONS:
                self._known.clear()
            found = profile_from(job, hints.compute, hints.gpu_memory, models.cold_start, gpu_type)
            self._known[question] = found
        return found


def max_slowdown(hints: Hints, settings: Settings) -> float:
    """Return the largest slowdown the job accepts."""
    return settings.placement.default_max_slowdown if hints.max_slowdown is None else hints.max_slowdown


def grace_s(hints: Hints, settings: Settings) -> float:
    """Return how long the job gets between SIGTERM and SIGKILL: one that saves its state needs more than a moment."""
    if hints.grace_s is not None:
        return hints.grace_s
    return settings.checkpoints.grace_s if hints.checkpoint == "own" else settings.lease.stop_grace_s


def leaves_within_s(job: Job, settings: Settings) -> float:
    """Return how long a job that is taken from its GPUs stays on them at most, as a rule, seconds."""
    return FREEZING_S if job.freezes else grace_s(job.spec.hints, settings)


def stop_command(job: Job, host_id: str, reason: str, settings: Settings) -> StopJob:
    """Return the command that ends, or freezes, the job's part on a host; what is given back has been saved."""
    grace = settings.lease.stop_grace_s if job.given_back else grace_s(job.spec.hints, settings)
    revision = job.lease.revision if job.lease else 0
    return StopJob(
        host_id, job.spec.job_id, job.epoch, grace, reason, asks=job.owed, freezes=job.freezing, revision=revision
    )


def ask_of(job: Job, *, known: bool, by_queue: bool) -> Key:
    """Return what decides whether the job finds a place: of two jobs for which it is equal, both do or none does.

    Args:
        job: A waiting job.
        known: Its program was measured.
        by_queue: Its queue matters.

    Returns:
        First the fingerprint of the program whose profile counts, "" for none.
    """
    hints, own = job.spec.hints, job.profile
    asked = replace(hints, **_NO_MATTER, queue=hints.queue if by_queue else "")
    learnt = job.memory_hint_corrected, job.wanted, job.limits
    if own is not None and own.source == "history":
        return job.spec.fingerprint, asked, learnt, _bond(job), own
    # Unmeasured, a job is what its hints say; measured, its program counts too: its pairs may have been.
    return (
        job.spec.fingerprint if known else "",
        asked,
        learnt,
        _bond(job),
        None if known else own,
    )


def _bond(job: Job) -> Bond | None:
    if job.frozen is not None:
        return job.frozen.host_id, job.frozen.gpu_type, -1 if job.frozen.ends else _held(job) or 0
    return None if job.only_host is None else (job.only_host, "", 0)


def request_of(
    job: Job,
    profile: DemandProfile,
    settings: Settings,
    typed: Mapping[str, DemandProfile],
    gpu_types: Sequence[str],
) -> Request:
    """Return what a job asks of placement.

    Args:
        job: The job; memory learnt from an overrun replaces its hint, and so does what it asked for itself.
        profile: What is known of its demand.
        settings: The settings in force.
        typed: What is known of it by GPU type; empty where the cluster has one type.
        gpu_types: The types of the cluster.
    """
    hints, limits = job.spec.hints, job.limits
    group = () if hints.group is None else (f"group:{hints.group}",)
    return Request(
        job_id=job.spec.job_id,
        gpus=hints.gpus,
        memory_bytes=_memory(job),
        compute=job.guarantee,
        profile=profile,
        max_slowdown=max_slowdown(hints, settings),
        exclusive=hints.isolation == "hard",
        shares_instance=hints.isolation == "none",
        one_host=hints.gang == "host",
        weight=share_weight(hints, job.urgency, settings.scheduling),
        labels=frozenset((f"tenant:{hints.tenant}", *group)),
        anti_affinity=frozenset(hints.anti_affinity.split(",") if hints.anti_affinity else ()),
        profiles=typed,
        speeds=relative_speeds(typed, gpu_types, settings.placement.speeds),
        least_memory=job.wanted.memory_bytes or 0,
        most_memory=min(
            (most for most in (limits.memory_bytes, job.ceiling.memory_bytes) if most is not None), default=None
        ),
        most_compute=limits.compute,
        cpus=hints.cpus or 0.0,
    )


def relative_speeds(
    typed: Mapping[str, DemandProfile], gpu_types: Sequence[str], usual: Mapping[str, float]
) -> dict[str, float]:
    """Return how fast a program is alone by GPU type, relative to its fastest; empty when that was never measured.

    On a type on which it was not measured it counts as much faster or slower than on those on which it was as the
    types usually are.

    Args:
        typed: What is known of the program by GPU type.
        gpu_types: The types of the cluster.
        usual: Speed by GPU type, as the settings say; 1 for a type that is not listed.
    """
    measured = {gpu_type: profile.solo_step_rate for gpu_type, profile in typed.items() if profile.solo_step_rate}
    if not measured:
        return {}
    unit = fmean(rate / usual.get(gpu_type, 1.0) for gpu_type, rate in measured.items())
    rates = {each: measured.get(each) or unit * usual.get(each, 1.0) for each in gpu_types}
    fastest = max(rates.values())
    return {gpu_type: rate / fastest for gpu_type, rate in rates.items()}


def keep_longest(profiles: dict[str, DemandProfile], name: str, profile: DemandProfile) -> bool:
    """Keep the profile under this name, as the last one seen, unless a longer observation is known.

    One that says nearly the same is no news either until it is twice as long: a profile that changes has everything
    looked at again that rests on it. Memory that could not be read this time is as it was found before.

    Returns:
        Whether the one that is kept is another than before.
    """
    known = profiles.pop(name, None)
    if known is not None and profile.memory_bytes is None:
        profile = replace(profile, memory_bytes=known.memory_bytes)
    if known is None or known.observed_s <= profile.observed_s:
        stays = known is not None and 2.0 * known.observed_s > profile.observed_s and _alike(known, profile)
        profiles[name] = known if stays and known is not None else profile
    else:
        profiles[name] = known
    return profiles[name] is not known


def _alike(one: DemandProfile, other: DemandProfile) -> bool:
    rate, other_rate = one.solo_step_rate or 0.0, other.solo_step_rate or 0.0
    bandwidth, other_bandwidth = one.membw_util or 0.0, other.membw_util or 0.0
    return (
        abs(one.util_mean - other.util_mean) < NOTED_UTIL_CHANGE
        and abs(one.util_p95 - other.util_p95) < NOTED_UTIL_CHANGE
        and abs(bandwidth - other_bandwidth) < NOTED_UTIL_CHANGE
        and abs(rate - other_rate) <= NOTED_RATE_CHANGE * rate
        and replace(one, **_NOISY) == replace(other, **_NOISY)
    )


def _held(job: Job) -> int | None:
    """Return the bytes per GPU that a frozen job, or one that may be, brings along; None = it brings nothing."""
    if job.frozen is None and not job.freezes:
        return None
    shares = job.frozen.shares if job.frozen else job.lease.shares if job.lease else ()
    return max((share.memory_bytes for share in shares), default=None)


def _memory(job: Job) -> int | None:
    """Return the memory to reserve per GPU; None = as forecast."""
    held = _held(job)
    if job.frozen is not None and held is not None:
        return held  # it goes on as it was: its host may have no GPU with more
    if held is not None:
        return max(held, job.memory_hint_corrected or 0)
    corrected, wanted, limit = job.memory_hint_corrected, job.wanted.memory_bytes, job.limits.memory_bytes
    asked = job.spec.hints.gpu_memory if corrected is None else corrected
    if wanted is not None:
        asked = max(wanted, corrected or 0)
    return asked if asked is None or limit is None else min(asked, limit)
