"""From submit to the first line of a job's output, warm and with a host agent that was just killed.

``warm`` is the steady state: the host agent runs and launches the job itself, no actor has to start. ``cold`` kills
the host agent (SIGKILL) right before submitting, so the time includes Ray restarting it and the agent looking around.
The clock starts before ``Client.submit`` and stops in the job, in its first statement (both read the same machine's
clock); the client's own connection to Ray is already open.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Row, options, write_report

from cotenant.scheduler.names import prepare_ray_environment

WARM, COLD = (100, 10)
QUICK_WARM, QUICK_COLD = (20, 3)
FIRST_LINE = "import sys, time; print(time.time(), flush=True)"


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(COTENANT_HOME=f"{folder}/home", COTENANT_RUN_DIR=f"{folder}/run")
        prepare_ray_environment(local=True)
        warm, cold = measure(*((QUICK_WARM, QUICK_COLD) if arguments.quick else (WARM, COLD)))
    rows = [
        Row(
            case=f"{case}, n={len(seconds)}",
            method="cotenant",
            metric=f"submit to first output line, p{percent}",
            value=float(np.percentile(seconds, percent)),
            unit="s",
            spread=float(np.std(seconds)),
            goal="< 1" if case == "warm" and percent == 50 else None,
        )
        for case, seconds in (("warm", warm), ("cold, agent just killed", cold))
        for percent in (50, 99)
    ]
    write_report("latency", rows, arguments.json)


def measure(warm: int, cold: int) -> tuple[list[float], list[float]]:
    """Return the seconds of ``warm`` warm and ``cold`` cold submissions."""
    import ray  # noqa: PLC0415 - after the environment it reads is set

    from cotenant.actors import cluster  # noqa: PLC0415
    from cotenant.configs.settings import ApiSettings, DeviceSettings, Settings  # noqa: PLC0415
    from cotenant.scheduler.client import Client  # noqa: PLC0415
    from cotenant.scheduler.names import NAMESPACE, agent_name  # noqa: PLC0415

    ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    try:
        cluster.up(
            None, False, Settings(api=ApiSettings(enabled=False), device=DeviceSettings(backend="cpu", count=1)), None
        )
        with Client.connect() as client:
            once(client)  # the first job reads the interpreter from disk
            warm_seconds = [once(client) for _ in range(warm)]
            agent = agent_name(client.hosts()[0].host_id)
            cold_seconds = []
            for _ in range(cold):
                os.kill(ray.get(ray.get_actor(agent, NAMESPACE).ping.remote()), signal.SIGKILL)
                cold_seconds.append(once(client))
        cluster.down(force=True)
    finally:
        ray.shutdown()
    return warm_seconds, cold_seconds


def once(client: object) -> float:
    """Submit one job and return the seconds until its first line."""
    from cotenant.scheduler.core.model import Hints  # noqa: PLC0415 - see measure
    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415

    hints: Hints = parse_hints({"compute": 0.5, "gpu_memory": "100MiB"}, time.time())
    begun = time.time()
    view = client.submit([sys.executable, "-c", FIRST_LINE], hints, cwd=str(Path.cwd()))  # type: ignore[attr-defined]
    output = b"".join(client.stream_logs(view.job_id))  # type: ignore[attr-defined]
    return float(output.split()[0]) - begun


if __name__ == "__main__":
    main()
