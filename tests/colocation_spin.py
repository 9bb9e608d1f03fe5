"""Tiny workloads of the measurement suite's tests, with the interface of the real ones and without torch.

A name says what a workload does: ``spin-4`` computes 4 ms a step, ``wait-4`` computes 1 ms and sleeps 3 ms.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("spin-4", "wait-4", "helped-2", "oom-0", "oom-late", "hangs-20", "dies-20", "broken-0", "noisy-2")


@dataclass(frozen=True)
class Description:
    """What the suite asks about a workload."""

    name: str
    family: str
    architecture: str
    batch: int = 1
    kind: str = "training"
    reads: str = "none"


def catalogue(device: str) -> dict[str, Description]:
    """Name → description."""
    del device
    return {name: Description(name, name.partition("-")[0], name) for name in NAMES}


def build(name: str, device: str, torch_device: str) -> Spin:
    """One of ``NAMES``."""
    del device, torch_device
    if message := os.environ.get("SPIN_REFUSES"):
        raise RuntimeError(message)
    return Spin(name)


class Spin:
    """A workload; counts its steps so that some go wrong late."""

    def __init__(self, name: str) -> None:
        kind, _, argument = name.partition("-")
        self.description = Description(name, kind, name)
        self._steps = 0
        if kind == "broken":
            raise RuntimeError("it cannot be built")
        self._act: Callable[[float], None] = getattr(self, f"_{kind}")
        self._argument = 1e-3 * float(argument) if argument.isdecimal() else 1.0
        self._helpers: list[subprocess.Popen[bytes]] = []
        if kind == "helped":
            command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
            self._helpers.append(subprocess.Popen(command))
            if folder := os.environ.get("SPIN_HELPERS"):
                Path(folder, str(self._helpers[0].pid)).touch()

    def step(self) -> float:
        self._steps += 1
        self._act(self._argument)
        return 0.0

    def synchronize(self) -> None:
        pass

    def helper_pids(self) -> list[int]:
        return [helper.pid for helper in self._helpers]

    def operator_mix(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            self.step()
        return {"fractions": {"gemm": 1.0}, "launches_per_step": 1.0, "seconds": 0.0}

    def close(self) -> None:
        for helper in self._helpers:
            helper.kill()
            helper.wait()

    def _spin(self, seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    _helped = _spin

    def _wait(self, seconds: float) -> None:
        self._spin(0.25 * seconds)
        time.sleep(0.75 * seconds)

    def _noisy(self, seconds: float) -> None:
        print('{"event": "window"}', flush=True)  # noqa: T201 - a program may print what it likes
        self._spin(seconds)

    def _oom(self, late: float) -> None:
        self._spin(0.002)
        if not late or self._steps > 20:
            raise MemoryError("no more memory")

    def _hangs(self, _: float) -> None:
        self._spin(0.002)
        if self._steps > 20:
            time.sleep(600.0)

    def _dies(self, _: float) -> None:
        self._spin(0.002)
        if self._steps > 20:
            os._exit(3)
