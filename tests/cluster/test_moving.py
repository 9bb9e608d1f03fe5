"""A real training job on real Ray: moved, suspended, resumed, and not a step lost or made twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import wait_until

from cotenant.scheduler.core.model import Hints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TRAIN = """
import sys, time
import torch
from cotenant.checkpointing import Checkpointer, continues

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Checkpointer(model=model, optimizer=optimizer) as saved:
    first = saved.restore()
    print("from", first, continues(), flush=True)
    step = first
    while not (step >= 40 and len(sys.argv) > 1 and __import__("os").path.exists(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        step += 1
        with open(sys.argv[2], "a") as log:
            log.write(f"{step}\\n")
        saved.step_done(step)
        time.sleep(0.05)
"""


def test_a_job_is_moved_suspended_and_resumed_without_losing_a_step(single, tmp_path: Path) -> None:
    enough, log = tmp_path / "enough", tmp_path / "steps"
    hints = Hints(gpu_memory=200 << 20, compute=0.4, checkpoint="own", grace_s=20.0)
    view = single.run(TRAIN, str(enough), str(log), hints=hints)

    def steps() -> list[int]:
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def goes_on(what: str) -> None:
        before = len(steps())
        wait_until(lambda: len(steps()) > before + 3, 60, what)

    goes_on("the job trains")
    first = single.client.job(view.job_id).shares[0].gpu_id
    single.client.move(view.job_id)
    wait_until(lambda: single.client.job(view.job_id).epoch == 2, 40, "it was started again")
    goes_on("it goes on elsewhere")
    moved = single.client.job(view.job_id)
    assert (moved.state, moved.shares[0].gpu_id != first, moved.restarts) == ("RUNNING", True, 0)

    single.client.suspend(view.job_id)
    single.reach(view, "SUSPENDED", 40.0)
    at = steps()
    assert all(view.job_id not in gpu.jobs for gpu in single.client.gpus())
    assert single.client.explain(view.job_id).summary == "SUSPENDED: suspended by user"
    single.client.resume(view.job_id)
    goes_on("it goes on after it was resumed")
    assert steps()[: len(at)] == at
    enough.touch()
    ended = single.finish(view, 60.0)
    assert (ended.state, ended.exit_code, ended.epoch) == ("SUCCEEDED", 0, 3), ended
    assert steps() == list(range(1, len(steps()) + 1))
