"""What each tenant and each queue holds now, and how much it has used lately.

A job holds, of each of its GPUs, the larger of two parts: the compute it is promised or, without a promise, measured or
expected to need; and its memory reservation. Compute that a job merely got because nobody else wanted it is not held. A
job that nobody may join holds its GPUs whole.

Use is what was held, summed over time, in GPU-seconds; what is ``half_life_s`` old counts half, as in Slurm's
multifactor priority. It is settled whenever what is held changes: with amount ``u`` at time ``t`` and ``h`` GPUs held
since then, at ``t + d`` it is ``u f + h T / ln 2 (1 - f)`` with ``f = 2 ** (-d / T)`` for half-life ``T``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cotenant.configs.settings import AccountSettings, PlacementSettings, SchedulingSettings
from cotenant.placement.shares import FLOOR, demand_of, memory_need
from cotenant.placement.types import GpuView, Request, Share
from cotenant.scheduler.core.model import Gpu, Hints, Job, JobState

Kind = Literal["tenant", "queue"]
KINDS: tuple[Kind, ...] = ("tenant", "queue")
GRID = 256  # parts of a GPU are counted in whole units, so that sums of them are exact
KEPT_ACCOUNTS = 10_000
_Used = dict[str, tuple[float, float]]  # by name: GPU-seconds, and when they were settled


@dataclass(slots=True)
class Account:
    """One tenant or one queue.

    Attributes:
        used: GPU-seconds used, decayed until ``at``.
        at: When that was settled, Unix seconds.
        held: GPUs its jobs hold now.
        jobs: How many jobs hold them.
        waiting: How many of its jobs wait.
    """

    used: float = 0.0
    at: float = 0.0
    held: float = 0.0
    jobs: int = 0
    waiting: int = 0

    def used_at(self, now: float, half_life_s: float) -> float:
        """Return the GPU-seconds used, decayed until now."""
        span_s = now - self.at
        if span_s <= 0.0:
            return self.used
        decay = span_s / half_life_s * math.log(2.0)
        # Written so that a half-life of thousands of years neither cancels nor overflows.
        charged = -math.expm1(-decay) / decay if decay > 0.0 else 1.0
        return self.used * math.exp(-decay) + self.held * span_s * charged


@dataclass(frozen=True, slots=True)
class Stake:
    """What one job counts for in its accounts."""

    held: float = 0.0
    jobs: int = 0
    waiting: int = 0


NO_STAKE = Stake()
WAITS = Stake(waiting=1)


@dataclass(slots=True)
class Accounts:
    """All accounts, by kind and name."""

    by_kind: dict[Kind, dict[str, Account]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _stakes: dict[str, Stake] = field(default_factory=dict)

    def note(self, job: Job, gpus: Mapping[str, Gpu], now: float, half_life_s: float) -> None:
        """Note what the job counts for from now on.

        Args:
            job: The job.
            gpus: All GPUs by id.
            now: Unix seconds.
            half_life_s: Half-life of use.
        """
        job_id, stake = job.spec.job_id, _stake_of(job, gpus)
        before = self._stakes.get(job_id, NO_STAKE)
        if stake == before:
            return
        if stake == NO_STAKE:
            del self._stakes[job_id]
        else:
            self._stakes[job_id] = stake
        for kind in KINDS:
            account = self._account(kind, name_of(job.spec.hints, kind), now, half_life_s)
            account.used, account.at = account.used_at(now, half_life_s), max(account.at, now)
            account.held += stake.held - before.held
            account.jobs += stake.jobs - before.jobs
            account.waiting += stake.waiting - before.waiting

    def _account(self, kind: Kind, name: str, now: float, half_life_s: float) -> Account:
        accounts = self.by_kind[kind]
        account = accounts.get(name)
        if account is None:
            account = accounts[name] = Account(at=now)
            if len(accounts) > KEPT_ACCOUNTS:
                idle = [(each.used_at(now, half_life_s), other) for other, each in accounts.items() if not busy(each)]
                for _, other in sorted(each for each in idle if each[1] != name)[: len(accounts) - KEPT_ACCOUNTS]:
                    del accounts[other]
        return account

    def factors(self, settings: SchedulingSettings, now: float) -> dict[Kind, dict[str, float]]:
        """Return the fair-share factor of every account."""
        factors: dict[Kind, dict[str, float]] = {}
        for kind, accounts in self.by_kind.items():
            weights = {name: terms_of(settings, kind, name).weight for name in accounts}
            factors[kind] = fair_share(accounts, weights, now, settings.usage_half_life_s)
        return factors

    def used(self) -> dict[Kind, _Used]:
        """Return what is to be written down; the rest follows from the jobs."""
        return {
            kind: {name: (each.used, each.at) for name, each in sorted(accounts.items())}
            for kind, accounts in self.by_kind.items()
        }

    def restore(self, used: Mapping[Kind, _Used]) -> None:
        """Take over what ``used`` returned once; call it after all jobs were noted."""
        for kind, accounts in used.items():
            for name, (amount, at) in accounts.items():
                account = self.by_kind[kind].setdefault(name, Account())
                account.used, account.at = amount, at


def _stake_of(job: Job, gpus: Mapping[str, Gpu]) -> Stake:
    if job.lease is not None:
        return Stake(held_of(job, gpus), jobs=1)
    return WAITS if waits(job) else NO_STAKE


def waits(job: Job) -> bool:
    """Return whether the job counts as waiting for GPUs; one that is suspended wants none."""
    return job.lease is None and not job.state.terminal and job.state is not JobState.SUSPENDED


def busy(account: Account) -> bool:
    """Return whether any job of the account waits or runs."""
    return account.jobs > 0 or account.waiting > 0


def name_of(hints: Hints, kind: Kind) -> str:
    """Return the name of the job's tenant or queue."""
    return hints.tenant if kind == "tenant" else hints.queue


def terms_of(settings: SchedulingSettings, kind: Kind, name: str) -> AccountSettings:
    """Return the weight and the limits of a tenant or queue."""
    if kind == "tenant":
        return settings.tenants.get(name, settings.other_tenants)
    return settings.queues.get(name, settings.other_queues)


def fair_share(
    accounts: Mapping[str, Account], weights: Mapping[str, float], now: float, half_life_s: float
) -> dict[str, float]:
    """Return the fair-share factor of each account: ``2 ** (-use / share)``, in (0, 1].

    ``use`` is its part of all that was used, ``share`` the part that its weight entitles it to among the accounts that
    have jobs or have used anything. Whoever used exactly its part has 1/2, who used nothing has 1, who used twice its
    part has 1/4 (the formula of Slurm's classic fair-share factor).

    Args:
        accounts: Accounts of one kind, by name.
        weights: Their weights (> 0).
        now: Unix seconds.
        half_life_s: Half-life of use.
    """
    used = {name: each.used_at(now, half_life_s) for name, each in accounts.items()}
    total_used = math.fsum(used.values())
    if total_used <= 0.0:
        return {}
    total_weight = math.fsum(weights[name] for name, each in accounts.items() if busy(each) or used[name] > 0.0)
    return {name: math.exp2(-(amount / total_used) / (weights[name] / total_weight)) for name, amount in used.items()}


def held_of(job: Job, gpus: Mapping[str, Gpu]) -> float:
    """Return the GPUs the job's lease holds."""
    return sum(_held(job, share, gpus.get(share.gpu_id)) for share in job.lease.shares) if job.lease else 0.0


def _held(job: Job, share: Share, gpu: Gpu | None) -> float:
    hints, profile = job.spec.hints, job.profile
    if hints.isolation == "hard" or profile is None:
        return 1.0
    unknown = profile.source == "unknown" and job.guarantee is None  # it holds what it got: all of it, or a slot
    compute = share.compute if unknown else min(share.compute, job.guarantee or demand_of(profile.util_p95, 0.0, 0.0))
    memory = share.memory_bytes / gpu.memory_bytes if gpu is not None and gpu.memory_bytes > 0 else 0.0
    return _counted(compute, memory)


def asked_of(request: Request, gpu: GpuView, settings: PlacementSettings) -> float:
    """Return how much of this GPU the job would hold there, at most."""
    profile = request.profile
    if settings.policy == "exclusive" or request.exclusive:
        return 1.0
    if settings.policy == "static":
        return _counted(0.0, 1.0 / settings.static_slots)
    if profile.source == "unknown" and request.compute is None:
        return 1.0
    memory = memory_need(request, gpu, settings.memory_margin) / gpu.memory_bytes if gpu.memory_bytes > 0 else 1.0
    return _counted(request.compute or demand_of(profile.util_p95, 0.0, 0.0), memory)


def _counted(compute: float, memory: float) -> float:
    """Round up to whole units, forgiving what is lost in binary fractions."""
    return min(1.0, math.ceil(max(compute, memory, FLOOR) * GRID - 1e-6) / GRID)
