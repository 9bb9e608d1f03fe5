"""What belongs to a lease: its token, and processes of programs that save, which are asked, not signalled, to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ENV, GPU, OTHER, Host
from support import wait_until

from cotenant.actors import jobrecords, runner
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.jobrecords import Exited
from cotenant.actors.launcher import Launcher
from cotenant.configs.settings import EnforcementSettings

WORKER = """
import os, pathlib, time
from cotenant.checkpointing import continues, stop_requested
assert not continues()
while not stop_requested():
    time.sleep(0.01)
pathlib.Path(os.environ["COTENANT_CHECKPOINT_DIR"], "saved").touch()
time.sleep(600)  # as Ray's workers do when their task is over
"""


@pytest.fixture
def worker(host: Host) -> Iterator[int]:
    """A process that Ray started under a lease."""
    host.launch(kind="lease", command=(), saves=True)
    environment = host.launcher.environment("job", 1) | {"COTENANT_ATTACH": "1"}
    python_path = os.pathsep.join([environment["PYTHONPATH"], *sys.path])
    variables = {**ENV, **environment, "PYTHONPATH": python_path}
    worker = os.posix_spawn(sys.executable, [sys.executable, "-c", WORKER], variables)
    try:
        wait_until(lambda: host.launcher.root_pids("job") == {worker}, 20, "the worker has attached itself")
        yield worker
    finally:
        os.kill(worker, signal.SIGKILL)  # it is reaped below, so nobody else has its number
        os.waitpid(worker, 0)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_its_processes_save_and_end_once_it_is_given_back(host: Host, worker: int) -> None:
    host.launcher.stop("job", 1, 60.0, "suspended", asks=True)
    saved = host.path / "checkpoints" / "job" / "saved"
    wait_until(saved.exists, 30, "it has found the request, and has saved")
    assert [item.phase for item in host.launcher.inventory()] == ["stopping"]
    assert host.launcher.poll() == []
    host.launcher.stop("job", 1, 30.0, "suspended")
    assert host.exited() == Exited("job", 1, 0, "suspended", stopped=True)


def test_one_that_is_not_given_back_ends_after_its_grace_period(host: Host, worker: int) -> None:
    os.kill(worker, signal.SIGSTOP)
    host.launcher.stop("job", 1, 0.2, "suspended", asks=True)
    reason = "suspended; its program did not give it back within 0.2 s"
    assert host.exited() == Exited("job", 1, -signal.SIGKILL, reason, stopped=True)


def test_nobody_is_signalled_by_an_agent_that_has_restarted(host: Host, worker: int) -> None:
    os.kill(worker, signal.SIGSTOP)  # a signal would let it go on
    wait_until(lambda: state_of(worker) == "T", 10, "it stands still")
    host.launcher.stop("job", 1, 60.0, "suspended", asks=True)
    host.restart()
    assert host.launcher.poll() == []
    assert state_of(worker) == "T"
    host.launcher.stop("job", 1, 30.0, "suspended")
    assert host.exited().exit_code == 0


@pytest.mark.parametrize(("second_s", "sooner"), [(60.0, False), (1.0, True)])
def test_a_second_request_can_only_be_more_urgent(host: Host, second_s: float, *, sooner: bool) -> None:
    host.launch(kind="lease", command=())
    host.launcher.stop("job", 1, 5.0, "first", asks=True)
    record = host.launcher._jobs["job", 1]
    first = record.stop
    host.launcher.stop("job", 1, second_s, "second", asks=True)
    assert first is not None
    assert record.stop is not None
    assert (record.stop.reason, record.stop.asks, record.stop.kill_at < first.kill_at) == ("first", True, sooner)
    host.launcher.stop("job", 1, 60.0, "third")
    assert host.exited().reason == "first"


def test_what_does_not_save_is_not_told_how(host: Host) -> None:
    host.launch(kind="lease", command=())
    assert not {"COTENANT_CHECKPOINT_DIR", "COTENANT_STOP_FILE"} & set(host.launcher.environment("job", 1))


def test_a_program_that_is_faster_than_its_launch_holds_its_lease(host, monkeypatch):
    held: list[bool] = []
    load, output = jobrecords.load, host.path / "job.1" / runner.OUTPUT

    def late(*arguments):
        wait_until(lambda: output.read_text().endswith("\n"), 10, "the program is up")
        own = output.read_text().strip()
        held.extend(host.launcher.holds("job", epoch, token) for epoch, token in ((1, own), (1, "x"), (2, own)))
        return load(*arguments)

    monkeypatch.setattr(jobrecords, "load", late)
    host.python("import os, time; print(os.environ['COTENANT_LEASE_TOKEN'], flush=True); time.sleep(60)")
    assert held == [True, False, False]
    host.launcher.stop("job", 1, 0.0, "enough")
    host.exited()
    assert not host.launcher.holds("job", 1, host.output().strip())


def test_the_processes_of_a_lease_end_when_it_is_not_renewed(host, worker):
    host.launcher.renew(time.monotonic() - 1.0)
    host.launcher.tend()
    exited = host.exited()
    assert exited == Exited("job", 1, -signal.SIGKILL, exited.reason, lost=True, stopped=True)
    assert exited.reason.startswith("lease expired")
    assert "heard nothing from the scheduler" in exited.reason


@pytest.mark.parametrize("released", [False, True])
def test_a_process_that_comes_after_the_end_of_its_lease_gets_no_gpu(host, *, released):
    host.launch(kind="lease", command=())
    environment = (
        dict(ENV) | host.launcher.environment("job", 1) | {"COTENANT_ATTACH": "1", "CUDA_VISIBLE_DEVICES": "0"}
    )
    host.launcher.stop("job", 1, 0.0, "lost", lost=True)
    host.exited()
    if released:
        host.launcher.release("job", 1)
    code = "import os; print([os.environ['CUDA_VISIBLE_DEVICES']])"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['']"
    assert ended.stderr == "cotenant: the lease of job is over: this process gets no GPU\n"


def test_a_process_that_comes_while_its_lease_is_asked_to_end_has_its_gpu(host):
    host.launch(kind="lease", command=())
    environment = (
        dict(ENV) | host.launcher.environment("job", 1) | {"COTENANT_ATTACH": "1", "CUDA_VISIBLE_DEVICES": "0"}
    )
    host.launcher.stop("job", 1, 600.0, "suspended", asks=True)
    code = "import os; print([os.environ['CUDA_VISIBLE_DEVICES']])"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (ended.stdout.strip(), ended.stderr) == ("['0']", "")


def test_leases_expire_whatever_becomes_of_what_their_jobs_run_under(host, monkeypatch):
    class Broken(HostEnforcement):
        def tend(self, job_dirs) -> None:
            raise ValueError("its record is damaged")

    host.launcher = Launcher(host.path, (GPU, OTHER), Broken(host.path, (GPU, OTHER), EnforcementSettings()))
    host.launch(kind="lease", command=())
    host.launcher.renew(time.monotonic() - 1.0)
    host.launcher.tend()
    assert host.exited().reason.startswith("lease expired")


def test_the_caps_of_a_job_are_not_those_of_the_jobs_it_submits(host):
    caps = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=600M"}
    host.python("import os; print([name for name in os.environ if name.startswith('CUDA_MPS')])", env={**ENV, **caps})
    host.exited()
    assert host.output() == "[]\n"
