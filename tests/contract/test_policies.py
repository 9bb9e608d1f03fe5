"""What every placement policy promises, whatever else it does. A new policy is covered as soon as it is registered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, SETTINGS, gpu, profile, request

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import UNKNOWN_PROFILE
from cotenant.placement.engine import PlacementPolicy, policy, policy_names
from cotenant.placement.explain import explain, would_help
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement, Request

RULE = UtilisationRule()
CPUS = {"h0": 4.3, "h1": None}  # processors

profiles = st.builds(profile, st.floats(0.0, 1.0), st.none() | st.integers(1, 20 * GIB)) | st.just(UNKNOWN_PROFILE)
requests = st.builds(
    request,
    st.just("job"),
    gpus=st.integers(1, 4),
    memory=st.none() | st.integers(1, 20).map(lambda n: n * GIB),
    compute=st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0]),
    max_slowdown=st.sampled_from([1.0, 1.5, 4.0]),
    exclusive=st.booleans(),
    one_host=st.booleans(),
    known=profiles,
    cpus=st.sampled_from([0.0, 0.0, 0.1, 1.0, 2.5]),
)
clusters = st.lists(
    st.tuples(st.sampled_from(["h0", "h1"]), st.sampled_from([8 * GIB, 16 * GIB]), st.booleans()), max_size=5
).map(lambda rows: [gpu(f"g{i}", host=h, memory=m, schedulable=s, cpus=CPUS[h]) for i, (h, m, s) in enumerate(rows)])
rules = st.builds(
    PlacementSettings,
    packing_bias=st.floats(0.0, 1.0),
    max_jobs_per_gpu=st.integers(1, 8),
    static_slots=st.integers(1, 5),
)


@pytest.fixture(params=policy_names(), scope="module")
def tested(request: pytest.FixtureRequest) -> PlacementPolicy:
    return policy(request.param)


def run(
    tested: PlacementPolicy, cluster: list[GpuView], asked: list[Request], tuned: PlacementSettings
) -> list[tuple[Request, tuple[GpuView, ...], Placement | NoFit]]:
    """Submit the jobs one after the other; return each with the GPUs it was placed on and the answer."""
    statement = Statement(cluster)
    course = []
    waiting = sum(job.gpus for job in asked)
    for i, anonymous in enumerate(asked):
        job = replace(anonymous, job_id=f"job-{i}")
        before = statement.view()
        answer = tested.place(job, before, RULE, tuned, waiting)
        course.append((job, before, answer))
        if isinstance(answer, Placement):
            statement.place(job, answer)
            waiting -= job.gpus
        check(statement.view())
    return course


def check(view: tuple[GpuView, ...]) -> None:
    for host_id, cpus in CPUS.items():
        taken = math.fsum(r.cpus for each in view if each.host_id == host_id for r in each.residents)
        assert cpus is None or taken <= cpus + 1e-9
    for each in view:
        assert sum(r.share.memory_bytes for r in each.residents) <= each.memory_bytes
        assert sum(r.share.compute for r in each.residents) <= 1.0
        assert math.fsum(r.min_compute for r in each.residents) <= 1.0 + 1e-9
        assert len(each.residents) <= 1 or not any(r.exclusive for r in each.residents)
        for resident in each.residents:
            assert resident.share.compute >= max(resident.min_compute - 1 / 4096, 1 / 4096)
            assert resident.share.memory_bytes > 0


def test_the_name_is_the_one_it_is_registered_under(tested: PlacementPolicy) -> None:
    assert policy(tested.name) is tested


def test_an_empty_gpu_takes_a_job_that_fits_it(tested: PlacementPolicy) -> None:
    answer = tested.place(request(memory=GIB), [gpu()], RULE, SETTINGS, 1)
    assert isinstance(answer, Placement)
    assert [share.gpu_id for share in answer.shares] == ["g0"]


@given(cluster=clusters, asked=st.lists(requests, max_size=10), tuned=rules)
def test_never_over_commits_and_grants_what_was_asked(
    tested: PlacementPolicy, cluster: list[GpuView], asked: list[Request], tuned: PlacementSettings
) -> None:
    for job, before, answer in run(tested, cluster, asked, tuned):  # run checks the GPUs after every step
        if isinstance(answer, NoFit):
            continue
        gpus = {each.gpu_id: each for each in before}
        used = [gpus[share.gpu_id] for share in answer.shares]
        assert answer.job_id == job.job_id
        assert len({each.gpu_id for each in used}) == len(answer.shares) == job.gpus
        assert all(each.schedulable for each in used)
        assert not job.one_host or len({each.host_id for each in used}) == 1
        assert all(share.memory_bytes >= (job.memory_bytes or 0) for share in answer.shares)
        assert all(share.compute >= (job.compute or 0.0) - 1 / 4096 for share in answer.shares)
        neighbours = {resident.job_id for each in used for resident in each.residents}
        assert set(answer.predicted) == {job.job_id, *neighbours}
        assert {job_id for job_id, _ in answer.squeezed} <= neighbours
        assert answer.reason


@given(cluster=clusters, asked=st.lists(requests, max_size=6), tuned=rules)
def test_deterministic(
    tested: PlacementPolicy, cluster: list[GpuView], asked: list[Request], tuned: PlacementSettings
) -> None:
    assert run(tested, cluster, asked, tuned) == run(tested, cluster, asked, tuned)


@given(cluster=clusters, asked=st.lists(requests, max_size=8), tuned=rules)
def test_refusals_are_explained_and_never_means_never(
    tested: PlacementPolicy, cluster: list[GpuView], asked: list[Request], tuned: PlacementSettings
) -> None:
    for job, before, answer in run(tested, cluster, asked, tuned):
        if isinstance(answer, Placement):
            continue
        assert answer.job_id == job.job_id
        assert explain(answer.errors)
        assert would_help(answer.errors)
        assert answer.never == any(error.never and error.gpu_id is None for error in answer.errors) or all(
            error.never for error in answer.errors
        )
        emptied = [replace(each, residents=(), schedulable=True) for each in before]
        on_empty = tested.place(job, emptied, RULE, tuned, job.gpus)
        if cluster:
            assert answer.never == isinstance(on_empty, NoFit)
