"""What jobs typically ask for: learnt from those that come, the worth of free parts, and where jobs go by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import GIB, SETTINGS, gpu, profile, request, resident
from scheduling import Driver, half, host

from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile, ThroughputPrediction
from cotenant.placement.engine import policy
from cotenant.placement.fleet import Fleet
from cotenant.placement.mix import MEMORY_OF, MOST_KINDS, WHOLE, Counts, Kind, Mix, worth_of
from cotenant.placement.room import free_parts, kind_of
from cotenant.placement.types import GpuView, Placement, Request
from cotenant.scheduler.core.state import State


class Undisturbed:
    """Nobody slows anybody down."""

    name = "undisturbed"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        return [ThroughputPrediction(1.0, 1.0, 1.0, "alone")] * len(members)


@pytest.mark.parametrize(
    ("parts", "worth"),
    [
        ({}, {1: 0.0, 99: 0.0, 100: 1.0}),
        ({50: 1.0}, {49: 0.0, 50: 0.5, 99: 0.5, 100: 1.0}),
        ({33: 5.0}, {33: 1 / 3, 66: 2 / 3, 98: 2 / 3}),
        ({65: 1.0, 32: 9.0}, {65: 2 / 3, 32: 1 / 3, 64: 2 / 3}),
        ({81: 9.0, 16: 1.0}, {81: 1.0, 16: 0.0}),
        ({81: 1.0, 16: 9.0}, {81: 5 / 6, 16: 1 / 6}),
    ],
    ids=["nothing", "halves", "thirds", "pairs", "gaps for all small ones", "more small ones than gaps"],
)
def test_what_parts_are_worth(parts: dict[int, float], worth: dict[int, float]) -> None:
    found = worth_of(parts)
    assert {part: found[part] for part in worth} == pytest.approx(worth, abs=1e-5)


@settings(max_examples=15)
@given(st.dictionaries(st.integers(5, 99), st.floats(0.1, 100.0), max_size=4))
def test_more_is_worth_no_less_and_a_whole_no_less_than_its_parts(parts: dict[int, float]) -> None:
    worth = worth_of(parts)
    assert np.all(np.diff(worth) >= 0.0)
    assert (worth[0], worth[WHOLE]) == (0.0, 1.0)
    for part in range(1, WHOLE):
        assert worth[part] + worth[WHOLE - part] <= 1.0 + 1e-5


def test_old_jobs_count_less_and_rare_kinds_are_forgotten() -> None:
    mix = Mix()
    assert mix.demand() is None
    for _ in range(100):
        mix.note(Kind(1, 40, 0))
    for number in range(MEMORY_OF):
        mix.note(Kind(1, 60, 2000 * (number % (MOST_KINDS + 10))))
    counts = mix.counts()
    assert len(counts.kinds) == MOST_KINDS
    assert counts.jobs == MEMORY_OF + 100
    weights = {kind: count / counts.unit for kind, count in counts.kinds}
    assert weights[Kind(1, 40, 0)] == pytest.approx(100 / np.e, rel=0.05)


def test_what_is_remembered_is_enough_to_go_on() -> None:
    mix = Mix()
    for number in range(100):
        mix.note(Kind(1, 10 + 19 * (number % 5), 2000))
    again = Mix(mix.counts())
    for each in (mix, again):
        each.note(Kind(1, 55, 4000))
    assert again.counts() == mix.counts()
    found, want = again.demand(), mix.demand()
    assert found is not None
    assert want is not None
    assert np.array_equal(found.worth, want.worth)
    assert np.array_equal(found.common, want.common)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (request(compute=0.3, memory=GIB, known=profile(0.2)), Kind(1, 30, 0)),
        (request(compute=0.3, memory=12 * GIB, known=profile(0.2)), Kind(1, 75, 0)),
        (request(known=profile(0.6, memory=GIB), cpus=3.0), Kind(1, 60, 4000)),
        (request(compute=0.3, exclusive=True, cpus=2.0), Kind(1, 100, 2000)),
        (request(gpus=4, compute=0.3, cpus=0.5), Kind(4, 100, 2000)),
        (request(known=UNKNOWN_PROFILE), Kind(1, 100, 0)),
        (request(known=profile(0.2, memory=None)), Kind(1, 100, 0)),
    ],
)
def test_which_jobs_a_job_is_like(asked: Request, kind: Kind) -> None:
    assert kind_of(asked, 16 * GIB) == kind


def test_what_is_free_of_gpus() -> None:
    views = [
        gpu("idle"),
        gpu("promised", resident("a", util=0.1, min_compute=0.47)),
        gpu("used", resident("a", util=0.7, min_compute=0.1)),
        gpu("full", resident("a", memory=16 * GIB)),
        gpu("taken", resident("a", exclusive=True)),
        gpu("lost", schedulable=False),
    ]
    assert free_parts(Fleet(views)).tolist() == [100, 53, 30, 0, 0, 0]


def place(views: Sequence[GpuView], asked: Request, *kinds: Kind) -> set[str]:
    fleet, mix = Fleet(views), Mix()
    for kind in kinds:
        mix.note(kind)
    fleet.demand = mix.demand()
    answer = policy("cotenant").place(asked, fleet, Undisturbed(), SETTINGS, 99)
    assert isinstance(answer, Placement)
    return {share.gpu_id for share in answer.shares}


def part(size: float, **asked: float) -> Request:
    return request(known=profile(size), memory=GIB // 8, compute=size, cpus=asked.get("cpus", 0.0))


def test_a_job_goes_where_it_costs_the_others_least() -> None:
    """47 % beside 47 %, rather than where it would take the place of 81 % or of a whole GPU."""
    views = [
        gpu("idle"),
        gpu("small", resident("a", util=0.15, min_compute=0.15)),
        gpu("half", resident("b", util=0.47, min_compute=0.47)),
    ]
    kinds = [Kind(1, 47, 0), Kind(1, 81, 0), Kind(1, 100, 0)]
    assert place(views, part(0.47), *kinds) == {"half"}
    assert place(views, part(0.81), *kinds) == {"small"}


def test_processors_decide_between_hosts_with_equal_gpus() -> None:
    """A job that needs few leaves the host with many to those that need many; and the other way round."""
    views = [gpu("few", host="few", cpus=4.0), gpu("many", host="many", cpus=64.0)]
    kinds = [Kind(1, 100, 2000), *[Kind(1, 100, 16000)] * 3]
    assert place(views, request(exclusive=True, cpus=2.0), *kinds) == {"few"}
    assert place(views, request(exclusive=True, cpus=16.0), *kinds) == {"many"}


def test_gangs_leave_hosts_whole() -> None:
    views = [gpu(f"a{n}", host="a") for n in range(4)] + [gpu(f"b{n}", host="b") for n in range(2)]
    kinds = [Kind(4, 100, 0), Kind(2, 100, 0)]
    assert place(views, request(gpus=2, exclusive=True), *kinds) == {"b0", "b1"}


def test_the_core_learns_only_once_jobs_say_what_processors_they_need() -> None:
    driver = Driver(host(gpus=4, cpus=16.0))
    driver.submit(half("a"), half("b"))
    assert driver.core.state.mix.counts() == Counts()
    assert driver.core.state.fleet().demand is None
    driver.submit(half("c", cpus=3.0), half("d"), half("e", gpus=2, cpus=1.0))
    state = driver.core.state
    assert [kind for kind, _ in state.mix.counts().kinds] == [Kind(1, 40, 4000), Kind(1, 40, 0), Kind(2, 100, 2000)]
    again = State.from_json(state.to_json())
    assert again.to_json() == state.to_json()
    assert again.mix.counts() == state.mix.counts()
