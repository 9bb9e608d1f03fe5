"""The host agent's line to the scheduler: nothing is told for good before it is recorded; answers renew the leases."""

from __future__ import annotations

import threading
import time

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from scheduling import host
from support import wait_until

from cotenant.actors import vital
from cotenant.actors.messages import HostReport
from cotenant.actors.uplink import Uplink
from cotenant.actors.vital import start_vital_thread
from cotenant.scheduler.core.events import Event, JobExited
from cotenant.scheduler.journal.store import JournalError

EXIT = JobExited("a", 1, "h1", 0)
LATER = JobExited("b", 1, "h1", 0)


class Agent:
    """The host agent's side, with answers as the test wants them."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[HostReport] = []
        self.renewed: list[float] = []
        self.done: list[Event] = []
        self.uplink = Uplink(self, ttl_s=10.0, period_s=0.01)

    def report(self, number: int, events: tuple[Event, ...], note: str) -> HostReport:
        return HostReport(host(), (), events, "", note, {}, number)

    def send(self, report: HostReport) -> bool:
        self.sent.append(report)
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def renew(self, valid_until_s: float) -> None:
        self.renewed.append(valid_until_s)

    def recorded(self, events: tuple[Event, ...]) -> None:
        self.done.extend(events)


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("no such actor"),
        GetTimeoutError("slow"),
        RayActorError(),
        RayTaskError("report", "traceback", JournalError("full")).as_instanceof_cause(),
        RayTaskError("report", "traceback", KeyError("a fault")).as_instanceof_cause(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_report_that_failed_is_sent_again_and_renews_nothing(failure: Exception) -> None:
    agent = Agent(failure)
    agent.uplink.tell(EXIT)
    assert agent.uplink.exchange() is False
    assert (agent.renewed, agent.done) == ([], [])
    assert agent.uplink.exchange() is True
    assert [report.events for report in agent.sent] == [(EXIT,), (EXIT,)]
    assert agent.sent[1].note.startswith("last report failed")
    assert agent.done == [EXIT]


def test_a_scheduler_that_cannot_record_renews_the_leases() -> None:
    agent = Agent(False)
    agent.uplink.tell(EXIT)
    before = time.monotonic()
    assert agent.uplink.exchange() is False
    assert before + 10 <= agent.renewed[0] <= time.monotonic() + 10
    assert agent.done == []
    agent.uplink.exchange()
    assert agent.done == [EXIT]


def test_what_happens_while_a_report_is_under_way_is_sent_afterwards() -> None:
    agent = Agent()
    agent.uplink.tell(EXIT)
    send = agent.send
    agent.send = lambda report: (agent.uplink.tell(LATER), send(report))[1]  # type: ignore[method-assign]
    agent.uplink.exchange()
    assert agent.done == [EXIT]
    agent.send = send  # type: ignore[method-assign]
    agent.uplink.exchange()
    assert agent.done == [EXIT, LATER]
    agent.uplink.exchange()
    assert [report.events for report in agent.sent] == [(EXIT,), (LATER,), ()]


def test_the_lease_counts_from_the_moment_of_sending_and_numbers_grow() -> None:
    agent = Agent()
    send = agent.send
    agent.send = lambda report: (time.sleep(0.1), send(report))[1]  # type: ignore[method-assign]
    before = time.monotonic()
    agent.uplink.exchange()
    agent.uplink.exchange()
    assert agent.renewed[0] < before + 10.09
    assert agent.sent[0].number < agent.sent[1].number


def test_it_reports_until_it_is_to_stop() -> None:
    agent = Agent(GetTimeoutError("slow"))
    stopping = threading.Event()
    thread = threading.Thread(target=agent.uplink.run, args=(stopping,))
    thread.start()
    agent.uplink.tell(EXIT)
    wait_until(lambda: agent.done == [EXIT] and len(agent.sent) > 5, 5, "it reports again and again")
    stopping.set()
    agent.uplink.wake()
    thread.join(5)
    assert not thread.is_alive()


def test_a_vital_thread_that_fails_takes_the_process_with_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(vital.os, "_exit", exits.append)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    start_vital_thread("device", fail).join(5)
    assert exits == [1]
    said = capfd.readouterr().err
    assert "RuntimeError: the device is gone" in said
    assert "the device thread failed" in said
    start_vital_thread("device", lambda: None).join(5)
    assert exits == [1]
