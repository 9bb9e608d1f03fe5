"""Published figures: raw results are whole, and what the manual counts in them is what they hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import meets

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/cpu-2-cores"
FIELDS = {"case", "method", "metric", "value", "unit", "spread", "goal", "met"}


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text()).get("rows", [])
    return found


NAMES = sorted(path.stem for path in RESULTS.glob("*.json") if rows(path.stem))


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_whole_and_there_once(name: str) -> None:
    found = rows(name)
    assert all(set(each) - {"commit"} == FIELDS for each in found)
    assert len({(each["case"], each["method"], each["metric"]) for each in found}) == len(found)
    for each in found:
        if each["goal"] is None:
            assert each["met"] is None
        else:
            assert each["met"] == meets(each["goal"], each["value"]), each


def counts(found: list[dict[str, Any]]) -> tuple[int, int, int]:
    """How many figures, goals and met goals there are."""
    goals = [each for each in found if each["goal"] is not None]
    return len(found), len(goals), sum(each["met"] for each in goals)


def said(pattern: str) -> tuple[int, ...]:
    found = re.search(pattern, (ROOT / "docs/demand-forecasts.md").read_text())
    assert found is not None
    return tuple(int(each.replace(",", "")) for each in found.groups())


def test_the_manual_counts_the_figures_of_demand_forecasts_as_they_are() -> None:
    figures, goals, met = counts(rows("forecast"))
    _, fewer, met_of_fewer = counts([each for each in rows("forecast") if "networks" not in each["method"]])
    levels, goals_of_levels, met_of_levels = counts(rows("forecast_levels"))
    assert said(r"\(([\d,]+) figures on a busy") == (figures,)
    assert said(r"\*\*of its (\d+) goals (\d+) are met\*\*") == (goals, met)
    assert said(r"without the rows of networks (\d+) of (\d+)\)") == (met_of_fewer, fewer)
    assert said(r"others: ([\d,]+) figures, (\d+) of (\d+) goals met") == (levels, met_of_levels, goals_of_levels)


def test_the_manual_names_every_missed_error_of_interference() -> None:
    text = (ROOT / "docs/interference.md").read_text()
    missed = [each for each in rows("interference") if each["met"] is False and "coverage" not in each["metric"]]
    assert missed
    for each in missed:
        assert f"{each['value']:.4f}".lstrip("0").rstrip("0") in text, each
