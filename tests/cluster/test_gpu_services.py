"""A node with two NVIDIA GPUs whose jobs run under MPS, and whose power is limited: all of it by stand-ins."""

from __future__ import annotations

import time

import pytest
from support import wait_until

from cotenant.scheduler.core.model import Hints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SLEEP = "import time; time.sleep(200)"


def test_a_daemon_that_hangs_costs_its_jobs_no_restart_and_down_gives_everything_back(served, tmp_path):
    host, fake = served.deployment, served.fake
    jobs = [host.reach(host.run(SLEEP, hints=Hints(gpu_memory=10 << 30)), "RUNNING") for _ in range(2)]
    gpus = [share.gpu_id for job in jobs for share in job.shares]
    assert sorted(gpus) == ["GPU-a", "GPU-b"], "two of them do not fit on one"
    fake.say(gpu=gpus[0], how="hang")

    silent_since: list[float] = []

    def let_down() -> bool:
        if not all(each.reachable for each in host.client.hosts()):
            silent_since.append(time.monotonic())
        told = [change.reason for change in host.client.job(jobs[0].job_id).history]
        return any("does not answer" in reason and "fault 1 of its hosts" in reason for reason in told)

    wait_until(let_down, 40, "its job is let down")
    fake.say(gpu=gpus[0], how="")
    host.reach(jobs[0], "RUNNING", 60)
    assert host.client.job(jobs[0].job_id).restarts == 0
    assert silent_since == [], "the host has reported all the while"
    other = host.client.job(jobs[1].job_id)
    assert (other.state, other.restarts) == ("RUNNING", 0)

    assert len(fake.daemons()) == 2
    assert list(tmp_path.glob("run/**/power.json")), "the limit that was there before is written down"
    served.stop()
    assert fake.daemons() == []
    assert not list(tmp_path.glob("run/**/power.json")), "it is put back"
