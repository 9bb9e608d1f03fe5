"""What holds in every simulation, whoever decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from simulating import CROWD_TRUTH, NO_COST, crowd, ends, halves, job, run, scenario

from cotenant.scheduler.simulation.errors import SimulationError
from cotenant.scheduler.simulation.policies import POLICIES
from cotenant.scheduler.simulation.results import Result, finish_time_fairness, jain
from cotenant.scheduler.simulation.simulate import CORE, Scenario, policy_names, shipped_core, simulate
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Node, even_cluster, mixed_cluster
from cotenant.scheduler.simulation.world import Costs, Faults, Happening, World

COSTS = Costs(20.0, 30.0, 2)


def crowded(**rest: object) -> Scenario:
    """Sixty jobs on six GPUs of two nodes."""
    return Scenario(crowd(largest=3), even_cluster(6, 3), CROWD_TRUTH, COSTS, **rest)  # type: ignore[arg-type]


def simulated(name: str, **rest: object) -> Result:
    """The policy on that work."""
    if name == CORE:
        return shipped_core(crowded(**rest), checked=True)
    return simulate(crowded(**rest), name)


@pytest.fixture(scope="module", params=policy_names())
def result(request: pytest.FixtureRequest) -> Result:
    """Every policy in turn."""
    return simulated(request.param)


def test_every_job_ends_once(result: Result) -> None:
    assert all(run.ended_at is not None and not run.running for run in result.world.runs)
    last = {}
    for stint in result.world.stints:
        last[stint.run] = max(last.get(stint.run, 0.0), stint.end)
    assert [last[run.index] for run in result.world.runs] == [run.ended_at for run in result.world.runs]


def test_nobody_runs_before_its_submission(result: Result) -> None:
    jobs = result.world.runs
    assert all(stint.start >= jobs[stint.run].job.submit_s for stint in result.world.stints)


def test_a_job_never_runs_twice_at_a_time_and_always_on_its_number_of_gpus(result: Result) -> None:
    until: dict[int, float] = {}
    for stint in result.world.stints:
        assert stint.start >= until.get(stint.run, 0.0)
        assert len(set(stint.gpus)) == result.world.runs[stint.run].job.gpus
        until[stint.run] = stint.end


def test_memory_is_never_over_committed(result: Result) -> None:
    world = result.world
    for gpu, memory in enumerate(world.memory):
        changes: list[tuple[float, int]] = []
        for stint in world.stints:
            if gpu in stint.gpus:
                used = world.runs[stint.run].job.memory_bytes
                changes += [(stint.start, used), (stint.end, -used)]
        level = 0
        for _, change in sorted(changes):  # at the same moment what frees comes first
            level += change
            assert level <= memory


def test_work_done_is_the_duration_and_the_restarts(result: Result) -> None:
    for run_ in result.world.runs:
        assert run_.work_s == pytest.approx(run_.job.duration_s + run_.suspensions * COSTS.of(run_.job.gpus))


def test_time_running_is_never_less_than_the_work(result: Result) -> None:
    for run_ in result.world.runs:
        assert run_.run_s >= run_.work_s - 1e-6


def test_occupied_gpus_add_up(result: Result) -> None:
    """The timeline, the stints and the saving tell the same."""
    world, summary = result.world, result.summary()
    assert max(world.timeline.occupied) <= world.cluster.gpus
    alone = sum(len(s.gpus) * (s.end - s.start) for s in world.stints) / 3600.0
    assert summary["gpu_hours_occupied"] <= alone + 1e-9
    if not summary["gpu_hours_shared"]:
        assert summary["gpu_hours_occupied"] == pytest.approx(alone)
    assert world.occupied == world.shared == 0
    assert world.memory_used == [0] * world.cluster.gpus


def test_gpus_are_used_at_most_as_far_as_they_are_occupied(result: Result) -> None:
    summary = result.summary()
    assert 0.0 < summary["utilisation"] < summary["occupied"] <= 1.0
    assert result.world.busy == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", policy_names())
def test_every_job_ends_although_things_break_and_twice_at_the_same_time(name: str) -> None:
    faults = Faults(job_mtbf_s=800.0, node_mtbf_s=4000.0, node_repair_s=500.0, checkpoint_s=100.0, seed=5)
    work = Scenario(crowd(30, largest=3), even_cluster(6, 3), CROWD_TRUTH, COSTS, faults=faults)
    first, again = ((shipped_core(work) if name == CORE else simulate(work, name)).world for _ in range(2))
    assert ends_of(first) == ends_of(again)
    assert sum(run_.failures for run_ in first.runs) > 0
    for run_ in first.runs:
        assert run_.ended_at is not None
        assert run_.work_s >= run_.job.duration_s - 1e-6  # what is lost is done again


def ends_of(world: World) -> list[float | None]:
    return [run.ended_at for run in world.runs]


# -- failures by hand ---------------------------------------------------------------------------------------------


class Scripted:
    """A driver that starts everything it can on GPU 0 and takes notes."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, list[tuple[float, str]]()

    def step(self, happened: Sequence[Happening]) -> None:
        self.seen += [(self.world.now, each.kind) for each in happened]
        for each in self.world.runs:
            up = 0 not in self.world.down
            if up and not each.running and each.ended_at is None and each.job.submit_s <= self.world.now:
                self.world.start(each, [0])


def test_a_crash_costs_what_was_done_since_the_last_checkpoint_and_a_restart() -> None:
    faults = Faults(job_mtbf_s=150.0, checkpoint_s=40.0, seed=3)
    world = scenario([job("a", length=500.0)], costs=Costs(7.0, 7.0), faults=faults).world()
    world.run(Scripted(world))
    (run_,) = world.runs
    assert run_.failures > 0
    lost = run_.work_s - run_.job.duration_s - 7.0 * run_.failures
    assert 0.0 <= lost <= 40.0 * run_.failures


def test_a_lost_node_takes_its_jobs_along_and_comes_back() -> None:
    faults = Faults(node_mtbf_s=50.0, node_repair_s=500.0, seed=1)
    world = scenario([job("a", length=200.0)], faults=faults).world()
    driver = Scripted(world)
    world.run(driver)
    kinds = [kind for _, kind in driver.seen]
    lost = kinds.index("node_lost")
    assert kinds[lost + 1] == "failed"
    at = dict(zip(kinds, (at for at, _ in driver.seen), strict=True))
    assert world.runs[0].failures >= 1
    assert at["node_back"] >= 500.0


# -- what a driver may not do -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda w: w.start(w.runs[0], [0]), "job a: got GPUs .0., needs 2 different ones"),
        (lambda w: w.start(w.runs[0], [0, 0]), "needs 2 different ones"),
        (lambda w: w.suspend(w.runs[0]), "job a: cannot be suspended, it does not run"),
        (lambda w: [w.start(w.runs[0], [0, 1]) for _ in range(2)], "job a: cannot be started, it runs"),
        (lambda w: [w.start(w.runs[0], [0, 1]), w.start(w.runs[1], [0])], "job b: needs .* bytes, GPU 0 has .* left"),
        (lambda w: [w.down.add(0), w.start(w.runs[0], [0, 1])], "GPU 0 is on a lost node"),
    ],
)
def test_what_is_impossible_is_refused(act: Callable[[World], object], message: str) -> None:
    jobs = [job("a", gpus=2, memory_bytes=20 * GIB), job("b", memory_bytes=20 * GIB)]
    world = scenario(jobs, gpus=2).world()
    with pytest.raises(SimulationError, match=message):
        act(world)


def test_a_policy_that_never_starts_anything_is_noticed() -> None:
    class Lazy:
        name, knows = "lazy", "nothing"

        def key(self, entry: object, desk: object) -> tuple[float, ...]:
            return ()

        def schedule(self, desk: object) -> None:
            pass

    with pytest.raises(SimulationError, match="at 0 s nothing happens any more and 1 job has not ended: a"):
        run(Lazy(), [job("a")])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", policy_names())
def test_jobs_larger_than_the_cluster_never_arrive(name: str) -> None:
    jobs = [job("huge", gpus=9), job("fat", memory_bytes=25 * GIB), job("a")]
    result = simulate(scenario(jobs, gpus=2), name)
    assert [run.job.job_id for run in result.world.unplaceable] == ["huge", "fat"]
    assert (result.summary()["ended"], result.summary()["unplaceable"]) == (1, 2)
    assert np.isnan(result.jobs()["jct_s"][0])


@pytest.mark.parametrize("name", ["fifo", "cotenant"])
def test_whoever_waits_for_the_end_hears_of_every_end(name: str) -> None:
    left: list[int] = []
    simulated(name, look=lambda world: left.append(world.unfinished))
    assert left == sorted(set(left), reverse=True)
    assert left[-1] == 0


def test_an_empty_trace_ends_at_once() -> None:
    summary = run("fifo", []).summary()
    assert (summary["jobs"], summary["ended"]) == (0, 0)


# -- truth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "util", "members", "want"),
    [
        ({("a", "a"): 0.5}, {}, ("a",), (1.0,)),
        ({("a", "a"): 0.5}, {}, ("a", "a"), (0.5, 0.5)),
        ({("a", "a"): 0.5}, {}, ("a", "a", "a"), (1 / 3,) * 3),  # in turns
        ({("a", "a"): 1.0}, {}, ("a", "a", "a"), (1.0,) * 3),
        ({("a", "a"): 1.0}, {"a": 0.4}, ("a", "a", "a"), (1 / 1.2,) * 3),  # 1.2 devices' worth of work fills one
        ({("a", "a"): 0.7}, {"a": 1.0}, ("a", "a", "a"), (1.4 / 3,) * 3),  # as much as the best pair does
        ({("a", "b"): 0.8, ("b", "a"): 0.9}, {}, ("a", "b"), (0.8, 0.9)),
    ],
)
def test_three_share_as_their_pairs_say(
    pairs: dict[tuple[str, str], float], util: dict[str, float], members: tuple[str, ...], want: tuple[float, ...]
) -> None:
    assert PairTable(pairs, util).together(members, "gpu") == pytest.approx(want)


def test_a_pair_that_was_never_measured_is_an_error_unless_there_is_a_default() -> None:
    with pytest.raises(KeyError, match="the pair of 'a' and 'b' is not in the table"):
        PairTable({}).together(("a", "b"), "gpu")
    assert PairTable({}, default=0.8).together(("a", "b"), "gpu") == (0.8, 0.8)


def test_gpu_types_have_their_speeds() -> None:
    truth = PairTable({}, solo={("w", "slow"): 0.25})
    world = Scenario(crowd(1), mixed_cluster([("fast", 1), ("slow", 1)]), truth, NO_COST).world()
    assert [node.name for node in world.cluster.nodes] == ["fast-node-0", "slow-node-0"]
    assert (truth.alone("w", "slow", 1), truth.alone("w", "fast", 1)) == (0.25, 1.0)


@pytest.mark.parametrize(("gpus", "want"), [(8, [8]), (10, [8, 2]), (3, [3])])
def test_even_clusters(gpus: int, want: list[int]) -> None:
    cluster = even_cluster(gpus)
    assert [node.gpus for node in cluster.nodes] == want
    assert cluster.gpus == gpus
    assert cluster.nodes[0] == Node("node-0", want[0], "gpu", 24 * GIB)


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="gpus: 0"):
        even_cluster(0)


# -- figures ------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    """Two jobs of 100 s share one GPU at a half each: both end at 200, nothing is saved, both are treated fairly."""
    result = run("first-fit", [job("a", workload="w"), job("b", workload="w")], truth=halves("w"))
    summary = result.summary()
    assert ends(result) == {"a": 200, "b": 200}
    assert summary["jct_s"]["mean"] == summary["makespan_s"] == 200.0
    assert summary["slowdown"]["mean"] == 2.0
    assert summary["saving"] == pytest.approx(0.0)
    assert summary["occupied"] == pytest.approx(1.0)
    assert summary["jain"] == pytest.approx(1.0)
    assert finish_time_fairness(result.world) == pytest.approx([1.0, 1.0])  # alone on half the cluster: 200 as well
    assert list(result.jobs()["ran_with"]) == ["b", "a"]


def test_who_waits_for_another_is_treated_unfairly() -> None:
    result = run("fifo", [job("a"), job("b")])
    fair = finish_time_fairness(result.world)
    assert fair == pytest.approx([100 / 200, 200 / 150])  # b: two wanted the GPU for 100 of its 200 s
    assert result.summary()["finish_time_fairness"]["unfair"] == 0.5


def test_rounding_errors_are_no_unfairness() -> None:
    """Jobs at odd times that never wait and share nothing."""
    fair = run("fifo", [job(f"j{n}", 1e6 * (n / 7.0 % 1.0), 7.0 + n / 3.0) for n in range(60)], gpus=60).summary()
    assert fair["finish_time_fairness"]["max"] != 1.0
    assert fair["finish_time_fairness"]["unfair"] == 0.0


@pytest.mark.parametrize(("values", "want"), [([1.0, 1.0], 1.0), ([1.0, 0.0], 0.5), ([3.0], 1.0)])
def test_jain(values: list[float], want: float) -> None:
    assert jain(np.array(values)) == pytest.approx(want)


def test_sharing_without_slowdown_saves_half() -> None:
    summary = run("first-fit", [job("a", workload="w"), job("b", workload="w")], truth=halves("w", n=1.0)).summary()
    assert summary["saving"] == pytest.approx(0.5)
    assert summary["gpu_hours_shared"] == pytest.approx(100 / 3600)


def test_all_baselines_are_among_the_policies() -> None:
    assert set(policy_names()) == {CORE, *POLICIES}
    with pytest.raises(ValueError, match="policy: 'best' is not accepted; give one of cotenant, fifo"):
        simulate(crowded(), "best")
