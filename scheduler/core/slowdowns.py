"""How a job's neighbours are predicted to slow it down, how sure that is, and what drives it: for people."""

from __future__ import annotations

from cotenant.forecasting.types import ExplainingInterferencePredictor, InterferencePredictor, Signature
from cotenant.placement.guarantees import bounded_on
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.requests import max_slowdown
from cotenant.scheduler.core.state import State
from cotenant.scheduler.views import SlowdownView

TOLD = 0.005  # of the throughput; less does not drive anything
NOT_MEASURED = "its slowdown cannot be measured: alone, its steps per second were never measured or change as well"
CAUSES = {
    "neighbours' util": "its neighbours' utilisation",
    "neighbours' membw_util": "their use of memory bandwidth",
    "own": "what is known of this job beside others",
    "neighbour": "what is known of these neighbours",
}


def slowdown(state: State, job: Job, predictor: InterferencePredictor) -> SlowdownView | None:
    """Predict how a job is slowed down where it is; None when it is nowhere.

    Args:
        state: The state.
        job: The job.
        predictor: The predictor in force.
    """
    found = [_on(state, job, share.gpu_id, predictor) for share in (job.lease.shares if job.lease else ())]
    return max((each for each in found if each is not None), key=lambda each: each.slowdown, default=None)


def measured(state: State, job: Job) -> float | None:
    """Return how many times slower than alone the job is measured to be now; None when either is not known."""
    solo = job.profile.solo_step_rate if job.profile else None
    rate = min((each.step_rate for each in _windows(state, job) if each.step_rate is not None), default=None)
    return solo / rate if solo and rate else None


def tell_measured(state: State, job: Job) -> list[str]:
    """Return what is measured in words, beside what the job accepts."""
    found, accepted = measured(state, job), max_slowdown(job.spec.hints, state.settings)
    if found is None:
        return [NOT_MEASURED] if any(each.step_rate and each.neighbours for each in _windows(state, job)) else []
    against = "within" if round(found, 2) <= accepted else "more than"  # as it is told
    told = f"{found:.2f} times slower than alone" if found >= 1.0 else "no slower than alone"
    return [f"measured now: {told}, {against} the {accepted:.2f} that it accepts"]


def tell(view: SlowdownView) -> list[str]:
    """Return the prediction in words."""
    if not view.neighbours:
        return []
    lines = [
        f"predicted slowdown {view.slowdown:.2f}, with 80 % certainty {view.low:.2f} to {view.high:.2f}: {view.reason}"
    ]
    driving = [(name, lost) for name, lost in view.causes.items() if name in CAUSES and abs(lost) >= TOLD]
    if driving:
        driving.sort(key=lambda each: -abs(each[1]))
        parts = [
            f"{CAUSES[name]} {'costs' if lost > 0 else 'gives'} {abs(lost):.0%} of its speed" for name, lost in driving
        ]
        lines.append(f"what drives it: {', '.join(parts)}")
    return lines


def _windows(state: State, job: Job) -> list[Signature]:
    return [one.signature for one in state.usage.get(job.spec.job_id, {}).values()]


def _on(state: State, job: Job, gpu_id: str, predictor: InterferencePredictor) -> SlowdownView | None:
    if gpu_id not in state.gpus:
        return None
    view = state.view(gpu_id)
    names, profiles = [each.job_id for each in view.residents], [each.profile for each in view.residents]
    if job.spec.job_id not in names:
        return None
    place = names.index(job.spec.job_id)
    found = bounded_on(predictor.predict(profiles, view.gpu_type), view.residents)[place]
    causes = (
        predictor.explain(profiles, view.gpu_type) if isinstance(predictor, ExplainingInterferencePredictor) else ()
    )
    return SlowdownView(
        gpu_id=gpu_id,
        neighbours=[name for name in names if name != job.spec.job_id],
        slowdown=1.0 / found.mid,
        low=1.0 / found.high,
        high=1.0 / found.low,
        reason=found.reason,
        causes=dict(causes[place]) if causes else {},
    )
