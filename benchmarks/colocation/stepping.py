"""One window of one member: steps from a common start to a common end, and what the counted ones took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cotenant.actors.shim.throttle import Throttle


@dataclass(slots=True)
class Counted:
    """The steps that were completed inside the counted part of a window.

    Attributes:
        ends: When each step was completed, seconds of the monotonic clock.
        step_s: How long each took, without the time that a cap made it wait.
        busy_s: CPU time that they took in this process.
    """

    ends: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0


def run_window(
    step: Callable[[], None],
    start: float,
    count_from: float,
    until: float,
    *,
    duty: float | None = None,
    duty_of_steps: bool = False,
    on_count: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    cpu_clock: Callable[[], float] = time.process_time,
    sleep: Callable[[float], None] = time.sleep,
) -> Counted:
    """Step from ``start`` to ``until`` and count what is completed from ``count_from`` on.

    Args:
        step: One step; returns when its work on the device is done.
        start: When all members of the visit begin, seconds of the monotonic clock.
        count_from: Beginning of the counted part.
        until: End of the window. A step that is not completed by then does not count.
        duty: Fraction of the device this member may use, in (0, 1]; None does not hold it back.
        duty_of_steps: What ``duty`` caps: the time inside steps if true, else the process's CPU time.
        on_count: Called once, between two steps, when counting begins.
        clock: Monotonic clock.
        cpu_clock: CPU time of this process.
        sleep: Waits for a number of seconds.
    """
    counted = Counted()
    counting = False
    stepped_s = 0.0
    _sleep_until(start, clock, sleep)
    throttle = Throttle(clock, (lambda: stepped_s) if duty_of_steps else cpu_clock)
    while (begin := clock()) < until:
        if begin >= count_from and not counting:
            counting = True
            on_count()
        cpu_begin = cpu_clock()
        step()
        end = clock()
        stepped_s += end - begin
        if count_from <= end <= until:
            counted.ends.append(end)
            counted.step_s.append(end - begin)
            counted.busy_s += cpu_clock() - cpu_begin
        if duty is not None:
            _sleep_until(min(until, clock() + throttle.settle(duty)), clock, sleep)
    return counted


def _sleep_until(moment: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    left = moment - clock()
    if left > 0.0:
        sleep(left)
