"""What all enforcement backends have in common: the share word in the job directory, and the reports beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import Ceiling, StaleCommand
from cotenant.actors.enforcement.choice import NO_FREEZE
from cotenant.actors.enforcement.pausing import Pause, SignalPause
from cotenant.actors.reports import JobReport, RecentSteps
from cotenant.actors.shim.reportfile import CLASSES, Controls, MixReport, ProcessReport, is_alive, read_reports
from cotenant.actors.shim.shareword import ShareRecord, ShareWriter, create, read_all
from cotenant.forecasting.types import OperatorMix
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Isolation

SHARE = "share"
FRAMEWORK = "torch"  # nothing else makes a process report


class ShareFile:
    """The part of ``EnforcementBackend`` that is the same everywhere; the rest has answers that suit most devices.

    Attributes:
        nothing_seen: What holds while no process has reported.
        no_step: What holds while none has stepped.
    """

    nothing_seen = "no PyTorch optimizer seen"
    no_step = "no optimizer step seen"

    def admit(self, job_dir: Path, gpus: Sequence[GpuInfo], shares: Sequence[Share], isolation: Isolation) -> None:
        """See ``EnforcementBackend.admit``: nothing has to be made ready."""

    def check(self, job_dir: Path) -> None:
        """See ``EnforcementBackend.check``: nothing but the shares is written down, which are read in any case."""

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

    def ceilings(self, job_dir: Path) -> tuple[Ceiling, ...]:
        """See ``EnforcementBackend.ceilings``."""
        return ()

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
            return JobReport(None, None, None, self.nothing_seen, 0)
        if not stepping:
            return JobReport(None, None, None, self.no_step, len(alive), framework=FRAMEWORK)
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
            controls=self._words([report for report in stepping if report in alive] or stepping),
            processes=len(alive),
            recent=tuple(RecentSteps(report.pid, report.steps, report.step_times_s) for report in counted),
            mix=None if latest.mix is None else _mix(latest.mix),
            batch_size=None if latest.mix is None else latest.mix.batch_size or None,
            framework=FRAMEWORK,
        )

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        return report.controls

    def lost(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.lost``."""
        return ""

    def detach(self, job_dir: Path, pids: Collection[int]) -> Future[Any] | None:
        """See ``EnforcementBackend.detach``."""
        return None

    def pause(self, job_dir: Path) -> Pause:
        """See ``EnforcementBackend.pause``."""
        return SignalPause()

    def unfreezable(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.unfreezable``."""
        return NO_FREEZE["cpu"]

    def move(self, job_dir: Path, gpu_ids: Sequence[str]) -> None:
        """See ``EnforcementBackend.move``: nothing here depends on the GPU."""

    def tend(self, job_dirs: Sequence[Path]) -> None:
        """See ``EnforcementBackend.tend``."""

    def close(self, running: Sequence[Path] = ()) -> tuple[str, ...]:
        """See ``EnforcementBackend.close``."""
        return ()

    def _words(self, stepping: Sequence[ProcessReport]) -> str:
        """Say what holds in all of the training processes, weakest first."""
        parts = self._held(common_controls(stepping), alone=len(stepping) == 1)
        if len(stepping) > 1:
            parts.append(f"{len(stepping)} processes train, those on the same share divide it evenly")
        return "; ".join(parts)

    def _held(self, controls: Controls, *, alone: bool) -> list[str]:
        """Say what these controls, in force in every training process, come to."""
        raise NotImplementedError


def common_controls(reports: Sequence[ProcessReport]) -> Controls:
    """Return what is in force in every one of these processes."""
    common = Controls(~0)
    for report in reports:
        common &= Controls(report.controls)
    return common


def visible(gpus: Sequence[GpuInfo]) -> dict[str, str]:
    """Return what makes a process see these GPUs and no other, in this order."""
    values: dict[str, str] = {}
    for gpu in gpus:
        for name, value in gpu.visible_env.items():
            values[name] = f"{values[name]},{value}" if values.get(name) else value
    return values


def own_settings(env: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return these variables with the values that the user has given them, where that is so."""
    return {name: env.get(name, value) for name, value in defaults.items()}


def _mix(mix: MixReport) -> OperatorMix:
    fractions = dict(zip(CLASSES, mix.fractions, strict=True))
    return OperatorMix(**fractions, launches_per_step=mix.launches_per_step, step=mix.step)
