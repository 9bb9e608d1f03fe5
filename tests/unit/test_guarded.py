"""The guarded forecaster: whatever goes wrong inside, forecasts come out, and they are honest."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from packing import GIB, profile, window

from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.guarded import ENOUGH_WINDOWS, FIRST_RETRY, KEPT_FAULTS, GuardedForecaster
from cotenant.forecasting.types import HORIZONS_S, DemandProfile, Forecast, Quantiles, Signature

NAN = Quantiles(*[math.nan] * 5)


class Primary(MixtureForecaster):
    """A mixture with faults that a test switches on; says 0.123 where it is sound, so that it is told apart."""

    name = "primary"

    def __init__(self) -> None:
        super().__init__()
        self.raises: dict[str, Exception] = {}
        self.spoils: Callable[[dict[str, Forecast]], object] = lambda said: said
        self.batches = 0
        self.primed: list[str] = []

    def _fail(self, what: str) -> None:
        if what in self.raises:
            raise self.raises[what]

    def prime(self, job_id: str, profile: DemandProfile) -> None:
        self._fail("prime")
        self.primed.append(job_id)
        super().prime(job_id, profile)

    def observe_batch(self, signatures: Sequence[Signature], foreseen: object = None) -> None:
        self.batches += 1
        self._fail("observe")
        super().observe_batch(signatures)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        self._fail("forecast")
        marked = {
            job_id: replace(each, peak_memory_bytes=123.0) for job_id, each in super().forecast_batch(job_ids).items()
        }
        return self.spoils(marked)  # type: ignore[return-value]

    def forget(self, job_id: str) -> None:
        self._fail("forget")
        super().forget(job_id)


class Stack:
    """A guarded forecaster over primaries that a test can reach, fed one window of every job per second."""

    def __init__(self, *jobs: str) -> None:
        self.made: list[Primary] = []
        self.guarded = GuardedForecaster(self.make)
        self.jobs = list(jobs) or ["a", "b"]
        self.now = 0

    def make(self) -> Primary:
        self.made.append(Primary())
        return self.made[-1]

    def play(self, seconds: int) -> None:
        for _ in range(seconds):
            self.guarded.observe_batch([window(self.now, 0.4, job_id=job) for job in self.jobs])
            self.now += 1

    def said(self) -> dict[str, Forecast]:
        return self.guarded.forecast_batch([*self.jobs, "never seen"])

    def by_primary(self) -> set[str]:
        return {job for job, each in self.said().items() if each.peak_memory_bytes == 123.0}


def test_all_is_well_while_all_is_well() -> None:
    stack = Stack()
    stack.play(40)
    assert stack.by_primary() == {"a", "b"}
    assert (stack.guarded.faults, stack.guarded.degraded, stack.guarded.note()) == ((), False, "")


@pytest.mark.parametrize("util", [None, 0.4])
@pytest.mark.parametrize("broken", [False, True])
def test_what_cannot_be_read_is_not_forecast_and_no_fault(util: float | None, broken: bool) -> None:
    stack = Stack()
    for second in range(ENOUGH_WINDOWS):
        memory = None if util else 5.0 * GIB
        stack.guarded.observe_batch([window(second, util, memory=memory, job_id=job) for job in stack.jobs])
    if broken:
        stack.made[0].raises["forecast"] = RuntimeError("broken")
    said = stack.said()
    assert set(said) == {"a", "b"}
    assert all((bool(each.util), bool(each.memory)) == (bool(util), not util) for each in said.values())
    assert len(stack.guarded.faults) == broken


def test_a_forecast_of_nothing_is_none() -> None:
    stack = Stack()
    stack.play(40)
    stack.made[0].spoils = lambda said: {job_id: replace(each, util={}, memory={}) for job_id, each in said.items()}
    assert stack.by_primary() == set()
    assert all(each.util and each.memory for each in stack.said().values())


@pytest.mark.parametrize("where", ["observe", "forecast", "prime", "forget"])
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyError("x"), FloatingPointError(), MemoryError(), AssertionError()], ids=repr
)
def test_whatever_the_primary_raises_the_simple_one_serves(where: str, error: Exception) -> None:
    stack = Stack()
    stack.play(20)
    stack.made[0].raises[where] = error
    stack.guarded.prime("c", profile())
    stack.guarded.forget("never seen")
    stack.play(1)
    assert set(stack.said()) == {"a", "b"}
    assert stack.by_primary() == set()
    assert stack.guarded.degraded
    assert type(error).__name__ in stack.guarded.note()
    (fault,) = stack.guarded.faults
    assert type(error).__name__ in fault.text
    assert fault.at_window in {40, 42}


def test_after_a_failure_a_fresh_primary_learns_and_takes_over() -> None:
    stack = Stack()
    stack.guarded.prime("a", profile())
    stack.play(50)
    stack.made[0].raises["observe"] = RuntimeError("broken")
    stack.play(FIRST_RETRY)
    assert len(stack.made) == 1
    assert "next try in 1 batches" in stack.guarded.note()
    stack.play(1)
    assert len(stack.made) == 2
    assert "learning" in stack.guarded.note()
    stack.play(ENOUGH_WINDOWS - 1)
    assert stack.by_primary() == set()
    stack.play(1)
    assert stack.by_primary() == {"a", "b"}
    assert stack.made[1].primed == ["a"]
    assert (stack.guarded.degraded, stack.guarded.note()) == (False, "")


def test_every_further_failure_waits_twice_as_long() -> None:
    made: list[int] = []
    stack = Stack()

    def broken() -> Primary:
        made.append(stack.now)
        raise OSError("no file")

    stack.guarded = GuardedForecaster(broken)
    stack.play(1000)
    assert [after - before for before, after in pairwise(made)] == [15, 32, 64, 128, 256]
    assert set(stack.said()) == {"a", "b"}
    assert "OSError: no file" in stack.guarded.note()


def spoiled(**changes: object) -> Callable[[dict[str, Forecast]], object]:
    return lambda said: {job: replace(each, **changes) if job == "a" else each for job, each in said.items()}  # type: ignore[arg-type]


WHOLE = Quantiles(0.1, 0.2, 0.3, 0.4, 0.5)


@pytest.mark.parametrize(
    "spoils",
    [
        pytest.param(spoiled(util=dict.fromkeys(HORIZONS_S, NAN)), id="util is no number"),
        pytest.param(spoiled(util=dict.fromkeys(HORIZONS_S, replace(WHOLE, p90=0.1))), id="util not in order"),
        pytest.param(spoiled(util=dict.fromkeys(HORIZONS_S, replace(WHOLE, p99=2.5))), id="util 250 %"),
        pytest.param(spoiled(util=dict.fromkeys(HORIZONS_S, replace(WHOLE, p10=-0.1))), id="util negative"),
        pytest.param(spoiled(util={1: WHOLE}), id="horizons missing"),
        pytest.param(spoiled(util=None), id="no util"),
        pytest.param(spoiled(util=dict.fromkeys(HORIZONS_S, 0.5)), id="numbers instead of quantiles"),
        pytest.param(spoiled(memory=dict.fromkeys(HORIZONS_S, replace(WHOLE, p99=math.inf))), id="memory infinite"),
        pytest.param(spoiled(memory=dict.fromkeys(HORIZONS_S, replace(WHOLE, p99=2.0**64))), id="memory absurd"),
        pytest.param(spoiled(peak_memory_bytes=math.nan), id="peak is no number"),
        pytest.param(spoiled(job_id="b"), id="of another job"),
        pytest.param(lambda said: said | {"a": None}, id="None"),
        pytest.param(lambda said: said | {"a": "text"}, id="text"),
        pytest.param(lambda said: {"b": said["b"]}, id="one missing"),
    ],
)
def test_a_forecast_that_cannot_be_is_replaced_for_that_job_only(
    spoils: Callable[[dict[str, Forecast]], object],
) -> None:
    stack = Stack()
    stack.play(40)
    stack.made[0].spoils = spoils
    assert stack.by_primary() == {"b"}
    assert set(stack.said()) == {"a", "b"}
    assert stack.guarded.faults[-1].jobs == ("a",)
    assert stack.guarded.degraded
    assert stack.guarded.note().startswith("the simple forecaster serves a: primary: ")
    stack.made[0].spoils = lambda said: said
    assert stack.by_primary() == {"a", "b"}
    assert (stack.guarded.degraded, stack.guarded.note()) == (False, "")


@pytest.mark.parametrize("nothing", [{}, None, 3], ids=repr)
def test_a_primary_that_says_nothing_is_no_loss(nothing: object) -> None:
    stack = Stack()
    stack.play(40)
    stack.made[0].spoils = lambda said: nothing
    assert set(stack.said()) == {"a", "b"}
    assert stack.guarded.degraded


def test_a_primary_that_is_slow_to_warm_up_is_waited_for_job_by_job() -> None:
    stack = Stack()
    stack.play(1)
    stack.made[0].spoils = lambda said: {job: each for job, each in said.items() if each.windows >= 20}
    stack.play(10)
    assert set(stack.said()) == {"a", "b"}
    assert stack.by_primary() == set()
    stack.play(10)
    assert stack.by_primary() == {"a", "b"}


def test_faults_are_bounded_and_counted() -> None:
    stack = Stack(*[f"job-{i}" for i in range(20)])
    stack.play(2)
    stack.made[0].spoils = lambda said: {job: replace(each, peak_memory_bytes=-1.0) for job, each in said.items()}
    for _ in range(100):
        assert len(stack.said()) == 20
    assert (len(stack.guarded.faults), stack.guarded.fault_count) == (KEPT_FAULTS, 100)
    assert len(stack.guarded.faults[0].jobs) == 8
    assert "and 12 more" in stack.guarded.note()
    for job in stack.jobs:
        stack.guarded.forget(job)
    assert stack.guarded.note() == ""


def test_another_primary_takes_over_without_a_gap() -> None:
    stack = Stack()
    stack.play(40)
    old = stack.made[0]
    stack.guarded.swap(stack.make)
    for _ in range(ENOUGH_WINDOWS - 1):
        stack.play(1)
        assert stack.by_primary() == {"a", "b"}
        assert stack.guarded._primary is old
    stack.play(1)
    assert stack.guarded._primary is stack.made[1]
    assert stack.by_primary() == {"a", "b"}
    assert stack.guarded.faults == ()
    seen = old.batches
    stack.play(1)
    assert old.batches == seen


def test_a_new_primary_is_not_kept_waiting_by_young_ended_or_silent_jobs() -> None:
    stack = Stack("a", "silent", "ends")
    stack.play(40)
    stack.guarded.swap(stack.make)
    stack.jobs = ["a", "young", "ends"]
    stack.play(ENOUGH_WINDOWS)
    stack.jobs = ["a", "young"]
    stack.guarded.forget("ends")
    stack.play(2 * ENOUGH_WINDOWS - 1)
    assert stack.guarded._primary is stack.made[0]
    stack.play(1)
    assert stack.guarded._primary is stack.made[1]


def test_without_jobs_another_primary_takes_over_at_once() -> None:
    stack = Stack("a")
    stack.guarded.swap(stack.make)
    assert stack.guarded._primary is stack.made[1]
    stack.play(5)
    stack.guarded.swap(stack.make)
    assert stack.guarded._primary is stack.made[1]
    stack.guarded.forget("a")
    assert stack.guarded._primary is stack.made[2]


@pytest.mark.parametrize("where", ["observe", "prime", "forget"])
def test_a_new_primary_that_fails_is_dropped_and_nobody_notices(where: str) -> None:
    stack = Stack()
    stack.guarded.prime("a", profile())
    stack.play(40)

    def faulty() -> Primary:
        primary = stack.make()
        primary.raises[where] = RuntimeError("broken")
        return primary

    stack.guarded.swap(faulty)
    stack.guarded.forget("b")
    stack.jobs = ["a"]
    stack.play(60)
    assert stack.guarded._primary is stack.made[0]
    assert (stack.guarded.degraded, stack.guarded.fault_count) == (False, 1)


def test_a_new_primary_also_heals_a_failure_that_comes_before_it_takes_over() -> None:
    stack = Stack()
    stack.play(40)
    stack.guarded.swap(stack.make)
    stack.play(5)
    stack.made[0].raises["observe"] = RuntimeError("broken")
    stack.play(ENOUGH_WINDOWS - 5)
    assert stack.guarded._primary is stack.made[1]
    assert len(stack.made) == 2


def test_even_the_simple_one_may_fail() -> None:
    class Simple(EwQuantileForecaster):
        def observe_batch(self, signatures: Sequence[Signature], foreseen: object = None) -> None:
            raise ValueError("broken")

        def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
            raise ValueError("broken")

        def forget(self, job_id: str) -> None:
            raise ValueError("broken")

    def none() -> Primary:
        raise RuntimeError("none")

    guarded = GuardedForecaster(none, Simple)
    guarded.observe(window())
    assert guarded.forecast("job") is None
    guarded.forget("job")


GOOD = [window(second, 0.4) for second in range(60)]
NOISE = random.Random(5)


def absurd(good: Signature) -> Signature:
    return replace(good, memory_bytes=18446744073707737660.0, memory_peak_bytes=18446744073707737660.0, util_mean=2.5)


def read_as(value: float | None) -> list[Signature]:
    return [replace(good, util_mean=value, memory_bytes=value, memory_peak_bytes=value) for good in GOOD]


def noise(*starts: int) -> list[Signature]:
    return [window(start + second, NOISE.random()) for start in starts for second in range(60)]


def failing() -> MixtureForecaster:
    raise RuntimeError("no primary")


BAD: dict[str, tuple[list[Signature], float | None]] = {
    "empty": ([], None),
    "a window without samples": ([replace(GOOD[0], samples=0)], None),
    "no numbers": (read_as(math.nan), None),
    "infinite": (read_as(math.inf), None),
    "nothing read": (read_as(None), None),
    "absurd": ([absurd(good) for good in GOOD], None),
    "a single sample": (GOOD[:1], 0.3),
    "duplicates of one": (GOOD[:1] * 60, 0.3),
    "one good, then absurd": ([GOOD[0], *map(absurd, GOOD[1:])], 0.3),
    "backwards": (GOOD[::-1], 0.3),
    "absurd times": ([GOOD[0], replace(GOOD[0], start_s=-1e12), replace(GOOD[0], start_s=math.inf)], 0.3),
    "three samples": (GOOD[:3], 0.2),
    "noise": (noise(0), 0.4),
    "noise, clock set back": (noise(0, -9000), 0.4),
    "noise, clock set forward": (noise(0, 10**9), 0.4),
    "an old version": ([replace(good, schema_version=0) for good in GOOD], 0.0),
    "constant": (GOOD, 0.0),
}


@pytest.mark.parametrize("factory", [MixtureForecaster, failing], ids=["mixture", "simple"])
@pytest.mark.parametrize(("windows", "least_width"), BAD.values(), ids=BAD)
def test_bad_input_gives_nothing_or_a_wide_interval(
    factory: Callable[[], MixtureForecaster], windows: list[Signature], least_width: float | None
) -> None:
    guarded = GuardedForecaster(factory)
    guarded.observe_batch(windows)
    said = guarded.forecast("job")
    if least_width is None:
        assert said is None
        return
    assert said is not None
    for horizon in HORIZONS_S:
        util, memory = said.util[horizon], said.memory[horizon]
        assert 0.0 <= util.p10 <= util.p50 <= util.p90 <= util.p95 <= util.p99 <= 1.0
        assert util.p99 - util.p10 >= least_width
        assert 0.0 <= memory.p10 <= memory.p50 <= memory.p99 <= 2.0 * GIB
        if said.windows <= 3:
            assert memory.p99 - memory.p10 >= 0.1 * GIB
    assert said.peak_memory_bytes >= GIB


@pytest.mark.parametrize("factory", [MixtureForecaster, failing], ids=["mixture", "simple"])
def test_an_abrupt_change_widens_the_interval_within_a_few_windows(factory: Callable[[], MixtureForecaster]) -> None:
    guarded = GuardedForecaster(factory)
    guarded.observe_batch([window(second, 0.2) for second in range(300)])
    before = guarded.forecast("job")
    guarded.observe_batch([window(second, 0.6) for second in range(300, 305)])
    after = guarded.forecast("job")
    assert before is not None
    assert after is not None
    for horizon in (1, 2, 5):
        assert before.util[horizon].p99 < 0.21
        assert after.util[horizon].p95 >= 0.59
    assert after.util[5].p99 - after.util[5].p10 > 0.1


def test_a_new_primary_that_fails_before_it_takes_over_is_told() -> None:
    class Failing(MixtureForecaster):
        def observe_batch(self, signatures: Any, foreseen: Any = None) -> None:
            raise RuntimeError("no weights")

    guarded = GuardedForecaster(MixtureForecaster)
    first = Signature("j", "g", 1.0, 1.0, 10, 0.5, 0.5, 1e9, 1e9, 1.0, 0.0, 0.0, 0, 1.0)
    guarded.observe(first)
    guarded.swap(Failing)
    guarded.observe(replace(first, start_s=2.0))
    assert "did not take over: RuntimeError: no weights" in guarded.note()
    assert not guarded.degraded
    guarded.swap(MixtureForecaster)
    assert guarded.note() == ""
