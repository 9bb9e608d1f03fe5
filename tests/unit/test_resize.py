"""Usage-based resizing of one GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, MIB, gpu, profile, resident

from cotenant.configs.settings import ResizeSettings
from cotenant.forecasting.types import Reading
from cotenant.placement.resize import Resized, ResizeMemory, UsageSignal, resize_gpu
from cotenant.placement.types import GpuView, Share

SETTINGS = ResizeSettings()
PATIENCE = int(SETTINGS.patience_s)
Signals = Mapping[str, UsageSignal]


def signal(
    p95: float = 0.3,
    throttled: Reading = 0.0,
    p99: Reading = None,
    peak: Reading = None,
    measured: bool = True,
    *,
    used: Reading = None,
) -> UsageSignal:
    return UsageSignal(p95, p95 if used is None else used, throttled, p99, peak, measured=measured)


class Loop:
    """One GPU resized once a second, as the core does it."""

    def __init__(self, view: GpuView, wanted: bool = False) -> None:
        self.view = view
        self.memory = ResizeMemory()
        self.now = 1000.0
        self.wanted = wanted

    def tick(self, signals: Signals) -> Resized:
        result = resize_gpu(
            self.view,
            signals,
            self.memory,
            self.now,
            settings=SETTINGS,
            memory_margin=0.1,
            memory_wanted=self.wanted,
        )
        self.memory = result.memory
        changed = tuple(replace(r, share=result.shares.get(r.job_id, r.share)) for r in self.view.residents)
        self.view = replace(self.view, residents=changed)
        assert sum(r.share.compute for r in changed) <= 1.0
        assert sum(r.share.memory_bytes for r in changed) <= self.view.memory_bytes
        self.now += 1.0
        return result

    def ticks(self, count: int, signals: Signals) -> list[Resized]:
        return [self.tick(signals) for _ in range(count)]

    def compute(self) -> dict[str, float]:
        return {r.job_id: r.share.compute for r in self.view.residents}

    def reserved(self) -> dict[str, int]:
        return {r.job_id: r.share.memory_bytes // MIB for r in self.view.residents}


def two(a: float = 0.5, b: float = 0.5, **changes: float) -> GpuView:
    first = resident("a", compute=a, **changes)  # type: ignore[arg-type]
    return gpu("g0", first, resident("b", compute=b))


@pytest.mark.parametrize("p95", [0.0, 0.05, 0.5, 1.0])
def test_a_lone_job_has_the_whole_gpu(p95: float) -> None:
    loop = Loop(gpu("g0", resident("a", compute=0.97)))
    loop.tick({"a": signal(p95)})
    assert loop.compute() == {"a": 1.0}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param(0.2, 0.2, 0.5, id="leftover by need"),
        pytest.param(0.1, 0.3, 0.25, id="leftover in proportion"),
        pytest.param(0.9, 0.2, 0.79, id="the light one gets what it needs, the heavy one the rest"),
        pytest.param(0.9, 0.9, 0.5, id="both want more than half: equal parts"),
        pytest.param(0.0, 0.9, 0.05, id="never below the least share"),
    ],
)
def test_steady_division(a: float, b: float, expected: float) -> None:
    loop = Loop(two())
    loop.ticks(2 * PATIENCE + 2, {"a": signal(a), "b": signal(b)})
    assert loop.compute()["a"] == pytest.approx(expected, abs=SETTINGS.min_change)
    assert sum(loop.compute().values()) == 1.0


def test_weights_decide_under_contention() -> None:
    loop = Loop(two(weight=2.0))
    loop.ticks(8, {"a": signal(0.9), "b": signal(0.9)})
    assert loop.compute()["a"] == pytest.approx(2 / 3, abs=1e-3)


def test_a_guarantee_is_kept_against_any_demand() -> None:
    loop = Loop(gpu("g0", resident("a", compute=0.6, min_compute=0.6), resident("b", compute=0.4, weight=2.0)))
    loop.ticks(20, {"a": signal(0.0), "b": signal(1.0, throttled=0.5)})
    assert loop.compute()["a"] >= 0.6 - 1 / 4096
    assert sum(loop.compute().values()) == 1.0


def test_growing_is_immediate_and_shrinking_takes_patience() -> None:
    calm, busy = {"a": signal(0.2), "b": signal(0.2)}, {"a": signal(0.7), "b": signal(0.2)}
    loop = Loop(two())
    loop.ticks(PATIENCE + 2, calm)
    loop.tick(busy)
    grown = loop.compute()["a"]
    assert grown == pytest.approx(0.77, abs=0.01)
    before_patience = loop.ticks(PATIENCE, calm)
    assert all(not result.shares for result in before_patience)
    loop.tick(calm)
    assert loop.compute()["a"] == pytest.approx(0.5, abs=0.01)


def test_a_dip_shorter_than_patience_leaves_no_trace() -> None:
    steady, dip = {"a": signal(0.7), "b": signal(0.2)}, {"a": signal(0.1), "b": signal(0.2)}
    loop = Loop(two())
    loop.ticks(PATIENCE + 2, steady)
    for _ in range(5):
        assert not any(r.shares for r in [*loop.ticks(PATIENCE - 1, dip), *loop.ticks(1, steady)])


def test_what_is_not_used_is_lent_to_who_is_short_and_given_back_at_once() -> None:
    """Both are forecast to want nearly all; "a" is quiet for a while, then not."""
    loop = Loop(two())
    busy = {"a": signal(0.9, 0.4, used=0.5), "b": signal(0.9, 0.4, used=0.5)}
    loop.ticks(PATIENCE + 2, busy)
    assert loop.compute() == {"a": 0.5, "b": 0.5}
    quiet = {"a": signal(0.9, used=0.1), "b": signal(0.9, 0.4, used=0.5)}
    results = loop.ticks(4, quiet)
    assert [bool(result.shares) for result in results] == [False, False, True, False]
    assert "lends what it does not use" in results[2].reasons["a"]
    assert loop.compute()["a"] == pytest.approx(0.125, abs=0.02)
    loop.tick({**quiet, "a": signal(0.9, 0.7, used=0.12)})
    assert loop.compute() == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    "quiet",
    [
        pytest.param({"a": signal(0.4, used=0.1), "b": signal(0.4, used=0.4)}, id="there is enough for everybody"),
        pytest.param({"a": signal(0.9, used=math.nan), "b": signal(0.9, 0.4)}, id="not known what it uses"),
        pytest.param({"a": signal(0.9, 0.1, used=0.1), "b": signal(0.9, 0.4)}, id="it is held back itself"),
    ],
)
def test_nothing_is_lent(quiet: Signals) -> None:
    loop = Loop(two())
    loop.ticks(2 * PATIENCE, quiet)
    assert loop.compute()["a"] == pytest.approx(0.5, abs=0.01)


def test_a_guarantee_is_not_lent() -> None:
    loop = Loop(gpu("g0", resident("a", compute=0.5, min_compute=0.4), resident("b", compute=0.5)))
    loop.ticks(PATIENCE, {"a": signal(0.9, used=0.0), "b": signal(0.9, 0.4)})
    assert loop.compute()["a"] >= 0.4 - 1 / 4096


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_job_held_back_gets_what_it_needs_within_bounded_time(share: float) -> None:
    loop = Loop(two(share, 1.0 - share))
    held_back, calm = {"a": signal(0.1, throttled=0.3), "b": signal(0.1)}, {"a": signal(0.1), "b": signal(0.1)}
    loop.ticks(PATIENCE + 1, {**held_back, "b": signal(0.1)})  # until the neighbour's fall is believed
    loop.ticks(math.ceil(math.log(0.75 / share, 1.25)), held_back)
    assert loop.compute()["a"] >= 0.75
    loop.tick(calm)
    assert loop.compute()["a"] >= 0.75


@pytest.mark.parametrize(
    ("share", "throttled", "expected"),
    [
        pytest.param(0.2, 0.8, 1.0, id="busy all the time"),
        pytest.param(0.2, 0.6, 0.5, id="as much as it would use"),
        pytest.param(0.2, 0.1, 0.25, id="a little: a step more"),
        pytest.param(0.05, 1.0, 1.0, id="did not get to run at all"),
    ],
)
def test_a_job_held_back_is_planned_with_what_it_would_use(share: float, throttled: float, expected: float) -> None:
    loop = Loop(two(share, 1.0 - share))
    loop.tick({"a": signal(0.1, throttled), "b": signal(0.1)})
    assert loop.memory.held["a"].demand == pytest.approx(expected)


def test_small_changes_are_ignored() -> None:
    loop = Loop(two())
    loop.ticks(PATIENCE + 2, {"a": signal(0.40), "b": signal(0.40)})
    assert not any(r.shares for r in loop.ticks(20, {"a": signal(0.42), "b": signal(0.40)}))


def test_shares_that_add_up_to_too_much_are_corrected_at_once() -> None:
    loop = Loop(two(0.52, 0.5))
    result = loop.tick({"a": signal(0.9), "b": signal(0.9)})
    assert list(result.shares) == ["a"]
    assert loop.compute() == {"a": 0.5, "b": 0.5}


def test_shrinking_shares_come_first() -> None:
    loop = Loop(gpu("g0", resident("a", compute=0.1), resident("b", compute=0.9)))
    result = loop.tick({"a": signal(0.9), "b": signal(0.9)})
    assert list(result.shares) == ["b", "a"]


def test_a_neighbour_that_leaves_gives_the_gpu_back() -> None:
    loop = Loop(two())
    loop.ticks(3, {"a": signal(0.9), "b": signal(0.9)})
    loop.view = replace(loop.view, residents=loop.view.residents[:1])
    loop.tick({"a": signal(0.9)})
    assert loop.compute() == {"a": 1.0}
    assert set(loop.memory.held) == {"a"}


@pytest.mark.parametrize(
    "missing",
    [{}, {"a": signal(measured=False)}, {"a": signal(math.nan)}],
    ids=["no signal", "not measured", "no number"],
)
def test_an_unmeasured_job_is_planned_with_its_profile(missing: Signals) -> None:
    loop = Loop(gpu("g0", resident("a", compute=0.5, known=profile(0.2)), resident("b", compute=0.5)))
    loop.ticks(2 * PATIENCE + 2, {**missing, "b": signal(0.9)})
    assert loop.compute()["a"] == pytest.approx(0.21, abs=0.01)


def test_reasons_say_what_changed_and_why() -> None:
    loop = Loop(two(0.2, 0.8))
    result = loop.tick({"a": signal(0.3, throttled=0.25, p99=2.0 * GIB, peak=1.0 * GIB), "b": signal(0.9)})
    assert result.reasons["a"].startswith("compute 0.20 -> ")
    assert "held back 25% of the time" in result.reasons["a"]
    assert "memory 1024 -> 2256 MiB: forecast to need more" in result.reasons["a"]
    assert "forecast p95 of its demand 0.90" in result.reasons["b"]


@pytest.mark.parametrize(
    ("start", "p99", "peak", "wanted", "ticks", "expected"),
    [
        pytest.param(1000, 1000.0, 900.0, False, 1, 1104, id="grows at once, in steps of 16 MiB"),
        pytest.param(1000, None, 1000.0, False, 1, 1104, id="without a forecast: the peak"),
        pytest.param(1000, 99_999.0, 900.0, False, 1, 15 * 1024, id="never beyond the room there is"),
        pytest.param(4000, 1000.0, 900.0, False, 30, 4000, id="idle memory nobody wants stays"),
        pytest.param(4000, 1000.0, 900.0, True, PATIENCE, 4000, id="not before patience is over"),
        pytest.param(4000, 1000.0, 900.0, True, PATIENCE + 1, 1104, id="shrinks when others want it"),
        pytest.param(4000, 1000.0, 2000.0, True, 30, 2208, id="never below the measured peak and margin"),
        pytest.param(1150, 1000.0, 900.0, True, 30, 1150, id="a little too much is left alone"),
        pytest.param(1000, 2000.0, None, True, 30, 1000, id="never measured: left alone"),
        pytest.param(1000, math.inf, 900.0, True, 30, 1000, id="absurd forecast: left alone"),
    ],
)
def test_memory(start: int, p99: Reading, peak: Reading, *, wanted: bool, ticks: int, expected: int) -> None:
    loop = Loop(gpu("g0", resident("a", memory=start * MIB, compute=0.5), resident("b", compute=0.5)), wanted)
    usage = signal(0.3, p99=None if p99 is None else p99 * MIB, peak=None if peak is None else peak * MIB)
    loop.ticks(ticks, {"a": usage, "b": signal(0.3)})
    assert loop.reserved() == {"a": expected, "b": 1024}


def test_the_largest_memory_ever_seen_bounds_shrinking() -> None:
    loop = Loop(gpu("g0", resident("a", memory=4000 * MIB, compute=1.0)), wanted=True)
    loop.tick({"a": signal(p99=100.0, peak=3000.0 * MIB)})
    loop.ticks(30, {"a": signal(p99=100.0, peak=100.0 * MIB)})
    assert loop.reserved()["a"] == 3312


signals = st.builds(
    signal,
    st.floats(0.0, 1.0) | st.just(math.nan),
    st.none() | st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    st.none() | st.floats(0.0, 20.0 * GIB),
    st.none() | st.floats(0.0, 20.0 * GIB),
    st.booleans(),
)
names = ("a", "b", "c", "d")


@st.composite
def crowded(draw: Callable[[st.SearchStrategy[object]], object]) -> GpuView:
    """A GPU with up to four residents and consistent shares, as placement leaves it."""
    count = draw(st.integers(1, 4))
    guarantees = [draw(st.sampled_from([0.0, 0.1, 0.25])) for _ in range(count)]  # type: ignore[call-overload]
    weights = [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(count)]  # type: ignore[call-overload]
    members = zip(names, guarantees, weights, strict=False)
    return gpu(
        "g0",
        *(
            resident(name, compute=0.25, min_compute=least, weight=weight, memory=2 * GIB)
            for name, least, weight in members
        ),
    )


@given(crowded(), st.lists(st.fixed_dictionaries(dict.fromkeys(names, signals)), max_size=15), st.booleans())
def test_promises_hold_whatever_is_measured(view: GpuView, course: list[dict[str, UsageSignal]], wanted: bool) -> None:
    loop = Loop(view, wanted)  # its ticks check the sums of compute and memory
    for usage in course:
        before = {r.job_id: r.share for r in loop.view.residents}
        result = loop.tick(usage)
        assert set(result.reasons) == set(result.shares)
        assert all(share != before[job_id] for job_id, share in result.shares.items())
        assert all(r.share.compute >= r.min_compute - 1 / 4096 for r in loop.view.residents)
        assert all(r.share.compute > 0.0 and r.share.memory_bytes > 0 for r in loop.view.residents)
        applied = before
        for job_id, share in result.shares.items():  # one after the other: never too much on the way
            applied = {**applied, job_id: share}
            assert sum(each.compute for each in applied.values()) <= 1.0
    if course:
        assert sum(loop.compute().values()) == pytest.approx(1.0, abs=4 * SETTINGS.min_change)


@given(crowded(), st.fixed_dictionaries(dict.fromkeys(names, signals)))
def test_steady_demand_settles_and_stays(view: GpuView, usage: dict[str, UsageSignal]) -> None:
    loop = Loop(view, wanted=True)
    loop.ticks(60, usage)
    assert not any(result.shares for result in loop.ticks(100, usage))


@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_the_closed_loop_settles(need_a: float, need_b: float) -> None:
    """Two jobs with a fixed need, held back exactly when their share is below it."""
    loop = Loop(two())
    needs = {"a": need_a, "b": need_b}

    def measured(job_id: str, share: float) -> UsageSignal:
        return signal(needs[job_id], throttled=max(0.0, 1.0 - share / needs[job_id]))

    for _ in range(40):
        loop.tick({job_id: measured(job_id, share) for job_id, share in loop.compute().items()})
    settled = [
        loop.tick({job_id: measured(job_id, share) for job_id, share in loop.compute().items()}) for _ in range(100)
    ]
    assert not any(result.shares for result in settled)
    if need_a + need_b <= 0.8:
        assert all(share >= needs[job_id] - 1e-9 for job_id, share in loop.compute().items())


@given(crowded(), st.lists(st.fixed_dictionaries(dict.fromkeys(names, signals)), max_size=8))
def test_deterministic(view: GpuView, course: list[dict[str, UsageSignal]]) -> None:
    one, two_ = Loop(view), Loop(view)
    assert [one.tick(usage) for usage in course] == [two_.tick(usage) for usage in course]


def test_an_empty_gpu_needs_nothing() -> None:
    empty = resize_gpu(
        gpu(), {"gone": signal()}, ResizeMemory(), 0.0, settings=SETTINGS, memory_margin=0.1, memory_wanted=True
    )
    assert empty == Resized({}, {}, ResizeMemory())


def test_share_type_is_kept() -> None:
    loop = Loop(two(0.1, 0.9))
    result = loop.tick({"a": signal(0.9), "b": signal(0.9)})
    assert result.shares["a"] == Share("g0", GIB, 0.5)
