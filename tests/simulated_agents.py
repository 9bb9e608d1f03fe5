"""Host agents that are simulated: commands reach them in order but late, and what is stale they refuse."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduling import GIB

from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.events import (
    Event,
    FreezeFailed,
    JobExited,
    JobFrozen,
)
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.reconcile import InventoryItem, Phase


@dataclass
class Part:
    """One job on one simulated host."""

    epoch: int
    revision: int
    shares: tuple[Share, ...]
    phase: Phase = "starting"
    freezing: bool = False
    frozen: bool = False


@dataclass
class Agent:
    """A simulated host agent. ``mail`` has not arrived yet, ``outbox`` has not been reported yet.

    ``freezes``: the commands to freeze a job that have ever arrived: they may come once more.
    """

    host: Host
    reachable: bool = True
    parts: dict[str, Part] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    mail: list[tuple[float, Command]] = field(default_factory=list)
    outbox: list[Event] = field(default_factory=list)
    freezes: list[StopJob] = field(default_factory=list)

    def receive(self) -> None:
        """Do what the oldest command says, unless it is stale."""
        _, command = self.mail.pop(0)
        self.obey(command)

    def obey(self, command: Command) -> None:
        """Do what a command says, unless it is stale."""
        job_id, part = command.job_id, self.parts.get(command.job_id)
        if command.epoch < self.newest.get(job_id, 0):
            return
        self.newest[job_id] = command.epoch
        if isinstance(command, StartJob) and command.thaws:
            self.thaw(command, part)
        elif isinstance(command, StopJob) and command.freezes and part is not None:
            self.freeze(command, part)
        elif isinstance(command, StartJob):
            if part is None:
                self.parts[job_id] = Part(command.epoch, command.revision, command.shares)
                return
            assert part.epoch == command.epoch, f"{job_id} started at {command.epoch} beside {part.epoch}"
        elif isinstance(command, ResizeShares):
            if part is not None and part.epoch == command.epoch and command.revision > part.revision:
                part.revision, part.shares = command.revision, command.shares
        elif part is None:
            self.newest[job_id] = command.epoch + 1  # a start of this epoch that comes later is refused
        elif part.epoch == command.epoch:
            part.phase = "stopping"

    def thaw(self, command: StartJob, part: Part | None) -> None:
        """Begin to let frozen processes go on, or say that there are none."""
        job_id, epoch = command.job_id, command.epoch
        if part is None or part.epoch != epoch:
            self.newest[job_id] = epoch + 1
            self.outbox.append(JobExited(job_id, epoch, self.host.host_id, -9, "not here any more", lost=True))
        elif part.frozen and part.phase == "running" and command.revision > part.revision:
            part.phase, part.frozen, part.revision, part.shares = "starting", False, command.revision, command.shares

    def freeze(self, command: StopJob, part: Part) -> None:
        """Begin to freeze processes, or say again that they are; processes that are to end do."""
        self.freezes.append(command)
        if part.epoch != command.epoch or part.phase == "stopping" or part.revision > command.revision:
            return
        part.revision = command.revision
        if part.frozen:
            self.say_frozen(command.job_id, part)
        else:
            part.freezing = True

    def say_frozen(self, job_id: str, part: Part) -> None:
        self.outbox.append(JobFrozen(self.host.host_id, job_id, part.epoch, part.revision, GIB))

    def end_freeze(self, job_id: str, part: Part, ok: bool) -> None:
        """The driver has frozen the processes, or says that it cannot."""
        part.freezing, part.frozen = False, ok
        if ok:
            part.phase = "running"  # what was about to go on does not
            self.say_frozen(job_id, part)
        else:
            self.outbox.append(FreezeFailed(self.host.host_id, job_id, part.epoch, part.revision, "busy"))

    def end(self, job_id: str, event: Event | None) -> None:
        """The job's processes are gone; ``event`` None = without a word."""
        self.newest[job_id] = self.parts.pop(job_id).epoch + 1
        if event is not None:
            self.outbox.append(event)

    def inventory(self) -> list[InventoryItem]:
        return [InventoryItem(job_id, p.epoch, p.revision, p.phase, p.frozen) for job_id, p in self.parts.items()]
