"""The MPS daemon of a GPU, kept alive; with a stand-in for the control program."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fake_mps import FakeMps
from support import wait_until

from cotenant.actors.enforcement import mps, mpscontrol
from cotenant.actors.enforcement.mps import MOST_FAILURES, MpsService, make_private, service_folder
from cotenant.actors.enforcement.mpscontrol import MpsError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gpu:
    """A service with its clock and its control program."""

    def __init__(self, fake: FakeMps, folder: Path) -> None:
        self.fake = fake
        self.clock = Clock()
        self.service = MpsService("GPU-a", str(folder), self.clock)

    def kill(self) -> None:
        (daemon,) = self.fake.daemons()
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: not self.fake.daemons(), 5, "the daemon is dead")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(mpscontrol, "START_S", 1.0)
    gpu = Gpu(FakeMps(tmp_path, monkeypatch), tmp_path / "mps")
    yield gpu
    gpu.service.stop()
    assert gpu.fake.daemons() == []
    assert not (tmp_path / "mps").exists()


def test_one_daemon_serves_all_jobs_of_a_gpu(gpu):
    assert gpu.service.missing() == ""
    daemon = gpu.service.ensure()
    assert gpu.service.ensure() == daemon
    assert gpu.fake.daemons() == [daemon]
    assert gpu.fake.asked.count("-d GPU-a") == 1
    assert Path(gpu.service.folder).stat().st_mode & 0o777 == 0o700
    gpu.service.look()
    assert gpu.service.lost(daemon) == ""


def test_another_host_agent_goes_on_with_the_same_daemon(gpu):
    daemon = gpu.service.ensure()
    after = MpsService("GPU-a", gpu.service.folder)
    assert after.lost(daemon) == ""
    assert after.ensure() == daemon


def test_clients_of_a_daemon_that_died_are_lost_and_a_new_one_starts_after_a_pause(gpu):
    first = gpu.service.ensure()
    gpu.kill()
    assert gpu.service.lost(first) == "the MPS daemon of GPU-a died"
    with pytest.raises(MpsError, match=r"the MPS daemon of GPU-a died; the next try is in 1 s"):
        gpu.service.ensure()
    gpu.clock.now = 1.0
    second = gpu.service.ensure()
    assert second != first
    assert gpu.service.lost(second) == ""
    assert gpu.service.lost(first) == "the MPS daemon of GPU-a died"
    assert "is not the one it ran under" in MpsService("GPU-a", gpu.service.folder).lost(first)


def test_clients_of_a_server_with_a_fault_are_lost(gpu):
    first = gpu.service.ensure()
    gpu.fake.say(servers="41", status="FAULT")
    assert gpu.service.lost(first) == ""  # nobody has looked yet
    gpu.service.look()
    assert "MPS server 41 is in state FAULT: it refuses clients; its log ends: started" in gpu.service.lost(first)
    gpu.clock.now = 1.0
    gpu.fake.say(servers="", status="")
    assert gpu.service.ensure() != first


def test_a_daemon_that_does_not_answer_is_given_up(gpu, monkeypatch):
    first = gpu.service.ensure()
    gpu.fake.say(how="mute")
    gpu.service.look()
    assert "does not answer" in gpu.service.lost(first)
    gpu.fake.say(how="")


def test_a_daemon_that_keeps_dying_is_left_alone_in_the_end(gpu):
    waits = []
    for _ in range(MOST_FAILURES):
        assert gpu.service.missing() == ""
        daemon = gpu.service.ensure()
        gpu.kill()
        assert gpu.service.lost(daemon)
        waits.append(gpu.service._not_before - gpu.clock.now)
        gpu.clock.now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert gpu.service.missing() == "its daemon failed 5 times in a row"


def test_a_daemon_that_lived_long_did_not_fail_in_a_row(gpu):
    for _ in range(2):
        daemon = gpu.service.ensure()
        gpu.clock.now += mps.HEALTHY_S
        gpu.kill()
        assert gpu.service.lost(daemon)
        assert gpu.service._not_before - gpu.clock.now == 1.0
        gpu.clock.now += 1.0


def test_one_that_does_not_start_says_why_and_leaves_nothing(gpu):
    gpu.fake.say(how="refuse")
    with pytest.raises(MpsError, match="cannot open the device"):
        gpu.service.ensure()
    assert not Path(gpu.service.folder).exists()
    with pytest.raises(MpsError, match=r"cannot open the device; the next try is in 1 s"):
        gpu.service.ensure()


def test_without_the_control_program_there_is_no_mps(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.service.missing() == "nvidia-cuda-mps-control is not on PATH"
    with pytest.raises(MpsError, match="is not on PATH"):
        gpu.service.ensure()


def test_a_folder_that_others_can_enter_is_not_used(tmp_path):
    make_private(str(tmp_path / "mine"))
    make_private(str(tmp_path / "mine"))
    (tmp_path / "mine").chmod(0o755)
    with pytest.raises(PermissionError, match="not a private folder"):
        make_private(str(tmp_path / "mine"))
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="link"):
        make_private(str(tmp_path / "link"))


def test_a_folder_is_short_and_of_one_gpu_of_one_host(tmp_path):
    folders = {service_folder(path, gpu) for path in (tmp_path, tmp_path / "b") for gpu in ("GPU-a", "GPU-b")}
    assert len(folders) == 4
    assert all(len(folder) < 90 for folder in folders)
    assert service_folder(tmp_path, "GPU-a") in folders
