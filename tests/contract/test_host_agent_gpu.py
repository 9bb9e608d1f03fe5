"""The host agent of a host with two NVIDIA GPUs (stand-ins for NVML and MPS) on one of which everything hangs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agents import job_spec, make_agent
from fake_mps import FakeMps
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from scheduling import Driver
from support import started_by, wait_until

from cotenant.actors import gpufaults, runner
from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.enforcement import mps, mpscontrol, power
from cotenant.actors.host_agent import HostAgent
from cotenant.configs.settings import DeviceSettings, EnforcementSettings, Settings
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.events import Tick
from cotenant.scheduler.core.model import Gpu
from cotenant.scheduler.core.model import Host as CoreHost

GIB = 1 << 30
GPUS = tuple(f"gpu {index} uuid=GPU-{name} total={16 * GIB}" for index, name in enumerate("ab"))
SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(60)")


class Host:
    """The agent and what it runs on."""

    def __init__(self, agent: HostAgent, fake: FakeMps) -> None:
        self.agent = agent
        self.fake = fake

    def start(self, job_id: str, gpu: str, epoch: int = 1) -> None:
        share = Share(gpu, GIB, 0.5)
        assert self.agent.apply([StartJob("h1", job_spec(job_id, *SLEEP), epoch, 0, (share,), "")]) == []

    def stop(self, job_id: str, epoch: int = 1) -> None:
        assert self.agent.apply([StopJob("h1", job_id, epoch, 0.0, "enough")]) == []

    def start_in_vain(self, job_id: str = "slow") -> threading.Thread:
        """Have the daemon of GPU-a hang, and a job wait for it; returns the thread that does."""
        self.fake.say(gpu="GPU-a", how="hang")
        (waits,) = started_by(lambda: self.start(job_id, "GPU-a"), f"prepare-{job_id}")
        wait_until(lambda: "get_server_list" in self.fake.asked, 10, "its daemon is asked")
        return waits

    def go_on(self) -> None:
        self.fake.say(gpu="GPU-a", how="")
        wait_until(lambda: not self.agent._preparing, 10, "nothing is made ready any more")

    def told(self, job_id: str) -> list[Any]:
        return [event for event in self.agent._uplink._events if event.job_id == job_id]

    def phases(self) -> dict[str, str]:
        return {item.job_id: item.phase for item in self.agent.report(1, (), "").inventory}


@pytest.fixture
def host(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    standin.set(*GPUS)
    monkeypatch.setattr(mps, "START_S", 60.0)  # nothing here waits for it: hung starts are let go on
    monkeypatch.setattr(mps, "BACKOFF_S", 0.05)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeMps(tmp_path, monkeypatch)
    with loaded(standin) as library:
        agent = make_agent(monkeypatch, tmp_path, Settings(device=DeviceSettings(backend="nvml")))
        host = Host(agent, fake)
        yield host
        host.go_on()
        for launched in agent._launcher.running():
            host.stop(launched.job_id, launched.epoch)
        wait_until(lambda: not agent._launcher.running(), 10, "no job is left")
        agent.shut_down()
        library.close()
    assert fake.daemons() == []


def test_a_start_on_a_gpu_that_hangs_holds_up_nothing_else(host):
    host.start("old", "GPU-b")
    wait_until(lambda: host.told("old"), 10, "it runs")
    host.start_in_vain()
    host.start("new", "GPU-b")
    wait_until(lambda: host.told("new"), 10, "it runs")
    host.stop("old")
    wait_until(lambda: [end.job_id for end in host.agent._launcher.poll()] == ["old"], 10, "it has ended")
    assert host.phases() == {"slow": "starting", "new": "running", "old": "exited"}
    assert host.told("slow") == []
    host.go_on()
    assert [event.kind for event in host.told("slow")] == ["job_started"]
    assert host.phases()["slow"] == "running"


def test_a_start_that_is_repeated_while_it_waits_happens_once(host):
    host.start_in_vain()
    for _ in range(3):
        host.start("slow", "GPU-a")
    host.go_on()
    host.start("slow", "GPU-a")
    host.go_on()
    assert {event.kind for event in host.told("slow")} == {"job_started"}
    assert len(host.agent._launcher.running()) == 1
    assert host.fake.asked.count("-d GPU-a") == 1


def test_what_is_stopped_while_it_waits_does_not_start_and_that_is_told(host):
    host.start_in_vain()
    host.stop("slow")
    assert host.phases() == {}
    host.go_on()
    wait_until(lambda: host.told("slow"), 10, "it is told")
    host.start("slow", "GPU-a")
    host.go_on()
    assert {(event.kind, event.retry) for event in host.told("slow")} == {("start_failed", True)}
    assert host.phases() == {}
    assert host.agent._launcher.running() == []


def test_another_lease_of_a_job_that_waits_starts_on_another_gpu(host):
    host.start_in_vain()
    host.stop("slow")
    host.start("slow", "GPU-b", epoch=2)
    wait_until(lambda: host.told("slow"), 10, "it runs")
    host.go_on()
    wait_until(lambda: len(host.told("slow")) == 2, 10, "both are told of")
    assert [(event.kind, event.epoch) for event in host.told("slow")] == [("job_started", 2), ("start_failed", 1)]
    assert [launched.epoch for launched in host.agent._launcher.running()] == [2]


def test_a_resize_that_overtakes_a_start_is_refused_and_can_be_sent_again(host):
    host.start_in_vain()
    resize = ResizeShares("h1", "slow", 1, 1, (Share("GPU-a", GIB, 0.25),), "")
    assert len(host.agent.apply([resize])) == 1
    (item,) = host.agent.report(1, (), "").inventory
    assert (item.phase, item.revision) == ("starting", 0)
    host.go_on()
    assert host.agent.apply([resize]) == []
    assert host.agent._launcher.shares("slow")[0].compute == 0.25


def test_what_waits_while_the_leases_expire_does_not_start_under_new_ones(host):
    """The scheduler may have started it elsewhere meanwhile."""
    host.start_in_vain()
    host.agent._launcher.renew(time.monotonic())
    host.agent.renew(time.monotonic() + 60.0)
    host.go_on()
    wait_until(lambda: host.told("slow"), 10, "it is told")
    (failed,) = host.told("slow")
    assert (failed.kind, failed.retry) == ("start_failed", True)
    assert host.phases() == {}


def test_a_start_that_comes_before_the_renewal_may_be_sent_again(host):
    """The scheduler answers a report with commands, which may overtake its acknowledgement."""
    host.agent._launcher.renew(time.monotonic())
    host.start("next", "GPU-b")
    host.go_on()
    host.agent.renew(time.monotonic() + 60.0)
    assert host.told("next") == []
    host.start("next", "GPU-b")
    wait_until(lambda: host.told("next"), 10, "it is told")
    assert [event.kind for event in host.told("next")] == ["job_started"]


def test_the_report_does_not_wait_for_a_daemon_that_is_found_to_hang(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 60.0)
    host.start("job", "GPU-a")
    wait_until(lambda: host.told("job"), 10, "it runs")
    host.fake.say(gpu="GPU-a", how="hang")
    (look,) = started_by(host.agent._launcher.tend, "MPS on GPU-a calls")
    (launched,) = host.agent._launcher.running()
    for process in runner.descendants(launched.root_pid):
        runner.send(process, 6)
    wait_until(lambda: host.phases() == {"job": "exited"}, 10, "its end is known")
    assert look.is_alive()


def test_the_device_loop_does_not_wait_for_the_power_limit_of_a_gpu_that_comes_later(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "TIMEOUT_S", 60.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    limited = [f"{gpu} limit=700000 limit_min=200000 limit_max=700000" for gpu in GPUS]
    standin.set(*limited, "hang nvmlDeviceGetPowerManagementLimit 1")
    settings = Settings(device=DeviceSettings(backend="nvml"), enforcement=EnforcementSettings(power_limit_w=350.0))

    def limits() -> list[int]:
        handles = [library.call("nvmlDeviceGetHandleByIndex", index) for index in range(2)]
        return [library.call("nvmlDeviceGetPowerManagementLimit", handle) for handle in handles]

    with loaded(standin) as library:
        agent = make_agent(monkeypatch, tmp_path, settings)
        both, agent._gpus = agent._gpus, agent._gpus[:1]
        monkeypatch.setattr(agent._backend, "discover", lambda: both)
        agent._take_in_gpus()
        assert agent._gpus == both, "the driver hangs all the while"
        standin.set(*limited)
        wait_until(lambda: limits() == [350_000, 350_000], 10, "both are limited")
        agent.shut_down()
        assert limits() == [700_000, 700_000]
        library.close()


def test_a_gpu_that_was_lost_is_limited_again_however_often(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset takes the limit away. What does not work is noted once, for as long as it does not."""
    monkeypatch.setattr(gpufaults, "REST_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    limited = [f"{gpu} limit=700000 limit_min=200000 limit_max=700000" for gpu in GPUS]
    standin.set(*limited)
    settings = Settings(device=DeviceSettings(backend="nvml"), enforcement=EnforcementSettings(power_limit_w=350.0))
    with loaded(standin) as library:
        handles = [library.call("nvmlDeviceGetHandleByIndex", index) for index in range(2)]

        def limits() -> list[int]:
            return [library.call("nvmlDeviceGetPowerManagementLimit", handle) for handle in handles]

        agent: Any = make_agent(monkeypatch, tmp_path, settings)
        wait_until(lambda: limits() == [350_000, 350_000], 10, "both are limited")
        for refused in (False, True, True, False):
            agent._profiler.device_readings = lambda: (DeviceSample("GPU-a", None, None, lost=True, note="XID 79"),)
            agent.report(1, (), "")
            standin.set(*limited)
            library.call("nvmlDeviceSetPowerManagementLimit", handles[0], 700_000)
            standin.set(*limited, *(["fault nvmlDeviceSetPowerManagementLimit 4"] if refused else []))
            agent._profiler.device_readings = lambda: (DeviceSample("GPU-a", 0.0, 0.0), DeviceSample("GPU-b", 0.0, 0.0))
            agent.report(2, (), "")
            agent._enforcement._power._calls.call(60.0, int)  # it is done
            assert limits() == [700_000 if refused else 350_000, 350_000]
            assert len(agent._enforcement.notes) == refused
        agent.shut_down()
        assert limits() == [700_000, 700_000]
        library.close()


@pytest.mark.parametrize("how", ["refuse", "hang", "stuck"])
def test_a_job_outlasts_a_daemon_that_never_starts_and_then_runs_without(host, monkeypatch, how):
    """Agent, service and scheduling core together; only their clock is not the real one."""
    monkeypatch.setattr(mps, "START_S", 0.3)
    monkeypatch.setattr(mps, "BACKOFF_S", 1.0)
    host.fake.say(gpu="GPU-a", how=how)
    starts, start = [], mpscontrol.start_daemon
    monkeypatch.setattr(mpscontrol, "start_daemon", lambda *told: (starts.append(told[1]), start(*told)))
    gpu = Gpu("GPU-a", "h1", "H100", 0, 16 * GIB)
    driver = Driver(CoreHost("h1", "h1.example", (gpu,), joined_at=0.0))
    host.agent._enforcement._services["GPU-a"]._clock = lambda: driver.now
    began, tries = driver.now, 0
    driver.submit(job_spec("job", *SLEEP))
    while driver.state("job") != "RUNNING" and driver.now < began + 100.0:
        if not driver.commands:
            driver.do(Tick(), after_s=0.5)
            continue
        tries += 1
        assert host.agent.apply(driver.commands) == []
        wait_until(lambda: not host.agent._preparing, 20, "its start has come to an end")
        driver.do(host.told("job")[-1], after_s=0.0)
    assert (driver.state("job"), driver.job("job").restarts) == ("RUNNING", 0), driver.job("job").reason
    assert tries == mps.MOST_FAILURES + 1, "every try is one of the daemon's too"
    assert starts == ["GPU-a"] * mps.MOST_FAILURES
    assert "no MPS: its daemon failed 5 times in a row" in host.agent._launcher.guarantees("job")
    host.fake.say(gpu="GPU-a", how="")


def test_what_falls_into_the_pause_after_a_failure_is_told_when_it_ends(host):
    service = host.agent._enforcement._services["GPU-a"]
    service._clock = lambda: 10.0
    service._failed, service._not_before = "it died", 17.0
    host.start("job", "GPU-a")
    wait_until(lambda: host.told("job"), 10, "it is told")
    (failed,) = host.told("job")
    assert (failed.retry, failed.retry_after_s) == (True, 7.0)


def test_an_agent_whose_daemons_hang_is_shut_down_in_time(host, monkeypatch):
    monkeypatch.setattr(mps, "QUIT_S", 0.1)
    monkeypatch.setattr(mps, "START_S", 2.0)
    waits = host.start_in_vain()
    host.stop("slow")
    host.agent.shut_down()
    wait_until(lambda: not waits.is_alive(), 10, "it waits no more")
    assert host.fake.daemons() == []


def test_a_daemon_whose_job_has_not_ended_is_left_and_named_when_the_agent_is_shut_down(host):
    """The job may still be saving."""
    host.start("saves", "GPU-a")
    host.start("other", "GPU-b")
    wait_until(lambda: host.told("saves") and host.told("other"), 10, "both run")
    host.stop("other")
    wait_until(lambda: len(host.agent._launcher.running()) == 1, 10, "one has ended")
    folder = host.agent._enforcement._services["GPU-a"].folder
    assert host.agent.shut_down() == (f"the MPS daemon of GPU-a goes on in {folder}: saves.1 has not ended",)
    assert len(host.fake.daemons("GPU-a")) == 1
    assert host.fake.daemons("GPU-b") == []
    host.stop("saves")
    wait_until(lambda: not host.agent._launcher.running(), 10, "it has ended")
    assert host.agent.shut_down() == ()
    assert host.fake.daemons() == []


def test_daemons_are_ended_while_power_limits_are_put_back(host):
    """Each of them may hang for nearly as long as ``cotenant down`` waits."""
    host.start("job", "GPU-a")
    wait_until(lambda: host.told("job"), 10, "it runs")
    host.stop("job")
    wait_until(lambda: not host.agent._launcher.running(), 10, "it has ended")

    def restore() -> None:
        wait_until(lambda: not host.fake.daemons(), 10, "the daemon has ended meanwhile")

    host.agent._enforcement._power = SimpleNamespace(restore=restore, notes=[])
    assert host.agent.shut_down() == ()
