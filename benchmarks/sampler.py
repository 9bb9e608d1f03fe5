"""What the profiler costs and how exact it is: device loop of the ``cpu`` backend with real process trees.

Cost: CPU time of the sampling thread for four jobs of three processes each at 10 Hz, as a fraction of one core, beside
psutil reading the same trees. Exactness: the counter against the CPU time that the processes themselves report.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psutil
from common import Row, options, write_report

from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import DeviceSettings, ProfilerSettings
from cotenant.placement.types import Share

JOBS = 4
SETTINGS = ProfilerSettings()

# A job as the examples are: a root that waits, a pinned process at work a third of the time, a helper nearly idle.
TREE = """
import os, subprocess, sys, time
if sys.argv[1] == "root":
    kids = [subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3], kind, sys.argv[2]]) for kind in ("work", "help")]
    print("ready", flush=True)
    try:
        sys.stdin.read()
    finally:
        for kid in kids: kid.kill()
        for kid in kids: kid.wait()
else:
    busy, period = (0.005, 0.06) if sys.argv[1] == "work" else (0.0005, 0.05)
    if sys.argv[1] == "work": os.sched_setaffinity(0, {int(sys.argv[2])})
    while True:
        end = time.process_time() + busy
        while time.process_time() < end: pass
        time.sleep(period - busy)
"""
# Forks a child for each piece of its work, as programs with short-lived workers do.
FORKING = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True); sys.stdin.readline()
before = time.process_time()
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        end = time.process_time() + float(sys.argv[3])
        while time.process_time() < end: pass
        os._exit(0)
    os.waitpid(child, 0)
used = os.times()
print(time.process_time() - before + used.children_user + used.children_system, flush=True); sys.stdin.readline()
"""


@contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said "ready"; told to end by closing its input."""
    command = [sys.executable, "-S", "-c", *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"a process of the benchmark did not start: exit code {child.wait()}")
        yield child
        child.stdin.close()


def cost(seconds: float, tick: Callable[[], object]) -> tuple[float, float]:
    """CPU time per second that ten ticks a second take of one core: median and standard deviation over the seconds."""
    period = 1.0 / SETTINGS.sample_hz
    begin, used, parts = time.monotonic(), 0.0, []
    while (now := time.monotonic()) < begin + seconds:
        before = time.thread_time()
        tick()
        used += time.thread_time() - before
        if now - begin >= len(parts) + 1:
            parts.append(used)
            used = 0.0
        time.sleep(max(0.0, period - (time.monotonic() - now)))
    return statistics.median(parts), statistics.pstdev(parts)


def measure_cost(seconds: float) -> list[Row]:
    """The device loop and psutil, on the same processes."""
    backend = CpuBackend(DeviceSettings(), "bench", count=2)
    gpus = backend.discover()
    case = f"{JOBS} jobs of 3 processes, {SETTINGS.sample_hz:g} Hz"
    with ExitStack() as stack:
        shares = {}
        roots = []
        for index in range(JOBS):
            gpu = gpus[index % 2]
            root = stack.enter_context(process(TREE, "root", str(gpu.cores[0]), TREE))
            backend.watch(f"job-{index}", [gpu.gpu_id], root.pid)
            shares[f"job-{index}"] = [Share(gpu.gpu_id, 1 << 30, 0.5)]
            roots.append(psutil.Process(root.pid))
        profiler = Profiler(backend, SETTINGS)
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            profiler.tick()
            if ticks % SETTINGS.sample_hz == 0:
                if len(profiler.collect({}, shares)) != JOBS:
                    raise RuntimeError("a job was not profiled")
                profiler.foreseen()

        ours, ours_spread = cost(seconds, tick)
        theirs, theirs_spread = cost(seconds, lambda: read_with_psutil(roots))
    backend.close()
    return [
        Row(case, "cotenant", "share of one core", 100 * ours, "%", 100 * ours_spread, goal="< 1"),
        Row(case, "psutil", "share of one core", 100 * theirs, "%", 100 * theirs_spread),
        Row(case, "cotenant", "cost against psutil", ours / theirs, "1"),
    ]


def read_with_psutil(roots: list[psutil.Process]) -> None:
    """The same readings the usual way: every tree walked, every process asked."""
    for root in roots:
        for member in (root, *root.children(recursive=True)):
            member.cpu_times()
            member.memory_info()
            member.cpu_affinity()


def measure_exactness(children: int, burn_s: float, sample_hz: float) -> Row:
    """Error of the counter for a job whose whole work is done by children that end."""
    backend = CpuBackend(DeviceSettings(), "bench", count=1)
    gpu = backend.discover()[0]
    with process(FORKING, str(gpu.cores[0]), str(children), str(burn_s)) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        backend.watch("job", [gpu.gpu_id], root.pid)
        started = backend.sample().jobs[0].busy_s or 0.0
        root.stdin.write("\n")
        root.stdin.flush()
        # The work is never shorter than the CPU time it takes; the rest of the wait is in reading its answer.
        end = time.monotonic() + children * burn_s
        while time.monotonic() < end:
            backend.sample()
            time.sleep(1.0 / sample_hz)
        truth = float(root.stdout.readline())
        for _ in range(2):  # what a child used in the end is counted in the sample after that which misses it
            time.sleep(1.0 / sample_hz)
            busy_s = backend.sample().jobs[0].busy_s
    backend.close()
    if busy_s is None:
        raise RuntimeError("the job could not be read")
    error = 100 * abs(busy_s - started - truth) / truth
    return Row(
        f"{children} children of {burn_s * 1e3:g} ms", "cotenant", "error of the counter", error, "%", goal="<= 2"
    )


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    rows = measure_cost(5.0 if arguments.quick else 20.0)
    for children, burn_s in ((400, 0.005), (20, 0.1), (4, 0.5)):
        scale = 2 if arguments.quick else 1
        rows.append(measure_exactness(children // scale, burn_s, SETTINGS.sample_hz))
    write_report("sampler", rows, arguments.json)


if __name__ == "__main__":
    main()
