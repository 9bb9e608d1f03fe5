"""Three real Ray nodes: nodes join and die, actors are killed, jobs are neither lost nor started twice."""

from __future__ import annotations

import os
import signal

import pytest
from support import wait_until

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.names import NAMESPACE, PRM, SCHEDULER, agent_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LEASE_TTL_S = 12.0  # longer than a killed actor takes to come back on a slow machine; a lost node is waited for
WHOLE = Hints(compute=1.0, gpu_memory=200 << 20, isolation="hard")
# Writes one line per start, then waits until it is told to end: a second start would show.
PATIENT = (
    "import os, pathlib, sys, time\n"
    "with open(sys.argv[1], 'a') as starts: starts.write(f'{os.getpid()}\\n')\n"
    "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
)


@pytest.fixture
def patient(three, tmp_path):
    """Submit jobs that note each start and end when told."""
    end = tmp_path / "end"
    noted = {}

    def submit(name, hints=WHOLE):
        starts = tmp_path / f"{name}.starts"
        view = three.run(PATIENT, str(starts), str(end), hints=hints, name=name)
        noted[view.job_id] = starts
        return view

    submit.starts = lambda view: noted[view.job_id].read_text().split() if noted[view.job_id].exists() else []
    submit.finish = end.touch
    yield submit
    end.touch()
    three.settle()


def actor_pid(name: str) -> int | None:
    """The process of an actor; None while it does not answer."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ray.get_actor(name, NAMESPACE).ping.remote(), timeout=5)
    except (RayActorError, GetTimeoutError):
        return None


def test_jobs_spread_over_the_hosts(three, patient):
    views = [patient(f"spread-{i}") for i in range(3)]
    hosts = {three.reach(view, "RUNNING").shares[0].host_id for view in views}
    assert hosts == {host.host_id for host in three.client.hosts()}
    waiting = patient("fourth")
    assert three.client.job(waiting.job_id).state == "QUEUED"
    patient.finish()
    for view in [*views, waiting]:
        assert three.finish(view).state == "SUCCEEDED"


@pytest.mark.parametrize("name", [SCHEDULER, PRM])
def test_killing_a_control_actor_loses_nothing(three, patient, name):
    running = three.reach(patient("running"), "RUNNING")
    queued = [patient(f"more-{i}") for i in range(3)]
    pid = actor_pid(name)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: actor_pid(name) not in (pid, None), 30, f"{name} is back")
    assert three.client.job(running.job_id).state == "RUNNING"
    patient.finish()
    for view in [running, *queued]:
        ended = three.finish(view)
        assert (ended.state, len(patient.starts(view))) == ("SUCCEEDED", 1), ended.history


def test_killing_a_host_agent_does_not_touch_its_jobs(three, patient):
    view = three.reach(patient("survivor"), "RUNNING")
    name = agent_name(view.shares[0].host_id)
    wait_until(lambda: patient.starts(view), 20, "the job notes its start")
    pid = actor_pid(name)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: actor_pid(name) not in (pid, None), 30, "the agent is back")
    wait_until(lambda: all(host.reachable for host in three.client.hosts()), 20, "the agent reports again")
    assert three.client.job(view.job_id).state == "RUNNING"
    patient.finish()
    ended = three.finish(view)
    assert (ended.state, ended.exit_code, ended.restarts) == ("SUCCEEDED", 0, 0)
    assert len(patient.starts(view)) == 1


def test_a_lost_node_requeues_its_jobs_as_their_restart_policy_says(three, patient):
    node = three.add_node()
    wait_until(lambda: sum(host.reachable for host in three.client.hosts()) == 4, 40, "the new node reports")
    node_id = node.node_id
    views = [patient(f"lost-{i}") for i in range(4)]
    placed = [three.reach(view, "RUNNING") for view in views]
    victim = next(view for view in placed if view.shares[0].host_id == node_id)
    wait_until(lambda: patient.starts(victim), 20, "the job notes its start")
    first_pid = int(patient.starts(victim)[0])
    three.cluster.remove_node(node, allow_graceful=False)
    three.nodes.remove(node)
    requeued = three.reach(victim, "QUEUED", timeout_s=60)
    assert "lost" in requeued.reason or "no report" in requeued.reason
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)  # its old process had ended before it was queued again
    patient.finish()
    for view in views:
        assert three.finish(view).state == "SUCCEEDED"
    assert len(patient.starts(victim)) == 2
    ended = three.client.job(victim.job_id)
    assert (ended.restarts, ended.epoch) == (0, 2), "it has done nothing wrong"


def test_a_lease_over_several_hosts_is_all_or_nothing(three):
    import cotenant

    with cotenant.lease(gpus=3, gang="cluster", compute=0.5, gpu_memory="100MiB") as lease:
        assert len({share.host_id for share in lease.shares}) == 3
        with pytest.raises(TimeoutError, match="no share within"):
            cotenant.lease(gpus=3, gang="cluster", isolation="hard", timeout_s=1.0)
    with pytest.raises(cotenant.scheduler.errors.NotPlaceable):
        cotenant.lease(gpus=2, gang="host")
