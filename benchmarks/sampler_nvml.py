"""What sampling NVIDIA GPUs costs: the ``nvml`` backend on the stand-in for the driver that the tests compile.

The stand-in answers at once, a driver takes longer: what the calls themselves cost on a GPU is not in these figures.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from common import Row, options, write_report

from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.configs.settings import DeviceSettings, ProfilerSettings

GPUS, JOBS_A_GPU = 8, 2
PROCESSES = (2, 8)  # of each job
METRICS = (1, 2, 5, 10, 11, 12, 13, 20, 21, 60, 61)


@contextmanager
def jobs(processes: int) -> Iterator[list[list[int]]]:
    """Process numbers of each job, its root first, so many of each; all of them sleep."""
    roots = []
    tree = f"for i in $(seq {processes - 1}); do sleep 1000 & done; echo ready; wait"
    try:
        for _ in range(GPUS * JOBS_A_GPU):
            command = ["sh", "-c", tree]
            roots.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        for root in roots:
            if root.stdout is None or root.stdout.readline() != "ready\n":
                raise RuntimeError("a job of the benchmark did not start")
        yield [[root.pid, *(child.pid for child in psutil.Process(root.pid).children())] for root in roots]
    finally:
        for root in roots:
            os.killpg(root.pid, signal.SIGKILL)
            root.communicate()


def hardware(trees: list[list[int]]) -> list[str]:
    """Busy GPUs with everything a driver tells, and every process on them."""
    lines = []
    for gpu in range(GPUS):
        memory = f"total={80 << 30} used={60 << 30}"
        lines.append(f"gpu {gpu} uuid=GPU-{gpu} util=80 {memory} tx_rate=1e9 rx_rate=1e9 recovery=0")
        lines += [f"metric {gpu} {number} 40" for number in METRICS]
        mine = trees[gpu * JOBS_A_GPU : (gpu + 1) * JOBS_A_GPU]
        lines += [f"process {gpu} pid={pid} memory={3 << 30} sm=5" for tree in mine for pid in tree]
    return lines


@contextmanager
def backend(trees: list[list[int]]) -> Iterator[NvmlBackend]:
    """The backend of a host with this hardware, which watches these jobs.

    Raises:
        RuntimeError: The stand-in cannot be compiled here.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    try:
        made = importlib.import_module("nvml_standin")
        inprocess = importlib.import_module("nvml_standin.inprocess")
    except ImportError as error:
        raise RuntimeError(f"{error}; the development packages have it") from error
    if made.compiler() is None:
        raise RuntimeError("no C compiler on this machine (cc, gcc or clang)")
    with tempfile.TemporaryDirectory() as folder:
        standin = made.Standin(Path(folder))
        standin.set(*hardware(trees))
        with inprocess.loaded(standin) as library:
            found = NvmlBackend(DeviceSettings(), library=library)
            for number, tree in enumerate(trees):
                found.watch(f"job-{number}", [f"GPU-{number // JOBS_A_GPU}"], tree[0])
            yield found
            found.close()


def measure(processes: int, seconds: float, sample_hz: float) -> list[Row]:
    """CPU time of the whole process while it samples: the device loop and the threads of the GPUs."""
    parts: list[float] = []
    with jobs(processes) as trees, backend(trees) as found:
        before_gpus = found.cost_s
        begin = next_s = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            if now - begin >= len(parts):
                parts.append(time.process_time())
            sample = found.sample()
            next_s = max(next_s + 1.0 / sample_hz, now)
            time.sleep(max(0.0, next_s - time.monotonic()))
        of_gpus = (found.cost_s - before_gpus) / (time.monotonic() - begin)
    if any(job.util is None or job.memory_bytes is None for job in sample.jobs):
        raise RuntimeError("a job was not read")
    used = [after - before for before, after in itertools.pairwise(parts)]
    case = f"{GPUS} GPUs, {GPUS * JOBS_A_GPU * processes} processes (stand-in), {sample_hz:g} Hz"
    median, spread = 100 * statistics.median(used), 100 * statistics.pstdev(used)
    return [
        Row(case, "cotenant", "share of one core", median, "%", spread, goal="< 1"),
        Row(case, "cotenant", "of it NVML and its binding", 100 * of_gpus, "%"),
    ]


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    try:
        seconds, sample_hz = 5.0 if arguments.quick else 30.0, ProfilerSettings().sample_hz
        rows = [row for processes in PROCESSES for row in measure(processes, seconds, sample_hz)]
    except RuntimeError as error:
        print(f"skipped: {error}")
    else:
        write_report("sampler_nvml", rows, arguments.json)


if __name__ == "__main__":
    main()
