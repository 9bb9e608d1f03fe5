"""Tiny schedules worked out by hand, one table for each policy."""

from __future__ import annotations

import pytest
from simulating import NO_COST, ends, halves, job, run, scenario

from cotenant.scheduler.simulation.desk import BaselinePolicy, Desk, Entry
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.policies.assignment import Assignment
from cotenant.scheduler.simulation.policies.gavel import Gavel, divide_time
from cotenant.scheduler.simulation.policies.packing import FirstFit, Lucid, Static, Threshold
from cotenant.scheduler.simulation.policies.queueing import Fifo, Tiresias
from cotenant.scheduler.simulation.simulate import Scenario, baseline
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, TraceJob, mixed_cluster, trace_of
from cotenant.scheduler.simulation.world import Costs

A, B, C = job("a", 0, 100), job("b", 10, 50), job("c", 20, 10)


@pytest.mark.parametrize(
    ("policy", "jobs", "want"),
    [
        ("fifo", (A, B, C), {"a": 100, "b": 150, "c": 160}),
        ("sjf", (A, B, C), {"a": 100, "c": 110, "b": 160}),
        # b (50 left) takes a's GPU at 10 (90 left), c (10) b's at 20 (40 left): c ends at 30, b at 70, a at 160.
        ("srtf", (A, B, C), {"c": 30, "b": 70, "a": 160}),
        # Estimates turn the order round: b is thought short, c long.
        (
            "qssf",
            (A, job("b", 10, 50, estimate_s=1.0), job("c", 20, 10, estimate_s=99.0)),
            {"a": 100, "b": 150, "c": 160},
        ),
        # Without an estimate a job goes last.
        ("qssf", (A, job("b", 10, 50), job("c", 20, 10, estimate_s=99.0)), {"a": 100, "c": 110, "b": 160}),
    ],
)
def test_one_gpu(policy: str, jobs: tuple[TraceJob, ...], want: dict[str, float]) -> None:
    assert ends(run(policy, jobs)) == want


def test_nobody_overtakes_the_first_of_a_fifo_queue() -> None:
    jobs = (job("a", 0, 100), job("wide", 1, 10, gpus=2), job("b", 2, 5))
    assert ends(run("fifo", jobs, gpus=2)) == {"a": 100, "wide": 110, "b": 115}


def test_qssf_weighs_estimates_by_gpus() -> None:
    jobs = (job("a", 0, 100, gpus=2), job("wide", 1, 10, gpus=2, estimate_s=10.0), job("b", 2, 15, estimate_s=15.0))
    assert ends(run("qssf", jobs, gpus=2)) == {"a": 100, "b": 115, "wide": 125}


def test_a_suspended_job_pays_for_its_restart() -> None:
    result = run("srtf", (A, B), costs=Costs(7.0, 7.0))
    assert ends(result) == {"b": 60, "a": 157}
    assert [each.suspensions for each in result.world.runs] == [1, 0]


def test_srtf_counts_time_and_not_gpus() -> None:
    jobs = (job("narrow", 0, 70), job("wide", 0, 60, gpus=2), job("b", 0, 100, gpus=1))
    got = ends(run("srtf", jobs, gpus=2))
    assert got == {"wide": 60, "narrow": 130, "b": 160}


def test_tiresias_demotes_by_gpu_seconds_and_acts_in_rounds() -> None:
    """a is above 240 GPU-seconds in the round at 300, so b takes over; a goes on in the round after b's end at 400."""
    jobs = (job("a", 0, 400), job("b", 30, 100))
    assert ends(run(Tiresias(threshold_gpu_s=240.0), jobs)) == {"b": 400, "a": 520}


def test_tiresias_is_first_come_first_served_within_a_queue() -> None:
    assert ends(run(Tiresias(threshold_gpu_s=1e9), (A, B))) == {"a": 100, "b": 170}


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (Static(2), {"a": 200, "b": 200, "c": 250}),
        (FirstFit(3), {"a": 250, "b": 250, "c": 150}),
        (FirstFit(1), {"a": 100, "b": 200, "c": 250}),
    ],
)
def test_sharing_slows_down_as_the_truth_says(policy: FirstFit | Static, want: dict[str, float]) -> None:
    """Pairs run at a half, threes at a third: c (50) of three ends at 150; then a and b have 50 left at a half."""
    jobs = (job("a", workload="w"), job("b", workload="w"), job("c", length=50, workload="w"))
    assert ends(run(policy, jobs, truth=halves("w"))) == pytest.approx(want)


def test_static_slots_give_a_large_job_the_whole_gpu() -> None:
    small, large = {"memory_bytes": 4 * GIB}, {"memory_bytes": 13 * GIB}
    jobs = (job("a", 0, 100, **small), job("large", 1, 10, **large), job("b", 2, 10, **small))
    assert ends(run(Static(2), jobs)) == {"a": 100, "b": 12, "large": 110}
    jobs = (job("large", 0, 100, **large), job("a", 1, 10, **small))
    assert ends(run(Static(2), jobs)) == {"large": 100, "a": 110}


def test_first_fit_takes_the_first_gpu_and_best_fit_the_tightest() -> None:
    first = (job("a", memory_bytes=4 * GIB), job("b", memory_bytes=21 * GIB), job("c", 1, memory_bytes=2 * GIB))
    got = {name: run(name, first, gpus=2).world for name in ("first-fit", "best-fit")}
    where = {
        name: {world.runs[stint.run].job.job_id: stint.gpus for stint in world.stints} for name, world in got.items()
    }
    assert where == {"first-fit": {"a": (0,), "b": (1,), "c": (0,)}, "best-fit": {"a": (0,), "b": (1,), "c": (1,)}}


def test_a_gang_shares_the_gpus_of_one_node() -> None:
    jobs = (job("a", gpus=3), job("wide", 1, gpus=2))
    result = run("first-fit", jobs, gpus=4, per_node=2, truth=halves(""))
    assert {result.world.runs[s.run].job.job_id: s.gpus for s in result.world.stints} == {
        "a": (0, 1, 2),
        "wide": (0, 1),
    }


@pytest.mark.parametrize(
    ("util", "want"), [(0.5, {"a": 200, "b": 200}), (0.51, {"a": 100, "b": 200}), (None, {"a": 100, "b": 200})]
)
def test_threshold_pairs_only_what_fits_the_gpu(util: float | None, want: dict[str, float]) -> None:
    jobs = (job("a", workload="w", util=0.5), job("b", workload="w", util=util))
    assert ends(run(Threshold(1.0), jobs, truth=halves("w"))) == want


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ({"w": 1}, {"a": 200, "b": 200}),
        ({"w": 2}, {"a": 100, "b": 200}),
    ],
)
def test_lucid_pairs_by_score(scores: dict[str, int], want: dict[str, float]) -> None:
    jobs = (job("a", workload="w", estimate_s=100.0), job("b", workload="w", estimate_s=100.0))
    assert ends(run(Lucid(scores), jobs, truth=halves("w"))) == want


def test_lucid_does_not_put_a_long_job_beside_one_that_ends_soon() -> None:
    jobs = (job("a", workload="w", estimate_s=10.0), job("b", 1, workload="w", estimate_s=100.0))
    assert ends(run(Lucid({"w": 0}), jobs, truth=halves("w"))) == {"a": 100, "b": 200}


def test_a_job_on_several_gpus_runs_at_the_speed_of_its_slowest() -> None:
    truth = PairTable({("x", "w"): 0.5, ("w", "x"): 1.0, ("w", "w"): 1.0, ("x", "x"): 1.0})
    jobs = (job("wide", gpus=2, workload="x"), job("b", length=40, workload="w"))
    assert ends(run("first-fit", jobs, gpus=2, truth=truth)) == {"wide": 120, "b": 40}


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (Gavel(halves("w", n=0.8), 100.0), {"a": 500, "b": 500}),
        (Gavel(halves("w", n=0.5), 100.0), {"a": 700, "b": 800}),
        (Gavel(halves("w", n=0.8), 100.0, packed=False), {"a": 700, "b": 800}),
    ],
)
def test_gavel_takes_turns_unless_sharing_is_better(policy: Gavel, want: dict[str, float]) -> None:
    jobs = (job("a", length=400, workload="w"), job("b", length=400, workload="w"))
    n = 0.5 if want["a"] == 700 else 0.8
    assert ends(run(policy, jobs, truth=halves("w", n=n))) == pytest.approx(want)


@pytest.mark.parametrize("policy", [*POLICIES, pytest.param(Assignment(PairTable({}, default=1.0)), id="assignment")])
def test_jobs_share_memory_only_as_far_as_it_lasts(policy: str | BaselinePolicy) -> None:
    """The world refuses more: of these at most two fit a GPU together, and one fits beside nobody."""
    sizes = {"a": 9, "b": 9, "c": 9, "d": 20, "e": 24, "f": 0}
    jobs = [job(name, workload="w", util=0.1, memory_bytes=size * GIB) for name, size in sizes.items()]
    assert None not in ends(run(policy, jobs, 2)).values()


def test_gavel_acts_at_the_start_of_rounds_only() -> None:
    """b counts from the round at 100, in which everybody begins anew and a is first; a ends in the middle of it."""
    jobs = (job("a", 0, 130), job("b", 10, 50))
    assert ends(run(Gavel(round_s=100.0, packed=False), jobs)) == {"a": 130, "b": 250}


def test_gavel_divides_time_relative_to_an_equal_part_of_the_cluster() -> None:
    """x does 1 on the new GPU and 0.5 on the old one (0.75 on an equal part), y 1 and 0.1 (0.55).

    x is to have p of the new one: (p + 0.5 (1 - p)) / 0.75 = (1 - p + 0.1 p) / 0.55, so p = 0.5.
    """
    rates = PairTable({}, solo={("x", "old"): 0.5, ("y", "old"): 0.1})
    entries = [Entry(i, name, 0.0, 1, name, 0, None, "", 1.0, None) for i, name in enumerate("xy")]
    choices = divide_time(entries, {"new": 1, "old": 1}, rates, packed=False)
    parts = {(choice.jobs, choice.gpu_type): choice.part for choice in choices}
    assert parts == pytest.approx({((i,), kind): 0.5 for i in (0, 1) for kind in ("new", "old")}, abs=0.01)


def test_every_policy_has_its_own_name() -> None:
    assert {name: make().name for name, make in POLICIES.items()} == {name: name for name in POLICIES}


def test_a_policy_that_is_told_nothing_cannot_ask() -> None:
    class Curious(Fifo):
        def schedule(self, desk: Desk) -> None:
            desk.remaining_s(desk.waiting[0])

    with pytest.raises(ValueError, match="job a: fifo is told nothing of its run time"):
        run(Curious(), (A,))


def test_costs_are_nothing_in_these_tests() -> None:
    assert scenario((A,)).costs == NO_COST


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (Assignment(halves("w", n=0.8)), {"a": 125, "b": 125}),
        (Assignment(halves("w", n=0.5)), {"a": 100, "b": 200}),
        (Assignment(halves("w", n=0.8), packed=False), {"a": 100, "b": 200}),
    ],
)
def test_an_assignment_pairs_where_that_is_more_progress(policy: Assignment, want: dict[str, float]) -> None:
    jobs = (job("a", workload="w"), job("b", workload="w"))
    assert ends(run(policy, jobs, truth=policy.rates)) == pytest.approx(want)


def test_an_assignment_gives_a_type_to_who_gains_most_by_it() -> None:
    """b came later and needs the new GPU; a is as fast on the old one, and moves for the 60 s that it costs."""
    truth = PairTable({}, solo={("a", "old"): 1.0, ("b", "old"): 0.2}, default=0.1)
    jobs = (job("a", 0, 1000, workload="a"), job("b", 10, 1000, workload="b"))
    cluster = mixed_cluster((("new", 1), ("old", 1)))
    result = baseline(Scenario(trace_of("two", jobs), cluster, truth, Costs(60.0, 60.0)), Assignment(truth))
    assert ends(result) == {"a": 1060, "b": 1010}


def test_an_assignment_that_knows_run_times_can_put_short_jobs_first() -> None:
    jobs = (job("a", 0, 100), job("b", 0, 10))
    assert ends(run(Assignment(gamma=1.0, packed=False), jobs)) == {"b": 10, "a": 110}
    assert ends(run(Assignment(gamma=-1.0, packed=False), jobs)) == {"a": 100, "b": 110}
