"""A host's launcher with real processes, for the tests of what it does and of what may go wrong with it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from support import wait_until

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.jobrecords import Exited, Launched
from cotenant.actors.launcher import Launcher
from cotenant.placement.types import Share

CORES = sorted(os.sched_getaffinity(0))
GPU = GpuInfo("gpu-0", "cpu-core", 0, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[0],))
OTHER = GpuInfo("gpu-1", "cpu-core", 1, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[-1],))
SHARE = Share("gpu-0", 1 << 30, 0.5)
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
ENV = {"PATH": os.environ["PATH"]}


def ignores_term(pid: int) -> bool:
    """Whether the process has come to the line that makes it ignore SIGTERM; before it, SIGTERM would end it."""
    mask = re.search(r"^SigIgn:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert mask is not None
    return bool(int(mask[1], 16) >> (signal.SIGTERM - 1) & 1)


class Host:
    """A launcher with its directory, and what the tests ask of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launcher = Launcher(path, (GPU, OTHER))

    def restart(self) -> list[Launched]:
        """The host agent was killed; a new one starts."""
        self.launcher = Launcher(self.path, (GPU, OTHER))
        return self.launcher.running()

    def launch(self, *command: str, job_id: str = "job", epoch: int = 1, **more) -> Launched:
        options = {
            "revision": 0,
            "kind": "command",
            "cwd": "/",
            "env": ENV,
            "shares": [SHARE],
            "grace_s": 0.3,
            "command": command,
        }
        return self.launcher.launch(job_id=job_id, epoch=epoch, **(options | more))

    def python(self, code: str, *args: str, **more) -> Launched:
        return self.launch(sys.executable, "-S", "-c", code, *args, **more)

    def exited(self, job_id: str = "job", timeout_s: float = 10.0) -> Exited:
        found: list[Exited] = []

        def look() -> bool:
            found[:] = [exited for exited in self.launcher.poll() if exited.job_id == job_id]
            return bool(found)

        wait_until(look, timeout_s, f"{job_id} has ended")
        return found[0]

    def output(self, job_id: str = "job", epoch: int = 1) -> str:
        return self.launcher.read_output(job_id, epoch, 0, 1 << 30)[0].decode()

    def processes(self, *, supervisors: bool = False) -> list[int]:
        """Every process of any job of this host; supervisors may take another moment to end after their job."""
        mark = f"COTENANT_JOB_DIR={self.path}/".encode()
        found = []
        for process in runner.process_table():
            try:
                content = Path(f"/proc/{process.pid}/environ").read_bytes()
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            wanted = mark in content or (supervisors and str(self.path).encode() in command)
            if wanted and process.state not in "ZX":
                found.append(process.pid)
        return found
