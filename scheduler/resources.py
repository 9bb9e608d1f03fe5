"""The virtual GPU interface between the core and those who ask: amounts in, answers out."""

from __future__ import annotations

from typing import cast, get_args

from cotenant.placement.shares import FLOOR
from cotenant.scheduler.core.allocations import NO_POWER, room
from cotenant.scheduler.core.events import ResourcesAsked
from cotenant.scheduler.core.model import AllocationAction, Job, Resource, Wish
from cotenant.scheduler.core.state import State
from cotenant.scheduler.errors import HintError, NotAccepted, NotPermitted
from cotenant.scheduler.hints import check_job_id, parse_hints
from cotenant.scheduler.views import AllocationView, ResourcesView, ResourceView

_MOST_WATTS = 1e6
_ESTIMATED = {"memory": "memory_estimated", "compute": "util_estimated"}  # what a signature says of its readings


def asked(job: Job, wish: Wish) -> ResourcesAsked:
    """Return the event of a wish.

    Raises:
        NotAccepted: Names the field, the value and what is accepted.
        NotPermitted: The job has ended.
    """
    if wish.action not in get_args(AllocationAction):
        raise NotAccepted("action", wish.action, "request, release or limit")
    if wish.resource_type not in get_args(Resource):
        raise NotAccepted("resource_type", wish.resource_type, "memory, compute or power")
    check_job_id(wish.request_id)
    if job.state.terminal:
        raise NotPermitted(f"job {job.spec.job_id} holds no lease any more: it is {job.state}")
    none = wish.amount is None and wish.action == "limit"
    amount = None if none else _amount(wish.resource_type, wish.amount, "limit" if wish.action == "limit" else "amount")
    epoch = job.epoch if wish.epoch is None else wish.epoch
    action, resource = cast(AllocationAction, wish.action), cast(Resource, wish.resource_type)
    return ResourcesAsked(job.spec.job_id, epoch, wish.request_id, action, resource, amount)


def _amount(resource_type: object, amount: object, field: str) -> float:
    name = {"memory": "gpu_memory", "compute": "compute"}.get(str(resource_type))
    if name is None:
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 < amount <= _MOST_WATTS:
            raise NotAccepted(field, amount, "watts above 0")
        return float(amount)
    if amount is None:
        raise NotAccepted(field, amount, "an amount")
    try:
        hints = parse_hints({name: amount}, 0.0)
    except HintError as error:
        raise NotAccepted(field, amount, error.accepted) from None
    value = hints.gpu_memory if name == "gpu_memory" else hints.compute
    assert value is not None
    if field == "limit" and name == "compute" and value < FLOOR:
        raise NotAccepted(field, amount, f"a fraction from {FLOOR:g} to 1")
    return value


def answer_view(state: State, job: Job, request_id: str) -> AllocationView:
    """Return the answer to a request that has been handled.

    Raises:
        NotPermitted: The job ended before it was.
    """
    answer = next((answer for answer in job.answers if answer.request_id == request_id), None)
    if answer is None:
        raise NotPermitted(f"job {job.spec.job_id} holds no lease any more: it is {job.state}")
    found = room(state, job, answer.resource)
    return AllocationView(
        job_id=job.spec.job_id,
        action=answer.action,
        resource_type=answer.resource,
        status=answer.status,
        requested=answer.amount,
        granted=answer.granted,
        share=None if found is None else found.share,
        reason=answer.reason,
    )


def resources_view(state: State, job: Job) -> ResourcesView:
    """Return what a job has and could have of each of its GPUs."""
    memory, compute = _view(state, job, "memory"), _view(state, job, "compute")
    power = ResourceView(share=None, available=None, guaranteed=None, used=None, limit=None, note=NO_POWER)
    return ResourcesView(job_id=job.spec.job_id, epoch=job.epoch, memory=memory, compute=compute, power=power)


def _view(state: State, job: Job, resource: Resource) -> ResourceView:
    found = room(state, job, resource)
    if found is None:
        what = "no lease" if job.lease is None else "a GPU that is gone"
        note = f"the job holds {what}: it is {job.state}"
        return ResourceView(share=None, available=None, guaranteed=None, used=None, limit=None, note=note)
    usage = state.usage.get(job.spec.job_id, {}).values()
    return ResourceView(
        share=found.share,
        available=found.most - found.share,
        guaranteed=found.guaranteed,
        used=found.used,
        limit=found.limit,
        note=f"more than that: {found.why}",
        used_estimated=any(getattr(one.signature, _ESTIMATED[resource]) for one in usage),
    )
