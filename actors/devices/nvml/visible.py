"""Which GPUs a value of ``CUDA_VISIBLE_DEVICES`` names, as CUDA reads it.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "Device Enumeration". CUDA shows a
process one MIG instance at most, the first that is named; here all of them are returned, because a host may be told
to manage several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

GPU_PREFIX, MIG_PREFIX = "GPU-", "MIG-"
NO_DEVICES = frozenset({"", "NoDevFiles"})
_INDEX = re.compile(r"\d+")
_MIG_BY_GPU = re.compile(r"MIG-(GPU-[^/]*)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: its UUID and the numbers of its GPU instance and compute instance (None = not told)."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A GPU by its NVML index; ``instance`` is the UUID of the MIG instance that is meant, None = the whole GPU."""

    index: int
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU of the host: its UUID, and its MIG instances when MIG is on."""

    uuid: str
    instances: tuple[Instance, ...] = ()


def visible_devices(value: str | None, boards: Sequence[Board]) -> list[Named]:
    """Return what a value of ``CUDA_VISIBLE_DEVICES`` names, in its order.

    * Not set (None): every GPU. Empty, or ``NoDevFiles``: none.
    * Numbers count in NVML's order (``CUDA_DEVICE_ORDER=PCI_BUS_ID``; CUDA's own default is fastest first, which is
      why jobs get UUIDs).
    * UUIDs may be cut short while they name one GPU only: ``GPU-8932``. ``MIG-<uuid>`` likewise, and the older
      ``MIG-GPU-<uuid>/<GPU instance>/<compute instance>``.
    * The first entry that names nothing (out of range, unknown, ambiguous, of another kind than the first) ends the
      list: what comes before it is visible.
    * A device named twice makes none visible.

    Args:
        value: The variable's value.
        boards: All GPUs of the host in NVML's order.
    """
    if value is None:
        return [Named(index) for index in range(len(boards))]
    if value.strip() in NO_DEVICES:
        return []
    named: list[Named] = []
    entries = [entry.strip() for entry in value.split(",")]
    for entry in entries:
        found = _find(entry, boards) if _kind(entry) == _kind(entries[0]) else None
        if found is None:
            break
        if found in named:
            return []
        named.append(found)
    return named


def _kind(entry: str) -> bool:
    """Whether an entry is a number: numbers and UUIDs cannot be mixed."""
    return _INDEX.fullmatch(entry) is not None


def _find(entry: str, boards: Sequence[Board]) -> Named | None:
    if _kind(entry):
        return Named(int(entry)) if int(entry) < len(boards) else None
    by_gpu = _MIG_BY_GPU.fullmatch(entry)
    if by_gpu is not None:
        uuid, numbers = by_gpu[1], (int(by_gpu[2]), int(by_gpu[3]))
        hits = [
            Named(index, instance.uuid)
            for index, board in enumerate(boards)
            if board.uuid.startswith(uuid)
            for instance in board.instances
            if (instance.gpu_instance, instance.compute_instance) == numbers
        ]
    elif entry.startswith(MIG_PREFIX):
        hits = [
            Named(index, instance.uuid)
            for index, board in enumerate(boards)
            for instance in board.instances
            if instance.uuid.startswith(entry)
        ]
    elif entry.startswith(GPU_PREFIX):
        hits = [Named(index) for index, board in enumerate(boards) if board.uuid.startswith(entry)]
    else:
        hits = []
    return hits[0] if len(hits) == 1 else None
