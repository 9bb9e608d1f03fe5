"""The whole loop on a running cotenant: from a change of a job's demand to its new share, and what that is worth.

Two real jobs share one core. One changes between training without a pause and waiting for its input most of the time,
every 5 to 9 s; its neighbour trains without a pause. The profiler looks ten times a second, a window is told to the
PRM every second, its forecast goes to the scheduler, and the new share into the share word; that a job begins to be
held back by its share is told at once. ``reaction`` is the time from the job's change of phase to the first change of
its share word in that direction, ``settled`` to nine tenths of the way to where it is at the end of the phase. A rise
is believed at once; of what a job does not use any more nothing is lent before 2 s.

The same two programs run for the same time with fixed halves (``static``), with shares that follow what was measured
(``reactive``: an exponentially weighted quantile, no forecast beyond it) and with the forecasts that ship
(``cotenant``).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, options, write_report
from reaction import Change, followed

from cotenant.actors.shim.shareword import ShareReader
from cotenant.scheduler.names import NAMESPACE, prepare_ray_environment

SECONDS, QUICK_SECONDS = 90.0, 30.0
POLL_S = 0.01
GOAL = "<= 1"  # seconds until a share that is too small has grown
METHODS: dict[str, dict[str, Any]] = {
    "static": {"placement": {"policy": "static", "static_slots": 2}},
    "reactive": {"prediction": {"demand": "ewquantile"}},
    "cotenant": {},
}
# Arguments: seconds to run, where to write, seed of the phases ("-" = no phases). Reads the clock that the share word's
# reader reads, too. When each phase began, and the time on the core in all: steps would tell how fast it was, too.
PROGRAM = """
import json, random, sys, time, torch
seconds, path, seed = float(sys.argv[1]), sys.argv[2], sys.argv[3]
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(64, 256)
phases = random.Random(seed)
began = change = time.monotonic()
before, busy, told = time.process_time(), True, []
while (now := time.monotonic()) < began + seconds:
    if seed != "-" and now >= change:
        busy = not busy
        told.append([now, busy])
        change = now + phases.uniform(5.0, 9.0)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if not busy:
        time.sleep(0.02)
with open(path, "w") as file:
    json.dump({"phases": told, "cpu_s": time.process_time() - before}, file)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one method gave: phases (when, busy) and shares of the job that changes, core seconds of both."""

    phases: list[tuple[float, bool]]
    changes: list[Change]
    cpu_s: tuple[float, float]


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.partition("\n")[0]).parse_args()
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    methods = ["cotenant"] if arguments.quick else list(METHODS)
    with ray_here() as folder:
        runs = {method: measure(method, seconds, folder) for method in methods}
    rows = [row for method in methods if method != "static" for row in reactions(method, runs[method])]
    if "static" in runs:
        rows += [row for method in methods for row in benefits(method, runs)]
    write_report("loop", rows, arguments.json)


def reactions(method: str, run: Run) -> list[Row]:
    """Return how long shares took to follow demand."""
    rows = []
    for busy, case in ((True, "demand rises"), (False, "demand falls")):
        first, settled = followed(run.phases, run.changes, busy=busy)
        missed = sum(1 for seconds in first if seconds is None)
        for metric, found in (("reaction", first), ("settled", settled)):
            known = [seconds for seconds in found if seconds is not None]
            for percent in (50, 99) if known else ():
                value = float(np.percentile(known, percent))
                label = f"{case}, n={len(known)}, never: {missed}"
                goal = GOAL if busy and metric == "reaction" else None
                rows.append(Row(label, method, f"{metric}, p{percent}", value, "s", float(np.std(known)), goal))
    return rows


def benefits(method: str, runs: dict[str, Run]) -> list[Row]:
    """Return how much was done, relative to fixed halves."""
    ratios = [mine / fixed for mine, fixed in zip(runs[method].cpu_s, runs["static"].cpu_s, strict=True)]
    names = ("job whose demand changes", "its neighbour")
    metric = "time on the core relative to static"
    rows = [Row(name, method, metric, ratio, "1") for name, ratio in zip(names, ratios, strict=True)]
    both = sum(runs[method].cpu_s) / sum(runs["static"].cpu_s)
    return [*rows, Row("both", method, metric, both, "1")]


@contextmanager
def ray_here() -> Iterator[Path]:
    """A Ray of our own, and a folder for what cotenant keeps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(COTENANT_HOME=str(folder / "home"), COTENANT_RUN_DIR=str(folder / "run"))
        prepare_ray_environment(local=True)
        import ray  # noqa: PLC0415 - after the environment it reads is set

        ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
        try:
            yield folder
        finally:
            ray.shutdown()


def measure(method: str, seconds: float, folder: Path) -> Run:
    """Start a cotenant with this method's settings, run both jobs and watch the share word of the first."""
    from cotenant.actors import cluster  # noqa: PLC0415 - imports Ray
    from cotenant.configs.settings import Settings  # noqa: PLC0415
    from cotenant.scheduler.client import Client  # noqa: PLC0415
    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415

    os.environ["COTENANT_HOME"] = str(folder / method)  # nothing is known yet
    common: dict[str, Any] = {"api": {"enabled": False}, "device": {"backend": "cpu", "count": 1}}
    settings = Settings.model_validate({**common, "placement": {"packing_bias": 1.0}, **METHODS[method]})
    cluster.up(None, False, settings, None)
    hints = {"compute": 0.05, "gpu_memory": "600MiB", "max_slowdown": 10}
    jobs = {f"changing-{method}": "7", f"steady-{method}": "-"}
    with Client.connect() as client:
        for job_id, seed in jobs.items():
            command = [sys.executable, "-c", PROGRAM, str(seconds), str(folder / job_id), seed]
            client.submit(command, parse_hints(hints, time.time()), name=job_id, job_id=job_id, cwd=str(folder))
        with Watch(folder / "run", f"changing-{method}") as watch:
            for job_id in jobs:
                view = client.wait(job_id, seconds + 120.0)
                if view.exit_code != 0:
                    raise RuntimeError(f"job {job_id}: {view.reason}")
    cluster.down(force=True)
    changing, steady = (json.loads((folder / job_id).read_text(encoding="utf-8")) for job_id in jobs)
    phases = [(float(at), bool(busy)) for at, busy in changing["phases"]]
    return Run(phases, watch.changes, (changing["cpu_s"], steady["cpu_s"]))


class Watch:
    """Looks at the share word of a job every 10 ms and notes its changes."""

    def __init__(self, run_dir: Path, job_id: str) -> None:
        self.changes: list[Change] = []
        self._run_dir = run_dir
        self._job_id = job_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        reader = self._reader()
        while reader is not None and not self._stop.wait(POLL_S):
            share = reader.read()
            if share is not None and (not self.changes or share.compute != self.changes[-1].compute):
                self.changes.append(Change(time.monotonic(), share.compute))

    def _reader(self) -> ShareReader | None:
        while not self._stop.wait(POLL_S):
            for path in self._run_dir.glob(f"*/*/{self._job_id}.*/share"):
                return ShareReader(str(path), 0)
        return None


if __name__ == "__main__":
    main()
