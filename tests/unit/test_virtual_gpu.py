"""The virtual GPU interface in a job: the socket of its host agent, its token, its errors."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launching import Host

import cotenant
from cotenant.actors import leasesocket
from cotenant.actors.launchspec import SITE_DIR
from cotenant.actors.leasesocket import LeaseSocket, socket_path
from cotenant.actors.ratelimit import KEPT, RateLimiter
from cotenant.actors.shim import resources
from cotenant.actors.shim.resources import RateLimited, ResourceError
from cotenant.scheduler.errors import NotPermitted, TooManyRequests

GRANTED = {
    "job_id": "job",
    "action": "request",
    "status": "granted",
    "resource_type": "memory",
    "requested": 7.0,
    "granted": 7.0,
    "share": 9.0,
    "reason": "there is room for it",
}


class Agent:
    """Stands in for the host agent: answers as told and keeps what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "agent.sock")
        self.asked: list[Mapping[str, Any]] = []
        self.answer: Mapping[str, Any] | Exception = GRANTED
        self.socket = LeaseSocket(self.path, self._answer)

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(question)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def agent(tmp_path, monkeypatch):
    agent = Agent(tmp_path)
    for name, value in {"AGENT": agent.path, "LEASE_TOKEN": "t0ken", "JOB_ID": "job", "EPOCH": "3"}.items():
        monkeypatch.setenv(f"COTENANT_{name}", value)
    monkeypatch.setattr(resources, "PATIENCE_S", 0.3)
    yield agent
    agent.socket.close()


def test_a_job_asks_with_the_token_of_its_lease(agent):
    answer = cotenant.request_resource_allocation("memory", "7B")
    assert answer == ("granted", "memory", 7.0, 7.0, 9.0, "there is room for it")
    assert (answer.status, answer.share) == ("granted", 9.0)
    (asked,) = agent.asked
    assert {name: asked[name] for name in ("job_id", "epoch", "token")} == {
        "job_id": "job",
        "epoch": "3",
        "token": "t0ken",
    }
    assert (asked["action"], asked["resource_type"], asked["amount"]) == ("request", "memory", "7B")
    cotenant.release_resources("compute", 0.5)
    cotenant.set_resource_limits("compute", None)
    assert [(each["action"], each["amount"]) for each in agent.asked[1:]] == [("release", 0.5), ("limit", None)]
    assert len({each["request_id"] for each in agent.asked}) == 3


def test_what_could_be_had_comes_by_resource(agent):
    agent.answer = {"job_id": "job", "epoch": 3, "memory": {"share": 1}, "compute": {"share": 2}, "power": {}}
    assert cotenant.get_available_resources() == {"memory": {"share": 1}, "compute": {"share": 2}, "power": {}}


def test_errors_say_what_is_wrong(agent):
    agent.answer = NotPermitted("this is not the token of a lease that is held on this host")
    with pytest.raises(ResourceError, match="not the token"):
        cotenant.get_available_resources()
    agent.answer = TooManyRequests("job asks too often", 0.4)
    with pytest.raises(RateLimited, match=r"job asks too often; again in 0\.4 s") as caught:
        cotenant.get_available_resources()
    assert caught.value.retry_after_s == 0.4
    agent.answer = RuntimeError("boom")
    with pytest.raises(ResourceError, match="the host agent failed: RuntimeError"):
        cotenant.get_available_resources()
    with pytest.raises(ResourceError, match="amount: nan is not accepted"):
        cotenant.request_resource_allocation("memory", float("nan"))


def test_a_program_that_is_no_job_is_told_so(monkeypatch):
    monkeypatch.delenv("COTENANT_AGENT", raising=False)
    with pytest.raises(ResourceError, match="under no lease: run it with 'cotenant submit'"):
        cotenant.get_available_resources()


def test_an_agent_that_starts_anew_is_waited_for(agent, monkeypatch):
    agent.socket.close()
    with pytest.raises(ResourceError, match="the host agent does not answer"):
        cotenant.get_available_resources()
    monkeypatch.setattr(resources, "PATIENCE_S", 20.0)
    again = threading.Timer(0.3, lambda: setattr(agent, "socket", LeaseSocket(agent.path, agent._answer)))
    again.start()
    assert cotenant.request_resource_allocation("memory", 7).status == "granted"
    again.join()


def test_the_socket_is_for_its_owner_and_takes_no_nonsense(agent):
    assert stat.S_IMODE(Path(agent.path).stat().st_mode) == 0o600
    for line, reply in [(b"{\n", "error"), (b"[]\n", "a question is a JSON object"), (b"\n", "error")]:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(agent.path)
            link.sendall(line)
            assert reply in link.makefile().readline()
    assert agent.asked == []


@pytest.mark.parametrize("text", [b"", b'{"method": '])
def test_nobody_waits_for_those_who_do_not_get_their_questions_out(agent, monkeypatch, text):
    monkeypatch.setattr(leasesocket, "ASK_S", 600.0)
    with contextlib.ExitStack() as links:
        for _ in range(4 * leasesocket.MOST_AT_ONCE):
            link = links.enter_context(socket.socket(socket.AF_UNIX))
            link.connect(agent.path)
            link.sendall(text)
        assert cotenant.request_resource_allocation("memory", 7).status == "granted"


def test_a_question_that_drips_in_does_not_take_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(leasesocket, "ASK_S", 0.3)
    mine, theirs = socket.socketpair()
    with mine, theirs, pytest.raises(TimeoutError), contextlib.ExitStack() as drip:
        enough = threading.Event()
        drip.callback(enough.set)

        def send() -> None:
            while not enough.wait(0.001):
                with contextlib.suppress(OSError):
                    theirs.send(b"x")

        threading.Thread(target=send, daemon=True).start()
        leasesocket._question(mine)


def test_however_many_connect_the_agent_is_there_for_others_in_the_end(agent, monkeypatch):
    monkeypatch.setattr(leasesocket, "ASK_S", 0.2)
    monkeypatch.setattr(resources, "PATIENCE_S", 60.0)
    with contextlib.ExitStack() as links:
        for _ in range(3 * leasesocket.MOST_OPEN):
            link = links.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                link.connect(agent.path)
        assert cotenant.request_resource_allocation("memory", 7).status == "granted"


def test_in_an_interpreter_without_cotenant_the_shim_lends_it(agent):
    code = (
        "import sitecustomize, cotenant\n"
        "print(cotenant.__name__, cotenant.request_resource_allocation('memory', 7).status)\n"
    )
    env = {name: value for name, value in os.environ.items() if name.startswith("COTENANT_")}
    env |= {"PYTHONPATH": SITE_DIR, "COTENANT_JOB_DIR": "/nowhere", "COTENANT_DEVICE": "cuda"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "_cotenant_shim.resources granted\n"


def test_only_the_token_of_a_job_that_runs_here_counts(tmp_path):
    host = Host(tmp_path)
    launched = {job_id: host.python("import time; time.sleep(60)", job_id=job_id) for job_id in ("one", "two")}
    envs = {job_id: host.launcher.environment(job_id, 1) for job_id in launched}
    tokens = {job_id: env["COTENANT_LEASE_TOKEN"] for job_id, env in envs.items()}
    assert len(set(tokens.values())) == 2
    for job_id, token in tokens.items():
        assert host.launcher.holds(job_id, 1, token)
        assert not host.launcher.holds(job_id, 2, token)
    assert not host.launcher.holds("one", 1, tokens["two"]), "another job's lease"
    for wrong in ("", "é", tokens["one"][:-1]):
        assert not host.launcher.holds("one", 1, wrong)
    host.restart()
    assert host.launcher.holds("one", 1, tokens["one"])
    for job_id in launched:
        host.launcher.stop(job_id, 1, 0.0, "done")
        host.exited(job_id)
    assert not host.launcher.holds("one", 1, tokens["one"]), "it has ended"


def test_the_path_of_the_socket_is_short_whatever_the_run_directory(tmp_path):
    assert socket_path(Path("/run/x")) == "/run/x/agent.sock"
    deep = tmp_path / ("d" * 100)
    found = socket_path(deep)
    assert len(found) < 100
    assert found == socket_path(deep) != socket_path(deep / "e")
    assert stat.S_IMODE(Path(found).parent.stat().st_mode) == 0o700
    for path in (found, socket_path(deep / "e")):
        LeaseSocket(path, lambda _: {}).close()
        assert not Path(path).parent.exists()


def test_requests_are_limited_per_job():
    now = [0.0]
    limiter = RateLimiter(2.0, 3, lambda: now[0])
    for _ in range(3):
        limiter.take("a")
    with pytest.raises(TooManyRequests) as caught:
        limiter.take("a")
    assert caught.value.retry_after_s == 0.5
    limiter.take("b")
    now[0] = 0.5
    limiter.take("a")
    with pytest.raises(TooManyRequests):
        limiter.take("a")
    for number in range(KEPT + 1):
        limiter.take(str(number))
    assert len(limiter._buckets) == KEPT
