"""What running jobs would get if they had to be placed anew, those that were placed last looked at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy
from cotenant.placement.explain import explain as fold
from cotenant.placement.fleet import Fleet, Integers, Part
from cotenant.placement.statement import Statement
from cotenant.placement.types import NoFit, Placement, Request
from cotenant.scheduler.core.accounts import held_of
from cotenant.scheduler.core.freezable import places_of
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.quotas import Quotas
from cotenant.scheduler.core.state import State

_SEVERITY = {"kept": 0, "elsewhere": 1, "later": 2, "never": 3}


@dataclass(frozen=True, slots=True)
class Fate:
    """What one running job would get, and why: its own GPUs, others, or none."""

    outcome: Literal["elsewhere", "later", "never"]
    why: str


def worse(before: Fate | None, after: Fate | None) -> bool:
    """Whether a job would fare worse than before; None = it would keep its GPUs."""
    was, becomes = (fate.outcome if fate is not None else "kept" for fate in (before, after))
    return _SEVERITY[becomes] > _SEVERITY[was]


def placed_anew(
    state: State, policy: PlacementPolicy, predictor: InterferencePredictor, jobs: Sequence[Job]
) -> Mapping[str, Fate]:
    """Return what these running jobs would get, by id; those that would keep what they have are left out.

    One after the other is taken off its GPUs. Where these would not take it again, it goes to others that would, or is
    gone: the next ones are asked without it. So of several that may not stay together, the last ones leave.

    Args:
        state: The state, with the settings to look under; it is not changed.
        policy: Places one job.
        predictor: Predicts how jobs on one GPU slow each other down.
        jobs: The jobs, those first that are to give way first.
    """
    asking = _Asking(state, policy, predictor)
    try:
        found = {job.spec.job_id: asking.fate(job) for job in jobs}
    finally:
        asking.take_back()
    return {job_id: fate for job_id, fate in found.items() if fate is not None}


class _Asking:
    def __init__(self, state: State, policy: PlacementPolicy, predictor: InterferencePredictor) -> None:
        self._state, self._policy, self._predictor = state, policy, predictor
        self._fleet: Fleet = state.fleet()
        self._statement = Statement(self._fleet)
        self._quotas = Quotas(state.accounts, state.settings, self._fleet)
        self._open = self._unclaimed()

    def take_back(self) -> None:
        self._statement.rollback()

    def fate(self, job: Job) -> Fate | None:
        request, hints, held = self._state.request_of(job), job.spec.hints, held_of(job, self._state.gpus)
        shares = job.lease.shares if job.lease else ()
        own = [share.gpu_id for share in shares if self._fleet.has(share.gpu_id)]
        mark = self._statement.checkpoint()
        self._statement.evict(job.spec.job_id, own)
        self._quotas.count(hints, -held, -1)
        answer = self._place(job, request, np.array(sorted(map(self._fleet.position, own)), dtype=np.int64))
        if isinstance(answer, Placement):  # it stays as it is
            self._statement.rollback(mark)
            self._quotas.count(hints, held, 1)
            return None
        answer = self._place(job, request, self._elsewhere(job))
        if isinstance(answer, Placement):
            self._statement.place(request, answer)
            self._quotas.take(request, hints, answer)
            return Fate("elsewhere", answer.reason)
        return Fate("never" if answer.never else "later", fold(answer.errors))

    def _place(self, job: Job, request: Request, places: Integers) -> Placement | NoFit:
        if (refusal := self._quotas.refusal(request, job.spec.hints)) is not None:
            return refusal
        gpus = self._quotas.within(request, job.spec.hints, Part(self._fleet, places))
        crowd = len(self._fleet) + 1  # an empty GPU for everybody is not what is asked
        return self._policy.place(request, gpus, self._predictor, self._state.settings.placement, waiting_gpus=crowd)

    def _elsewhere(self, job: Job) -> Integers:
        only = places_of(self._state, self._fleet, job)
        return self._open if only is None else np.intersect1d(self._open, only)

    def _unclaimed(self) -> Integers:
        """Return the GPUs that are not held or kept for somebody."""
        held = self._state.reservation.gpu_ids if self._state.reservation else ()
        claimed = {*self._state.moves.claimed(), *held}
        free = [place for place, view in enumerate(self._fleet.views) if view.gpu_id not in claimed]
        return np.array(free, dtype=np.int64)
