"""The driver's checkpoints for tests without a GPU: ``nvml_standin/driver.py`` where programs find ``cuda.core``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nvml_standin.driver
import pytest
from nvml_standin import HERE, Standin

# A job's program: holds 1 GiB of its first GPU, and counts.
COUNT = """
import os, time
from cuda.core import checkpoint as gpu
gpu.allocate(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0], 1 << 30)
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.02)
"""


class FakeDriver:
    """What programs that are started from now on, and checkpoints, find as the driver of a stand-in's GPUs.

    Args:
        folder: Where it is kept.
        standin: The stand-in for NVML.
        monkeypatch: Has the environment of the test changed.
    """

    def __init__(self, folder: Path, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
        self._standin = standin
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        package = folder / "site" / "cuda" / "core"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        shutil.copy(HERE / "driver.py", package / "checkpoint.py")
        monkeypatch.setenv("DRIVER_NOTES", str(self.notes))
        for name, value in standin.environment.items():
            monkeypatch.setenv(name, value)
        path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.syspath_prepend(str(folder / "site"))

    def say(self, *faults: str) -> None:
        """Have these calls (and no others) fail or hang: ``fails-checkpoint``, ``hangs-lock``, ``keeps`` …"""
        for note in [*self.notes.glob("fails-*"), *self.notes.glob("hangs-*"), *self.notes.glob("keeps")]:
            note.unlink()
        for fault in faults:
            (self.notes / fault).touch()

    @property
    def calls(self) -> list[str]:
        """What was asked of it, in order."""
        file = self.notes / "calls"
        return file.read_text().split() if file.exists() else []

    def on(self, gpu: int) -> set[int]:
        """The processes that hold memory of a GPU."""
        lines = self._standin.state.read_text().splitlines()
        return {int(line.split("pid=")[1].split()[0]) for line in lines if line.startswith(f"process {gpu} ")}

    def sweep(self) -> None:
        """Take processes that have ended off the GPUs: a driver would see by itself that they have."""
        nvml_standin.driver.sweep()
