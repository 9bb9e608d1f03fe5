"""The planner: complete, deterministic, informative from the first visit on, and inside the time."""

from __future__ import annotations

import dataclasses
from itertools import combinations_with_replacement

import pytest
from benchmarks.colocation.plan import (
    BudgetTooSmall,
    ModeShares,
    Request,
    Timing,
    Traits,
    all_visits,
    make_plan,
    pair_order,
    processes_of,
    triple_order,
    weight_classes,
)
from hypothesis import given
from hypothesis import strategies as st

TIMESLICE = ModeShares("timeslice")
SHARES = ((0.5, 0.5), (0.7, 0.3), (0.3, 0.7))
DUTY = ModeShares("duty", SHARES)
MPS_CAP = ModeShares("mps_cap", SHARES, restarts=True)

utilisations = st.none() | st.floats(0.0, 1.0, allow_nan=False)
workload_maps = st.dictionaries(
    st.sampled_from([f"w{number:02d}" for number in range(9)]),
    st.builds(Traits, st.sampled_from(["images", "text", "gan"]), utilisations),
    min_size=1,
)
mode_lists = st.permutations([TIMESLICE, DUTY, MPS_CAP]).flatmap(
    lambda modes: st.integers(1, 3).map(lambda count: modes[:count])
)
requests = st.builds(
    Request,
    workloads=workload_maps,
    modes=mode_lists,
    budget_s=st.none() | st.floats(1.0, 20_000.0),
    matrix_only=st.booleans(),
    occasion=st.integers(1, 3),
)


def workloads(*values: float) -> dict[str, Traits]:
    return {f"w{number}": Traits(f"family {number % 3}", value) for number, value in enumerate(values)}


@given(requests)
def test_a_plan_is_a_prefix_of_everything_and_inside_the_budget(request_):
    everything = [visit.name for visit in all_visits(request_)]
    assert len(everything) == len(set(everything))
    try:
        plan = make_plan(request_)
    except BudgetTooSmall as error:
        assert error.needed_s > request_.budget_s
        enough = make_plan(dataclasses.replace(request_, budget_s=error.needed_s))
        assert [visit.name for visit in enough.visits][:1] == everything[:1]
        return
    names = [visit.name for visit in plan.visits]
    assert names == everything[: len(names)]
    assert plan == make_plan(request_)
    if request_.budget_s is not None:
        assert plan.seconds <= request_.budget_s
    assert plan.seconds <= plan.all_seconds
    if request_.budget_s is None and not request_.matrix_only:
        assert names == everything


@given(requests, st.randoms(use_true_random=False))
def test_what_is_done_is_not_done_again_and_keeps_its_order(request_, random):
    request_ = dataclasses.replace(request_, budget_s=None)
    names = [visit.name for visit in make_plan(request_).visits]
    done = frozenset(name for name in names if random.random() < 0.5)
    rest = make_plan(dataclasses.replace(request_, done=done))
    assert [visit.name for visit in rest.visits] == [name for name in names if name not in done]


@given(workload_maps)
def test_every_pair_comes_once_and_weights_are_met_early(traits):
    order = pair_order(traits)
    assert sorted(order) == sorted(combinations_with_replacement(sorted(traits), 2))
    weight = weight_classes(traits)
    met = {name: set() for name in traits}
    for first, second in order[: 3 * len(traits)]:
        met[first].add(weight[second])
        met[second].add(weight[first])
    assert all(partners == set(weight.values()) for partners in met.values())


def test_each_workload_is_measured_alone_first():
    plan = make_plan(Request(workloads(0.1, 0.5, 0.9), [TIMESLICE, DUTY], None))
    assert [visit.name for visit in plan.visits[:3]] == [f"timeslice/w{number}#1" for number in range(3)]
    assert [visit.stage for visit in plan.visits].count("alone") == 3


def test_stages_follow_each_other():
    plan = make_plan(Request(workloads(0.1, 0.3, 0.5, 0.9), [TIMESLICE, DUTY], None))
    stages = list(dict.fromkeys(visit.stage for visit in plan.visits))
    assert stages == ["alone", "pairs", "other modes", "threes", "again"]


def test_the_matrix_alone_ends_with_the_pairs_of_the_first_mode():
    plan = make_plan(Request(workloads(0.1, 0.3, 0.5, 0.9), [TIMESLICE, DUTY], None, matrix_only=True))
    assert len(plan.visits) == 4 + 10
    assert plan.left_out == 0


def test_the_first_pairs_cover_light_and_heavy_sums():
    traits = workloads(0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    sums = [traits[first].utilisation + traits[second].utilisation for first, second in pair_order(traits)[:9]]
    assert min(sums) < 0.7
    assert max(sums) > 1.4


def test_capped_modes_measure_every_share_and_no_mirror_image():
    plan = make_plan(Request(workloads(0.2, 0.8), [TIMESLICE, MPS_CAP], None))
    capped = [visit.name for visit in plan.visits if visit.mode == "mps_cap"]
    assert sorted(capped) == [
        "mps_cap:30-70/w0+w1#1",
        "mps_cap:50-50/w0+w0#1",
        "mps_cap:50-50/w0+w1#1",
        "mps_cap:50-50/w1+w1#1",
        "mps_cap:70-30/w0+w0#1",
        "mps_cap:70-30/w0+w1#1",
        "mps_cap:70-30/w1+w1#1",
    ]


def test_a_share_that_is_fixed_at_the_start_needs_a_process_beside_the_uncapped_one():
    visits = make_plan(Request(workloads(0.2, 0.8), [TIMESLICE, MPS_CAP, DUTY], None)).visits
    by_name = {visit.name: processes_of(visit, [TIMESLICE, MPS_CAP, DUTY]) for visit in visits}
    assert by_name["mps_cap:70-30/w0+w1#1"] == {
        ("w0", 0, "mps_cap", None),
        ("w1", 0, "mps_cap", None),
        ("w0", 0, "mps_cap", 0.7),
        ("w1", 0, "mps_cap", 0.3),
    }
    assert by_name["duty:70-30/w0+w1#1"] == {("w0", 0, "duty", None), ("w1", 0, "duty", None)}
    assert by_name["timeslice/w1+w1#1"] == {("w1", 0, "timeslice", None), ("w1", 1, "timeslice", None)}


def test_second_occasions_begin_with_the_least_certain_pair():
    widths = {("w0", "w1"): 0.1, ("w1", "w1"): 0.3}
    plan = make_plan(Request(workloads(0.2, 0.8), [TIMESLICE], None, widths=widths))
    again = [visit.name for visit in plan.visits if visit.stage == "again"]
    assert again == ["timeslice/w1+w1#2", "timeslice/w0+w1#2", "timeslice/w0+w0#2"]


def test_another_occasion_repeats_everything_under_its_number():
    plan = make_plan(Request(workloads(0.2, 0.8), [TIMESLICE], None, occasion=2, matrix_only=True))
    assert {visit.name.rpartition("#")[2] for visit in plan.visits} == {"2"}


def test_threes_are_of_different_workloads_and_spread():
    traits = workloads(0.1, 0.2, 0.3, 0.7, 0.9, 1.0)
    order = triple_order(traits, 3)
    assert all(len(set(triple)) == 3 for triple in order)
    sums = [sum(traits[name].utilisation for name in triple) for triple in order]
    assert sums[0] == pytest.approx(0.6)
    assert sums[1] == pytest.approx(2.6)
    assert triple_order(workloads(0.1, 0.2), 5) == []


def test_warm_processes_shorten_the_plan():
    timing = Timing(start_s=10.0, parallel=2)
    cold = Request(workloads(0.2, 0.8), [TIMESLICE], None, timing=timing)
    warm = dataclasses.replace(cold, warm=frozenset({("w0", 0, "timeslice", None)}))
    assert make_plan(cold).seconds - make_plan(warm).seconds == pytest.approx(5.0)


def test_nothing_left_is_no_error_whatever_the_budget():
    request = Request(workloads(0.5), [TIMESLICE], None)
    done = frozenset(visit.name for visit in all_visits(request))
    assert make_plan(dataclasses.replace(request, budget_s=0.0, done=done)).visits == ()
