"""Which runs share what was learnt of them."""

from __future__ import annotations

import pytest

from cotenant.scheduler.fingerprint import NAMELESS, fingerprint

HOME = "/home/u/work"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["python", "a/train.py"], ["python", "b/train.py"]),
        (["python", "train.py"], ["python", "old/train.py"]),
        (["python", "/opt/a/train.py"], ["python", "/opt/b/train.py"]),
        (["python", "../a/train.py"], ["python", "../b/train.py"]),
        (["a/train"], ["b/train"]),
        (["/opt/a/train"], ["/opt/b/train"]),
        (["torchrun", "a/train.py", "--size", "1"], ["torchrun", "b/train.py", "--size", "1"]),
        (["python", "train.py", "--config", "a/net.yaml"], ["python", "train.py", "--config", "b/net.yaml"]),
        (["python", "train.py", "--config=a/net.yaml"], ["python", "train.py", "--config=b/net.yaml"]),
        (["python", "train.py", "--model", "one/large"], ["python", "train.py", "--model", "other/large"]),
        (["bash", "-c", "python a/train.py"], ["bash", "-c", "python b/train.py"]),
        (["bash", "-c", "/bin/nice python a/train.py"], ["bash", "-c", "/bin/nice python b/train.py"]),
        (["python", "train.py", "--batch", "1"], ["python", "train.py", "--batch", "2"]),
    ],
)
def test_two_programs_share_nothing(one: list[str], other: list[str]) -> None:
    assert fingerprint(one, HOME) != fingerprint(other, HOME)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["python", "train.py"], ["python", "./train.py"]),
        (["python", "a/train.py"], ["python", f"{HOME}/a/train.py"]),
        (["python", "a/train.py"], ["python", "b/../a//train.py"]),
        (["python", "train.py"], ["/usr/bin/python", "train.py"]),
        (["python", "train.py"], [".venv/bin/python", "train.py"]),
        (["python", "train.py", "/data/1/set"], ["python", "train.py", "/scratch/job-17/set"]),
        (["python", "train.py", "--out", "/x/1"], ["python", "train.py", "--seed=3", "--steps", "9"]),
        (["python", "train.py", "--lr", "0.1"], ["python", "train.py", "--learning-rate=3e-4", "--weight-decay", "0"]),
    ],
)
def test_runs_of_one_program_share_what_was_learnt(one: list[str], other: list[str]) -> None:
    assert fingerprint(one, HOME) == fingerprint(other, HOME)


@pytest.mark.parametrize("cwd", ["/", "/home/u/../u/work/", "/home/u/work/."])
def test_how_the_working_directory_is_written_does_not_matter(cwd: str) -> None:
    assert fingerprint(["python", "a/train.py"], cwd) == fingerprint(["python", "a/train.py"], HOME)
    one, other = (["python", "train.py", f"/data/{number}/set"] for number in (1, 2))
    assert fingerprint(one, cwd) == fingerprint(other, cwd)


def test_a_project_is_the_same_in_another_directory() -> None:
    assert fingerprint(["python", "a/train.py"], HOME) == fingerprint(["python", "a/train.py"], "/tmp/package-1")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["python", "train.py", "--batch", "32"], "ded19fdbe4a403f9"),
        (["/usr/bin/python3", "train.py", "--data", "/data/set"], "dcf3acbbb1e26465"),
        (["python", "-m", "project.train", "--seed", "1"], "a0154a0a0ce3957c"),
    ],
)
def test_what_was_stored_before_directories_counted_is_still_found(command: list[str], key: str) -> None:
    assert fingerprint(command, HOME) == key
    assert NAMELESS == "b544a7686d118668"
