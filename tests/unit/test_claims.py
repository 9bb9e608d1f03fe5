"""GPUs that are kept for a job: for how long, and for whom they are not even asked."""

from __future__ import annotations

import pytest
from scheduling import Driver, host, on, saver

from cotenant.configs.settings import CheckpointSettings, Settings
from cotenant.scheduler.core import walk
from cotenant.scheduler.core.board import CLAIM_SLACK_S
from cotenant.scheduler.core.events import MoveRequested, Tick

SHARED = Settings(checkpoints=CheckpointSettings(directory="/everywhere"))


@pytest.mark.parametrize("few_gpus", [0, walk.FEW_GPUS])
@pytest.mark.parametrize("waits", [True, False])
def test_what_is_kept_for_too_long_is_offered_to_others_although_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, few_gpus: int, waits: bool
) -> None:
    """A job that is being moved does not end; nobody else comes, ends or changes."""
    monkeypatch.setattr(walk, "FEW_GPUS", few_gpus)
    driver = Driver(host(gpus=2), configured=SHARED)
    driver.run(saver("a"))
    driver.do(MoveRequested("a", "x"))
    kept_s = SHARED.checkpoints.grace_s + CLAIM_SLACK_S
    if waits:
        driver.submit(saver("b"))
        assert (driver.state("a"), driver.state("b")) == ("STOPPING", "QUEUED")
        driver.do(Tick(), after_s=kept_s - 2.0)
        assert on(driver, "b") == []
        driver.do(Tick())
    else:
        driver.do(Tick(), after_s=kept_s)
        driver.submit(saver("b"))
    assert not driver.core.state.moves.claims
    assert on(driver, "b") == ["h1-1"]
