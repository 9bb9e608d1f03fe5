"""Each example training program alone: its step rate, its utilisation of one core, how steady it is, its memory.

    python benchmarks/workloads.py --json build/benchmarks/workloads.json

The training process is pinned to one core and its helper processes (loader, storage server, environment) run anywhere,
as a GPU's helpers do. Utilisation is the training process's CPU time divided by wall time. Figures are medians over the
windows between the program's progress lines (1 s), evaluations and checkpoints included; the spread is the standard
deviation over the windows. "Waited for the core" says how much other processes disturbed the measurement: where it is
more than a few hundredths, CPU time per step can still be trusted and the step rate cannot.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev

from common import Row, options, write_report

WORKLOADS = Path(__file__).parent.parent / "examples" / "workloads"
CASES: dict[str, tuple[str, ...]] = {
    "reinforcement learning": ("reinforcement_learning.py",),
    "lenet": ("image_classification.py", "--model", "lenet"),
    "mobilenet, no prefetch": ("image_classification.py", "--model", "mobilenet", "--prefetch", "0"),
    "mobilenet": ("image_classification.py", "--model", "mobilenet"),
    "u-net": ("segmentation.py",),
    "dcgan": ("gan.py",),
    "resnet": ("image_classification.py", "--model", "resnet"),
    "text classification": ("text_classification.py",),
}
QUICK_S = 2.5  # of training per case with --quick

_PROGRESS = re.compile(r"step (\d+)/\d+  .*  ([\d.]+) steps/s")
_DONE = re.compile(r"done: (\d+) steps, ([\d.]+) steps/s, loss ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Window:
    """From one progress line to the next; ``waited``: ready to run, but the core was taken. Fractions of the window."""

    steps_per_s: float
    utilisation: float
    waited: float

    @property
    def cpu_s_per_step(self) -> float:
        return self.utilisation / self.steps_per_s


@dataclass(frozen=True, slots=True)
class Run:
    """One program's run, alone."""

    windows: list[Window]
    start_s: float
    train_s: float
    peak_rss_bytes: int
    final_loss: float


def cpu_time_s(pid: int) -> float:
    """CPU time of a process so far, from its CPU clock (no file, nanoseconds)."""
    return time.clock_gettime((~pid << 3) | 2)


def pin(pid: int, cores: set[int]) -> None:
    """Pin every thread of a process; its children stay where they are."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def waited_s(pid: int) -> float:
    """How long the main thread has been ready to run and did not, because its core was taken."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def peak_rss_bytes(pid: int) -> int:
    """The largest resident memory the process has had."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM: it has ended")


def run_alone(command: tuple[str, ...], core: int, log_every_s: float, seconds: float | None) -> Run:
    """Run one program, pinned to ``core`` from its first progress line on (its helpers exist by then)."""
    argv = [sys.executable, str(WORKLOADS / command[0]), *command[1:], "--log-every", str(log_every_s)]
    if seconds is not None:
        argv += ["--seconds", str(seconds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.perf_counter()
    windows: list[Window] = []
    first_line_s = rss = 0.0
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        at = cpu = waited = 0.0
        for line in process.stdout:
            now = time.perf_counter()
            if (match := _DONE.search(line)) is not None:
                break
            if (match := _PROGRESS.search(line)) is None:
                continue
            cpu_now, waited_now, rss = cpu_time_s(process.pid), waited_s(process.pid), peak_rss_bytes(process.pid)
            if at:
                windows.append(
                    Window(float(match[2]), (cpu_now - cpu) / (now - at), (waited_now - waited) / (now - at))
                )
            else:
                first_line_s = now - started
                pin(process.pid, {core})
            at, cpu, waited = now, cpu_now, waited_now
        else:
            raise RuntimeError(f"{' '.join(argv)} ended with status {process.wait()} and without a 'done:' line")
    steps, rate, loss = int(match[1]), float(match[2]), float(match[3])
    if len(windows) < 2:
        raise RuntimeError(f"{' '.join(argv)} was too short: {len(windows)} windows")
    return Run(windows, max(0.0, first_line_s - log_every_s), steps / rate, int(rss), loss)


def rows_of(case: str, run: Run) -> list[Row]:
    """The figures of one run."""

    def over_windows(metric: str, values: list[float], unit: str, scale: float = 1.0) -> Row:
        return Row(case, "alone", metric, median(values) * scale, unit, spread=pstdev(values) * scale)

    rates = [window.steps_per_s for window in run.windows]
    return [
        over_windows("solo step rate", rates, "steps/s"),
        over_windows("solo utilisation", [window.utilisation for window in run.windows], "1"),
        over_windows("CPU time per step", [window.cpu_s_per_step for window in run.windows], "ms", scale=1e3),
        over_windows("waited for the core", [window.waited for window in run.windows], "1"),
        Row(case, "alone", "variation of the step rate", pstdev(rates) / fmean(rates), "1"),
        Row(case, "alone", "peak memory", run.peak_rss_bytes / 2**20, "MiB"),
        Row(case, "alone", "time before training", run.start_s, "s"),
        Row(case, "alone", "time of training", run.train_s, "s"),
        Row(case, "alone", "final loss", run.final_loss, "1"),
    ]


def main() -> None:
    """Measure the cases one after the other."""
    parser = options("Run every example training program alone on one core and measure it.")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="default: the first usable one")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given several times")
    args: argparse.Namespace = parser.parse_args()
    rows: list[Row] = []
    for case in args.case or CASES:
        print(f"{case} ...", file=sys.stderr, flush=True)
        run = run_alone(CASES[case], args.core, *((0.5, QUICK_S) if args.quick else (1.0, None)))
        rows += rows_of(case, run)
    write_report("workloads", rows, args.json)


if __name__ == "__main__":
    main()
