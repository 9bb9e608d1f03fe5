"""How large the cluster should be: the decision, what leads to it, and what it comes to in the simulator."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from scheduling import GIB, Driver, half, host, settings, spec

from cotenant.actors.scaling import EVERY_S, Scaler
from cotenant.configs.settings import AccountSettings, ScalingSettings, SchedulingSettings
from cotenant.scheduler.core.events import HostUnreachable, Tick
from cotenant.scheduler.core.scaling import Ask, Load, ScalingMemory, Size, asks_of, decide, loads_of
from cotenant.scheduler.simulation.elastic import ElasticShell
from cotenant.scheduler.simulation.truth import NoInterference
from cotenant.scheduler.simulation.workload import TraceJob, even_cluster, trace_of
from cotenant.scheduler.simulation.world import World

RULES = ScalingSettings(enabled=True, wait_s=30.0, idle_s=100.0)
BUSY, IDLE, OLD = Load("busy", 4, True), Load("idle", 4, False), Load("old", 4, False)
LONG_IDLE = ScalingMemory({"idle": 50.0, "old": 10.0})


@pytest.mark.parametrize(
    ("asks", "hosts", "rules", "want"),
    [
        ([], [], RULES, Size((), ())),
        ([Ask(1), Ask(2)], [], RULES, Size((2, 1), ())),
        ([Ask(1, 0.3)] * 5, [BUSY], RULES, Size((4, 1, 1), ())),
        ([Ask(1, 0.9), Ask(1, 0.1)], [], RULES, Size((1, 1), ())),
        ([], [BUSY, IDLE, OLD], RULES, Size((4,), ("old", "idle"))),
        ([Ask(4)], [BUSY, IDLE, OLD], RULES, Size((4, 4, 4), ("old",))),
        ([], [BUSY, IDLE, OLD], RULES.model_copy(update={"least_gpus": 8}), Size((4, 4), ("old",))),
        ([], [], RULES.model_copy(update={"least_gpus": 2}), Size((1, 1), ())),
        ([Ask(8), Ask(2)], [BUSY], RULES.model_copy(update={"most_gpus": 6}), Size((4, 2), ())),
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
    assert loads_of(driver.core.state) == [Load("h1", 1, True)]
    driver.do(HostUnreachable("h1", "silent"))
    assert loads_of(driver.core.state) == []


def test_ray_is_told_what_is_new_and_again_when_that_failed() -> None:
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
        scaler.look(lock, driver.core, driver.now)
    assert told == [Size((), ())]


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
    last = max(run.ended_at or 0.0 for run in world.runs)
    assert 1.0 * last < shell.node_hours * 3600.0 < 2.0 * last < 4.0 * last
    assert next(run for run in world.runs if run.job.job_id == "b7").started_at <= 1000.0 + 300.0 + 200.0  # type: ignore[operator]
