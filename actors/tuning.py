"""Trials of a study as tasks of a Ray cluster; the study's storage is what they share."""

from __future__ import annotations

from typing import Any

import optuna
import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from cotenant.forecasting.training.crews import WorkerDied
from cotenant.forecasting.training.studies import JOURNAL_SUFFIX, Plan, StudyError, bury, one_trial, opened, quiet

RETRIES = 2  # of a task whose worker died
END_S = 10.0  # how long cancelled tasks are waited for


class RayTasks:
    """Every trial is a task of one core on the connected cluster.

    A task whose worker dies is tried again by Ray; its next attempt puts the trial of the dead one back into the queue
    and does it. A trial whose whole host or driver died is found by its heartbeat, where the storage has them.
    """

    def __init__(self, plan: Plan, study: optuna.Study, at_once: int | None = None) -> None:
        """Make the crew; Ray must be connected.

        Args:
            plan: Of the study.
            study: The study, opened here.
            at_once: How many trials at the same time; None = as many as the cluster has cores.

        Raises:
            StudyError: The cluster has several hosts, and the storage is a SQLite file.
        """
        self._plan, self._study = ray.put(plan), study
        self.at_once = at_once or max(1, int(ray.cluster_resources().get("CPU", 1.0)))  # type: ignore[no-untyped-call]
        if plan.location.startswith("sqlite") and _other_hosts():
            raise StudyError(
                f"storage: {plan.location} is a SQLite file, which several hosts cannot share, and this cluster has "
                f"several; give the URL of a database server, or a file *{JOURNAL_SUFFIX} in a folder of all hosts"
            )
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_trial)
        self._running: dict[Any, str] = {}

    @property
    def busy(self) -> int:
        """How many trials were begun and are not over."""
        return len(self._running)

    def begin(self) -> None:
        """Begin one more trial."""
        task = self._task.remote(self._plan)
        self._running[task] = task.task_id().hex()

    def wait(self, timeout_s: float) -> None:
        """Wait until some trial is over."""
        over, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        for task in over:
            name = self._running.pop(task)
            try:
                ray.get(task)
            except WorkerCrashedError as error:
                bury(self._study, {name})
                raise WorkerDied(f"a Ray worker died {RETRIES + 1} times in the same task") from error
            except RayTaskError as error:
                bury(self._study, {name})
                raise StudyError(f"a trial failed on the cluster: {error.cause!r}") from error

    def close(self) -> None:
        """Cancel what runs, and put it back into the queue."""
        tasks, names = list(self._running), set(self._running.values())
        self._running = {}
        for task in tasks:
            ray.cancel(task, force=True)
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=END_S)  # a task not yet ended could begin another trial
            bury(self._study, names)


def _other_hosts() -> bool:
    """Whether tasks may run on another host than this one."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1.0 and node["NodeID"] != here for node in nodes)


def _trial(plan: Plan) -> None:
    """Do one trial; first put back what an earlier attempt of this very task left when its worker died."""
    quiet()
    name = str(ray.get_runtime_context().get_task_id())
    with opened(plan) as study:
        bury(study, {name})
        one_trial(plan, study, name)
