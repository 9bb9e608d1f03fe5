"""Jobs that only hosts could take which have left the cluster: where it may grow, they wait for such hosts to come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scaled import RULES, PlayedCluster, asked, scaled
from scheduling import GIB, Driver, half, host, settings, spec

from cotenant.configs.settings import ScalingSettings
from cotenant.placement.engine import policy_names
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import HostJoined, HostLost
from cotenant.scheduler.core.gone import KEPT, remember
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.scaling import Ask, Load, ScalingMemory, Size, asks_of, decide
from cotenant.scheduler.core.state import State

BIG = {"gpu_memory": 12 * GIB, "compute": 0.5}
AS_LARGE = ("large",)


def large(gpus: int = 1, cpus: float | None = None) -> Host:
    return host("large", gpus=gpus, memory=16 * GIB, cpus=cpus)


def given_back(gone: Host | None, *, here: int = 1, policy: str = "cotenant", **rules: Any) -> Driver:
    """A cluster that may grow, with hosts of small GPUs; a host was there, and was given back."""
    configured = settings(policy=policy).model_copy(update={"scaling": RULES.model_copy(update=rules)})
    driver = Driver(host(gpus=here, cpus=2.0), configured=configured)
    if gone is not None:
        driver.do(HostJoined(gone))
        driver.do(HostLost(gone.host_id, "given back to Ray"))
    return driver


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize(
    ("gone", "hints", "wants"),
    [
        (large(), {}, [Ask(1, 0.75, AS_LARGE)]),
        (large(), {"isolation": "hard"}, [Ask(1, 1.0, AS_LARGE)]),
        (large(2), {"gpus": 2}, [Ask(2, 1.0, AS_LARGE)]),
        (large(), {"gpus": 2, "gang": "cluster"}, [Ask(1, 1.0, AS_LARGE)] * 2),
        (large(cpus=8.0), {"gpu_memory": GIB, "cpus": 6.0}, [Ask(1, 0.5, AS_LARGE)]),
    ],
    ids=["memory", "whole GPUs", "several", "several, anywhere", "processors"],
)
def test_a_job_waits_for_such_a_host_and_asks_for_it(
    gone: Host, hints: dict[str, Any], wants: list[Ask], policy: str
) -> None:
    """It failed at once: 'no device of this cluster could ever take it', where Ray could have added one again."""
    driver = given_back(gone, here=2, policy=policy)
    if policy == "static" and "isolation" not in hints:  # half of a GPU is the most that those get who share
        hints = hints | {"gpu_memory": min(hints.get("gpu_memory", 12 * GIB), 6 * GIB)}
        wants = [replace(ask, part=min(ask.part, 0.5) if ask.part < 1.0 else 1.0) for ask in wants]
    driver.submit(spec("big", **(BIG | hints)))
    assert driver.state("big") == "QUEUED"
    assert asked(driver) == wants
    told = queries.explain(driver.core.state, "big", driver.now)
    assert "wants GPUs that only hosts had which have left the cluster: such are asked for" in told.summary
    assert any("wait for such a node" in each for each in told.would_help)
    for name in ("new1", "new2"):
        driver.do(HostJoined(host(name, gpus=len(gone.gpus), memory=16 * GIB, cpus=gone.cpus)))
    assert driver.state("big") == "STARTING"


@pytest.mark.parametrize(
    ("gone", "hints", "rules"),
    [
        (None, {}, {}),
        (large(), {}, {"enabled": False}),
        (large(), {"gpu_memory": 20 * GIB}, {}),
        (large(), {"gpus": 2}, {}),
        (large(2), {"gpus": 2}, {"most_gpus": 1}),
        (large(cpus=4.0), {"gpu_memory": GIB, "cpus": 6.0}, {}),
    ],
    ids=["never seen", "cannot grow", "too large for that too", "too few there", "not so far", "too few processors"],
)
def test_a_job_that_no_host_ever_could_take_fails_at_once(
    gone: Host | None, hints: dict[str, Any], rules: dict[str, Any]
) -> None:
    driver = given_back(gone, here=2, **rules)
    driver.submit(spec("never", **(BIG | hints)))
    assert driver.state("never") == "FAILED"
    assert driver.job("never").not_placeable
    assert asked(driver) == []


def test_one_that_waited_when_the_host_left_asks_from_then_on() -> None:
    driver = scaled(host(), large())
    driver.run(spec("there", isolation="hard", **BIG))
    driver.submit(spec("waits", isolation="hard", **BIG))
    driver.do(HostLost("large", "given back to Ray"))
    assert driver.state("waits") == "QUEUED"
    assert Ask(1, 1.0, AS_LARGE) in asked(driver)


def test_it_is_remembered_over_a_restart_and_older_states_are_read() -> None:
    driver = given_back(large())
    text = driver.core.state.to_json()
    assert State.from_json(text).to_json() == text
    driver.core = Core.from_state(State.from_json(text))
    driver.submit(spec("big", **BIG))
    assert driver.state("big") == "QUEUED"
    older = json.loads(text)
    del older[0]["gone"]
    driver.core = Core.from_state(State.from_json(json.dumps(older).encode()))
    driver.submit(spec("never", **BIG))
    assert driver.state("never") == "FAILED"


def test_kinds_of_hosts_are_forgotten_last() -> None:
    gone = remember({}, large())
    for number in range(3 * KEPT):
        gone = remember(gone, host(f"h{number}"))
    assert len(gone) == KEPT
    assert "large" in gone
    assert f"h{3 * KEPT - 1}" in gone
    for number in range(3 * KEPT):
        gone = remember(gone, host(f"h{number}", memory=(number + 1) * GIB))
    assert len(gone) == KEPT


@pytest.mark.parametrize(
    ("asks", "hosts", "most", "particular", "unsure"),
    [
        ([Ask(1, 0.3, AS_LARGE)] * 2, [], None, [Ask(1, 1.0, AS_LARGE)], False),
        (
            [Ask(1, 0.9, AS_LARGE), Ask(4, 1.0, ("larger",))],
            [],
            None,
            [Ask(4, 1.0, ("larger",)), Ask(1, 1.0, AS_LARGE)],
            False,
        ),
        ([Ask(1, 0.9, AS_LARGE)], [Load("idle", 1, False, 0.0)], None, [Ask(1, 1.0, AS_LARGE)], False),
        ([Ask(1, 0.9, AS_LARGE)], [Load("new", 1, False, 150.0)], None, [Ask(1, 1.0, AS_LARGE)], True),
        ([Ask(1, 0.9, AS_LARGE)], [Load("new", 1, True, 150.0)], None, [Ask(1, 1.0, AS_LARGE)], False),
        ([Ask(1, 0.9, AS_LARGE)], [Load("busy", 1, True)], 1, [], False),
    ],
    ids=["parts are packed", "by kind", "idle for long", "one of the wrong kind has just come", "busy", "never more"],
)
def test_hosts_of_a_kind_are_asked_for_besides(
    asks: list[Ask], hosts: list[Load], most: int | None, particular: list[Ask], unsure: bool
) -> None:
    rules = RULES.model_copy(update={"most_gpus": most})
    size, _ = decide(asks, hosts, ScalingMemory({"idle": 150.0, "new": 150.0}), rules, 160.0)
    assert size == Size(tuple(load.gpus for load in hosts), (), (), tuple(particular), unsure)


def test_hosts_that_are_too_small_are_given_back_meanwhile() -> None:
    asks, hosts = [Ask(1, 0.9, AS_LARGE)], [Load("idle", 1, False, 0.0)]
    assert decide(asks, hosts, ScalingMemory({"idle": 0.0}), RULES, 160.0)[0].spare == ("idle",)


def test_ray_is_asked_for_the_type_of_gpu_that_it_said_the_host_had(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlayedCluster(monkeypatch, small=1, large=1)
    cluster.kinds = {"small": "accelerator_type:T4", "large": "accelerator_type:H100"}
    cluster.look(stay=(1, 1))
    del cluster.gpus["large"]
    wanted = (Ask(1, such_as=AS_LARGE), Ask(2, such_as=("never-said",)))
    cluster.fleet.resize(Size((1,), (), (), wanted))
    assert cluster.asked[-1] == [{"GPU": 1}, {"GPU": 1, "accelerator_type:H100": 0.001}, {"GPU": 2}]
    cluster.fleet.resize(Size((1,), (), (), wanted, unsure=True))
    assert cluster.asked[-1] == [{"GPU": 1}]


def test_the_node_that_suits_is_woken_and_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any node with as many GPUs was, the smallest first; the job went on waiting, and so did the large one."""
    cluster = PlayedCluster(monkeypatch, small=1, other=1, large=2)
    for _ in range(3):
        cluster.look("small", "other", "large")
    assert cluster.fleet.ensure_agents() == set()
    size = Size((), (), (1,), (Ask(1, such_as=AS_LARGE),))
    for _ in range(2):
        cluster.now += 1.0
        cluster.fleet.resize(size)
    assert cluster.fleet.ensure_agents() == {"large"}, "it has room for both"
    cluster.fleet.resize(Size((), (), (1, 1), (Ask(1, such_as=AS_LARGE),)))
    assert len(cluster.fleet.ensure_agents()) == 2


def test_what_is_asked_for_is_for_those_only_that_need_it() -> None:
    driver = given_back(large())
    driver.run(half("runs", isolation="hard"))
    driver.submit(half("small"), spec("big", **BIG))
    wants = asked(driver)
    assert [ask.such_as for ask in wants] == [(), AS_LARGE]
    assert asks_of(driver.core.state, ScalingSettings(enabled=True, wait_s=1e6), driver.now) == []


@pytest.mark.parametrize(
    ("hosts", "hints", "want"),
    [
        ((host(), large()), BIG, [Ask(1, 0.75, AS_LARGE)]),
        ((host(), large()), {"gpu_memory": GIB, "compute": 0.4}, [Ask(1, 0.4)]),
        ((host(), large()), {"gpu_memory": 20 * GIB, "compute": 0.4}, [Ask(1, 0.4)]),
        ((large(),), BIG, [Ask(1, 0.5)]),
    ],
    ids=["one kind", "any", "none that was seen", "all were of that kind"],
)
def test_while_there_is_no_host_at_all_the_kind_is_asked_for_too(
    hosts: tuple[Host, ...], hints: dict[str, Any], want: list[Ask]
) -> None:
    """Else the smallest node would come first, for nothing."""
    driver = scaled(*hosts)
    driver.do(*(HostLost(each.host_id, "given back to Ray") for each in hosts))
    driver.submit(spec("first", **hints))
    assert asked(driver) == want
