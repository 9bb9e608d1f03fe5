"""A launcher over two NVIDIA GPUs, as far as it goes without one: real processes, a stand-in for MPS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fake_mps import FakeMps
from launching import ENV
from support import wait_until

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.jobrecords import Exited, Launched
from cotenant.actors.launcher import Launcher
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share

MIB = 1 << 20
GPUS = tuple(GpuInfo(f"GPU-{n}", "H100", i, 80 << 30, {"CUDA_VISIBLE_DEVICES": f"GPU-{n}"}) for i, n in enumerate("ab"))
SLEEP = "import time; time.sleep(60)"


class GpuHost:
    """A launcher over GPUs, with the program that its jobs find as MPS."""

    def __init__(self, path: Path, fake: FakeMps, **settings: str) -> None:
        self.path = path / "run"
        self.fake = fake
        self.settings = EnforcementSettings(**settings)
        self.restart()

    def restart(self) -> None:
        self.launcher = Launcher(self.path, GPUS, HostEnforcement(self.path, GPUS, self.settings))

    def launch(self, job_id: str, code: str = SLEEP, *, memory_mib: int = 600, gpu: str = "GPU-a", **more) -> Launched:
        options = {"epoch": 1, "revision": 0, "kind": "command", "cwd": "/", "grace_s": 0.3}
        options |= {"env": {**ENV, "PATH": os.environ["PATH"]}, "shares": [Share(gpu, memory_mib * MIB, 0.3)]}
        return self.launcher.launch(job_id=job_id, command=[sys.executable, "-S", "-c", code], **(options | more))

    def command_pid(self, launched: Launched) -> int:
        found: list[int] = []

        def look() -> bool:
            found[:] = [entry.pid for entry in runner.descendants(launched.root_pid)]
            return bool(found)

        wait_until(look, 10, "its command runs")
        return found[0]

    def environ(self, pid: int) -> dict[str, str]:
        def read() -> dict[str, str]:
            content = Path(f"/proc/{pid}/environ").read_bytes().decode()
            return dict(entry.split("=", 1) for entry in content.split("\0") if entry)

        wait_until(lambda: "COTENANT_JOB_ID" in read(), 10, "the command has replaced what started it")
        return read()

    def exited(self, job_id: str) -> Exited:
        found: list[Exited] = []

        def look() -> bool:
            found[:] = [exited for exited in self.launcher.poll() if exited.job_id == job_id]
            return bool(found)

        wait_until(look, 10, f"{job_id} has ended")
        return found[0]

    def end(self) -> None:
        for launched in self.launcher.running():
            self.launcher.stop(launched.job_id, launched.epoch, 0.0, "the test is over")

        def ended() -> bool:
            self.launcher.poll()
            return not self.launcher.running()

        wait_until(ended, 10, "no job is left")
        assert self.launcher.close() == ()
