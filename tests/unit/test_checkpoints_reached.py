"""Moves to where a job's checkpoint can be read, and to where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import Driver, gone, host, on, saver, settings

from cotenant.configs.settings import CheckpointSettings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import HostJoined, MoveRequested
from cotenant.scheduler.core.state import State

SHARED = CheckpointSettings(directory="/everywhere")


@pytest.mark.parametrize(
    ("shared", "hints", "to", "said", "done_s"),
    [
        (False, {}, "h2-0", "other hosts cannot read its checkpoint on h1.example", 0.0),
        (False, {"checkpoint": "none"}, "h2-0", "the job does not say that it continues from a checkpoint", 0.0),
        (False, {}, "h1-1", "", 50.0),
        (True, {}, "h2-0", "", 50.0),
    ],
)
def test_whoever_loses_his_work_is_told(
    *, shared: bool, hints: dict[str, Any], to: str, said: str, done_s: float
) -> None:
    kept = SHARED if shared else CheckpointSettings()
    driver = Driver(host(gpus=2), configured=settings().model_copy(update={"checkpoints": kept}))
    driver.run(saver("a", **hints))
    driver.do(HostJoined(host("h2")))
    driver.do(MoveRequested("a", "x", (to,)), after_s=49.0)
    view = queries.job(driver.core.state, "a")
    assert (view.state, view.starts_over.partition(" (")[0]) == ("STOPPING", said)
    driver.do(gone(driver, "a"))
    assert on(driver, "a") == [to]
    assert driver.job("a").done_s == pytest.approx(done_s, abs=2.0)
    assert queries.job(driver.core.state, "a").starts_over == ""
    text = driver.core.state.to_json()
    assert State.from_json(text).to_json() == text


def test_who_names_no_place_loses_nothing() -> None:
    driver = Driver(host(gpus=2))
    driver.run(saver("a"))
    driver.do(HostJoined(host("h2", gpus=4)), MoveRequested("a", "x"))
    driver.do(gone(driver, "a"))
    assert on(driver, "a") == ["h1-1"]
