"""How exactly jobs are held to their compute share, and what the shim in the job costs.

    python benchmarks/shares.py --json build/benchmarks/shares.json

Every example program is launched as cotenant launches jobs, alone on one core. Its utilisation (CPU time of the
training process over wall time, evaluations and checkpoints included) is measured with the whole device, then with
shares of 0.25, 0.5 and 0.75, resized live. Where the share is below what the program uses alone, the error is the
distance between utilisation and share; where it is not, the error is the utilisation that being held back cost it all
the same (a program that waits for its input anyway may be held back now and then without losing anything). "Waited for
the core" says how much other processes disturbed the measurement: run it on an idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, pstdev

from common import Row, options, write_report
from workloads import CASES, WORKLOADS, cpu_time_s, waited_s

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.launcher import Launcher
from cotenant.actors.shim.reportfile import read_report, read_reports
from cotenant.placement.types import Share

TARGETS = (0.25, 0.5, 0.75)
QUICK_CASES = ("lenet", "dcgan")
GOAL = "<= 0.020"
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 64 << 30
CALLS = 20_000
HOOK_COST = """
import sys, time, torch
from torch.optim import optimizer as module
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
hook = list(module._global_optimizer_post_hooks.values())[-1]
for _ in range(7):
    started = time.thread_time()
    for _ in range({calls}):
        hook(optimizer, (), {{}})
    print((time.thread_time() - started) / {calls} * 1e6)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One window of a process, in fractions of it.

    Attributes:
        utilisation: On the CPU.
        waited: Ready to run, but the core was taken.
        throttled: Held back by its own share.
    """

    utilisation: float
    waited: float
    throttled: float

    def error(self, share: float, alone: float) -> float:
        """Distance to what the share is there for, given the utilisation alone."""
        if share < alone:
            return abs(self.utilisation - share)
        lost = min(alone - self.utilisation, self.throttled)
        return max(0.0, self.utilisation - share, lost)


class Bench:
    """Jobs on one device, launched as the host agent launches them."""

    def __init__(self, run_dir: Path, core: int) -> None:
        self._gpu = GpuInfo("bench", "cpu-core", 0, MEMORY_BYTES, {"CUDA_VISIBLE_DEVICES": ""}, (core,))
        self._launcher = Launcher(run_dir, (self._gpu,))
        self._started = 0
        self._revision = 0

    def start(self, command: Sequence[str], **variables: str) -> Path:
        """Launch a command with the whole device and more environment variables; returns its job directory."""
        self._started += 1
        self._revision = 0
        self.renew()
        return self._launcher.launch(
            job_id="bench",
            epoch=self._started,
            revision=0,
            kind="command",
            command=command,
            cwd=str(WORKLOADS),
            env={**os.environ, **variables},
            shares=[self._share(1.0)],
            grace_s=5.0,
        ).job_dir

    def resize(self, compute: float) -> None:
        """Give the running job another share."""
        self._revision += 1
        self.renew()
        self._launcher.resize("bench", self._started, self._revision, [self._share(compute)])

    def finish(self) -> str:
        """Wait for the job's end and return its output."""
        while not self._launcher.poll():
            time.sleep(0.02)
        output, _, _ = self._launcher.read_output("bench", self._started, 0, 1 << 24)
        self._launcher.release("bench", self._started)
        return output.decode()

    def stop(self) -> None:
        """End the job."""
        self._launcher.stop("bench", self._started, 2.0, "measured")
        self.finish()

    def training_pid(self, job_dir: Path) -> int:
        """Wait for the process that trains to do its first steps."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for report in read_reports(str(job_dir)):
                if report.steps > 2:
                    return report.pid
            if self._launcher.poll():
                raise RuntimeError(f"the program has ended without a step:\n{self.finish()}")
            time.sleep(0.1)
        raise RuntimeError(f"no optimizer step within {START_TIMEOUT_S:g} s")

    def renew(self) -> None:
        """Let the job go on: should this benchmark be killed, it ends by itself."""
        self._launcher.renew(time.monotonic() + 2 * START_TIMEOUT_S)

    def _share(self, compute: float) -> Share:
        return Share(self._gpu.gpu_id, MEMORY_BYTES, compute)


def measure(pid: int, job_dir: Path, seconds: float) -> Measured:
    """Watch a process for a while."""

    def counters() -> tuple[float, ...]:
        report = read_report(f"{job_dir}/report-{pid}")
        if report is None:
            raise RuntimeError(f"process {pid} reports nothing")
        return time.monotonic(), cpu_time_s(pid), waited_s(pid), report.throttled_s

    before = counters()
    time.sleep(seconds)
    elapsed, used, waited, throttled = (b - a for a, b in zip(before, counters(), strict=True))
    return Measured(used / elapsed, waited / elapsed, throttled / elapsed)


def accuracy(bench: Bench, case: str, window_s: float, settle_s: float) -> list[Row]:
    """The rows of one program."""
    job_dir = bench.start([sys.executable, *CASES[case], "--steps", "1000000000", "--log-every", "3600"])
    rows = []
    try:
        pid = bench.training_pid(job_dir)
        time.sleep(settle_s)
        solo = measure(pid, job_dir, window_s)
        rows.append(Row(case, "cotenant", "utilisation with the whole device", solo.utilisation, "1"))
        waited = [solo.waited]
        for target in TARGETS:
            bench.resize(target)
            time.sleep(settle_s)
            held = measure(pid, job_dir, window_s)
            waited.append(held.waited)
            rows.append(Row(f"{case}, share {target:g}", "cotenant", "utilisation", held.utilisation, "1"))
            rows.append(
                Row(
                    f"{case}, share {target:g}",
                    "cotenant",
                    "share error",
                    held.error(target, solo.utilisation),
                    "1",
                    goal=GOAL,
                )
            )
        rows.append(Row(case, "cotenant", "waited for the core, worst window", max(waited), "1"))
    finally:
        bench.stop()
    return rows


def hook_cost(bench: Bench) -> list[Row]:
    """What one step costs in the job: nothing capped, and capped but below the share (the job never waits)."""
    rows = []
    for case, compute in (("whole device", 1.0), ("share in force", 0.999999)):
        bench.start([sys.executable, "-c", HOOK_COST.format(calls=CALLS)])
        bench.resize(compute)
        costs = [float(line) for line in bench.finish().split()]
        goal = "<= 10" if compute == 1.0 else None
        rows.append(Row(f"one step, {case}", "cotenant", "CPU time", median(costs), "us", pstdev(costs), goal))
    return rows


def start_cost(bench: Bench, repeats: int) -> list[Row]:
    """What starting a Python that does nothing costs with the shim and without it."""
    costs: dict[str, list[float]] = {"cotenant": [], "no shim": []}
    job_dir = bench.start(["sleep", "3600"])
    shim = {"COTENANT_DEVICE": "cpu", "COTENANT_CORES": "0", "COTENANT_HOST_CORES": "0"}
    shim["COTENANT_JOB_DIR"] = str(job_dir)
    shim["PYTHONPATH"] = str(Path(__file__).absolute().parents[1] / "actors" / "shim" / "site")
    for _ in range(repeats):
        for method, extra in (("cotenant", shim), ("no shim", {})):
            before = os.times()
            subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **extra}, check=True)
            after = os.times()
            used = after.children_user - before.children_user + after.children_system - before.children_system
            costs[method].append(used * 1e3)
    bench.stop()
    return [
        Row("start of python", method, "CPU time", sum(values) / len(values), "ms", pstdev(values))
        for method, values in costs.items()
    ]


def main() -> None:
    """Run it."""
    arguments = options("Accuracy of compute shares and cost of the shim.").parse_args()
    window_s, settle_s = (3.0, 1.0) if arguments.quick else (5.0, 1.5)
    cases = QUICK_CASES if arguments.quick else tuple(CASES)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "run", sorted(os.sched_getaffinity(0))[0])
        for case in cases:
            rows += accuracy(bench, case, window_s, settle_s)
        rows += hook_cost(bench)
        rows += start_cost(bench, 10 if arguments.quick else 30)
    write_report("shares", rows, arguments.json)


if __name__ == "__main__":
    main()
