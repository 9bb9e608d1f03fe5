"""Jobs that are kept apart, and GPUs that are instances: by the checks of a policy, and through the whole core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import packing
import pytest
from packing import gpu, resident
from scheduling import Driver, half, host, measurement, profile, report, settings

from cotenant.forecasting.interference import UtilisationRule
from cotenant.placement.engine import policy, policy_names
from cotenant.placement.explain import explain, would_help
from cotenant.placement.types import NoFit, Placement
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import JobExited
from cotenant.scheduler.core.model import Gpu, Host, JobSpec

RULE = UtilisationRule()


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "exclusive"])
@pytest.mark.parametrize(
    ("mine", "its", "fits"),
    [
        ({}, {}, True),
        ({"anti_affinity": {"group:a"}}, {"labels": {"group:a", "tenant:x"}}, False),
        ({"anti_affinity": {"group:a"}}, {"labels": {"group:b", "tenant:a"}}, True),
        ({"labels": {"tenant:x"}}, {"anti_affinity": {"tenant:x", "group:a"}}, False),
        ({"labels": {"tenant:y"}}, {"anti_affinity": {"tenant:x"}}, True),
        ({"labels": {"group:a"}, "anti_affinity": {"group:a"}}, {"labels": {"group:a"}}, False),
    ],
)
def test_who_may_join_whom(name: str, mine: dict[str, Any], its: dict[str, Any], fits: bool) -> None:
    newcomer = replace(packing.request(memory=1), **{key: frozenset(value) for key, value in mine.items()})
    there = gpu("g0", resident("r", memory=packing.GIB))
    kept = replace(there.residents[0], **{key: frozenset(value) for key, value in its.items()})
    answer = policy(name).place(newcomer, [replace(there, residents=(kept,))], RULE, settings().placement, 9)
    assert isinstance(answer, Placement) is fits
    if isinstance(answer, NoFit):
        assert explain(answer.errors) == "1 GPU: carries a job that it must not share with (anti_affinity)"
        assert not answer.never


def replica(job_id: str, **hints: Any) -> JobSpec:
    return half(job_id, **({"group": "web", "anti_affinity": "group:web"} | hints))


def where(driver: Driver) -> dict[str, str]:
    return {
        job_id: job.lease.shares[0].gpu_id for job_id, job in driver.core.state.jobs.items() if job.lease is not None
    }


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_replicas_spread_and_the_third_waits_while_others_join_them(bias: float) -> None:
    driver = Driver(host(gpus=2), configured=settings(packing_bias=bias))
    driver.submit(replica("a"), replica("b"), replica("c"), half("other"))
    assert set(where(driver)) == {"a", "b", "other"}
    assert where(driver)["a"] != where(driver)["b"]
    told = queries.explain(driver.core.state, "c", driver.now)
    assert told.summary == "waits: 2 GPUs: carries a job that it must not share with (anti_affinity)"
    assert told.would_help == ["wait for the jobs to end that it is kept apart from, or say less in anti_affinity"]
    driver.do(JobExited("a", 1, "h1", 0))
    assert where(driver)["c"] not in {where(driver)["b"]}


def test_a_tenant_that_others_keep_away_from() -> None:
    driver = Driver(host())
    driver.submit(half("a", anti_affinity="tenant:noisy"), half("b", tenant="noisy"), half("c", tenant="quiet"))
    assert set(where(driver)) == {"a", "c"}


def test_a_job_of_several_gpus_gets_no_mig_instances() -> None:
    slices = tuple(Gpu(f"MIG-{index}", "h2", "A100 MIG 1g.5gb", index, 8 << 30) for index in range(2))
    gang = half("gang", gpus=2, isolation="hard")
    driver = Driver(Host("h2", "h2", slices, joined_at=0.0), host("h1", gpus=1))
    driver.submit(gang, half("one", isolation="hard"), half("two", isolation="hard"))
    job = driver.job("gang")
    assert job.not_placeable
    assert "2 GPUs: a MIG instance, which a job of several GPUs cannot use" in job.reason
    assert "ask for 1 GPU, or for GPUs that are not partitioned" in would_help(job.fit_errors)
    assert len(where(driver)) == 2


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("soft", "soft", False), ("none", "soft", False), ("soft", "none", False), ("none", "none", True)],
)
@pytest.mark.parametrize("policy", ["cotenant", "static"])
def test_jobs_share_a_mig_instance_only_when_all_want_no_isolation(
    policy: Any, first: str, second: str, *, together: bool
) -> None:
    slices = (Gpu("MIG-0", "h1", "A100 MIG 3g.20gb", 0, 8 << 30),)
    driver = Driver(Host("h1", "h1.example", slices, joined_at=0.0), configured=settings(policy=policy))
    driver.run(half("a", isolation=first))
    driver.do(report("h1", measurement("a", "MIG-0", profile(util=0.2))))
    driver.submit(half("b", isolation=second))
    assert (driver.state("b") != "QUEUED") is together
    if not together:
        assert "share" in queries.explain(driver.core.state, "b", driver.now).summary
