"""The command line with a client that has no cluster: what reaches the client, what is printed, how it ends."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import COMMAND, RUNNER, invoke
from fake_client import GIB, FakeClient, job_view
from support import wait_until

from cotenant import _attach, _preflight, _render
from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import Hints, JobState
from cotenant.scheduler.errors import NotConnected, NotPlaceable
from cotenant.scheduler.hints import HINT_NAMES


def test_the_fake_has_the_methods_of_the_client() -> None:
    for name, method in inspect.getmembers(FakeClient, inspect.isfunction):
        if not name.startswith("_"):
            real = set(inspect.signature(getattr(Client, name)).parameters)
            assert {key for key in inspect.signature(method).parameters if key not in {"how", "asked"}} <= real, name


# -- submit -----------------------------------------------------------------------------------------------------------


def test_submit_prints_the_id_and_passes_everything_on(client: FakeClient, tmp_path: Path) -> None:
    args = [
        "--name",
        "n",
        "--job-id",
        "mine",
        "--env",
        "A=1=2",
        "--env",
        "B=",
        "--gpu-memory",
        "2GiB",
        "--priority",
        "high",
    ]
    assert invoke("submit", *args, "--", "python", "train.py", "--gpus", "9") == (0, "mine\n", "")
    [got] = client.submitted
    assert got["command"] == ["python", "train.py", "--gpus", "9"]
    assert (got["name"], got["job_id"], got["cwd"]) == ("n", "mine", str(tmp_path))
    assert got["hints"] == Hints(gpu_memory=2 * GIB, priority="high")
    assert (got["env"]["A"], got["env"]["B"], got["env"]["PATH"]) == ("1=2", "", os.environ["PATH"])
    assert "attached" not in got
    assert client.closed == 1


def test_the_command_needs_no_dashes(client: FakeClient) -> None:
    assert invoke("submit", "--gpus", "1", "python", "train.py", "--lr", "3")[0] == 0
    assert client.submitted[0]["command"] == ["python", "train.py", "--lr", "3"]


def test_submit_json_is_the_view(client: FakeClient) -> None:
    code, out, _ = invoke("submit", "--json", "--", "python", "train.py")
    assert code == 0
    assert json.loads(out)["job_id"] == "job-new"


HINT_OPTIONS = {
    "gpus": ("2", 2),
    "gpu_memory": ("1KiB", 1024),
    "compute": ("40%", 0.4),
    "priority": ("low", "low"),
    "criticality": ("0.5", 0.5),
    "max_slowdown": ("20%", 1.2),
    "isolation": ("hard", "hard"),
    "gang": ("cluster", "cluster"),
    "expected_duration": ("1h", 3600.0),
    "framework": ("torch", "torch"),
    "batch_size": ("32", 32),
    "model": ("resnet50", "resnet50"),
    "model_family": ("cnn", "cnn"),
    "parameters": ("25.6M", 25_600_000),
    "operator_mix": ("on", True),
    "queue": ("q", "q"),
    "tenant": ("t", "t"),
    "restart": ("never", "never"),
    "group": ("web", "web"),
    "anti_affinity": ("tenant:t", "tenant:t"),
    "cpus": ("4", 4.0),
    "checkpoint": ("own", "own"),
    "grace": ("90s", 90.0),
    "deadline": ("2h", None),
}


@pytest.mark.parametrize("command", ["submit", "run", "plan"])
@pytest.mark.parametrize("hint", HINT_NAMES)
def test_every_hint_is_an_option_of_every_command_that_takes_hints(client: FakeClient, command: str, hint: str) -> None:
    text, expected = HINT_OPTIONS[hint]
    assert invoke(command, f"--{hint.replace('_', '-')}", text, "--", "python", "train.py")[0] == 0
    hints = client.planned[0][0][1] if command == "plan" else client.submitted[0]["hints"]
    if hint == "deadline":
        assert hints.deadline_s == pytest.approx(time.time() + 7200, abs=60)
    else:
        field = {"expected_duration": "expected_duration_s", "grace": "grace_s"}.get(hint, hint)
        assert hints == dataclasses.replace(
            Hints(), **{field: pytest.approx(expected) if type(expected) is float else expected}
        )


BAD = [
    ([], "command: it is empty"),
    (["--"], "command: it is empty"),
    (["--", ""], "command: it is empty"),
    (["--", "python", "gone.py"], "the script 'gone.py' does not exist in "),
    (["--", "python3.11", "-u", "-W", "ignore", "gone.py"], "the script 'gone.py' does not exist"),
    (["--", "/usr/bin/python3", "-Xdev", "gone.py"], "does not exist"),
    (["--", "train.py"], "command: 'train.py' is a script, not a program; put 'python' before it"),
    (["--", "./gone.sh"], "command: './gone.sh' does not exist"),
    (["--", "./train.py"], "command: './train.py' may not be executed"),
    (["--cwd", "nowhere", "--", "python", "train.py"], "nowhere' is not a directory"),
    (["--cwd", "train.py", "--", "python", "train.py"], "train.py' is not a directory"),
    (["--env", "A", "--", "python", "train.py"], "env: 'A' is not accepted; give NAME=VALUE"),
    (["--env", "=1", "--", "python", "train.py"], "env: '=1' is not accepted"),
    (["--compute", "1.4", "--", "python", "train.py"], "compute: '1.4' is not accepted; give a fraction in (0, 1]"),
    (
        ["--gpu-memory", "2Gib/s", "--", "python", "train.py"],
        "gpu_memory: '2Gib/s' is not accepted; give a positive size",
    ),
    (["--gpu-memory", "9999999999GiB", "--", "python", "train.py"], "number of bytes, at most 1048576TiB"),
    (["--gpus", "", "--", "python", "train.py"], "gpus: '' is not accepted"),
    (["--job-id", "../x", "--", "python", "train.py"], "job_id: '../x' is not accepted; give letters, digits"),
    (["--job-id", "", "--", "python", "train.py"], "job_id: '' is not accepted"),
    (["--gpu-mem", "1GiB", "--", "python", "train.py"], "--gpu-mem"),
]


@pytest.mark.parametrize("command", ["submit", "run"])
@pytest.mark.parametrize(("args", "message"), BAD)
def test_mistakes_are_one_line_and_reach_nobody(
    client: FakeClient, command: str, args: list[str], message: str
) -> None:
    code, out, err = invoke(command, *args)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert client.submitted == []


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "train"],
        ["python", "-c", "print(1)"],
        ["python", "-um", "train"],
        ["python", "-"],
        ["python", "train.py"],
        ["python", "--check-hash-based-pycs", "never", "train.py"],
        ["torchrun", "gone.py"],
        ["true"],
    ],
)
def test_commands_that_name_no_missing_script_pass(client: FakeClient, command: list[str]) -> None:
    assert invoke("submit", "--", *command)[0] == 0


def test_unreadable_or_vanished_working_directory(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert "may not be read; give a readable directory" in invoke("submit", "--", "python", "train.py")[2]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "cwd: the current directory is gone" in invoke("submit", "--", "true")[2]


def test_not_placeable_is_exit_code_2(client: FakeClient) -> None:
    client.final = job_view("job-new", JobState.FAILED, not_placeable=True, reason="8 GiB is more than any GPU has")
    for command in ("submit", "run"):
        code, out, err = invoke(command, "--", "python", "train.py")
        assert (code, out) == (2, "job-new\n" if command == "submit" else "")
        assert err == "error: not placeable: job-new: 8 GiB is more than any GPU has\n"
    client.error = NotPlaceable("no GPU is that large")
    assert invoke("submit", "--", "true")[::2] == (2, "error: not placeable: no GPU is that large\n")


def test_not_connected_says_what_to_do(client: FakeClient) -> None:
    client.error = NotConnected("no cotenant here; run 'cotenant up'")
    for args in (
        ["ps"],
        ["gpus"],
        ["submit", "--", "true"],
        ["stop", "job-1"],
        ["top", "--once"],
        ["run", "--", "true"],
    ):
        assert invoke(*args) == (1, "", "error: no cotenant here; run 'cotenant up'\n")


# -- run and submit --wait --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["run"], ["submit", "--wait"]])
@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        (JobState.SUCCEEDED, 0, 0),
        (JobState.FAILED, 3, 3),
        (JobState.FAILED, -9, 137),
        (JobState.FAILED, None, 1),
        (JobState.FAILED, 0, 1),
        (JobState.CANCELLED, -15, 143),
        (JobState.CANCELLED, None, 1),
    ],
)
def test_output_and_exit_code_pass_through(
    client: FakeClient, args: list[str], state: JobState, exit_code: int | None, expected: int
) -> None:
    client.final = job_view("job-new", state, exit_code=exit_code, reason="why")
    result = RUNNER.invoke(COMMAND, [*args, "--", "python", "train.py"])
    assert (result.exit_code, result.stdout_bytes) == (expected, b"step 1\n\xff\x00step 2\n")
    assert result.stderr == ("" if state is JobState.SUCCEEDED else f"cotenant: job-new: {state}: why\n")
    assert client.submitted[0]["attached"] is True


def test_run_in_a_ray_job_takes_its_metadata_and_id(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {
        "job_submission_id": "raysubmit_1",
        "job_name": "raysubmit_1",
        "cotenant.gpu_memory": "2GiB",
        "cotenant.compute": "0.4",
        "owner": "me",
    }
    monkeypatch.setenv(_preflight.RAY_JOB_CONFIG, json.dumps({"runtime_env": {}, "metadata": metadata}))
    assert invoke("run", "--compute", "0.5", "--", "python", "train.py")[0] == 0
    [got] = client.submitted
    assert (got["job_id"], got["hints"]) == ("raysubmit_1", Hints(gpu_memory=2 * GIB, compute=0.5))
    assert invoke("run", "--job-id", "other", "--", "true")[0] == 0
    assert client.submitted[1]["job_id"] == "other"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            '{"metadata": {"cotenant.gpu_mem": "1GiB"}}',
            "cotenant.gpu_mem: '1GiB' is not accepted; give a known hint; did you mean",
        ),
        ('{"metadata": {"cotenant.compute": "2"}}', "compute: '2' is not accepted"),
        ("{", "is not JSON"),
        ('{"metadata": []}', "its metadata is not an object"),
    ],
)
def test_bad_ray_metadata(client: FakeClient, monkeypatch: pytest.MonkeyPatch, config: str, message: str) -> None:
    monkeypatch.setenv(_preflight.RAY_JOB_CONFIG, config)
    code, _, err = invoke("run", "--", "true")
    assert code == 1
    assert message in err


@pytest.mark.parametrize("config", ["", '{"metadata": null}', "{}", "[]"])
def test_ray_job_without_metadata(client: FakeClient, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setenv(_preflight.RAY_JOB_CONFIG, config)
    assert invoke("run", "--", "true")[0] == 0
    assert client.submitted[0]["job_id"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_job_and_its_last_output_still_comes(client: FakeClient, number: signal.Signals) -> None:
    client.gate = threading.Event()
    client.final = job_view("job-new", JobState.CANCELLED, exit_code=-15, reason="stopped")
    before = signal.getsignal(number)
    sender = threading.Thread(target=_signal_when_submitted, args=(client, number))
    sender.start()
    result = RUNNER.invoke(COMMAND, ["run", "--", "python", "train.py"])
    sender.join()
    assert (result.exit_code, result.stdout_bytes) == (128 + number, b"step 1\n\xff\x00step 2\n")
    assert client.stopped == [("job-new", f"its client received {number.name}")]
    assert signal.getsignal(number) is before


def _signal_when_submitted(client: FakeClient, number: int) -> None:
    wait_until(lambda: client.submitted, 10.0, "the job is submitted")
    os.kill(os.getpid(), number)


def test_a_second_signal_leaves_at_once(client: FakeClient) -> None:
    client.gate = threading.Event()
    client.submit(["true"], Hints())
    said: list[str] = []
    with _attach.SignalInbox() as inbox:
        client.stop = lambda job_id, reason: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign,assignment]
        os.kill(os.getpid(), signal.SIGINT)
        assert _attach.follow(client, "job-new", inbox, io.BytesIO(), said.append) == 143  # type: ignore[arg-type]
    assert said == ["job-new: SIGTERM again, leaving; the job is being stopped"]
    client.gate.set()


def test_a_reader_that_is_gone_stops_the_job(client: FakeClient) -> None:
    client.gate = threading.Event()
    client.submit(["true"], Hints())
    with _attach.SignalInbox() as inbox:
        assert _attach.follow(client, "job-new", inbox, Broken(), lambda _: None) == 141  # type: ignore[arg-type]
    assert client.stopped == [("job-new", "its client received SIGPIPE")]


class Broken:
    def write(self, _data: bytes) -> None:
        raise BrokenPipeError

    def flush(self) -> None:
        raise AssertionError("nothing was written")


def test_a_failure_while_streaming_is_the_commands_failure(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job_id: str, *, renew: bool) -> None:
        raise NotConnected("the cluster is gone")

    monkeypatch.setattr(client, "stream_logs", fail)
    assert invoke("run", "--", "true")[::2] == (1, "error: the cluster is gone\n")


def test_a_waiting_job_says_what_it_waits_for(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attach, "_STATUS_S", 0.01)
    client.gate = threading.Event()
    client.submit(["true"], Hints())
    client.known["job-new"] = job_view("job-new", JobState.QUEUED, waits="2 GPUs: 6 GiB short")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        client.gate.set()

    with _attach.SignalInbox() as inbox:
        assert _attach.follow(client, "job-new", inbox, io.BytesIO(), say) == 0  # type: ignore[arg-type]
    assert said == ["job-new: QUEUED: 2 GPUs: 6 GiB short"]


# -- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ps"], ["job-1", "RUNNING", "gpu-0 40% 2.0GiB", "50%", "12.50", "~1.10x"]),
        (["ps", "--all"], ["job-9", "SUCCEEDED"]),
        (["gpus"], ["gpu-0", "██████░░░░░░ 50%", "gpu-1 (lost)", "1.0GiB", "8.0GiB"]),
        (["hosts"], ["host-0", "reachable", "held"]),
        (["top", "--once"], ["GPUs: 2", "1 running", "job-1", "gpu-0"]),
        (["explain", "job-1"], ["waits for memory", "6 GiB short", "What would help:"]),
        (["plan", "--count", "2"], ["job-1", "job-2", "now", "1.20x", "predicted packing saving: 30%"]),
        (["accounts"], ["tenant", "ml", "1.25 of 2", "2.0 GPU h", "50%", "75%", "0.63"]),
        (["stop", "job-1"], ["job-1 STOPPING"]),
        (["version"], ["cotenant 0."]),
    ],
)
def test_tables(client: FakeClient, args: list[str], words: list[str]) -> None:
    code, out, err = invoke(*args)
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        (["ps"], {"job_id": "job-1"}),
        (["ps", "--all", "--limit", "1"], {"job_id": "job-1"}),
        (["gpus"], {"gpu_id": "gpu-0"}),
        (["hosts"], {"host_id": "host-0"}),
        (["accounts"], {"kind": "tenant", "name": "ml", "held_gpus": 1.25}),
        (["stop", "job-1", "--reason", "enough"], {"job_id": "job-1", "reason": "enough"}),
    ],
)
def test_lists_as_json(client: FakeClient, args: list[str], keys: dict[str, object]) -> None:
    code, out, _ = invoke(*args, "--json")
    assert code == 0
    assert json.loads(out)[0].items() >= keys.items()


def test_top_as_json_is_one_frame(client: FakeClient) -> None:
    code, out, err = invoke("top", "--json")
    assert (code, err) == (0, "")
    frame = json.loads(out)
    assert {name: [view[key] for view in frame[name]] for name, key in (("gpus", "gpu_id"), ("jobs", "job_id"))} == {
        "gpus": [gpu.gpu_id for gpu in client.gpus()],
        "jobs": [job.job_id for job in client.jobs(active_only=True)],
    }


@pytest.mark.parametrize("args", [["explain", "job-1"], ["plan", "--gpus", "1"]])
def test_answers_as_json(client: FakeClient, args: list[str]) -> None:
    assert isinstance(json.loads(invoke(*args, "--json")[1]), dict)


def test_ps_says_of_a_running_job_what_cannot_be_controlled(client: FakeClient) -> None:
    usage = client.known["job-1"].usage
    assert usage is not None
    usage = usage.model_copy(update={"controls": "no optimizer step seen"})
    client.known = {
        "job-1": client.known["job-1"].model_copy(update={"usage": usage}),
        "job-2": job_view("job-2", JobState.FAILED, usage=usage, reason="exit code 1"),
    }
    first, second = sorted(line for line in invoke("ps", "--all")[1].splitlines() if line.startswith("job-"))
    assert "no optimizer step seen" in first
    assert "no optimizer step seen" not in second
    assert "exit code 1" in second


@pytest.mark.parametrize(("estimated", "shown"), [(True, " ~50% "), (False, " 50% ")])
def test_ps_marks_a_utilisation_that_is_an_estimate(client: FakeClient, estimated: bool, shown: str) -> None:
    usage = client.known["job-1"].usage
    assert usage is not None
    usage = usage.model_copy(update={"util_estimated": estimated})
    client.known = {"job-1": client.known["job-1"].model_copy(update={"usage": usage})}
    assert shown in invoke("ps")[1]


def test_ps_hides_what_has_ended_and_empty_is_said(client: FakeClient) -> None:
    assert "job-9" not in invoke("ps")[1]
    client.known.clear()
    assert invoke("ps")[1] == "no jobs\n"
    assert invoke("ps", "--json")[1] == "[]\n"


@pytest.mark.parametrize("args", [["explain", "nope"], ["logs", "nope"], ["stop", "nope"], ["logs", "-f", "nope"]])
def test_unknown_job(client: FakeClient, args: list[str]) -> None:
    assert invoke(*args)[::2] == (1, "error: no job 'nope': 'cotenant ps --all' lists the jobs that are known\n")


@pytest.mark.parametrize("args", [["logs", "job-9"], ["logs", "job-9", "-f"], ["logs", "job-1"]])
def test_logs_are_the_bytes_of_the_job(client: FakeClient, args: list[str]) -> None:
    assert RUNNER.invoke(COMMAND, args).stdout_bytes == b"step 1\n\xff\x00step 2\n"


def test_names_cannot_steer_the_terminal(client: FakeClient) -> None:
    client.known = {"job-1": job_view(name="[red]x\x1b]0;owned\x07", reason="a\nb\x1b[2J")}
    out = invoke("ps")[1]
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[red]x" in out
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["ps", "--nope"],
        ["explain"],
        ["ps", "--limit", "0"],
        ["plan", "--count", "x"],
        ["plan", "--set"],
    ],
)
def test_wrong_usage_is_exit_code_1(client: FakeClient, args: list[str]) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


# -- the whole program ------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom cotenant import cli\n"
        "try:\n cli.app(['--help'], prog_name='cotenant')\nexcept SystemExit as end:\n assert end.code == 0\n"
        "heavy = {'ray', 'torch', 'fastapi', 'numpy', 'sqlalchemy', 'cotenant.scheduler.views'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m"), (3661, "1h1m"), (90061, "1d1h"), (-5, "0s"), (3600, "1h")]
)
def test_span(seconds: float, text: str) -> None:
    assert _render.span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0B"), (1023, "1023B"), (2**20, "1MiB"), (3 * 2**40, "3072.0GiB")]
)
def test_size(count: float | None, text: str) -> None:
    assert _render.size(count) == text
