"""How large the cluster should be: the decision, what leads to it, and what it comes to in the simulator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from scaled import RULES, PlayedCluster, asked, scaled
from scheduling import GIB, Driver, half, host, settings, spec

from cotenant.actors import fleet
from cotenant.actors.scaling import EVERY_S, Scaler
from cotenant.configs.settings import AccountSettings, ScalingSettings, SchedulingSettings
from cotenant.scheduler.core.events import HostJoined, HostLost, HostUnreachable, Tick
from cotenant.scheduler.core.scaling import Ask, Load, ScalingMemory, Size, asks_of, decide, loads_of
from cotenant.scheduler.simulation.elastic import LOOK_S, ElasticShell
from cotenant.scheduler.simulation.truth import NoInterference
from cotenant.scheduler.simulation.workload import TraceJob, even_cluster, trace_of
from cotenant.scheduler.simulation.world import World

BUSY, IDLE, OLD = Load("busy", 4, True), Load("idle", 4, False), Load("old", 4, False)
LONG_IDLE = ScalingMemory({"idle": 50.0, "old": 10.0})


@pytest.mark.parametrize(
    ("asks", "hosts", "rules", "want"),
    [
        ([], [], RULES, Size((), ())),
        ([Ask(1), Ask(2)], [], RULES, Size((2, 1), (), (2, 1))),
        ([Ask(1, 0.3)] * 5, [BUSY], RULES, Size((4, 1, 1), (), (1, 1))),
        ([Ask(1, 0.9), Ask(1, 0.1)], [], RULES, Size((1, 1), (), (1, 1))),
        ([], [BUSY, IDLE, OLD], RULES, Size((4,), ("old", "idle"))),
        ([Ask(4)], [BUSY, IDLE, OLD], RULES, Size((4, 4, 4), ("old",), (4,))),
        ([], [BUSY, IDLE, OLD], RULES.model_copy(update={"least_gpus": 8}), Size((4, 4), ("old",))),
        ([], [], RULES.model_copy(update={"least_gpus": 2}), Size((1, 1), (), (1, 1))),
        ([Ask(8), Ask(2)], [BUSY], RULES.model_copy(update={"most_gpus": 6}), Size((4, 2), (), (2,))),
    ],
    ids=[
        "nothing",
        "an empty cluster asked by two",
        "parts are packed",
        "a part that fills a GPU",
        "idle hosts go, the longest idle first",
        "one of them is wanted",
        "never fewer",
        "never fewer than some, from none",
        "never more",
    ],
)
def test_the_decision(asks: Sequence[Ask], hosts: Sequence[Load], rules: ScalingSettings, want: Size) -> None:
    assert decide(asks, hosts, LONG_IDLE, rules, 160.0)[0] == want


def test_a_host_goes_only_after_a_pause_and_anything_that_runs_there_ends_it() -> None:
    memory, gone = ScalingMemory(), []
    for now, busy in ((0.0, False), (90.0, False), (95.0, True), (100.0, False), (190.0, False), (200.0, False)):
        size, memory = decide([], [Load("h", 1, busy)], memory, RULES, now)
        gone.append(size.spare)
    assert gone == [(), (), (), (), (), ("h",)]


def test_who_asks() -> None:
    limited = SchedulingSettings(tenants={"ml": AccountSettings(most_gpus=0.5)})
    driver = Driver(host(memory=8 * GIB), configured=settings().model_copy(update={"scheduling": limited}))
    driver.run(spec("runs", isolation="hard"))
    driver.submit(
        half("part", gpu_memory=2 * GIB, compute=0.4),
        half("memory", gpu_memory=6 * GIB, compute=0.1),
        spec("unknown"),
        half("limited", tenant="ml", compute=0.4, gpu_memory=4 * GIB, isolation="hard"),
    )
    assert asks_of(driver.core.state, RULES, driver.now) == []
    driver.do(Tick(), after_s=40.0)
    driver.submit(spec("new"))
    assert asks_of(driver.core.state, RULES, driver.now) == [Ask(1, 0.4), Ask(1, 0.75), Ask(1)]
    assert loads_of(driver.core.state) == [Load("h1", 1, True, 0.0)]
    driver.do(HostUnreachable("h1", "silent"))
    assert loads_of(driver.core.state) == []


def test_jobs_ask_while_there_is_no_host_at_all() -> None:
    """From nothing, and once the last host was given back."""
    driver = scaled()
    driver.submit(half("first", compute=0.4), spec("gang", gpus=2))
    assert asked(driver) == [Ask(1, 0.4), Ask(2)]
    driver = scaled(host())
    driver.do(HostLost("h1", "given back"))
    driver.submit(spec("later"))
    assert asked(driver) == [Ask(1)]
    driver.do(HostJoined(host("h2")))
    assert driver.state("later") == "STARTING"


@pytest.mark.parametrize(
    ("hints", "wants"),
    [({"gpus": 4, "gang": "cluster"}, [Ask(1)] * 4), ({"gpus": 4}, [Ask(4)]), ({"gpus": 2}, [Ask(2)])],
)
def test_a_job_larger_than_the_cluster_waits_until_it_has_grown(hints: dict[str, Any], wants: list[Ask]) -> None:
    driver = scaled(host())
    driver.submit(spec("large", **hints))
    assert asked(driver) == wants
    assert driver.state("large") == "QUEUED"
    driver.do(HostJoined(host("h2", gpus=4)))
    assert driver.state("large") == "STARTING"


@pytest.mark.parametrize(
    ("rules", "hints"),
    [
        ({"enabled": False}, {"gpus": 4}),
        ({"most_gpus": 3}, {"gpus": 4}),
        ({}, {"gpu_memory": 100 * GIB}),
        ({}, {"gpu_memory": 100 * GIB, "gpus": 4}),
    ],
    ids=["it cannot grow", "not so far", "all GPUs are too small", "all GPUs are too small, and too few"],
)
def test_a_job_for_which_growing_is_no_help_fails_at_once(rules: dict[str, Any], hints: dict[str, Any]) -> None:
    driver = scaled(host(gpus=2), **rules)
    driver.submit(spec("never", **hints))
    assert driver.state("never") == "FAILED"
    assert driver.job("never").not_placeable
    assert asked(driver) == []


def test_a_gpu_that_is_too_small_does_not_keep_a_job_from_asking_for_another() -> None:
    driver = scaled(host(memory=2 * GIB), host("h2"))
    driver.run(spec("runs", gpu_memory=6 * GIB, isolation="hard"))
    driver.submit(spec("waits", gpu_memory=6 * GIB, compute=0.5))
    assert asked(driver) == [Ask(1, 0.75)]


def test_ray_is_told_again_and_again_and_not_all_the_time() -> None:
    """A host agent that was started anew has claimed its GPUs again; what it was told before may never have come."""
    driver = Driver(configured=settings().model_copy(update={"scaling": RULES}))
    told: list[Size] = []
    failing = [True]
    now = [0.0]

    def resize(size: Size) -> None:
        if failing.pop() if failing else False:
            raise ConnectionError("no Ray")
        told.append(size)

    scaler = Scaler(resize, clock=lambda: now[0])
    driver.submit(spec("a", gpus=2))
    driver.now += 60.0
    lock = threading.Lock()
    with pytest.raises(ConnectionError):
        scaler.look(lock, driver.core, driver.now)
    scaler.look(lock, driver.core, driver.now)
    assert told == []
    for _ in range(3):
        now[0] += EVERY_S
        for _ in range(2):
            scaler.look(lock, driver.core, driver.now)
    assert told == [Size((2,), (), (2,))] * 3


def test_ray_gets_bundles_of_gpus_and_spare_hosts_let_go_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlayedCluster(monkeypatch, stays=1, goes=1)
    for spare in (("goes",), ()):
        assert cluster.look(*spare, stay=(4, 1)) == {"stays", "goes"}
    assert cluster.asked == [[{"GPU": 4}, {"GPU": 1}]] * 2
    assert cluster.held("stays") == [True, True]
    assert cluster.held("goes") == [False, True]


def test_a_node_that_was_given_back_has_no_agent_until_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's autoscaler removes no node on which an actor lives: those that were given back stayed for ever."""
    cluster = PlayedCluster(monkeypatch, stays=1, goes=1)
    assert cluster.look("goes", stay=(1,)) == {"stays", "goes"}
    assert cluster.look("goes", stay=(1,)) == {"stays"}
    assert cluster.fleet.why_gone("goes") == "given back to Ray"
    for _ in range(3):
        assert cluster.look(stay=(1,)) == {"stays"}
        assert set(cluster.agents) == {fleet.agent_name("stays")}
    assert cluster.look(stay=(1,), to_come=(1,)) == {"stays", "goes"}
    cluster.look(stay=(1, 1))
    assert cluster.held("goes") == [True], "a new one"
    cluster.look("goes", stay=(1,))
    cluster.look("goes", stay=(1,))
    del cluster.gpus["goes"]
    assert cluster.look(stay=(1,)) == {"stays"}
    assert cluster.fleet.why_gone("goes") == "Ray says the node is dead"


def test_an_agent_that_has_not_given_its_gpus_back_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlayedCluster(monkeypatch, starts=1)
    cluster.agents[fleet.agent_name("starts")].busy = True
    for _ in range(3):
        assert cluster.look("starts") == {"starts"}
    assert not any(agent.ended for agent in cluster.agents.values())


def test_a_host_on_which_ray_counts_no_gpus_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could ask for them again."""
    cluster = PlayedCluster(monkeypatch, scaling=False, uncounted=0)
    for _ in range(3):
        assert cluster.look("uncounted") == {"uncounted"}


@pytest.mark.parametrize(("scaling", "hosts"), [(True, set()), (False, {"head"})])
def test_where_gpus_are_to_come_jobs_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, scaling: bool, hosts: set[str]
) -> None:
    """With no GPU node yet the head's cores were taken for GPUs; what ran there was lost when the first node came."""
    cluster = PlayedCluster(monkeypatch, scaling=scaling, head=0)
    assert cluster.look() == hosts
    cluster.gpus["new"] = 1
    assert cluster.look() == {"new"}


@pytest.mark.parametrize(
    ("to_come", "woken"),
    [
        ((1,), {"one"}),
        ((1, 1), {"one", "two"}),
        ((2, 1), {"two", "one"}),
        ((4,), {"eight"}),
        ((4, 4, 1), {"eight", "one"}),
        ((16,), set()),
        ((16, 1), {"one"}),
    ],
)
def test_no_more_nodes_are_woken_than_what_is_wanted_needs(
    monkeypatch: pytest.MonkeyPatch, to_come: tuple[int, ...], woken: set[str]
) -> None:
    cluster = PlayedCluster(monkeypatch, one=1, two=2, eight=8)
    for _ in range(3):
        cluster.look("one", "two", "eight")
    for _ in range(3):  # their agents have not reported yet
        assert cluster.look(to_come=to_come) == woken


def test_nothing_is_asked_for_unless_it_is_switched_on() -> None:
    driver = Driver(host())
    scaler = Scaler(lambda size: pytest.fail(f"told {size}"), clock=lambda: 0.0)
    scaler.look(threading.Lock(), driver.core, driver.now)


def test_a_simulated_cluster_grows_for_a_burst_and_shrinks_after_it() -> None:
    burst = [TraceJob(f"b{number}", 1000.0, 1, 300.0, estimate_s=300.0) for number in range(8)]
    trace = trace_of("burst", [TraceJob("early", 0.0, 1, 60.0), *burst, TraceJob("late", 4000.0, 1, 60.0)])
    world = World(trace, even_cluster(8, per_node=2), NoInterference())
    rules = ScalingSettings(enabled=True, least_gpus=2, wait_s=30.0, idle_s=300.0)
    shell = ElasticShell(world, rules, join_s=120.0, checked=True)
    world.run(shell)
    assert all(run.ended_at is not None for run in world.runs)
    up = dict(zip(world.timeline.at, world.timeline.up, strict=True))
    assert (min(up.values()), max(up.values())) == (2, 8)
    grown_at = min(at for at, gpus in up.items() if gpus > 2)
    assert 1000.0 + 30.0 + 120.0 <= grown_at <= 1000.0 + 30.0 + LOOK_S + 120.0  # asked for, and then on its way
    last = max(run.ended_at or 0.0 for run in world.runs)
    assert 1.0 * last < shell.node_hours * 3600.0 < 2.0 * last < 4.0 * last
    assert next(run for run in world.runs if run.job.job_id == "b7").started_at <= 1000.0 + 300.0 + 200.0  # type: ignore[operator]
