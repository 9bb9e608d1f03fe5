"""What tenants and queues may still start: limits on the GPUs their jobs hold and on how many jobs hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.configs.settings import AccountSettings, SchedulingSettings, Settings
from cotenant.placement.explain import decimals
from cotenant.placement.fleet import Fleet
from cotenant.placement.shares import memory_needs
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request
from cotenant.scheduler.core.accounts import KINDS, Accounts, Kind, asked_of, name_of, terms_of
from cotenant.scheduler.core.model import Hints

TOLERANCE = 1e-9
QUOTA_KINDS = frozenset({"quota_gpus", "quota_whole", "quota_jobs", "quota_closed"})
_Key = tuple[Kind, str]


def limits_of(settings: SchedulingSettings, hints: Hints) -> Iterator[tuple[Kind, str, AccountSettings]]:
    """Yield the limits on GPUs or jobs that apply to such a job, with the kind and name of whom they bind."""
    for kind in KINDS:
        name = name_of(hints, kind)
        terms = terms_of(settings, kind, name)
        if terms.most_gpus is not None or terms.most_jobs is not None:
            yield kind, name, terms


def is_limited(settings: SchedulingSettings, hints: Hints) -> bool:
    """Whether any limit on GPUs or jobs applies to such a job."""
    return any(True for _ in limits_of(settings, hints))


@dataclass(slots=True)
class _Held:
    gpus: float
    jobs: int


@dataclass(slots=True)
class Quotas:
    """What the accounts hold during one proposal: grows with what is placed in it.

    Args:
        accounts: What they hold now; not changed.
        settings: The limits, and how jobs are packed.
        gpus: All GPUs.
    """

    accounts: Accounts
    settings: Settings
    gpus: Fleet
    _sizes: list[GpuView] | None = None
    _held: dict[_Key, _Held] = field(default_factory=dict)

    def refusal(self, request: Request, hints: Hints) -> NoFit | None:
        """Return why the job's tenant or queue may not start it now; None when it may."""
        errors: list[FitError] = []
        for kind, name, terms in self._limited(hints):
            held = self._of(kind, name)
            if terms.most_jobs is not None and held.jobs >= terms.most_jobs:
                errors.append(_of_jobs(f"{kind} {name}", held.jobs, terms.most_jobs))
            if terms.most_gpus is None:
                continue
            asked = self._least(request)
            never = asked > terms.most_gpus + TOLERANCE
            if never or held.gpus + asked > terms.most_gpus + TOLERANCE:
                whole = self._whole_for_want_of_hints(request, hints)
                errors.append(_of_gpus(f"{kind} {name}", held.gpus, terms.most_gpus, asked, whole=whole))
        return NoFit(request.job_id, tuple(errors), any(error.never for error in errors)) if errors else None

    def _whole_for_want_of_hints(self, request: Request, hints: Hints) -> bool:
        """Whether the job takes whole GPUs only because nothing is known of it."""
        may_share = self.settings.placement.policy == "cotenant" and not request.exclusive
        return may_share and request.profile.source == "unknown" and None in (hints.gpu_memory, hints.compute)

    def within(self, request: Request, hints: Hints, gpus: Sequence[GpuView]) -> Sequence[GpuView]:
        """Return the GPUs with those closed on which the job would hold more than it may."""
        rooms = [
            terms.most_gpus - self._of(kind, name).gpus
            for kind, name, terms in self._limited(hints)
            if terms.most_gpus is not None
        ]
        if not rooms:
            return gpus
        most, placement = min(rooms) / request.gpus + TOLERANCE, self.settings.placement
        if max(self._asked(request), default=0.0) <= most:
            return gpus
        return [gpu if asked_of(request, gpu, placement) <= most else replace(gpu, schedulable=False) for gpu in gpus]

    def take(self, request: Request, hints: Hints, placement: Placement) -> None:
        """Count a placement."""
        if not self.limits(hints):
            return
        chosen = [self.gpus[self.gpus.position(share.gpu_id)] for share in placement.shares]
        self.count(hints, sum(asked_of(request, gpu, self.settings.placement) for gpu in chosen), 1)

    def expect(self, request: Request, hints: Hints) -> None:
        """Count a job that is to be placed somewhere: the least that it could hold."""
        if self.limits(hints):
            self.count(hints, self._least(request), 1)

    def count(self, hints: Hints, gpus: float, jobs: int) -> None:
        """Count GPUs and jobs that come, or go (negative)."""
        for kind, name, _ in self._limited(hints):
            held = self._of(kind, name)
            held.gpus += gpus
            held.jobs += jobs

    def _asked(self, request: Request) -> list[float]:
        """Return what the job would hold of a GPU of each size that there is."""
        if self._sizes is None:
            _, places = np.unique(self.gpus.capacity, return_index=True)
            self._sizes = [self.gpus.views[place] for place in places.tolist()]
        return [asked_of(request, gpu, self.settings.placement) for gpu in self._sizes]

    def _least(self, request: Request) -> float:
        """Return the least that the job could hold: on the largest GPUs of which there are enough for all of it."""
        asked = self._asked(request)
        if request.gpus == 1 or len(asked) < 2:
            return request.gpus * min(asked, default=0.0)
        fleet, margin = self.gpus, self.settings.placement.memory_margin
        capacity, size = np.unique(fleet.capacity, return_inverse=True)
        able = memory_needs(request, capacity, margin) <= capacity
        for each in sorted(set(asked)):
            hosts = fleet.host[(able & (np.array(asked) <= each))[size]]
            if len(hosts) and (np.bincount(hosts).max() if request.one_host else len(hosts)) >= request.gpus:
                return request.gpus * each
        return request.gpus * min(asked)  # there are not enough of any size

    def limits(self, hints: Hints) -> bool:
        """Whether any limit on GPUs or jobs applies to such a job."""
        return is_limited(self.settings.scheduling, hints)

    def _limited(self, hints: Hints) -> Iterator[tuple[Kind, str, AccountSettings]]:
        return limits_of(self.settings.scheduling, hints)

    def _of(self, kind: Kind, name: str) -> _Held:
        held = self._held.get((kind, name))
        if held is None:
            account = self.accounts.by_kind[kind].get(name)
            held = self._held[kind, name] = _Held(account.held, account.jobs) if account else _Held(0.0, 0)
        return held


def _of_jobs(whose: str, running: int, most: int) -> FitError:
    if most == 0:
        return FitError("quota_closed", None, running + 1, most, detail=f"{whose} is closed: its limit is 0 jobs")
    return FitError("quota_jobs", None, running + 1, most, detail=f"{whose} runs {running} of {most} jobs")


def _of_gpus(whose: str, held: float, most: float, asked: float, *, whole: bool) -> FitError:
    """Return the refusal. Where the job alone is more than the limit, waiting does not help, whatever is held."""
    never = asked > most + TOLERANCE
    if never:
        detail = f"the job takes {asked:.{decimals(most, asked)}f} GPUs, the limit of {whose} is {most:g}"
    else:
        digits = decimals(most, held, asked)
        detail = f"{whose} holds {held:.{digits}f} of {most:g} GPUs, the job takes {asked:.{digits}f}"
    if whole:
        detail += ", since it was never measured and does not give both gpu_memory and compute"
    return FitError("quota_whole" if whole else "quota_gpus", None, asked, most - held, never, detail)
