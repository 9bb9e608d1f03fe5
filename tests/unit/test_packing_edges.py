"""Edges of packing that users of sharing schedulers run into, as tables, through the whole core."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from scheduling import GIB, Driver, host, profile, settings, spec

from cotenant.placement.explain import explain
from cotenant.scheduler.core.events import HostJoined, JobExited, JobSubmitted, StartFailed, Tick
from cotenant.scheduler.core.model import JobSpec

MIB = 1 << 20


def started(driver: Driver) -> Counter[str]:
    """Jobs per GPU."""
    leases = [job.lease for job in driver.core.state.jobs.values() if job.lease is not None]
    return Counter(share.gpu_id for lease in leases for share in lease.shares)


def sharing(job_id: str, memory: int, compute: float, **hints: object) -> JobSpec:
    return spec(job_id, **({"gpu_memory": memory, "compute": compute, "max_slowdown": 100.0} | hints))


def test_sixteen_halves_on_eight_gpus() -> None:
    driver = Driver(host(gpus=8))
    driver.submit(*(sharing(f"j{number}", GIB, 0.5) for number in range(16)))
    assert started(driver) == {f"h1-{index}": 2 for index in range(8)}
    for index in range(8):
        shares = [resident.share.compute for resident in driver.core.state.view(f"h1-{index}").residents]
        assert shares == [0.5, 0.5]


def test_sixteen_halves_one_after_another_leave_nothing_over() -> None:
    driver = Driver(host(gpus=8), configured=settings(packing_bias=1.0))
    for number in range(16):
        driver.submit(sharing(f"j{number}", GIB, 0.5))
    assert set(started(driver).values()) == {2}


def test_twenty_four_small_memories() -> None:
    driver = Driver(host(memory=46_068 * MIB), configured=settings(max_jobs_per_gpu=48))
    driver.submit(*(sharing(f"j{number}", 2000 * MIB, 0.02, max_slowdown=100.0) for number in range(24)))
    assert started(driver) == {"h1-0": 23}
    (waiting,) = driver.core.state.queued
    assert explain(driver.core.state.refused[waiting]) == "1 GPU: 1.9 GiB short"


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c", "host"])))
@pytest.mark.parametrize("together", [False, True])
def test_three_halves_of_memory_under_any_interleaving(order: tuple[str, ...], together: bool) -> None:
    driver = Driver()
    events = [
        HostJoined(host(memory=24 * GIB)) if name == "host" else JobSubmitted(sharing(name, 12 * GIB, 0.3))
        for name in order
    ]
    if together:
        driver.do(*events)
    else:
        for event in events:
            driver.do(event)
    assert started(driver) == {"h1-0": 2}
    first, second = [name for name in order if name != "host"][:2]
    assert {job_id for job_id, job in driver.core.state.jobs.items() if job.lease} == {first, second}
    driver.do(JobExited(first, 1, "h1", 0))
    assert started(driver) == {"h1-0": 2}


def test_fragments_that_do_not_add_up() -> None:
    """Two GPUs have 0.6 left each; 0.8 goes to the other node, and waits without one."""
    driver = Driver(host("h1", gpus=2), configured=settings(packing_bias=0.0))
    driver.submit(*(sharing(f"r{number}", GIB, 0.4) for number in range(2)))
    assert set(started(driver).values()) == {1}
    driver.submit(sharing("x", GIB, 0.8))
    assert explain(driver.core.state.refused["x"]) == "2 GPUs: compute 0.80 wanted, 0.60 free"
    driver.do(HostJoined(host("h2")))
    assert driver.job("x").hosts == ("h2",)


def test_four_free_but_at_most_two_on_one_host() -> None:
    hosts = [host(name, gpus=8) for name in ("h1", "h2", "h3")]
    driver = Driver(*hosts)
    for each, count in zip(hosts, (7, 6, 7), strict=True):
        for number in range(count):
            driver.submit(replace(spec(f"{each.host_id}-r{number}", isolation="hard"), pinned_host=each.host_id))
    driver.submit(spec("x", gpus=4, isolation="hard"))
    told = explain(driver.core.state.refused["x"])
    assert told.startswith("wants 4 GPUs, 4 free; wants 4 GPUs on one host, at most 2 free on one host")
    driver.submit(spec("y", gpus=4, isolation="hard", gang="cluster"))
    assert sorted(driver.job("y").hosts) == ["h1", "h2", "h3"]


def test_a_doomed_job_backs_off_while_others_start() -> None:
    driver = Driver(host())
    driver.submit(spec("doomed", isolation="hard", priority="high"))
    driver.submit(spec("other", isolation="hard", priority="low"))
    tries = 0
    while driver.state("doomed") != "FAILED":
        if driver.state("doomed") == "STARTING":
            tries += 1
            epoch = driver.job("doomed").epoch
            driver.do(StartFailed("doomed", epoch, "h1", "no such image", retry=True))
            assert driver.state("other") in {"STARTING", "RUNNING", "SUCCEEDED"}
        elif driver.state("other") == "STARTING":
            driver.do(JobExited("other", 1, "h1", 0))
        else:
            driver.do(Tick(), after_s=2.0)
    assert (tries, driver.state("other")) == (3, "SUCCEEDED")


def test_an_empty_cluster_and_a_job_larger_than_the_cluster() -> None:
    driver = Driver()
    driver.submit(spec("a", gpus=4096))
    assert driver.state("a") == "PENDING"
    driver.do(HostJoined(host()))
    assert driver.job("a").not_placeable


def test_gpus_that_are_all_different() -> None:
    driver = Driver(*(host(f"h{size}", memory=size * GIB) for size in (4, 8, 16)))
    for need in (14, 6, 3):
        driver.submit(spec(f"m{need}", gpu_memory=need * GIB, isolation="hard"))
    assert {job_id: job.hosts for job_id, job in driver.core.state.jobs.items()} == {
        "m14": ("h16",),
        "m6": ("h8",),
        "m3": ("h4",),
    }


def test_the_same_id_twice_is_one_job() -> None:
    driver = Driver(host())
    driver.core.state.learn("fp-a", profile())
    driver.submit(spec("a"), spec("a"))
    assert started(driver) == {"h1-0": 1}
