"""The job that is measured.

``program.py train``: steps on the GPU until it is ended.
``program.py allocate BYTES``: says whether it is granted that much.
``program.py grow BYTES SECONDS``: takes that much memory bit by bit and goes on stepping.
``program.py phases NUMBER SECONDS FILE``: in turn steps and waits, and writes down when it changed.

With ``COTENANT_GPU_DRY_RUN=1`` nothing is computed: a step is a short sleep, so that a stand-in for torch is enough.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLAIM = "dry-claim"  # see dry.py, which a job does not import
DRY = os.environ.get("COTENANT_GPU_DRY_RUN") == "1"


def stepper() -> Callable[[], None]:
    """Return what makes one step: a large matrix product keeps every processor of the GPU busy."""
    if DRY:
        torch.cuda.init()
        idle: Any = torch.optim.SGD()  # type: ignore[call-arg]

        def pretend() -> None:
            time.sleep(0.004)
            idle.step()

        return pretend
    model = torch.nn.Linear(8192, 8192, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(4096, 8192, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def claim(memory_bytes: int, percent: int) -> None:
    """Tell the stand-in of a dry run what would be used of the GPU."""
    if DRY:
        Path(os.environ["COTENANT_JOB_DIR"], CLAIM).write_text(f"{memory_bytes} {percent}", encoding="utf-8")


def train() -> None:
    """Step for ever."""
    step = stepper()
    claim(1 << 30, 95)
    while True:
        step()


def grow(size: int, seconds: float) -> None:
    """Take memory in ten parts, stepping all the while; then step for ever."""
    step, held = stepper(), []
    for part in range(1, 11):
        until = time.monotonic() + seconds / 10
        claim(size * part // 10, 50)
        if not DRY:
            held.append(torch.empty(size // 10, dtype=torch.uint8, device="cuda"))
        while time.monotonic() < until:
            step()
    while True:
        step()


def phases(number: int, seconds: float, path: str) -> None:
    """Step in every second phase and do nothing in the others, as while waiting for data."""
    step, told = stepper(), []
    for phase in range(number):
        busy = phase % 2 == 0
        claim(1 << 30, 95 if busy else 5)
        told.append([time.monotonic(), busy])
        while time.monotonic() < told[-1][0] + seconds:
            if busy:
                step()
            else:
                time.sleep(0.02)
    Path(path).write_text(json.dumps(told), encoding="utf-8")


def allocate(size: int) -> None:
    """Say whether that much memory is granted, after a step under the share."""
    if DRY:
        print("granted" if size <= int(os.environ["COTENANT_GPU_DRY_BYTES"]) else "refused", flush=True)
        return
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.sum().backward()
    optimizer.step()
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("refused", flush=True)
    else:
        print("granted", flush=True)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "train":
        train()
    elif what == "grow":
        grow(int(arguments[0]), float(arguments[1]))
    elif what == "phases":
        phases(int(arguments[0]), float(arguments[1]), arguments[2])
    else:
        allocate(int(arguments[0]))
