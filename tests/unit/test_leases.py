"""Leases: what is refused before anything is asked of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import cotenant
from cotenant.actors import leases
from cotenant.actors.shim.reportfile import read_reports
from cotenant.scheduler.errors import HintError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be asked."""
    monkeypatch.setattr(leases.Client, "connect", lambda: pytest.fail("connected with arguments that are wrong"))


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"compute": 1.5}, HintError, "compute: 1.5 is not accepted"),
        ({"gpu_memory": "2 parsecs"}, HintError, "gpu_memory: '2 parsecs' is not accepted"),
        ({"gpus": 0}, HintError, "gpus: 0 is not accepted"),
        ({"num_gpus": 1}, HintError, "num_gpus: 1 is not accepted"),
        (
            {"checkpoint": "own", "here": True},
            HintError,
            "checkpoint: 'own' is not accepted; give nothing with here",
        ),
        ({"checkpoint": "driver"}, HintError, "checkpoint: 'driver' is not accepted; give none or own for a lease"),
        ({"restart": "on_failure"}, HintError, "restart: 'on_failure' is not accepted"),
        ({"timeout_s": 0}, ValueError, "timeout_s: 0 is not accepted"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s: -1.0 is not accepted"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s: nan is not accepted"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s: inf is not accepted"),
        ({"timeout_s": "5"}, ValueError, "timeout_s: '5' is not accepted"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named.replace("(", r"\(")):
        cotenant.lease(**arguments)  # type: ignore[arg-type]


def test_a_process_that_was_started_under_a_share_takes_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_cotenant_shim", sys)
    monkeypatch.setenv("COTENANT_JOB_ID", "job-1")
    with pytest.raises(RuntimeError, match="started under a share of job job-1"):
        cotenant.lease(here=True)


def test_a_guest_may_outlive_the_directory_of_its_lease(tmp_path: os.PathLike[str]) -> None:
    assert read_reports(f"{tmp_path}/gone") == []


def test_the_error_can_be_caught_without_ray_or_torch() -> None:
    script = "import sys, cotenant; cotenant.LeaseLost; print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
