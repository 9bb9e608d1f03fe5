"""Materialises a Ray runtime environment (working directory, packages, variables) on the host where a job will run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

RESOLVE_TIMEOUT_S = 600.0  # installing packages takes as long as it takes; a hang must still end
_FROM_WORKER = ("PATH", "PYTHONPATH", "VIRTUAL_ENV")


def resolve_environment(host_id: str, runtime_env: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Let Ray set a runtime environment up on a host and return where and with what a command must run there.

    Ray downloads working directories and packages to a host when a task that needs them is placed there, so one such
    task is run and asked for its working directory and environment. Ray keeps them in the host's cache afterwards.

    Args:
        host_id: Ray node id.
        runtime_env: The runtime environment as JSON.
        env: Environment of the submitting process.

    Returns:
        (working directory, environment): ``env`` with the paths and variables of the runtime environment on top.

    Raises:
        ray.exceptions.RuntimeEnvSetupError: Ray could not set it up; the message says why.
        ray.exceptions.GetTimeoutError: Not ready within ``RESOLVE_TIMEOUT_S``.
    """
    parsed = json.loads(runtime_env)
    probe = (
        ray.remote(_describe_process)
        .options(
            num_cpus=0,
            runtime_env=parsed,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host_id, soft=False),
        )
        .remote()
    )
    cwd, worker_env = ray.get(probe, timeout=RESOLVE_TIMEOUT_S)
    taken = {name: worker_env[name] for name in _FROM_WORKER if name in worker_env}
    return cwd, {**env, **taken, **parsed.get("env_vars", {})}


def _describe_process() -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)  # noqa: PTH109 - a string is what travels
