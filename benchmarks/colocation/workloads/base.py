"""What every workload is to the suite: something that makes steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from benchmarks.colocation.workloads import mix
from benchmarks.colocation.workloads.catalogue import Description
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a workload runs.

    Attributes:
        torch_device: The device of its tensors.
        staged: Whether batches go through a buffer to the device, as they must for a GPU.
        mixed: Whether it computes in bfloat16 where that is accurate enough.
    """

    torch_device: torch.device
    staged: bool
    mixed: bool

    def precision(self) -> AbstractContextManager[Any]:
        """The context to compute in."""
        return torch.autocast(self.torch_device.type, dtype=torch.bfloat16, enabled=self.mixed)

    def put(self, network: Network) -> Network:
        """The network on the device, its images laid out as ``memory_format`` says."""
        return network.to(self.torch_device).to(memory_format=self.memory_format())  # type: ignore[call-overload,no-any-return]

    def memory_format(self) -> torch.memory_format:
        """How images lie in memory: GPUs convolve bfloat16 fastest with the channels last."""
        return torch.channels_last if self.mixed else torch.contiguous_format


class Workload(ABC):
    """A warm program that makes one step at a time. Build it with ``build``; close it in the end."""

    def __init__(self, description: Description, place: Place) -> None:
        self.description = description
        self._place = place

    @abstractmethod
    def step(self) -> float:
        """One training step, or one answered batch, with the waiting for its input.

        Every step ends by reading one number from the device, as ordinary programs read their loss, and so waits for
        the device once (reinforcement learning also does for every choice of actions).

        Returns:
            The loss, or the mean of the outputs.

        Raises:
            WorkloadError: A helper process has ended.
        """

    @abstractmethod
    def helper_pids(self) -> list[int]:
        """The processes that feed this one."""

    @abstractmethod
    def close(self) -> None:
        """End the helper processes; again is fine. No step may follow."""

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        if self._place.torch_device.type == "cuda":
            torch.cuda.synchronize(self._place.torch_device)

    def operator_mix(self, steps: int) -> dict[str, Any]:
        """What the device's time goes to, from ``steps`` steps under the profiler; see ``mix.profiled``."""
        return mix.profiled(self.step, self.synchronize, steps, self._place.torch_device.type)
