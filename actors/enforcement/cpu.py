"""Enforcement on the ``cpu`` device: affinity, duty cycle at step boundaries, memory limit, all by the in-job shim."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.cgroup import MemoryGroups
from cotenant.actors.enforcement.sharefile import ShareFile, own_settings, visible
from cotenant.actors.reports import JobReport
from cotenant.actors.shim.memory import SLACK, SLACK_BYTES
from cotenant.actors.shim.process import CPU
from cotenant.actors.shim.reportfile import Controls, is_alive, read_reports
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Isolation

NOTHING_SEEN = "no PyTorch optimizer seen: only the device's cores limit it, not its share"
GROUPS = "groups.json"
EVERYTHING_HELD = "compute and memory held to the share"
NO_STEP = "no optimizer step seen: only the device's cores limit it, not its share"


class CpuEnforcement(ShareFile):
    """See ``EnforcementBackend``."""

    name = "cpu"
    nothing_seen = NOTHING_SEEN
    no_step = NO_STEP

    def __init__(self, host_cores: Sequence[int] | None = None, groups: MemoryGroups | None = None) -> None:
        self._host_cores = sorted(os.sched_getaffinity(0) if host_cores is None else host_cores)
        self._groups = groups
        self._groups_lock = threading.Lock()  # starts and ``tend`` are in different threads
        self._starting: dict[Path, list[str]] = {}  # names of groups whose jobs ``tend`` has not been told of yet

    def admit(self, job_dir: Path, gpus: Sequence[GpuInfo], shares: Sequence[Share], isolation: Isolation) -> None:
        """See ``EnforcementBackend.admit``: a job that is strictly kept apart gets memory groups, if there are any."""
        if self._groups is None or isolation != "hard":
            return
        names = [f"{job_dir.name}.{index}" for index in range(len(shares))]
        with self._groups_lock:
            self._starting[job_dir] = names
            made = [
                self._groups.create(name, _with_slack(share.memory_bytes))
                for name, share in zip(names, shares, strict=True)
            ]
        runner.write_json(str(job_dir / GROUPS), {"groups": [str(group) for group in made]})

    def apply(self, job_dir: Path, shares: Sequence[Share], epoch: int, revision: int) -> None:
        """See ``EnforcementBackend.apply``."""
        super().apply(job_dir, shares, epoch, revision)
        for group, share in zip(self._of(job_dir), shares, strict=False):
            self._limit(group, share)

    def report(self, job_dir: Path, monotonic_s: float) -> JobReport:
        """See ``EnforcementBackend.report``. Processes that have come onto the device meanwhile go into its group."""
        groups = self._of(job_dir)
        for process in read_reports(str(job_dir)) if groups else ():
            if process.share_index < len(groups) and is_alive(process):
                self._put(groups[process.share_index], process.pid)
        return super().report(job_dir, monotonic_s)

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        said = super().guarantees(job_dir, report)
        groups = self._of(job_dir)
        if not groups:
            return said
        if not all(group.is_dir() for group in groups):
            return f"{said}; its memory group is gone: its processes are not held together"
        return f"{said}; its processes on the device are killed when together they outgrow their memory share"

    def tend(self, job_dirs: Sequence[Path]) -> None:
        """See ``EnforcementBackend.tend``: removes the groups of jobs that are gone, and of starts that failed."""
        if self._groups is None:
            return
        known = set(job_dirs)
        kept = [group.name for job_dir in job_dirs for group in self._of(job_dir)]
        with self._groups_lock:
            self._starting = {
                job_dir: names
                for job_dir, names in self._starting.items()
                if job_dir not in known and job_dir.exists()  # the directory goes when a start fails
            }
            self._groups.remove_all_but([*kept, *(name for names in self._starting.values() for name in names)])

    def close(self, running: Sequence[Path] = ()) -> tuple[str, ...]:
        """See ``EnforcementBackend.close``."""
        if self._groups is not None:
            self._groups.remove_all_but(())
            with contextlib.suppress(OSError):
                self._groups.base.rmdir()
        return ()

    def _of(self, job_dir: Path) -> list[Path]:
        if self._groups is None:
            return []
        return [Path(group) for group in (runner.read_json(str(job_dir / GROUPS)) or {}).get("groups", ())]

    def _limit(self, group: Path, share: Share) -> None:
        assert self._groups is not None
        with contextlib.suppress(OSError, ValueError):  # the limit that was there goes on
            self._groups.limit(group, _with_slack(share.memory_bytes))

    def _put(self, group: Path, pid: int) -> None:
        assert self._groups is not None
        with contextlib.suppress(OSError):  # the group is gone: its job is ending
            self._groups.add(group, (pid,))

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


def _with_slack(share_bytes: int) -> int:
    """Return what a group may have: the limit in the process, which only refuses, comes first."""
    return share_bytes + max(SLACK_BYTES, int(SLACK * share_bytes))
