"""Record what the example programs want of a core, a window a second: series to train and to judge demand experts on.

    python benchmarks/record_demand.py build/demand
    cotenant evaluate demand build/demand --licence "our own measurements"

Every program runs alone on a core, launched, sampled at 10 Hz and cut into windows as by a host agent, evaluations and
checkpoints included; its helper processes run anywhere. The windows become a signature store, with the program as the
fingerprint: what a hold-out keeps together. All cores record at once, one program each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from shares import Bench
from workloads import CASES

from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import DeviceSettings, ProfilerSettings
from cotenant.forecasting.datasets.signature_store import FINGERPRINT, SignatureStore
from cotenant.forecasting.signatures import to_row

SECONDS = 300.0
EVERY_STEPS = 60  # an evaluation and a checkpoint
ENDLESS = 10_000_000  # steps


def record(names: Mapping[int, str], seconds: float, store: SignatureStore, folder: Path) -> None:
    """Record one program per core from its first steps on."""
    settings = ProfilerSettings()
    backend = CpuBackend(DeviceSettings(count=len(names)), "bench")
    benches: dict[str, Bench] = {}
    try:
        for gpu, (core, name) in zip(backend.discover(), names.items(), strict=True):
            out = folder / f"checkpoints-{core}"
            command = [sys.executable, *CASES[name], "--steps", str(ENDLESS), "--out", str(out)]
            every = ["--eval-every", str(EVERY_STEPS), "--checkpoint-every", str(EVERY_STEPS)]
            benches[name] = Bench(folder / f"run-{core}", core)
            job = benches[name].start([*command, *every])
            backend.watch(name, [gpu.gpu_id], benches[name].training_pid(job))
        profiler, rows = Profiler(backend, settings), []
        began = time.monotonic()
        samples = round(seconds * settings.sample_hz)
        per_window = round(settings.window_s * settings.sample_hz)
        for sample in range(1, samples + 1):
            time.sleep(max(0.0, began + sample / settings.sample_hz - time.monotonic()))
            profiler.tick()
            if sample % per_window == 0:
                for bench in benches.values():
                    bench.renew()
                rows += [to_row(window) | {FINGERPRINT: window.job_id} for window in profiler.collect({}, {})]
    finally:
        for bench in benches.values():
            bench.stop()
        backend.close()
    store.write("bench", rows)


def main() -> None:
    """Record every program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the signature store")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of every program (%(default)s)")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    store = SignatureStore(args.out, keep_days=3650.0, keep_bytes=1 << 30)
    left = list(CASES)
    while left:
        now, left = left[: len(cores)], left[len(cores) :]
        print(f"{', '.join(now)}: {args.seconds:g} s", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            record(dict(zip(cores, now, strict=False)), args.seconds, store, Path(folder))


if __name__ == "__main__":
    main()
