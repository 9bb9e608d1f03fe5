"""The launcher with real processes: what is started ends, is found again, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import CORES, ENV, GPU, IGNORE_TERM, OTHER, SHARE, ignores_term
from support import wait_until

from cotenant.actors import runner
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.launcher import Exited, Launcher, LaunchError, StaleCommand
from cotenant.actors.shim.shareword import read_all
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share


def test_output_exit_code_environment_and_directory(host, tmp_path):
    code = (
        "import os, sys; print('out', os.getcwd(), os.environ['GREETING'], sys.stdin.read() == ''); "
        "print('err', file=sys.stderr); sys.exit(7)"
    )
    host.python(code, cwd=str(tmp_path), env={**ENV, "GREETING": "hi"})
    assert host.exited() == Exited("job", 1, 7, "exit code 7")
    assert sorted(host.output().splitlines()) == ["err", f"out {tmp_path} hi True"]


def test_a_job_finds_its_share_in_its_environment(host):
    host.python("import os; print({k: v for k, v in os.environ.items()})", env={**ENV, "PYTHONPATH": "/mine"})
    host.exited()
    environ = eval(host.output())
    assert {k: environ[k] for k in ("COTENANT_JOB_ID", "COTENANT_EPOCH", "COTENANT_CORES", "OMP_NUM_THREADS")} == {
        "COTENANT_JOB_ID": "job",
        "COTENANT_EPOCH": "1",
        "COTENANT_CORES": str(CORES[0]),
        "OMP_NUM_THREADS": "1",
    }
    assert environ["PYTHONPATH"].split(":")[1:] == ["/mine"]
    assert (Path(environ["PYTHONPATH"].split(":")[0]) / "sitecustomize.py").is_file()
    assert "HOME" not in environ, "the agent's own environment must not leak into jobs"


def test_a_users_thread_counts_stay_and_another_jobs_variables_go(host):
    env = {**ENV, "OMP_NUM_THREADS": "3", "COTENANT_ATTACH": "1", "COTENANT_HOME": "/h"}
    host.python(
        "import os; print(os.environ['OMP_NUM_THREADS'], 'COTENANT_ATTACH' in os.environ, os.environ['COTENANT_HOME'])",
        env=env,
    )
    host.exited()
    assert host.output() == "3 False /h\n"


def write(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("command", "exit_code", "says"),
    [
        (("no-such-program",), 127, "command not found: 'no-such-program' in the job's PATH"),
        (("/no/such/program",), 127, "command not found: '/no/such/program'"),
        (("{dir}/not-executable",), 126, "is not executable"),
        (("{dir}",), 126, "is a directory"),
        (("{dir}/no-interpreter",), 126, "the interpreter its first line names does not exist"),
        (("{dir}/no-program",), 126, "neither a program nor a script"),
        ((sys.executable, "{dir}/missing.py"), 2, "exit code 2"),
        ((sys.executable, "-c", "import no_such_module"), 1, "exit code 1"),
    ],
)
def test_a_command_that_cannot_run_says_why(host, tmp_path, command, exit_code, says):
    write(tmp_path / "not-executable", "#!/bin/sh\n", 0o644)
    write(tmp_path / "no-interpreter", "#!/no/such/interpreter\n")
    write(tmp_path / "no-program", "\x7f\x00no elf")
    host.launch(*(part.format(dir=tmp_path) for part in command))
    exited = host.exited()
    assert exited.exit_code == exit_code
    assert says in exited.reason
    assert host.output() != ""


@pytest.mark.parametrize("cwd", ["/no/such/directory", "/etc/passwd"])
def test_a_working_directory_that_cannot_be_used_is_named(host, cwd):
    host.launch("true", cwd=cwd)
    exited = host.exited()
    assert exited.exit_code == 126
    assert f"working directory {cwd!r}" in exited.reason
    assert cwd in host.output()


@pytest.mark.skipif(os.getuid() == 0, reason="root may enter every directory")
def test_an_unreadable_working_directory_is_named(host, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    host.launch("true", cwd=str(tmp_path / "locked"))
    assert "Permission denied" in host.exited().reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"command": ()}, "command: [] is not accepted"),
        ({"command": ("",)}, "command: [''] is not accepted"),
        ({"command": ("echo", "a\0b")}, "without NUL"),
        ({"cwd": "here"}, "cwd: 'here' is not accepted; give an absolute path"),
        ({"env": {"A=B": "c"}}, "env: 'A=B=c' is not accepted"),
        ({"job_id": "../x"}, "job_id: '../x' is not accepted"),
        ({"shares": []}, "shares: [] is not accepted"),
        ({"shares": [Share("gpu-9", 1, 0.5)]}, "shares.gpu_id: 'gpu-9' is not accepted"),
        ({"shares": [Share("gpu-0", 1, 1.5)]}, "shares.compute: 1.5 is not accepted"),
        ({"shares": [Share("gpu-0", 1, float("nan"))]}, "shares.compute: nan is not accepted"),
        ({"grace_s": -1.0}, "grace_s: -1.0 is not accepted"),
    ],
)
def test_what_is_not_accepted_is_refused_before_anything_happens(host, change, says):
    with pytest.raises(LaunchError) as caught:
        host.launch(**({"command": ("true",)} | change)) if "command" in change else host.launch("true", **change)
    assert says in str(caught.value)
    assert not caught.value.retry
    assert host.launcher.inventory() == []
    assert [entry.name for entry in host.path.iterdir() if entry.is_dir()] == ["outputs"]


def test_a_signal_ends_a_job_with_a_negative_exit_code(host):
    host.python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert host.exited() == Exited("job", 1, -signal.SIGSEGV, "killed by SIGSEGV")


def test_the_same_launch_twice_is_one_job(host):
    first = host.python("print('once')")
    assert host.python("print('twice')") == first
    host.exited()
    assert host.output() == "once\n"


def test_an_older_epoch_is_refused_and_a_newer_one_replaces_the_job(host):
    host.python("import time; time.sleep(60)", epoch=2)
    with pytest.raises(StaleCommand):
        host.python("pass", epoch=1)
    host.python("print('new')", epoch=3)
    wait_until(lambda: len(host.launcher.poll()) == 2, 10, "both have ended")
    assert {e.epoch: (e.exit_code, e.reason) for e in host.launcher.poll()} == {
        2: (-signal.SIGTERM, "superseded by a newer lease of the same job"),
        3: (0, ""),
    }


@pytest.mark.parametrize("over", ["released", "released before a restart", "stopped before it came"])
def test_an_epoch_that_is_over_does_not_start_again(host, over):
    if over == "stopped before it came":
        host.launcher.stop("job", 1, 1.0, "changed my mind")
    else:
        host.launch("true")
        host.exited()
        host.launcher.release("job", 1)
    if over == "released before a restart":
        host.restart()
    with pytest.raises(StaleCommand):
        host.launch("true")


def test_a_stop_that_comes_during_the_launch_is_not_lost(host):
    class Meanwhile(HostEnforcement):
        def apply(self, *arguments) -> None:
            host.launcher.stop("job", 1, 1.0, "changed my mind")
            super().apply(*arguments)

    host.launcher = Launcher(host.path, (GPU, OTHER), Meanwhile(host.path, (GPU, OTHER), EnforcementSettings()))
    host.python("import time; time.sleep(60)")
    assert host.exited() == Exited("job", 1, -signal.SIGTERM, "stopped while it was being started", stopped=True)


def test_stopping_lets_the_job_say_goodbye(host, tmp_path):
    go = tmp_path / "may end"
    host.python(
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "    print('bye'); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True); time.sleep(60)",
        str(go),
    )
    wait_until(lambda: "up" in host.output(), 10, "the job is up")
    host.launcher.stop("job", 1, 30.0, "stopped by user")
    assert [held.phase for held in host.launcher.inventory()] == ["stopping"]
    go.touch()
    assert host.exited() == Exited("job", 1, 3, "stopped by user", stopped=True)
    assert host.output() == "up\nbye\n"


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(host):
    host.python(IGNORE_TERM + "print('up', flush=True); time.sleep(60)")
    wait_until(lambda: "up" in host.output(), 10, "the job is up")
    started = time.monotonic()
    host.launcher.stop("job", 1, 0.5, "stopped by user")
    assert host.exited() == Exited("job", 1, -signal.SIGKILL, "stopped by user", stopped=True)
    assert 0.4 < time.monotonic() - started < 10.0


def test_a_second_stop_can_only_shorten_the_grace(host):
    host.python(IGNORE_TERM + "print('up', flush=True); time.sleep(60)")
    wait_until(lambda: "up" in host.output(), 10, "the job is up")
    host.launcher.stop("job", 1, 60.0, "first")
    host.launcher.stop("job", 1, 90.0, "second")
    host.launcher.stop("job", 1, 0.0, "third")
    assert host.exited() == Exited("job", 1, -signal.SIGKILL, "first", stopped=True)


def test_stopping_what_is_not_there_is_fine(host):
    host.launcher.stop("nobody", 1, 1.0, "why not")
    host.launch("true")
    host.exited()
    host.launcher.stop("job", 1, 1.0, "too late")
    assert host.exited().reason == ""


LEFTOVERS = {
    "a child": "subprocess.Popen([sys.executable, '-S', '-c', SLEEP])",
    "a child in its own session": "subprocess.Popen([sys.executable, '-S', '-c', SLEEP], start_new_session=True)",
    "a daemon": (
        "\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        exec(SLEEP)\n    os._exit(0)\nos.wait()"
    ),
    "many": "[subprocess.Popen([sys.executable, '-S', '-c', SLEEP]) for _ in range(8)]",
}


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("what", LEFTOVERS)
def test_when_the_command_ends_its_descendants_end(host, what, stubborn):
    sleep = (IGNORE_TERM if stubborn else "import time; ") + "time.sleep(600)"
    code = f"import os, subprocess, sys\nSLEEP = {sleep!r}\n{LEFTOVERS[what]}\nprint('done', flush=True)\n"
    host.python(code)
    assert host.exited() == Exited("job", 1, 0, "")
    assert host.processes() == []


def test_children_that_keep_forking_end_too(host):
    host.python(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(3): os.fork()\n"
        "end = time.time() + 60\n"
        "while time.time() < end:\n"
        "    time.sleep(0.02)\n"
        "    if os.fork() == 0: time.sleep(0.05); os._exit(0)\n"
        "    os.waitpid(-1, os.WNOHANG)\n"
    )
    wait_until(lambda: len(host.processes()) > 8, 10, "the children fork")
    host.launcher.stop("job", 1, 0.0, "enough")
    assert host.exited().reason == "enough"
    assert host.processes() == []


def test_a_hundred_megabytes_of_output(host):
    host.python("import sys\nfor _ in range(100): sys.stdout.write('x' * 1048575 + '\\n')")
    assert host.exited(timeout_s=60).exit_code == 0
    offset, eof, size = 0, False, 0
    while not eof:
        data, offset, eof = host.launcher.read_output("job", 1, offset, 1 << 23)
        size += len(data)
    assert size == 100 << 20


def test_output_can_be_followed_and_outlives_the_job(host):
    host.python("import time; print('first', flush=True); time.sleep(60)")
    wait_until(lambda: host.output() == "first\n", 10, "the first line is there")
    assert host.launcher.read_output("job", 1, 2, 3) == (b"rst", 5, False)
    assert host.launcher.read_output("job", 1, 6, 9) == (b"", 6, False)
    host.launcher.stop("job", 1, 1.0, "stop")
    host.exited()
    assert host.launcher.read_output("job", 1, 6, 9) == (b"", 6, True)
    host.launcher.release("job", 1)
    for offset, limit, data in ((0, 99, b"first\n"), (1, 2**62, b"irst\n"), (7, 1, b""), (10**15, 2**62, b"")):
        assert host.launcher.read_output("job", 1, offset, limit) == (data, offset + len(data), True)
    host.launcher.sweep(time.time() + 3599)
    assert host.output() == "first\n"
    host.launcher.sweep(time.time() + 3601)
    with pytest.raises(KeyError, match="no output"):
        host.output()


@pytest.mark.parametrize(("offset", "limit"), [(-1, 1), (0, -1)])
def test_output_from_nowhere_is_refused(host, offset, limit):
    with pytest.raises(ValueError, match="is not accepted"):
        host.launcher.read_output("job", 1, offset, limit)


def test_an_exit_is_told_until_it_is_released(host):
    host.launch("true")
    host.exited()
    assert len(host.launcher.poll()) == len(host.launcher.poll()) == 1
    host.launcher.release("job", 1)
    host.launcher.release("job", 1)
    assert host.launcher.poll() == []
    assert not list(host.path.glob("job.*"))


def test_a_running_job_is_not_released(host):
    host.python("import time; time.sleep(60)")
    with pytest.raises(ValueError, match="stop it first"):
        host.launcher.release("job", 1)


def test_a_restarted_agent_finds_its_jobs_again(host):
    launched = host.python("import time; time.sleep(60)", fingerprint="f")
    host.launch("false", job_id="ended")
    host.exited("ended")
    host.launcher.resize("job", 1, 4, [Share("gpu-0", 123, 0.25)])
    found = host.restart()
    assert [(f.job_id, f.epoch, f.root_pid, f.fingerprint) for f in found] == [("job", 1, launched.root_pid, "f")]
    assert host.launcher.shares("job") == (Share("gpu-0", 123, 0.25),)
    assert {(h.job_id, h.revision, h.phase) for h in host.launcher.inventory()} == {
        ("job", 4, "running"),
        ("ended", 0, "exited"),
    }
    assert host.exited("ended").exit_code == 1
    host.launcher.stop("job", 1, 1.0, "found")
    assert host.exited().reason == "found"


def test_a_launch_that_was_cut_short_is_cleared_away(host):
    (host.path / "job.1").mkdir()
    assert host.restart() == []
    host.launch("true")
    assert host.exited().exit_code == 0


def test_jobs_end_when_their_lease_is_not_renewed(host):
    host.python(IGNORE_TERM + "print('up', flush=True); time.sleep(60)", grace_s=60.0)
    wait_until(lambda: "up" in host.output(), 10, "the job is up")
    host.launcher.renew(time.monotonic() + 0.3)
    exited = host.exited(timeout_s=5.0)
    assert exited.exit_code == -signal.SIGKILL
    assert exited.reason.startswith("lease expired")
    assert "heard nothing from the scheduler" in exited.reason


def test_a_renewed_lease_goes_on(host):
    host.python("import time; time.sleep(2.5)")
    for _ in range(8):
        host.launcher.renew(time.monotonic() + 1.5)
        time.sleep(0.25)
    host.launcher.renew(time.monotonic() + 10)
    assert host.exited().exit_code == 0


def test_nothing_is_left_when_the_supervisor_is_killed(host):
    launched = host.python(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    wait_until(lambda: "up" in host.output(), 10, "the job is up")
    os.kill(launched.root_pid, signal.SIGKILL)
    exited = host.exited()
    assert (exited.exit_code, exited.reason) == (-9, "its supervisor was killed, and the job with it")
    assert host.processes() == []


def test_no_job_is_a_child_of_the_agent(host):
    launched = host.python("import time; time.sleep(60)")
    supervisor = runner.process(launched.root_pid)
    assert supervisor is not None
    assert supervisor.parent != os.getpid()
    assert supervisor.session == launched.root_pid


def test_a_resize_reaches_the_share_word_and_an_old_one_does_not(host):
    launched = host.python("import time; time.sleep(60)", shares=[SHARE, Share("gpu-1", 5, 1.0)])
    both = [Share("gpu-1", 7, 0.5), Share("gpu-0", 8, 0.75)]
    host.launcher.resize("job", 1, 2, both)
    assert [tuple(r) for r in read_all(str(launched.job_dir / "share"))] == [(1, 2, 0.75, 8), (1, 2, 0.5, 7)]
    for epoch, revision in ((1, 2), (1, 1), (0, 9), (2, 3)):
        with pytest.raises(StaleCommand):
            host.launcher.resize("job", epoch, revision, both)
    with pytest.raises(ValueError, match="give those the job has"):
        host.launcher.resize("job", 1, 3, [SHARE])
    assert host.launcher.shares("job") == (both[1], both[0])


def test_a_lease_has_shares_and_no_process(host):
    launched = host.launch(kind="lease", command=())
    assert launched.root_pid is None
    environment = host.launcher.environment("job", 1)
    assert environment["COTENANT_JOB_DIR"] == str(launched.job_dir)
    assert host.launcher.root_pids("job") == set()
    assert host.launcher.poll() == []
    assert [f.job_id for f in host.restart()] == ["job"]
    host.launcher.stop("job", 1, 1.0, "released")
    assert host.exited() == Exited("job", 1, 0, "released", stopped=True)
    host.launcher.release("job", 1)


def test_processes_attached_to_a_lease_are_followed_and_end_with_it(host):
    host.launch(kind="lease", command=())
    environment = host.launcher.environment("job", 1) | {"COTENANT_ATTACH": "1"}
    worker = os.posix_spawn(
        sys.executable, [sys.executable, "-c", IGNORE_TERM + "time.sleep(600)"], dict(ENV) | environment
    )
    try:
        wait_until(lambda: host.launcher.root_pids("job") == {worker}, 10, "the worker has attached itself")
        wait_until(lambda: ignores_term(worker), 10, "the worker ignores SIGTERM")
        host.launcher.stop("job", 1, 0.3, "released")
        assert host.launcher.poll() == []
        wait_until(host.launcher.poll, 5, "the worker was killed")
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL
    except BaseException:
        os.kill(worker, signal.SIGKILL)
        raise


def test_everything_on_disk_is_the_owners_only(host):
    launched = host.python("import time; time.sleep(60)", env={**ENV, "SECRET": "x"})
    for path in (host.path, launched.job_dir, *launched.job_dir.iterdir()):
        if path.name not in ("share",):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_launching_from_many_threads(host):
    threads = [threading.Thread(target=host.launch, args=("true",), kwargs={"job_id": f"job-{i}"}) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(host.launcher.poll()) == 12, 20, "all have ended")
    assert {exited.exit_code for exited in host.launcher.poll()} == {0}


def test_jobs_that_are_not_here_have_nothing_to_say(host):
    assert host.launcher.report("x") is None
    assert host.launcher.guarantees("x") == ""
    assert host.launcher.shares("x") == ()
    assert host.launcher.root_pids("x") == set()


@pytest.mark.parametrize("asked", [True, False])
def test_an_exit_says_whether_the_job_was_asked_to_end(host, asked):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up'); "
    host.python(code + ("time.sleep(60)" if asked else ""))
    if asked:
        wait_until(lambda: host.output() == "up\n", 10, "the job is up")
        host.launcher.stop("job", 1, 5.0, "moved")
    exited = host.exited()
    assert (exited.exit_code, exited.stopped) == (0, asked)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        ("MemoryError()", True),
        ("type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory')", True),
        ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 8 bytes")', True),
        ("RuntimeError('nan')", False),
    ],
)
def test_a_job_that_ends_for_want_of_memory_is_known(host, error, short):
    host.launch(sys.executable, "-c", f"raise {error}")
    exited = host.exited()
    assert (exited.exit_code, exited.out_of_memory) == (1, short)
