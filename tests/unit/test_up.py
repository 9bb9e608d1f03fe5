"""What ``up`` tells about the cluster it has started on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_client import FakeClient, job_view
from ray.exceptions import GetTimeoutError, RayActorError

from cotenant.actors import cluster
from cotenant.configs.settings import ApiSettings, DeviceSettings, Settings
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import CotenantError
from cotenant.scheduler.names import PRM, SCHEDULER, agent_name
from cotenant.scheduler.views import HistoryView, JobView


def test_hosts_that_the_journal_remembers_but_that_are_gone_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeClient()
    [there] = client.hosts()
    gone = there.model_copy(update={"host_id": "host-of-yesterday", "reachable": False})
    monkeypatch.setattr(client, "hosts", lambda: [gone, there])
    monkeypatch.setattr(cluster.Client, "connect", lambda: client)
    monkeypatch.setattr(cluster, "start_actors", lambda *_: [])
    monkeypatch.setattr(cluster, "_wait_for_hosts", lambda *_, again: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    report = cluster._finish(Settings(), None, None)
    assert (report.hosts, report.gpus) == (1, len(there.gpus))


@pytest.mark.parametrize(
    ("recorded", "started", "kept"),
    [
        ("127.0.0.1:1", True, True),
        ("127.0.0.1:2", True, False),  # this Ray is another one
        ("127.0.0.1:1", False, False),
        (None, False, False),
    ],
)
def test_a_plain_up_remembers_the_ray_head_that_an_earlier_one_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: str | None, started: bool, kept: bool
) -> None:
    """``down`` left the head behind."""
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    if recorded is not None:
        cluster.ClusterRecord(recorded, "disabled", None, os.getpid() if started else None, None).save()
    client = FakeClient()
    monkeypatch.setattr(cluster.Client, "connect", lambda: client)
    monkeypatch.setattr(cluster, "start_actors", lambda *_: [])
    monkeypatch.setattr(cluster, "_wait_for_hosts", lambda *_, again: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    cluster.up(None, False, Settings(), None)
    record = cluster.ClusterRecord.load()
    assert record is not None
    assert (record.address, record.ray_pid) == ("127.0.0.1:1", os.getpid() if kept else None)


@pytest.mark.parametrize(
    ("nvml", "settings", "expected"),
    [
        (None, DeviceSettings(count=3), ["--num-gpus=3"]),
        (SimpleNamespace(close=lambda: None), DeviceSettings(), []),  # Ray counts NVIDIA GPUs itself
        (SimpleNamespace(close=lambda: None), DeviceSettings(count=1), ["--num-gpus=1"]),
    ],
)
def test_what_ray_is_told_of_this_machines_gpus(
    monkeypatch: pytest.MonkeyPatch, nvml: object, settings: DeviceSettings, expected: list[str]
) -> None:
    monkeypatch.setattr(cluster, "start_nvml", lambda _: nvml)
    assert cluster._gpu_count(Settings(device=settings)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DeviceSettings(cores_per_gpu=10_000), "device.cores_per_gpu: 10000 is not accepted; give 1 to "),
        (
            DeviceSettings(backend="cpu", count=1, memory_bytes=1 << 60),
            f"device.memory_bytes: {1 << 60} is not accepted",
        ),
        (DeviceSettings(memory_bytes=1 << 60), f"device.memory_bytes: {1 << 60} is not accepted; give 1 to "),
    ],
)
def test_devices_larger_than_this_machine_are_refused_before_ray_is_started(
    monkeypatch: pytest.MonkeyPatch, settings: DeviceSettings, message: str
) -> None:
    monkeypatch.setattr(cluster, "start_nvml", lambda _: None)
    with pytest.raises(CotenantError, match=f"^{message}"):
        cluster._gpu_count(Settings(device=settings))


def test_a_host_agent_that_does_not_start_is_one_line_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """``up`` waited a minute for its report, and said that there was none."""
    refused = (
        "The actor died because of an error raised in its creation task, HostAgent.__init__()\n"
        "ValueError: device.memory_bytes: 9 is not accepted; give 1 to 8, the memory of GPU-a"
    )
    answers: dict[str, Exception] = {
        "starts": GetTimeoutError("not yet"),
        "died": RayActorError(error_msg="The actor died: its node has gone"),
        "refuses": RayActorError(error_msg=refused),
    }
    pings: list[str] = []

    def agent(name: str, _: str) -> Any:
        known = next((each for each in answers if each in name), None)
        if known is None:
            raise ValueError(name)
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: pings.append(known) or known))

    def get(answer: str, timeout: float) -> None:
        raise answers[answer]

    monkeypatch.setattr(ray, "get_actor", agent)
    monkeypatch.setattr(ray, "get", get)
    asked: dict[str, Any] = {}
    for _ in range(3):
        cluster._refuse_failed_agents({"starts", "died", "not there yet"}, asked)
    assert pings.count("starts") == 1, "nothing piles up in one that starts"
    with pytest.raises(
        CotenantError, match=r"^the agent of host refuses did not start: ValueError: device.memory_bytes"
    ):
        cluster._refuse_failed_agents({"refuses"}, asked)


def test_a_driver_that_does_not_work_is_told_before_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ValueError("device.backend: 'auto' is not accepted on this host: the driver was updated")

    monkeypatch.setattr(cluster, "start_nvml", fail)
    with pytest.raises(CotenantError, match="the driver was updated"):
        cluster._gpu_count(Settings())


def test_a_process_leaves_the_ray_it_has_started_before_it_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends a process that is still connected when the head is gone, before it could print its error."""
    done: list[str] = []

    def fail(*_: object) -> None:
        raise CotenantError("the port is taken")

    monkeypatch.setattr(cluster.ClusterRecord, "load", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_start_ray", lambda _: (4711, "127.0.0.1:1"))
    monkeypatch.setattr(cluster, "watched", lambda *_: nullcontext())
    monkeypatch.setattr(cluster, "_join", lambda _: None)
    monkeypatch.setattr(cluster, "_finish", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("left"))
    monkeypatch.setattr(cluster, "_end_ray", lambda pid: done.append(f"ended {pid}"))
    with pytest.raises(CotenantError, match="the port is taken"):
        cluster.up(None, True, Settings(), None)
    assert done == ["left", "ended 4711"]


def start_one_actor(monkeypatch: pytest.MonkeyPatch, home: Path, get: Callable[..., None]) -> None:
    """Have every actor be the same one, whose first answer comes through ``get`` in place of ``ray.get``."""
    actor: Any = SimpleNamespace(ping=SimpleNamespace(remote=lambda: None))
    kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))
    monkeypatch.setattr(cluster, "head_node_id", lambda: "0" * 56)
    monkeypatch.setenv("COTENANT_HOME", str(home))
    monkeypatch.setattr(ray, "remote", lambda _: kind)
    monkeypatch.setattr(ray, "get_actor", lambda *_: actor)
    monkeypatch.setattr(ray, "get", get)


def test_an_actor_that_does_not_start_is_one_line_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: object, timeout: float) -> None:
        raise RayActorError(error_msg='The actor died, Api.__init__():\n  File "x"\nOSError: 127.0.0.1:8266 is taken')

    start_one_actor(monkeypatch, tmp_path, fail)
    with pytest.raises(CotenantError, match=r"^\S+ did not start: OSError: 127.0.0.1:8266 is taken$"):
        cluster.start_actors(Settings(), None)


def test_a_host_that_does_not_give_everything_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(name: str, _: str) -> Any:
        if "gone" in name:
            raise ValueError(name)
        return SimpleNamespace(shut_down=SimpleNamespace(remote=lambda: name))

    def get(answer: str) -> tuple[str, ...]:
        if "broken" in answer:
            raise RayActorError(error_msg="The actor died\nOSError: no room")
        return ("the MPS daemon of GPU-a goes on",) if "busy" in answer else ()

    def wait(asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert (num_returns, timeout) == (len(asked), cluster.GIVE_BACK_S)
        return [answer for answer in asked if "late" not in answer], [answer for answer in asked if "late" in answer]

    monkeypatch.setattr(ray, "get_actor", agent)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    assert cluster._give_back(["good", "gone"]) == []
    assert cluster._give_back(["gone"]) == []
    assert cluster._give_back(["busy"]) == ["host busy: the MPS daemon of GPU-a goes on"]
    broken, late = cluster._give_back(["good", "late", "broken"])
    assert broken == "host broken has not given everything back: OSError: no room"
    assert late.startswith("host late has not given everything back within 45 s: an MPS daemon may still run there")


def test_down_has_hosts_give_everything_back_before_their_agents_are_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    client = FakeClient()
    agents = [agent_name(host.host_id) for host in client.hosts()]

    class Actor:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            def remote() -> str:
                done.append(f"{method} {self.name}")
                return done[-1]

            return SimpleNamespace(remote=remote)

    def get(answer: str, timeout: float | None = None) -> Any:
        return 2 if answer == f"shut_down {SCHEDULER}" else ["the MPS daemon of GPU-a goes on"]

    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    monkeypatch.setattr(cluster.Client, "connect", lambda: client)
    monkeypatch.setattr(cluster, "release_claim", lambda _: None)
    monkeypatch.setattr(ray, "get_actor", lambda name, _: Actor(name))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: done.append(f"kill {actor.name}"))
    report = cluster.down(force=True)
    assert agents
    for name in agents:
        assert done.index(f"shut_down {name}") < done.index(f"kill {name}")
    assert (report.found, report.stopped_jobs) == (True, 2)
    assert report.notes == tuple(f"host {host.host_id}: the MPS daemon of GPU-a goes on" for host in client.hosts())


@pytest.mark.parametrize("hung", [{"shut_down"}, {"close"}, {"shut_down", "close"}])
def test_down_ends_a_scheduler_that_does_not_answer_and_says_what_that_means(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hung: set[str]
) -> None:
    """Without a bound it waited for ever, and whoever interrupted it left everything running."""
    killed: list[str] = []
    waited: list[float | None] = []

    class Actor:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda: (self.name, method))

    def get(answer: tuple[str, str], timeout: float | None = None) -> Any:
        waited.append(timeout)
        if answer[0] == SCHEDULER and answer[1] in hung:
            raise GetTimeoutError("no answer")
        return 0 if answer[1] == "shut_down" and answer[0] == SCHEDULER else []

    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    monkeypatch.setattr(cluster.Client, "connect", FakeClient)
    monkeypatch.setattr(cluster, "release_claim", lambda _: None)
    monkeypatch.setattr(cluster, "live_nodes", lambda: {"host-0": None})
    monkeypatch.setattr(ray, "get_actor", lambda name, _: Actor(name))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor.name))
    report = cluster.down(force=False)
    assert killed[1:] == [SCHEDULER, PRM, agent_name("host-0")]
    assert (report.found, len(report.notes)) == (True, len(hung))
    assert all(note.startswith("cotenant's scheduler does not answer within 60 s: ") for note in report.notes)
    assert ("their supervisors kill them" in report.notes[0]) is ("shut_down" in hung)
    assert ("goes on from its journal" in report.notes[-1]) is ("close" in hung)
    assert waited.count(None) == 1, "that of an answer that is there already"


def test_an_actor_that_hangs_while_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(_: object, timeout: float) -> None:
        raise GetTimeoutError("no answer")

    start_one_actor(monkeypatch, tmp_path, hang)
    with pytest.raises(CotenantError, match=r"^\S+ did not start within 300 s: look at Ray's logs"):
        cluster.start_actors(Settings(), None)


@pytest.mark.parametrize("ran", [False, True])
def test_options_that_a_running_cotenant_ignores_are_named(
    *, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: bool
) -> None:
    def missing(*_: str) -> Any:
        raise ValueError("no such actor")

    start_one_actor(monkeypatch, tmp_path, lambda *_, **__: None)
    if not ran:
        monkeypatch.setattr(ray, "get_actor", missing)
    notes = cluster.start_actors(Settings(), None)
    assert [("keeps the settings" in note, "--devices" in note) for note in notes] == ([(True, True)] if ran else [])


def stopping(job_id: str, grace_s: float) -> JobView:
    """A job that was asked to end just now, by the clock of another machine."""
    asked = HistoryView(at=5000.0, state=JobState.STOPPING, reason="cotenant down")
    return job_view(job_id, JobState.STOPPING, history=[asked], stop_by=5000.0 + grace_s)


class Ending:
    """A cluster whose jobs end when they have been asked for so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, *jobs: JobView) -> None:
        self.client = FakeClient(*jobs)
        self.asked, self.told, self.notes = 0, list[str](), list[str]()
        looks = self.client.jobs

        def look(**how: Any) -> list[JobView]:
            self.asked += 1
            return looks(**how) if self.asked <= after else []

        monkeypatch.setattr(self.client, "jobs", look)
        actor = SimpleNamespace(shut_down=SimpleNamespace(remote=lambda: len(jobs)))
        monkeypatch.setattr(ray, "get_actor", lambda *_: actor)
        monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)

    def stop(self, *, force: bool) -> int:
        client: Any = self.client
        return cluster._stop_jobs(client, force, self.notes, self.told.append)


def test_down_waits_for_the_longest_grace_period_of_what_it_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(cluster, "STOP_MARGIN_S", 20.0)
    ending = Ending(monkeypatch, 3, stopping("short", 1.0), stopping("long", 100.0))
    assert ending.stop(force=False) == 2
    assert ending.asked > 3, "it has waited"
    assert ending.told == [
        "waiting for jobs to end, 120 s at most (not with --force), by grace period: long (100 s), short (1 s)"
    ]
    assert ending.notes == []


@pytest.mark.parametrize(
    ("grace_s", "wait_s"),
    [(2.0, 30.0), (20.0, 35.0), (3600.0, 3615.0), (1e9, 3615.0)],
    ids=["short", "", "hour", "ever"],
)
def test_how_long_down_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, grace_s: float, wait_s: float) -> None:
    waited: list[float] = []
    monkeypatch.setattr(cluster, "_await", lambda _condition, timeout_s, _otherwise: waited.append(timeout_s))
    Ending(monkeypatch, 99, stopping("a", grace_s), job_view("b", JobState.RUNNING)).stop(force=False)
    assert waited == [wait_s]


@pytest.mark.parametrize("force", [True, False])
def test_down_names_the_jobs_that_it_leaves(monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster, "STOP_MARGIN_S", 0.0)
    ending = Ending(monkeypatch, 99, *(stopping(f"job-{number}", 0.0) for number in range(7)))
    assert ending.stop(force=force) == 7
    (note,) = ending.notes
    assert note.startswith("not ended yet; their supervisors kill them when their leases expire: job-0 (0 s), job-1 (0")
    assert note.endswith("job-4 (0 s), and 2 more")
    assert bool(ending.told) is not force


def test_down_without_jobs_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, 0)
    assert ending.stop(force=False) == 0
    assert (ending.told, ending.notes) == ([], [])


def test_down_does_not_wait_for_what_is_kept_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_await", lambda *_: pytest.fail("nothing ends"))
    ending = Ending(monkeypatch, 99, *(job_view(state, JobState(state)) for state in ("QUEUED", "SUSPENDED")))
    ending.stop(force=False)
    assert ending.told == []
    assert ending.notes == ["jobs that wait are kept for the next 'cotenant up': QUEUED, SUSPENDED"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_taken_port_is_told_before_ray_is_started(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(cluster.ClusterRecord, "load", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_start_ray", lambda _: pytest.fail("Ray is started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(api=ApiSettings(host=host, port=port))
        with pytest.raises(CotenantError, match=rf"cannot listen on {host}:{port} \(.*COTENANT_API__PORT"):
            cluster.up(None, True, settings, object)


def test_a_free_port_stays_free_for_the_api() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    for _ in range(2):
        cluster._refuse_taken(ApiSettings(port=port))


def test_a_ray_head_that_is_gone_at_once_is_one_line_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[int] = []

    def fail(**_: object) -> None:
        raise ConnectionError("failed to connect to GCS\nat all")

    monkeypatch.setattr(cluster.ClusterRecord, "load", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_start_ray", lambda _: (4711, "127.0.0.1:1"))
    monkeypatch.setattr(cluster, "watched", lambda *_: nullcontext())
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "_end_ray", ended.append)
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    with pytest.raises(CotenantError, match=rf"^the Ray head did not start; see {tmp_path}/ray-head.log$"):
        cluster.up(None, True, Settings(), None)
    assert ended == [4711], "nothing of it is left"
