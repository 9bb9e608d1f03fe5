"""The demo's comparison of demand forecasters, on series whose errors are counted by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cotenant.forecasting.types import HORIZONS_S, DemandProfile, Forecast, Quantiles, Signature

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Import the module as the demo does, with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import demo_demand

        yield demo_demand
    for name in ("demo_demand", "demo_figures", "demo_values"):
        sys.modules.pop(name, None)


class Constant:
    """Forecasts the same whatever it sees, from the second window of a job on; keeps the order of what it is told."""

    name = "constant"

    def __init__(self, util: float, memory: float, first: int = 1) -> None:
        self.util, self.memory, self.first = util, memory, first
        self.seen: dict[str, int] = {}
        self.order: list[float] = []

    def observe_batch(self, signatures: Sequence[Signature]) -> None:
        for each in signatures:
            self.seen[each.job_id] = self.seen.get(each.job_id, 0) + 1
            self.order.append(each.start_s)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        return {job_id: self._said(job_id) for job_id in job_ids if self.seen[job_id] >= self.first}

    def _said(self, job_id: str) -> Forecast:
        util = dict.fromkeys(HORIZONS_S, Quantiles(*[self.util] * 5))
        memory = dict.fromkeys(HORIZONS_S, Quantiles(*[self.memory] * 5))
        return Forecast(job_id, util, memory, self.memory, 1)


def windows(job: str, utils: Sequence[float | None], start: float = 0.0, memory: float | None = 1e8) -> list[Signature]:
    return [
        Signature(
            job_id=job, gpu_id="g0", start_s=start + i, window_s=1.0, samples=10, util_mean=util, util_peak=util,
            memory_bytes=memory, memory_peak_bytes=memory, step_rate=1.0, throttled_fraction=0.0, host_cores=0.0,
            neighbours=0, compute_share=1.0,
        )
        for i, util in enumerate(utils)
    ]  # fmt: skip


def mode(demo: ModuleType, name: str, series: dict[str, list[Signature]]) -> Any:
    views = [SimpleNamespace(job_id=job_id, name=job_id, fingerprint=f"fp-{job_id[-1]}", hints={}) for job_id in series]
    return demo.Mode(name, 0.0, views, series, {}, {}, 0.0, 0.0)


def row_of(rows: list[dict[str, Any]], quantity: str, ahead: int) -> dict[str, Any]:
    return next(row for row in rows if (row["quantity"], row["ahead_s"]) == (quantity, ahead))


def test_errors_and_coverage_are_those_of_the_window_that_came(demo: ModuleType) -> None:
    utils = [0.2, 0.4, 0.2, 0.6, 0.2, 0.4, 0.8]
    rows = demo.compare_forecasts(
        [mode(demo, "exclusive", {"x-a": windows("x-a", utils)})],
        {"first": Constant(0.3, 1.2e8), "cotenant": Constant(0.4, 1.1e8)},
    )
    assert [(row["quantity"], row["ahead_s"]) for row in rows] == [
        ("utilisation", 1), ("utilisation", 5), ("memory", 1), ("memory", 5),
    ]  # fmt: skip
    near = row_of(rows, "utilisation", 1)  # judged by .4 .2 .6 .2 .4 .8
    assert near["forecasts"] == 6
    assert near["persistence"] == pytest.approx((0.2 + 0.2 + 0.4 + 0.4 + 0.2 + 0.4) / 6)
    assert near["error"]["first"] == pytest.approx((0.1 + 0.1 + 0.3 + 0.1 + 0.1 + 0.5) / 6)
    assert near["error"]["cotenant"] == pytest.approx((0.0 + 0.2 + 0.2 + 0.2 + 0.0 + 0.4) / 6)
    assert near["coverage"] == pytest.approx({"first": 2 / 6, "cotenant": 4 / 6})
    far = row_of(rows, "utilisation", 5)  # .2 → .4 and .4 → .8
    assert (far["forecasts"], far["persistence"]) == (2, pytest.approx(0.3))
    assert far["error"]["first"] == pytest.approx((0.1 + 0.5) / 2)
    memory = row_of(rows, "memory", 1)
    assert (memory["persistence"], memory["error"]["first"]) == (0.0, pytest.approx(2e7))
    assert memory["coverage"] == {"first": 1.0, "cotenant": 1.0}


def test_both_are_judged_on_the_same_forecasts(demo: ModuleType) -> None:
    rows = demo.compare_forecasts(
        [mode(demo, "exclusive", {"x-a": windows("x-a", [0.0, 0.0, 1.0, 1.0])})],
        {"first": Constant(0.5, 1e8), "cotenant": Constant(0.5, 1e8, first=3)},
    )
    near = row_of(rows, "utilisation", 1)  # only the forecast after the third window
    assert (near["forecasts"], near["persistence"], near["error"]["first"]) == (1, 0.0, 0.5)


def test_windows_of_all_modes_come_in_their_order_and_modes_are_not_joined(demo: ModuleType) -> None:
    constant = Constant(0.5, 1e8)
    late = mode(demo, "cotenant", {"p-a": windows("p-a", [0.5] * 3, 50.0)})
    early = mode(demo, "exclusive", {"x-a": windows("x-a", [0.5] * 3), "x-b": windows("x-b", [0.5] * 3, 1.0)})
    rows = demo.compare_forecasts([late, early], {"first": constant})
    assert constant.order == [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 50.0, 51.0, 52.0]
    assert row_of(rows, "utilisation", 1)["forecasts"] == 6


def test_a_missing_reading_or_window_is_not_judged(demo: ModuleType) -> None:
    gap = [*windows("x-a", [0.5, None, 0.5]), *windows("x-a", [0.5, 0.5], 10.0, memory=None)]
    rows = demo.compare_forecasts([mode(demo, "exclusive", {"x-a": gap})], {"first": Constant(0.5, 1e8)})
    assert row_of(rows, "utilisation", 1)["forecasts"] == 1  # 10 → 11; neither 0 → 1 → 2 nor 2 → 10
    assert row_of(rows, "memory", 1)["forecasts"] == 2  # 0 → 1 → 2


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_window_to_come_nothing_is_known(demo: ModuleType, count: int) -> None:
    modes = [mode(demo, "exclusive", {"x-a": windows("x-a", [0.5] * count)})]
    for row in demo.compare_forecasts(modes):
        assert (row["forecasts"], row["persistence"]) == (0, None)
        assert row["error"] == row["coverage"] == {"first": None, "cotenant": None}


def test_a_constant_memory_is_covered_though_forecasters_count_in_single_precision(demo: ModuleType) -> None:
    steady = {"x-a": windows("x-a", [0.5] * 40, memory=123_456_789.0)}
    rows = demo.compare_forecasts([mode(demo, "exclusive", steady)])
    memory = row_of(rows, "memory", 1)
    assert memory["forecasts"] == 39
    assert memory["coverage"] == {"first": 1.0, "cotenant": 1.0}


def test_the_present_forecaster_is_told_of_earlier_runs_before_the_first_window(demo: ModuleType) -> None:
    told: list[tuple[str, DemandProfile]] = []

    class Listening(demo.MixtureForecaster):  # type: ignore[misc, name-defined]
        def prime(self, job_id: str, profile: DemandProfile) -> None:
            told.append((job_id, profile))
            super().prime(job_id, profile)

    modes = [
        mode(demo, "exclusive", {"x-a": windows("x-a", [0.25] * 10)}),
        mode(demo, "cotenant", {"p-a": windows("p-a", [0.25] * 10, 50.0)}),
    ]
    demo.compare_forecasts(modes, {"cotenant": Listening()})
    assert [(job_id, profile.source) for job_id, profile in told] == [("x-a", "unknown"), ("p-a", "history")]
    assert told[1][1].util_mean == pytest.approx(0.25)
