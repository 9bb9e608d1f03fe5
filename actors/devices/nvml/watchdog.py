"""Calls into a driver that may never come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(RuntimeError):
    """A call did not come back in time, now or earlier: the device is not asked again."""


@dataclass(frozen=True, slots=True)
class _Order:
    call: Callable[[], Any]
    answer: Future[Any]


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

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Have a function called; its answer, or its exception, comes when it has returned."""
        answer: Future[T] = Future()
        self._orders.put(_Order(lambda: function(*args), answer))
        return answer

    def call(self, timeout_s: float, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` and wait for it; its exceptions are raised here.

        Raises:
            Hung: It did not return within ``timeout_s``, or an earlier call did not.
        """
        if self._hung:
            raise Hung(self._hung)
        answer = self.submit(function, *args)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.done():
                raise  # the function's own
            self._hung = f"{self._what}: a call did not return within {timeout_s:g} s"
            raise Hung(self._hung) from None

    def close(self) -> None:
        """Let the thread end once it is idle. Call once."""
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            began = time.thread_time()
            try:
                answer = order.call()
            except BaseException as error:  # noqa: BLE001 (handed to the caller, whatever it is)
                order.answer.set_exception(error)
            else:
                order.answer.set_result(answer)
            self.cost_s += time.thread_time() - began
