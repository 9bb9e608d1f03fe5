"""A GPU whose MPS daemon hangs: it lives, takes commands and never answers. Nothing else on the host waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_mps import FakeMps
from gpu_host import GPUS, SLEEP, GpuHost
from launching import IGNORE_TERM, ignores_term
from support import alive, started_by, wait_until

from cotenant.actors import jobrecords, launcher, runner
from cotenant.actors.enforcement import cuda, mps
from cotenant.actors.enforcement.mps import MOST_FAILURES
from cotenant.actors.launcher import LaunchError, StaleCommand


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    monkeypatch.setattr(mps, "BACKOFF_S", 0.05)
    monkeypatch.setattr(mps, "START_S", 60.0)  # nothing here waits for it: hung starts are let go on
    host = GpuHost(tmp_path, FakeMps(tmp_path, monkeypatch))
    yield host
    host.fake.say(how="")
    host.fake.say(gpu="GPU-a", how="")
    host.end()
    assert host.fake.daemons() == []


class Start(threading.Thread):
    """A start on a GPU whose daemon hangs, in a thread of its own."""

    def __init__(self, host: GpuHost, job_id: str = "slow", **more: object) -> None:
        super().__init__(daemon=True)
        self.outcome: object = None
        self._launch: Callable[[], object] = lambda: host.launch(job_id, **more)
        before = len(host.fake.asked)
        self.start()
        wait_until(lambda: "get_server_list" in host.fake.asked[before:], 10, "its daemon is asked")

    def run(self) -> None:
        try:
            self.outcome = self._launch()
        except (LaunchError, StaleCommand) as error:
            self.outcome = error

    def ended(self) -> object:
        self.join(20)
        assert not self.is_alive()
        return self.outcome


def hang(host: GpuHost) -> None:
    host.fake.say(gpu="GPU-a", how="hang")


def go_on(host: GpuHost) -> None:
    host.fake.say(gpu="GPU-a", how="")


def begin_to_look(host: GpuHost) -> threading.Thread:
    """Have the host look at a daemon that hangs; returns the thread that waits for its answer."""
    (look,) = started_by(host.launcher.tend, "MPS on GPU-a calls")
    return look


def lease_process(host: GpuHost) -> subprocess.Popen[bytes]:
    """A process of a lease on GPU-a that SIGTERM does not end."""
    host.launch("lease", kind="lease")
    env = {**os.environ, **host.launcher.environment("lease", 1), "COTENANT_ATTACH": "1"}
    process = subprocess.Popen([sys.executable, "-c", IGNORE_TERM + SLEEP], env=env)
    wait_until(lambda: process.pid in host.launcher.root_pids("lease"), 10, "it has attached itself")
    wait_until(lambda: ignores_term(process.pid), 10, "it ignores SIGTERM")
    return process


# -- jobs that run --------------------------------------------------------------------------------------------------


def test_nothing_waits_while_a_daemon_is_found_to_hang(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 60.0)
    pid = host.command_pid(host.launch("job"))
    host.launch("elsewhere", gpu="GPU-b")
    hang(host)
    look = begin_to_look(host)
    os.kill(pid, signal.SIGABRT)
    wait_until(lambda: host.launcher.inventory()[0].phase == "exited", 10, "its end is known")
    for other in GPUS[1:]:
        host.launch(f"on-{other.gpu_id}", gpu=other.gpu_id)
    host.launcher.stop("elsewhere", 1, 0.0, "enough")
    assert host.exited("elsewhere").exit_code < 0
    host.launcher.tend()
    assert look.is_alive(), "all this went on while the daemon was being asked"
    go_on(host)
    wait_until(lambda: not look.is_alive(), 10, "it answers")


def test_daemons_of_other_gpus_are_looked_at_meanwhile(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 60.0)
    host.launch("job")
    host.launch("other", gpu="GPU-b")
    hang(host)
    look = begin_to_look(host)
    (daemon,) = host.fake.daemons("GPU-b")
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not host.fake.daemons("GPU-b"), 10, "it is dead")
    host.launcher.tend()
    assert host.exited("other").reason == "the MPS daemon of GPU-b died"
    assert look.is_alive()
    assert [held.phase for held in host.launcher.inventory() if held.job_id == "job"] == ["running"]
    go_on(host)


def test_its_jobs_are_let_down_as_those_of_one_that_died(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 0.5)
    monkeypatch.setattr(mps, "START_S", 10.0)
    host.launch("job")
    host.launch("elsewhere", gpu="GPU-b")
    hang(host)

    def let_down() -> bool:
        host.launcher.tend()
        return host.launcher.inventory()[0].phase != "running"

    wait_until(let_down, 20, "it is found to hang")
    exited = host.exited("job")
    assert exited.lost
    assert "the MPS daemon of GPU-a does not answer" in exited.reason
    assert "elsewhere" in {launched.job_id for launched in host.launcher.running()}
    go_on(host)
    time.sleep(mps.BACKOFF_S)
    assert host.command_pid(host.launch("job", epoch=2))
    assert len(host.fake.daemons("GPU-a")) == 1, "the one that hung is gone"


def test_another_host_agent_finds_out_too(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 0.5)
    host.launch("job")
    hang(host)
    host.restart()
    assert [held.phase for held in host.launcher.inventory()] == ["running"]

    def let_down() -> bool:
        host.launcher.tend()
        return host.launcher.inventory()[0].phase != "running"

    wait_until(let_down, 20, "it is found to hang")
    assert host.exited("job").lost


# -- ending ---------------------------------------------------------------------------------------------------------


def test_a_job_is_stopped_in_time_and_its_daemon_asked_once(host):
    """By its supervisor: first for what SIGTERM ends, later for what it does not."""
    child = "import subprocess; subprocess.Popen(['sleep', '60']); "
    launched = host.launch("job", IGNORE_TERM + child + SLEEP)
    wait_until(lambda: len(runner.descendants(launched.root_pid)) == 2, 10, "its child runs")
    pid = host.command_pid(launched)
    wait_until(lambda: ignores_term(pid), 10, "it ignores SIGTERM")
    hang(host)
    before = len(host.fake.asked)
    host.launcher.stop("job", 1, 0.1, "enough")
    exited = host.exited("job")
    assert (exited.exit_code, exited.reason, exited.lost) == (-signal.SIGKILL, "enough", False)
    assert host.fake.asked[before:] == ["get_server_list"]
    output, _, _ = host.launcher.read_output("job", 1, 0, 10_000)
    assert output.count(b"its GPU work was not ended in good order") == 1


def test_processes_of_a_lease_are_asked_for_once_and_nothing_waits_for_that(host, monkeypatch):
    for module in (jobrecords, cuda):
        monkeypatch.setattr(module, "DETACH_S", 60.0)
    process = lease_process(host)
    hang(host)
    before = len(host.fake.asked)
    host.launcher.stop("lease", 1, 0.0, "enough")
    for _ in range(20):
        assert host.launcher.poll() == []
        assert host.launcher.inventory()[0].phase == "stopping"
    host.launch("other", gpu="GPU-b")
    assert process.poll() is None, "all this went on while the daemon was being asked"
    wait_until(lambda: len(host.fake.asked) > before, 10, "it is asked")
    assert [command for command in host.fake.asked[before:] if not command.startswith("-d")].count(
        "get_server_list"
    ) == 2, "once for the lease, once by the start of the other job"
    host.fake.say(servers="41", clients=str(process.pid))
    go_on(host)
    host.exited("lease")
    assert process.wait() == -signal.SIGKILL
    assert host.fake.asked[-1] == f"terminate_client 41 {process.pid}"


def test_processes_of_a_lease_are_killed_after_a_while(host):
    process = lease_process(host)
    hang(host)
    before = len(host.fake.asked)
    host.launcher.stop("lease", 1, 0.0, "enough")
    host.exited("lease")
    assert process.wait() == -signal.SIGKILL
    assert host.fake.asked[before:] == ["get_server_list"]


def test_one_that_is_known_to_hang_is_not_asked_for_the_processes_it_let_down(host, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 0.3)
    process = lease_process(host)
    hang(host)

    def let_down() -> bool:
        host.launcher.tend()
        return host.launcher.inventory()[0].phase != "running"

    wait_until(let_down, 20, "it is found to hang")
    asked = len(host.fake.asked)
    assert host.exited("lease").lost
    assert process.wait() == -signal.SIGKILL
    assert len(host.fake.asked) == asked


def test_leases_that_expire_end_in_time_though_it_hangs(host, monkeypatch):
    """The enforcement loop need not come round: what is called all the time sees to it."""
    process = lease_process(host)
    hang(host)
    host.launcher.renew(time.monotonic())
    host.launcher.poll()
    assert host.launcher.inventory()[0].phase == "stopping"
    assert host.exited("lease").reason.startswith("lease expired")
    assert process.wait() == -signal.SIGKILL


# -- starting -------------------------------------------------------------------------------------------------------


def test_a_start_that_waits_for_it_holds_up_no_other(host):
    hang(host)
    slow = Start(host)
    host.launch("other", gpu="GPU-b")
    assert {held.job_id for held in host.launcher.inventory()} == {"other"}
    host.launcher.tend()
    assert slow.is_alive()
    go_on(host)
    assert slow.ended() in host.launcher.running()


def test_what_is_stopped_while_it_waits_does_not_start(host):
    hang(host)
    slow = Start(host)
    host.launcher.stop("slow", 1, 5.0, "enough")
    go_on(host)
    error = slow.ended()
    assert isinstance(error, StaleCommand)
    assert not list(host.path.glob("slow.*"))
    with pytest.raises(StaleCommand):
        host.launch("slow")
    assert host.launcher.inventory() == []


def test_what_is_superseded_while_it_waits_does_not_start(host):
    hang(host)
    older = Start(host)
    newer = host.launch("slow", epoch=2, gpu="GPU-b")
    assert older.is_alive(), "the newer one has not waited for it"
    go_on(host)
    assert isinstance(older.ended(), StaleCommand)
    assert host.launcher.running() == [newer]


def test_what_is_older_than_a_start_that_waits_does_not_start(host):
    """Neither of them has a record among the jobs yet."""
    for gpu in GPUS:
        host.fake.say(gpu=gpu.gpu_id, how="hang")
    newer = Start(host, epoch=2, gpu="GPU-b")
    with pytest.raises(StaleCommand, match="start of epoch 1, but epoch 2 is or was here"):
        host.launch("slow")
    assert newer.is_alive(), "the older one has not waited for it"
    for gpu in GPUS:
        host.fake.say(gpu=gpu.gpu_id, how="")
    launched = newer.ended()
    assert host.launcher.running() == [launched]


def test_what_is_repeated_while_it_waits_starts_once(host):
    hang(host)
    first = Start(host)
    again = threading.Thread(target=lambda: repeated.append(host.launch("slow")))
    repeated: list[object] = []
    again.start()
    go_on(host)
    launched = first.ended()
    again.join(20)
    assert repeated == [launched] == host.launcher.running()
    assert len([command for command in host.fake.asked if command.startswith("-d")]) == 1


def test_what_waits_until_the_leases_have_expired_does_not_start(host):
    hang(host)
    slow = Start(host)
    host.launcher.renew(time.monotonic())
    go_on(host)
    error = slow.ended()
    assert isinstance(error, StaleCommand)
    assert "the leases of this host have expired" in str(error)
    host.launcher.renew(time.monotonic() + 60.0)
    with pytest.raises(StaleCommand):
        host.launch("slow")  # it has been told that it did not start


def test_a_host_agent_that_dies_while_a_start_waits_leaves_nothing_that_starts_later(host):
    """In a process of its own, which is killed."""
    hang(host)
    code = (
        "import sys; from pathlib import Path; from gpu_host import GPUS; from launching import ENV\n"
        "from cotenant.actors.enforcement.host import HostEnforcement; from cotenant.actors.launcher import Launcher\n"
        "from cotenant.configs.settings import EnforcementSettings; from cotenant.placement.types import Share\n"
        "path = Path(sys.argv[1]); host = HostEnforcement(path, GPUS, EnforcementSettings())\n"
        "Launcher(path, GPUS, host).launch(job_id='job', epoch=1, revision=0, kind='command', command=['sleep', '9'],\n"
        "    cwd='/', env=ENV, shares=[Share('GPU-a', 1 << 20, 0.5)], grace_s=0.3)\n"
    )
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    agent = subprocess.Popen([sys.executable, "-c", code, str(host.path)], env=env)
    wait_until(lambda: "get_server_list" in host.fake.asked, 20, "it waits for the daemon")
    agent.kill()
    agent.wait()
    (daemon,) = host.fake.daemons()
    host.restart()
    assert host.launcher.inventory() == []
    go_on(host)
    launched = host.launch("job")
    assert host.launcher.running() == [launched]
    assert host.fake.daemons() == [daemon]
    assert alive(host.command_pid(launched))


def test_after_failures_in_a_row_the_gpu_does_without_mps(host, monkeypatch):
    monkeypatch.setattr(mps, "START_S", 0.3)
    monkeypatch.setattr(mps, "BACKOFF_S", 0.001)
    hang(host)
    for epoch in range(1, MOST_FAILURES + 1):
        with pytest.raises(LaunchError, match=r"MPS on GPU-a: .*(does not answer|did not return)") as caught:
            host.launch("job", epoch=epoch)
        assert caught.value.retry
        assert caught.value.retry_after_s is not None
        time.sleep(mps.BACKOFF_S * 2**epoch)
    monkeypatch.setattr(mps, "START_S", 60.0)  # the daemon of the other GPU is well, and may take its time
    env = host.environ(host.command_pid(host.launch("job", epoch=MOST_FAILURES + 1)))
    assert not Path(env["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert "no MPS: its daemon failed 5 times in a row" in host.launcher.guarantees("job")
    host.launch("other", gpu="GPU-b")
    assert host.fake.daemons("GPU-a") == []


def test_an_older_run_that_does_not_end_holds_up_no_other_start(host, monkeypatch):
    monkeypatch.setattr(launcher, "SUPERSEDE_TIMEOUT_S", 60.0)
    for module in (jobrecords, cuda):
        monkeypatch.setattr(module, "DETACH_S", 60.0)
    process = lease_process(host)
    hang(host)
    newer = threading.Thread(target=lambda: host.launch("lease", epoch=2, kind="lease", gpu="GPU-b"), daemon=True)
    newer.start()
    wait_until(lambda: host.launcher.inventory()[0].phase == "stopping", 10, "the older one is being ended")
    host.launch("other", gpu="GPU-b")
    assert newer.is_alive()
    assert process.poll() is None
    go_on(host)
    wait_until(lambda: host.launcher.poll() and not newer.is_alive(), 20, "it has ended, and the newer one runs")
    process.wait()
