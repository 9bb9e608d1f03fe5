"""Limits of tenants and queues: what they refuse, and what people are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_hosts import FakeHost
from local_client import LocalCotenant
from scheduling import GIB, Driver, half, host, settings, spec

from cotenant.configs.settings import AccountSettings, PlacementSettings, ResizeSettings, SchedulingSettings, Settings
from cotenant.scheduler.core import queries, whatif
from cotenant.scheduler.core.events import HostJoined, JobExited, ResumeRequested, SettingsChanged, SuspendRequested
from cotenant.scheduler.errors import HintError
from cotenant.scheduler.specs import check_queue


def limited(**rules: Any) -> Settings:
    return settings().model_copy(update={"scheduling": SchedulingSettings(**rules)})


def of_tenant(job_id: str, tenant: str = "ml", **hints: Any) -> Any:
    return half(job_id, tenant=tenant, **({"gpu_memory": GIB, "compute": 0.5} | hints))


def started(driver: Driver) -> set[str]:
    return {job_id for job_id, job in driver.core.state.jobs.items() if job.lease is not None}


@pytest.mark.parametrize(
    ("rules", "hints", "told"),
    [
        (
            {"tenants": {"ml": AccountSettings(most_gpus=1.2)}},
            {},
            "tenant ml holds 1.00 of 1.2 GPUs, the job takes 0.50",
        ),
        (
            {"tenants": {"ml": AccountSettings(most_gpus=1.499)}},
            {},
            "tenant ml holds 1.000 of 1.499 GPUs, the job takes 0.500",
        ),
        ({"tenants": {"ml": AccountSettings(most_jobs=2)}}, {}, "tenant ml runs 2 of 2 jobs"),
        ({"other_tenants": AccountSettings(most_jobs=2)}, {}, "tenant ml runs 2 of 2 jobs"),
        (
            {"queues": {"night": AccountSettings(most_gpus=1)}},
            {"queue": "night"},
            "queue night holds 1.00 of 1 GPUs, the job takes 0.50",
        ),
        ({"other_queues": AccountSettings(most_jobs=2)}, {}, "queue default runs 2 of 2 jobs"),
    ],
)
def test_a_limit_refuses_and_says_so(rules: dict[str, Any], hints: dict[str, Any], told: str) -> None:
    driver = Driver(host(gpus=4), configured=limited(**rules))
    driver.submit(*(of_tenant(name, **hints) for name in "abc"))
    assert started(driver) == {"a", "b"}
    explained = queries.explain(driver.core.state, "c", driver.now)
    assert explained.summary == f"waits: {told}"
    assert explained.would_help == ["wait for one of these jobs to end, or have an administrator raise the limit"]
    assert queries.job(driver.core.state, "c").waits == told
    planned = whatif.plan(driver.core, [of_tenant("d", **hints)], driver.now).jobs[0]
    assert (planned.placeable, planned.explanation) == ("later", told)
    driver.do(JobExited("a", 1, "h1", 0))
    assert started(driver) == {"b", "c"}


def test_others_pass_and_get_no_smaller_places_because_of_those_that_may_not_start() -> None:
    driver = Driver(host(gpus=4), configured=limited(tenants={"ml": AccountSettings(most_jobs=1)}))
    driver.submit(*(of_tenant(f"m{number}", priority="high") for number in range(5)), of_tenant("x", "other"))
    assert started(driver) == {"m0", "x"}
    assert driver.job("m0").lease.shares[0].gpu_id != driver.job("x").lease.shares[0].gpu_id  # type: ignore[union-attr]


def test_a_job_larger_than_its_limit_fails_at_once() -> None:
    driver = Driver(host(gpus=4), configured=limited(tenants={"ml": AccountSettings(most_gpus=1.5)}))
    driver.submit(of_tenant("a", gpus=2, compute=0.8))
    job = driver.job("a")
    assert (job.state, job.not_placeable) == ("FAILED", True)
    assert job.reason == "the quota does not allow it: the job takes 1.60 GPUs, the limit of tenant ml is 1.5"
    helps = queries.explain(driver.core.state, "a", driver.now).would_help
    assert helps == ["ask for less, or have an administrator raise the limit"]


def test_no_gpus_are_held_for_a_job_that_may_not_start() -> None:
    driver = Driver(host(gpus=2), configured=limited(tenants={"ml": AccountSettings(most_jobs=0)}))
    driver.submit(of_tenant("a"))
    driver.submit(of_tenant("b", "other", isolation="hard"))
    driver.now += 1000.0
    driver.submit(of_tenant("c", "other", isolation="hard"))
    assert driver.core.state.reservation is None
    assert started(driver) == {"b", "c"}


def test_a_limit_of_gpus_keeps_a_job_off_gpus_of_which_it_would_hold_too_much() -> None:
    small, large = host("h1", 1, 8 * GIB), host("h2", 1, 16 * GIB)
    rules = limited(tenants={"ml": AccountSettings(most_gpus=0.5)})
    driver = Driver(small, large, configured=rules)
    driver.submit(of_tenant("a", gpu_memory=6 * GIB, compute=0.2))
    assert driver.job("a").hosts == ("h2",)


@pytest.mark.parametrize("gang", ["host", "cluster"])
@pytest.mark.parametrize(("most_gpus", "state"), [(1.5, "FAILED"), (2.0, "STARTING")])
def test_a_gang_counts_as_much_as_where_there_are_enough_gpus_for_it(gang: str, most_gpus: float, state: str) -> None:
    """Of the large GPUs it would hold less, but there is one only: else it would wait for ever, beside idle ones."""
    driver = Driver(
        host("h1", 1, 16 * GIB),
        host("h2", 2, 8 * GIB),
        configured=limited(tenants={"ml": AccountSettings(most_gpus=most_gpus)}),
    )
    driver.submit(of_tenant("a", gpus=2, gang=gang, gpu_memory=8 * GIB, compute=0.5))
    assert driver.state("a") == state
    if state == "FAILED":
        why = "the quota does not allow it: the job takes 2.00 GPUs, the limit of tenant ml is 1.5"
        assert driver.job("a").reason == why


def test_a_gang_waits_for_its_limit_where_there_are_enough_gpus_for_it() -> None:
    rules = limited(tenants={"ml": AccountSettings(most_gpus=2.25)})
    driver = Driver(host("h1", 1, 16 * GIB), host("h2", 3, 8 * GIB), configured=rules)
    driver.submit(of_tenant("a", gpu_memory=8 * GIB))
    driver.submit(of_tenant("b", gpus=2, gpu_memory=8 * GIB))
    told = f"tenant ml holds {driver.core.state.accounts.by_kind['tenant']['ml'].held:.2f} of 2.25 GPUs"
    assert queries.job(driver.core.state, "b").waits == f"{told}, the job takes 2.00"


def test_limits_can_change_while_everything_runs() -> None:
    driver = Driver(host(gpus=4))
    driver.submit(*(of_tenant(name) for name in "ab"))
    rules = SchedulingSettings(tenants={"ml": AccountSettings(most_jobs=1)})
    driver.do(SettingsChanged(PlacementSettings(), ResizeSettings(), rules))
    driver.submit(of_tenant("c"))
    assert started(driver) == {"a", "b"}, "nobody is stopped, nobody new starts"
    driver.do(SettingsChanged(PlacementSettings(), ResizeSettings()))
    assert driver.core.state.settings.scheduling == rules
    driver.do(SettingsChanged(PlacementSettings(), ResizeSettings(), SchedulingSettings()))
    assert started(driver) == {"a", "b", "c"}


@pytest.mark.parametrize("policy", ["cotenant", "exclusive", "static"])
def test_limits_hold_under_every_policy(policy: str) -> None:
    configured = settings(policy=policy).model_copy(
        update={"scheduling": SchedulingSettings(tenants={"ml": AccountSettings(most_gpus=1.0)})}
    )
    driver = Driver(host(gpus=4), configured=configured)
    driver.submit(*(of_tenant(f"j{number}") for number in range(6)))
    assert len(started(driver)) == (1 if policy == "exclusive" else 2)
    assert driver.core.state.accounts.by_kind["tenant"]["ml"].held == 1.0


def test_explanations_say_what_is_held() -> None:
    driver = Driver(host(), configured=limited(tenants={"ml": AccountSettings(most_gpus=3.0, most_jobs=5)}))
    driver.run(of_tenant("a"))
    assert "tenant ml holds 0.50 of 3 GPUs and 1 of 5 jobs" in queries.explain(driver.core.state, "a", 0.0).details


@pytest.mark.parametrize(
    ("queues", "queue", "accepted"),
    [({}, "any", True), ({"a": {}}, "a", True), ({"a": {}}, "default", True), ({"a": {}}, "b", False)],
)
def test_unknown_queues(queues: dict[str, Any], queue: str, accepted: bool) -> None:
    rules = Settings.model_validate({"scheduling": {"queues": queues}})
    if accepted:
        check_queue(spec("j", queue=queue), rules)
        return
    with pytest.raises(HintError, match="queue: 'b' is not accepted; give one of a, default"):
        check_queue(spec("j", queue=queue), rules)


@pytest.mark.parametrize("ask", ["submit", "plan"])
def test_a_queue_that_there_is_not_is_refused_with_those_that_there_are(ask: str, tmp_path: Path) -> None:
    cotenant = LocalCotenant(tmp_path, FakeHost(), settings=limited(queues={"night": AccountSettings()}))
    body: Any = {"command": ["true"], "hints": {"queue": "nite", "tenant": "anybody"}}
    try:
        answer = cotenant.http(
            "POST", "/jobs" if ask == "submit" else "/plan", body if ask == "submit" else {"jobs": [body]}
        )
        assert (answer.status_code, cotenant.client.jobs()) == (422, [])
        assert "queue: 'nite' is not accepted; give one of default, night" in answer.json()["detail"]
    finally:
        cotenant.close()


@pytest.mark.parametrize("terms", [{"most_jobs": 0}, {"most_jobs": 1}, {"most_gpus": 0.5}])
@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ({"gpus": 3, "compute": 0.1, "gpu_memory": GIB}, "gpus: 3 cannot be met on one host; give at most 2"),
        ({"gpu_memory": 9 * GIB, "compute": 0.1}, "gpu_memory: 9.0 GiB cannot be met"),
        ({"cpus": 5.0}, "cpus: 5 cannot be met"),
    ],
)
def test_what_nothing_could_ever_take_fails_at_once_although_its_tenant_has_enough(
    terms: dict[str, Any], hints: dict[str, Any], told: str
) -> None:
    """Else it would wait for ever: once the limit lets it start, it would count as one that could run before."""
    driver = Driver(host(gpus=2, cpus=4.0), configured=limited(tenants={"ml": AccountSettings(**terms)}))
    driver.submit(of_tenant("a", cpus=1.0))
    driver.submit(of_tenant("possible"), of_tenant("b", **({"gpu_memory": GIB, "compute": 0.1} | hints)))
    job = driver.job("b")
    if "gpu_memory" in hints and hints["gpu_memory"] > 8 * GIB and "most_gpus" in terms:
        assert job.reason.startswith("the quota does not allow it"), "a whole GPU is more than it may have"
    else:
        assert job.reason.startswith("no device of this cluster could ever take it"), job.reason
        assert told in job.reason
    assert (job.state, job.not_placeable, driver.state("possible")) == ("FAILED", True, "QUEUED")
    driver.do(SettingsChanged(PlacementSettings(), ResizeSettings(), SchedulingSettings()))
    assert driver.state("possible") == "STARTING"


@pytest.mark.parametrize("grows", [False, True])
def test_a_job_that_came_back_is_judged_anew(grows: bool) -> None:
    driver = Driver(configured=limited(tenants={"ml": AccountSettings(most_jobs=0)}))
    driver.submit(of_tenant("a", gpus=2, compute=0.1))
    driver.do(SuspendRequested("a", "x"), HostJoined(host(gpus=2 if grows else 1)))
    driver.do(ResumeRequested("a", "y"))
    assert driver.state("a") == ("QUEUED" if grows else "FAILED")
