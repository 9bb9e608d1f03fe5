"""torchrun as one unit: its ranks are in sessions of their own, and are suspended and go on together."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from launching import GPU, OTHER, Host
from support import wait_until

from cotenant.placement.types import Share

STARTED_S, ENDED_S = 100.0, 60.0  # torch is imported three times each
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from cotenant.checkpointing import Checkpointer

dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Checkpointer(model=model, optimizer=optimizer) as saved:
    first = saved.restore()
    for step in range(first, 100_000):
        dist.all_reduce(torch.zeros(1))
        optimizer.step()
        saved.step_done(step + 1)
        if step == first + 3:
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: 4 steps from {first}", flush=True)
        time.sleep(0.01)
"""


def run_until_both_step(host: Host, program: Path, epoch: int) -> set[int]:
    """Start it, wait until both ranks have stepped, suspend it; returns from which steps the ranks began."""
    host.launch(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)),
        epoch=epoch,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        shares=[Share(gpu.gpu_id, 1 << 30, 1.0) for gpu in (GPU, OTHER)],
        grace_s=ENDED_S,
        saves=True,
    )

    def begun() -> list[str]:
        host.launcher.renew(time.monotonic() + ENDED_S)
        return re.findall(r"rank [01] of 2: 4 steps from (\d+)", host.output(epoch=epoch))

    wait_until(lambda: len(begun()) == 2, STARTED_S, "both ranks to step")
    assert len(host.launcher.root_pids("job")) == 1  # one unit, however many ranks
    host.launcher.stop("job", epoch, ENDED_S, "suspended by user")
    exited = host.exited(timeout_s=ENDED_S)
    assert exited.stopped
    assert host.processes() == []
    host.launcher.release("job", epoch)
    return {int(first) for first in begun()}


@pytest.mark.timeout(400)
def test_ranks_are_suspended_and_go_on_together(tmp_path: Path) -> None:
    program, host = tmp_path / "train.py", Host(tmp_path / "run")
    program.write_text(PROGRAM)
    assert run_until_both_step(host, program, epoch=1) == {0}
    (first,) = run_until_both_step(host, program, epoch=2)
    assert first >= 4
