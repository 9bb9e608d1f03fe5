"""The demo's tables of first against present predictors, with changes counted by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Import the module as the demo does, with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import demo_versus

        yield demo_versus
    for name in ("demo_versus", "demo_values"):
        sys.modules.pop(name, None)


def report(**changes: Any) -> dict[str, Any]:
    return {
        "modes": {
            "first": {"makespan_s": 50.0, "mean_completion_s": 40.0, "device_hours": 0.02},
            "cotenant": {"makespan_s": 45.0, "mean_completion_s": 42.0, "device_hours": None},
        },
        "packed": {
            "first": packed(0.20, 0.30, 0.10, 0.12, 1.5),
            "cotenant": packed(0.25, 0.23, 0.02, 0.06, 1.2),
        },
        "sets": {
            "least_s": 5.0,
            "together": 6,
            "members": 5,
            "rows": [{"members": []}, {"members": []}],
            "throughput_error": {"first": 0.08, "cotenant": 0.1},
            "saving_error": {"first": 0.04, "cotenant": 0.03},
        },
        "demand": [
            {
                "quantity": "utilisation",
                "ahead_s": 5,
                "forecasts": 70,
                "persistence": 0.04,
                "error": {"first": 0.05, "cotenant": 0.036},
                "coverage": {"first": 0.9, "cotenant": 0.95},
            },
            {
                "quantity": "memory",
                "ahead_s": 1,
                "forecasts": 0,
                "persistence": None,
                "error": {"first": None, "cotenant": None},
                "coverage": {"first": None, "cotenant": None},
            },
        ],
        **changes,
    }


def packed(measured: float, predicted: float, saving_error: float, throughput_error: float, unfair: float) -> Any:
    return {
        "saving_measured": measured,
        "saving_predicted": predicted,
        "saving_error": saving_error,
        "throughput_error": throughput_error,
        "unfairness": unfair,
        "jobs": [{"name": "a", "slowdown_measured": unfair, "slowdown_predicted": 1.2, "max_slowdown": 1.4}],
    }


def plain(rows: list[dict[str, Any]], columns: Any) -> list[list[str]]:
    return [[cell(row).replace("\N{NO-BREAK SPACE}", " ") for _, cell, _ in columns] for row in rows]


def test_changes_are_relative_but_those_of_percentages_are_in_points(demo: ModuleType) -> None:
    assert plain(demo.figure_rows(report()), demo.FIGURE_COLUMNS) == [
        ["makespan", "50.0 s", "45.0 s", "-10 %"],
        ["mean completion", "40.0 s", "42.0 s", "+5 %"],
        ["device hours", "0.0200", "n/a", "n/a"],
        ["unfairness", "1.50", "1.20", "-20 %"],
        ["packing saving, measured", "20.0 %", "25.0 %", "+5.0 points"],
        ["packing saving, predicted", "30.0 %", "23.0 %", "-7.0 points"],
        ["error of that saving, own sets", "10.0 points", "2.0 points", "-80 %"],
        ["error of n per job, own sets", "0.120", "0.060", "-50 %"],
        ["jobs slower than they allow", "1", "0", "-1"],
        ["error of n per job, same 2 sets", "0.080", "0.100", "+25 %"],
        ["error of a saving, same 2 sets", "4.0 points", "3.0 points", "-25 %"],
    ]


def test_demand_has_its_unit_and_what_is_missing_is_shown_as_such(demo: ModuleType) -> None:
    assert plain(demo.demand_rows(report()), demo.DEMAND_COLUMNS) == [
        ["utilisation 5 s ahead", "70", "4.0 %", "5.0 %", "3.6 %", "-28 %", "90.0 %", "95.0 %"],
        ["memory 1 s ahead", "0", *["n/a"] * 6],
    ]


def test_a_present_predictor_that_is_worse_is_said_to_be(demo: ModuleType) -> None:
    said = demo.verdict(report()).replace("\N{NO-BREAK SPACE}", " ")
    assert said == (
        "Asked about the same 2 sets of jobs, the present predictor misses a job's speed by 10.0 % of its speed alone "
        "on average; the first one by 8.0 %."
    )


def test_an_error_of_zero_has_no_relative_change(demo: ModuleType) -> None:
    assert demo.relative(0.0, 0.1) == "n/a"
    assert demo.relative(0.1, 0.0).startswith("-100")


def test_a_job_that_ran_in_one_mode_only_is_there_without_the_other(demo: ModuleType) -> None:
    source = report()
    source["packed"]["cotenant"]["jobs"] = [{"name": "b", "slowdown_measured": 1.0, "slowdown_predicted": 1.1}]
    assert plain(demo.job_rows(source), demo.BOTH_JOB_COLUMNS) == [
        ["a", "1.50", "1.20", "-20 %", "n/a", "n/a", "n/a"],
        ["b", "n/a", "n/a", "n/a", "1.00", "1.10", "+10 %"],
    ]


@pytest.mark.parametrize("changes", [{"sets": None}, {"packed": None}, {"modes": None}])
def test_absent_parts_are_shown_as_missing(demo: ModuleType, changes: dict[str, Any]) -> None:
    source = report(**changes)
    assert len(demo.figure_rows(source)) == 11
    assert any("n/a" in cells for cells in plain(demo.figure_rows(source), demo.FIGURE_COLUMNS))
    assert all(isinstance(text(source), str) for text in (demo.verdict, demo.counted, demo.served))
