"""How long it takes until everything works again after one of our processes, or a whole node, was killed (SIGKILL).

A job runs all the time and must not notice: it may start once only. ``process``: from the kill of the scheduler, the
PRM, the host agent or the API to the first line of a job that was submitted right after it (of the API: to the first
answer), with every part answering again. ``node``: from the kill of all processes of a node to the second start of the
job that ran there, on another one; it refuses to run while its first start still does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, options, write_report
from latency import once

from cotenant.scheduler.names import API, NAMESPACE, PRM, SCHEDULER, prepare_ray_environment

KILLS, QUICK_KILLS = 10, 2
NODES, QUICK_NODES = 3, 1
PROCESS_GOAL, NODE_GOAL = "< 5", "< 15"
WITHIN_S = 120.0
# Notes when it starts; fails while another start of the same job still lives.
ALONE = """
import fcntl, sys, time
lock = open(sys.argv[1] + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(sys.argv[1], "a") as starts:
    starts.write(f"{time.time()}\\n")
time.sleep(3600)
"""


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.partition("\n")[0]).parse_args()
    kills, nodes = (QUICK_KILLS, QUICK_NODES) if arguments.quick else (KILLS, NODES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(COTENANT_HOME=f"{folder}/home", COTENANT_RUN_DIR=f"{folder}/run")
        prepare_ray_environment(local=True)
        found, restarts = measure(Path(folder), kills, nodes)
    rows = [
        row
        for case, seconds in found.items()
        for row in figures(case, seconds, NODE_GOAL if case == "node" else PROCESS_GOAL)
    ]
    rows.append(Row("job that ran throughout", "cotenant", "starts too many", float(restarts), "1", goal="== 0"))
    write_report("recovery", rows, arguments.json)


def figures(case: str, seconds: list[float], goal: str) -> list[Row]:
    """Return median and worst of one case."""
    spread, label = float(np.std(seconds)), f"{case} killed, n={len(seconds)}"
    return [
        Row(label, "cotenant", "recovery, p50", float(np.median(seconds)), "s", spread, goal),
        Row(label, "cotenant", "recovery, worst", max(seconds), "s", spread, goal),
    ]


def measure(folder: Path, kills: int, nodes: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds by what was killed, and how often the job that must not notice started anew."""
    import ray  # noqa: PLC0415 - after the environment it reads is set
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    from cotenant.actors import cluster  # noqa: PLC0415
    from cotenant.configs.settings import ApiSettings, DeviceSettings, Settings  # noqa: PLC0415
    from cotenant.dashboards.server import Api  # noqa: PLC0415
    from cotenant.scheduler.client import Client  # noqa: PLC0415

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False})
    try:
        ray.init(address=machines.address, namespace=NAMESPACE, log_to_driver=False)
        settings = Settings(device=DeviceSettings(backend="cpu"), api=ApiSettings(port=free_port()))
        cluster.up(None, False, settings, Api)
        with Client.connect() as client:
            processes = Processes(client, folder)
            found = {case: [recover() for _ in range(kills)] for case, recover in processes.cases().items()}
            again = processes.end()
            found["node"] = [lose_node(machines, client, folder / f"node-{n}") for n in range(nodes)]
        cluster.down(force=True)
    finally:
        ray.shutdown()
        machines.shutdown()
    return found, again


class Processes:
    """Kills processes of ours beside a job that must not notice.

    Args:
        client: Of the running cotenant.
        folder: For what the job notes.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        self._client = client
        self._starts = folder / "throughout"
        self._job = run(client, ALONE, str(self._starts), compute=0.3)
        once(client)  # the first job reads the interpreter from disk
        wait(self._starts.exists, "the job runs")

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return by name what kills, and gives the seconds until all works again."""
        from cotenant.scheduler.names import agent_name  # noqa: PLC0415

        agent = agent_name(self._client.hosts()[0].host_id)
        jobs = {"scheduler": SCHEDULER, "PRM": PRM, "host agent": agent}
        return {**{case: lambda name=name: self._by_job(name) for case, name in jobs.items()}, "API": self._api}

    def end(self) -> int:
        """End the job; returns how often it was started again."""
        self._client.stop(self._job.job_id)
        self._client.wait(self._job.job_id, WITHIN_S)
        return len(self._starts.read_text(encoding="utf-8").split()) - 1

    def _by_job(self, name: str) -> float:
        killed = kill(name)
        once(self._client)  # returns when the job has ended
        wait(lambda: self._client.health().ok, "every part answers")
        return time.time() - killed

    def _api(self) -> float:
        address = api_address()
        killed = kill(API)
        wait(lambda: answers(address), "the API answers")
        return time.time() - killed


def lose_node(machines: Any, client: Any, starts: Path) -> float:
    """Kill a node with a job on it; returns the seconds until the job's second start."""
    blocker = run(client, "import time; time.sleep(3600)", compute=1.0, isolation="hard")
    before = len(client.hosts())
    node = machines.add_node(num_cpus=1, num_gpus=1)
    wait(lambda: len(client.hosts()) > before, "the new node reports")
    job = run(client, ALONE, str(starts), compute=1.0, isolation="hard", restart="on_node_loss")
    wait(starts.exists, "the job runs on the new node")
    client.stop(blocker.job_id)
    client.wait(blocker.job_id, WITHIN_S)
    killed = time.time()
    machines.remove_node(node, allow_graceful=False)
    wait(lambda: len(starts.read_text(encoding="utf-8").split()) > 1, "the job runs again")
    client.stop(job.job_id)
    client.wait(job.job_id, WITHIN_S)
    _, second = starts.read_text(encoding="utf-8").split()
    return float(second) - killed


def free_port() -> int:
    """Return a port nobody listens on: the API must come back where it was."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill(name: str) -> float:
    """Kill the process of an actor; returns when, Unix seconds."""
    import ray  # noqa: PLC0415 - see measure

    pid = ray.get(ray.get_actor(name, NAMESPACE).ping.remote())
    os.kill(pid, signal.SIGKILL)
    return time.time()


def run(client: Any, code: str, *arguments: str, **hints: Any) -> Any:
    """Submit a Python program."""
    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415 - see measure

    parsed = parse_hints({"gpu_memory": "100MiB", **hints}, time.time())
    return client.submit([sys.executable, "-c", code, *arguments], parsed, cwd=str(Path.cwd()))


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.01)


def api_address() -> str:
    """Return where the API says whether it is well."""
    from cotenant.scheduler.names import ClusterRecord  # noqa: PLC0415 - see measure

    record = ClusterRecord.load()
    if record is None or record.api_url is None:
        raise RuntimeError("the API is not there")
    return f"{record.api_url}/api/v1/health"


def answers(address: str) -> bool:
    """Whether an address answers at all."""
    try:
        with urllib.request.urlopen(address, timeout=2.0):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
