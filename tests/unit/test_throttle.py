"""The arithmetic that holds a process to its share, on clocks of its own."""

from __future__ import annotations

import pytest

from cotenant.actors.shim.throttle import CREDIT_S, MAX_DEBT_S, Throttle


class Clocks:
    """Wall and CPU time of a pretended process."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.cpu = 7.0

    def run(self, cpu_s: float, wait_s: float = 0.0) -> None:
        self.cpu += cpu_s
        self.wall += cpu_s + wait_s

    def throttle(self) -> Throttle:
        return Throttle(lambda: self.wall, lambda: self.cpu)


@pytest.mark.parametrize("target", [0.05, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.4])
@pytest.mark.parametrize("input_s", [0.0, 0.05])
def test_utilisation_is_the_share_also_when_input_is_prefetched(target, step_s, input_s):
    """Input comes every ``input_s``, and two batches are kept ready, so waiting for input hides in the sleep."""
    clocks = Clocks()
    throttle = clocks.throttle()
    started, ready_at, stock = clocks.wall, clocks.wall, 2
    while clocks.wall - started < 400 * step_s / target:
        if input_s:
            arrived = int((clocks.wall - ready_at) / input_s)
            stock, ready_at = min(stock + arrived, 2), ready_at + arrived * input_s
            if stock == 0:
                clocks.wall, ready_at, stock = ready_at + input_s, ready_at + input_s, 1
            stock -= 1
        clocks.run(step_s)
        clocks.wall += throttle.settle(target)
    used = (clocks.cpu - 7.0) / (clocks.wall - started)
    solo = step_s / max(step_s, input_s) if input_s else 1.0
    assert used == pytest.approx(min(target, solo), abs=0.02)


def test_who_stays_below_the_share_is_never_delayed():
    clocks = Clocks()
    throttle = clocks.throttle()
    for _ in range(100):
        clocks.run(0.04, wait_s=0.06)
        assert throttle.settle(0.5) == 0.0


def test_credit_is_bounded():
    clocks = Clocks()
    throttle = clocks.throttle()
    clocks.wall += 3600
    assert throttle.settle(0.5) == 0.0
    clocks.run(1.0)
    assert throttle.settle(0.5) == pytest.approx((1.0 - 0.5 - CREDIT_S) / 0.5)


def test_debt_is_paid_back_but_bounded():
    clocks = Clocks()
    throttle = clocks.throttle()
    clocks.run(4.0)
    assert throttle.settle(0.5) == pytest.approx(4.0)
    throttle.restart()
    clocks.run(600.0)
    assert throttle.settle(0.5) == pytest.approx(MAX_DEBT_S / 0.5)
