"""Observations on disk: appended whole, read back equal, bad lines told of and skipped."""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interference_tables import measured

from cotenant.forecasting.datasets.observation_file import load_observations, save_observations
from cotenant.forecasting.types import UNKNOWN_PROFILE

SOME = measured()[:5]


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "evidence.jsonl"
    triple = replace(SOME[0], others=(*SOME[0].others, UNKNOWN_PROFILE), seconds=12.5)
    save_observations(path, SOME)
    save_observations(path, [])
    save_observations(path, [triple])
    loaded = load_observations(path)
    assert loaded.observations == (*SOME, triple)
    assert loaded.problems == ()


def test_no_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_observations(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert load_observations(tmp_path / "empty.jsonl").observations == ()


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1, 700, 1500])
def test_what_a_full_disk_cut_off_does_not_count_twice_when_it_comes_again(tmp_path: Path, left: int) -> None:
    path = tmp_path / "evidence.jsonl"
    save_observations(path, SOME[:1])
    before = path.read_bytes()
    with room(len(before) + left), pytest.raises(OSError, match="too large"):
        save_observations(path, SOME[1:])
    assert path.read_bytes() == before
    save_observations(path, SOME[1:])
    assert load_observations(path).observations == tuple(SOME)


def changed(**fields: Any) -> str:
    return json.dumps(line() | fields)


def line() -> dict[str, Any]:
    return json.loads(LINE)


LINE = json.dumps(
    {
        "schema_version": 1,
        "gpu_type": "a",
        "focal": {"util_mean": 0.5, "util_p95": 0.6, "memory_bytes": None, "source": "history", "fingerprint": "x"},
        "others": [{"util_mean": 0.5, "util_p95": 0.6, "memory_bytes": 1, "source": "history", "fingerprint": "y"}],
        "throughput": 0.8,
        "low": 0.7,
        "high": 0.9,
        "seconds": 3.0,
    }
)
FOCAL: dict[str, Any] = json.loads(LINE)["focal"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (LINE[:50], "Unterminated|Expecting|Invalid"),
        ("[]", "object"),
        ("{}", "schema_version is missing"),
        (changed(schema_version=2), "newer cotenant"),
        (changed(schema_version="1"), "not accepted"),
        (changed(throughput=None), "throughput"),
        (changed(throughput=1.0e308), "throughput"),
        (changed(throughput=True), "throughput"),
        (LINE.replace("0.8", "NaN"), "throughput"),
        (changed(throughput=0.0, low=0.0), "throughput"),
        (changed(others=[]), "others"),
        (changed(others=[3]), "profile"),
        (changed(gpu_type=None), "gpu_type"),
        (changed(focal=FOCAL | {"util_mean": None}), "util_mean"),
        (changed(focal=FOCAL | {"util_mean": -1.0}), "util_mean"),
        (changed(focal=FOCAL | {"source": "rumour"}), "rumour"),
        (changed(focal=FOCAL | {"fingerprint": 7}), "fingerprint"),
        (changed(focal=FOCAL | {"from_shared": 1}), "from_shared"),
        (changed(focal={"fingerprint": "x"}), "util_mean"),
        (changed(seconds=-1.0), "seconds"),
    ],
)
def test_a_bad_line_is_told_of_and_hides_nothing(tmp_path: Path, bad: str, reason: str) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_text(f"{LINE}\n{bad}\n\n{LINE}\n")
    loaded = load_observations(path)
    assert len(loaded.observations) == 2
    (problem,) = loaded.problems
    assert problem.startswith(f"{path}, line 2: skipped")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(problem)


def test_fields_of_a_later_program_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_text(changed(weather="fine", focal=FOCAL | {"weather": "fine"}) + "\n")
    assert len(load_observations(path).observations) == 1


def test_half_a_line_of_a_killed_writer_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    save_observations(path, SOME[:1])
    with path.open("ab") as file:
        file.write(b'{"schema_version": 1, "gpu_ty')
    save_observations(path, SOME[1:2])
    loaded = load_observations(path)
    assert loaded.observations == tuple(SOME[:2])
    assert len(loaded.problems) == 1


def test_a_binary_file_is_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_bytes(bytes(range(256)))
    loaded = load_observations(path)
    assert loaded.observations == ()
    assert loaded.problems


def _append(path: str) -> None:
    for _ in range(20):
        save_observations(Path(path), SOME)


def test_several_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.map(_append, [str(path)] * 3)
    loaded = load_observations(path)
    assert len(loaded.observations) == 300
    assert loaded.problems == ()
