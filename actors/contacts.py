"""What the scheduler's shell remembers of those it talks to: requests that wait, hosts that report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cotenant.actors.messages import HostReport
from cotenant.scheduler.core.events import Event
from cotenant.scheduler.errors import NotHandled
from cotenant.scheduler.journal.ledger import Taken


@dataclass(slots=True)
class Request:
    """Events that somebody waits for to be recorded and handled."""

    events: Sequence[Event]
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class HostContact:
    """What the shell (not the core) remembers of a host. ``seen`` is monotonic: the wall clock may jump."""

    seen: float
    claim: str = ""
    note: str = ""
    controls: Mapping[str, str] = field(default_factory=dict)
    no_freezing: str | None = None
    number: int = 0  # of the newest report
    agent_since: float | None = None  # Unix seconds
    anew: int = 0  # times its agent was started anew

    def heard(self, report: HostReport) -> None:
        """Remember what a report says for people."""
        since = report.host.joined_at
        self.anew += self.agent_since not in (None, since)
        self.agent_since = since
        self.claim, self.note, self.controls = report.claim, report.note, report.controls
        self.no_freezing = report.no_freezing

    def told(self) -> dict[str, str | None]:
        """Return what views of the host tell of it."""
        notes = [self.note] if self.note else []
        if self.anew and self.agent_since is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.agent_since))
            notes.append(f"its agent had ended and was started anew at {at} (ends so far: {self.anew})")
        return {"claim": self.claim, "note": "; ".join(notes), "no_freezing": self.no_freezing}


def answer(group: Sequence[Request], taken: Taken) -> None:
    """Tell everybody whose requests were taken in together what came of his."""
    first = 0
    for request in group:
        mine = range(first, first + len(request.events))
        first = mine.stop
        refused = [taken.refused[position] for position in mine if position in taken.refused]
        if refused:
            request.done.set_exception(NotHandled(f"a fault of the scheduler's; set aside: {'; '.join(refused)}"))
        else:
            request.done.set_result(None)


def log(text: str) -> None:
    """Write a line to the scheduler actor's log."""
    print(f"cotenant scheduler: {text}", flush=True)  # noqa: T201 - the actor's log
