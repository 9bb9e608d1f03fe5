"""What a user types, for real: up, submit, run inside a Ray job, ps, the API, stop, down."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from cluster_support import RAY_ENVIRONMENT
from support import wait_until

from cotenant.actors.cluster import DASHBOARD_AGENT_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BIN = Path(sys.executable).parent


class Shell:
    """Runs commands as a user's shell would, with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COTENANT_"))},
            # as a user has it: no authentication mode is chosen, so 'up --local' makes Ray ask for a token
            **{name: value for name, value in RAY_ENVIRONMENT.items() if name != "RAY_AUTH_MODE"},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "COTENANT_HOME": str(home / "home"),
            "COTENANT_RUN_DIR": str(home / "run"),
            "COTENANT_API__PORT": "0",
            "COTENANT_LEASE__STOP_GRACE_S": "2",
            "COTENANT_DEVICE__BACKEND": "cpu",
        }

    def __call__(
        self, *command: str, expect: int | None = 0, timeout_s: float = 90.0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert expect in (None, done.returncode), f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def submit_ray_job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``ray job submit``, once Ray's own agent for jobs has started: it takes its time on a busy machine."""
        done: list[subprocess.CompletedProcess[str]] = []

        def accepted() -> bool:
            done[:] = [self("ray", "job", "submit", *words, expect=None)]
            return "No available agent to submit job" not in done[0].stderr

        wait_until(accepted, 90, "Ray takes the job", poll_s=1.0)
        assert done[0].returncode == 0, f"{words}\n{done[0].stdout}\n{done[0].stderr}"
        return done[0]

    def record(self) -> dict[str, str | int]:
        return json.loads((Path(self.environment["COTENANT_HOME"]) / "cluster.json").read_text())

    def job(self, name: str) -> dict[str, object] | None:
        jobs = json.loads(self("cotenant", "ps", "--all", "--json").stdout)
        return next((job for job in jobs if name in (job["name"], job["job_id"])), None)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("cli"))
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # another Ray of this machine has its port, as here
            other.bind(("127.0.0.1", DASHBOARD_AGENT_PORT))
            other.listen()
        up = shell("cotenant", "up", "--local", "--devices", "2", timeout_s=150)
    assert "2" in up.stdout
    exported = [line.removeprefix("export ") for line in shell("cotenant", "env").stdout.splitlines()]
    shell.environment.update(dict(shlex.split(line)[0].split("=", 1) for line in exported))
    assert shell.environment["RAY_AUTH_MODE"] == "token"
    yield shell
    pid = int(shell.record()["ray_pid"])
    shell("cotenant", "down", timeout_s=120)
    wait_until(lambda: not group_exists(pid), 15, "no process of the Ray head is left")


def group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_submit_wait_streams_output_and_passes_the_exit_code(shell):
    done = shell("cotenant", "submit", "--wait", "--", "python", "-c", "print('out'); raise SystemExit(3)", expect=3)
    assert done.stdout.splitlines()[-1] == "out"


def test_not_placeable_is_exit_code_2_and_names_the_hint(shell):
    done = shell("cotenant", "submit", "--wait", "--gpu-memory", "100TiB", "--", "true", expect=2)
    assert "GiB" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--compute", "1.4", "--", "true"], "compute"),
        (["--gpu-memory", "2 parsecs", "--", "true"], "gpu_memory"),
        (["--", "python", "missing_script.py"], "missing_script.py"),
        ([], "command"),
    ],
)
def test_bad_input_is_refused_before_anything_is_submitted(shell, arguments, named):
    done = shell("cotenant", "submit", *arguments, expect=1)
    assert named in done.stderr.replace("-", "_") or named in done.stderr


def test_a_ray_job_runs_its_command_under_a_lease(shell):
    metadata = {"cotenant.gpu_memory": "200MiB", "cotenant.compute": "0.4", "cotenant.priority": "high"}
    script = "import os; print('share of', os.environ['COTENANT_JOB_ID'])"
    done = shell.submit_ray_job(
        *("--submission-id", "sub-1", "--metadata-json", json.dumps(metadata)),
        *("--", "cotenant", "run", "--", "python", "-c", script),
    )
    assert "share of sub-1" in done.stdout
    job = shell.job("sub-1")
    assert job is not None
    assert (job["state"], job["hints"]["priority"], job["hints"]["compute"]) == ("SUCCEEDED", "high", 0.4)


def test_ray_job_stop_reaches_the_command(shell, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"import os, pathlib, time; pathlib.Path('{pid_file}').write_text(str(os.getpid())); time.sleep(600)"
    shell.submit_ray_job(
        *("--no-wait", "--submission-id", "sub-2"),
        *("--", "cotenant", "run", "--gpu-memory", "100MiB", "--", "python", "-c", script),
    )
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), 60, "the command of the Ray job runs")
    shell("ray", "job", "stop", "sub-2")

    def gone() -> bool:
        try:
            os.kill(int(pid_file.read_text()), 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone, 15, "the command is gone")
    wait_until(lambda: shell.job("sub-2")["state"] == "CANCELLED", 15, "the job is cancelled")


def test_ctrl_c_reaches_the_command(shell):
    script = "import time; print('up'); time.sleep(600)"
    with shell.start("cotenant", "run", "--name", "interrupted", "--", "python", "-u", "-c", script) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line == "up\n":
                break
        client.send_signal(signal.SIGINT)
        assert client.wait(timeout=30) == 128 + signal.SIGINT
    assert shell.job("interrupted")["state"] == "CANCELLED"


def test_the_api_wants_the_token_and_shows_the_same_jobs(shell):
    url = str(shell.record()["api_url"])
    assert httpx.get(f"{url}/api/v1/jobs").status_code == 401
    token = (Path(shell.environment["COTENANT_HOME"]) / "token").read_text().strip()
    listed = httpx.get(f"{url}/api/v1/gpus", headers={"Authorization": f"Bearer {token}"})
    assert listed.status_code == 200
    gpus = json.loads(shell("cotenant", "gpus", "--json").stdout)
    assert len(gpus) == 2
    body = listed.json()
    assert [gpu["gpu_id"] for gpu in (body if isinstance(body, list) else body["items"])] == [g["gpu_id"] for g in gpus]


def test_an_api_that_is_killed_comes_back_where_it_was(shell):
    url = str(shell.record()["api_url"])
    port = int(url.rpartition(":")[2])

    def listeners() -> set[int | None]:
        return {
            each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"
        }

    (pid,) = listeners()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: listeners() - {pid, None}, 60, "somebody listens there again", poll_s=0.2)
    assert httpx.get(f"{url}/api/v1/jobs", timeout=30).status_code == 401


def test_plan_changes_nothing(shell):
    before = shell("cotenant", "ps", "--all", "--json").stdout
    planned = shell("cotenant", "plan", "--count", "3", "--gpu-memory", "100MiB", "--compute", "0.5", "--json")
    assert len(json.loads(planned.stdout)["jobs"]) == 3
    assert shell("cotenant", "ps", "--all", "--json").stdout == before


def test_up_twice_is_one_cotenant(shell):
    before = shell.record()
    shell("cotenant", "up", "--local", "--devices", "2")
    assert shell.record()["ray_pid"] == before["ray_pid"]
