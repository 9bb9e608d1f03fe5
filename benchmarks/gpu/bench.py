"""What the cases of the suite are given."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.dry import Dry
from benchmarks.gpu.host import Host
from benchmarks.gpu.shell import Shell

from cotenant.actors.devices.base import DeviceBackend, GpuInfo
from cotenant.actors.enforcement.choice import GpuTraits, Method, choose_pause
from cotenant.actors.enforcement.host import kind_of
from cotenant.actors.enforcement.mpscontrol import CONTROL
from cotenant.actors.enforcement.pausing import CheckpointPause
from cotenant.configs.settings import EnforcementSettings, LeaseSettings, ProfilerSettings, ResizeSettings, Settings

WINDOW_S, DRY_WINDOW_S = 10.0, 0.2


@dataclass(frozen=True, slots=True)
class Bench:
    """What the cases need.

    Attributes:
        folder: For run directories.
        backend: The device backend of this host.
        gpu: The first GPU.
        env: The jobs' environment.
        dry: The stand-in's hardware; None on a GPU.
        skipped: What a case could not measure here, and why.
    """

    folder: Path
    backend: DeviceBackend
    gpu: GpuInfo
    env: dict[str, str]
    dry: Dry | None
    skipped: list[str] = field(default_factory=list)

    @property
    def window_s(self) -> float:
        """How long step rates are measured."""
        return WINDOW_S if self.dry is None else DRY_WINDOW_S

    @property
    def methods(self) -> list[Method]:
        """The ways in which jobs can be held on the GPU, the one without a server first."""
        if kind_of(self.gpu) == "mig":
            return ["mig"]
        return ["timeslice", "mps"] if shutil.which(CONTROL) else ["timeslice"]

    @property
    def sharing(self) -> dict[str, str]:
        """The hints that jobs need to be put onto one GPU together."""
        return {"isolation": "none"} if kind_of(self.gpu) == "mig" else {}

    @property
    def no_checkpoints(self) -> str:
        """Why the driver cannot checkpoint jobs that are held without a server; empty when it can."""
        traits = GpuTraits(self.gpu.gpu_id, kind_of(self.gpu), checkpoint_missing=CheckpointPause().missing())
        name, why = choose_pause([traits], self.methods[0])
        return "" if name == "checkpoint" else why

    @contextmanager
    def host(self, method: Method) -> Iterator[Host]:
        """A host whose jobs are held in that way."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            host = Host(Path(folder), self.gpu, mps=method == "mps", env=self.env)
            try:
                yield host
            finally:
                host.close()

    @contextmanager
    def shell(self, gpus: Sequence[GpuInfo] = ()) -> Iterator[Shell]:
        """A whole cotenant on these GPUs (by default one), without MPS; windows are short in a dry run."""
        settings = Settings(enforcement=EnforcementSettings(mps="off"), lease=LeaseSettings(stop_grace_s=1.0))
        if self.dry is not None:
            quick = {
                "profiler": ProfilerSettings(sample_hz=20.0, window_s=0.2),
                "resize": ResizeSettings(patience_s=0.4),
            }
            settings = settings.model_copy(update=quick)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            gpus = gpus or (self.gpu,)
            shell = Shell(Path(folder), self.backend, gpus, settings=settings, env=self.env, dry=self.dry)
            try:
                yield shell
            finally:
                shell.close()
