"""What the shipped core is told of a simulated cluster, and what it is not: every event it gets is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from simulating import halves, job, scenario

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.commands import Command
from cotenant.scheduler.core.events import Event, EvidenceGathered, JobSubmitted, MeasurementsReported
from cotenant.scheduler.core.models import only
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.sensing import Sensing
from cotenant.scheduler.simulation.shell import CoreShell
from cotenant.scheduler.simulation.simulate import Scenario
from cotenant.scheduler.simulation.truth import PairTable, Truth
from cotenant.scheduler.simulation.workload import GIB, TraceJob, mixed_cluster, trace_of

Told = list[tuple[float, Event]]
KNOWN = only(TablePredictor(halves("light", "other", n=0.9)))
PLACEMENT = Settings().placement
WHOLE_GPUS = Settings(placement=PLACEMENT.model_copy(update={"policy": "exclusive"}))


def light(job_id: str, submit: float = 0.0, length: float = 100.0, workload: str = "light") -> TraceJob:
    return job(job_id, submit, length, workload=workload, util=0.2, memory_bytes=2 * GIB, estimate_s=50.0)


def told(work: Scenario, **how: Any) -> Told:
    """All that the core is told in a simulation, with the time."""
    world = work.world()
    shell = CoreShell(world, **({"models": KNOWN} | how))
    events: Told = []
    handle = shell.core.handle

    def recorded(batch: Sequence[Event], now: float) -> list[Command]:
        events.extend((now, event) for event in batch)
        return handle(batch, now)

    shell.core.handle = recorded  # type: ignore[method-assign]
    world.run(shell)
    return events


def of(kind: type[Event], events: Told) -> list[tuple[float, Any]]:
    return [(at, event) for at, event in events if isinstance(event, kind)]


def test_the_core_is_told_no_run_time() -> None:
    """Jobs that are otherwise equal: until the first of them ends nothing that it is told differs."""
    jobs = [("a", 0.0), ("b", 50.0), ("c", 70.0)]
    lengths = (300.0, 900.0)
    short, long = (
        [
            (at, event)
            for at, event in told(scenario([light(*each, length) for each in jobs], truth=halves("light", n=0.9)))
            if at < 300.0
        ]
        for length in lengths
    )
    assert short == long
    assert len(of(JobSubmitted, short)) == 3
    assert len(of(MeasurementsReported, short)) > 3


@pytest.mark.parametrize(
    "other",
    [
        PairTable({("light", "other"): 0.2, ("other", "light"): 0.3}, default=0.9),
        PairTable({}, default=0.1),
        PairTable({}, solo={("light", "new"): 9.0, ("other", "new"): 0.1}, default=0.9),
        PairTable({}, speeds={"newer": 0.1}, default=0.9),
    ],
)
def test_the_core_is_told_nothing_of_the_truth_that_does_not_happen(other: Truth) -> None:
    """On one GPU, one job at a time: what pairs would do, and what jobs do elsewhere, makes no difference."""
    jobs = [light("a"), light("b", 50.0, workload="other"), light("c", 70.0)]
    cluster = mixed_cluster((("old", 1),))
    plain, changed = (
        told(Scenario(trace_of("t", jobs), cluster, truth), settings=WHOLE_GPUS)
        for truth in (PairTable({}, default=0.9), other)
    )
    assert plain == changed
    assert len(of(JobSubmitted, plain)) == 3


def test_the_core_is_told_what_happens_only_after_it_was_measured() -> None:
    """Two truths for the pair: the same until both have run together for 6 s and the report took 1 s."""
    jobs = [light("a", length=400.0), light("b", 50.0, 400.0)]
    good, bad = (told(scenario(jobs, truth=halves("light", n=n))) for n in (0.9, 0.5))
    differ = [at for (at, one), (_, other) in zip(good, bad, strict=False) if one != other]
    together = max(at for at, event in good if type(event).__name__ == "JobStarted")
    assert min(differ) == together + 7.0


def test_measurements_are_noisy_by_three_percent_and_seeded() -> None:
    jobs = [light(f"j{index}", 100.0 * index, 90.0, f"w{index}") for index in range(60)]
    rates, utils = ([], [])
    for _, event in of(MeasurementsReported, told(scenario(jobs))):
        rates += [each.signature.step_rate for each in event.measurements]
        utils += [each.profile.util_mean / 0.2 for each in event.measurements]
    for values in (rates, utils):
        assert len(values) >= 120
        assert np.mean(values) == pytest.approx(1.0, abs=0.01)
        assert np.std(values) == pytest.approx(0.03, abs=0.006)
    same, again, another = (told(scenario(jobs[:3]), sensing=Sensing(seed=seed)) for seed in (1, 1, 2))
    assert same == again != another
    exact = of(MeasurementsReported, told(scenario(jobs[:3]), sensing=Sensing(noise=0.0)))
    assert {each.signature.step_rate for _, event in exact for each in event.measurements} == {1.0}


def test_what_a_pair_does_is_told_as_evidence_after_a_minute_together() -> None:
    events = told(scenario([light("a", length=400.0), light("b", 50.0, 400.0)], truth=halves("light", n=0.6)))
    together = max(at for at, event in events if type(event).__name__ == "JobStarted")
    ((at, evidence),) = of(EvidenceGathered, events)
    assert at == together + 61.0
    assert [each.throughput for each in evidence.observations] == pytest.approx([0.6, 0.6], rel=0.15)
    never = told(scenario([light("a", length=400.0), light("b", 50.0, 400.0)]), sensing=Sensing(evidence_s=None))
    assert not of(EvidenceGathered, never)
