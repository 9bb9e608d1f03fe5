"""What the scheduler's shell remembers of those it talks to: requests that wait, hosts that report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cotenant.scheduler.core.events import Event


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
    number: int = 0  # of the newest report
