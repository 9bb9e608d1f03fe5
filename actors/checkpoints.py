"""Where jobs that continue from their own checkpoint keep it: one directory a job, which outlives its runs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cotenant.actors import runner
from cotenant.actors.launchspec import Launch, LaunchError
from cotenant.configs.settings import CheckpointSettings

CHECKPOINTS = "checkpoints"
KEPT_S = 7 * 86400.0
_DIRECTORY, _CONTINUES = "COTENANT_CHECKPOINT_DIR", "COTENANT_CONTINUES"  # as in cotenant.checkpointing
_STOP_FILE = "COTENANT_STOP_FILE"
_TORCHRUN_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds that torchrun gives its ranks after SIGTERM, 30 by itself


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The directories of jobs.

    Attributes:
        directory: Where they are.
        shared: Other hosts use it as well, and what is old in it is somebody else's business.
    """

    directory: Path
    shared: bool = False

    @classmethod
    def of(cls, settings: CheckpointSettings, run_dir: Path) -> Checkpoints:
        """Return those that the settings ask for; without a directory in them, they are in the host's run directory."""
        if settings.directory is None:
            return cls(run_dir.absolute() / CHECKPOINTS)
        return cls(Path(settings.directory), shared=True)

    def environment(self, job_id: str, epoch: int, grace_s: float) -> dict[str, str]:
        """Make the job's directory if need be; returns the variables by which the job finds it and has time to save.

        Raises:
            LaunchError: It cannot be made; another host may be able to.
        """
        mine = self.directory / job_id
        try:
            mine.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise LaunchError(f"checkpoints.directory: cannot make {mine}: {error}", exit_code=1, retry=True) from error
        return {
            _DIRECTORY: str(mine),
            _CONTINUES: "1" if epoch > 1 else "0",
            _TORCHRUN_GRACE: str(math.ceil(grace_s)),
        }

    def sweep(self, now: float, running: Collection[str]) -> None:
        """Remove what jobs that are not here any more have not touched for ``KEPT_S``; ``now`` in Unix seconds."""
        if self.shared or not self.directory.is_dir():
            return
        for mine in list(self.directory.iterdir()):
            with suppress(OSError):  # whatever a job has left there, it stays until it can be looked at
                if mine.name not in running and _touched(mine) < now - KEPT_S:
                    shutil.rmtree(mine, ignore_errors=True)


def lease_variables(launch: Launch, job_dir: Path) -> dict[str, str]:
    """Return the variables by which processes under a lease save, and find out when they are to; none if they do not.

    Args:
        launch: What was launched, with what ``Checkpoints.environment`` had said.
        job_dir: Its directory.
    """
    said = {name: launch["env"][name] for name in (_DIRECTORY, _CONTINUES) if name in launch["env"]}
    return said and said | {_STOP_FILE: str(job_dir / runner.STOP)}


def _touched(folder: Path) -> float:
    """Return when something in it was last changed. Links count as themselves, what cannot be looked at does not."""
    newest = folder.lstat().st_mtime
    for each in folder.rglob("*"):
        with suppress(OSError):
            newest = max(newest, each.lstat().st_mtime)
    return newest
