"""The working context of one ``Core.handle`` call: what has to be done to jobs, and what is to be commanded.

Handlers and the cycle say *what* happens to a job (it left a host, it must stop, it may start); the turn knows how
that changes the records, which GPUs need another look afterwards, and in which order the commands must go out:
stops, then shares that shrink, then shares that grow, then starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.placement.types import Share
from cotenant.scheduler.core.colocation import close_log
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.deadlines import attained_s
from cotenant.scheduler.core.events import MoveRequested
from cotenant.scheduler.core.freezable import can_freeze
from cotenant.scheduler.core.frozen import Frozen
from cotenant.scheduler.core.model import UNBOUND, Ending, Interruption, Job, JobState, Lease, RestartPolicy
from cotenant.scheduler.core.records import replace
from cotenant.scheduler.core.requests import stop_command
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.transitions import advance

BACKOFF_S = 1.0  # before the second try; doubles with every failure
MAX_BACKOFF_S = 300.0
MOST_LET_DOWN = 100  # starts in a row that the hosts' services may fail: each one beyond that is a try like any other
# Runs that faults of their hosts may end. What ends all programs of a GPU does not say which of them has caused it: one
# that does so each time must not run for ever.
MOST_HOST_FAULTS = 10
PAST_RUNS = 100  # of a job whose hosts are remembered: their output is kept for an hour only


class Turn:
    """Changes to a state during one ``handle`` call, and the commands that follow from them.

    Attributes:
        state: The state, changed in place.
        now: Time of this turn, Unix seconds.
        dirty: Something changed that may let a waiting job be placed.
        members_changed: GPUs whose set of residents changed.
        measured: GPUs with new measurements.
        models_changed: Other models are to predict.
        evidence_withdrawn: Something that predictions rest on counts no more.
        moves_wanted: Moves that somebody asked for.
        came: Ids of the jobs that have come to wait for a place, or have come back once they were resumed.
    """

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.dirty = False
        self.members_changed: dict[str, None] = {}
        self.measured: dict[str, None] = {}
        self.models_changed = False
        self.evidence_withdrawn = False
        self.moves_wanted: list[MoveRequested] = []
        self.came: list[str] = []
        self._stops: list[StopJob] = []
        self._resized: dict[str, tuple[Lease, str]] = {}  # lease before this turn, reason
        self._granted: dict[str, str] = {}  # reason

    def current(self, job_id: str, epoch: int, host_id: str) -> Job | None:
        """Return the job if it is known, holds a lease of this epoch and has not let go of this host; count if not."""
        job = self.state.jobs.get(job_id)
        if job is None:
            self.state.ignore("unknown job")
        elif job.lease is None or job.epoch != epoch:
            self.state.ignore("stale epoch")
        elif host_id not in job.hosts or host_id in job.exited_hosts:
            self.state.ignore("host has no part in the job")
        else:
            return job
        return None

    # -- leaving ----------------------------------------------------------------------------------------------------

    def leave(self, job: Job, host_id: str, ending: Ending, exit_code: int | None = None) -> None:
        """The host has let go of its part of the job: end the job, or first stop what is left of it elsewhere.

        Args:
            job: The job; holds a lease on the host.
            host_id: The host.
            ending: What becomes of the job, unless that was decided before.
            exit_code: What its processes there returned, when they did.
        """
        if not job.exit_code:
            job = replace(job, exit_code=exit_code)
        if job.freezing and job.ending is not None:
            job = replace(job, ending=unfrozen(job.ending, ending.reason))
        job = replace(job, frozen=None, freezing=False, exited_hosts=job.exited_hosts | {host_id})
        if job.exited_hosts.issuperset(job.hosts):
            # A lease that was not given back is lost, whatever was to become of it: its program knows nothing of that.
            owed = job.owed and job.ending is not None and not job.ending.state.terminal
            self._settle(job, ending if owed else job.ending or ending)
        elif job.state is JobState.STOPPING:
            self.state.put(job)
        else:
            self.stop(job, ending)

    def stop(self, job: Job, ending: Ending) -> None:
        """Have every host that still holds the job end it; ``ending`` says what happens then.

        Where that is an interruption after which it goes on, and the driver can, its processes are frozen instead.
        """
        why = ending.interruption
        able = job.frozen is not None or (job.freezes and job.state is JobState.RUNNING)
        freezing = able and why is not None and not why.starts_over and not why.lost
        job = replace(advance(job, JobState.STOPPING, self.now, ending.reason), ending=ending, freezing=freezing)
        self.state.put(job)
        self._command_stop(job, ending.reason)

    def stop_anyway(self, job: Job, ending: Ending) -> None:
        """Have a job that is STOPPING end differently; if it was to be frozen, its processes are ended instead."""
        froze = job.freezing
        job = replace(job, ending=ending, freezing=False)
        self.state.put(job)
        if froze:
            self._command_stop(job, ending.reason)

    def settle_frozen(self, job: Job, ending: Ending, memory_bytes: int, revision: int) -> None:
        """Its processes are frozen: take its lease away; it keeps its epoch, and goes where its ending says."""
        lease = job.lease
        if lease is None:
            return
        gpu = self.state.gpus.get(lease.shares[0].gpu_id)  # gone, perhaps, since it was to be frozen
        kept = Frozen(
            host_id=job.hosts[0],
            gpu_type=gpu.gpu_type if gpu else lease.gpu_type,
            shares=lease.shares,
            memory_bytes=memory_bytes,
            since=self.now,
            revision=max(lease.revision, revision),
        )
        self._settle(replace(job, frozen=kept, freezing=False), ending)

    def go_on(self, job: Job, reason: str, *, again: bool = False) -> None:
        """A job that could not be frozen goes on; its lease gets newer, so that no command to freeze it is left.

        Args:
            job: The job.
            reason: Why it could not.
            again: It may be tried again.
        """
        lease = job.lease
        if lease is None:
            return
        why = f"goes on, since it could not be frozen: {reason}"
        job = replace(
            advance(job, JobState.RUNNING, self.now, why),
            lease=replace(lease, revision=lease.revision + 1),
            started_hosts=frozenset(job.hosts),
            ending=None,
            freezing=False,
            frozen=None,
            freezes=again and job.freezes,
            freezes_cut=job.freezes_cut + again,
            unfreezable="" if again else f"freezing it has failed: {reason}",
        )
        self.state.put(job)
        self._resized.setdefault(job.spec.job_id, (lease, why))
        self.dirty = True

    def end_frozen(self, job: Job, reason: str) -> None:
        """Have the host of a frozen job that holds no lease end its processes: nobody needs them any more."""
        if job.frozen is not None:
            host_id, grace = job.frozen.host_id, self.state.settings.lease.stop_grace_s
            self._stops.append(
                StopJob(host_id, job.spec.job_id, job.epoch, grace, reason, revision=job.frozen.revision)
            )

    def take_back(self, job: Job) -> None:
        """Have what its program has left of a lease ended: it has given back what it was asked for."""
        job = replace(job, given_back=True)
        self.state.put(job)
        self._command_stop(job, job.reason)

    def _command_stop(self, job: Job, reason: str) -> None:
        for host_id in job.hosts:
            if host_id not in job.exited_hosts:
                self._stops.append(stop_command(job, host_id, reason, self.state.settings))

    def another_try(
        self,
        job: Job,
        reason: str,
        policies: Sequence[RestartPolicy],
        *,
        exit_code: int | None = None,
        backoff: bool,
        wait_s: float | None = None,
        host_fault: bool = False,
    ) -> Ending:
        """Return the ending of a job that did not end by itself or ended badly: another try, or failure.

        Args:
            job: The job.
            reason: What went wrong.
            policies: Restart policies which allow another try after that.
            exit_code: Reported when the job fails.
            backoff: Wait before the next try.
            wait_s: The host's services let it down, and may be there after so many seconds; None = they did not.
            host_fault: It ran, and its host, a GPU there or what serves that let it down.
        """
        if job.frozen is not None:  # it did nothing wrong: it was held still, and could not go on
            before = job.interruption or Interruption("asked", self.now)
            return Ending(JobState.QUEUED, f"starts over: {reason}", interruption=replace(before, lost=reason))
        if job.spec.hints.restart not in policies or job.was_held:
            return Ending(JobState.FAILED, reason, exit_code)
        if wait_s is not None and job.let_down < MOST_LET_DOWN:
            wait_s = min(MAX_BACKOFF_S, max(BACKOFF_S, wait_s))
            return Ending(
                JobState.QUEUED, f"{reason}; once more in {wait_s:.0f} s, no restart of its own", wait_s=wait_s
            )
        if host_fault and job.host_faults < MOST_HOST_FAULTS:
            told = f"{reason}; fault {job.host_faults + 1} of its hosts, no restart of its own"
            return Ending(JobState.QUEUED, told, backoff=backoff, host_fault=True)
        limit = self.state.settings.lease.max_restarts
        if job.restarts >= limit:
            return Ending(JobState.FAILED, f"{reason}; gave up after {job.restarts} restarts", exit_code)
        return Ending(JobState.QUEUED, f"{reason}; restart {job.restarts + 1} of {limit}", backoff=backoff)

    def _settle(self, job: Job, ending: Ending) -> None:
        """Take the lease away and move the job to where its ending says."""
        left = job
        for share in job.lease.shares if job.lease else ():
            self.members_changed[share.gpu_id] = None
        self.state.usage.pop(job.spec.job_id, None)
        self.dirty = True
        waited_s = job.lease.granted_at - job.queued_at if job.lease else 0.0
        if ending.interruption is not None:
            own = job.spec.hints.checkpoint == "own" and not ending.interruption.starts_over
            keeps = own or job.frozen is not None
            done = attained_s(job, self.state.progress.get(job.spec.job_id), self.now) if keeps else 0.0
            times = job.interruptions + 1
            job = replace(job, done_s=done, interruption=ending.interruption, interruptions=times)
        job = replace(
            advance(job, ending.state, self.now, ending.reason),
            lease=None,
            ending=None,
            given_back=False,
            freezes=False,
            freezing=False,
            started_hosts=frozenset(),
            exited_hosts=frozenset(),
            predicted=None,
            urgency=0.0,
            at_risk=False,
            colocation_log=close_log(job.colocation_log, self.now),
            exit_code=job.exit_code if ending.exit_code is None else ending.exit_code,
        )
        if not ending.state.terminal:
            job = replace(job, exit_code=None, queued_at=self.now - waited_s)  # only waiting counts as waiting
            leaves_it = ending.interruption is not None and ending.interruption.starts_over
            job = replace(job, anchor=job.hosts[0] if self._is_bound(job) and not leaves_it else None)
        if ending.wait_s is not None:
            job = replace(job, let_down=job.let_down + 1, not_before=self.now + ending.wait_s)
        elif ending.state is JobState.QUEUED and ending.interruption is None:
            failed = job.host_faults if ending.host_fault else job.restarts
            wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(failed, 30)) if ending.backoff else 0.0
            job = replace(job, not_before=self.now + wait_s if wait_s else 0.0)
            job = replace(job, host_faults=failed + 1) if ending.host_fault else replace(job, restarts=failed + 1)
        self.state.put(job)
        self._pass_memory_on(left)

    def _pass_memory_on(self, left: Job) -> None:
        """Give what a job has left to the one it made room for, before anybody else can have it."""
        why = left.ending.interruption if left.ending else None
        other = self.state.jobs.get(why.for_job or "") if why is not None and why.kind == "memory" else None
        if other is None or other.lease is None or other.state is JobState.STOPPING:
            return
        grown: dict[str, Share] = {}
        freed = self.state.gpus.keys() & {share.gpu_id for share in (left.lease.shares if left.lease else ())}
        for share in (share for share in other.lease.shares if share.gpu_id in freed):
            view = self.state.view(share.gpu_id)
            free = view.memory_bytes - sum(resident.share.memory_bytes for resident in view.residents)
            size = min(other.memory_hint_corrected or 0, share.memory_bytes + free)
            if size > share.memory_bytes:
                grown[share.gpu_id] = replace(share, memory_bytes=size)
        self.resize(other, grown, f"job {left.spec.job_id} has made room for what it uses")

    def _is_bound(self, job: Job) -> bool:
        """Whether the job can continue only on the host it was on, since its checkpoint is there."""
        shared = self.state.settings.checkpoints.directory is not None
        if job.spec.hints.checkpoint != "own" or shared or len(job.hosts) != 1 or job.hosts[0] not in self.state.hosts:
            return False
        needed = job.memory_hint_corrected or 0  # has it outgrown its host, it starts over elsewhere
        return any(gpu.memory_bytes >= needed for gpu in self.state.hosts[job.hosts[0]].gpus)

    # -- shares -----------------------------------------------------------------------------------------------------

    def grant(self, job: Job, shares: tuple[Share, ...], reason: str) -> None:
        """Give a queued job a lease with these shares and have it started; a frozen one goes on in its epoch."""
        job_id, frozen, gpu_type = job.spec.job_id, job.frozen, self.state.gpus[shares[0].gpu_id].gpu_type
        hosts = tuple(dict.fromkeys(self.state.gpus[share.gpu_id].host_id for share in shares))
        epoch, revision = (job.epoch, frozen.revision + 1) if frozen else (job.epoch + 1, 0)
        past = job.past_hosts if epoch == job.epoch else (*job.past_hosts, *job.hosts[:1])[-PAST_RUNS:]
        job = replace(
            advance(job, JobState.STARTING, self.now, reason),
            lease=Lease(job_id, epoch, revision, shares, self.now, gpu_type),
            epoch=epoch,
            hosts=hosts,
            past_hosts=past,
            not_before=0.0,
            profile=self.state.request_of(job).on(gpu_type),
            ceiling=job.ceiling if frozen else UNBOUND,
            freezes=can_freeze(self.state, job, shares),
            granted_revision=revision,
        )
        self.state.put(job)
        self._granted[job_id] = reason
        self._resized.pop(job_id, None)
        for share in shares:
            self.members_changed[share.gpu_id] = None

    def resize(self, job: Job, shares: Mapping[str, Share], reason: str) -> None:
        """Hold the job to these shares (by GPU id; the others stay) from now on."""
        lease = job.lease
        if lease is None:
            return
        new = tuple(shares.get(share.gpu_id, share) for share in lease.shares)
        if new == lease.shares:
            return
        before, _ = self._resized.setdefault(job.spec.job_id, (lease, reason))
        if any(share.memory_bytes < old.memory_bytes for share, old in zip(new, lease.shares, strict=True)):
            self.dirty = True
        steps = 2 if _shrinks(before.shares, new) and _grows(before.shares, new) else 1
        revision = max(lease.revision + 1, before.revision + steps)
        self.state.put(replace(job, lease=replace(lease, revision=revision, shares=new)))

    # -- commands ---------------------------------------------------------------------------------------------------

    def commands(self) -> list[Command]:
        """Return what the hosts have to do, in the order in which it is safe."""
        shrinking: list[ResizeShares] = []
        growing: list[ResizeShares] = []
        for job_id, (before, reason) in self._resized.items():
            job = self.state.jobs.get(job_id)
            if job is None or job.lease is None or job_id in self._granted:
                continue
            shares = job.lease.shares
            if not _grows(before.shares, shares):
                shrinking.extend(resize_commands(self.state, job, reason))
                continue
            growing.extend(resize_commands(self.state, job, reason))
            if _shrinks(before.shares, shares):  # what it gives up, others may get: that part goes first
                less = replace(job.lease, revision=job.lease.revision - 1, shares=_lesser(before.shares, shares))
                shrinking.extend(resize_commands(self.state, replace(job, lease=less), reason))
        starts: list[StartJob] = []
        for job_id, reason in self._granted.items():
            starts.extend(start_commands(self.state, self.state.jobs[job_id], reason))
        return [*self._stops, *shrinking, *growing, *starts]


def unfrozen(ending: Ending, why: str) -> Ending:
    """Return the ending of a job that was to be frozen, or was, and whose processes have ended instead."""
    if ending.interruption is None:
        return ending
    reason = f"{ending.reason}; starts over: {why}"
    return replace(ending, reason=reason, interruption=replace(ending.interruption, lost=why))


def _grows(old: Sequence[Share], new: Sequence[Share]) -> bool:
    return any(b.compute > a.compute or b.memory_bytes > a.memory_bytes for a, b in zip(old, new, strict=True))


def _shrinks(old: Sequence[Share], new: Sequence[Share]) -> bool:
    return _grows(new, old)


def _lesser(old: Sequence[Share], new: Sequence[Share]) -> tuple[Share, ...]:
    """Of each resource the smaller amount."""
    return tuple(
        replace(b, compute=min(a.compute, b.compute), memory_bytes=min(a.memory_bytes, b.memory_bytes))
        for a, b in zip(old, new, strict=True)
    )


def start_commands(state: State, job: Job, reason: str) -> list[StartJob]:
    """Return the commands that start the job, one per host, with the shares it holds now."""
    revision = job.lease.revision if job.lease else 0
    planned = state.profile_of(job)
    return [
        StartJob(
            host_id,
            job.spec,
            job.epoch,
            revision,
            state.shares_on(job, host_id),
            reason,
            planned,
            thaws=job.granted_revision > 0,  # as it is only where processes go on in their epoch
        )
        for host_id in job.hosts
    ]


def resize_commands(state: State, job: Job, reason: str) -> list[ResizeShares]:
    """Return the commands that hold the job to the shares it has now, one per host that still has it."""
    revision = job.lease.revision if job.lease else 0
    return [
        ResizeShares(host_id, job.spec.job_id, job.epoch, revision, state.shares_on(job, host_id), reason)
        for host_id in job.hosts
        if host_id not in job.exited_hosts
    ]
