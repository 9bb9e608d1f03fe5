"""The MPS daemon of a GPU, kept alive; with a stand-in for the control program."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_mps import FakeMps
from support import is_locked, wait_until

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

    def fail_to_start(self) -> None:
        with pytest.raises(MpsError):
            self.service.ensure()

    def ask_in_vain(self, talk: Callable[[], object]) -> threading.Thread:
        """Begin a conversation with the daemon, which hangs, and return once the daemon has been asked something."""
        before = len(self.fake.asked)
        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        wait_until(lambda: "get_server_list" in self.fake.asked[before:], 10, "it is asked")
        return thread


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "START_S", 2.0)
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


def test_a_daemon_that_keeps_the_output_of_its_start_open_holds_nobody_up(gpu):
    gpu.fake.say(how="open")
    daemon = gpu.service.ensure()
    assert gpu.fake.daemons() == [daemon]


def test_another_host_agent_goes_on_with_the_same_daemon(gpu):
    daemon = gpu.service.ensure()
    after = MpsService("GPU-a", gpu.service.folder)
    assert after.lost(daemon) == ""
    assert after.ensure() == daemon


def test_cleaners_of_temporary_files_pass_its_folder_over(gpu):
    gpu.service.ensure()
    assert is_locked(gpu.service.folder)
    gpu.kill()
    gpu.service.lost(0)
    gpu.clock.now += 1000.0
    gpu.service.ensure()
    assert is_locked(gpu.service.folder), "the folder of the next one as well"
    os.close(gpu.service._locked)  # its host agent is killed
    gpu.service._locked = None
    assert not is_locked(gpu.service.folder)
    after = MpsService("GPU-a", gpu.service.folder)
    assert is_locked(gpu.service.folder), "the next host agent does it at once, whether or not a job starts"
    os.close(after._locked)


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


def test_nobody_waits_while_a_daemon_that_hangs_is_asked(gpu, monkeypatch):
    """The launcher asks ``lost`` with its own lock held: everything on the host would wait."""
    monkeypatch.setattr(mps, "LOOK_S", 3.0)
    first = gpu.service.ensure()
    gpu.fake.say(how="hang")
    looking = gpu.ask_in_vain(gpu.service.look)
    assert gpu.service.lost(first) == ""
    assert gpu.service.missing() == ""
    gpu.service.look()
    assert looking.is_alive(), "all this was answered while the daemon was still being asked"
    looking.join()
    assert "does not answer: nvidia-cuda-mps-control: no answer to 'get_server_list' within" in gpu.service.lost(first)


def test_nobody_waits_while_a_daemon_hangs_as_it_starts(gpu, monkeypatch):
    monkeypatch.setattr(mps, "TURN_S", 0.1)
    gpu.fake.say(how="hang")
    starting = gpu.ask_in_vain(gpu.fail_to_start)
    (daemon,) = gpu.fake.daemons()
    assert (gpu.service.lost(daemon), gpu.service.missing()) == ("", "")
    gpu.service.look()
    with pytest.raises(MpsError, match=r"the MPS daemon of GPU-a keeps another job waiting for more than 0.1 s"):
        gpu.service.ensure()
    assert starting.is_alive(), "all this was answered while the daemon was still being started"
    starting.join()
    assert gpu.fake.daemons() == []


def test_a_start_that_hangs_takes_no_longer_than_it_may(gpu):
    gpu.fake.say(how="hang")
    began = time.monotonic()
    with pytest.raises(MpsError, match=r"started, but does not answer: .* within .*; its log ends: started"):
        gpu.service.ensure()
    assert time.monotonic() - began < 10.0, "2 s for the start, and a daemon that hangs is killed without being asked"
    assert "quit" not in gpu.fake.asked


def test_a_start_that_does_not_return_leaves_nothing(gpu):
    gpu.fake.say(how="stuck")
    with pytest.raises(MpsError, match=r"-d did not return within 2 s"):
        gpu.service.ensure()
    assert gpu.fake.daemons() == []


def test_a_daemon_that_hangs_is_replaced_without_being_asked_to_quit(gpu, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 0.5)
    first = gpu.service.ensure()
    gpu.fake.say(how="hang")
    with pytest.raises(MpsError, match=r"does not answer.*the next try is in 1 s"):
        gpu.service.ensure()
    gpu.fake.say(how="")
    gpu.clock.now = 1.0
    second = gpu.service.ensure()
    assert gpu.fake.daemons() == [second] != [first]
    assert "quit" not in gpu.fake.asked
    assert gpu.service.lost(second) == ""


def test_one_that_dies_while_it_is_asked_has_failed_once(gpu, monkeypatch):
    monkeypatch.setattr(mps, "LOOK_S", 10.0)
    first = gpu.service.ensure()
    gpu.fake.say(how="hang")
    looking = gpu.ask_in_vain(gpu.service.look)
    gpu.kill()
    assert gpu.service.lost(first) == "the MPS daemon of GPU-a died"
    looking.join()
    assert gpu.service._failures == 1


@pytest.mark.parametrize("how", ["hang", "stuck", "refuse"])
def test_a_daemon_that_never_starts_is_left_alone_in_the_end(gpu, monkeypatch, how):
    monkeypatch.setattr(mps, "START_S", 0.3)
    gpu.fake.say(how=how)
    waits = []
    for _ in range(MOST_FAILURES):
        assert gpu.service.missing() == ""
        with pytest.raises(MpsError):
            gpu.service.ensure()
        waits.append(gpu.service._not_before - gpu.clock.now)
        gpu.clock.now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert gpu.service.missing() == "its daemon failed 5 times in a row"


def test_a_start_that_is_under_way_when_it_is_ended_for_good_leaves_nothing(gpu, monkeypatch):
    monkeypatch.setattr(mps, "QUIT_S", 0.1)
    gpu.fake.say(how="hang")
    starting = gpu.ask_in_vain(gpu.fail_to_start)
    gpu.service.stop()
    assert starting.is_alive(), "it has not waited for the start"
    assert gpu.fake.daemons() == []
    starting.join()
    gpu.fake.say(how="")
    gpu.clock.now = 1.0
    with pytest.raises(MpsError, match="has been ended for good"):
        gpu.service.ensure()
    assert gpu.fake.daemons() == []


def test_a_client_that_has_ended_keeps_no_other_from_being_ended_in_good_order(gpu):
    gpu.service.ensure()
    gpu.fake.say(servers="41", clients="7 8 9", gone="7")
    said = mpscontrol.terminate_clients(gpu.service.folder, (7, 8))
    assert (said.keys(), said[8]) == ({7, 8}, "")
    assert "'terminate_client 41 7' failed" in said[7]
    assert gpu.fake.asked[-2:] == ["terminate_client 41 7", "terminate_client 41 8"]


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
