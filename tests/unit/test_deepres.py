"""The device of the benchmark with three applications: its physics, and that its loop with the scheduler closes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cotenant.configs.settings import PlacementSettings, Settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def device() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("deepres_device")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("utils", "seconds"),
    [
        ([0.5], 60.0),  # alone, but held to its half
        ([1.0], 120.0),
        ([0.4, 0.4], 60.0),  # each within its half; sharing costs nothing here but 4 %
        ([1.0, 1.0], 120.0),
    ],
)
def test_a_job_runs_as_fast_as_its_share_allows(device: ModuleType, utils: list[float], seconds: float) -> None:
    static = Settings(placement=PlacementSettings(policy="static", static_slots=2))
    apps = [device.Application(f"a{n}", (device.Phase(10.0, util),), sensitivity=0.0) for n, util in enumerate(utils)]
    for outcome in device.run([device.Work(app, 60.0) for app in apps], static):
        took = outcome.ended_s - outcome.submitted_s
        assert seconds <= took <= 1.06 * seconds + 2.0
        assert outcome.progress == pytest.approx(60.0 / took)


def test_phases_repeat(device: ModuleType) -> None:
    app = device.Application("a", (device.Phase(10.0, 0.2), device.Phase(5.0, 0.9)))
    assert [app.util(at) for at in (0.0, 9.9, 10.0, 14.9, 15.0, 25.0)] == [0.2, 0.2, 0.9, 0.9, 0.2, 0.9]


def test_what_one_does_not_use_serves_the_other(device: ModuleType) -> None:
    apps = [device.Application(name, (device.Phase(10.0, util),)) for name, util in (("light", 0.1), ("heavy", 1.0))]
    works = [device.Work(app, 30.0, hints={"max_slowdown": 3.0}) for app in apps]
    shared, halves = (
        {outcome.work.application.name: outcome.progress for outcome in device.run(works, settings)}
        for settings in (Settings(), Settings(placement=PlacementSettings(policy="static", static_slots=2)))
    )
    assert shared["heavy"] > 1.3 * halves["heavy"]
    assert shared["light"] > 0.8
