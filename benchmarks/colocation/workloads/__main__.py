"""One workload alone: how fast, how steady, how busy, how large. Without a name: what there is.

python -m benchmarks.colocation.workloads resnet-32 --device cpu --seconds 10
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from statistics import fmean, median, pstdev

import torch
from benchmarks.colocation.workloads import Workload, build, catalogue

WARM_S = 1.0


def run_delay_s() -> float:
    """How long this thread could have run and did not, because its core was taken."""
    return int(Path("/proc/self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def cpu_time_s(pid: int) -> float:
    """CPU time of a process so far, from its CPU clock."""
    return time.clock_gettime((~pid << 3) | 2)


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def run(workload: Workload, seconds: float) -> list[float]:
    """Step for ``seconds``; the times at which the steps ended, with the start first."""
    ends = [time.monotonic()]
    while ends[-1] - ends[0] < seconds:
        workload.step()
        ends.append(time.monotonic())
    workload.synchronize()
    return ends


def variation(ends: list[float]) -> float:
    """Coefficient of variation of the step rate in the whole seconds of a run; NaN for fewer than two of them.

    A second's rate is steps over the time between their ends, so that it does not jump by whole steps.
    """
    rates = []
    first = 0
    for index, end in enumerate(ends):
        if end - ends[first] >= 1.0:
            rates.append((index - first) / (end - ends[first]))
            first = index
    return pstdev(rates) / fmean(rates) if len(rates) > 1 else float("nan")


def measure(workload: Workload, seconds: float, began: float) -> None:
    """Warm the workload up, run it and print what came out."""
    helpers = workload.helper_pids()
    built = time.monotonic()
    run(workload, WARM_S)
    cpu, waited, helped = time.process_time(), run_delay_s(), sum(map(cpu_time_s, helpers))
    ends = run(workload, seconds)
    wall = time.monotonic() - ends[0]
    cpu, waited = time.process_time() - cpu, run_delay_s() - waited
    helped = sum(map(cpu_time_s, helpers)) - helped
    steps = len(ends) - 1
    durations = [later - earlier for earlier, later in itertools.pairwise(ends)]
    print(f"{workload.description}")
    print(f"built in {built - began:.2f} s; {steps} steps in {wall:.2f} s: {steps / wall:.2f} steps/s")
    print(f"step {1e3 * median(durations):.2f} ms (median), rate varies by {variation(ends):.1%} from second to second")
    print(
        f"CPU {1e3 * cpu / steps:.2f} ms per step; utilisation of a core {cpu / wall:.3f}, helpers {helped / wall:.3f}"
    )
    print(f"waited for the core {waited / wall:.3f}; memory {peak_memory_bytes() / 2**20:.0f} MiB")
    if torch.cuda.is_available():
        print(f"device memory {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")
    mix = workload.operator_mix(max(1, round(steps / wall)))
    shown = ", ".join(f"{name} {part:.2f}" for name, part in mix["fractions"].items() if part)
    print(f"{shown}; {mix['launches_per_step']} launches per step")


def main() -> None:
    """Run the workload of the command line."""
    parser = argparse.ArgumentParser(description="Run one workload alone and print what it needs.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="without one, the names are printed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which catalogue (default cpu)")
    parser.add_argument("--torch-device", help="default: the same; cpu makes a dry run of the cuda catalogue")
    parser.add_argument("--seconds", type=float, default=10.0, help="default 10")
    args = parser.parse_args()
    if args.name is None:
        for each in catalogue(args.device).values():
            print(f"{each.name:24} {each.family:24} {each.kind:10} {each.reads}")
        return
    if not 0 < args.seconds < float("inf"):
        parser.error(f"argument --seconds: {args.seconds} is not accepted; give a number above 0")
    if args.device == "cpu":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.monotonic()
    try:
        workload = build(args.name, args.device, args.torch_device or args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        measure(workload, args.seconds, began)
    finally:
        workload.close()


if __name__ == "__main__":
    main()
