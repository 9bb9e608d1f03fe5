"""The launcher when things go wrong: agents and supervisors killed or stopped, damaged records, clocks that jump."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import GPU, IGNORE_TERM, OTHER, SHARE, Host
from support import wait_until

from cotenant.actors import jobfiles, jobrecords, launcher, runner
from cotenant.actors.launcher import Launcher, LaunchError, StaleCommand
from cotenant.actors.starts import start_supervisor

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def running(host, code: str = SLEEP, **more):
    """Launch a job and wait until it is up."""
    launched = host.python(code, **more)
    job_id = launched.job_id
    wait_until(lambda: "up" in host.output(job_id, launched.epoch), 10, "the job is up")
    return launched


DAMAGES = {
    "share word cut short": lambda d: (d / "share").write_bytes(b"CT"),
    "share word of something else": lambda d: (d / "share").write_bytes(b"x" * 4096),
    "share word gone": lambda d: (d / "share").unlink(),
    "launch cut short": lambda d: (d / "launch.json").write_text('{"job_id": "jo'),
    "launch of another job": lambda d: (d / "launch.json").write_text(
        (d / "launch.json").read_text().replace('"job_id": "job"', '"job_id": "other"')
    ),
    "launch without its fields": lambda d: (d / "launch.json").write_text("{}"),
    "launch is a list": lambda d: (d / "launch.json").write_text("[]"),
    "launch is binary": lambda d: (d / "launch.json").write_bytes(b"\xff\xfe\0"),
    "supervisor cut short": lambda d: (d / "runner.json").write_text("{"),
    "supervisor without its fields": lambda d: (d / "runner.json").write_text("{}"),
    "stop request with another field": lambda d: (d / "stop.json").write_text('{"when": 1}'),
    "exit cut short": lambda d: (d / "exit.json").write_text('{"exit'),
    "exit is a directory": lambda d: (d / "exit.json").mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_costs_that_job_only(host, damage):
    damaged = running(host)
    running(host, job_id="sound")
    DAMAGES[damage](damaged.job_dir)
    host.restart()
    exited = host.exited()
    assert (exited.epoch, exited.exit_code, exited.lost) == (1, -signal.SIGKILL, True)
    assert "cannot be read" in exited.reason
    assert {(held.job_id, held.phase) for held in host.launcher.inventory()} == {
        ("job", "exited"),
        ("sound", "running"),
    }
    assert len(host.processes()) == 1, "nothing of the damaged job is left"
    # A supervisor that nobody knows is not killed: it ends when its command has, and notes that in the directory.
    wait_until(lambda: len(host.processes(supervisors=True)) == 2, 10, "its supervisor has ended too")
    host.launcher.release("job", 1)
    assert not damaged.job_dir.exists()
    with pytest.raises(StaleCommand):
        host.python(SLEEP)


def test_an_exit_record_damaged_under_a_running_agent_is_a_loss(host):
    launched = running(host)
    (launched.job_dir / "exit.json").write_text("{")
    assert host.exited().lost


@pytest.mark.parametrize("told", [False, True])
def test_a_job_whose_agent_died_while_stopping_it_still_stops(host, told):
    launched = running(host)
    if told:
        host.launcher.stop("job", 1, 30.0, "enough")
    else:  # killed between writing the request down and telling the supervisor
        jobfiles.write_stop(launched.job_dir, jobfiles.StopRequest(30.0, "enough", time.monotonic() + 30))
    host.restart()
    assert host.exited().reason == "enough"


def test_a_stop_request_from_another_clock_waits_no_longer_than_it_says(host):
    launched = host.launch(kind="lease", command=())
    jobfiles.write_stop(launched.job_dir, jobfiles.StopRequest(0.2, "enough", time.monotonic() + 1e9))
    host.restart()
    assert host.launcher._jobs["job", 1].stop.kill_at < time.monotonic() + 1


def test_a_stop_before_the_supervisor_is_known_reaches_it(host):
    launched = running(host)
    host.launcher._jobs["job", 1].supervisor = None  # as after a restart in the middle of a launch
    host.launcher.stop("job", 1, 5.0, "enough")
    assert launched.root_pid is not None
    assert host.exited().reason == "enough"


def test_a_launch_cut_short_before_its_supervisor_came_is_a_loss(host, monkeypatch):
    monkeypatch.setattr(jobrecords, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr("cotenant.actors.launcher.start_supervisor", lambda job_dir: None)
    host.python(SLEEP)
    host.restart()
    exited = host.exited()
    assert (exited.lost, exited.reason) == (True, "its start was cut short on the host")


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_the_wall_clock_may_jump(host, monkeypatch, jump_s):
    running(host)
    host.launch(kind="lease", command=(), job_id="lease")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    assert host.launcher.poll() == []
    host.launcher._jobs["job", 1].supervisor = None
    assert host.launcher.poll() == []
    host.launcher.stop("job", 1, 1.0, "enough")
    host.launcher.stop("lease", 1, 1.0, "enough")
    assert host.exited().reason == "enough"
    assert host.exited("lease").reason == "enough"


def test_a_stopped_supervisor_does_not_save_its_job(host):
    launched = running(host)
    os.kill(launched.root_pid, signal.SIGSTOP)
    host.launcher.stop("job", 1, 5.0, "enough")
    assert host.exited().reason == "enough"


def test_a_supervisor_that_does_nothing_is_killed_with_its_job(host, monkeypatch):
    monkeypatch.setattr(jobrecords, "OVERTIME_S", 0.2)
    launched = running(host, IGNORE_TERM + SLEEP)
    host.launcher.stop("job", 1, 0.2, "enough")
    os.kill(launched.root_pid, signal.SIGSTOP)
    exited = host.exited()
    assert (exited.exit_code, exited.reason) == (-signal.SIGKILL, "enough")
    assert host.processes() == []


def test_a_stop_with_a_full_disk_still_stops(host, monkeypatch):
    running(host)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        host.launcher.stop("job", 1, 5.0, "enough")
    assert host.exited().exit_code == -signal.SIGTERM


def test_leases_that_expire_with_a_full_disk_are_lost_all_the_same(host, monkeypatch):
    for job_id in ("one", "two"):
        host.launch(kind="lease", command=(), job_id=job_id)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "write_json", full)
    host.launcher.renew(time.monotonic() - 1)
    host.launcher.tend()
    assert [host.exited(job_id).lost for job_id in ("one", "two")] == [True, True]


FILL_THE_DISK = """
import os, sys
try:
    while True:
        os.write(1, b"x" * 4096)
except OSError:
    os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_fills_the_disk_ends_as_it_ends(tmp_path, code):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        small = Host(tmp_path)
        small.python(FILL_THE_DISK, str(code))
        ended = small.exited()
        assert (ended.exit_code, ended.lost) == (code, False)
        small.launcher.release("job", 1)
        assert small.launcher.inventory() == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_last_words_of_a_supervisor_need_no_room_on_the_disk(host, monkeypatch):
    def on_a_full_disk(job_dir):
        (job_dir / runner.OUTPUT).symlink_to("/dev/full")
        start_supervisor(job_dir)

    monkeypatch.setattr(launcher, "start_supervisor", on_a_full_disk)
    host.launch("no-such-program")
    ended = host.exited()
    assert (ended.exit_code, ended.lost) == (127, False)
    assert "no-such-program" in ended.reason


# A supervisor that may not signal processes called "anothers", as a user may not signal what sudo has started.
UNPRIVILEGED = """
import os, re, signal, sys
sys.path.insert(0, {folder!r})
import runner

def check(pid):
    with open("/proc/%d/cmdline" % pid, "rb") as file:
        if file.read().startswith(b"anothers"):
            raise PermissionError(1, "Operation not permitted")

def kill(pid, number, kill=os.kill):
    check(pid)
    kill(pid, number)

def killpg(pid, number, killpg=os.killpg):
    check(pid)
    killpg(pid, number)

def pidfd_send_signal(descriptor, number, send=signal.pidfd_send_signal):
    with open("/proc/self/fdinfo/%d" % descriptor) as file:
        check(int(re.search("Pid:\\s*([0-9]+)", file.read())[1]))
    send(descriptor, number)

os.kill, os.killpg, signal.pidfd_send_signal = kill, killpg, pidfd_send_signal
sys.exit(runner.main(sys.argv[1]))
"""


@pytest.fixture
def unprivileged(tmp_path, monkeypatch):
    supervisor = tmp_path / "unprivileged.py"
    supervisor.write_text(UNPRIVILEGED.format(folder=str(Path(runner.__file__).parent)))
    monkeypatch.setattr(runner, "__file__", str(supervisor))


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("code", [0, 3])
def test_a_job_ends_as_it_ends_whoever_owns_what_it_leaves_behind(host, code):
    leave = "print(subprocess.Popen(['anothers', '30'], executable='/bin/sleep').pid, flush=True)"
    host.python(f"import os, subprocess; {leave}; os._exit({code})")
    ended = host.exited()
    left = int(host.output())
    assert runner.process(left) is not None
    os.kill(left, signal.SIGKILL)
    assert (ended.exit_code, ended.lost, ended.stopped) == (code, False, False)


@pytest.mark.usefixtures("unprivileged")
def test_a_command_that_is_another_users_is_waited_for(host):
    host.launch("bash", "-c", "exec -a anothers sleep 2")

    def is_anothers() -> bool:
        return any(Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"anothers") for pid in host.processes())

    wait_until(is_anothers, 10, "it is another user's")
    host.launcher.stop("job", 1, 60.0, "enough")
    ended = host.exited()
    assert (ended.exit_code, ended.stopped) == (0, True)


def test_an_expired_lease_is_a_loss_and_a_stop_is_not(host):
    running(host)
    running(host, job_id="stopping", code=IGNORE_TERM + SLEEP, grace_s=60.0)
    host.launcher.stop("stopping", 1, 60.0, "enough")
    host.launcher.renew(time.monotonic() - 1)
    assert host.exited().lost
    stopped = host.exited("stopping")
    assert (stopped.lost, stopped.reason) == (False, "enough")


def test_nothing_starts_under_expired_leases(host):
    host.launcher.renew(time.monotonic() - 1)
    with pytest.raises(StaleCommand, match="leases of this host have expired"):
        host.python(SLEEP)
    host.launcher.renew(time.monotonic() + 10)
    host.launch("true")
    assert host.exited().exit_code == 0


@pytest.mark.parametrize(("left_s", "expected_s"), [(-3.0, -3.0), (4.0, 4.0), (1e9, 30.0)])
def test_a_restart_renews_nothing(host, left_s, expected_s):
    before = time.monotonic() + left_s
    host.launcher.renew(before)
    host.restart()
    assert host.launcher.valid_until() - before == pytest.approx(expected_s - left_s, abs=1.0)


def test_a_job_whose_directory_is_removed_ends(host):
    running(host)
    shutil.rmtree(host.path / "job.1")
    assert host.launcher.report("job") is None
    wait_until(lambda: not host.processes(), 5, "its processes have ended")
    assert host.exited().exit_code == -signal.SIGKILL


def test_output_that_is_deleted_is_empty(host):
    launched = running(host)
    (launched.job_dir / "output.log").unlink()
    assert host.launcher.read_output("job", 1, 0, 99) == (b"", 0, False)
    host.launcher.stop("job", 1, 1.0, "enough")
    host.exited()
    host.launcher.release("job", 1)
    assert host.launcher.read_output("job", 1, 0, 99) == (b"", 0, True)


def test_a_start_that_failed_does_not_start_when_it_is_repeated(host):
    with pytest.raises(LaunchError):
        host.python(SLEEP, shares=[])
    with pytest.raises(StaleCommand):
        host.python(SLEEP, shares=[SHARE])


def test_a_daemon_that_hides_from_its_dead_supervisor_is_found_by_its_environment(host):
    launched = running(
        host,
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        print('up', flush=True); time.sleep(600)\n    os._exit(0)\ntime.sleep(600)",
    )
    os.kill(launched.root_pid, signal.SIGKILL)
    host.exited()
    assert host.processes() == []


def test_the_record_of_an_exit_says_whether_the_host_was_to_blame(host):
    host.launch("false")
    host.exited()
    assert json.loads((host.path / "job.1" / "exit.json").read_text())["lost"] is False
    assert Launcher(host.path, (GPU, OTHER)).poll()[0].lost is False
