"""Where a training workload's samples come from, and how they get to the device.

A batch is bytes (batch, record_bytes); the workload turns them into numbers on the device, as fast pipelines do.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch
from benchmarks.colocation.workloads.processes import Helper
from torch import Tensor

POOL_BYTES = 32 * 2**20  # how much different data a storage holds, about
MOST_RECORDS = 512


def pool_records(batch: int, record_bytes: int) -> int:
    """How many different samples are made: at most 32 MiB of them, but never fewer than a batch."""
    return max(batch, min(MOST_RECORDS, POOL_BYTES // record_bytes))


class Batches(Protocol):
    """A source of batches."""

    def next(self) -> Tensor:
        """The next batch, uint8 (batch, record_bytes), good until the next call; waits for it."""

    def pids(self) -> list[int]:
        """The helper processes."""

    def close(self) -> None:
        """End the helper processes."""


class Generated:
    """Samples that are in memory already; reading them takes no time."""

    def __init__(self, batch: int, record_bytes: int, seed: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)
        self._batch = batch
        shape = (pool_records(batch, record_bytes), record_bytes)
        self._pool = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self._rng)

    def next(self) -> Tensor:
        return self._pool[torch.randint(0, len(self._pool), (self._batch,), generator=self._rng)]

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class Stored:
    """Samples from a storage of limited rate, which a loader process reads into shared memory.

    Args:
        batch: Samples per batch.
        record_bytes: Bytes per sample.
        rate: Samples per second of the storage.
        ahead: Batches that are read while a step runs; 0 reads between the steps.
        seed: Seed of samples and order.
    """

    def __init__(self, batch: int, record_bytes: int, *, rate: float, ahead: int, seed: int) -> None:
        self._ahead = ahead
        slots = ahead + 1  # one is in use
        size = slots * batch * record_bytes
        shared = os.memfd_create("batches")
        try:
            os.ftruncate(shared, size)
            self._slots = torch.frombuffer(mmap.mmap(shared, size), dtype=torch.uint8).view(slots, batch, record_bytes)
            arguments = {
                "shared_fd": shared,
                "slots": slots,
                "batch": batch,
                "record_bytes": record_bytes,
                "records": pool_records(batch, record_bytes),
                "rate": rate,
                "seed": seed,
            }
            self._loader = Helper("load", arguments, inherited=(shared,))
        finally:
            os.close(shared)  # the mapping and the loader keep the memory
        self._loader.write(bytes(range(ahead)))
        self._free = ahead  # the slot that is empty or in use

    def next(self) -> Tensor:
        self._loader.write(bytes((self._free,)))
        self._free = self._loader.read(1)[0]
        return self._slots[self._free]

    def pids(self) -> list[int]:
        return [self._loader.pid]

    def close(self) -> None:
        self._loader.close()


class Transfer:
    """Copies batches to the device.

    For a GPU a batch is first copied into a buffer of its own, page-locked if the device is one, and from there without
    waiting. The buffer is used again in the next step, so a step has to wait for the device once before it ends.

    Args:
        device: Where to.
        staged: Whether to use the buffer.
    """

    def __init__(self, device: torch.device, *, staged: bool) -> None:
        self._device = device
        self._staged = staged
        self._buffer: Tensor | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """``batch`` on the device."""
        if not self._staged:
            return batch.to(self._device)
        if self._buffer is None or self._buffer.shape != batch.shape:
            self._buffer = torch.empty_like(batch, pin_memory=self._device.type == "cuda")
        self._buffer.copy_(batch)
        return self._buffer.to(self._device, non_blocking=True)
