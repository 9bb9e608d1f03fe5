"""The facts command: every check ends with a verdict and evidence, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.colocation import checkpoint, facts
from benchmarks.colocation.checkpoint import CheckpointError, CudaCheckpoint, checkpoint_and_restore, suspend_times
from benchmarks.colocation.devices import open_device
from benchmarks.colocation.facts.groups import find_group
from fake_mps import FakeMps
from nvml_standin import Standin
from support import alive, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 110  # torch starts slowly on a busy machine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checks_are_named_once_and_state_something(device):
    checks = facts.checks_of(device)
    assert len({check.name for check in checks}) == len(checks)
    assert all(len(check.statement) > 20 and not check.statement.endswith(".") for check in checks)


@pytest.mark.timeout(240)
def test_facts_about_this_machine(tmp_path):
    rows = []
    found = facts.run("cpu", tmp_path, only=["cpu_clock", "nice", "sampler_cost"], budget_s=200, tell=rows.append)
    assert [fact.id for fact in found] == ["cpu_clock", "sampler_cost", "nice"]  # in the order of their worth
    assert found[0].verdict == "holds", found[0].evidence
    assert abs(found[0].evidence["difference_ms"]) < 5
    written = json.loads((tmp_path / "facts.json").read_text())
    assert written["facts"] == [dataclasses.asdict(fact) for fact in found]
    assert written["device"] == "cpu" and not written["dry_run"] and written["identity"]["gpu_type"] == "cpu-core"
    assert rows[-1].startswith("3 facts about cpu: ")


def test_a_fact_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="facts: warp, woof not known on cpu; give some of: cpu_clock, affinity"):
        facts.run("cpu", tmp_path, only=["woof", "warp"])


def test_what_the_time_does_not_allow_is_unknown(tmp_path):
    (fact,) = facts.run("cpu", tmp_path, only=["cpu_clock"], budget_s=1, tell=lambda line: None)
    assert (fact.verdict, fact.evidence) == ("unknown", {"why": "no time was left for it"})


def test_a_check_ends_when_its_time_is_over():
    (check,) = [check for check in facts.checks_of("cpu") if check.name == "cpu_clock"]
    answer = facts.look(check, "cpu", False, 0.05)
    assert answer == {"verdict": "unknown", "evidence": {"why": "a load did not answer in time"}}


@pytest.mark.parametrize(
    ("output", "log", "why"),
    [
        ("", "Traceback\nValueError: what\n", "the check ended with status 1: ValueError: what"),
        ("[1, 2]\n", "", "the check ended with status 1"),
        ("half of a li", "", "the check ended with status 1"),
    ],
)
def test_a_check_that_crashes_is_unknown(tmp_path, output, log, why):
    (tmp_path / "log").write_text(log)
    assert facts._understood(output, 1, tmp_path / "log") == ("unknown", {"why": why})


def test_a_check_that_hangs_is_killed_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_GRACE_S", 0.2)
    code = (
        "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True, file=sys.stderr)\nwhile True: signal.pause()"
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    assert facts._wait(process, 0.5) == ""
    facts._kill_group(process)
    child = int((tmp_path / "log").read_text())
    wait_until(lambda: not alive(child), 10, "what it had started has ended")


@pytest.mark.timeout(300)
def test_facts_about_a_gpu_in_a_dry_run(tmp_path, monkeypatch):
    standin = Standin(tmp_path / "standin")
    fake = FakeMps(tmp_path, monkeypatch)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        monkeypatch.setenv("TMPDIR", short)  # a socket's path must be short; pytest's folders are not
        standin.set(
            "driver 580.1",
            "gpu 0 uuid=GPU-a name=NVIDIA_H100 total=85899345920 power=300000 tx_rate=1000 rx_rate=2000",
            "children 0 memory=3221225472 sm=40 list=both",
            *(f"metric 0 {number} 33" for number in (2, 5, 10, 12)),
        )
        only = ["mps", "gpm", "counters", "power_limit", "checkpoint", "fraction"]
        command = [sys.executable, "-m", "benchmarks.colocation.facts", "--device", "cuda", "--dry-run"]
        done = standin.run([*command, "--out", str(tmp_path / "out"), "--only", *only], timeout_s=280)
        assert done.returncode == 0, done.stderr
        assert not list(Path(short).glob("ct-mps-*"))
    assert fake.daemons() == []
    written = json.loads((tmp_path / "out" / "facts.json").read_text())
    verdicts = {fact["id"]: fact["verdict"] for fact in written["facts"]}
    assert verdicts == {
        "mps": "does not hold",  # the stand-in for the control program has no clients
        "gpm": "holds",
        "counters": "holds",
        "power_limit": "holds",
        "checkpoint": "unknown",
        "fraction": "unknown",
    }
    assert written["dry_run"] and all(fact["evidence"]["dry_run"] for fact in written["facts"])
    assert written["identity"]["driver"] == "580.1"


def test_no_gpu_and_no_dry_run_is_said(tmp_path):
    command = [sys.executable, "-m", "benchmarks.colocation.facts", "--device", "cuda", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "--dry-run goes through everything without one" in done.stderr


class TestGroups:
    V1 = "9:name=systemd:/\n4:memory:/box/7\n2:cpu,cpuacct:/\n0::/\n"

    def find(self, tmp_path, controller, mounts, own=V1):
        (tmp_path / "own").write_text(own)
        (tmp_path / "mounts").write_text("".join(line + "\n" for line in mounts))
        return find_group(controller, tmp_path / "mounts", tmp_path / "own")

    def test_version_1(self, tmp_path):
        (tmp_path / "memory" / "box" / "7").mkdir(parents=True)
        mount = f"31 25 0:27 / {tmp_path}/memory rw - cgroup cgroup rw,memory"
        assert self.find(tmp_path, "memory", [mount]) == (1, tmp_path / "memory" / "box" / "7")
        assert self.find(tmp_path, "cpu", [mount]) is None

    def test_version_1_inside_a_container(self, tmp_path):
        (tmp_path / "memory").mkdir()
        mount = f"31 25 0:27 /box/7 {tmp_path}/memory ro,nosuid - cgroup cgroup rw,memory"
        assert self.find(tmp_path, "memory", [mount]) == (1, tmp_path / "memory")

    def test_version_2_and_its_controllers(self, tmp_path):
        group = tmp_path / "unified" / "user.slice"
        group.mkdir(parents=True)
        (group / "cgroup.controllers").write_text("cpu memory pids\n")
        mounts = [f"31 25 0:27 / {tmp_path}/unified rw - cgroup2 cgroup2 rw,nsdelegate"]
        own = "0::/user.slice\n"
        assert self.find(tmp_path, "memory", mounts, own) == (2, group)
        assert self.find(tmp_path, "freezer", mounts, own) == (2, group)
        assert self.find(tmp_path, "io", mounts, own) is None


class FakeDriver:
    """``libcuda`` as far as checkpoints ask it: keeps the state of one process, fails where it is told to."""

    def __init__(self, fail="", state=0, initialised=True):
        self.calls = []
        self.fail = fail
        self.state = state
        self.initialised = initialised

    def _step(self, name, before, after):
        self.calls.append(name)
        if not self.initialised:
            return 3
        if name == self.fail or self.state != before:
            return 401
        self.state = after
        return 0

    def cuInit(self, flags):  # noqa: N802
        self.initialised = True
        return 0

    def cuCheckpointProcessLock(self, pid, arguments):  # noqa: N802
        assert arguments._obj.timeout_ms == checkpoint.LOCK_TIMEOUT_MS
        return self._step("lock", 0, 1)

    def cuCheckpointProcessCheckpoint(self, pid, arguments):  # noqa: N802
        return self._step("checkpoint", 1, 2)

    def cuCheckpointProcessRestore(self, pid, arguments):  # noqa: N802
        return self._step("restore", 2, 1)

    def cuCheckpointProcessUnlock(self, pid, arguments):  # noqa: N802
        return self._step("unlock", 1, 0)

    def cuCheckpointProcessGetState(self, pid, number):  # noqa: N802
        number._obj.value = self.state
        return 0

    def cuGetErrorName(self, code, text):  # noqa: N802
        text._obj.value = b"CUDA_ERROR_ILLEGAL_STATE"
        return 0


class TestCheckpoint:
    def test_four_calls_in_order(self):
        fake = FakeDriver(initialised=False)
        seen = []
        times = checkpoint_and_restore(7, CudaCheckpoint(fake), lambda: seen.append(fake.state))
        assert fake.calls == ["lock", "lock", "checkpoint", "restore", "unlock"]  # the first finds it uninitialised
        assert seen == [2] and fake.state == 0
        assert times["suspend_s"] == times["lock_s"] + times["checkpoint_s"]
        assert set(times) == {"lock_s", "checkpoint_s", "restore_s", "unlock_s", "suspend_s", "resume_s"}

    @pytest.mark.parametrize(("fail", "state"), [("lock", 0), ("checkpoint", 0), ("unlock", 1), ("restore", 2)])
    def test_a_failure_is_undone_as_far_as_possible(self, fail, state):
        fake = FakeDriver(fail)
        message = "CUDA_ERROR_ILLEGAL_STATE .401." + (".*could not be brought back" if state else "$")
        with pytest.raises(CheckpointError, match=message):
            checkpoint_and_restore(7, CudaCheckpoint(fake))
        assert fake.state == state

    def test_an_old_driver(self):
        with pytest.raises(CheckpointError, match="570 and later"):
            CudaCheckpoint(object())

    def test_no_driver(self):
        with pytest.raises(CheckpointError, match="no CUDA driver"):
            CudaCheckpoint()

    def test_a_stopped_process_goes_on(self):
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
            try:
                times = suspend_times(process.pid, open_device("cpu"))
                assert 0 <= times["suspend_s"] < 1 and 0 <= times["resume_s"] < 1
                assert process.poll() is None
                assert Path(f"/proc/{process.pid}/stat").read_text().split(") ")[1][0] in "RS"
            finally:
                process.kill()

    def test_a_process_that_has_ended(self):
        with subprocess.Popen(["true"]) as process:
            process.wait()
        with pytest.raises(ProcessLookupError):
            suspend_times(process.pid, open_device("cpu"))
