"""The sharing modes of the measurement suite, with a stand-in for the MPS control program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.colocation import mps
from benchmarks.colocation.devices import open_device
from benchmarks.colocation.modes import NO_MPS, PAIR_SHARES, modes_for
from benchmarks.colocation.mps import MpsDaemon, MpsError, MpsRefused
from fake_mps import FakeMps
from support import alive, wait_until

ROOT = Path(__file__).parents[2]


class Gpu:
    """A device as far as modes ask it."""

    name = "cuda"
    dry_run = True

    def __init__(self, **identity):
        self._identity = {"gpu_uuid": "GPU-a", "compute_mode": 0} | identity

    def identity(self):
        return self._identity

    def member_env(self):
        return {"CUDA_VISIBLE_DEVICES": "GPU-a"}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeMps(tmp_path, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(fake.temp))
    monkeypatch.setattr(mps, "_LONGEST_TEMP", 200)  # pytest's folders are longer than a socket's path may be
    monkeypatch.setattr(mps, "_QUIT_S", 0.5)
    monkeypatch.setattr(mps, "_START_S", 1.0)
    yield fake
    assert fake.daemons() == []
    assert list(fake.temp.iterdir()) == []


def test_modes_of_a_core():
    modes = modes_for(open_device("cpu"))
    assert {name: mode.shares for name, mode in modes.items()} == {"timeslice": (None,), "duty": PAIR_SHARES}
    for name, mode in modes.items():
        assert mode.available() == (True, "")
        mode.start()
        assert mode.member_env(0.5)["OMP_NUM_THREADS"] == "1"
        assert mode.duty(0.3) == (0.3 if name == "duty" else None)
        assert mode.duty(None) is None
        mode.check()
        mode.terminate_client(1)
        mode.stop()


def test_modes_of_a_gpu():
    modes = modes_for(Gpu())
    assert list(modes) == ["timeslice", "mps", "mps_cap", "duty"]
    assert [name for name, mode in modes.items() if mode.restarts] == ["mps_cap"]
    assert modes["timeslice"].member_env() == {"CUDA_VISIBLE_DEVICES": "GPU-a"} | NO_MPS
    assert modes["duty"].member_env(0.7) == modes["timeslice"].member_env()
    assert modes["mps_cap"].duty(0.7) is None


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="give a fraction in"):
        modes_for(Gpu())["duty"].member_env(share)


def test_only_mps_limits_memory():
    with pytest.raises(ValueError, match="the mode duty cannot limit memory"):
        modes_for(Gpu())["duty"].member_env(0.5, memory_bytes=2**30)


@pytest.mark.parametrize(("mode", "word"), [(2, "PROHIBITED"), (3, "EXCLUSIVE_PROCESS")])
def test_an_exclusive_gpu_cannot_be_time_sliced(mode, word):
    modes = modes_for(Gpu(compute_mode=mode))
    for name in ("timeslice", "duty"):
        usable, why = modes[name].available()
        assert not usable and word in why


def test_mps_needs_its_control_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert modes_for(Gpu())["mps"].available() == (False, "nvidia-cuda-mps-control is not on PATH")


def test_members_of_mps_meet_at_a_private_daemon(fake):
    mode = modes_for(Gpu())["mps_cap"]
    assert mode.available() == (True, "")
    with pytest.raises(RuntimeError, match="has not been started"):
        mode.member_env(0.7)
    mode.start()
    env = mode.member_env(0.7, memory_bytes=3 * 2**30)
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3072M"
    assert Path(env["CUDA_MPS_PIPE_DIRECTORY"]).parent == Path(env["CUDA_MPS_LOG_DIRECTORY"]).parent
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in mode.member_env(None)
    assert fake.asked[0] == "-d GPU-a"
    assert len(fake.daemons()) == 1
    mode.stop()
    mode.stop()
    assert fake.asked[-1] == "quit"
    mode.start()  # and again
    mode.stop()


def test_a_client_is_terminated_at_its_server(fake):
    mode = modes_for(Gpu())["mps"]
    mode.start()
    fake.say(servers="\n".join(["41", "42"]), clients="7\n8")
    mode.terminate_client(8)
    assert "terminate_client 41 8" in fake.asked
    mode.terminate_client(9)
    assert fake.asked[-1] == "get_client_list 42"
    mode.stop()


def test_a_server_that_refuses_clients_is_told(fake):
    mode = modes_for(Gpu())["mps"]
    mode.start()
    mode.check()
    fake.say(servers="41")
    mode.check()
    fake.say(status="FAULT")
    with pytest.raises(MpsRefused, match=r"MPS server 41 is in state FAULT.*its log ends: started"):
        mode.check()
    mode.stop()


@pytest.mark.parametrize(
    ("how", "message"), [("refuse", "-d failed .1.: cannot open the device"), ("mute", "started, but does not answer")]
)
def test_a_daemon_that_does_not_start_leaves_nothing(fake, monkeypatch, how, message):
    monkeypatch.setenv("FAKE_MPS", how)
    with pytest.raises(MpsError, match=message):
        MpsDaemon(None).start()


def test_a_daemon_that_does_not_quit_is_killed(fake, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    daemon = MpsDaemon(None)
    daemon.start()
    (pid,) = fake.daemons()
    daemon.stop()
    wait_until(lambda: not alive(pid), 10, "the daemon is gone")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_is_left_however_the_controller_ends(fake, end):
    code = (
        "import sys, tempfile\n"
        f"tempfile.tempdir = {str(fake.temp)!r}\n"
        "from benchmarks.colocation import mps\n"
        "mps._LONGEST_TEMP = 200\n"
        "mps.MpsDaemon(None).start()\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as controller:
        assert controller.stdout.readline() == b"up\n"
        assert len(fake.daemons()) == 1
        if end is None:
            controller.stdin.close()
        else:
            os.kill(controller.pid, end)
        controller.wait()
    wait_until(lambda: not fake.daemons() and not list(fake.temp.iterdir()), 10, "daemon and folder are gone")
