"""What a host agent's inventory says about jobs that should, or should not, run on its host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cotenant.forecasting.versions import restorable
from cotenant.scheduler.core.commands import Command, ResizeShares, StopJob
from cotenant.scheduler.core.events import Event, JobFrozen, JobMissing, JobStarted
from cotenant.scheduler.core.model import Job, JobState
from cotenant.scheduler.core.requests import stop_command
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import start_commands

Phase = Literal["starting", "running", "stopping", "exited"]
Noted = JobStarted | JobMissing | JobFrozen
Answer = Noted | Command


@restorable
@dataclass(frozen=True, slots=True)
class InventoryItem:
    """A job that a host agent holds.

    An agent keeps an "exited" job in its inventory until its exit has been acknowledged: a job that is absent died
    without a word.

    Attributes:
        job_id: The job.
        epoch: Epoch of the lease it was started with.
        revision: Newest revision of its shares the agent has.
        phase: Where the agent is with it.
        frozen: Its processes are held still by the driver, off its GPUs.
    """

    job_id: str
    epoch: int
    revision: int
    phase: Phase
    frozen: bool = False


def reconcile(
    state: State, host_id: str, inventory: Sequence[InventoryItem], now: float
) -> tuple[list[Event], list[Command]]:
    """Compare a host's inventory with the leases and say what to note and what to send again.

    Commands may be repeats of commands that are still under way; agents take a repeat for what it is.

    Args:
        state: The state; not changed.
        host_id: The host.
        inventory: Everything its agent holds, taken after the events that came with it.
        now: Unix seconds.
    """
    waiting = (job for job in state.in_order(state.frozen) if job.lease is None)
    still = {job.spec.job_id: job for job in waiting if job.frozen and job.frozen.host_id == host_id}
    expected = {job.spec.job_id: job for job in state.on_host(host_id)} | still
    present: set[str] = set()
    answers: list[Answer] = []
    for item in inventory:
        job = expected.get(item.job_id)
        if job is not None and job.epoch == item.epoch:
            present.add(item.job_id)
            answers.extend(_frozen(host_id, job, item) if job.lease is None else _known(state, host_id, job, item))
        elif item.phase != "exited" and (item.phase != "stopping" or item.frozen):
            why = "it has no lease here" if job is None else f"its lease is of epoch {job.epoch}"
            grace = state.settings.lease.stop_grace_s
            answers.append(StopJob(host_id, item.job_id, item.epoch, grace, f"not entitled to a GPU: {why}"))
    answers.extend(_absent(state, host_id, job, now) for job_id, job in expected.items() if job_id not in present)
    events: list[Event] = [answer for answer in answers if isinstance(answer, Noted)]
    commands: list[Command] = [answer for answer in answers if not isinstance(answer, Noted)]
    return events, commands


def _frozen(host_id: str, job: Job, item: InventoryItem) -> Iterator[Answer]:
    """A frozen job that holds no lease must not run: freeze it again; whatever it ends with is on the way."""
    if job.frozen is None or item.phase in ("stopping", "exited"):
        return
    if job.frozen.ends:
        yield StopJob(host_id, item.job_id, item.epoch, 0.0, job.frozen.ends)
    elif not item.frozen:
        revision = max(job.frozen.revision, item.revision)
        reason = "it runs although it was frozen and holds no lease"
        yield StopJob(host_id, item.job_id, item.epoch, 0.0, reason, freezes=True, revision=revision)


def _known(state: State, host_id: str, job: Job, item: InventoryItem) -> Iterator[Answer]:
    job_id = job.spec.job_id
    if item.phase == "exited":
        return  # its exit is on the way
    if job.state is JobState.STOPPING:
        if item.phase != "stopping" or job.given_back:  # it may still wait for that; a repeat changes nothing
            reason = job.ending.reason if job.ending else job.reason
            yield stop_command(job, host_id, reason, state.settings)
        return
    old = item.revision < job.granted_revision
    if old and (item.frozen or job.frozen is not None):  # that it has started may be of before it was frozen
        yield from start_commands(state, job, "the agent has not let it go on yet")
        return
    if item.frozen and job.frozen is not None:
        return  # it is about to go on
    if item.frozen:
        yield JobFrozen(host_id, job_id, job.epoch, item.revision, 0)
        return
    if item.phase == "running" and job.state is JobState.STARTING and host_id not in job.started_hosts:
        yield JobStarted(job_id, job.epoch, host_id)
    if job.lease is not None and item.revision < job.lease.revision:
        shares = state.shares_on(job, host_id)
        reason = "the agent has older shares"
        yield ResizeShares(host_id, job_id, job.epoch, job.lease.revision, shares, reason)


def _absent(state: State, host_id: str, job: Job, now: float) -> Answer:
    """A start may still be under way to the agent, or a stop right behind it, until enough time has passed."""
    lease, limits = job.lease, state.settings.lease
    if lease is not None and host_id not in job.started_hosts:
        if job.state is JobState.STARTING and now - lease.granted_at < limits.start_timeout_s:
            starts = start_commands(state, job, "the agent does not have it yet")
            return next(command for command in starts if command.host_id == host_id)
        if job.state is JobState.STOPPING and now - job.history[-1].at < limits.ttl_s:
            return stop_command(job, host_id, job.reason, state.settings)
    return JobMissing(job.spec.job_id, job.epoch, host_id)
