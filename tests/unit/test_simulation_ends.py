"""Simulations come to their end or say why not; what a crash costs."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulating import ends, job, run, scenario
from typer.testing import CliRunner

from cotenant.cli import app
from cotenant.scheduler.simulation.desk import Desk
from cotenant.scheduler.simulation.errors import SimulationError
from cotenant.scheduler.simulation.policies.queueing import Fifo
from cotenant.scheduler.simulation.simulate import COLLECT_AT, simulate
from cotenant.scheduler.simulation.world import Costs, Faults, Happening, World

LONG = job("long", 0, 5000)


@pytest.mark.parametrize("policy", ["cotenant", "fifo", "tiresias"])
def test_jobs_that_crash_before_every_checkpoint_are_named(policy: str) -> None:
    work = scenario([LONG], costs=Costs(), faults=Faults(job_mtbf_s=36.0))
    with pytest.raises(SimulationError) as caught:
        simulate(work, policy)
    message = str(caught.value)
    assert "no work has been done for 5,000 steps: job long (one of 1) has crashed" in message
    assert "for which it must run 660 s, the restart included; give a longer time between crashes" in message


@pytest.mark.parametrize("policy", ["cotenant", "fifo", "gavel"])
def test_a_job_whose_hosts_are_never_all_there_is_named(policy: str) -> None:
    wide = scenario([job("wide", 0, 100, gpus=16)], 16, 2, faults=Faults(node_mtbf_s=86.0))
    with pytest.raises(SimulationError, match=r"job wide \(one of 1\) is not started; give more GPUs.*node_mtbf"):
        simulate(wide, policy)


def test_a_policy_that_suspends_more_than_gets_done_is_noticed() -> None:
    """Three jobs take turns every 360 s, and each turn costs 500 s of work."""
    work = scenario([LONG, job("b", 3, 2000), job("c", 3, 2000)], costs=Costs(500.0, 500.0))
    with pytest.raises(SimulationError, match="times at 500 s of work each; give a smaller restart cost or another"):
        simulate(work, "gavel")


def test_a_policy_that_only_wakes_up_is_noticed() -> None:
    class Sleepless:
        name, knows = "sleepless", "nothing"

        def key(self, entry: object, desk: object) -> tuple[float, ...]:
            return ()

        def schedule(self, desk: object) -> None:
            desk.wake(desk.now + 1.0)  # type: ignore[attr-defined]

    with pytest.raises(SimulationError, match=r"job a \(one of 1\) is not started"):
        run(Sleepless(), [job("a")])  # type: ignore[arg-type]


def test_what_takes_many_steps_but_gets_on_is_left_alone() -> None:
    """A quiet month between two jobs, hundreds of hours of rounds, thousands of crashes of a job that saves in time."""
    assert ends(run("fifo", [job("a"), job("b", 2.6e6)])) == {"a": 100, "b": 2.6e6 + 100}
    assert ends(run("tiresias", [job("a", 0, 1e6), job("b", 30, 1e6)])).keys() == {"a", "b"}
    often = scenario([job("a", length=20_000.0)], faults=Faults(job_mtbf_s=3.0, checkpoint_s=1.0))
    world = simulate(often, "fifo").world
    assert world.runs[0].failures > 6000
    assert world.steps > 6000


def test_a_policy_may_wait_while_jobs_still_come() -> None:
    class Patient(Fifo):
        def schedule(self, desk: Desk) -> None:
            if desk.now >= 6000.0:
                super().schedule(desk)

    result = run(Patient(), [job(f"j{at}", at, 0.5) for at in range(6001)])
    assert result.summary()["ended"] == 6001


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job-mtbf", "0.01"], "job a (one of 3) has crashed"),
        (["--node-mtbf", "0.001"], "job a (one of 3) has crashed"),
        (["--restart-cost", "500", "--policy", "gavel"], "give a smaller restart cost"),
        (["--job-mtbf", "nan"], "job-mtbf: nan is not accepted"),
        (["--node-mtbf", "inf"], "node-mtbf: inf is not accepted; give a number"),
        (["--restart-cost", "nan"], "restart-cost: nan is not accepted"),
        (["--restart-cost", "1e300"], "restart-cost: 1e+300 is not accepted; give a number"),
        (["--gpu-memory", "inf"], "gpu-memory: inf is not accepted; give a number"),
        (["--gpu-memory", "1e300"], "gpu-memory: 1e+300 is not accepted; give a number"),
    ],
)
def test_options_with_which_no_simulation_ends_are_told_of(tmp_path: Path, words: list[str], message: str) -> None:
    path = tmp_path / "trace.json"
    jobs = [{"job_id": "a", "submit_s": 0, "duration_s": 5000}, {"job_id": "b", "submit_s": 3, "duration_s": 2000}]
    jobs.append({"job_id": "c", "submit_s": 3, "duration_s": 2000})
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": jobs}))
    words = ["simulate", str(path), "--gpus", "1", "--policy", "fifo", "--out", str(tmp_path / "out"), *words]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, message in result.output) == (1, True), result.output


# -- crashes ------------------------------------------------------------------------------------------------------


class Always:
    """A driver that has the only job run whenever it can, and suspends it once."""

    def __init__(self, world: World, suspend_at: float | None = None) -> None:
        self.world = world
        if suspend_at is not None:
            world.alarm(suspend_at, "suspend")

    def step(self, happened: Sequence[Happening]) -> None:
        (run_,) = self.world.runs
        if any(each.what == "suspend" for each in happened):
            self.world.suspend(run_)
        if run_.ended_at is None and not run_.running:
            self.world.start(run_, [0])


def expected_end(length: float, faults: Faults, cost: float) -> tuple[float, int]:
    """When one job ends, and how often it crashes: whole checkpoints are kept, a restart that fails begins anew."""
    now, saved, restart, failures = 0.0, 0.0, 0.0, 0
    while True:
        rng = np.random.default_rng((faults.seed, 1, 0, failures + 1))
        lasts = float(rng.exponential(faults.job_mtbf_s))
        if lasts >= restart + length - saved:
            return now + restart + length - saved, failures
        now += lasts
        done = saved + max(0.0, lasts - restart)
        saved = max(saved, done // faults.checkpoint_s * faults.checkpoint_s)
        restart, failures = cost, failures + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("cost", "mtbf_s"), [(7.0, 150.0), (60.0, 90.0)])
def test_a_checkpoint_outlasts_the_next_crash_and_a_restart_that_fails_begins_anew(
    seed: int, cost: float, mtbf_s: float
) -> None:
    faults = Faults(job_mtbf_s=mtbf_s, checkpoint_s=40.0, seed=seed)
    world = scenario([job("a", length=500.0)], costs=Costs(cost, cost), faults=faults).world()
    world.run(Always(world))
    (run_,) = world.runs
    end, failures = expected_end(500.0, faults, cost)
    assert failures > 0
    assert (run_.failures, run_.ended_at) == (failures, pytest.approx(end))


def test_what_a_suspended_job_saved_is_not_lost_in_a_crash() -> None:
    """It is suspended at 100, between two checkpoints, and crashes several times before it ends."""
    faults = Faults(job_mtbf_s=90.0, checkpoint_s=1e6, seed=17)
    lasts = [float(np.random.default_rng((17, 1, 0, start)).exponential(90.0)) for start in range(1, 40)]
    assert lasts[0] > 100.0
    world = scenario([job("a", length=150.0)], costs=Costs(5.0, 5.0), faults=faults).world()
    world.run(Always(world, suspend_at=100.0))
    (run_,) = world.runs
    assert run_.suspensions == 1
    end = 100.0
    for each in lasts[1:]:
        if each >= 55.0:
            end += 55.0
            break
        end += each
    assert run_.failures == sum(each < 55.0 for each in lasts[1 : 1 + run_.failures]) > 0
    assert run_.ended_at == pytest.approx(end)


def test_a_crash_without_a_checkpoint_costs_everything_but_the_default_is_ten_minutes() -> None:
    assert Faults().checkpoint_s == 600.0
    faults = Faults(job_mtbf_s=1500.0, seed=2)
    world = scenario([job("a", length=5000.0)], faults=faults).world()
    world.run(Always(world))
    assert world.runs[0].failures > 0
    assert world.runs[0].ended_at == pytest.approx(expected_end(5000.0, faults, 0.0)[0])


@pytest.mark.parametrize("policy", ["cotenant", "fifo"])
@pytest.mark.parametrize("faults", [Faults(), Faults(job_mtbf_s=36.0)])
def test_garbage_is_looked_for_seldom_while_it_runs_and_as_before_after_it(policy: str, faults: Faults) -> None:
    before, during = gc.get_threshold(), []
    work = replace(scenario([LONG, job("b")], faults=faults), look=lambda world: during.append(gc.get_threshold()))
    if faults == Faults():
        simulate(work, policy)
        assert set(during) == {COLLECT_AT} != {before}
    else:
        with pytest.raises(SimulationError):
            simulate(work, policy)
    assert gc.get_threshold() == before
