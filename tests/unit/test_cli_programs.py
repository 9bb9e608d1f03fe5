"""Programs that are not where a job is submitted: told of there, and not refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import invoke
from fake_client import FakeClient


@pytest.fixture
def on_path(tmp_path: Path) -> str:
    """A PATH with a program, ``simulate``, and a folder that is not there."""
    (tmp_path / "programs").mkdir()
    program = tmp_path / "programs" / "simulate"
    program.touch(mode=0o755)
    return f"PATH={tmp_path / 'nowhere'}:{program.parent}"


@pytest.mark.parametrize("how", [["submit"], ["submit", "--json"], ["run"]], ids=" ".join)
def test_a_program_that_is_not_there_is_told_of_and_may_be_on_the_host(
    client: FakeClient, on_path: str, how: list[str]
) -> None:
    """Its PATH counts, not that of the command line."""
    said = "cotenant: command: '{}' is not on PATH here: the job fails unless it is on the host it runs on"
    for program, hint in (("simluate", "; did you mean 'simulate'?"), ("zzz", ""), ("python", "")):
        code, _, err = invoke(*how, "--env", on_path, "--", program, "train.py")
        assert (code, err.splitlines()[0]) == (0, said.format(program) + hint)
    assert [job["command"][0] for job in client.submitted] == ["simluate", "zzz", "python"]
    assert "not on PATH" not in invoke(*how, "--env", on_path, "--", "simulate")[2]
    assert "not on PATH" not in invoke(*how, "--env", "PATH=", "--", "/bin/true")[2]
