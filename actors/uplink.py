"""The host agent's line to the scheduler: what happened goes up until it is acknowledged; answers renew the leases."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from ray.exceptions import RayError

from cotenant.actors.messages import HostReport
from cotenant.scheduler.core.events import Event

RETRY_S = 0.2


class UplinkHost(Protocol):
    """What the uplink needs of its host agent."""

    def report(self, number: int, events: tuple[Event, ...], note: str) -> HostReport:
        """Return a report with these events and the inventory of now."""
        ...

    def send(self, report: HostReport) -> bool:
        """Send a report and wait for the answer: whether its events are recorded.

        Raises:
            ValueError: There is no scheduler.
            ray.exceptions.RayError: It does not answer, or could not take the report in.
        """
        ...

    def renew(self, valid_until_s: float) -> None:
        """Let the leases hold until then, ``time.monotonic()``."""
        ...

    def recorded(self, events: tuple[Event, ...]) -> None:
        """The scheduler has recorded these events; they are never sent again."""
        ...


class Uplink:
    """Events wait here, in order, until the scheduler has recorded them. ``tell`` may be called from any thread.

    Args:
        host: The host agent.
        ttl_s: How long an answered report makes the host's leases hold.
        period_s: Time between two reports when nothing happens.
    """

    def __init__(self, host: UplinkHost, ttl_s: float, period_s: float) -> None:
        self._host = host
        self._ttl_s = ttl_s
        self._period_s = period_s
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._note = ""

    def tell(self, event: Event) -> None:
        """Have this event sent, soon."""
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def exchange(self) -> bool:
        """Send one report; whether all that was to be told is recorded."""
        sent_at = time.monotonic()
        with self._news:
            events = tuple(self._events)
        try:
            # Numbers of a later agent of this host are greater too: the clock runs from the boot of the machine.
            recorded = self._host.send(self._host.report(time.monotonic_ns(), events, self._note))
        except (ValueError, RayError) as error:
            # The scheduler is gone or restarting: keep enforcing the last plan and keep the events for later.
            self._note = f"last report failed: {type(error).__name__}"
            return False
        # Valid from the moment of sending, so the scheduler never believes a lease dead that is still alive.
        self._host.renew(sent_at + self._ttl_s)
        self._note = "" if recorded else "the scheduler cannot record what happens here"
        if recorded:
            with self._news:
                del self._events[: len(events)]
            self._host.recorded(events)
        return recorded

    def run(self, stopping: threading.Event) -> None:
        """Report every period, at once when something happens, and a little later when that failed."""
        while not stopping.is_set():
            begun = time.monotonic()
            if not self.exchange():
                stopping.wait(RETRY_S)
                continue
            with self._news:
                remaining = begun + self._period_s - time.monotonic()
                self._news.wait_for(lambda: self._events or stopping.is_set(), max(0.0, remaining))

    def wake(self) -> None:
        """Have ``run`` look whether it shall stop."""
        with self._news:
            self._news.notify_all()
