"""Host agents and a fleet without Ray, for tests of the scheduler's shell."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

from scheduling import host

from cotenant.actors.enforcement.choice import NO_WHOLE_GPUS
from cotenant.actors.messages import HostReport
from cotenant.actors.scheduler_actor import Scheduler
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.events import Event, JobExited, JobFrozen, JobStarted
from cotenant.scheduler.core.reconcile import InventoryItem
from cotenant.scheduler.views import Health

Key = tuple[str, int]
_NUMBERS = itertools.count(1)


class FakeHost:
    """Does what a host agent does, at once, and keeps a record of it."""

    def __init__(self, host_id: str = "h1", gpus: int = 1, *, checkpoints: bool = False) -> None:
        self.host = host(host_id, gpus, checkpoints=checkpoints)
        self.held: dict[Key, InventoryItem] = {}
        self.events: list[Event] = []
        self.starts: list[Key] = []
        self.over: set[Key] = set()

    def apply(self, command: Command) -> None:
        """Carry out one command."""
        if isinstance(command, StartJob) and command.thaws:
            self.thaw(command)
        elif isinstance(command, StopJob) and command.freezes:
            self.freeze(command)
        elif isinstance(command, StartJob):
            key = (command.spec.job_id, command.epoch)
            if key in self.held or key in self.over:
                return
            self.held[key] = InventoryItem(*key, command.revision, "running")
            self.starts.append(key)
            self.events.append(JobStarted(*key, self.host.host_id))
        elif isinstance(command, StopJob):
            self.over.add((command.job_id, command.epoch))
            if not command.asks:
                self.end(command.job_id, command.epoch, -15)
            elif (item := self.held.get((command.job_id, command.epoch))) is not None and item.phase == "running":
                self.held[command.job_id, command.epoch] = replace(item, phase="stopping")
        elif isinstance(command, ResizeShares) and (command.job_id, command.epoch) in self.held:
            item = self.held[command.job_id, command.epoch]
            if item.phase == "running":
                self.held[command.job_id, command.epoch] = InventoryItem(
                    item.job_id, item.epoch, command.revision, "running"
                )

    def freeze(self, command: StopJob) -> None:
        """Freeze a job, or say again that it is, unless it was thawed meanwhile."""
        key = (command.job_id, command.epoch)
        item = self.held.get(key)
        if item is not None and item.phase == "running" and item.revision <= command.revision:
            self.held[key] = replace(item, frozen=True, revision=command.revision)
            self.events.append(JobFrozen(self.host.host_id, *key, command.revision, 1 << 30))

    def thaw(self, command: StartJob) -> None:
        """Let a frozen job go on, or say that it is not here."""
        key = (command.job_id, command.epoch)
        item = self.held.get(key)
        if item is None:
            self.events.append(JobExited(*key, self.host.host_id, -9, "not here any more", lost=True))
        elif item.frozen and item.revision < command.revision:
            self.held[key] = replace(item, frozen=False, revision=command.revision)
            self.events.append(JobStarted(*key, self.host.host_id))

    def end(self, job_id: str, epoch: int, exit_code: int, *, lost: bool = False) -> None:
        """The job's processes are gone."""
        item = self.held.get((job_id, epoch))
        if item is not None and item.phase != "exited":
            self.held[job_id, epoch] = replace(item, phase="exited")
            self.events.append(JobExited(job_id, epoch, self.host.host_id, exit_code, lost=lost))

    def message(self) -> HostReport:
        """The next report."""
        missing = "" if any(gpu.checkpoints for gpu in self.host.gpus) else NO_WHOLE_GPUS
        items, events = tuple(self.held.values()), tuple(self.events)
        return HostReport(self.host, items, events, "", "", {}, next(_NUMBERS), missing)

    def answered(self, report: HostReport, recorded: bool) -> None:
        """Take the scheduler's answer in."""
        if not recorded:
            return
        del self.events[: len(report.events)]
        for event in report.events:
            if isinstance(event, JobExited):
                self.held.pop((event.job_id, event.epoch), None)

    def running(self) -> list[Key]:
        """Jobs with processes that run."""
        return [key for key, item in self.held.items() if item.phase == "running" and not item.frozen]


class FakeFleet:
    """Delivers commands to fake hosts, but no more of them than ``limit``: then the scheduler counts as dead."""

    def __init__(self, *hosts: FakeHost, limit: int | None = None, identity: str | None = None) -> None:
        self.hosts = {one.host.host_id: one for one in hosts}
        self._identity = identity or str(next(_NUMBERS))
        self.left = limit
        self.forgotten: list[str] = []
        self._sending = threading.Lock()  # commands are sent from several threads of a scheduler

    def identity(self) -> str:
        """See ``Fleet``."""
        return self._identity

    def ensure_agents(self) -> set[str]:
        """See ``Fleet``."""
        return set(self.hosts)

    def why_gone(self, host_id: str) -> str:
        """See ``Fleet``."""
        return "Ray says the node is dead"

    def forget(self, host_id: str) -> None:
        """See ``Fleet``."""
        self.forgotten.append(host_id)

    def dispatch(self, commands: Sequence[Command]) -> None:
        """See ``Fleet``."""
        with self._sending:
            for command in commands:
                if self.left is not None:
                    if self.left == 0:
                        return
                    self.left -= 1
                if command.host_id in self.hosts:
                    self.hosts[command.host_id].apply(command)

    def resize(self, size: object) -> None:
        """See ``Fleet``."""

    def health(self, silence: dict[str, float], note: str) -> Health:
        """See ``Fleet``."""
        return Health(ok=not note, components=[])


class PromptScheduler(Scheduler):
    """Answers when its commands are sent, too; the real one answers first, and a test would have to wait."""

    def _commit(self, events: Sequence[Event]) -> None:
        try:
            super()._commit(events)
        finally:
            super()._commit([])  # is answered after everything is sent that was answered before
