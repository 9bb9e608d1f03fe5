"""Processes of cotenant stopped (not killed) for longer than the leases hold, and continued."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support import wait_until

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.names import NAMESPACE, SCHEDULER, agent_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LEASE_TTL_S = 7.0  # somebody waits for it to run out in every test
WHOLE = Hints(compute=1.0, gpu_memory=200 << 20, isolation="hard")
# Notes its start; refuses to start while another start of the same job still lives.
ALONE = (
    "import fcntl, os, pathlib, sys, time\n"
    "lock = open(sys.argv[1] + '.lock', 'w')\n"
    "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "with open(sys.argv[1], 'a') as starts: starts.write(f'{os.getpid()}\\n')\n"
    "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
)


def pid_of(name: str) -> int:
    import ray

    return int(ray.get(ray.get_actor(name, NAMESPACE).ping.remote(), timeout=10))


@pytest.fixture
def job(three, tmp_path):
    """A running job that fails when it runs twice at a time; ``end`` lets it end."""
    starts, end = tmp_path / "starts", tmp_path / "end"
    view = three.client.submit([sys.executable, "-c", ALONE, str(starts), str(end)], WHOLE, name="alone")
    view = three.reach(view, "RUNNING")
    wait_until(starts.exists, 20, "the job notes its start")
    view.__dict__["starts"] = lambda: [int(line) for line in starts.read_text().split()]
    view.__dict__["end"] = end.touch
    yield view
    end.touch()
    three.settle()


@pytest.mark.parametrize("who", ["agent", "scheduler"])
def test_a_pause_longer_than_the_leases_never_runs_a_job_twice(three, job, who):
    home = job.shares[0].host_id
    pid = pid_of(agent_name(home) if who == "agent" else SCHEDULER)
    (first,) = job.starts()
    os.kill(pid, signal.SIGSTOP)
    try:
        if who == "agent":
            wait_until(lambda: len(job.starts()) == 2, 30, "the job is started on another host")
        wait_until(lambda: not Path(f"/proc/{first}").exists(), 30, "its supervisor has ended the job")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: len(job.starts()) == 2, 20, "the job is started again")
    wait_until(
        lambda: (
            all(host.reachable for host in three.client.hosts()) and three.client.job(job.job_id).state == "RUNNING"
        ),
        20,
        "the host is back and the job runs",
    )
    job.end()
    ended = three.finish(job)
    assert (ended.state, ended.restarts, len(job.starts())) == ("SUCCEEDED", 0, 2)
