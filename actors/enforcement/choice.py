"""How the shares of a job are held on its GPUs: one pure decision, with the reason for it and what it guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cotenant.actors.enforcement.pausing import PauseName
from cotenant.scheduler.core.model import Isolation

Method = Literal["cpu", "mps", "timeslice", "mig"]
GpuKind = Literal["cpu", "gpu", "mig"]

GUARANTEES: Mapping[Method, str] = {
    "mps": (
        "jobs run at the same time, and the job is held to its share at optimizer steps. "
        "A fatal fault of one job ends all jobs of this GPU that run under MPS"
    ),
    "timeslice": (
        "the GPU's own scheduler alternates between jobs; the job is held to its share at optimizer steps, memory by "
        "torch's allocator. Faults of other jobs do not reach it"
    ),
    "mig": "the hardware holds memory and compute to the instance, and keeps faults of other instances away",
}

NO_WHOLE_GPUS = "no whole NVIDIA GPUs here"
NO_FREEZE: Mapping[Method, str] = {
    "cpu": "memory of a process on CPU cores is freed by ending it only",
    "mps": "the driver checkpoints no process under MPS",
    "mig": "the driver checkpoints no process under MIG",
}


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """What decides how shares of a GPU can be held.

    Attributes:
        gpu_id: The GPU.
        kind: "cpu" (a slice of cores), "gpu" (a whole GPU) or "mig" (an instance that exists).
        mps_missing: Why its jobs cannot run under MPS; empty = they can.
        checkpoint_missing: Why its processes cannot be checkpointed; empty = they can.
    """

    gpu_id: str
    kind: GpuKind
    mps_missing: str = ""
    checkpoint_missing: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a job is held, and why so.

    Attributes:
        method: The way.
        reason: Why, for people.
    """

    method: Method
    reason: str


def choose(gpus: Sequence[GpuTraits], isolation: Isolation, *, freezes: bool = False) -> Choice:
    """Return how a job is held.

    In order: cores are held as cores, an instance by being one. A job that is to be frozen, where it can be, shares no
    GPU by MPS, under which it could not. A job that wants to be alone (``hard``), or has several
    GPUs (a process can be the client of one daemon only), shares none of its GPUs by MPS. Others run under MPS where it
    can be had, those that want no isolation (``none``) without caps; else they take turns.

    Args:
        gpus: The GPUs of its shares on this host.
        isolation: What its hints ask for.
        freezes: They ask for processes that can be frozen (``checkpoint: driver``).

    Raises:
        ValueError: No GPU, GPUs of several kinds, or several MIG instances.
    """
    kinds = {gpu.kind for gpu in gpus}
    if len(kinds) != 1:
        raise ValueError(f"gpus: {sorted(kinds)} is not accepted; give GPUs of one kind")
    if kinds == {"cpu"}:
        return Choice("cpu", "the device is a slice of CPU cores")
    if kinds == {"mig"}:
        if len(gpus) > 1:
            raise ValueError(f"gpus: {len(gpus)} MIG instances is not accepted; give 1: CUDA shows a process no more")
        return Choice("mig", "the GPU is a MIG instance: the share is the instance")
    if freezes and not _no_checkpoints(gpus):
        return Choice(
            "timeslice",
            "checkpoint driver: it can be frozen, its device memory then in the host's; under MPS it could not",
        )
    choice = _choose_for_whole_gpus(gpus, isolation)
    return (
        replace(choice, reason=f"{choice.reason}; it cannot be frozen: {_no_checkpoints(gpus)}") if freezes else choice
    )


def _choose_for_whole_gpus(gpus: Sequence[GpuTraits], isolation: Isolation) -> Choice:
    if isolation == "hard":
        return Choice("timeslice", "isolation hard: nobody else is on its GPUs, and no server between them")
    if len(gpus) > 1:
        return Choice("timeslice", "the job has several GPUs on this host, and an MPS daemon serves one")
    if gpus[0].mps_missing:
        return Choice("timeslice", f"no MPS: {gpus[0].mps_missing}")
    if isolation == "none":
        return Choice("mps", "isolation none: MPS, without caps")
    return Choice("mps", "isolation soft: MPS, capped when its processes start")


def _no_checkpoints(gpus: Sequence[GpuTraits]) -> str:
    return next((gpu.checkpoint_missing for gpu in gpus if gpu.checkpoint_missing), "")


def choose_pause(gpus: Sequence[GpuTraits], method: Method) -> tuple[PauseName, str]:
    """Return how a job can be held still, and why not in the way that frees its device memory, if so.

    Args:
        gpus: The GPUs of its shares on this host.
        method: How its shares are held.
    """
    if method != "timeslice":
        return "signal", NO_FREEZE[method]
    missing = _no_checkpoints(gpus)
    return ("signal", missing) if missing else ("checkpoint", "")
