"""A client that stays with its job: streams the output, passes signals on, and ends as the job ends."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView

NOT_PLACEABLE = 2
_STATUS_S = 2.0  # how often a waiting job is asked what it waits for
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_WAITING = ("PENDING", "QUEUED", "SUSPENDED")


class SignalInbox:
    """Collects SIGINT and SIGTERM instead of dying of them, from before the job is submitted until it has ended.

    The handler only puts the number into a queue: calling Ray inside a handler could re-enter a call in progress.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._collect) for number in _FORWARDED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _collect(self, number: int, _frame: FrameType | None) -> None:
        self.items.put(number)


def follow(client: Client, job_id: str, inbox: SignalInbox, out: BinaryIO, say: Callable[[str], None]) -> int:
    """Copy a job's output to ``out`` as it comes and return the exit code to end with.

    The first signal stops the job (its last output is still streamed); a second one leaves at once.

    Args:
        client: The connection; also used from the thread that copies.
        job_id: The job.
        inbox: Entered before the job was submitted.
        out: Where the output goes, unchanged.
        say: Tells the user one line about what happens.
    """
    threading.Thread(target=_copy, args=(client, job_id, inbox, out), name="output", daemon=True).start()
    signalled: int | None = None
    told = Told()
    while True:
        try:
            item = inbox.items.get(timeout=_STATUS_S)
        except queue.Empty:
            told.look(client.job(job_id), say)
            continue
        if isinstance(item, Exception):
            raise item
        if item is None:
            return _outcome(client.job(job_id), signalled, say)
        if signalled is not None:
            say(f"{job_id}: {signal.Signals(item).name} again, leaving; the job is being stopped")
            return 128 + item
        signalled = item
        client.stop(job_id, reason=f"its client received {signal.Signals(item).name}")


def _copy(client: Client, job_id: str, inbox: SignalInbox, out: BinaryIO) -> None:
    """Copy until the job has ended. A reader that is gone counts as SIGPIPE; the copying goes on to see the end."""
    broken = False
    try:
        for data in client.stream_logs(job_id, renew=True):
            if broken:
                continue
            try:
                out.write(data)
                out.flush()
            except BrokenPipeError:
                broken = True
                inbox.items.put(signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
        inbox.items.put(error)
    else:
        inbox.items.put(None)


class Told:
    """What the user of a job was told already: what it waits for, and that it may miss its deadline."""

    def __init__(self) -> None:
        self._waits: tuple[str, ...] = ()
        self._alarm = ""

    def look(self, view: JobView, say: Callable[[str], None]) -> None:
        """Say what is news: once per wait what is waited for (the numbers change all the time), and of a deadline when
        it becomes at risk, cannot be met or is missed.
        """
        waits = (view.state, view.reason, "known" if view.waits else "") if view.state in _WAITING else ()
        alarm = _alarm(view.deadline)
        news = []
        if waits and waits != self._waits:
            news.append(view.waits or view.reason)
        if alarm and (news or alarm != self._alarm):
            news.append(view.deadline)
        if news:
            say(f"{view.job_id}: {': '.join(filter(None, (view.state, '; '.join(filter(None, news)))))}")
        self._waits, self._alarm = waits, alarm


def _alarm(deadline: str) -> str:
    """Return what is wrong with a deadline, of what the scheduler says of it; empty while nothing is."""
    if deadline.startswith("deadline missed"):
        return "missed"
    verdict = deadline.rpartition(": ")[2]
    return verdict if verdict in {"at risk", "cannot be met"} else ""


def _outcome(view: JobView, signalled: int | None, say: Callable[[str], None]) -> int:
    if view.state != "SUCCEEDED":
        say(f"{view.job_id}: {view.state}" + (f": {view.reason}" if view.reason else ""))
    return 128 + signalled if signalled is not None else exit_code(view)


def exit_code(view: JobView) -> int:
    """Return what the command line ends with for a job that has ended: the job's own exit code where it has one."""
    if view.not_placeable:
        return NOT_PLACEABLE
    if view.exit_code is not None and view.exit_code < 0:
        return 128 - view.exit_code
    if view.state == "SUCCEEDED":
        return view.exit_code or 0
    return view.exit_code or 1
