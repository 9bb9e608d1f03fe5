"""A real Ray cluster for the cluster tests, started once per module and stopped by its own processes only."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster_support import GPUS, RAY_ENVIRONMENT, free_port
from fake_driver import FakeDriver
from fake_mps import FakeMps
from nvml_standin import Standin
from support import wait_until

from cotenant.actors.learning import ENOUGH_TO_TRAIN
from cotenant.configs.settings import (
    ApiSettings,
    DeviceSettings,
    EnforcementSettings,
    LeaseSettings,
    PlacementSettings,
    PredictionSettings,
    Settings,
)
from cotenant.forecasting.datasets.observation_file import save_observations
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile
from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.views import JobView

TEST_SETTINGS = Settings(
    # So long that only what has gone for good is taken for gone, however busy the machine is.
    lease=LeaseSettings(ttl_s=20.0, client_ttl_s=6.0, stop_grace_s=1.0),
    placement=PlacementSettings(profile_s=2.0),
    device=DeviceSettings(backend="cpu", memory_bytes=2 << 30),
    api=ApiSettings(enabled=False),
)


@dataclass
class Deployment:
    """A Ray cluster with cotenant on it."""

    cluster: Any
    client: Client
    home: Path
    nodes: list[Any] = field(default_factory=list)

    def run(self, script: str, *more: str, hints: Hints | None = None, **options: Any) -> JobView:
        """Submit ``python -c script``."""
        return self.client.submit([sys.executable, "-c", script, *more], hints or Hints(), **options)

    def finish(self, view: JobView, timeout_s: float = 40.0) -> JobView:
        """Wait for a job's end; the test fails when it does not come."""
        return self.client.wait(view.job_id, timeout_s)

    def reach(self, view: JobView, state: str, timeout_s: float = 30.0) -> JobView:
        """Wait until a job is in a state."""
        wait_until(
            lambda: self.client.job(view.job_id).state == state,
            timeout_s,
            f"job {view.job_id} becomes {state} (it is {self.client.job(view.job_id)})",
        )
        return self.client.job(view.job_id)

    def output(self, view: JobView) -> str:
        """Return all output of an ended job."""
        return b"".join(self.client.stream_logs(view.job_id)).decode()

    def add_node(self, gpus: int = 1) -> Any:
        """Add a worker node and wait for its agent."""
        before = len(self.client.hosts())
        node = self.cluster.add_node(num_cpus=1, num_gpus=gpus)
        self.nodes.append(node)
        wait_until(
            lambda: sum(host.reachable for host in self.client.hosts()) > 0 and len(self.client.hosts()) > before,
            40,
            "the agent of the new node reports",
        )
        return node

    def settle(self) -> None:
        """End every job; the next test starts on an empty cluster."""
        self.client.stop_many([view.job_id for view in self.client.jobs(active_only=True)], "end of test")
        wait_until(lambda: not self.client.jobs(active_only=True), 30, "all jobs end")


def start_deployment(home: Path, head_gpus: int, settings: Settings = TEST_SETTINGS, **head: Any) -> Deployment:
    """Start a Ray head with cotenant on it."""
    import ray
    from ray.cluster_utils import Cluster

    from cotenant.actors import cluster as cotenant_cluster

    os.environ["COTENANT_HOME"] = str(home / "home")
    os.environ["COTENANT_RUN_DIR"] = str(home / "run")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "num_gpus": head_gpus,
            "include_dashboard": False,
            "dashboard_port": free_port(),
            **head,
        },
    )
    try:
        ray.init(address=cluster.address, namespace="cotenant", log_to_driver=False, logging_level="ERROR")
        cotenant_cluster.up(None, False, settings, None)
        return Deployment(cluster, Client.connect(), home)
    except BaseException:  # a time-out too: the next module starts with nothing of this one left
        ray.shutdown()
        cluster.shutdown()
        raise


def stop_deployment(deployment: Deployment) -> None:
    """Stop everything that was started, and only that."""
    import ray

    from cotenant.actors import cluster as cotenant_cluster

    deployment.settle()
    cotenant_cluster.down(force=False)
    ray.shutdown()
    deployment.cluster.shutdown()


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """Ray's settings for tests, for this module only."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("COTENANT_HOME", "")
        patch.setenv("COTENANT_RUN_DIR", "")
        yield


@pytest.fixture
def start(ray_environment: None) -> Callable[..., Deployment]:
    """Starts a Ray head with cotenant on it; see ``start_deployment``."""
    return start_deployment


@pytest.fixture(scope="module")
def single(ray_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One host with two devices."""
    deployment = start_deployment(tmp_path_factory.mktemp("single"), head_gpus=2)
    yield deployment
    stop_deployment(deployment)


@pytest.fixture(scope="module")
def nvidia_standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The hardware of the ``nvidia`` host."""
    standin = Standin(tmp_path_factory.mktemp("standin"))
    standin.set(*GPUS)
    return standin


@pytest.fixture(scope="module")
def nvidia(
    ray_environment: None, nvidia_standin: Standin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One host with two NVIDIA GPUs, played by the stand-in for NVML."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nvidia_standin.environment.items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        settings = TEST_SETTINGS.model_copy(update={"device": DeviceSettings()})
        deployment = start_deployment(tmp_path_factory.mktemp("nvidia"), head_gpus=2, settings=settings)
        yield deployment
        nvidia_standin.set(*GPUS)
        stop_deployment(deployment)


@dataclass
class Served:
    """A deployment whose jobs run under a stand-in for MPS; ``stop`` ends it before the fixture does."""

    deployment: Deployment
    fake: FakeMps
    stopped: bool = False

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.fake.say(how="")
            stop_deployment(self.deployment)


@pytest.fixture
def served(ray_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """One host with two NVIDIA GPUs whose power is limited, played by stand-ins for NVML and MPS."""
    standin = Standin(tmp_path / "standin")
    standin.set(*(f"{gpu} limit=700000 limit_min=200000 limit_max=700000" for gpu in GPUS))
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeMps(tmp_path / "mps", monkeypatch)
    more = {"device": DeviceSettings(), "enforcement": EnforcementSettings(power_limit_w=350.0)}
    served = Served(start_deployment(tmp_path, head_gpus=2, settings=TEST_SETTINGS.model_copy(update=more)), fake)
    yield served
    served.stop()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two NVIDIA GPUs whose driver freezes processes, played by stand-ins."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    standin = Standin(tmp_path / "standin")
    standin.set(*(f"{gpu} used=0" for gpu in GPUS))
    return FakeDriver(tmp_path / "driver", standin, monkeypatch)


@pytest.fixture
def freezes(ray_environment: None, driver: FakeDriver, tmp_path: Path) -> Iterator[Deployment]:
    """One host with these GPUs, and no MPS."""
    more = {"device": DeviceSettings(), "enforcement": EnforcementSettings(mps="off")}
    deployment = start_deployment(tmp_path, head_gpus=2, settings=TEST_SETTINGS.model_copy(update=more))
    yield deployment
    stop_deployment(deployment)


@pytest.fixture(scope="module")
def three(
    request: pytest.FixtureRequest, ray_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Three hosts with one device each; the first is the head. The module says how long leases hold."""
    lease = TEST_SETTINGS.lease.model_copy(update={"ttl_s": request.module.LEASE_TTL_S})
    settings = TEST_SETTINGS.model_copy(update={"lease": lease})
    deployment = start_deployment(tmp_path_factory.mktemp("three"), head_gpus=1, settings=settings)
    deployment.add_node()
    deployment.add_node()
    yield deployment
    stop_deployment(deployment)


@pytest.fixture(scope="module")
def learning(ray_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One device, trainings allowed at once, and enough measured before to start one."""
    home = tmp_path_factory.mktemp("learning")
    job = DemandProfile(0.6, 0.7, 1 << 28, 5.0, 60.0, "history", family="made_up")
    jobs = [dataclasses.replace(job, fingerprint=f"program {k}", util_mean=0.1 + 0.2 * k) for k in range(4)]
    pairs = itertools.permutations(jobs, 2)
    measured = [Observation("cpu-core", a, (b,), 0.8, 0.75, 0.85, 60.0) for a, b in pairs]
    save_observations(home / "home" / "evidence.jsonl", measured[:ENOUGH_TO_TRAIN])
    settings = TEST_SETTINGS.model_copy(update={"prediction": PredictionSettings(retrain_every_s=1.0)})
    deployment = start_deployment(home, head_gpus=1, settings=settings)
    yield deployment
    stop_deployment(deployment)
