"""The workloads of the suite: training programs and services in several architectures and sizes, each with real waits.

``build`` makes one of the ``catalogue``. Start at ``catalogue.py``; what a workload is to the suite is in ``base.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.colocation.workloads.base import Place, Workload
from benchmarks.colocation.workloads.catalogue import (
    GAN,
    IMAGES,
    INFERENCE,
    REINFORCEMENT,
    SEGMENTATION,
    TEXT,
    Configuration,
    Description,
    catalogue,
    configuration,
)
from benchmarks.colocation.workloads.inference import Service
from benchmarks.colocation.workloads.processes import WorkloadError
from benchmarks.colocation.workloads.reinforcement import Balancing
from benchmarks.colocation.workloads.training import Training

__all__ = ["Description", "Workload", "WorkloadError", "build", "catalogue"]

_MAKERS: dict[str, Callable[[Configuration, Place, int], Workload]] = {
    IMAGES: Training,
    SEGMENTATION: Training,
    GAN: Training,
    TEXT: Training,
    REINFORCEMENT: Balancing,
    INFERENCE: Service,
}


def build(name: str, device: str, torch_device: str, *, seed: int = 0) -> Workload:
    """Build a workload, with its helper processes started and nothing computed yet.

    Under the ``cpu`` device the process has to be pinned to the device's core before. With tensors on the CPU the whole
    process computes with one thread from now on, and takes numbers too small for full precision for 0.

    Args:
        name: A name in ``catalogue(device)``.
        device: ``"cpu"`` or ``"cuda"``: which catalogue.
        torch_device: Where the tensors live, for example ``"cuda:0"``. ``"cpu"`` with the ``cuda`` catalogue is a dry
            run: the same programs at a toy size.
        seed: Seed of weights, data and order.

    Raises:
        ValueError: An unknown name or device; the message lists the known ones.
    """
    chosen = configuration(name, device)
    where = torch.device(torch_device)
    if where.type == "cpu":
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # or a network that has learnt its data would compute slower and slower
        if device == "cuda":
            chosen = chosen.shrunk()
    torch.manual_seed(seed)
    return _MAKERS[chosen.family](chosen, Place(where, staged=device == "cuda", mixed=chosen.mixed), seed)
