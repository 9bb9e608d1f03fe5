"""The demo's like-for-like comparison of interference predictors, on sets whose throughputs are counted by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile, Signature, ThroughputPrediction

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Import the module as the demo does, with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import demo_sets

        yield demo_sets
    for name in ("demo_sets", "demo_figures", "demo_values"):
        sys.modules.pop(name, None)


class Says:
    """A predictor that answers by the number of members, and keeps what it was asked."""

    name = "says"

    def __init__(self, *mids: float) -> None:
        self.mids = mids
        self.asked: list[tuple[tuple[float, ...], str]] = []

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        self.asked.append((tuple(round(member.util_mean, 3) for member in members), gpu_type))
        return [ThroughputPrediction(mid, mid, mid) for mid in self.mids[: len(members)]]


def window(job: str, start: float, rate: float | None, beside: int, util: float = 0.5) -> Signature:
    return Signature(
        job_id=job, gpu_id="g0", start_s=start, window_s=1.0, samples=10, util_mean=util, util_peak=util,
        memory_bytes=1e8, memory_peak_bytes=1e8, step_rate=rate, throttled_fraction=0.0, host_cores=0.0,
        neighbours=beside, compute_share=1.0,
    )  # fmt: skip


def series(
    job: str, rates: Sequence[float | None], beside: int, start: float = 0.0, util: float = 0.5
) -> list[Signature]:
    return [window(job, start + i, rate, beside, util) for i, rate in enumerate(rates)]


def mode(demo: ModuleType, name: str, windows: Mapping[str, Sequence[Signature]]) -> Any:
    """A mode whose job ids are ``<mode>-<job>``."""
    views = [
        SimpleNamespace(job_id=job_id, name=job_id.rpartition("-")[2], fingerprint=f"fp-{job_id[-1]}", hints={})
        for job_id in windows
    ]
    views = list(reversed(views))  # the client gives the newest first
    return demo.Mode(name, 0.0, views, windows, {}, {}, 0.0, 0.0, {"g0": "cpu-core"})


def alone(demo: ModuleType) -> Any:
    """Three jobs that do 10, 20 and 5 steps/s alone, and want .4, .8 and .2 of the device."""
    jobs = (("a", 10.0, 0.4), ("b", 20.0, 0.8), ("c", 5.0, 0.2))
    windows = {
        f"x-{job}": series(f"x-{job}", [rate] * 12, 0, 100.0 * place, util)
        for place, (job, rate, util) in enumerate(jobs)
    }
    return mode(demo, "exclusive", windows)


def pair(name: str, rate_a: float, rate_b: float, count: int) -> dict[str, list[Signature]]:
    """Jobs a and b side by side; of ``count`` windows the first two are the warm-up."""
    return {
        f"{name}-a": series(f"{name}-a", [9.0, 9.0, *[rate_a] * (count - 2)], 1, 1000.0),
        f"{name}-b": series(f"{name}-b", [9.0, 9.0, *[rate_b] * (count - 2)], 1, 1000.0),
    }


def test_every_predictor_is_asked_about_the_same_sets_on_the_profiles_measured_alone(demo: ModuleType) -> None:
    first, present = Says(0.9, 0.5), Says(0.8, 0.6)
    modes = [mode(demo, "first", pair("f", 7.0, 12.0, 10)), mode(demo, "cotenant", pair("p", 9.0, 16.0, 12))]
    found = demo.compare_sets([alone(demo), *modes], {"first": first, "cotenant": present})
    # Of 10 steps/s alone a does 7 and 9, of 20 b does 12 and 16.
    assert [(row["mode"], row["seconds"]) for row in found["rows"]] == [("first", 8.0), ("cotenant", 10.0)]
    assert [[(one["name"], one["measured"]) for one in row["members"]] for row in found["rows"]] == [
        [("a", pytest.approx(0.7)), ("b", pytest.approx(0.6))],
        [("a", pytest.approx(0.9)), ("b", pytest.approx(0.8))],
    ]
    assert found["rows"][1]["members"][1]["predicted"] == {"first": 0.5, "cotenant": 0.6}
    assert first.asked == present.asked == [((0.4, 0.8), "cpu-core")] * 2
    assert (found["together"], found["members"]) == (1, 4)
    assert found["throughput_error"] == pytest.approx(
        {"first": (0.2 + 0.1 + 0.0 + 0.3) / 4, "cotenant": (0.1 + 0.0 + 0.1 + 0.2) / 4}
    )
    # 1 - 1/1.3 and 1 - 1/1.7 measured; 1 - 1/1.4 predicted by both.
    savings = 1 - 1 / 1.3, 1 - 1 / 1.7
    assert [row["saving"] for row in found["rows"]] == pytest.approx(savings)
    off = sum(abs(each - 2 / 7) for each in savings) / 2
    assert found["saving_error"] == pytest.approx({"first": off, "cotenant": off})


class Learns(Says):
    """A predictor that keeps what it is told, and says what was measured last."""

    def with_evidence(self, observations: Sequence[Observation]) -> Says:
        known = {each.focal.fingerprint: each.throughput for each in observations}
        return Says(*(known[name] for name in sorted(known)) if known else self.mids)


def test_a_predictor_that_learns_knows_what_earlier_modes_showed_and_nothing_later(demo: ModuleType) -> None:
    modes = [
        mode(demo, "static", pair("s", 7.0, 12.0, 20)),
        mode(demo, "first", pair("f", 8.0, 14.0, 20)),
        mode(demo, "cotenant", pair("p", 9.0, 16.0, 20)),
    ]
    found = demo.compare_sets([alone(demo), *modes], {"first": Says(0.5, 0.5), "cotenant": Learns(0.5, 0.5)})
    said = [[one["predicted"]["cotenant"] for one in row["members"]] for row in found["rows"]]
    assert [row["mode"] for row in found["rows"]] == ["first", "cotenant"]  # of static halves nobody predicts anything
    assert said[0] == pytest.approx([0.7, 0.6])
    assert said[1] == pytest.approx([0.75, 0.65])  # of both modes before, as long as each other
    assert found["throughput_error"]["first"] == pytest.approx((0.3 + 0.2 + 0.4 + 0.3) / 4)


def test_every_member_and_every_set_weighs_the_same_however_long_it_was_there(demo: ModuleType) -> None:
    windows = pair("p", 8.0, 10.0, 60)
    windows["p-b"] += series("p-b", [18.0] * 10, 1, 5000.0)
    windows["p-c"] = series("p-c", [9.0, 9.0, *[4.0] * 8], 1, 5000.0)
    found = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.7, 0.7)})
    assert [[round(one["measured"], 3) for one in row["members"]] for row in found["rows"]] == [[0.8, 0.5], [0.9, 0.8]]
    assert found["throughput_error"] == {"first": pytest.approx((0.1 + 0.2 + 0.2 + 0.1) / 4)}


@pytest.mark.parametrize(("count", "measured"), [(6, 0), (7, 1)])
def test_a_set_that_was_not_together_for_long_enough_is_counted_and_left_out(
    demo: ModuleType, count: int, measured: int
) -> None:
    modes = [mode(demo, "first", pair("f", 8.0, 10.0, count)), mode(demo, "cotenant", {})]
    found = demo.compare_sets([alone(demo), *modes], {"first": Says(0.8, 0.5), "cotenant": None})
    assert (found["together"], len(found["rows"])) == (1, measured)
    assert found["throughput_error"]["first"] == (pytest.approx(0.0) if measured else None)


def test_a_set_of_which_only_one_member_steps_is_not_measured(demo: ModuleType) -> None:
    windows = {"p-a": series("p-a", [8.0] * 20, 1), "p-b": series("p-b", [None] * 20, 1)}
    found = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.8, 0.5)})
    assert (found["together"], found["rows"], found["members"]) == (1, [], 0)
    assert (found["throughput_error"], found["saving_error"]) == ({"first": None}, {"first": None})


def test_a_job_without_a_rate_alone_leaves_its_sets_out(demo: ModuleType) -> None:
    known = alone(demo)
    known.windows["x-b"][:] = series("x-b", [None] * 12, 0, 100.0)
    found = demo.compare_sets([known, mode(demo, "cotenant", pair("p", 8.0, 10.0, 20))], {"first": Says(0.8, 0.5)})
    assert (found["together"], found["rows"]) == (1, [])


def test_without_any_set_there_is_nothing_to_compare(demo: ModuleType) -> None:
    single = mode(demo, "cotenant", {"p-a": series("p-a", [8.0] * 20, 0)})
    for modes in ([], [single]):
        found = demo.compare_sets([alone(demo), *modes], {"first": Says(1.0), "cotenant": Says(1.0)})
        assert (found["together"], found["rows"], found["members"]) == (0, [], 0)
        assert found["throughput_error"] == found["saving_error"] == {"first": None, "cotenant": None}


def test_a_predictor_that_could_not_be_loaded_says_nothing(demo: ModuleType) -> None:
    modes = [mode(demo, "first", pair("f", 8.0, 10.0, 20))]
    found = demo.compare_sets([alone(demo), *modes], {"first": Says(0.8, 0.4), "cotenant": None})
    assert found["rows"][0]["members"][0]["predicted"] == {"first": 0.8, "cotenant": None}
    assert found["rows"][0]["saving_predicted"]["cotenant"] is None
    assert found["throughput_error"] == {"first": pytest.approx(0.05), "cotenant": None}


def test_what_a_job_does_while_another_starts_up_or_has_ended_does_not_count(demo: ModuleType) -> None:
    # b starts training with window 6; its first two windows with steps are the warm-up; it makes its last step in 19.
    windows = {
        "p-a": series("p-a", [*[1.0] * 8, *[8.0] * 12, *[2.0] * 6], 1),
        "p-b": series("p-b", [*[None] * 6, *[1.0] * 2, *[10.0] * 12, *[None] * 6], 1),
    }
    found = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.8, 0.5)})
    (row,) = found["rows"]
    assert row["seconds"] == 12.0
    assert [one["measured"] for one in row["members"]] == pytest.approx([0.8, 0.5])


def test_a_pause_counts_and_a_window_in_which_a_step_is_under_way_does_not(demo: ModuleType) -> None:
    windows = {
        "p-a": series("p-a", [9.0, 9.0, *[8.0] * 4, 0.0, 0.0, *[8.0] * 4], 1),
        "p-b": series("p-b", [9.0, 9.0, *[10.0] * 4, None, None, *[10.0] * 4], 1),
    }
    (row,) = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.8, 0.5)})["rows"]
    assert [one["measured"] for one in row["members"]] == pytest.approx([0.8 * 8 / 10, 0.5])


def test_a_change_of_the_set_settles_first_and_parts_the_sets(demo: ModuleType) -> None:
    # c joins in window 10: windows 10 and 11 belong to no set that is measured.
    windows = {
        "p-a": [*series("p-a", [8.0] * 10, 1), *series("p-a", [2.0, 2.0, *[6.0] * 8], 2, 10.0)],
        "p-b": [*series("p-b", [10.0] * 10, 1), *series("p-b", [1.0, 1.0, *[8.0] * 8], 2, 10.0)],
        "p-c": series("p-c", [3.0, 3.0, *[4.0] * 8], 2, 10.0),
    }
    found = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.8, 0.5, 0.5)})
    assert [[round(one["measured"], 3) for one in row["members"]] for row in found["rows"]] == [
        [0.8, 0.5],
        [0.6, 0.4, 0.8],
    ]
    assert [row["seconds"] for row in found["rows"]] == [8.0, 8.0]


def test_windows_beside_somebody_who_was_not_measured_do_not_count(demo: ModuleType) -> None:
    windows = {"p-a": series("p-a", [8.0] * 20, 2), "p-b": series("p-b", [10.0] * 20, 2)}
    found = demo.compare_sets([alone(demo), mode(demo, "cotenant", windows)], {"first": Says(0.8, 0.5)})
    assert (found["together"], found["rows"]) == (0, [])


def test_profiles_are_those_of_the_windows_alone_with_what_the_hints_name(demo: ModuleType) -> None:
    known = alone(demo)
    known.views[0].hints["model_family"] = "gan"  # the last job, c
    profiles = demo.profiles_alone(known)
    assert sorted(profiles) == ["a", "b", "c"]
    assert (profiles["c"].family, profiles["c"].fingerprint, profiles["c"].source) == ("gan", "fp-c", "history")
    assert profiles["b"].util_mean == pytest.approx(0.8)
    assert profiles["b"].solo_step_rate == pytest.approx(20.0)
    assert profiles["b"].family == ""
