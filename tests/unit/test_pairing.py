"""The pair tracker: which windows count, what comes out, and that no second is told twice."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import window

from cotenant.forecasting.interference.observations import Observation, merged
from cotenant.forecasting.pairing import FIRST_EMISSIONS_S, PairTracker
from cotenant.forecasting.rates import Blocks, rate_of
from cotenant.forecasting.types import DemandProfile, Signature

TYPES = {"g0": "A100", "g1": "A100", "g2": "T4"}
Scene = dict[str, Sequence[str]]


def known(name: str, rate: float | None = 20.0, **changes: object) -> DemandProfile:
    """What a job does alone; its fingerprint and family follow from its id."""
    base = DemandProfile(0.5, 0.6, None, rate, 60.0, "history", fingerprint=f"fp-{name}", family=name)
    return replace(base, **changes)  # type: ignore[arg-type]


PROFILES = {name: known(name) for name in "abcd"}


class Cluster:
    """Plays seconds into a tracker and keeps what comes out."""

    def __init__(self, profiles: dict[str, DemandProfile] | None = None, types: dict[str, str] | None = None) -> None:
        self.tracker = PairTracker()
        self.profiles = PROFILES if profiles is None else profiles
        self.types = TYPES if types is None else types
        self.now = 0.0
        self.found: list[Observation] = []

    def windows(self, scene: Scene, rates: dict[str, float | None], **changes: object) -> list[Signature]:
        return [
            replace(
                window(self.now, job_id=job, gpu_id=gpu, rate=rates.get(job, 10.0), neighbours=len(jobs) - 1), **changes
            )  # type: ignore[arg-type]
            for gpu, jobs in scene.items()
            for job in jobs
        ]

    def feed(self, windows: Sequence[Signature]) -> list[Observation]:
        found = self.tracker.observe(1_000_001.0 + self.now, windows, self.profiles, self.types)
        self.found += found
        self.now += 1.0
        return found

    def play(
        self,
        seconds: int,
        scene: Scene,
        rate_of_job: Callable[[str, float], float | None] = lambda job, now: 10.0,
        **changes: object,
    ) -> list[Observation]:
        """Some seconds with these jobs on these GPUs; returns what came out of them."""
        start = len(self.found)
        for _ in range(seconds):
            rates = {job: rate_of_job(job, self.now) for jobs in scene.values() for job in jobs}
            self.feed(self.windows(scene, rates, **changes))
        return self.found[start:]

    def of(self, job: str) -> list[Observation]:
        return [each for each in self.found if each.focal.family == job]


PAIR: Scene = {"g0": "ab"}


def test_a_pair_is_measured_after_the_warm_up_and_told_in_increments() -> None:
    cluster = Cluster()
    cluster.play(2 + 250, PAIR)
    told = cluster.of("a")
    assert [each.seconds for each in told] == [5.0, 5.0, 10.0, 20.0, 20.0, 60.0, 120.0]
    assert tuple(np.cumsum([each.seconds for each in told])[:5]) == FIRST_EMISSIONS_S
    assert all((each.low, each.throughput, each.high) == (0.5, 0.5, 0.5) for each in told)
    assert told[0].key == ("A100", "fp-a", ("fp-b",))
    assert len(cluster.of("b")) == len(told)
    assert merged(told).seconds == 240.0


def test_what_is_left_is_told_when_the_set_dissolves() -> None:
    cluster = Cluster()
    cluster.play(2 + 35, PAIR)
    cluster.play(1, {"g0": "a"})
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0, 15.0]
    assert [each.seconds for each in cluster.of("b")] == [5.0, 5.0, 10.0, 15.0]


def test_less_than_five_seconds_are_not_worth_telling() -> None:
    cluster = Cluster()
    cluster.play(2 + 24, PAIR)
    cluster.play(1, {"g0": "a"})
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0]


def test_a_job_that_ends_alone_with_its_set_tells_what_is_left() -> None:
    cluster = Cluster()
    cluster.play(2 + 35, PAIR)
    (last,) = cluster.tracker.forget("a")
    assert (last.focal.family, last.seconds) == ("a", 15.0)
    assert cluster.tracker.forget("a") == []
    assert cluster.tracker.forget("never seen") == []
    (last,) = cluster.tracker.forget("b")
    assert last.focal.family == "b"


def test_every_change_of_the_set_costs_two_windows() -> None:
    cluster = Cluster()
    cluster.play(2 + 20, PAIR)
    assert cluster.play(6, {"g0": "abc"}) == []  # two to settle, of which c warms up at the same time
    assert {each.seconds for each in cluster.play(1, {"g0": "abc"})} == {5.0}
    assert cluster.play(6, PAIR) == []
    assert {each.seconds for each in cluster.play(1, PAIR)} == {5.0}


def test_sets_of_three_know_both_neighbours() -> None:
    cluster = Cluster()
    cluster.play(2 + 5, {"g0": "abc"})
    assert [each.key for each in cluster.found] == [
        ("A100", "fp-a", ("fp-b", "fp-c")),
        ("A100", "fp-b", ("fp-a", "fp-c")),
        ("A100", "fp-c", ("fp-a", "fp-b")),
    ]


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(known("b", None), id="never measured alone"),
        pytest.param(known("b", from_shared=True), id="measured beside others only"),
        pytest.param(known("b", 0.0), id="solo rate 0"),
        pytest.param(known("b", math.nan), id="solo rate is no number"),
        pytest.param(known("b", 4.0), id="n of 2.5"),
        pytest.param(known("b", 1e9), id="n of next to nothing"),
    ],
)
def test_what_one_member_lacks_does_not_stop_the_other(profile: DemandProfile) -> None:
    cluster = Cluster(PROFILES | {"b": profile})
    cluster.play(60, PAIR)
    assert len(cluster.of("a")) == 4
    assert cluster.of("b") == []


@pytest.mark.parametrize(
    ("profiles", "types"),
    [
        pytest.param(PROFILES | {"b": known("b", fingerprint="")}, TYPES, id="no fingerprint"),
        pytest.param({"a": PROFILES["a"]}, TYPES, id="no profile"),
        pytest.param({}, TYPES, id="no profiles"),
        pytest.param(PROFILES, {"g1": "A100"}, id="unknown type"),
        pytest.param(PROFILES, {"g0": ""}, id="type without a name"),
    ],
)
def test_a_set_that_could_not_be_found_again_is_not_told(
    profiles: dict[str, DemandProfile], types: dict[str, str]
) -> None:
    cluster = Cluster(profiles, types)
    assert cluster.play(60, PAIR) == []


def test_a_solo_rate_that_comes_later_serves_for_what_was_measured_before() -> None:
    cluster = Cluster(PROFILES | {"a": known("a", None)})
    cluster.play(30, PAIR)
    assert cluster.of("a") == []
    cluster.profiles = PROFILES
    cluster.play(1, PAIR)
    assert [each.seconds for each in cluster.of("a")] == [29.0]


@pytest.mark.parametrize("rate", [None, math.nan, -1.0, 1e30, 0.0], ids=repr)
def test_a_job_that_never_steps_is_not_measured_and_holds_its_neighbour_up_for_a_minute(rate: float | None) -> None:
    cluster = Cluster()
    cluster.play(60 + 4, PAIR, lambda job, now: rate if job == "b" else 10.0)
    assert cluster.found == []
    cluster.play(5, PAIR, lambda job, now: rate if job == "b" else 10.0)
    assert [each.focal.family for each in cluster.found] == ["a"]


def test_nothing_counts_while_a_neighbour_starts() -> None:
    cluster = Cluster()
    cluster.play(10, {"g0": "a"})
    cluster.play(30, PAIR, lambda job, now: None if job == "b" else 20.0)  # b loads its data: a is not slowed down
    cluster.play(20, PAIR)
    assert all(each.throughput == 0.5 for each in cluster.of("a"))
    assert sum(each.seconds for each in cluster.of("a")) == 10.0


def test_a_neighbour_without_a_window_makes_the_set_unknown() -> None:
    cluster = Cluster()
    cluster.play(60, PAIR, neighbours=2)
    cluster.play(60, {"g1": "ab"}, neighbours=0)
    assert cluster.found == []


def test_pauses_count_as_time_and_do_not_move_the_middle() -> None:
    cluster = Cluster()
    cluster.play(2 + 60, PAIR, lambda job, now: 0.0 if job == "a" and 40 <= now < 46 else 10.0)
    cluster.play(1, {"g0": "a"})
    assert sum(each.seconds for each in cluster.of("a")) >= 59.0
    assert merged(cluster.of("a")).throughput == pytest.approx(0.5)


def slow(step_s: int) -> Callable[[str, float], float | None]:
    """What is told of a job whose steps take so many seconds: a rate when one ends, else nothing."""
    return lambda job, now: 1.0 / step_s if now % step_s == 0 else None


def test_a_slow_job_takes_many_windows() -> None:
    cluster = Cluster(dict.fromkeys("ab", known("a", 0.5)))
    cluster.play(400, PAIR, slow(3))
    first = cluster.found[0]
    assert first.seconds == pytest.approx(72.0)  # three blocks of eight steps of 3 s
    assert first.throughput == pytest.approx(2.0 / 3.0)


def test_a_step_begun_before_the_set_does_not_count() -> None:
    cluster = Cluster({"a": known("a", 0.25), "b": PROFILES["b"]})
    cluster.play(101, {"g0": "a"}, slow(4))
    rate: Callable[[str, float], float | None] = lambda job, now: 10.0 if job == "b" else slow(5)(job, now)  # noqa: E731
    cluster.play(200, PAIR, rate)
    assert {round(each.throughput, 6) for each in cluster.of("a")} == {0.8}


def test_a_job_held_back_by_its_share_is_measured_as_if_it_were_not() -> None:
    cluster = Cluster()
    cluster.play(60, PAIR, lambda job, now: 8.0, throttled_fraction=0.2)
    assert all(each.throughput == pytest.approx(0.5) for each in cluster.found)
    assert cluster.found
    cluster = Cluster()
    cluster.play(60, PAIR, lambda job, now: 8.0, throttled_fraction=0.6)
    assert cluster.found == []


def test_a_missing_window_is_no_time_and_a_long_hole_dissolves_the_set() -> None:
    cluster = Cluster()
    cluster.play(2 + 15, PAIR)
    cluster.now += 2.0
    cluster.play(5, PAIR)
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0]
    cluster.play(10, PAIR)
    cluster.now += 60.0
    cluster.play(2 + 5, PAIR)
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0, 10.0, 5.0]


def test_late_and_duplicate_windows_change_nothing() -> None:
    plain, noisy = Cluster(), Cluster()
    plain.play(60, PAIR)
    for _ in range(60):
        windows = noisy.windows(PAIR, {})
        late = [replace(each, start_s=each.start_s - 3.0, step_rate=1.0) for each in windows]
        noisy.feed([*late, *windows, *windows])
    assert noisy.found == plain.found


@pytest.mark.parametrize(("jump_s", "refused"), [(-7200.0, 9), (86400.0, 0), (1e12, 0)])
def test_a_clock_that_jumps_starts_the_set_anew(jump_s: float, refused: int) -> None:
    cluster = Cluster()
    cluster.play(2 + 25, PAIR)
    cluster.now += jump_s
    cluster.play(refused + 2 + 5 + 1, PAIR)
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0, 5.0, 5.0]
    assert all(each.throughput == 0.5 for each in cluster.found)


def test_a_job_that_begins_anew_under_its_id_warms_up_again() -> None:
    cluster = Cluster()
    cluster.play(2 + 20, PAIR)

    def restarted(job: str, now: float) -> float | None:
        if job == "b":
            return 10.0
        return None if now < 40 else 2.0 if now < 42 else 10.0  # slow first steps

    cluster.play(40, PAIR, restarted)
    assert {each.throughput for each in cluster.found} == {0.5}


def test_a_job_on_two_gpus_is_told_where_its_neighbours_are_the_same() -> None:
    cluster = Cluster()
    cluster.play(30, {"g0": "ab", "g1": "ab"})
    assert [each.seconds for each in cluster.of("a")] == [5.0, 5.0, 10.0]  # once per job, not per GPU
    assert {each.key for each in cluster.of("a")} == {("A100", "fp-a", ("fp-b",))}


def test_a_job_on_two_gpus_of_which_it_shares_one_is_told_of_that_one() -> None:
    cluster = Cluster()
    cluster.play(30, {"g0": "ab", "g1": "a"})
    assert {each.key for each in cluster.of("a")} == {("A100", "fp-a", ("fp-b",))}
    assert len(cluster.of("b")) == 3


@pytest.mark.parametrize("scene", [{"g0": "ab", "g1": "ac"}, {"g0": "ab", "g2": "ab"}])
def test_a_job_beside_different_neighbours_or_on_different_types_is_not_told(scene: Scene) -> None:
    cluster = Cluster()
    cluster.play(60, scene)
    assert cluster.of("a") == []


def test_a_job_on_two_hosts_is_not_told_but_its_neighbours_are() -> None:
    cluster = Cluster()
    for _ in range(60):
        one, two = cluster.windows({"g0": "ab"}, {}), cluster.windows({"g1": "ac"}, {})
        cluster.feed(one)
        cluster.now -= 1.0
        cluster.feed(two)
    assert {each.focal.family for each in cluster.found} == {"b", "c"}


@pytest.mark.parametrize(
    "changes",
    [{"start_s": math.nan}, {"start_s": math.inf}, {"window_s": math.nan}, {"window_s": 0.0}, {"window_s": -1.0}],
    ids=repr,
)
def test_windows_without_a_sensible_time_are_ignored(changes: dict[str, float]) -> None:
    cluster = Cluster()
    assert cluster.play(60, PAIR, **changes) == []


def test_no_windows_at_all_is_nothing_to_tell() -> None:
    assert PairTracker().observe(0.0, [], {}, {}) == []


def test_windows_longer_than_the_time_between_them_are_no_longer_time() -> None:
    cluster = Cluster()
    cluster.play(2 + 100, PAIR, window_s=1000.0)
    assert 0 < sum(each.seconds for each in cluster.of("a")) <= 100.0


def test_memory_is_bounded() -> None:
    tracker = PairTracker(most=50)
    for second in range(400):
        names = [f"job-{second}-{i}" for i in range(2)]
        tracker.observe(
            second,
            [window(second, job_id=name, gpu_id=f"g{second}", rate=10.0, neighbours=1) for name in names],
            {name: known(name) for name in names},
            {},
        )
    assert 0 < max(len(tracker._jobs), len(tracker._gpus), len(tracker._solo)) <= 50


def test_hours_together_keep_few_blocks() -> None:
    blocks = Blocks()
    for second in range(36_000):
        blocks.add(10.0 + second % 2, 1.0)
    assert len(blocks.done) <= 64
    assert blocks.seconds == 36_000.0
    rate = blocks.take()
    assert rate is not None
    assert rate.mean == pytest.approx(10.5, abs=0.01)


def test_too_few_blocks_have_no_rate() -> None:
    assert rate_of([1.0, 2.0]) is None
    assert rate_of([]) is None


def test_about_four_of_five_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(3)
    hits = total = 0
    for _ in range(250):
        true = float(rng.uniform(0.3, 1.0))
        cluster = Cluster({name: known(name) for name in "ab"})
        rates = rng.normal(20.0 * true, 2.0 * true, size=(70, 2)).clip(0.1)
        for second in range(65):
            cluster.feed(cluster.windows(PAIR, dict(zip("ab", rates[second].tolist(), strict=True))))
        hits += sum(each.low <= true <= each.high for each in cluster.found)
        total += len(cluster.found)
    assert total > 1500
    assert 0.76 <= hits / total <= 0.84


def test_the_spread_of_the_solo_rate_widens_the_interval() -> None:
    def half_width(spread: float) -> float:
        rng = np.random.default_rng(0)
        cluster = Cluster()
        cluster.play(30, {"g0": "a"}, lambda job, now: float(rng.normal(20.0, spread)))
        cluster.play(2 + 5, PAIR)
        (told,) = cluster.of("a")
        return told.high - told.low

    assert half_width(4.0) > half_width(0.0) == 0.0


seconds = st.lists(
    st.tuples(
        st.sampled_from([-1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 30.0]),  # how far the clock goes on
        st.sampled_from(["ab", "ab", "ab", "abc", "a", "cd", ""]),
        st.sampled_from([None, 0.0, 10.0, 10.0, 10.0, math.nan]),
    ),
    max_size=80,
)


@settings(max_examples=60)
@given(seconds, st.randoms(use_true_random=False))
def test_the_order_of_windows_within_a_call_changes_nothing(
    story: list[tuple[float, str, float | None]], order: random.Random
) -> None:
    one, other = Cluster(), Cluster()
    for step, jobs, rate in story:
        windows = one.windows({"g0": jobs, "g1": jobs[:2]}, dict.fromkeys(jobs, rate))
        windows += [replace(each, step_rate=3.0) for each in windows[:1]]
        mixed = list(windows)
        order.shuffle(mixed)
        assert one.feed(windows) == other.feed(mixed)
        one.now = other.now = one.now - 1.0 + step


@settings(max_examples=100)
@given(seconds)
def test_no_more_seconds_are_told_than_were_spent_together(story: list[tuple[float, str, float | None]]) -> None:
    cluster = Cluster()
    spent: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    told: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for repeat in range(3):
        for step, jobs, rate in story:
            for job in jobs:
                others = tuple(f"fp-{each}" for each in jobs if each != job)
                spent[f"fp-{job}", others] += 1.0
            cluster.feed(cluster.windows({"g0": jobs}, dict.fromkeys(jobs, rate)))
            cluster.now += step - 1.0
        cluster.now += 10.0 * repeat
    for job in "abcd":
        cluster.found += cluster.tracker.forget(job)
    for each in cluster.found:
        assert each.key is not None
        told[each.key[1], each.key[2]] += each.seconds
    for key, total in told.items():
        assert total <= spent[key] + 1e-9
