"""Jobs on a host with NVIDIA GPUs, as far as it goes without one: real processes, a stand-in for MPS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_mps import FakeMps
from gpu_host import GPUS, SLEEP, GpuHost
from launching import IGNORE_TERM, ignores_term
from support import wait_until

from cotenant.actors import launcher, runner, starts
from cotenant.actors.enforcement import mps
from cotenant.actors.jobrecords import Launched
from cotenant.actors.launcher import LaunchError, StaleCommand


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "BACKOFF_S", 0.2)
    host = GpuHost(tmp_path, FakeMps(tmp_path, monkeypatch))
    yield host
    host.end()
    assert host.fake.daemons() == []


def test_the_shares_of_two_jobs_are_never_swapped(host):
    """Started at the same moment, again and again, as HAMi has once mixed them up."""
    for round_number in range(3):
        wanted = {f"large-{round_number}": 24_576, f"small-{round_number}": 600}
        launched: dict[str, Launched] = {}

        def launch(job_id: str, memory_mib: int, launched: dict[str, Launched] = launched) -> None:
            launched[job_id] = host.launch(job_id, memory_mib=memory_mib)

        threads = [threading.Thread(target=launch, args=item) for item in wanted.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for job_id, memory_mib in wanted.items():
            env = host.environ(host.command_pid(launched[job_id]))
            assert env["COTENANT_JOB_ID"] == job_id
            assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={memory_mib}M"
            assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
            assert f"at most {memory_mib} MiB and 60% of the processors" in host.launcher.guarantees(job_id)


def test_every_gpu_has_a_daemon_of_its_own(host):
    folders = {}
    for gpu in GPUS:
        env = host.environ(host.command_pid(host.launch(f"on-{gpu.gpu_id}", gpu=gpu.gpu_id)))
        assert env["CUDA_VISIBLE_DEVICES"] == gpu.gpu_id
        folders[gpu.gpu_id] = env["CUDA_MPS_PIPE_DIRECTORY"]
    assert len(set(folders.values())) == 2
    assert sorted(line for line in host.fake.asked if line.startswith("-d")) == ["-d GPU-a", "-d GPU-b"]


def test_isolation_decides(host):
    free = host.environ(host.command_pid(host.launch("free", isolation="none")))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in free
    assert Path(free["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    alone = host.environ(host.command_pid(host.launch("alone", gpu="GPU-b", isolation="hard")))
    assert not Path(alone["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert "isolation hard: nobody else is on its GPUs" in host.launcher.guarantees("alone")


def test_mps_can_be_switched_off(tmp_path, monkeypatch):
    host = GpuHost(tmp_path, FakeMps(tmp_path, monkeypatch), mps="off")
    env = host.environ(host.command_pid(host.launch("job")))
    assert not Path(env["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert "no MPS: switched off" in host.launcher.guarantees("job")
    host.end()


def test_a_client_is_ended_in_good_order_before_it_is_killed(host):
    launched = host.launch("job", IGNORE_TERM + SLEEP)
    pid = host.command_pid(launched)
    wait_until(lambda: ignores_term(pid), 10, "it ignores SIGTERM")
    host.fake.say(servers="41", clients=f"7\n{pid}")
    host.launcher.stop("job", 1, 0.5, "enough")
    assert host.exited("job").exit_code == -signal.SIGKILL
    assert host.fake.asked[-1] == f"terminate_client 41 {pid}"
    assert "terminate_client 41 7" not in host.fake.asked  # somebody else's


def test_one_that_sigterm_would_kill_is_ended_in_good_order_too(host):
    launched = host.launch("job")
    pid = host.command_pid(launched)
    host.environ(pid)
    host.fake.say(servers="41", clients=str(pid))
    host.launcher.stop("job", 1, 10.0, "enough")
    assert host.exited("job").exit_code == -signal.SIGTERM
    assert f"terminate_client 41 {pid}" in host.fake.asked


def test_a_daemon_that_does_not_answer_keeps_no_job_alive(host):
    launched = host.launch("job", IGNORE_TERM + SLEEP)
    pid = host.command_pid(launched)
    wait_until(lambda: ignores_term(pid), 10, "it ignores SIGTERM")
    host.fake.say(how="mute")
    host.launcher.stop("job", 1, 0.0, "enough")
    assert host.exited("job").exit_code == -signal.SIGKILL
    output, _, _ = host.launcher.read_output("job", 1, 0, 10_000)
    assert b"its GPU work was not ended in good order" in output
    host.fake.say(how="")


def test_processes_of_a_lease_are_ended_in_good_order_too(host):
    host.launch("lease", kind="lease")
    env = {**os.environ, **host.launcher.environment("lease", 1), "COTENANT_ATTACH": "1"}
    process = subprocess.Popen([sys.executable, "-c", IGNORE_TERM + SLEEP], env=env)
    wait_until(lambda: process.pid in host.launcher.root_pids("lease"), 10, "it has attached itself")
    wait_until(lambda: ignores_term(process.pid), 10, "it ignores SIGTERM")
    host.fake.say(servers="41", clients=str(process.pid))
    host.launcher.stop("lease", 1, 0.1, "enough")
    wait_until(lambda: bool(host.launcher.poll()) or process.poll() is not None, 10, "it is killed")
    assert process.wait() == -signal.SIGKILL
    assert f"terminate_client 41 {process.pid}" in host.fake.asked
    host.exited("lease")


def test_children_that_hold_device_memory_die_with_the_job_that_is_killed(host):
    """Nothing of the job may be left when its end is told, since then its memory is given to another."""
    code = (
        "import os, subprocess, time; [subprocess.Popen(['sleep', '60'], start_new_session=True) for _ in range(3)]; "
    )
    launched = host.launch("job", IGNORE_TERM + code + SLEEP)
    host.command_pid(launched)
    wait_until(lambda: len(runner.descendants(launched.root_pid)) == 4, 10, "its children run")
    pids = {entry.pid for entry in runner.descendants(launched.root_pid)}
    os.kill(host.command_pid(launched), signal.SIGKILL)
    assert host.exited("job").exit_code == -signal.SIGKILL
    assert not any((entry := runner.process(pid)) and entry.state not in "ZX" for pid in pids)


def test_jobs_whose_daemon_dies_are_let_down_and_the_next_one_gets_a_new_daemon(host):
    host.launch("one")
    host.launch("two")
    host.launch("elsewhere", gpu="GPU-b")
    host.launcher.tend()
    assert len(host.launcher.running()) == 3
    for daemon in host.fake.daemons():
        if b"GPU-a" in Path(f"/proc/{daemon}/environ").read_bytes():
            os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: len(host.fake.daemons()) == 1, 10, "it is dead")
    host.launcher.tend()
    for job_id in ("one", "two"):
        exited = host.exited(job_id)
        assert exited.lost, "it is not its own fault"
        assert exited.reason == "the MPS daemon of GPU-a died"
        host.launcher.release(job_id, 1)
    assert [launched.job_id for launched in host.launcher.running()] == ["elsewhere"]

    deadline = time.monotonic() + 10
    while True:
        try:
            again = host.launch("one", epoch=2)
            break
        except LaunchError as error:
            assert error.retry
            assert re.search(r"MPS on GPU-a: the MPS daemon of GPU-a died; the next try is in", str(error))
            assert time.monotonic() < deadline
            time.sleep(0.05)
            host.launcher._starts._over.clear()  # the scheduler would grant another epoch
    assert host.environ(host.command_pid(again))["COTENANT_EPOCH"] == "2"
    host.launcher.tend()
    assert again.job_id in {launched.job_id for launched in host.launcher.running()}


def test_jobs_of_a_server_with_a_fault_are_let_down(host):
    host.launch("job")
    host.fake.say(servers="41", status="FAULT")
    host.launcher.tend()
    exited = host.exited("job")
    assert exited.lost
    assert "MPS server 41 is in state FAULT" in exited.reason
    host.fake.say(servers="", status="")


def test_a_job_that_fails_because_its_daemon_died_is_not_to_blame(host):
    pid = host.command_pid(host.launch("job"))
    (daemon,) = host.fake.daemons()
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not host.fake.daemons(), 10, "it is dead")
    os.kill(pid, signal.SIGABRT)  # its next CUDA call fails, before anybody has looked at the daemon
    exited = host.exited("job")
    assert exited.lost
    assert exited.reason == "the MPS daemon of GPU-a died; it ended with -6"


def test_another_host_agent_goes_on_with_daemon_and_jobs(host):
    host.launch("job")
    host.restart()
    host.launcher.tend()
    assert [launched.job_id for launched in host.launcher.running()] == ["job"]
    assert "at most 600 MiB" in host.launcher.guarantees("job")
    assert len(host.fake.daemons()) == 1


@pytest.mark.parametrize("how", ["refuse", "not executable", "foreign folder"])
def test_without_permission_nothing_starts_and_it_is_said(host, how, tmp_path):
    if how == "refuse":
        host.fake.say(how="refuse")
        expected = "cannot open the device"
    elif how == "not executable":
        (tmp_path / "bin" / "nvidia-cuda-mps-control").chmod(0o644)
        host.launch("job")
        assert "no MPS: nvidia-cuda-mps-control is not on PATH" in host.launcher.guarantees("job")
        return
    else:
        folder = Path(mps.service_folder(host.path, "GPU-a"))
        folder.symlink_to(tmp_path)
        expected = "is not a private folder of this user"
    with pytest.raises(LaunchError, match=expected) as caught:
        host.launch("job")
    assert caught.value.retry
    assert not list(host.path.glob("job.*"))
    if how == "foreign folder":
        folder.unlink()


class HeldStart:
    """A start on GPU-a that stays between being let onto the GPU and being known as a job while it is held."""

    def __init__(self, host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.there = threading.Event(), threading.Event()
        real = launcher.start_supervisor

        def held(job_dir: Path) -> None:
            self.there.set()
            assert self.go_on.wait(30)
            real(job_dir)

        monkeypatch.setattr(launcher, "start_supervisor", held)
        self.thread = threading.Thread(target=host.launch, args=("job",))
        self.thread.start()
        assert self.there.wait(20)


def left(host: GpuHost) -> tuple[str, ...]:
    folder = mps.service_folder(host.path, "GPU-a")
    return (f"the MPS daemon of GPU-a goes on in {folder}: job.1 has not ended",)


def test_a_start_that_is_under_way_when_its_host_is_given_back_keeps_its_daemon(host, monkeypatch):
    start = HeldStart(host, monkeypatch)
    said: list[tuple[str, ...]] = []
    closing = threading.Thread(target=lambda: said.append(host.launcher.close()))
    closing.start()
    wait_until(lambda: host.launcher._starts._closed, 10, "nothing starts any more")
    with pytest.raises(StaleCommand, match="next: start of epoch 1, but this host is being given back"):
        host.launch("next", gpu="GPU-b")
    assert closing.is_alive(), "it waits for the start"
    start.go_on.set()
    closing.join(20)
    assert said == [left(host)]
    start.thread.join(20)
    assert len(host.fake.daemons("GPU-a")) == 1
    assert [launched.job_id for launched in host.launcher.running()] == ["job"]


def test_a_start_that_hangs_when_its_host_is_given_back_is_told_of(host, monkeypatch):
    monkeypatch.setattr(starts, "LAST_S", 0.1)
    start = HeldStart(host, monkeypatch)
    assert host.launcher.close() == left(host)
    assert len(host.fake.daemons("GPU-a")) == 1
    start.go_on.set()
    start.thread.join(20)


def test_nothing_starts_on_a_host_that_has_been_given_back(host):
    assert host.launcher.close() == ()
    with pytest.raises(StaleCommand, match="job: start of epoch 1, but this host is being given back"):
        host.launch("job")
    assert host.fake.asked == []
