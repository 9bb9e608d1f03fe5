"""What decides between GPUs that may take a job: limits at a confidence, speeds, links, fragments; large clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, SETTINGS, gpu, profile, request, resident

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.placement import constraints
from cotenant.placement.engine import policy
from cotenant.placement.explain import explain
from cotenant.placement.fleet import Fleet
from cotenant.placement.objective import cautious, mean_slowdown, slowness
from cotenant.placement.shares import memory_need, memory_needs
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement, Request

RULE = UtilisationRule()
LIGHT = resident("light", 0.1)


class Wide:
    """Predicts n = 0.8 for everybody, and possibly much less."""

    name = "wide"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        return [ThroughputPrediction(0.5, 0.8, 1.0) if len(members) > 1 else ThroughputPrediction(1, 1, 1)] * len(
            members
        )


def place(
    asked: Request,
    *gpus: GpuView,
    waiting: int = 99,
    predictor: object = RULE,
    name: str = "cotenant",
    **changes: object,
) -> Placement | NoFit:
    tuned = PlacementSettings.model_validate(SETTINGS.model_dump() | changes)
    return policy(name).place(asked, gpus, predictor, tuned, waiting)  # type: ignore[arg-type]


def where(answer: Placement | NoFit) -> list[str]:
    assert isinstance(answer, Placement), answer
    return [share.gpu_id for share in answer.shares]


def why_not(answer: Placement | NoFit) -> str:
    assert isinstance(answer, NoFit), answer
    return explain(answer.errors)


class TestConfidence:
    @pytest.mark.parametrize(
        ("confidence", "n"),
        [(0.5, 0.8), (0.9, 0.5), (0.95, 0.8 - 0.3 * 1.6449 / 1.2816), (0.75, 0.8 - 0.3 * 0.6745 / 1.2816)],
    )
    def test_a_quantile_of_the_lower_half_of_the_interval(self, confidence: float, n: float) -> None:
        assert cautious(ThroughputPrediction(0.5, 0.8, 1.0), confidence) == pytest.approx(n, abs=1e-4)

    def test_it_stays_a_throughput(self) -> None:
        assert cautious(ThroughputPrediction(1e-4, 0.8, 1.0), 0.95) == 1e-3
        assert cautious(ThroughputPrediction(1e-5, 1e-4, 1.0), 0.95) == 1e-4

    @given(st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.5, 0.95), st.floats(0.5, 0.95))
    def test_more_confidence_never_means_more_throughput(self, mid: float, part: float, one: float, two: float) -> None:
        prediction = ThroughputPrediction(mid * part, mid, 1.0)
        assert cautious(prediction, max(one, two)) <= cautious(prediction, min(one, two)) <= mid

    @pytest.mark.parametrize(("confidence", "shares"), [(0.5, True), (0.7, True), (0.9, False)])
    def test_the_limit_holds_at_the_confidence_asked_for(self, confidence: float, shares: bool) -> None:
        answer = place(request(), gpu("g0", LIGHT), predictor=Wide(), confidence=confidence)
        assert isinstance(answer, Placement) == shares
        if not shares:
            assert why_not(answer) == "1 GPU: predicted slowdown 2.00 > 1.50"


def test_a_slowdown_counts_by_the_weight_of_who_suffers_it() -> None:
    assert mean_slowdown([0.5, 1.0], [3.0, 1.0]) == 1.5
    assert mean_slowdown([0.5, 1.0]) == 0.5
    important, other = resident("i", 0.5, weight=4.0), resident("o", 0.5, weight=1.0)
    cluster = gpu("g0", important), gpu("g1", other)
    assert where(place(request(util=0.6, max_slowdown=3.0), *cluster, default_max_slowdown=3.0)) == ["g1"]


class TestMoreThanTwo:
    def test_every_member_keeps_its_limit(self) -> None:
        patient = [resident(name, 0.45, max_slowdown=9.0) for name in ("a", "b")]
        strict = replace(patient[1], max_slowdown=1.2)
        asked = request(util=0.45, max_slowdown=9.0)
        assert where(place(asked, gpu("g0", *patient))) == ["g0"]
        assert "slowdown of a neighbour" in why_not(place(asked, gpu("g0", patient[0], strict)))
        assert "slowdown of a neighbour" in why_not(place(asked, gpu("g0", strict, patient[0])))

    def test_the_gain_is_what_the_third_adds(self) -> None:
        pair = gpu("g0", resident("a", 0.1), resident("b", 0.1))
        single = gpu("g1", resident("c", 0.1))
        answer = place(request(util=0.1), pair, single)
        assert where(answer) == ["g1"]  # the second saves a half, the third no more than a sixth


class TestSpeeds:
    def test_the_fastest_empty_gpu_is_taken(self) -> None:
        cluster = [replace(gpu("slow"), gpu_type="K80"), replace(gpu("fast"), gpu_type="V100")]
        assert where(place(request(), *cluster, waiting=1, speeds={"V100": 4.0})) == ["fast"]
        assert where(place(request(), *cluster, waiting=9, speeds={"V100": 4.0})) == ["fast"]
        assert where(place(request(), *cluster, waiting=1)) == ["slow"]

    def test_a_shared_fast_gpu_beats_an_empty_slow_one_when_nobody_loses_more_than_is_won(self) -> None:
        cluster = [replace(gpu("slow"), gpu_type="K80"), replace(gpu("fast", LIGHT), gpu_type="V100")]
        assert where(place(request(), *cluster, waiting=1, speeds={"V100": 4.0})) == ["fast"]
        assert where(place(request(), *cluster, waiting=1, speeds={"V100": 1.01})) == ["slow"]

    def test_the_promise_comes_before_the_speed(self) -> None:
        cluster = [
            replace(gpu("slow"), gpu_type="K80"),
            replace(gpu("fast", resident("a", 0.9, max_slowdown=1.1)), gpu_type="V100"),
        ]
        assert where(place(request(util=0.9, max_slowdown=9.0), *cluster, speeds={"V100": 4.0})) == ["slow"]

    def test_types_that_are_not_listed_count_one(self) -> None:
        for speeds, slower in (({}, 1.0), ({"y": 0.5}, 1.0), ({"y": 2.0}, 2.0)):
            assert slowness("x", request(), PlacementSettings(speeds=speeds)) == slower

    def test_what_was_measured_of_the_job_counts_before_what_the_types_usually_do(self) -> None:
        cluster = [replace(gpu("old"), gpu_type="K80"), replace(gpu("new"), gpu_type="V100")]
        better_on_old = replace(request(), speeds={"K80": 1.0, "V100": 0.9})
        assert where(place(request(), *cluster, waiting=1, speeds={"V100": 4.0})) == ["new"]
        assert where(place(better_on_old, *cluster, waiting=1, speeds={"V100": 4.0})) == ["old"]

    def test_demand_is_that_on_the_type(self) -> None:
        """On the old type the job fills the GPU, so it does not get along with who is there."""
        cluster = [
            replace(gpu("old", resident("a", 0.5, max_slowdown=1.2)), gpu_type="K80"),
            replace(gpu("new", resident("b", 0.5, max_slowdown=1.2)), gpu_type="V100"),
        ]
        asked = replace(request(util=0.3), profiles={"K80": profile(0.9), "V100": profile(0.3)})
        assert where(place(asked, *cluster)) == ["new"]

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
    def test_absurd_speeds_are_refused(self, speed: float) -> None:
        with pytest.raises(ValueError, match=r"speeds\.K80"):
            PlacementSettings(speeds={"K80": speed})


class TestLinks:
    def test_one_host_is_preferred_when_several_are_allowed(self) -> None:
        cluster = [gpu("a0", host="a"), gpu("b0", host="b"), gpu("b1", host="b"), gpu("c0", host="c")]
        assert where(place(request(gpus=2, one_host=False), *cluster, waiting=2)) == ["b0", "b1"]

    def test_else_as_few_hosts_as_possible(self) -> None:
        cluster = [gpu(f"{host}{i}", host=host) for host, count in (("a", 1), ("b", 3), ("c", 2)) for i in range(count)]
        assert where(place(request(gpus=5, one_host=False), *cluster, waiting=5)) == ["b0", "b1", "b2", "c0", "c1"]
        assert where(place(request(gpus=4, one_host=False), *cluster, waiting=4)) == ["a0", "b0", "b1", "b2"]

    def test_linked_gpus_are_preferred(self) -> None:
        cluster = [replace(gpu(f"g{i}"), island=island) for i, island in enumerate(["x", "y", "x", "y"])]
        assert where(place(request(gpus=2), *cluster, waiting=2)) == ["g0", "g2"]
        assert where(place(request(gpus=3), *cluster, waiting=3)) == ["g0", "g1", "g2"]

    @pytest.mark.parametrize(("longer", "expected"), [(1.09, ["a0", "a1"]), (1.11, ["b0", "c0"])])
    @pytest.mark.parametrize("bias", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize(("name", "waiting"), [("cotenant", 2), ("cotenant", 99), ("exclusive", 2)])
    def test_a_further_host_counts_like_a_tenth_of_slowdown(
        self, name: str, waiting: int, bias: float, longer: float, expected: list[str]
    ) -> None:
        """Two slow GPUs of one host, or a fast one of each of two others; with and without empty ones for everybody."""
        cluster = [replace(gpu(f"a{i}", host="a"), gpu_type="slow") for i in range(2)]
        cluster += [gpu("b0", host="b"), gpu("c0", host="c")]
        rules = {"speeds": {"slow": 1.0 / longer}, "packing_bias": bias}
        assert where(place(request(gpus=2, one_host=False), *cluster, waiting=waiting, name=name, **rules)) == expected

    @pytest.mark.parametrize(("longer", "expected"), [(1.04, ["g2", "g3"]), (1.06, ["g0", "g1"])])
    @pytest.mark.parametrize("bias", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize(("name", "waiting"), [("cotenant", 2), ("cotenant", 99), ("exclusive", 2)])
    def test_gpus_that_are_not_linked_count_like_half_of_that(
        self, name: str, waiting: int, bias: float, longer: float, expected: list[str]
    ) -> None:
        cluster = [replace(gpu(f"g{i}"), island=island) for i, island in enumerate("xy")]
        cluster += [replace(gpu(f"g{i}"), island="z", gpu_type="slow") for i in (2, 3)]
        rules = {"speeds": {"slow": 1.0 / longer}, "packing_bias": bias}
        assert where(place(request(gpus=2), *cluster, waiting=waiting, name=name, **rules)) == expected

    def test_seven_six_and_seven_of_eight_in_use(self) -> None:
        cluster = [
            gpu(f"{host}{i}", *([resident(f"r{host}{i}", exclusive=True)] if i < used else []), host=host)
            for host, used in (("a", 7), ("b", 6), ("c", 7))
            for i in range(8)
        ]
        answer = place(request(gpus=4), *cluster)
        assert "wants 4 GPUs, 4 free; wants 4 GPUs on one host, at most 2 free on one host" in why_not(answer)
        assert isinstance(answer, NoFit)
        assert not answer.never
        assert where(place(request(gpus=2), *cluster)) == ["b6", "b7"]
        assert where(place(request(gpus=4, one_host=False), *cluster)) == ["a7", "b6", "b7", "c7"]


class TestFragments:
    def test_a_job_for_one_gpu_leaves_whole_hosts_whole(self) -> None:
        whole = [gpu(f"a{i}", host="a") for i in range(8)]
        broken = [gpu("b0", resident("r", 0.9), host="b"), *(gpu(f"b{i}", host="b") for i in range(1, 8))]
        assert where(place(request(), *whole, *broken, waiting=1)) == ["b1"]

    def test_large_memory_is_left_to_those_who_need_it(self) -> None:
        cluster = gpu("large", memory=80 * GIB, host="a"), gpu("small", memory=16 * GIB, host="b")
        assert where(place(request(memory=4 * GIB), *cluster, waiting=1)) == ["small"]
        assert where(place(request(memory=40 * GIB), *cluster, waiting=1)) == ["large"]

    def test_free_parts_of_two_gpus_are_not_one(self) -> None:
        used = [gpu(f"a{i}", resident(f"r{i}", 0.1, min_compute=0.6), host="a") for i in range(2)]
        other = gpu("b0", resident("r", 0.1, min_compute=0.1), host="b")
        asked = request(util=0.1, memory=GIB, compute=0.8)
        assert where(place(asked, *used, other)) == ["b0"]
        assert why_not(place(asked, *used)) == "2 GPUs: compute 0.80 wanted, 0.40 free"


def test_mig_instances_are_devices_like_others() -> None:
    slices = [replace(gpu(f"mig{i}", memory=10 * GIB), gpu_type="H100 1g.10gb") for i in range(7)]
    whole = replace(gpu("whole", memory=80 * GIB), gpu_type="H100")
    assert where(place(request(memory=20 * GIB), *slices, whole)) == ["whole"]
    assert where(place(request(memory=8 * GIB), *slices, whole, waiting=1, speeds={"H100": 1.0})) == ["mig0"]
    assert where(place(request(memory=8 * GIB), *slices, whole, waiting=1, speeds={"H100": 7.0})) == ["whole"]


class TestManyGpus:
    def test_reasons_are_counted_not_listed(self) -> None:
        cluster = [gpu(f"g{i}", resident(f"r{i}", memory=(10 + i % 3) * GIB)) for i in range(300)]
        answer = place(request(memory=8 * GIB), *cluster)
        assert why_not(answer) == "300 GPUs: at least 2.0 GiB short"
        assert isinstance(answer, NoFit)
        assert len(answer.errors) == 1

    def test_only_the_least_used_are_looked_at_closely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constraints, "MOST_PREDICTED", 5)
        cluster = [gpu(f"g{i}", resident(f"r{i}", (40 - i) / 40)) for i in range(40)]
        assert where(place(request(util=0.2), *cluster)) == ["g39"]
        refused = place(request(util=0.2, max_slowdown=1.0), *cluster)
        assert why_not(refused).startswith("35 GPUs: not looked at closely")
        assert "5 GPUs: predicted slowdown at least" in why_not(refused) or "5 GPUs: predicted" in why_not(refused)

    def test_a_fleet_follows_its_gpus(self) -> None:
        views = [gpu(f"g{i}", resident(f"r{i}"), host=f"h{i // 2}") for i in range(4)]
        fleet = Fleet(views)
        changed = [views[0], gpu("g1", host="h0"), views[2], gpu("g3", resident("x", exclusive=True), host="h9")]
        assert_same(fleet.bring_to(changed), Fleet(changed))
        assert_same(fleet.bring_to(views[:2]), Fleet(views[:2]))
        assert_same(fleet.bring_to([views[1], views[0]]), Fleet([views[1], views[0]]))

    def test_a_statement_gives_a_fleet_back_as_it_was(self) -> None:
        views = [gpu("g0", resident("a", compute=1.0)), gpu("g1")]
        fleet = Fleet(views)
        statement = Statement(fleet)
        answer = place(request(), *views)
        assert isinstance(answer, Placement)
        statement.place(request(), answer)
        assert list(fleet) != views
        statement.rollback()
        assert list(fleet) == views
        assert_same(fleet, Fleet(views))

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.sampled_from(
                    [
                        {"schedulable": False, "note": "kept"},
                        {"schedulable": True},
                        {"residents": ()},
                        {"residents": (resident("x", cpus=2.0),)},
                        {"residents": (resident("x", exclusive=True), resident("y"))},
                        {"memory_bytes": 3 * GIB},
                        {"gpu_type": "other"},
                        {"island": "linked"},
                        {"host_id": "elsewhere"},
                        {"host_cpus": 4.0},
                    ]
                ),
            ),
            max_size=12,
        )
    )
    def test_a_fleet_follows_every_change_of_a_gpu(self, changes: list[tuple[int, dict[str, Any]]]) -> None:
        views = [replace(gpu(f"g{i}", resident(f"r{i}", cpus=1.0), host=f"h{i // 2}"), host_cpus=8.0) for i in range(4)]
        fleet = Fleet(views)
        for number, change in changes:
            for each in range(4) if "host_cpus" in change else (number,):  # a host's are the same for all of its GPUs
                views[each] = replace(views[each], **change)
                fleet.put(views[each])
            assert_same(fleet, Fleet(views))

    @given(
        st.none() | st.integers(1, 40),
        st.none() | st.integers(1, 40),
        st.sampled_from(["history", "class"]),
        st.floats(0, 1),
    )
    def test_memory_to_reserve_is_the_same_for_one_and_for_many(
        self, hint: int | None, peak: int | None, source: str, margin: float
    ) -> None:
        known = profile(0.3, None if peak is None else peak * GIB, source=source)  # type: ignore[arg-type]
        asked = request(memory=None if hint is None else hint * GIB, known=known)
        cluster = [gpu(f"g{i}", memory=size * GIB) for i, size in enumerate((0, 8, 16, 39))]
        many = memory_needs(asked, np.array([each.memory_bytes for each in cluster]), margin)
        assert many.tolist() == [memory_need(asked, each, margin) for each in cluster]


def assert_same(one: Fleet, other: Fleet) -> None:
    assert one.views == other.views
    numbers = ("capacity", "free", "crowd", "reservable", "util", "observed_s", "engaged")
    for name in (*numbers, "schedulable", "exclusive", "particular", "instance"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for place_, each in enumerate(one):
        assert one.position(each.gpu_id) == place_
        assert one.kinds[one.kind[place_]] == each.gpu_type
    np.testing.assert_array_equal(one.idle[one.host], other.idle[other.host])
    np.testing.assert_array_equal(one.spare()[one.host], other.spare()[other.host])
    for name in ("host", "island"):
        mine, theirs = getattr(one, name), getattr(other, name)
        same = mine[:, None] == mine[None, :]
        np.testing.assert_array_equal(same, theirs[:, None] == theirs[None, :])
