"""What a tick of the PRM costs for 1,000 hosts: every window of a second taken in, forecast, learnt from and passed on.

Processor time of one process. The messages are those that host agents send, made here; the scheduler takes what it is
told without looking at it, and what Ray takes to carry messages is not in the figures. Jobs are two to a GPU, so that
pairs are measured as well, and of fifty programs. Once in five ticks what was learnt is saved, which is in the worst.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from common import Row, options, write_report

from cotenant.actors import prm_actor
from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.messages import WindowBatch
from cotenant.actors.prm_actor import Prm
from cotenant.configs.settings import Settings
from cotenant.forecasting.types import Signature

HOSTS, QUICK_HOSTS = 1000, 100
JOBS_OF_HOST = (1, 2, 4)
PROGRAMS = 50
TICKS, SETTLING = 30, 15
BEGAN_S = 1.9e9
GOAL = "<= 1"


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.partition("\n")[0]).parse_args()
    hosts = QUICK_HOSTS if arguments.quick else HOSTS
    rows: list[Row] = []
    for jobs in JOBS_OF_HOST:
        times = ticks(hosts, jobs)
        case, spread = f"{hosts:,} hosts, jobs on each: {jobs}", statistics.stdev(times)
        goal = None if arguments.quick else GOAL
        rows.append(Row(case, "cotenant", "a tick, median", statistics.median(times), "s", spread, goal))
        rows.append(Row(case, "cotenant", "a tick, worst", max(times), "s", None, goal))
        print(f"  {case}: {rows[-2].value:.2f} s", file=sys.stderr)
    write_report("prm", rows, arguments.json)


def ticks(hosts: int, jobs: int) -> list[float]:
    """Return the seconds that each tick took, once the first ones are over."""
    times = []
    with tempfile.TemporaryDirectory() as folder, patch.object(prm_actor, "ray", _ray()):
        prm = Prm(folder, Settings().model_dump_json())
        for batches in seconds(hosts, jobs):
            began = time.process_time()
            for batch in batches:
                prm.observe(batch)
            prm.work_off()
            times.append(time.process_time() - began)
        prm.close()
        for thread in threading.enumerate():  # what it writes may take longer than a PRM that ends waits for
            if thread.name == "history of signatures":
                thread.join()
    return times[SETTLING:]


def seconds(hosts: int, jobs: int) -> Iterator[list[WindowBatch]]:
    """Yield what all hosts send, second by second."""
    rng = np.random.default_rng(0)
    for second in range(TICKS):
        util = rng.uniform(0.2, 0.5, (hosts, jobs)).tolist()
        yield [_batch(f"h{host}", BEGAN_S + second, row) for host, row in enumerate(util)]


def _batch(host_id: str, start_s: float, util: list[float]) -> WindowBatch:
    gpus = [f"{host_id}-gpu{number // 2}" for number in range(len(util))]
    windows = tuple(
        Signature(
            job_id=f"{host_id}-job{number}",
            gpu_id=gpus[number],
            start_s=start_s,
            window_s=1.0,
            samples=10,
            util_mean=value,
            util_peak=value,
            memory_bytes=1e9,
            memory_peak_bytes=1e9,
            step_rate=10.0,
            throttled_fraction=0.0,
            host_cores=0.0,
            neighbours=gpus.count(gpus[number]) - 1,
            compute_share=1.0 / gpus.count(gpus[number]),
        )
        for number, value in enumerate(util)
    )
    programs = {each.job_id: f"program {sum(each.job_id.encode()) % PROGRAMS}" for each in windows}
    devices = tuple(DeviceSample(gpu_id, 0.5, 2e9) for gpu_id in dict.fromkeys(gpus))
    return WindowBatch(host_id, start_s + 1.0, windows, programs, devices, dict.fromkeys(gpus, "NVIDIA A100"))


def _ray() -> Any:
    """Ray as the PRM sees it in its actor: calls are as good as answered."""
    call = SimpleNamespace(remote=lambda *_: None)
    myself = SimpleNamespace(get_actor_id=lambda: "prm", current_actor=SimpleNamespace(work_off=call))
    return SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: myself,
        get_actor=lambda *_: SimpleNamespace(measurements=call, evidence=call),
        wait=lambda calls, **_: (calls, []),
        get=lambda _: None,
    )


if __name__ == "__main__":
    main()
