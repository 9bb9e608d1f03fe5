"""What Ray's autoscaler sees of nodes that are given back; there is none here, but what it would look at is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import wait_until

from cotenant.configs.settings import ApiSettings, DeviceSettings, LeaseSettings, ScalingSettings, Settings
from cotenant.scheduler.core.model import Hints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ALONE = Hints(gpu_memory=100 << 20, compute=0.5, isolation="hard")
SETTINGS = Settings(
    lease=LeaseSettings(stop_grace_s=1.0),
    device=DeviceSettings(backend="cpu", memory_bytes=2 << 30),
    api=ApiSettings(enabled=False),
    scaling=ScalingSettings(enabled=True, wait_s=1.0, idle_s=4.0),
)
SLEEP = "import time; time.sleep(300)"


@pytest.fixture
def scaled(start, tmp_path) -> Iterator[Callable]:
    """Starts a head with so many GPUs, on which cotenant asks for the size it wants."""
    import ray

    from cotenant.actors import cluster

    started = []

    def begin(head_gpus: int):
        started.append(start(tmp_path, head_gpus=head_gpus, settings=SETTINGS))
        return started[0]

    yield begin
    for deployment in started:
        deployment.settle()
        cluster.down(force=False)
        ray.shutdown()
        deployment.cluster.shutdown()


def idle_nodes() -> set[str]:
    """The nodes that Ray calls idle: those its autoscaler removes after a while."""
    import ray
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(GcsClient(address=ray.get_runtime_context().gcs_address))
    return {node.node_id.hex() for node in state.node_states if node.idle_duration_ms > 0}


def test_nodes_that_are_given_back_are_idle_for_ray_and_serve_again_when_wanted(scaled):
    """On each lived a host agent, and to Ray a node with an actor is busy: its autoscaler never removed one."""
    import ray

    from cotenant.actors import cluster

    deployment = scaled(head_gpus=1)
    worker = deployment.add_node().node_id
    wait_until(lambda: worker in idle_nodes(), 60, "the node is idle for Ray")
    wait_until(lambda: not deployment.client.hosts(), 60, "nothing is left of the hosts")
    again = cluster.up(ray.get_runtime_context().gcs_address, False, SETTINGS, None)
    assert again.hosts == 0, "'up' waits for none that was given back"
    views = [deployment.run(SLEEP, hints=ALONE) for _ in range(2)]
    placed = [deployment.reach(view, "RUNNING", 60.0) for view in views]
    assert len({view.shares[0].host_id for view in placed}) == 2
    wait_until(lambda: worker not in idle_nodes(), 30, "Ray knows that the node is busy")


def test_a_cluster_without_any_gpu_yet_keeps_jobs_until_there_are_some(scaled):
    """They started on the head's cores, and were lost when the first GPU node came."""
    deployment = scaled(head_gpus=0)
    assert deployment.client.hosts() == []
    view = deployment.run(SLEEP, hints=ALONE)
    worker = deployment.add_node().node_id
    assert deployment.reach(view, "RUNNING", 60.0).shares[0].host_id == worker
