"""The end of the Ray head, as whoever waits for it hears of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.actors import rayhead
from cotenant.scheduler.errors import CotenantError

WAITS = """
import subprocess, sys, time
from pathlib import Path
from cotenant.actors.rayhead import watched
head = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with watched(head.pid, "head.log", lambda: Path(sys.argv[1]).touch()):
    head.kill()  # not waited for: dead and not yet reaped, as the head is that 'up' has started
    time.sleep(60)
"""


def test_whoever_waits_for_ray_is_told_at_once_that_its_head_has_ended(tmp_path: Path) -> None:
    """Ray gave it a minute, and ended the process with a line about a GCS."""
    done = subprocess.run(
        [sys.executable, "-c", WAITS, str(tmp_path / "cleaned")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the Ray head (process ")
    assert done.stderr.endswith(" has ended: see head.log; 'cotenant up --local' starts another\n")
    assert (tmp_path / "cleaned").exists()


def test_one_that_has_ended_before_is_an_error_and_one_that_lives_is_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as head:
        with rayhead.watched(head.pid, "head.log"):
            pass
        assert head.poll() is None
    with pytest.raises(CotenantError, match=r"has ended: see head\.log"), rayhead.watched(head.pid, "head.log"):
        pytest.fail("there is nothing to wait for")
