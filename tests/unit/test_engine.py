"""The placement engine: which GPU a job gets, and why not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, MIB, SETTINGS, gpu, profile, request, resident

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import UNKNOWN_PROFILE
from cotenant.placement.engine import policy
from cotenant.placement.objective import mean_slowdown, packing_saving, score
from cotenant.placement.shares import Claim, divide, round_down
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, NoFit, Placement, Request

RULE = UtilisationRule()
UNKNOWN = replace(UNKNOWN_PROFILE)


def place(
    asked: Request, *gpus: GpuView, waiting: int = 1, name: str = "cotenant", tuned: PlacementSettings = SETTINGS
) -> Placement | NoFit:
    return policy(name).place(asked, gpus, RULE, tuned, waiting)


def where(answer: Placement | NoFit) -> list[str]:
    assert isinstance(answer, Placement), answer
    return [share.gpu_id for share in answer.shares]


def refusal(answer: Placement | NoFit) -> list[tuple[str, str | None]]:
    assert isinstance(answer, NoFit), answer
    return [(error.kind, error.gpu_id) for error in answer.errors]


def tuned(**changes: object) -> PlacementSettings:
    return PlacementSettings.model_validate({**SETTINGS.model_dump(), **changes})


def test_objective() -> None:
    assert packing_saving([]) == packing_saving([1.0]) == 0.0
    assert packing_saving([1.0, 1.0]) == 0.5
    assert packing_saving([0.8, 0.8]) == pytest.approx(0.375)
    assert packing_saving([0.45, 0.45]) < 0.0
    assert mean_slowdown([1.0, 0.5]) == 0.5
    assert score([0.8, 0.8], 0.5) == pytest.approx(0.5 * 0.375 - 0.5 * 0.25)
    assert (score([0.8, 0.8], 1.0), score([0.8, 0.8], 0.0)) == (pytest.approx(0.375), pytest.approx(-0.25))


HEAVY, LIGHT = resident("heavy", 0.9), resident("light", 0.2)
PAIR = (resident("a", 0.2), resident("b", 0.2))


@pytest.mark.parametrize(
    ("gpus", "waiting", "bias", "expected"),
    [
        pytest.param([gpu("g0", LIGHT), gpu("g1")], 1, 0.5, "g1", id="an empty GPU for everybody: protect"),
        pytest.param([gpu("g0", LIGHT), gpu("g1")], 2, 0.5, "g0", id="more wait than GPUs are empty: share"),
        pytest.param([gpu("g0", LIGHT), gpu("g1")], 1, 1.0, "g0", id="bias 1 packs even then"),
        pytest.param([gpu("g0", LIGHT), gpu("g1")], 9, 0.0, "g1", id="bias 0 never prefers sharing"),
        pytest.param([gpu("g0", HEAVY), gpu("g1", LIGHT)], 9, 0.5, "g1", id="the lighter neighbour"),
        pytest.param([gpu("g0", *PAIR), gpu("g1", LIGHT)], 9, 0.5, "g1", id="a new pair gains more than a third job"),
        pytest.param([gpu("g0"), gpu("g1")], 9, 0.5, "g0", id="all equal: the first"),
        pytest.param([gpu("g0", memory=8 * GIB), gpu("g1", memory=4 * GIB)], 9, 0.5, "g1", id="the tighter memory"),
        pytest.param([gpu("g0", LIGHT, schedulable=False), gpu("g1")], 9, 0.5, "g1", id="an unavailable GPU"),
    ],
)
def test_which_gpu(gpus: list[GpuView], waiting: int, bias: float, expected: str) -> None:
    assert where(place(request(), *gpus, waiting=waiting, tuned=tuned(packing_bias=bias))) == [expected]


@pytest.mark.parametrize(
    ("asked", "on", "kind", "never"),
    [
        pytest.param(request(memory=17 * GIB), gpu(), "memory_never", True, id="larger than the GPU"),
        pytest.param(
            request(known=profile(0.1, 17 * GIB)), gpu(), "memory_never", True, id="measured larger than the GPU"
        ),
        pytest.param(
            request(memory=9 * GIB), gpu("g0", resident("a", memory=8 * GIB)), "memory_short", False, id="memory short"
        ),
        pytest.param(
            request(memory=17 * GIB), gpu(schedulable=False), "memory_never", True, id="never, available or not"
        ),
        pytest.param(request(), gpu(schedulable=False), "not_schedulable", False, id="may come back"),
        pytest.param(
            request(compute=0.6, memory=GIB),
            gpu("g0", resident("a", min_compute=0.5)),
            "compute_short",
            False,
            id="compute",
        ),
        pytest.param(
            request(compute=1.0, memory=GIB),
            gpu("g0", resident("a", 0.1)),
            "compute_short",
            False,
            id="all the compute",
        ),
        pytest.param(
            request(util=0.8),
            gpu("g0", resident("a", 0.8, max_slowdown=9.0)),
            "slowdown_self",
            False,
            id="own slowdown",
        ),
        pytest.param(
            request(util=0.6, max_slowdown=9.0),
            gpu("g0", resident("a", 0.6, max_slowdown=1.1)),
            "slowdown_neighbour",
            False,
            id="a neighbour's slowdown",
        ),
        pytest.param(
            request(util=1.0, max_slowdown=9.0),
            gpu("g0", resident("a", 1.0, max_slowdown=9.0)),
            "no_saving",
            False,
            id="one after the other is faster",
        ),
        pytest.param(request(exclusive=True), gpu("g0", LIGHT), "exclusive_wanted", False, id="wants to be alone"),
        pytest.param(
            request(),
            gpu("g0", resident("a", exclusive=True)),
            "exclusive_resident",
            False,
            id="beside an exclusive job",
        ),
        pytest.param(
            request(known=UNKNOWN, memory=GIB), gpu("g0", LIGHT), "unprofiled_self", False, id="nothing known of it"
        ),
        pytest.param(
            request(known=UNKNOWN), gpu("g0", LIGHT), "unprofiled_self", False, id="nothing known, not even its memory"
        ),
        pytest.param(
            request(known=UNKNOWN, memory=16 * GIB), gpu("g0", LIGHT), "memory_short", False, id="only its memory known"
        ),
        pytest.param(
            request(),
            gpu("g0", resident("a", known=UNKNOWN)),
            "unprofiled_resident",
            False,
            id="nothing known of the other",
        ),
        pytest.param(
            request(),
            gpu("g0", resident("a", known=profile(0.2, observed_s=4.9))),
            "unprofiled_resident",
            False,
            id="the other still being measured",
        ),
        pytest.param(
            request(util=0.01),
            gpu("g0", *(resident(f"r{i}", 0.01) for i in range(4))),
            "share_limit",
            False,
            id="too many",
        ),
    ],
)
def test_why_not(asked: Request, on: GpuView, kind: str, never: bool) -> None:
    answer = place(asked, on, waiting=9)
    assert isinstance(answer, NoFit)
    assert (refusal(answer), answer.never) == ([(kind, "g0")], never)


@pytest.mark.parametrize(
    "known",
    [profile(0.2, observed_s=5.0), profile(0.2, source="hints", observed_s=0.0)],
    ids=["measured long enough", "hinted"],
)
def test_a_neighbour_that_is_known_well_enough_is_accepted(known: object) -> None:
    assert where(place(request(), gpu("g0", resident("a", known=known)), waiting=9)) == ["g0"]  # type: ignore[arg-type]


def test_hints_replace_the_missing_profile() -> None:
    hinted = request(known=UNKNOWN, memory=GIB, compute=0.3)
    assert where(place(hinted, gpu("g0", LIGHT), waiting=9)) == ["g0"]


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        pytest.param(request(memory=3 * GIB, known=profile(0.1, GIB)), 3 * GIB, id="the hint"),
        pytest.param(request(known=profile(0.1, 10 * MIB)), 11 * MIB, id="measured peak and margin"),
        pytest.param(request(known=profile(0.1, 15 * GIB + 1)), 16 * GIB, id="the margin does not make it unplaceable"),
        pytest.param(request(known=UNKNOWN), 16 * GIB, id="nothing known: the whole GPU"),
    ],
)
def test_memory_reserved(asked: Request, reserved: int) -> None:
    answer = place(asked, gpu())
    assert isinstance(answer, Placement)
    assert [(share.memory_bytes, share.compute) for share in answer.shares] == [(reserved, 1.0)]


def test_first_shares_squeeze_neighbours_to_what_they_need() -> None:
    answer = place(request(util=0.4), gpu("g0", resident("a", 0.2, compute=1.0)), waiting=9)
    assert isinstance(answer, Placement)
    [share], [(squeezed_id, squeezed)] = answer.shares, answer.squeezed
    assert (squeezed_id, squeezed.memory_bytes) == ("a", GIB)
    assert share.compute + squeezed.compute == 1.0
    assert share.compute == pytest.approx(2 / 3, abs=1e-3)  # the leftover is divided like the needs: .46 to .23


def test_a_guarantee_survives_squeezing() -> None:
    answer = place(
        request(util=0.5, max_slowdown=3.0), gpu("g0", resident("a", 0.5, compute=1.0, min_compute=0.7)), waiting=9
    )
    assert isinstance(answer, Placement)
    assert answer.squeezed[0][1].compute == pytest.approx(0.7, abs=1 / 4096)
    assert answer.shares[0].compute == pytest.approx(0.3, abs=1 / 4096)


def test_the_placement_says_what_it_rests_on() -> None:
    answer = place(request(util=0.5), gpu("g0", resident("a", 0.5)), waiting=9)
    assert isinstance(answer, Placement)
    assert {job_id: p.slowdown for job_id, p in answer.predicted.items()} == pytest.approx(
        {"a": 1.025 / 0.96, "new": 1.025 / 0.96}
    )
    assert answer.saving == pytest.approx(1 - 1.025 / 0.96 / 2)
    assert answer.score == pytest.approx(0.5 * 0.46615 - 0.5 * 0.06771, abs=1e-4)
    assert answer.reason == ("on g0 beside a: predicted saving 47%, own slowdown 1.07 (sum of utilisations 1.00)")


def test_several_gpus_all_or_nothing() -> None:
    busy = gpu("g3", resident("a", 0.9), host="h1")
    cluster = [gpu("g0", host="h0"), gpu("g1", host="h1"), gpu("g2", host="h1"), busy]
    assert where(place(request(gpus=2), *cluster, waiting=2)) == ["g1", "g2"]
    assert where(place(request(gpus=3, one_host=False), *cluster, waiting=3)) == ["g0", "g1", "g2"]
    answer = place(request(gpus=3, util=0.9), *cluster, waiting=3)
    assert refusal(answer) == [("too_few_gpus", None), ("too_few_on_host", None), ("slowdown_self", "g3")]
    assert isinstance(answer, NoFit)
    assert [(e.needed, e.available) for e in answer.errors[:2]] == [(3, 3), (3, 2)]
    assert not answer.never


def test_four_free_but_at_most_two_on_one_host() -> None:
    cluster = [gpu(f"g{i}", host=f"h{i // 2}") for i in range(4)]
    busy = gpu("g4", resident("a", exclusive=True), host="h1")
    answer = place(request(gpus=3), *cluster, busy)
    assert refusal(answer)[:2] == [("too_few_gpus", None), ("too_few_on_host", None)]
    assert isinstance(answer, NoFit)
    assert [(e.needed, e.available) for e in answer.errors[:2]] == [(3, 4), (3, 2)]
    assert not answer.never  # host h1 has three GPUs


@pytest.mark.parametrize(
    ("asked", "cluster", "kinds", "never"),
    [
        pytest.param(request(), [], ["too_few_gpus"], False, id="no host has joined yet"),
        pytest.param(request(gpus=3), [gpu("g0"), gpu("g1")], ["gpus_never"], True, id="more than there are"),
        pytest.param(
            request(gpus=2), [gpu("g0"), gpu("g1", host="h1")], ["gpus_never"], True, id="more than any host has"
        ),
        pytest.param(
            request(gpus=2, memory=9 * GIB),
            [gpu("g0"), gpu("g1", memory=8 * GIB)],
            ["gpus_never", "memory_never"],
            True,
            id="large enough ones are too few",
        ),
        pytest.param(
            request(gpus=2),
            [gpu("g0"), gpu("g1", schedulable=False)],
            ["too_few_gpus", "not_schedulable"],
            False,
            id="back soon",
        ),
    ],
)
def test_never_is_decided_against_the_empty_cluster(
    asked: Request, cluster: list[GpuView], kinds: list[str], never: bool
) -> None:
    answer = place(asked, *cluster)
    assert isinstance(answer, NoFit)
    assert ([kind for kind, _ in refusal(answer)], answer.never) == (kinds, never)


def fill(jobs: list[Request], *gpus: GpuView, tuned: PlacementSettings = SETTINGS) -> dict[str, int]:
    """Place the jobs one after the other; return how many each GPU carries."""
    statement = Statement(gpus)
    for left, job in zip(range(len(jobs), 0, -1), jobs, strict=True):
        answer = place(job, *statement.view(), waiting=left, tuned=tuned)
        if isinstance(answer, Placement):
            statement.place(job, answer)
    for view in statement.view():
        assert math.fsum(r.share.compute for r in view.residents) <= 1.0
        assert sum(r.share.memory_bytes for r in view.residents) <= view.memory_bytes
    return {view.gpu_id: len(view.residents) for view in statement.view()}


def test_sixteen_halves_on_eight_gpus_go_two_by_two() -> None:
    halves = [request(f"j{i}", memory=GIB, compute=0.5, known=from_hints(0.5, GIB)) for i in range(16)]
    assert fill(halves, *(gpu(f"g{i}") for i in range(8))) == {f"g{i}": 2 for i in range(8)}
    assert fill([*halves, halves[0]], gpu("g0")) == {"g0": 2}


@pytest.mark.parametrize(
    ("compute", "most"), [(0.1, 10), (0.2, 5), (0.3, 3), (1 / 3, 3), (0.34, 2), (0.7, 1), (0.07, 14), (0.0625, 16)]
)
def test_guarantees_add_up_to_one_whatever_binary_fractions_do(compute: float, most: int) -> None:
    jobs = [
        request(f"j{i}", memory=GIB // 8, compute=compute, max_slowdown=48.0, known=profile(0.02)) for i in range(20)
    ]
    assert fill(jobs, gpu(), tuned=tuned(max_jobs_per_gpu=48)) == {"g0": most}


def test_memory_is_filled_to_the_last_whole_job() -> None:
    jobs = [request(f"j{i}", memory=2000 * MIB, compute=0.01, known=from_hints(0.01, 2000 * MIB)) for i in range(24)]
    assert fill(jobs, gpu(memory=46_068 * MIB), tuned=tuned(max_jobs_per_gpu=48)) == {"g0": 23}


def test_exclusive_takes_the_smallest_sufficient_gpu_whole() -> None:
    cluster = [gpu("big", memory=32 * GIB), gpu("small", memory=8 * GIB), gpu("busy", LIGHT, memory=4 * GIB)]
    answer = place(request(memory=2 * GIB), *cluster, name="exclusive")
    assert isinstance(answer, Placement)
    assert [(s.gpu_id, s.memory_bytes, s.compute) for s in answer.shares] == [("small", 8 * GIB, 1.0)]
    assert refusal(place(request(), gpu("g0", LIGHT), name="exclusive")) == [("share_limit", "g0")]


def test_static_fills_equal_slots_first_fit_and_predicts_nothing() -> None:
    third = tuned(static_slots=3)
    cluster = [gpu("g0"), gpu("g1")]
    heavy = [request(f"j{i}", util=1.0, known=UNKNOWN) for i in range(7)]
    statement = Statement(cluster)
    placed = []
    for job in heavy:
        answer = place(job, *statement.view(), name="static", tuned=third)
        if isinstance(answer, Placement):
            statement.place(job, answer)
            placed.append((*where(answer), answer.shares[0].memory_bytes, answer.shares[0].compute))
    slot = (16 * GIB // 3, round_down(1 / 3))
    assert placed == [("g0", *slot)] * 3 + [("g1", *slot)] * 3


@pytest.mark.parametrize(
    ("asked", "on", "kind", "never"),
    [
        (request(memory=9 * GIB), gpu(), "memory_never", True),
        (request(compute=0.6), gpu(), "compute_short", True),
        (request(), gpu("g0", LIGHT, LIGHT), "share_limit", False),
        (request(exclusive=True), gpu("g0", LIGHT), "exclusive_wanted", False),
        (request(), gpu("g0", resident("a", memory=9 * GIB)), "memory_short", False),
        (request(), gpu("g0", resident("a", min_compute=0.6)), "compute_short", False),
    ],
)
def test_static_refuses_what_no_slot_holds(asked: Request, on: GpuView, kind: str, never: bool) -> None:
    answer = place(asked, on, name="static")
    assert isinstance(answer, NoFit)
    assert (refusal(answer), answer.never) == ([(kind, "g0")], never)


def test_an_unknown_policy_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"policy: 'best' is not accepted; give one of cotenant, exclusive, static"):
        policy("best")


claims = st.builds(Claim, st.sampled_from([0.0, 0.1, 0.2, 0.3]), st.floats(0.0, 1.0), st.sampled_from([0.5, 1.0, 2.0]))


@given(st.lists(claims, min_size=1, max_size=12))
def test_dividing_hands_out_everything_and_keeps_promises(wanted: list[Claim]) -> None:
    parts = divide(wanted)
    assert math.fsum(parts) == 1.0
    assert sum(parts) == 1.0
    promised = math.fsum(claim.minimum for claim in wanted)
    for claim, part in zip(wanted, parts, strict=True):
        assert part > 0.0
        assert part >= claim.minimum / max(1.0, promised) - (len(wanted) + 1) / 4096


@given(st.lists(claims, min_size=2, max_size=6), st.data())
def test_whoever_gets_less_than_it_demands_has_no_less_than_the_others_by_weight(
    wanted: list[Claim], data: st.DataObject
) -> None:
    parts = divide(wanted)
    i = data.draw(st.integers(0, len(wanted) - 1))
    if math.fsum(max(c.demand, c.minimum, 0.02) for c in wanted) < 1.0 or math.fsum(c.minimum for c in wanted) > 0.9:
        return
    if parts[i] < wanted[i].demand - 2 / 4096:
        for claim, part in zip(wanted, parts, strict=True):
            if part > max(claim.minimum, 0.02) + 2 / 4096:
                assert part / claim.weight <= parts[i] / wanted[i].weight + 8 / 4096


jobs = st.builds(
    request,
    st.just("j"),
    st.floats(0.0, 1.0),
    gpus=st.integers(1, 2),
    memory=st.none() | st.integers(1, 20).map(lambda n: n * GIB),
    compute=st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7]),
    max_slowdown=st.sampled_from([1.0, 1.2, 1.5, 3.0]),
    exclusive=st.booleans(),
    one_host=st.booleans(),
)


@given(st.lists(jobs, max_size=15), st.floats(0.0, 1.0), st.integers(1, 8))
def test_cotenant_never_breaks_a_promise(asked: list[Request], bias: float, limit: int) -> None:
    rules = tuned(packing_bias=bias, max_jobs_per_gpu=limit)
    statement = Statement([gpu("g0"), gpu("g1"), gpu("g2", host="h1", memory=8 * GIB)])
    for i, anonymous in enumerate(asked):
        job = replace(anonymous, job_id=f"j{i}")
        answer = place(job, *statement.view(), waiting=job.gpus, tuned=rules)
        if isinstance(answer, Placement):
            statement.place(job, answer)
    for view in statement.view():
        members = view.residents
        assert len(members) <= limit
        assert sum(r.share.memory_bytes for r in members) <= view.memory_bytes
        assert sum(r.share.compute for r in members) <= 1.0
        assert math.fsum(r.min_compute for r in members) <= 1.0 + 1e-9
        assert all(r.share.compute >= r.min_compute - 1 / 4096 for r in members)
        assert len(members) <= 1 or not any(r.exclusive for r in members)
        predictions = RULE.predict([r.profile for r in members], view.gpu_type) if members else []
        assert all(p.slowdown <= r.max_slowdown + 1e-6 for r, p in zip(members, predictions, strict=True))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request(known=UNKNOWN), "to be measured first, since nothing is known of what it uses"),
        (request(exclusive=True), "it wants GPUs of its own"),
        (request(), "no GPU that others use can take it as well"),
    ],
)
def test_why_a_job_is_alone_while_others_wait(asked: Request, why: str) -> None:
    answer = place(asked, gpu("g0"), waiting=3)
    assert isinstance(answer, Placement)
    assert answer.reason == f"alone on g0: {why}"


@pytest.mark.parametrize(
    ("waiting", "rules", "why"),
    [
        (9, {"max_jobs_per_gpu": 1, "packing_bias": 1.0}, "no GPU that others use can take it as well"),
        (9, {"packing_bias": 0.0}, "no neighbour would gain more than it costs"),
        (1, {"packing_bias": 0.5}, "empty, so that nobody is slowed"),
    ],
)
def test_why_a_job_is_alone_beside_a_gpu_in_use(waiting: int, rules: dict[str, object], why: str) -> None:
    """A limit that closes the other GPU was told as a neighbour that would gain too little."""
    answer = place(request(), gpu("g0", LIGHT), gpu("g1"), waiting=waiting, tuned=tuned(**rules))
    assert isinstance(answer, Placement)
    assert answer.reason == f"alone on g1: {why}"
