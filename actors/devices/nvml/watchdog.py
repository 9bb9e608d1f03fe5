"""Calls into a driver that may never come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(RuntimeError):
    """A call did not come back in time, now or earlier: the device is not asked again.

    Attributes:
        answer: Where the answer of the call that was waited for will be; None when it was not made.
    """

    def __init__(self, reason: str, answer: Future[Any] | None = None) -> None:
        self.answer = answer
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class _Order:
    call: Callable[[], Any]
    deliver: Callable[[Any, BaseException | None], None]


class Watchdog:
    """Runs calls one after the other in a thread of its own, so that whoever asks need not wait for one that hangs.

    Python cannot end a thread that is stuck in a driver: it is left behind (as a daemon it does not keep the program
    from ending).

    Attributes:
        cost_s: CPU time of the calls so far.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._hung = ""
        self.cost_s = 0.0
        threading.Thread(target=self._work, name=f"{what} calls", daemon=True).start()

    def post(self, function: Callable[[], T], deliver: Callable[[Any, BaseException | None], None]) -> None:
        """Have a function called, and ``deliver`` with its answer and None, or None and its exception.

        ``deliver`` is called in the thread that made the call; it must not raise, nor wait.
        """
        self._orders.put(_Order(function, deliver))

    def start(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Have a function called; returns where its answer, or its exception, will be."""
        answer: Future[T] = Future()
        self.post(lambda: function(*args), partial(_settle, answer))
        return answer

    def call(self, timeout_s: float | None, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` and wait for it, ``timeout_s`` None = for ever; its exceptions are raised here.

        Raises:
            Hung: It did not return within ``timeout_s``, or an earlier call did not.
        """
        if self._hung:
            raise Hung(self._hung)
        answer = self.start(function, *args)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.done():
                raise  # the function's own
            self._hung = f"{self._what}: a call did not return within {timeout_s:g} s"
            raise Hung(self._hung, answer) from None

    def close(self) -> None:
        """Let the thread end once it is idle. Call once."""
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            began = time.thread_time()
            try:
                answer = order.call()
            except BaseException as error:  # noqa: BLE001 (handed to the caller, whatever it is)
                order.deliver(None, error)
            else:
                order.deliver(answer, None)
            self.cost_s += time.thread_time() - began


def call_within(timeout_s: float | None, what: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function once, in a thread of its own; see ``Watchdog.call``."""
    watchdog = Watchdog(what)
    try:
        return watchdog.call(timeout_s, function, *args)
    finally:
        watchdog.close()


def begin(what: str, function: Callable[..., T], *args: Any) -> Future[T]:
    """Have a function called once, in a thread of its own; returns where its answer, or its exception, will be."""
    watchdog = Watchdog(what)
    try:
        return watchdog.start(function, *args)
    finally:
        watchdog.close()


def _settle(future: Future[Any], answer: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)
