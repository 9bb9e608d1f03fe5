"""The job that is measured: trains on the GPU until it is ended, or answers what it is asked about memory.

``program.py train`` or ``program.py allocate BYTES``. With ``COTENANT_GPU_DRY_RUN=1`` nothing is computed: a step is a
short sleep, so that a stand-in for torch is enough.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

DRY = os.environ.get("COTENANT_GPU_DRY_RUN") == "1"


def train() -> None:
    """Step for ever: a large matrix product keeps every processor of the GPU busy."""
    if DRY:
        torch.cuda.init()
        optimizer: Any = torch.optim.SGD()  # type: ignore[call-arg]
        while True:
            time.sleep(0.004)
            optimizer.step()
    model = torch.nn.Linear(8192, 8192, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(4096, 8192, device="cuda")
    while True:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()


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
    if sys.argv[1] == "train":
        train()
    else:
        allocate(int(sys.argv[2]))
