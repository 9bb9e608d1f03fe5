"""A host without a scheduler: one GPU, the product's launcher and enforcement, and jobs that say how fast they are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import EnforcementBackend
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.launcher import Launcher
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share

PROGRAM = Path(__file__).parent / "program.py"
STARTED_S = 120.0
_POLL_S = 0.02
FOREVER_S = 1e6


class Failed(RuntimeError):
    """A job did not do what was waited for; says what and what it wrote."""


class Host:
    """One GPU and its jobs.

    Args:
        folder: The run directory.
        gpu: The GPU.
        mps: Whether jobs run under MPS.
        env: What every job has in its environment.
    """

    def __init__(self, folder: Path, gpu: GpuInfo, *, mps: bool, env: Mapping[str, str]) -> None:
        self.gpu = gpu
        self._env = dict(env)
        self.enforcement: EnforcementBackend = HostEnforcement(
            folder, (gpu,), EnforcementSettings(mps="auto" if mps else "off")
        )
        self.launcher = Launcher(folder, (gpu,), self.enforcement, first_validity_s=FOREVER_S)
        self._revisions: dict[str, int] = {}

    def start(self, job_id: str, share: float, memory_bytes: int, *arguments: str) -> Job:
        """Start the program under a share."""
        launched = self.launcher.launch(
            job_id=job_id,
            epoch=1,
            revision=0,
            kind="command",
            command=[sys.executable, str(PROGRAM), *arguments],
            cwd="/",
            env={**os.environ, **self._env},
            shares=[Share(self.gpu.gpu_id, memory_bytes, share)],
            grace_s=1.0,
        )
        return Job(self, job_id, memory_bytes, launched.root_pid or 0, launched.job_dir)

    def close(self) -> None:
        """End every job and give back what was started for them."""
        for launched in self.launcher.running():
            self.launcher.stop(launched.job_id, launched.epoch, 0.0, "the measurement is over")
        deadline = time.monotonic() + 30.0
        while self.launcher.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.launcher.close()


class Job:
    """A job of the host."""

    def __init__(self, host: Host, job_id: str, memory_bytes: int, root_pid: int, folder: Path) -> None:
        self.root_pid = root_pid
        self.folder = folder
        self._host = host
        self._job_id = job_id
        self._memory_bytes = memory_bytes
        self._revision = 0

    def steps(self) -> int:
        """How many steps it has made."""
        report = self._host.launcher.report(self._job_id)
        return 0 if report is None else report.steps or 0

    def rate(self, seconds: float) -> float:
        """Steps per second, over the next ``seconds``."""
        began, before = time.monotonic(), self.steps()
        time.sleep(seconds)
        return (self.steps() - before) / (time.monotonic() - began)

    def await_step(self, beyond: int, timeout_s: float = STARTED_S) -> float:
        """Wait until it has made more steps than this; returns the seconds that took.

        Raises:
            Failed: It has not, in time.
        """
        began = time.monotonic()
        while self.steps() <= beyond:
            if time.monotonic() - began > timeout_s:
                raise Failed(f"job {self._job_id} does not step: {self.output()!r}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def resize(self, share: float) -> None:
        """Give it another share."""
        self._revision += 1
        shares = [Share(self._host.gpu.gpu_id, self._memory_bytes, share)]
        self._host.launcher.resize(self._job_id, 1, self._revision, shares)

    def output(self) -> str:
        """What it wrote."""
        return self._host.launcher.read_output(self._job_id, 1, 0, 1 << 16)[0].decode(errors="replace")

    def device_pids(self) -> list[int]:
        """Its processes that report, which are those on the GPU."""
        return [int(path.name.removeprefix("report-")) for path in self.folder.glob("report-*")]

    def end(self) -> str:
        """End it, or wait for its own end; returns its output."""
        self._host.launcher.stop(self._job_id, 1, 1.0, "measured")
        return self.wait()

    def wait(self, timeout_s: float = STARTED_S) -> str:
        """Wait for its end and return its output."""
        deadline = time.monotonic() + timeout_s
        while not any(exited.job_id == self._job_id for exited in self._host.launcher.poll()):
            if time.monotonic() > deadline:
                raise Failed(f"job {self._job_id} does not end: {self.output()!r}")
            time.sleep(_POLL_S)
        output = self.output()
        self._host.launcher.release(self._job_id, 1)
        return output
