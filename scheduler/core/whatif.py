"""What would happen to hypothetical jobs, or under other settings: the scheduling cycle over a snapshot, taken back."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement import types as placement
from cotenant.placement.explain import explain as fold
from cotenant.placement.guarantees import mids_on
from cotenant.placement.objective import packing_saving
from cotenant.scheduler.core.anew import Fate, placed_anew, worse
from cotenant.scheduler.core.cycle import propose
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.floor import Floor
from cotenant.scheduler.core.model import Job, JobSpec, JobState
from cotenant.scheduler.core.priority import ordered
from cotenant.scheduler.core.proposal import Plan
from cotenant.scheduler.core.queries import NO_HOST, share_view
from cotenant.scheduler.core.refusals import told_apart
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.unmet import hopeless, lasting
from cotenant.scheduler.views import AffectedJob, PlannedJob, PlanView

MOST_AFFECTED = 500  # waiting jobs that are listed
MOST_RECONSIDERED = 200  # running jobs that are placed anew: each is a decision of its own

_Outcome = Literal["now", "later", "never"]


@dataclass(frozen=True, slots=True)
class _Look:
    """What a cycle would do."""

    state: State
    plan: Plan
    places: Mapping[str, placement.Placement]

    def outcome(self, job_id: str) -> tuple[_Outcome, str]:
        """Return whether the job would be placed, and why there or why not."""
        placed, refusal = self.places.get(job_id), self.plan.refused.get(job_id)
        if placed is not None:
            return "now", placed.reason
        if refusal is None:
            return "later", NO_HOST
        return "never" if refusal.never else "later", fold(told_apart(self.state, refusal.errors))


def plan(core: Core, specs: Sequence[JobSpec], now: float, settings: Settings | None = None) -> PlanView:
    """Say what would happen if these jobs were submitted now, under these settings. Nothing is changed.

    The very code of the scheduling cycle runs, over a snapshot, with the jobs that wait already. Running jobs stay
    where they are; under other settings they are placed anew in a statement of its own, to see which would not get
    their GPUs again.

    Args:
        core: The core.
        specs: The hypothetical jobs; their ids do not matter.
        now: Unix seconds.
        settings: Settings to try; None = those in force.
    """
    state = core.state
    imagined = [_imagine(state, spec, number, now) for number, spec in enumerate(specs)]
    before = _look(core, (), now) if state.queued else _Look(state, Plan(), {})
    running = _newest(state) if settings is not None else []
    kept = placed_anew(state, core.policy, core.predictor, running)
    with nullcontext() if settings is None else _trying(state, settings):
        after = _look(core, imagined, now)
        anew = placed_anew(state, core.policy, core.predictor, running)
        affected = [*_waiting(state, before, after), *_running(running, kept, anew)]
        throughputs = [_predict(view, core.predictor) for view in after.plan.gpus]
        ids = {job.spec.job_id for job in imagined}
        shared = [n for n in throughputs if len(n) > 1 and not ids.isdisjoint(n)]
        # Over several GPUs: 1 - (GPU time together) / (GPU time alone), which is 1 - 1/sum(n) for one of them.
        mean = sum(sum(n.values()) for n in shared) / len(shared) if shared else None
        return PlanView(
            jobs=_planned_together(state, imagined, after, throughputs),
            packing_saving_predicted=None if mean is None else packing_saving([mean]),
            affected=affected,
            reconsidered=len(running),
            displaced=len(kept),
            running=len(state.leased),
        )


@contextmanager
def _trying(state: State, settings: Settings) -> Iterator[None]:
    """Look at the state as it would be under other settings; afterwards it is as before."""
    kept = state.settings, state.floor
    state.settings, state.floor = settings, Floor()
    state.floor.renew()
    try:
        yield
    finally:
        state.settings, state.floor = kept


def _imagine(state: State, spec: JobSpec, number: int, now: float) -> Job:
    spec = replace(spec, job_id=f"planned {number}: {spec.name}")
    return Job(spec, JobState.QUEUED, queued_at=now, seq=state.next_seq + number)


def _look(core: Core, imagined: Sequence[Job], now: float) -> _Look:
    state = core.state
    waiting = (job for job in state.in_order(state.queued) if job.not_before <= state.now)
    queue = ordered((*waiting, *imagined), now, state.standing())
    if not state.hosts:
        return _Look(state, Plan(), {})
    found = propose(state, queue, core.policy, core.predictor)
    return _Look(state, found, {placed.job_id: placed for placed in found.placed})


def _waiting(state: State, before: _Look, after: _Look) -> list[AffectedJob]:
    """Return the waiting jobs for which the two differ."""
    found: list[AffectedJob] = []
    for job in state.in_order(state.queued):
        job_id = job.spec.job_id
        (was, _), (becomes, why) = before.outcome(job_id), after.outcome(job_id)
        if was != becomes and len(found) < MOST_AFFECTED:
            found.append(AffectedJob(job_id=job_id, name=job.spec.name, before=was, after=becomes, why=why))
    return found


def _newest(state: State) -> list[Job]:
    held = (job for job in (state.jobs[job_id] for job_id in state.leased) if job.state is not JobState.STOPPING)
    return heapq.nlargest(MOST_RECONSIDERED, held, key=lambda job: job.seq)


def _running(jobs: Sequence[Job], before: Mapping[str, Fate], after: Mapping[str, Fate]) -> Iterator[AffectedJob]:
    """Yield those of these running jobs that would fare worse, were they placed anew."""
    for job in jobs:
        job_id = job.spec.job_id
        fate = after.get(job_id)
        if fate is not None and worse(before.get(job_id), fate):
            yield AffectedJob(job_id=job_id, name=job.spec.name, before="runs", after=fate.outcome, why=fate.why)


def _predict(view: placement.GpuView, predictor: InterferencePredictor) -> dict[str, float]:
    return {member.job_id: n for member, n in zip(view.residents, mids_on(predictor, [view])[0], strict=True)}


def _planned_together(
    state: State, imagined: Sequence[Job], found: _Look, throughputs: Sequence[Mapping[str, float]]
) -> list[PlannedJob]:
    """Tell of each job what it has once all are placed, and call them as whoever asked has called them."""
    used = Counter(job.spec.name for job in imagined)
    names = {
        job.spec.job_id: job.spec.name
        for job in imagined
        if used[job.spec.name] == 1 and job.spec.name not in state.jobs
    }
    planned = (_planned(state, job, found, throughputs) for job in imagined)
    return [
        each.model_copy(
            update={
                "neighbours": {names.get(other, other): slowdown for other, slowdown in each.neighbours.items()},
                "explanation": reduce(lambda text, item: text.replace(*item), names.items(), each.explanation),
            }
        )
        for each in planned
    ]


def _planned(state: State, job: Job, found: _Look, throughputs: Sequence[Mapping[str, float]]) -> PlannedJob:
    job_id = job.spec.job_id
    placed = found.places.get(job_id)
    outcome, why = found.outcome(job_id)
    if outcome == "never":
        why = hopeless(job, lasting(found.plan.refused[job_id]), len(state.gpus))
    joined = _joined_by(found, placed) if placed else []
    if joined:
        why = f"{why}; then joined by {', '.join(joined)}"
    here = [n for n in throughputs if job_id in n]
    return PlannedJob(
        name=job.spec.name,
        placeable=outcome if state.hosts else "later",
        shares=[share_view(state, _in_the_end(found, job_id, share)) for share in placed.shares] if placed else [],
        slowdown_predicted=max((1.0 / n[job_id] for n in here), default=None),
        neighbours={other: 1.0 / value for n in here for other, value in n.items() if other != job_id},
        explanation=why if state.hosts else NO_HOST,
    )


def _in_the_end(found: _Look, job_id: str, share: placement.Share) -> placement.Share:
    """Return the share when all are placed: those that come later squeeze it."""
    residents = (resident for view in found.plan.gpus if view.gpu_id == share.gpu_id for resident in view.residents)
    return next((resident.share for resident in residents if resident.job_id == job_id), share)


def _joined_by(found: _Look, placed: placement.Placement) -> list[str]:
    """Return the jobs that are placed on its GPUs after it."""
    mine = {share.gpu_id for share in placed.shares}
    later = found.plan.placed[found.plan.placed.index(placed) + 1 :]
    return [each.job_id for each in later if not mine.isdisjoint(share.gpu_id for share in each.shares)]
