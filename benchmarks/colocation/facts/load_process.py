"""A load that a check can steer: a small training loop, told what to do by JSON lines on standard input.

    python -m benchmarks.colocation.facts.load_process --torch-device cpu

Says ``ready`` with its start-up times, then answers every command with one line; ends when its input does.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.colocation.stepping import run_window

BORN = time.monotonic()
_LIMITS = {"as": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}


class Load:
    """The training loop, the memory it holds beside it, and the commands."""

    def __init__(self, torch_device: str, width: int, batch: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.imported = time.monotonic()
        self.on_gpu = torch_device != "cpu"
        torch = self.torch
        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        self.device = torch.device(torch_device)
        self.held: list[Any] = []
        self.steps = 0
        self.model = torch.nn.Sequential(
            *(layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh()))
        ).to(self.device)
        self.input = torch.randn(batch, width).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.built = time.monotonic()
        self.step()
        self.warm = time.monotonic()

    def step(self) -> None:
        """One training step, finished on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.model(self.input) - self.input).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.on_gpu:
            self.torch.cuda.synchronize()
        self.steps += 1

    def ready(self) -> dict[str, Any]:
        """Times of the start, in seconds."""
        return {
            "pid": os.getpid(),
            "import_s": self.imported - BORN,
            "build_s": self.built - self.imported,
            "first_step_s": self.warm - self.built,
            **self.memory(),
        }

    def run(self, seconds: float, duty: float | None = None) -> dict[str, Any]:
        """Train for some seconds. ``longest`` is the longest time between two ends of steps: (from, to)."""
        now, cpu_s = time.monotonic(), time.process_time()
        counted = run_window(self.step, now, now, now + seconds, duty=duty, duty_of_steps=self.on_gpu)
        ends = [now, *counted.ends]
        longest = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0], default=(now, now))
        return {
            "steps": len(counted.ends),
            "rate": len(counted.ends) / seconds,
            "seconds": time.monotonic() - now,
            "cpu_s": time.process_time() - cpu_s,
            "longest": longest,
            "longest_s": longest[1] - longest[0],
        }

    def train(self, steps: int) -> dict[str, Any]:
        """Train exactly so many steps; the checksum tells whether the state is what it must be."""
        for _ in range(steps):
            self.step()
        total = sum(parameter.detach().double().sum().item() for parameter in self.model.parameters())
        return {"steps": self.steps, "checksum": float(total).hex()}

    def hold(self, mib: int) -> dict[str, Any]:
        """Take memory and use it; says what the allocator says when there is none."""
        try:
            self.held.append(self.torch.ones(mib << 18, dtype=self.torch.float32, device=self.device))
            if self.on_gpu:
                self.torch.cuda.synchronize()
        except (RuntimeError, MemoryError) as error:
            message = str(error).splitlines()
            return {"ok": False, "error": f"{type(error).__name__}: {message[0] if message else ''}", **self.memory()}
        return {"ok": True, **self.memory()}

    def drop(self) -> dict[str, Any]:
        """Give back what ``hold`` took."""
        self.held.clear()
        if self.on_gpu:
            self.torch.cuda.empty_cache()
        return self.memory()

    def fraction(self, value: float) -> dict[str, Any]:
        """Limit the allocator to a fraction of the device's memory."""
        self.torch.cuda.set_per_process_memory_fraction(value)
        return self.memory()

    def limit(self, which: str, mib: int) -> dict[str, Any]:
        """Set a resource limit of this process to what it uses now and some MiB; None of them lifts it."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0 if which == "as" else 5])
        limit = pages * resource.getpagesize() + (mib << 20)
        resource.setrlimit(_LIMITS[which], (limit, resource.getrlimit(_LIMITS[which])[1]))
        return {"limit_bytes": limit}

    def green(self) -> dict[str, Any]:
        """Try to make a green context of a quarter of the multiprocessors."""
        try:
            contexts = importlib.import_module("torch.cuda.green_contexts")
        except ImportError as error:
            return {"ok": False, "error": f"this torch has none: {error}"}
        sms = self.torch.cuda.get_device_properties(0).multi_processor_count
        try:
            # Hopper hands out multiprocessors by eights.
            contexts.GreenContext.create(num_sms=max(8, sms // 32 * 8), device_id=0)
        except (RuntimeError, AttributeError, TypeError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "multiprocessors": sms}
        return {"ok": True, "multiprocessors": sms}

    def memory(self) -> dict[str, Any]:
        """Bytes: resident, and what torch has of the device and what of that is in use (None on the CPU)."""
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
        cuda = self.torch.cuda
        return {
            "resident_bytes": resident,
            "reserved_bytes": int(cuda.memory_reserved()) if self.on_gpu else None,
            "allocated_bytes": int(cuda.memory_allocated()) if self.on_gpu else None,
        }


def main() -> None:
    """Build the load and carry out commands until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    load = Load(options.torch_device, options.width, options.batch)
    commands = {name: getattr(load, name) for name in ("run", "train", "hold", "drop", "fraction", "limit", "green")}
    print(json.dumps(load.ready()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command.pop("cmd")](**command)), flush=True)


if __name__ == "__main__":
    main()
