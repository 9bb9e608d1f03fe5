"""The demo's arithmetic, on two jobs that ran alone and then together, and the mix it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"a": "gan", "b": "segmentation"}
PROMISED = {
    "jobs": {"name", "family", "solo_rate", "shared_rate", "slowdown_measured", "slowdown_predicted"},
    "modes": {"makespan_s", "mean_completion_s", "device_hours"},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Import the module as the demo does, with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import demo_figures

        yield demo_figures
    for name in ("demo_figures", "demo_values"):
        sys.modules.pop(name, None)


def window(rate: float | None, util: float | None = 0.5) -> SimpleNamespace:
    return SimpleNamespace(step_rate=rate, window_s=1.0, util_mean=util, host_cores=0.1)


def view(name: str, gpu: str, start: float, end: float, beside: tuple[tuple[float, float], ...] = ()) -> Any:
    """A job that held ``gpu`` from ``start`` to ``end``; ``beside`` = when another slowed it down 1.25 times."""
    other = {"a": "id-b", "b": "id-a"}[name]
    edges = sorted({start, end, *(edge for span in beside for edge in span)})
    spans = [
        SimpleNamespace(
            start=left,
            end=right,
            gpu_id=gpu,
            neighbours=[other] if (left, right) in beside else [],
            slowdown_predicted=1.25 if (left, right) in beside else 1.0,
        )
        for left, right in pairwise(edges)
    ]
    return SimpleNamespace(
        job_id=f"id-{name}", name=name, hints={"max_slowdown": 1.5}, state="SUCCEEDED", submitted_at=100.0,
        started_at=start, ended_at=end, colocations=spans,
        history=[SimpleNamespace(at=start, state="STARTING", reason=f"on {gpu}")],
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(demo: ModuleType) -> dict[str, Any]:
    def mode(name: str, views: list[Any], rate: float) -> Any:
        windows = {v.job_id: [window(None), *(window(1.0) for _ in range(2)), *[window(rate)] * 4] for v in views}
        return demo.Mode(
            name, 100.0, views, windows, {"g0": [(99.0, 0.1, 1.0), (101.0, 0.5, 1.0)]}, {"b": "waits"}, 30.0, 20.0
        )

    alone = mode("exclusive", [view("a", "g0", 100, 110), view("b", "g0", 110, 120)], 10.0)
    static = mode("static", [view("a", "g0", 100, 116), view("b", "g0", 100, 116)], 6.0)
    together = ((100.0, 112.0),)
    first = mode("first", [view("a", "g0", 100, 110, ((100.0, 110.0),)), view("b", "g0", 100, 116)], 5.0)
    packed = mode("cotenant", [view("a", "g0", 100, 112, together), view("b", "g0", 100, 114, together)], 8.0)
    answer: dict[str, Any] = demo.figures([alone, static, first, packed], FAMILIES)
    return answer


def test_it_has_what_is_promised_and_is_json(report: dict[str, Any]) -> None:
    json.dumps(report, allow_nan=False)
    assert all(set(job) >= PROMISED["jobs"] for job in report["jobs"])
    assert set(report["modes"]) == {"exclusive", "static", "first", "cotenant"}
    assert all(set(mode) >= PROMISED["modes"] for mode in report["modes"].values())


def test_slowdown_compares_rates_without_the_warm_up(report: dict[str, Any]) -> None:
    assert [(job["solo_rate"], job["shared_rate"]) for job in report["jobs"]] == [(10.0, 8.0)] * 2
    assert [job["slowdown_measured"] for job in report["jobs"]] == pytest.approx([1.25, 1.25])
    assert report["unfairness"] == pytest.approx(1.0)


def test_predicted_slowdown_weighs_by_time(report: dict[str, Any]) -> None:
    assert [job["slowdown_predicted"] for job in report["jobs"]] == pytest.approx([1.25, 14 / (12 / 1.25 + 2)])


def test_a_device_that_two_jobs_hold_is_occupied_once(report: dict[str, Any]) -> None:
    occupied = {name: mode["device_hours"] * 3600 for name, mode in report["modes"].items()}
    assert occupied == pytest.approx({"exclusive": 20.0, "static": 16.0, "first": 16.0, "cotenant": 14.0})
    assert report["packing_saving_measured"] == pytest.approx(1 - 14 / 20)
    assert report["packing_saving_predicted"] == pytest.approx(1 - 14 / (2 * 12 / 1.25 + 2))


def test_either_packed_mode_has_its_savings_and_errors_against_the_same_jobs_alone(report: dict[str, Any]) -> None:
    first, present = report["packed"]["first"], report["packed"]["cotenant"]
    assert first["saving_measured"] == pytest.approx(1 - 16 / 20)
    assert first["saving_predicted"] == pytest.approx(1 - 16 / (10 / 1.25 + 16))
    assert first["saving_error"] == pytest.approx(1 / 3 - 0.2)
    assert present["saving_error"] == pytest.approx((1 - 14 / 21.2) - 0.3)
    # Alone 10 steps/s. First: 5 beside a neighbour, 1/1.25 predicted; job b was alone and does not count.
    assert first["throughput_error"] == pytest.approx(0.8 - 0.5)
    # Present: 8 of 10, predicted .8 for a and (12 · .8 + 2) / 14 for b.
    assert present["throughput_error"] == pytest.approx(((12 * 0.8 + 2) / 14 - 0.8) / 2)
    assert [job["slowdown_measured"] for job in first["jobs"]] == pytest.approx([2.0, 2.0])
    assert report["jobs"] == present["jobs"]


def test_what_was_not_measured_leaves_errors_unknown(demo: ModuleType) -> None:
    views = [view("a", "g0", 100, 110), view("b", "g0", 100, 110)]
    modes = [
        demo.Mode(name, 100.0, views, {}, {}, {}, 0.0, 10.0) for name in ("exclusive", "static", "first", "cotenant")
    ]
    packed = demo.figures(modes, FAMILIES)["packed"]
    assert {name: each["throughput_error"] for name, each in packed.items()} == {"first": None, "cotenant": None}
    assert packed["first"]["unfairness"] is None


def test_times_count_from_the_submission(report: dict[str, Any]) -> None:
    mode = report["modes"]["cotenant"]
    assert (mode["makespan_s"], mode["mean_completion_s"]) == (14.0, 13.0)
    assert mode["devices"] == {"g0": [[1.0, 0.5]]}
    assert [run["neighbours"] for run in mode["runs"]] == [["b"], ["a"]]


@pytest.mark.parametrize("rates", [[], [None] * 9, [1.0, 2.0], [0.0] * 9])
def test_too_little_to_tell_a_rate(demo: ModuleType, rates: list[float | None]) -> None:
    assert demo.step_rate([window(rate) for rate in rates]) is None


def test_a_stall_between_steps_counts_and_what_follows_the_last_step_does_not(demo: ModuleType) -> None:
    assert demo.step_rate([window(rate) for rate in (9.0, 9.0, 4.0, 0.0, 2.0, 0.0, None)]) == pytest.approx(2.0)


def test_the_mix_is_five_families_of_programs_that_exist() -> None:
    jobs = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))["jobs"]
    assert len({job["family"] for job in jobs}) == 5
    assert len({job["name"] for job in jobs}) == len(jobs)
    for job in jobs:
        assert (ROOT / "examples" / job["command"][0]).is_file()
        assert job["command"][-2:] == ["--steps", str(job["steps"])]


def test_what_others_used_is_told_apart_from_what_the_jobs_used(report: dict[str, Any]) -> None:
    used_by_jobs = 2 * 7 * (0.5 + 0.1)  # two jobs, seven windows each
    assert report["modes"]["cotenant"]["foreign_cores"] == pytest.approx((30.0 - used_by_jobs) / 20.0)
