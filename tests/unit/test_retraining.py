"""Training in the background: one at a time, never waited for, every end told."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotenant.actors import retraining
from cotenant.actors.retraining import Outcome, Retrainer

GOOD = """
print("noise")
print('{"version": "v", "adopted": true, "reason": "better", "candidate": {"mae": 1}, "active": {}}')
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], Retrainer]]:
    made: list[Retrainer] = []

    def one(code: str) -> Retrainer:
        made.append(Retrainer(60.0, tmp_path, (sys.executable, "-c", code), clock))
        return made[-1]

    yield one
    for each in made:
        each.close()


def ended(retrainer: Retrainer) -> Outcome:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        outcome = retrainer.poll()
        if outcome is not None:
            return outcome
        os.sched_yield()
    raise AssertionError("the training does not end")


def test_a_training_tells_its_end_once(make: Callable[[str], Retrainer]) -> None:
    retrainer = make(GOOD)
    retrainer.start("interference", "drift", ())
    assert retrainer.running == "interference: drift"
    assert not retrainer.may_start("demand")
    outcome = ended(retrainer)
    assert (outcome.kind, outcome.version, outcome.adopted, outcome.reason) == ("interference", "v", True, "better")
    assert outcome.candidate == {"mae": 1.0}
    assert retrainer.poll() is None
    assert retrainer.running == ""


def test_a_kind_is_not_trained_again_too_soon(make: Callable[[str], Retrainer], clock: Clock) -> None:
    retrainer = make(GOOD)
    assert not retrainer.may_start("demand")
    clock.now += 60.0
    assert retrainer.may_start("demand")
    retrainer.start("demand", "", ())
    ended(retrainer)
    assert not retrainer.may_start("demand")
    assert retrainer.may_start("interference")
    clock.now += 60.0
    assert retrainer.may_start("demand")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "print('[]')",
        "print('{}')",
        "print('{\"version\"')",
        "print('[' * 100_000)",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_whatever_goes_wrong_is_told(make: Callable[[str], Retrainer], code: str) -> None:
    retrainer = make(code)
    retrainer.start("demand", "", ())
    outcome = ended(retrainer)
    assert outcome.version is None
    assert not outcome.adopted
    assert "training failed: exit code" in outcome.reason


def no_folder(folder: Path) -> None:
    folder.rmdir()


def no_log(folder: Path) -> None:
    (folder / "retrain-demand.log").mkdir()


@pytest.mark.parametrize("harm", [no_folder, no_log])
def test_a_training_that_cannot_be_started_is_told(tmp_path: Path, harm: Callable[[Path], None], clock: Clock) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    harm(folder)
    retrainer = Retrainer(0.0, folder, (sys.executable, "-c", GOOD), clock)
    assert retrainer.may_start("demand")
    retrainer.start("demand", "", ())
    assert not retrainer.may_start("interference")  # before this one's end was told
    outcome = retrainer.poll()
    assert outcome is not None
    assert outcome.reason.startswith("training failed: it could not be started: ")
    assert retrainer.poll() is None
    assert retrainer.may_start("demand")


def test_a_training_whose_words_are_lost_is_told(make: Callable[[str], Retrainer], tmp_path: Path) -> None:
    retrainer = make(f"import os; os.unlink({str(tmp_path / 'retrain-demand.log')!r})")
    retrainer.start("demand", "", ())
    assert "what it said cannot be read" in ended(retrainer).reason


def test_a_training_that_hangs_is_ended(make: Callable[[str], Retrainer], clock: Clock) -> None:
    retrainer = make("import signal; signal.pause()")
    retrainer.start("demand", "", ())
    assert retrainer.poll() is None
    clock.now += retraining.TIMEOUT_S
    outcome = retrainer.poll()
    assert outcome is not None
    assert "too long" in outcome.reason


def test_closing_ends_what_runs(make: Callable[[str], Retrainer]) -> None:
    retrainer = make("import signal; signal.pause()")
    retrainer.start("demand", "", ())
    retrainer.close()
    assert retrainer.poll() is None
    assert retrainer.running == ""


def test_a_training_takes_idle_time_only(make: Callable[[str], Retrainer]) -> None:
    retrainer = make("import os; print(os.nice(0), os.environ['OMP_NUM_THREADS'])")
    retrainer.start("demand", "", ())
    assert "19 1" in ended(retrainer).reason
