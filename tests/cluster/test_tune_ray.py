"""A study spread over a real Ray cluster, and what becomes of it when a worker dies in the middle of a trial."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import studying
from cluster_support import free_port
from command_line import invoke
from studying import Toy

from cotenant.forecasting.training.crews import run
from cotenant.forecasting.training.scores import FoldScore
from cotenant.forecasting.training.studies import Plan, Progress, StudyError, located, opened, outcome, quiet

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[Any]:
    """A Ray head with two cores, without cotenant."""
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    unknown = sys.modules[__name__], studying
    for module in unknown:
        cloudpickle.register_pickle_by_value(module)  # the workers cannot import tests
    head = {"num_cpus": 2, "include_dashboard": False, "dashboard_port": free_port()}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
        yield started
    finally:
        for module in unknown:
            cloudpickle.unregister_pickle_by_value(module)
        ray.shutdown()
        started.shutdown()


def spread(tmp_path: Path, where: str, deadly: str = "") -> tuple[list[optuna.trial.FrozenTrial], Any]:
    from cotenant.actors.tuning import RayTasks

    quiet()
    plan = Plan(Toy(deadly=deadly), located(str(tmp_path / where), "s"), "s", 0, 2)
    told: list[Progress] = []
    with opened(plan) as study:
        run(study, RayTasks(plan, study, 2), 4, None, told.append)
        assert told[-1].done == 4
        return study.trials, outcome(plan, study)


@pytest.mark.parametrize("where", ["folder", "file.journal"])
def test_trials_are_done_by_workers_of_the_cluster(cluster: Any, tmp_path: Path, where: str) -> None:
    trials, found = spread(tmp_path, where)
    assert len(trials) == 4
    assert found.default == {"x": 1.0}
    assert found.best_score.metrics["error"] <= 4.0
    assert len({trial.user_attrs["worker"] for trial in trials}) == 4  # a task each


def test_a_killed_worker_costs_no_trial(cluster: Any, tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    deadly.touch()
    trials, found = spread(tmp_path, "folder", str(deadly))
    (died,) = [trial for trial in trials if trial.state is optuna.trial.TrialState.FAIL]
    (again,) = [trial for trial in trials if trial.system_attrs.get("failed_trial") == died.number]
    assert not deadly.exists()
    assert again.params == died.params
    assert again.state.is_finished()
    assert found.progress.done == 4


def test_a_fault_of_the_program_ends_the_study_and_says_which(cluster: Any, tmp_path: Path) -> None:
    from cotenant.actors.tuning import RayTasks

    class Faulty(Toy):
        def folds(self, options: Mapping[str, Any]) -> Iterator[FoldScore]:
            raise AssertionError("a fault")

    quiet()
    plan = Plan(Faulty(), located(str(tmp_path), "s"), "s", 0, 2)
    with opened(plan) as study:
        with pytest.raises(StudyError, match=r"a trial failed on the cluster: .*a fault"):
            run(study, RayTasks(plan, study, 2), 4, None, lambda _: None)
        assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))


def test_the_command_spreads_trials(cluster: Any, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ("tune", "interference", "cpu", "--trials", "4", "--ray", "--jobs", "2")
    code, said, errors = invoke(*words, "--storage", str(tmp_path), "--study", "s", "--json", str(result))
    assert code == 0, errors
    assert "4 trials" in said
    assert json.loads(result.read_text())["trials"]["complete"] >= 1


def test_a_file_that_other_hosts_cannot_reach_is_refused(cluster: Any, tmp_path: Path) -> None:
    from cotenant.actors.tuning import RayTasks

    node = cluster.add_node(num_cpus=1)
    try:
        plan = Plan(Toy(), located(str(tmp_path), "s"), "s", 0, 2)
        with (
            opened(plan) as study,
            pytest.raises(StudyError, match="is a SQLite file, which several hosts cannot share"),
        ):
            RayTasks(plan, study)
    finally:
        cluster.remove_node(node)
