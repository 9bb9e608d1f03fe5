"""Pausing: signals on real processes, checkpoints through a stand-in for ``cuda.core``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import wait_until

from cotenant.actors import runner
from cotenant.actors.enforcement.pausing import BrokenError, CheckpointPause, PauseError, SignalPause

CHILD = "subprocess.Popen(['sleep', '60'])"
TREE = f"import subprocess, time; {CHILD}; {CHILD}; time.sleep(60)"
# Keeps the state of every process in a file named after it; "calls" has what was called, in order.
STANDIN = """
import os
from pathlib import Path

NOTES = Path(os.environ["CHECKPOINT_NOTES"])


class Process:
    def __init__(self, pid):
        self.pid = pid
        self._file = NOTES / str(pid)

    @property
    def state(self):
        return self._file.read_text() if self._file.exists() else "running"

    def _do(self, what, before, after):
        if (NOTES / f"fails-{what}-{self.pid}").exists():
            raise RuntimeError(f"CUDA_ERROR_NOT_SUPPORTED: {what}")
        if (NOTES / f"hangs-{what}-{self.pid}").exists():
            (NOTES / "begun").touch()
            import time
            time.sleep(60)
        assert self.state == before, (what, self.state)
        self._file.write_text(after)
        with (NOTES / "calls").open("a") as file:
            file.write(f"{what} {self.pid}\\n")

    def lock(self, timeout_ms=0):
        assert timeout_ms > 0
        self._do("lock", "running", "locked")

    def checkpoint(self):
        self._do("checkpoint", "locked", "checkpointed")

    def restore(self, gpu_mapping=None):
        self._do(f"restore{gpu_mapping or ''}", "checkpointed", "locked")

    def unlock(self):
        self._do("unlock", "locked", "running")
"""


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """This process is the supervisor of a program with two children."""
    process = subprocess.Popen([sys.executable, "-S", "-c", TREE], start_new_session=True)
    wait_until(lambda: len(runner.descendants(process.pid)) == 2, 10, "its children run")
    yield process
    for entry in [*runner.descendants(process.pid), process]:
        os.kill(entry.pid, signal.SIGKILL)
    process.wait()


class Driver:
    """The stand-in, and what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir()
        package = folder / "site" / "cuda" / "core"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "checkpoint.py").write_text(STANDIN)
        monkeypatch.setenv("CHECKPOINT_NOTES", str(self.notes))
        monkeypatch.syspath_prepend(str(folder / "site"))

    @property
    def calls(self) -> list[str]:
        return (self.notes / "calls").read_text().splitlines() if (self.notes / "calls").exists() else []

    def fail(self, what: str, pid: int) -> None:
        (self.notes / f"{what}-{pid}").touch()


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def states(root: int) -> set[str]:
    return {process.state for process in runner.descendants(root)}


def test_a_whole_tree_is_stopped_and_goes_on(tree):
    pause = SignalPause()
    assert not pause.frees_memory
    pause.pause(tree.pid)
    assert states(tree.pid) == {"T"}
    assert runner.process(tree.pid).state != "T", "the supervisor must go on"
    pause.pause(tree.pid)  # twice is once
    pause.resume(tree.pid)
    wait_until(lambda: "T" not in states(tree.pid), 5, "it goes on")
    pause.resume(tree.pid)


def test_a_pause_of_nobody_is_fine():
    SignalPause().pause(1 << 22)
    SignalPause().resume(1 << 22)


def test_a_stopped_process_cannot_change_its_gpu(tree):
    with pytest.raises(PauseError, match="gpu_mapping"):
        SignalPause().resume(tree.pid, (), {"GPU-a": "GPU-b"})


def test_a_checkpoint_locks_all_before_it_moves_one(driver, tree):
    one, two = (process.pid for process in runner.descendants(tree.pid))
    pause = CheckpointPause()
    assert pause.frees_memory
    assert pause.missing() == ""
    pause.pause(tree.pid, [one, two])
    assert driver.calls == [f"lock {one}", f"lock {two}", f"checkpoint {one}", f"checkpoint {two}"]
    assert states(tree.pid) == {"T"}
    CheckpointPause().resume(tree.pid, [one, two], {"GPU-a": "GPU-b"})  # by whoever comes next
    mapped = "restore{'a': 'b'}"
    assert driver.calls[4:] == [f"{mapped} {one}", f"{mapped} {two}", f"unlock {one}", f"unlock {two}"]
    wait_until(lambda: "T" not in states(tree.pid), 5, "it goes on")
    pause.resume(tree.pid, [one, two])
    assert len(driver.calls) == 8


def test_a_checkpoint_that_fails_half_way_is_undone(driver, tree):
    one, two = (process.pid for process in runner.descendants(tree.pid))
    driver.fail("fails-checkpoint", two)
    with pytest.raises(PauseError, match=r"^checkpoint: CUDA_ERROR_NOT_SUPPORTED: checkpoint$"):
        CheckpointPause().pause(tree.pid, [one, two])
    assert driver.calls[-3:] == [f"restore {one}", f"unlock {one}", f"unlock {two}"]
    assert "T" not in states(tree.pid)


def test_a_checkpoint_that_cannot_be_undone_says_so(driver, tree):
    one, two = (process.pid for process in runner.descendants(tree.pid))
    driver.fail("fails-checkpoint", two)
    driver.fail("fails-restore", one)
    with pytest.raises(BrokenError, match="could not be brought back: resume: CUDA_ERROR_NOT_SUPPORTED: restore"):
        CheckpointPause().pause(tree.pid, [one, two])


def test_those_that_have_ended_meanwhile_need_not_be_brought_back(driver, tree):
    one, two = (process.pid for process in runner.descendants(tree.pid))
    CheckpointPause().pause(tree.pid, [one, two])
    os.kill(one, signal.SIGKILL)
    wait_until(lambda: len(runner.descendants(tree.pid)) == 1, 5, "one has ended")
    driver.fail("fails-restore", one)
    CheckpointPause().resume(tree.pid, [one, two])
    assert driver.calls[-2:] == [f"restore {two}", f"unlock {two}"]


def test_a_call_ends_with_whoever_has_made_it(driver, tree):
    """Who follows undoes what it finds; it must not be done again behind its back."""
    (one, _) = (process.pid for process in runner.descendants(tree.pid))
    driver.fail("hangs-lock", one)
    code = (
        f"from cotenant.actors.enforcement.pausing import CheckpointPause; CheckpointPause().pause({tree.pid}, [{one}])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as asking:
        wait_until((driver.notes / "begun").exists, 30, "the driver is at it")
        (call,) = runner.descendants(asking.pid)
        asking.kill()
    wait_until(lambda: runner.process(call.pid) is None or runner.process(call.pid).state in "ZX", 10, "it has ended")


def test_a_driver_that_hangs_blocks_nobody(driver, tree):
    (one, _) = (process.pid for process in runner.descendants(tree.pid))
    driver.fail("hangs-lock", one)
    with pytest.raises(PauseError, match="does not answer within 2 s"):
        CheckpointPause(timeout_s=2.0).pause(tree.pid, [one])


def test_a_job_without_a_context_is_only_stopped(driver, tree):
    CheckpointPause().pause(tree.pid, [])
    assert states(tree.pid) == {"T"}
    assert driver.calls == []
    CheckpointPause().resume(tree.pid, [])


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "cuda-core is not installed here" in CheckpointPause().missing()


def test_a_checkpoint_is_taken_back_when_what_comes_after_it_fails(driver, tree, monkeypatch):
    def fails(self, root_pid: int, device_pids: tuple[int, ...] = ()) -> None:
        raise PauseError("it does not stand still")

    one = runner.descendants(tree.pid)[0].pid
    monkeypatch.setattr(SignalPause, "pause", fails)
    with pytest.raises(PauseError, match="does not stand still"):
        CheckpointPause().pause(tree.pid, [one])
    assert driver.calls[-1] == f"unlock {one}"
