"""Enforcement on NVIDIA GPUs: time-slicing, MPS, MIG instances. None of it has been run on a GPU.

All three have the cooperative part in common (``actors/shim``): at optimizer steps a process is held to the compute
share, and torch's allocator to the memory share, and both follow the share word at once. They differ in what holds
without the program's help.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml.watchdog import begin
from cotenant.actors.enforcement import mpscontrol
from cotenant.actors.enforcement.base import DETACH_S, Ceiling, ServiceDown
from cotenant.actors.enforcement.choice import GUARANTEES, NO_FREEZE, Method
from cotenant.actors.enforcement.mps import MpsService
from cotenant.actors.enforcement.pausing import CheckpointPause, Pause
from cotenant.actors.enforcement.sharefile import ShareFile, visible
from cotenant.actors.reports import JobReport
from cotenant.actors.shim.process import CUDA
from cotenant.actors.shim.reportfile import Controls
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Isolation

# A folder in which no daemon listens: the driver then does without MPS, also where the system runs a daemon.
NO_MPS = {mpscontrol.PIPE_VARIABLE: "/nonexistent/no-mps"}
MPS_RECORD = "mps.json"
# NVIDIA's advice for n clients is 100 % / (n / 2) each: who idles leaves room for the others. A share may double.
COMPUTE_ROOM = 2.0
_IDENTITY: Mapping[str, type] = {"gpu_id": str, "daemon": int}
_CAPS: Mapping[str, type | tuple[type, ...]] = {"memory_bytes": int, "compute": (int, float)}
LOOK_S = 0.5  # a daemon that takes longer to answer is told of by a later look


class TimeSliceEnforcement(ShareFile):
    """The GPU's own scheduler alternates between the processes; each keeps to its share by itself."""

    name: str = "timeslice"
    method: Method = "timeslice"
    nothing_seen = "no PyTorch optimizer seen: compute is not held to the share"
    no_step = "no optimizer step seen: compute is not held to the share yet"

    def environment(self, job_dir: Path, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """See ``EnforcementBackend.environment``."""
        return {**visible(gpus), **NO_MPS, "COTENANT_DEVICE": CUDA, "COTENANT_SHARE_INDEX": "0"}

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        return f"{self.name}: {GUARANTEES[self.method]}. Now: {report.controls}"

    def pause(self, job_dir: Path) -> Pause:
        """See ``EnforcementBackend.pause``."""
        return CheckpointPause()

    def unfreezable(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.unfreezable``: whether the host's driver can is not known here."""
        return ""

    def _held(self, controls: Controls, *, alone: bool) -> list[str]:
        return [
            "compute is held to the share at optimizer steps",
            "torch allocates no more than the memory share"
            if controls & Controls.MEMORY
            else "torch holds more than the memory share, and grows no more (or CUDA is not in use)",
        ]


class MigEnforcement(TimeSliceEnforcement):
    """The share is the MIG instance: the hardware holds it."""

    name: str = "mig"
    method: Method = "mig"
    nothing_seen = "held by the hardware"
    no_step = "held by the hardware"

    def pause(self, job_dir: Path) -> Pause:
        """See ``EnforcementBackend.pause``."""
        return ShareFile.pause(self, job_dir)

    def unfreezable(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.unfreezable``."""
        return NO_FREEZE[self.method]


class MpsEnforcement(TimeSliceEnforcement):
    """Work of all jobs runs at the same time, through one server per GPU that caps each of them from its start.

    Args:
        service: Returns the daemon of a GPU.
    """

    name: str = "mps"
    method: Method = "mps"

    def __init__(self, service: Callable[[str], MpsService]) -> None:
        self._service = service

    def admit(self, job_dir: Path, gpus: Sequence[GpuInfo], shares: Sequence[Share], isolation: Isolation) -> None:
        """See ``EnforcementBackend.admit``: has a daemon that takes clients, and settles the caps."""
        (gpu,), (share,) = gpus, shares
        service = self._service(gpu.gpu_id)
        try:
            daemon = service.ensure()
        except mpscontrol.MpsError as error:
            raise ServiceDown(f"MPS on {gpu.gpu_id}: {error}", service.pause_s()) from error
        record: dict[str, object] = {"gpu_id": gpu.gpu_id, "daemon": daemon}
        if isolation != "none":
            record |= {"memory_bytes": share.memory_bytes, "compute": min(1.0, COMPUTE_ROOM * share.compute)}
        runner.write_json(str(job_dir / MPS_RECORD), record)

    def environment(self, job_dir: Path, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """See ``EnforcementBackend.environment``. 0 is the only device a process sees."""
        record = _read(job_dir)
        values = super().environment(job_dir, gpus, env)
        values |= mpscontrol.environment(self._service(record["gpu_id"]).folder)
        if "compute" in record:
            values["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{record['compute'] * 100:.4g}"
            values["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={math.ceil(record['memory_bytes'] / (1 << 20))}M"
        return values

    def check(self, job_dir: Path) -> None:
        """See ``EnforcementBackend.check``."""
        _read(job_dir)

    def ceilings(self, job_dir: Path) -> tuple[Ceiling, ...]:
        """See ``EnforcementBackend.ceilings``."""
        record = _read(job_dir)
        if "compute" not in record:
            return ()
        return (Ceiling(record["gpu_id"], record["memory_bytes"], record["compute"]),)

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        said = super().guarantees(job_dir, report)
        for ceiling in self.ceilings(job_dir):
            assert ceiling.memory_bytes is not None and ceiling.compute is not None
            return (
                f"{said}. Until it starts anew the driver refuses more: at most {ceiling.memory_bytes >> 20} MiB and "
                f"{ceiling.compute:.0%} of the processors, whatever its share"
            )
        return f"{said}. The driver caps nothing"

    def lost(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.lost``."""
        record = _read(job_dir)
        return self._service(record["gpu_id"]).lost(record["daemon"])

    def detach(self, job_dir: Path, pids: Collection[int]) -> Future[Any] | None:
        """See ``EnforcementBackend.detach``: what dies with work in flight takes its neighbours along."""
        if self.lost(job_dir):
            return None  # nobody is there to take care of it, nor are there neighbours
        gpu_id = _read(job_dir)["gpu_id"]
        folder = self._service(gpu_id).folder
        return begin(f"MPS on {gpu_id}", mpscontrol.terminate_clients, folder, tuple(pids), DETACH_S)

    def pause(self, job_dir: Path) -> Pause:
        """See ``EnforcementBackend.pause``."""
        return ShareFile.pause(self, job_dir)

    def unfreezable(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.unfreezable``."""
        return NO_FREEZE[self.method]

    def tend(self, job_dirs: Sequence[Path]) -> None:
        """See ``EnforcementBackend.tend``: looks at the daemon of every GPU that has jobs, at all of them at once."""
        gpu_ids: set[str] = set()
        for job_dir in job_dirs:
            with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or its record is damaged
                gpu_ids.add(_read(job_dir)["gpu_id"])
        done, _ = wait([begin(f"MPS on {gpu_id}", self._service(gpu_id).look) for gpu_id in gpu_ids], LOOK_S)
        for look in done:
            look.result()


def _read(job_dir: Path) -> dict[str, Any]:
    record = runner.read_json(str(job_dir / MPS_RECORD))
    if record is None:
        raise FileNotFoundError(job_dir / MPS_RECORD)
    if not (
        isinstance(record, dict) and _fits(record, _IDENTITY) and ("compute" not in record or _fits(record, _CAPS))
    ):
        raise ValueError(f"{MPS_RECORD}: {record!r} is not accepted")
    return record


def _fits(record: Mapping[str, object], fields: Mapping[str, type | tuple[type, ...]]) -> bool:
    return all(isinstance(record.get(name), kind) for name, kind in fields.items())
