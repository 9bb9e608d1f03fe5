"""What ``explain`` says of a job's slowdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from scheduling import Driver, half, host, measurement, profile, report

from cotenant import _render
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.slowdowns import NOT_MEASURED


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (4.0, "measured now: 2.50 times slower than alone, more than the 1.20 that it accepts"),
        (9.0, "measured now: 1.11 times slower than alone, within the 1.20 that it accepts"),
        (8.32, "measured now: 1.20 times slower than alone, within the 1.20 that it accepts"),
        (12.0, "measured now: no slower than alone, within the 1.20 that it accepts"),
        (None, None),
    ],
)
def test_what_is_measured_is_told_beside_what_the_job_accepts(rate: float | None, told: str | None) -> None:
    driver = Driver(host())
    driver.run(half("a", max_slowdown=1.2), half("b", max_slowdown=9.0))
    driver.do(report("h1", measurement("a", "h1-0", profile(rate=10.0), step_rate=rate)))
    details = queries.explain(driver.core.state, "a", driver.now).details
    assert [line for line in details if "measured now" in line] == ([told] if told else [])
    view = queries.job(driver.core.state, "a")
    assert view.slowdown_measured == (None if rate is None else 10.0 / rate)
    assert view.slowdown_predicted is not None


@pytest.mark.parametrize(("rate", "told"), [(10.0, 0), (9.9, 0), (7.25, 1), (None, 0)])
def test_what_has_its_gpu_to_itself_is_slowed_down_by_nobody(rate: float | None, told: int) -> None:
    driver = Driver(host())
    driver.run(half("a", max_slowdown=1.2))
    driver.do(report("h1", measurement("a", "h1-0", profile(rate=10.0), step_rate=rate)))
    details = "\n".join(queries.explain(driver.core.state, "a", driver.now).details)
    assert "slower than alone" not in details
    assert details.count("no neighbour slows it, yet its steps take 1.38 times as long as when it was measured") == told
    view = queries.job(driver.core.state, "a")
    assert (view.slowdown_measured, view.slowdown_predicted) == (None, None)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(_render.jobs([view]))
    assert " alone " in console.export_text()


@pytest.mark.parametrize(
    ("neighbours", "rate", "solo", "told"),
    [(1, 4.0, None, True), (1, 4.0, 10.0, False), (0, 4.0, None, False), (1, None, None, False)],
)
def test_what_cannot_be_measured_is_said(neighbours: int, rate: float | None, solo: float | None, told: bool) -> None:
    driver = Driver(host())
    driver.run(half("a"))
    driver.do(report("h1", measurement("a", "h1-0", profile(rate=solo), step_rate=rate, neighbours=neighbours)))
    assert (NOT_MEASURED in queries.explain(driver.core.state, "a", driver.now).details) == told
