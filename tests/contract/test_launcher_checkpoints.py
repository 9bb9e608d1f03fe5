"""What jobs leave on a host: their checkpoints and their output."""

from __future__ import annotations

import os
import stat
import time

import pytest
from launching import ENV, GPU, SHARE
from support import is_locked

from cotenant.actors import launcher
from cotenant.actors.checkpoints import Checkpoints
from cotenant.actors.launcher import Launcher, LaunchError


def test_a_job_that_saves_finds_its_directory_again(host):
    code = (
        "import os, pathlib; d = pathlib.Path(os.environ['COTENANT_CHECKPOINT_DIR']); "
        "print(os.environ['COTENANT_CONTINUES'], sorted(p.name for p in d.iterdir())); "
        "(d / os.environ['COTENANT_EPOCH']).touch()"
    )
    for epoch, said in ((1, "0 []\n"), (3, "1 ['1']\n")):
        host.python(code, epoch=epoch, saves=True)
        host.exited()
        assert host.output(epoch=epoch) == said
        host.launcher.release("job", epoch)
    mine = host.path / "checkpoints" / "job"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    host.launcher.sweep(time.time())
    assert mine.is_dir()
    host.launcher.sweep(time.time() + 8 * 86400.0)
    assert not mine.exists()


@pytest.mark.parametrize(
    ("saves", "said", "heard"), [(True, None, "41"), (True, "7", "7"), (False, None, "None")], ids=str
)
def test_ranks_have_as_long_to_save_as_their_job(host, saves, said, heard):
    """torchrun kills its ranks 30 s after SIGTERM, whatever the job's grace is, unless it is told."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    env = ENV if said is None else ENV | {name: said}
    host.python(f"import os; print(os.environ.get('{name}'))", saves=saves, grace_s=40.5, env=env)
    host.exited()
    assert host.output() == f"{heard}\n"


LEFT_BY_JOBS = {
    "a link to itself": "os.symlink('latest', 'latest')",
    "a link to nothing": "os.symlink('gone', 'latest')",
    "a pipe": "os.mkfifo('pipe')",
    "a folder nobody may enter": "os.mkdir('shut'); open('shut/x', 'w').close(); os.chmod('shut', 0o400)",
}


@pytest.mark.parametrize("left", LEFT_BY_JOBS)
def test_whatever_a_job_leaves_with_its_checkpoint_the_host_goes_on(host, left):
    code = f"import os; os.chdir(os.environ['COTENANT_CHECKPOINT_DIR']); {LEFT_BY_JOBS[left]}"
    host.python(code, saves=True)
    assert host.exited().exit_code == 0
    host.launcher.release("job", 1)
    host.launcher.poll()  # looks
    mine = host.path / "checkpoints" / "job"
    assert mine.is_dir()
    host.launcher.sweep(time.time() + 8 * 86400.0)
    assert os.geteuid() != 0 or not mine.exists()


def test_output_that_cannot_be_removed_does_not_end_the_watch_over_the_jobs(host):
    stuck = host.path / "outputs" / "stuck.1.log"
    stuck.mkdir()
    os.utime(stuck, (0.0, 0.0))
    host.python("pass")
    assert host.exited().exit_code == 0
    assert stuck.is_dir()


def test_a_clock_that_jumps_costs_nobody_checkpoint_or_output(host, monkeypatch):
    host.python("print('done')", saves=True)
    host.exited()
    host.launcher.release("job", 1)
    mine, real = host.path / "checkpoints" / "job", time.time
    monkeypatch.setattr(time, "time", lambda: real() + 8 * 86400.0)
    host.launcher.poll()
    assert mine.is_dir()
    assert host.output() == "done\n"


def test_a_clock_that_was_ahead_and_is_put_right_costs_nobody_checkpoint_or_output(host, monkeypatch):
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 30 * 86400.0)
        host.restart()
    monkeypatch.setattr(launcher, "SWEEP_PERIOD_S", 0.0)
    host.python("print('done')", saves=True)
    host.exited()
    host.launcher.release("job", 1)
    host.launcher.poll()
    assert (host.path / "checkpoints" / "job").is_dir()
    assert host.output() == "done\n"


def test_others_are_told_no_directory(host):
    host.python(
        "import os; print('COTENANT_CHECKPOINT_DIR' in os.environ)", env={**ENV, "COTENANT_CHECKPOINT_DIR": "/x"}
    )
    host.exited()
    assert host.output() == "False\n"


def test_a_directory_that_cannot_be_made_fails_the_start(host, tmp_path):
    (tmp_path / "file").touch()
    launcher = Launcher(tmp_path / "other", (GPU,), checkpoints=Checkpoints(tmp_path / "file", shared=True))
    with pytest.raises(LaunchError, match=r"checkpoints\.directory: cannot make .*file/job") as caught:
        launcher.launch(
            job_id="job", epoch=1, revision=0, kind="command", command=["true"], cwd="/", env=ENV, shares=[SHARE],
            grace_s=1.0, saves=True,
        )  # fmt: skip
    assert caught.value.retry


def test_cleaners_of_temporary_files_pass_the_run_directory_over(host):
    for _ in range(2):
        assert is_locked(host.path)
        host.restart()
