"""``python -m benchmarks.gpu --out DIR``: how shares are held on this GPU. ``README.md`` beside this file says more."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Row, commit, machine
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dry import Dry
from benchmarks.gpu.host import Failed, Host, Job
from benchmarks.gpu.steered import followed_demand, migrated, rescued

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library, NvmlFailure
from cotenant.actors.devices.registry import VISIBLE
from cotenant.actors.enforcement.pausing import CheckpointPause, Pause, PauseError, SignalPause
from cotenant.configs.settings import DeviceSettings

SHARES = (0.25, 0.5, 0.75)
SETTLE_WINDOWS = 3  # longer than that nobody waits for a share to be kept
SAMPLE_S = 0.1
KEPT, KEPT_S = 0.1, 0.5  # a share is kept when the step rate over half a second is this near to it


def main(arguments: list[str]) -> int:
    """Run the suite; returns the exit code: 1 when a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where gpu.json and gpu.csv go")
    parser.add_argument("--dry-run", action="store_true", help="on stand-ins: figures mean nothing")
    names = [case.__name__ for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="only this one; may be repeated")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    began, rows, failed = time.monotonic(), [], []
    try:
        backend = NvmlBackend(DeviceSettings(backend="nvml"), visible=os.environ.get(VISIBLE))
    except ValueError as error:
        parser.error(str(error))
    gpu = backend.discover()[0]
    env = {"COTENANT_GPU_DRY_RUN": "1", "COTENANT_GPU_DRY_BYTES": str(gpu.memory_bytes // 4)} if chosen.dry_run else {}
    with tempfile.TemporaryDirectory(prefix="ct-gpu-") as folder:
        dry = Dry() if chosen.dry_run else None
        bench = Bench(Path(folder), backend, gpu, env, dry)
        for case in (each for each in CASES if each.__name__ in (chosen.case or names)):
            try:
                rows += case(bench)
            except (Failed, OSError, PauseError) as error:
                failed.append(f"{case.__name__}: {error}")
    backend.close()
    report = {
        "benchmark": "gpu",
        "machine": machine() | versions(gpu),
        "commit": commit(),
        "seconds": round(time.monotonic() - began, 1),
        "dry_run": chosen.dry_run,
        "failed": failed,
        "skipped": bench.skipped,
        "rows": [asdict(row) for row in rows],
    }
    (chosen.out / "gpu.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with (chosen.out / "gpu.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for row in rows:
        print(f"{row.case}  {row.method}  {row.metric}: {row.value:.4g} {row.unit}")
    for missing in bench.skipped:
        print(f"skipped {missing}")
    for failure in failed:
        print(f"FAILED {failure}")
    return 1 if failed else 0


def versions(gpu: GpuInfo) -> dict[str, str | None]:
    """The GPU, its driver and the CUDA version it knows."""
    library = Library()
    told: dict[str, str | None] = {"gpu": gpu.gpu_type}
    for name, function in (("driver", "nvmlSystemGetDriverVersion"), ("cuda", "nvmlSystemGetCudaDriverVersion")):
        try:
            told[name] = str(library.call(function))
        except NvmlFailure:
            told[name] = None
    library.close()
    return told


def held(bench: Bench) -> list[Row]:
    """How exactly a job keeps to its share."""
    rows = []
    for method in bench.methods:
        with bench.host(method) as host:
            job = started(host, "held", bench)
            alone = job.rate(bench.window_s)
            for share in SHARES:
                job.resize(share)
                job.rate(min(2.0, bench.window_s))  # what it had saved up
                rate = job.rate(bench.window_s) / alone
                rows.append(Row(f"held, share {share:g}", method, "step rate relative to alone", rate, "1"))
    return rows


def resized(bench: Bench) -> list[Row]:
    """How soon a new share is in force."""
    rows = []
    for method in bench.methods:
        with bench.host(method) as host:
            job = started(host, "resized", bench)
            alone = job.rate(bench.window_s)
            for share in (0.5, 1.0):
                began = time.monotonic()
                job.resize(share)
                deadline = began + SETTLE_WINDOWS * bench.window_s
                while abs(job.rate(KEPT_S) / alone / share - 1.0) > KEPT and time.monotonic() < deadline:
                    continue
                rows.append(Row(f"resized to {share:g}", method, "until it is kept", time.monotonic() - began, "s"))
    return rows


def memory(bench: Bench) -> list[Row]:
    """Whether memory beyond the share is refused, and memory within it is not."""
    rows = []
    share = bench.gpu.memory_bytes // 4
    for method in bench.methods:
        with bench.host(method) as host:
            for part, wanted in ((0.5, "granted"), (2.0, "refused")):
                job = host.start(f"memory-{part:g}", 0.5, share, "allocate", str(int(share * part)))
                right = job.wait().split()[-1:] == [wanted]
                rows.append(Row(f"memory, {part:g} of the share", method, f"is {wanted}", float(right), "1"))
    return rows


def overhead(bench: Bench) -> list[Row]:
    """What looking at the GPU ten times a second costs a job."""
    with bench.host(bench.methods[0]) as host:
        job = started(host, "overhead", bench)
        bench.backend.watch("overhead", [bench.gpu.gpu_id], job.root_pid)
        without = job.rate(bench.window_s)
        began, before = time.monotonic(), job.steps()
        while time.monotonic() < began + bench.window_s:
            bench.backend.sample()
            time.sleep(SAMPLE_S)
        watched = (job.steps() - before) / (time.monotonic() - began)
        bench.backend.unwatch("overhead")
    return [Row("overhead of the device loop", "cotenant", "step rate relative to without", watched / without, "1")]


def paused(bench: Bench) -> list[Row]:
    """How long it takes to hold a job still, and to let it go on."""
    ways: list[Pause] = [SignalPause()]
    if not bench.no_checkpoints:
        ways.append(CheckpointPause())
    rows = []
    for way in ways:
        with bench.host(bench.methods[0]) as host:
            job = started(host, f"paused-{way.name}", bench)
            before = used(bench)
            seconds = timed(lambda way=way, job=job: way.pause(job.root_pid, job.device_pids()))  # type: ignore[misc]
            rows.append(Row("paused", way.name, "until it stands still", seconds, "s"))
            freed = None if before is None or (now := used(bench)) is None else before - now
            if freed is not None:
                rows.append(Row("paused", way.name, "device memory freed", float(freed), "B"))
            steps, began = job.steps(), time.monotonic()
            way.resume(job.root_pid, job.device_pids())
            job.await_step(steps)
            rows.append(Row("paused", way.name, "until it steps again", time.monotonic() - began, "s"))
    return rows


def started(host: Host, job_id: str, bench: Bench) -> Job:
    """A job that trains with the whole GPU and has warmed up."""
    job = host.start(job_id, 1.0, bench.gpu.memory_bytes // 2, "train")
    job.await_step(20)
    return job


def used(bench: Bench) -> float | None:
    """The device memory in use now."""
    for _ in range(2):  # what came in last, and what comes in now
        time.sleep(SAMPLE_S)
        sample = bench.backend.sample()
    return next(device.memory_bytes for device in sample.devices if device.gpu_id == bench.gpu.gpu_id)


def timed(action: Callable[[], None]) -> float:
    """Do something and return the seconds it took."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


CASES: tuple[Callable[[Bench], list[Row]], ...] = (
    *(held, resized, memory, overhead, paused),
    *(rescued, migrated, followed_demand),
)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
