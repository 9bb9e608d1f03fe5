"""Jobs placed in one cycle change places where that is better for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import GIB, gpu, profile, request, resident

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import UNKNOWN_PROFILE
from cotenant.placement.batch import MOST_JOBS, rearrange
from cotenant.placement.engine import policy
from cotenant.placement.fleet import Fleet
from cotenant.placement.guarantees import mids_on
from cotenant.placement.mix import Kind, Mix
from cotenant.placement.objective import score
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Request

RULE = UtilisationRule()
ENGINE = policy("cotenant")
TWO = PlacementSettings(max_jobs_per_gpu=2)


def one_by_one(
    cluster: Sequence[GpuView], jobs: Sequence[Request]
) -> tuple[list[tuple[Request, Placement]], list[Request]]:
    statement, placed, waiting = Statement(cluster), [], []
    for number, job in enumerate(jobs):
        answer = ENGINE.place(job, statement.fleet, RULE, TWO, len(jobs) - number)
        if isinstance(answer, Placement):
            statement.place(job, answer)
            placed.append((job, answer))
        else:
            waiting.append(job)
    return placed, waiting


def together(
    cluster: Sequence[GpuView], jobs: Sequence[Request], fixed: Sequence[str] = ()
) -> list[tuple[Request, Placement]] | None:
    placed, waiting = one_by_one(cluster, jobs)
    return rearrange(ENGINE, Fleet(cluster), placed, waiting, fixed=fixed, predictor=RULE, settings=TWO)


def crews(placed: Sequence[tuple[Request, Placement]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for job, placement in placed:
        for share in placement.shares:
            found.setdefault(share.gpu_id, set()).add(job.job_id)
    return found


def total(cluster: Sequence[GpuView], placed: Sequence[tuple[Request, Placement]]) -> float:
    statement = Statement(cluster)
    for job, placement in placed:
        statement.place(job, placement)
    worth = []
    for view in statement.view():
        n = mids_on(RULE, [view])[0] if view.residents else []
        worth.append(score(n, TWO.packing_bias, [each.weight for each in view.residents]))
        assert sum(each.share.compute for each in view.residents) <= 1.0
        assert sum(each.share.memory_bytes for each in view.residents) <= view.memory_bytes
        assert len(view.residents) <= TWO.max_jobs_per_gpu
        limits = zip(n, view.residents, strict=True)
        assert len(n) < 2 or all(1.0 / value <= each.max_slowdown + 1e-6 for value, each in limits)
    return math.fsum(worth)


# Two GPUs. One by one, the two light jobs end up together and a heavy one finds nobody who bears with it.
HEAVY = [request(name, 0.9, max_slowdown=1.2) for name in ("heavy-1", "heavy-2")]
FAIR = [request(name, 0.1, max_slowdown=1.2) for name in ("light-1", "light-2")]


def test_nobody_is_left_alone_who_could_have_had_a_partner() -> None:
    cluster, jobs = [gpu("g0"), gpu("g1")], [*FAIR, *HEAVY]
    _, waiting = one_by_one(cluster, jobs)
    assert [job.job_id for job in waiting] == ["heavy-2"]
    better = together(cluster, jobs)
    assert better is not None
    assert len(better) == 4
    assert all(len(crew) == 2 and len({name[:5] for name in crew}) == 2 for crew in crews(better).values())


@pytest.mark.parametrize(("cpus", "placed"), [(4.0, 4), (3.9, None), (None, 4)])
def test_who_goes_together_has_the_processors_of_the_host(cpus: float | None, placed: int | None) -> None:
    cluster = [gpu("g0", host="a", cpus=cpus), gpu("g1", host="b", cpus=cpus)]
    jobs = [*(replace(job, cpus=1.0) for job in FAIR), *(replace(job, cpus=3.0) for job in HEAVY)]
    better = together(cluster, jobs)
    assert (better and len(better)) == placed


def test_what_is_left_to_typical_jobs_counts_instead_of_the_saving() -> None:
    """Halves are asked for: two jobs of a quarter each go to one GPU rather than beside one of a half each."""
    mix, fleet = Mix(), Fleet([gpu("g0", resident("half", 0.5, min_compute=0.5)), gpu("g1"), gpu("g2")])
    for part in (50, 50, 25):
        mix.note(Kind(1, part, 0))
    fleet.demand = mix.demand()
    statement, placed = Statement(fleet.views), []
    for job, place in zip((request("a", 0.25), request("b", 0.25)), ("g0", "g1"), strict=True):
        answer = ENGINE.place(job, [statement.gpu(place)], RULE, TWO, 9)
        assert isinstance(answer, Placement)
        statement.place(job, answer)
        placed.append((job, answer))
    better = rearrange(ENGINE, fleet, placed, [request("c", 0.5)], predictor=RULE, settings=TWO)
    assert better is not None
    assert {"a", "b"} in crews(better).values()


def test_whoever_must_stay_stays() -> None:
    cluster, jobs = [gpu("g0"), gpu("g1")], [*FAIR, *HEAVY]
    assert together(cluster, jobs, fixed=["heavy-2"]) is None
    assert together(cluster, jobs, fixed=[job.job_id for job in jobs]) is None


def test_those_who_run_are_not_moved_and_keep_their_limits() -> None:
    cluster = [gpu("g0", resident("old", 0.8, max_slowdown=1.05)), gpu("g1")]
    better = together(cluster, [*FAIR, *HEAVY])
    total(cluster, better or [])


def test_unknown_exclusive_and_large_jobs_stay_where_they_are() -> None:
    cluster = [gpu(f"g{i}") for i in range(3)]
    odd = [
        request("unknown", known=UNKNOWN_PROFILE),
        request("alone", exclusive=True),
        request("large", gpus=1, memory=15 * GIB),
    ]
    placed, _ = one_by_one(cluster, odd)
    before = crews(placed)
    better = together(cluster, [*odd, *FAIR])
    after = crews(better) if better else before
    for name in ("unknown", "alone"):
        assert [g for g, crew in after.items() if name in crew] == [g for g, crew in before.items() if name in crew]


def test_who_would_suffer_from_a_guarantee_changes_places_with_who_does_not() -> None:
    cluster = [gpu("g0"), gpu("g1")]
    light, busy = request("light", 0.1, max_slowdown=1.05), request("busy", 0.7, max_slowdown=1.5)
    asked = [light, request("other", 0.1, max_slowdown=1.2), busy, request("guaranteed", 0.1, compute=0.5)]
    placed, _ = one_by_one(cluster, asked)
    assert {"busy", "guaranteed"} in crews(placed).values()
    better = together(cluster, asked)
    assert better is not None
    assert {"busy", "guaranteed"} not in crews(better).values()
    assert total(cluster, better) > total(cluster, placed)


jobs = st.lists(
    st.builds(
        request,
        st.just("j"),
        st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]),
        memory=st.sampled_from([GIB, 6 * GIB, 12 * GIB]),
        compute=st.none() | st.sampled_from([0.2, 0.5]),
        max_slowdown=st.sampled_from([1.05, 1.2, 1.5, 3.0]),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
    ),
    max_size=8,
)
clusters = st.lists(st.sampled_from([None, 0.2, 0.6]), min_size=1, max_size=4).map(
    lambda rows: [gpu(f"g{i}", *([] if u is None else [resident(f"r{i}", u)])) for i, u in enumerate(rows)]
)


@given(clusters, jobs)
def test_never_fewer_jobs_never_a_worse_score_and_no_promise_broken(
    cluster: list[GpuView], asked: list[Request]
) -> None:
    named = [
        Request(
            f"j{i}",
            1,
            each.memory_bytes,
            each.compute,
            profile(each.profile.util_mean),
            each.max_slowdown,
            weight=each.weight,
        )
        for i, each in enumerate(asked)
    ]
    placed, _ = one_by_one(cluster, named)
    better = together(cluster, named)
    if better is None:
        return
    assert len(better) >= len(placed)
    assert len({job.job_id for job, _ in better}) == len(better)
    assert {job.job_id for job, _ in placed} <= {job.job_id for job, _ in better}
    if len(better) == len(placed):
        assert total(cluster, better) > total(cluster, placed)
    else:
        total(cluster, better)
    assert together(cluster, named) == better


@settings(max_examples=15)
@given(st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]), min_size=MOST_JOBS + 2, max_size=MOST_JOBS + 16), st.data())
def test_more_jobs_than_can_change_places_break_no_promise(utils: list[float], data: st.DataObject) -> None:
    cluster = [gpu(f"g{i}") for i in range(len(utils) // 2)]
    sizes = st.sampled_from([GIB, 6 * GIB, 10 * GIB])
    named = [
        request(f"j{i}", util, memory=data.draw(sizes), max_slowdown=data.draw(st.sampled_from([1.2, 3.0])))
        for i, util in enumerate(utils)
    ]
    placed, _ = one_by_one(cluster, named)
    better = together(cluster, named)
    if better is not None:
        assert {job.job_id for job, _ in placed} <= {job.job_id for job, _ in better}
        total(cluster, better)


def test_jobs_that_need_not_share_are_not_put_together() -> None:
    cluster, jobs = [gpu("g0"), gpu("g1")], [request("a", 0.3), request("b", 0.3)]
    placed, waiting = one_by_one(cluster, jobs)
    assert not waiting
    assert len(crews(placed)) == 2
    assert together(cluster, jobs) is None


def test_a_job_measured_for_a_moment_spoils_no_exchange() -> None:
    brief = request("brief", known=replace(profile(0.3), observed_s=1.0))
    cluster = [gpu("g0"), gpu("g1"), gpu("g2")]
    better = together(cluster, [brief, *FAIR, *HEAVY])
    assert better is not None
    assert {"heavy-1", "heavy-2"} <= {job.job_id for job, _ in better}
