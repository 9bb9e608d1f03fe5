"""What profiling costs: a job's step time with and without the 10 Hz device loop, and the loop's own CPU time.

One job (fixed arithmetic per step, nothing to wait for) runs alone on one core under the shim. The device loop of the
host agent is switched on and off in windows, off, on, on, off, and so on. Compared are the mean step times of both
kinds within each four, which are over before the core has become faster or slower. The job's CPU time per step is
compared too: it does not depend on who else has the core. The loop's own cost is its thread's CPU time over wall time.

Operator mix (off by default): small programs run with it switched on and take the time of each of their steps. The cost
of a profile is what the steps from its beginning to its end took beyond the median of the others. What it leaves behind
is the median step time after it over that before it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, pstdev

import numpy as np
from common import Row, options, write_report
from scipy.stats import bootstrap
from shares import Bench
from workloads import cpu_time_s

from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.profiler import Profiler
from cotenant.actors.shim.bootstrap import OPERATOR_MIX
from cotenant.actors.shim.operators import PROFILED_STEPS, WARM_STEPS
from cotenant.actors.shim.reportfile import read_report
from cotenant.configs.settings import DeviceSettings, ProfilerSettings

STEP = """
import torch
torch.set_num_threads(1)
weights = torch.nn.Parameter(torch.zeros(320, 320))
optimizer = torch.optim.SGD([weights], lr=1e-9)
data = torch.ones(320, 320)
while True:
    (weights @ data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WINDOW_S = 1.0  # some 200 steps, so that one more or less is half a per cent
ORDER = (False, True, True, False)  # what changes steadily within the four is in both kinds alike
PROGRAMS = {
    "convolutions": """net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(5408, 10))
data = torch.randn(24, 3, 32, 32)
""",
    "attention": """layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
net = torch.nn.Sequential(
    torch.nn.Embedding(1000, 128), torch.nn.TransformerEncoder(layer, 3), torch.nn.Flatten(), torch.nn.Linear(4096, 10))
data = torch.randint(0, 1000, (6, 32))
""",
}
# Ends some time after the only profile there will be; prints what each step took.
TIMED = """
import json, time, torch
torch.set_num_threads(1)
{program}
optimizer = torch.optim.AdamW(net.parameters())
took, began = [], time.monotonic()
while time.monotonic() < began + {seconds}:
    before = time.monotonic()
    optimizer.zero_grad()
    net(data).square().mean().backward()
    optimizer.step()
    took.append(time.monotonic() - before)
print(json.dumps(took))
"""
MIX_S = 12.0  # the profile comes after five seconds
ONE_A_MINUTE_S = 60.0


def main() -> None:
    """Run it."""
    arguments = options(__doc__.partition("\n")[0]).parse_args()
    fours = 6 if arguments.quick else 60
    with tempfile.TemporaryDirectory() as folder:
        core = sorted(os.sched_getaffinity(0))[0]
        bench = Bench(Path(folder) / "run", core)
        rows = measure(bench, fours)
        for name in list(PROGRAMS)[: 1 if arguments.quick else None]:
            rows += measure_mix(bench, name, MIX_S if arguments.quick else 3 * MIX_S)
    write_report("overhead", rows, arguments.json)


def measure(bench: Bench, fours: int) -> list[Row]:
    """Alternate windows with and without the device loop."""
    settings = ProfilerSettings()
    backend = CpuBackend(DeviceSettings(count=1, memory_bytes=8 << 30), "bench")
    job_dir = bench.start([sys.executable, "-c", STEP])
    try:
        pid = bench.training_pid(job_dir)
        profiler = Profiler(backend, settings)
        backend.watch("bench", [backend.discover()[0].gpu_id], pid)
        windows: list[tuple[float, float]] = []
        loop_cpu_s = loop_wall_s = 0.0
        for profiled in ORDER * fours:
            bench.renew()
            before = (time.monotonic(), steps(job_dir, pid), cpu_time_s(pid))
            began_cpu = time.thread_time()
            watch(profiler if profiled else None, 1.0 / settings.sample_hz)
            if profiled:
                loop_cpu_s += time.thread_time() - began_cpu
                loop_wall_s += time.monotonic() - before[0]
            after = (time.monotonic(), steps(job_dir, pid), cpu_time_s(pid))
            done = after[1] - before[1]
            windows.append(((after[0] - before[0]) / done, (after[2] - before[2]) / done))
    finally:
        bench.stop()
        backend.close()
    return [
        ratio("step time with profiling over without", windows, 0, "< 0.01"),
        ratio("CPU time per step with profiling over without", windows, 1, None),
        Row("device loop, 10 Hz, 1 job", "cotenant", "CPU time of the loop", loop_cpu_s / loop_wall_s, "core",
            goal="< 0.01"),
    ]  # fmt: skip


def measure_mix(bench: Bench, name: str, seconds: float) -> list[Row]:
    """What one profile of a program's operators costs it, and what it leaves behind."""
    program = TIMED.format(program=PROGRAMS[name], seconds=seconds)
    job_dir = bench.start([sys.executable, "-c", program], **{OPERATOR_MIX: "1"})
    pid = bench.training_pid(job_dir)
    deadline = time.monotonic() + seconds
    while (ended := profile_end(job_dir, pid)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the operators of {name} were not profiled")
        time.sleep(0.1)
    took = json.loads(bench.finish().splitlines()[-1])
    began = ended - PROFILED_STEPS - 1  # position of the step at whose end the profile began
    before, during, after = took[WARM_STEPS:began], took[began:ended], took[ended:]
    usual = median(before)
    cost_s = sum(during) - len(during) * usual
    case = f"operator mix, {name}"
    return [
        Row(case, "cotenant", "one profile", cost_s, "s"),
        Row(case, "cotenant", "profiled steps over others", median(during[1:-1]) / usual, "1"),
        Row(case, "cotenant", "one profile a minute, of the job's time", cost_s / ONE_A_MINUTE_S, "1", goal="< 0.01"),
        Row(case, "cotenant", "step time after the profile over before, minus 1", median(after) / usual - 1.0, "1",
            pstdev(before) / usual),
    ]  # fmt: skip


def profile_end(job_dir: Path, pid: int) -> int | None:
    """The step at which the job's profile ended; None while there is none."""
    report = read_report(f"{job_dir}/report-{pid}")
    return None if report is None or report.mix is None else report.mix.step


def watch(profiler: Profiler | None, period_s: float) -> None:
    """Spend one window, sampling or not; both wake up equally often."""
    end = time.monotonic() + WINDOW_S
    while time.monotonic() < end:
        if profiler is not None:
            profiler.tick()
        time.sleep(period_s)
    if profiler is not None:
        profiler.collect({}, {})


def steps(job_dir: Path, pid: int) -> int:
    """The job's step counter."""
    report = read_report(f"{job_dir}/report-{pid}")
    if report is None:
        raise RuntimeError(f"process {pid} reports nothing")
    return report.steps


def ratio(metric: str, windows: list[tuple[float, float]], column: int, goal: str | None) -> Row:
    """The relative difference, the median over the fours; its spread is the standard error of that, bootstrapped."""
    took = np.array([window[column] for window in windows]).reshape(-1, len(ORDER))
    on = np.array(ORDER)
    found = took[:, on].mean(axis=1) / took[:, ~on].mean(axis=1) - 1.0
    spread = bootstrap((found,), np.median, rng=np.random.default_rng(0), method="percentile").standard_error
    case = f"{len(found)} times four windows of {WINDOW_S:g} s"
    return Row(case, "cotenant", f"{metric}, minus 1", float(np.median(found)), "1", float(spread), goal)


if __name__ == "__main__":
    main()
