"""Saying why a job was taken from its GPUs."""

from __future__ import annotations

from cotenant.placement.explain import memory_text
from cotenant.scheduler.core.deadlines import span
from cotenant.scheduler.core.freezable import STUCK_S, why_not
from cotenant.scheduler.core.model import Interruption, Job, JobState
from cotenant.scheduler.core.requests import grace_s
from cotenant.scheduler.core.state import State
from cotenant.scheduler.views import FrozenView


def tell(why: Interruption) -> str:
    """Say it for people: "gets GPUs of its own: saves 340 s, costs 60 s"."""
    makes_room = {
        "priority": f"whose priority {why.against or 0.0:.2f} beats its {_value(why)}",
        "shorter": "which is expected to have much less to do",
        "memory": f"which {_need(why)} than its share",
    }
    if why.kind in makes_room:
        return f"makes room for job {why.for_job}, {makes_room[why.kind]}"
    match why.kind:
        case "apart":
            limit = 1.0 / (why.against or 1.0)
            slowed = f"job {why.for_job} on its GPU is slowed down {1.0 / (why.value or 1.0):.2f} > {limit:.2f}"
            return f"{slowed}: {_worth(why)}"
        case "unshare":
            return f"gets GPUs of its own, or faster ones, which were free: {_worth(why)}"
        case "trade":
            places = "changes places on GPUs of several types with others"
            loses = (why.gain_s or 0.0) < 0.0
            return f"{places}, who gain more speed by it than it loses" if loses else f"{places}: {_worth(why)}"
        case "yield":
            return "leaves its GPUs to others: all jobs together get on better so (setting scheduling.aim)"
        case _:
            return "as asked"


def _need(why: Interruption) -> str:
    if why.against is None:
        return "needs more memory"
    return f"is forecast to need {memory_text(int(why.against))}, more"


def _worth(why: Interruption) -> str:
    return f"saves {why.gain_s or 0.0:.0f} s and costs {why.cost_s or 0.0:.0f} s"


def _value(why: Interruption) -> str:
    return f"{why.value or 0.0:.2f}"


def ago(seconds: float) -> str:
    """Return how long ago something was, in its largest whole unit and, below a minute, in tenths of a second."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.1f} s ago"


def interrupted(state: State, job: Job, now: float) -> list[str]:
    """Say how often and why the job was last taken from its GPUs, and what it keeps."""
    last = job.interruption
    if last is None:
        return []
    keeps = "started over, since it saves nothing"
    if job.saves and not last.lost:
        keeps = f"goes on from {span(job.done_s)} of work"
        if last.starts_over:
            keeps = "started over, since its checkpoint could not be read there"
    elif last.lost:
        keeps = f"starts over, since {last.lost}"
    elif last.starts_over:
        keeps = "started over, since it could not be brought there"
    home = state.hosts.get(job.anchor or "")
    bound = f", on host {home.name if home else job.anchor} only, where its checkpoint is" if job.anchor else ""
    often = "once" if job.interruptions == 1 else f"{job.interruptions} times, last"
    return [f"taken from its GPUs {often} {ago(now - last.at)}: {tell(last)}; {keeps}{bound}"]


def starts_over(state: State, job: Job) -> str:
    """Say why what the job has done will be lost, while it is being taken from its GPUs; empty when it will not."""
    why = job.ending.interruption if job.ending is not None else None
    lost = why.lost or _lost_by(state, job, why) if why is not None else ""
    return f"{lost}: it will start over" if lost else ""


def _lost_by(state: State, job: Job, why: Interruption) -> str:
    driver = job.spec.hints.checkpoint == "driver"
    if not job.saves and driver:
        cannot = why_not(state, job, job.lease.shares if job.lease else ()) or "it had not started yet"
        return f"the job cannot be frozen ({cannot})"
    if not job.saves:
        return "the job does not say that it continues from a checkpoint (hint checkpoint)"
    names = ", ".join(state.hosts[host_id].name for host_id in job.hosts if host_id in state.hosts)
    if driver:
        there = f"what is frozen on {names} can go on only there, on GPUs of the same type"
        return "" if job.freezing else there if why.starts_over else "it had not started yet"
    there = f"other hosts cannot read its checkpoint on {names} (setting checkpoints.directory)"
    return there if why.starts_over else ""


def stop_by(state: State, job: Job) -> float | None:
    """Return until when a job that is being stopped may save; None when it is not, or need not."""
    if job.state is not JobState.STOPPING or job.given_back or job.freezing:
        return None
    return job.history[-1].at + grace_s(job.spec.hints, state.settings)


def asked_for(state: State, job: Job, now: float) -> list[str]:
    """Say what a job waits for that is to leave its GPUs: a lease to be given back, or the driver to freeze it."""
    since = ago(now - job.history[-1].at)
    if job.freezing:
        return [f"to be frozen since {since}: its processes stay, and their memory goes to the host's"]
    if job.state is not JobState.STOPPING or not job.owed:
        return []
    grace = span(grace_s(job.spec.hints, state.settings))
    return [f"its program was asked {since} to save and give it back: lost if it does not within {grace}"]


def tell_frozen(state: State, job: Job, now: float) -> list[str]:
    """Say where the processes of a frozen job are, what that takes, and where alone they can go on."""
    view, frozen = frozen_view(state, job), job.frozen
    if view is None or frozen is None:
        return []
    size = f"in {memory_text(view.memory_bytes)} of its memory" if view.memory_bytes else "in its memory"
    gpus = f"{job.spec.hints.gpus} {frozen.gpu_type} GPU{'s' if job.spec.hints.gpus > 1 else ''}"
    least = memory_text(max(share.memory_bytes for share in frozen.shares))
    needs = f"goes on only there, on {gpus} with {least} free"
    if frozen.stuck_since is not None:
        left = span(max(0.0, frozen.stuck_since + STUCK_S - now))
        needs += f"; none of these works, first seen {ago(now - frozen.stuck_since)}: "
        needs += f"unless one does within {left} it starts over elsewhere"
    if frozen.ends:
        needs = f"starts over once its processes have ended, since {frozen.ends}"
    return [f"frozen on host {view.host} {size}, {ago(now - view.since)}: {needs}"]


def freezable(state: State, job: Job) -> list[str]:
    """Say of a job that may be frozen whether it can be, where it is."""
    if job.spec.hints.checkpoint != "driver" or job.state is JobState.STOPPING:
        return []
    cannot = why_not(state, job, job.lease.shares if job.lease else ())
    if cannot:
        instead = "checkpoint own would help if the program saves on SIGTERM and continues from that"
        return [f"checkpoint driver counts as none: {cannot}; {instead}"]
    return ["the driver can freeze it: interrupted, it loses nothing and goes on on this host"]


def frozen_view(state: State, job: Job) -> FrozenView | None:
    """Return where the job is frozen, if it is."""
    frozen = job.frozen
    if frozen is None:
        return None
    host = state.hosts.get(frozen.host_id)
    return FrozenView(
        host_id=frozen.host_id,
        host=host.name if host else frozen.host_id,
        gpu_type=frozen.gpu_type,
        memory_bytes=frozen.memory_bytes,
        since=frozen.since,
    )
