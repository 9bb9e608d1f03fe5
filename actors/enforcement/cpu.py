"""Enforcement on the ``cpu`` device: affinity, duty cycle at step boundaries, memory limit, all by the in-job shim."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.sharefile import ShareFile, own_settings, visible
from cotenant.actors.shim.process import CPU
from cotenant.actors.shim.reportfile import Controls

NOTHING_SEEN = "no PyTorch optimizer seen: compute is limited by the device's cores at most, and memory is not limited"
EVERYTHING_HELD = "compute and memory held to the share"
NO_STEP = (
    "no optimizer step seen: compute is limited only by the device's cores, not by the share; memory is not limited"
)


class CpuEnforcement(ShareFile):
    """See ``EnforcementBackend``."""

    name = "cpu"
    nothing_seen = NOTHING_SEEN
    no_step = NO_STEP

    def __init__(self, host_cores: Sequence[int] | None = None) -> None:
        self._host_cores = sorted(os.sched_getaffinity(0) if host_cores is None else host_cores)

    def environment(self, job_dir: Path, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """See ``EnforcementBackend.environment``."""
        threads = str(min(len(gpu.cores) for gpu in gpus))
        return {
            **own_settings(env, {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}),
            **visible(gpus),
            "COTENANT_DEVICE": CPU,
            "COTENANT_CORES": ";".join(",".join(map(str, gpu.cores)) for gpu in gpus),
            "COTENANT_HOST_CORES": ",".join(map(str, self._host_cores)),
            "COTENANT_SHARE_INDEX": "0",
        }

    def _held(self, controls: Controls, *, alone: bool) -> list[str]:
        if alone and Controls.PINNED in controls and Controls.MEMORY in controls:
            return [EVERYTHING_HELD]  # the usual case: nothing to read about
        where = ", on the device's cores" if controls & Controls.PINNED else ", but not to the device's cores"
        return [
            f"compute is held to the share at optimizer steps{where}",
            "allocations beyond the memory share fail in the job"
            if controls & Controls.MEMORY
            else "memory is not limited (the kernel did not accept the limit)",
        ]
