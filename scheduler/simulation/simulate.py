"""One call for a simulation, whichever engine decides."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.models import ModelSource, first_models
from cotenant.scheduler.simulation.desk import BaselinePolicy, Desk
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.policies.gavel import Gavel
from cotenant.scheduler.simulation.remarks import CORE, remarks
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.sensing import Sensing
from cotenant.scheduler.simulation.shell import CoreShell, Delays
from cotenant.scheduler.simulation.truth import NoInterference, Truth
from cotenant.scheduler.simulation.workload import Cluster, Trace
from cotenant.scheduler.simulation.world import Costs, Faults, World

COLLECT_AT = (50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The same work for every policy.

    Attributes:
        trace: The jobs.
        cluster: The GPUs.
        truth: What happens when jobs share.
        costs: Of suspending and moving.
        faults: What breaks.
        look: Called with the world whenever jobs have ended.
    """

    trace: Trace
    cluster: Cluster
    truth: Truth = field(default_factory=NoInterference)
    costs: Costs = field(default_factory=Costs)
    faults: Faults = field(default_factory=Faults)
    look: Callable[[World], None] | None = None

    @property
    def remarks(self) -> list[str]:
        """What whoever reads figures of it must know of the input."""
        return remarks(self.trace, self.cluster, self.truth)

    def world(self) -> World:
        """Return a new world in which nothing has happened yet."""
        return World(self.trace, self.cluster, self.truth, self.costs, self.faults)


def policy_names() -> tuple[str, ...]:
    """Return the names that ``simulate`` accepts: the shipped core, then the baselines."""
    return (CORE, *POLICIES)


def baseline(scenario: Scenario, policy: BaselinePolicy) -> Result:
    """Simulate a baseline policy.

    Raises:
        SimulationError: The policy did what is impossible, or the simulation came to a standstill.
    """
    begun = time.process_time()
    world = scenario.world()
    with _few_collections():
        world.run(Desk(world, policy), scenario.look)
    return Result(policy.name, world, time.process_time() - begun, {})


def shipped_core(
    scenario: Scenario,
    *,
    settings: Settings | None = None,
    models: ModelSource = first_models,
    sensing: Sensing | None = None,
    delays: Delays | None = None,
    checked: bool = False,
    known_programs: bool = False,
    name: str = CORE,
) -> Result:
    """Simulate the scheduler that ships; the arguments are those of ``CoreShell``.

    Raises:
        SimulationError: The simulation came to a standstill.
    """
    begun = time.process_time()
    world = scenario.world()
    shell = CoreShell(
        world,
        settings=settings,
        models=models,
        sensing=sensing,
        delays=delays,
        checked=checked,
        known_programs=known_programs,
    )
    with _few_collections():
        world.run(shell, scenario.look)
    return Result(name, world, time.process_time() - begun, shell.notes)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Have garbage looked for seldom: a simulation keeps most of what it makes, and looking costs a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(
    scenario: Scenario,
    policy: str,
    *,
    models: ModelSource = first_models,
    seed: int = 0,
    settings: Settings | None = None,
    rates: Truth | None = None,
) -> Result:
    """Simulate the policy of that name.

    Args:
        scenario: The work.
        policy: One of ``policy_names``.
        models: What the shipped core predicts with.
        seed: Of the measurement noise that the shipped core sees.
        settings: Of the shipped core.
        rates: The throughputs that the policy ``gavel`` is told; None = all GPU types run alike, sharing is free.

    Raises:
        ValueError: No policy has that name.
        SimulationError: See ``baseline``.
    """
    if policy == CORE:
        return shipped_core(scenario, settings=settings, models=models, sensing=Sensing(seed=seed))
    make = POLICIES.get(policy)
    if make is None:
        raise ValueError(f"policy: {policy!r} is not accepted; give one of {', '.join(policy_names())}")
    return baseline(scenario, Gavel(rates) if policy == Gavel.name else make())
