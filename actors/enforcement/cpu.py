"""Enforcement on the ``cpu`` device: affinity, duty cycle at step boundaries, memory limit, all by the in-job shim."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import StaleCommand
from cotenant.actors.reports import JobReport, RecentSteps
from cotenant.actors.shim.reportfile import CLASSES, Controls, MixReport, ProcessReport, is_alive, read_reports
from cotenant.actors.shim.shareword import ShareRecord, ShareWriter, create, read_all
from cotenant.forecasting.types import OperatorMix
from cotenant.placement.types import Share

SHARE = "share"
FRAMEWORK = "torch"  # nothing else makes a process report
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
NOTHING_SEEN = "no PyTorch optimizer seen: compute is limited by the device's cores at most, and memory is not limited"
EVERYTHING_HELD = "compute and memory held to the share"
NO_STEP = (
    "no optimizer step seen: compute is limited only by the device's cores, not by the share; memory is not limited"
)


class CpuEnforcement:
    """See ``EnforcementBackend``."""

    name = "cpu"

    def __init__(self, host_cores: Sequence[int] | None = None) -> None:
        self._host_cores = sorted(os.sched_getaffinity(0) if host_cores is None else host_cores)

    def environment(self, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """See ``EnforcementBackend.environment``."""
        threads = str(min(len(gpu.cores) for gpu in gpus))
        values = {name: env.get(name, threads) for name in _THREADS}
        for gpu in gpus:
            for name, value in gpu.visible_env.items():
                values[name] = f"{values[name]},{value}" if values.get(name) else value
        return values | {
            "COTENANT_DEVICE": "cpu",
            "COTENANT_CORES": ";".join(",".join(map(str, gpu.cores)) for gpu in gpus),
            "COTENANT_HOST_CORES": ",".join(map(str, self._host_cores)),
            "COTENANT_SHARE_INDEX": "0",
        }

    def apply(self, job_dir: Path, shares: Sequence[Share], epoch: int, revision: int) -> None:
        """See ``EnforcementBackend.apply``."""
        path = str(job_dir / SHARE)
        records = [ShareRecord(epoch, revision, share.compute, share.memory_bytes) for share in shares]
        if not (job_dir / SHARE).exists():
            create(path, records).close()
            return
        if (epoch, revision) <= self.in_force(job_dir):
            raise StaleCommand(f"{job_dir.name}: {(epoch, revision)} is not newer than {self.in_force(job_dir)}")
        writer = ShareWriter(path)
        try:
            if writer.count != len(records):
                raise ValueError(f"shares: {len(records)} of them is not accepted; the lease has {writer.count}")
            for index, record in enumerate(records):
                writer.write(index, record)
        finally:
            writer.close()

    def in_force(self, job_dir: Path) -> tuple[int, int]:
        """See ``EnforcementBackend.in_force``."""
        return min((share.epoch, share.revision) for share in read_all(str(job_dir / SHARE)))

    def shares(self, job_dir: Path, gpu_ids: Sequence[str]) -> list[Share]:
        """See ``EnforcementBackend.shares``."""
        records = read_all(str(job_dir / SHARE))
        return [Share(g, r.memory_bytes, r.compute) for g, r in zip(gpu_ids, records, strict=True)]

    def report(self, job_dir: Path, monotonic_s: float) -> JobReport:
        """See ``EnforcementBackend.report``.

        The steps of a job are those of its first share (the ranks of a data-parallel job step together); processes that
        use the same share add up, whether at the same time or one after the other.
        """
        reports = read_reports(str(job_dir))
        stepping = [report for report in reports if report.steps > 0]
        alive = [report for report in reports if is_alive(report)]
        if not reports:
            return JobReport(None, None, None, NOTHING_SEEN, 0)
        if not stepping:
            return JobReport(None, None, None, NO_STEP, len(alive), framework=FRAMEWORK)
        first = min(report.share_index for report in stepping)
        held = dict.fromkeys((report.share_index for report in stepping), 0.0)
        for report in stepping:
            held[report.share_index] += report.throttled_s
        counted = [report for report in stepping if report.share_index == first]
        latest = max(counted, key=lambda report: (report.mix is not None, report.last_step_s))
        return JobReport(
            steps=sum(report.steps for report in counted),
            throttled_s=max(held.values()),
            last_step_age_s=max(0.0, monotonic_s - max(report.last_step_s for report in stepping)),
            controls=_words([report for report in stepping if report in alive] or stepping),
            processes=len(alive),
            recent=tuple(RecentSteps(report.pid, report.steps, report.step_times_s) for report in counted),
            mix=None if latest.mix is None else _mix(latest.mix),
            batch_size=None if latest.mix is None else latest.mix.batch_size or None,
            framework=FRAMEWORK,
        )

    def guarantees(self, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        return report.controls


def _mix(mix: MixReport) -> OperatorMix:
    fractions = dict(zip(CLASSES, mix.fractions, strict=True))
    return OperatorMix(**fractions, launches_per_step=mix.launches_per_step, step=mix.step)


def _words(stepping: Sequence[ProcessReport]) -> str:
    """What holds in all of the training processes, weakest first."""
    common = Controls(~0)
    for report in stepping:
        common &= Controls(report.controls)
    if len(stepping) == 1 and Controls.PINNED in common and Controls.MEMORY in common:
        return EVERYTHING_HELD  # the usual case: nothing to read about
    parts = ["compute is held to the share at optimizer steps, on the device's cores"]
    if not common & Controls.PINNED:
        parts = ["compute is held to the share at optimizer steps, but not to the device's cores"]
    parts.append(
        "allocations beyond the memory share fail in the job"
        if common & Controls.MEMORY
        else "memory is not limited (the kernel did not accept the limit)"
    )
    if len(stepping) > 1:
        parts.append(f"{len(stepping)} processes train, those on the same share divide it evenly")
    return "; ".join(parts)
