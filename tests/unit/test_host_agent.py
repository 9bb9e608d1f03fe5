"""The host agent in this process, with a stand-in for Ray: commands, what jobs ask, everything given back."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agents import job_spec, make_agent
from ray.exceptions import GetTimeoutError, RayTaskError
from scheduling import GIB
from support import wait_until

from cotenant.actors import host_agent
from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.host_agent import HostAgent
from cotenant.actors.launcher import Launched, StaleCommand
from cotenant.actors.messages import WindowBatch
from cotenant.actors.processors import processors
from cotenant.actors.shim.reportfile import ReportWriter
from cotenant.configs.settings import DeviceSettings, Settings
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import StartJob, StopJob
from cotenant.scheduler.core.events import JobHeldBack, JobStarted
from cotenant.scheduler.errors import NotConnected, NotPermitted, TooManyRequests

SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(60)")


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An agent with a job ``job`` that sleeps."""
    agent = make_agent(monkeypatch, tmp_path, Settings(device=DeviceSettings(backend="cpu", memory_bytes=GIB)))
    gpu_id = agent._gpus[0].gpu_id
    assert agent.apply([StartJob("h1", job_spec("job", *SLEEP), 1, 0, (Share(gpu_id, GIB, 0.5),), "")]) == []
    yield agent
    agent.apply([StopJob("h1", "job", 1, 0.0, "the test is over")])
    wait_until(lambda: not agent._launcher.running(), 10, "the job has ended")
    agent.shut_down()


def question(agent: HostAgent, **more: Any) -> dict[str, Any]:
    env = agent._launcher.environment("job", 1)
    lease = {"job_id": "job", "epoch": env["COTENANT_EPOCH"], "token": env["COTENANT_LEASE_TOKEN"]}
    return {"method": "allocate", "action": "request", "resource_type": "memory", "amount": 1, "request_id": "r"} | (
        lease | more
    )


def test_a_job_is_started_and_told_of(agent):
    (started,) = agent._uplink._events
    assert isinstance(started, JobStarted)
    assert (started.job_id, started.ceiling.memory_bytes) == ("job", None)
    agent._launcher.tend()
    report = agent.report(1, (), "")
    assert [item.job_id for item in report.inventory] == ["job"]
    assert report.host.cpus == processors()
    assert Path(agent._launcher.environment("job", 1)["COTENANT_AGENT"]).is_socket()


def test_gpus_are_given_back_only_when_nothing_runs_and_claimed_again_when_wanted(agent, monkeypatch):
    released: list[str] = []
    monkeypatch.setattr(host_agent, "release_claim", released.append)

    def usable() -> list[bool]:
        return [gpu.healthy for gpu in agent.report(1, (), "").host.gpus]

    agent._launcher.tend()
    agent.hold_gpus(False)
    assert (released, all(usable())) == ([], True)
    monkeypatch.setattr(agent, "_inventory", tuple)  # as when nothing runs
    agent.hold_gpus(False)
    agent.hold_gpus(False)
    assert (released, any(usable())) == (["h1"], False)
    assert agent.report(2, (), "").claim.startswith("given back")
    agent.hold_gpus(True)
    assert all(usable())


def test_gpus_on_which_a_job_is_just_starting_are_not_given_back(agent, monkeypatch):
    released: list[str] = []

    def launch(**_: object) -> Launched:
        agent.hold_gpus(False)  # from another thread, while the supervisor comes up
        raise StaleCommand("the test is over")

    monkeypatch.setattr(host_agent, "release_claim", released.append)
    monkeypatch.setattr(agent._launcher, "inventory", list)  # nothing else runs
    monkeypatch.setattr(agent._launcher, "launch", launch)
    agent._launcher.tend()
    agent.hold_gpus(True)
    assert agent.report(1, (), "").host.gpus[0].healthy
    command = StartJob("h1", job_spec("new", *SLEEP), 1, 0, (Share(agent._gpus[0].gpu_id, GIB, 0.5),), "")
    assert agent.apply([command]) == ["the test is over"]
    assert (released, agent.report(2, (), "").inventory) == ([], ())


def test_what_a_job_was_placed_with_goes_along_with_its_windows(agent):
    batches: list[WindowBatch] = []
    agent.scheduler.observe = SimpleNamespace(remote=batches.append)
    planned = DemandProfile(0.5, 0.6, GIB, source="hints")
    command = StartJob("h1", job_spec("hinted", *SLEEP), 1, 0, (Share(agent._gpus[0].gpu_id, GIB, 0.5),), "", planned)
    assert agent.apply([command]) == []
    agent._held = {launched.job_id: launched for launched in agent._launcher.running()}
    agent._close_window()
    assert [batch.planned for batch in batches] == [{"hinted": planned}]
    agent.apply([StopJob("h1", "hinted", 1, 0.0, "the test is over")])


def test_gpus_that_come_later_are_announced_and_used(agent, monkeypatch):
    late = replace(agent._gpus[0], gpu_id="late", index=len(agent._gpus), island="nvlink-0")
    monkeypatch.setattr(
        agent._backend, "discover", lambda: (*agent._gpus, late) if len(agent._gpus) == 1 else agent._gpus
    )
    agent._gpus = agent._gpus[:1]
    agent._take_in_gpus()
    agent._take_in_gpus()
    assert [(gpu.gpu_id, gpu.island) for gpu in agent.report(1, (), "").host.gpus][1:] == [("late", "nvlink-0")]
    job = job_spec("next", sys.executable, "-S", "-c", "")
    assert agent.apply([StartJob("h1", job, 1, 0, (Share("late", GIB, 0.5),), "")]) == []
    wait_until(lambda: any(ended.job_id == "next" for ended in agent._launcher.poll()), 10, "it has run there")


def test_a_job_on_a_gpu_that_does_not_answer_yet_is_kept_and_measured_when_it_does(agent, monkeypatch):
    """As after a restart of the agent while a driver hangs."""
    gpus, watched = agent._gpus, []

    def watch(job_id: str, gpu_ids: list[str], root_pid: int) -> None:
        watched.append(gpu_ids)
        assert set(gpu_ids) <= {gpu.gpu_id for gpu in agent._gpus}, "the backend does not know it"

    monkeypatch.setattr(agent._backend, "watch", watch)
    monkeypatch.setattr(agent._backend, "discover", lambda: gpus)
    agent._held = {launched.job_id: launched for launched in agent._launcher.running()}
    agent._gpus = ()
    agent._follow_processes()
    agent._take_in_gpus()
    agent._follow_processes()
    agent._follow_processes()
    assert watched == [[], [gpus[0].gpu_id]]


def test_a_job_that_begins_to_be_held_back_is_told_of_at_once(agent):
    launched = agent._launcher.running()[0]
    agent._held, agent._capped = {"job": launched}, {"job"}
    writer = ReportWriter(str(launched.job_dir), 0)

    def told() -> list[Any]:
        writer.write(1, 1.0, time.monotonic(), 0)  # held back all the time
        agent._tell_held_back()
        return [event for event in agent._uplink._events if isinstance(event, JobHeldBack)]

    wait_until(told, 10, "it is told")
    (event,) = told()
    assert (event.job_id, event.epoch, event.host_id) == ("job", 1, "h1")
    assert event.throttled_fraction > 0.9


def test_a_job_is_answered_for_its_own_lease_only(agent):
    answer = agent._answer_job(question(agent))
    assert (answer["status"], answer["requested"]) == ("refused", 1)
    ((_, job_id, wish),) = agent.scheduler.asked
    assert (job_id, wish.epoch, wish.request_id) == ("job", 1, "r")
    assert agent._answer_job(question(agent, method="get_available_resources"))["memory"]["share"] == 1.0
    for wrong in ({"token": "x"}, {"job_id": "other"}, {"epoch": "2"}, {"epoch": "-1"}, {"token": None}):
        with pytest.raises(NotPermitted):
            agent._answer_job(question(agent, **wrong))
    assert len(agent.scheduler.asked) == 2


def test_the_end_of_a_job_is_told_when_its_memory_is_free(agent):
    agent.apply([StopJob("h1", "job", 1, 0.0, "enough")])
    wait_until(lambda: not agent._launcher.running(), 10, "the job has ended")
    agent._vacating.wait = lambda *_: None
    agent._reap(0.0)
    assert [event.kind for event in agent._uplink._events] == ["job_started"]
    agent._vacating.wait = lambda *_: "7 MiB are still in use"
    agent._reap(1.0)
    agent._reap(2.0)
    assert [event.kind for event in agent._uplink._events] == ["job_started", "job_exited"]
    assert "7 MiB are still in use" in agent.report(1, (), "").note


def test_a_job_that_fails_on_a_gpu_that_is_lost_is_told_as_let_down(agent):
    gpu_id = agent._gpus[0].gpu_id
    agent._profiler.device_readings = lambda: (DeviceSample(gpu_id, None, None, lost=True, note="XID 79"),)
    command = StartJob("h1", job_spec("fails", "false"), 1, 0, (Share(gpu_id, GIB, 0.5),), "")
    assert agent.apply([command]) == []
    wait_until(lambda: [ended.job_id for ended in agent._launcher.poll()] == ["fails"], 10, "it has failed")
    agent._reap(0.0)
    exited = agent._uplink._events[-1]
    assert (exited.lost, exited.exit_code) == (True, 1)
    assert exited.reason == f"GPU {gpu_id}: XID 79; it ended with 1"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RayTaskError("allocate", "", TooManyRequests("too often", 1.0)), TooManyRequests),
        (GetTimeoutError("late"), NotConnected),
    ],
)
def test_what_the_scheduler_says_reaches_the_job(agent, error, told):
    agent.scheduler.error = error
    with pytest.raises(told):
        agent._answer_job(question(agent))


def test_an_agent_without_a_place_for_its_socket_works_without(tmp_path, monkeypatch, agent):
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(host_agent, "LeaseSocket", refuse)
    monkeypatch.setenv("COTENANT_RUN_DIR", str(tmp_path / "other"))
    other = HostAgent("h1", Settings(device=DeviceSettings(backend="cpu")).model_dump_json())
    assert "jobs cannot ask about their leases" in other.report(1, (), "").note
    other.shut_down()
