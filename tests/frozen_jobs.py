"""Clusters with one job that runs, is frozen, or is about to go on."""

from __future__ import annotations

from scheduling import GIB, Driver, host, spec

from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import (
    Event,
    JobFrozen,
    ResumeRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.core.reconcile import InventoryItem, reconcile

FROZEN = JobFrozen("h1", "a", 1, 0, 5 * GIB)
SUSPEND = SuspendRequested("a", "asked by somebody")


def whole(job_id: str, **hints: object) -> JobSpec:
    """A job that fills a GPU of ``host`` and may be frozen."""
    return spec(job_id, **({"gpu_memory": 8 * GIB, "compute": 1.0, "checkpoint": "driver"} | hints))


def cluster(gpus: int = 1, hosts: int = 1) -> Driver:
    return Driver(*(host(f"h{number + 1}", gpus, checkpoints=True) for number in range(hosts)))


def running(gpus: int = 1, hosts: int = 1, **hints: object) -> Driver:
    """A cluster on which job a runs and may be frozen."""
    driver = cluster(gpus, hosts)
    driver.run(whole("a", **hints))
    driver.do(Tick(), after_s=50.0)
    assert driver.job("a").freezes
    return driver


def frozen(gpus: int = 1, hosts: int = 1, **hints: object) -> Driver:
    """The same, where it has been frozen, and is suspended."""
    driver = running(gpus, hosts, **hints)
    driver.do(SUSPEND)
    driver.do(FROZEN)
    assert (driver.state("a"), driver.job("a").frozen is not None) == ("SUSPENDED", True)
    return driver


def thawing(**hints: object) -> Driver:
    """The same, where it is about to go on."""
    driver = frozen(**hints)
    driver.do(ResumeRequested("a", "asked"))
    return driver


def inventory(driver: Driver, *items: InventoryItem) -> tuple[list[Event], list[object]]:
    events, commands = reconcile(driver.core.state, "h1", items, driver.now)
    return events, list(commands)


def explained(driver: Driver) -> str:
    told = queries.explain(driver.core.state, "a", driver.now)
    return "\n".join((told.summary, *told.details))
