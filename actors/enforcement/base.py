"""The interface every enforcement backend implements: how a job is held to its shares on one kind of device.

A backend says what a process needs in its environment, puts shares in force and says in words what holds. Its state is
in the job directory, so a restarted host agent goes on where the last one stopped. Thread safety: the caller (the
launcher) makes sure that only one thread at a time touches a job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.pausing import Pause
from cotenant.actors.reports import JobReport
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Bounds, Isolation

# For processes that are to be taken off a device before they are killed. They must be gone before the scheduler starts
# the job elsewhere, 2 s after its lease has expired.
DETACH_S = 1.0


class StaleCommand(Exception):
    """The command's fencing token is not newer than what is in force; nothing was changed."""


class ServiceDown(OSError):
    """What serves the GPU is not there: no fault of the job that needs it.

    Attributes:
        wait_s: Seconds after which it may be there.
    """

    def __init__(self, reason: str, wait_s: float) -> None:
        self.wait_s = wait_s
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most of one GPU that a job's processes can ever get, whatever share they are granted: set when they start.

    Attributes:
        gpu_id: The GPU.
        memory_bytes: None = no ceiling.
        compute: Fraction of the GPU in (0, 1]; None = no ceiling.
    """

    gpu_id: str
    memory_bytes: int | None = None
    compute: float | None = None


def bounds_of(ceilings: Iterable[Ceiling]) -> Bounds:
    """Return what a job cannot exceed on any of its GPUs."""
    found = list(ceilings)
    memory = [ceiling.memory_bytes for ceiling in found if ceiling.memory_bytes is not None]
    compute = [ceiling.compute for ceiling in found if ceiling.compute is not None]
    return Bounds(min(memory, default=None), min(compute, default=None))


class EnforcementBackend(Protocol):
    """A way to hold jobs to their shares."""

    name: str

    def admit(self, job_dir: Path, gpus: Sequence[GpuInfo], shares: Sequence[Share], isolation: Isolation) -> None:
        """Decide how a new job is held and make that ready; before anything else is asked about the job.

        Args:
            job_dir: Its directory, empty.
            gpus: The GPUs of its shares on this host; position = share index.
            shares: Its shares.
            isolation: What its hints ask for.

        Raises:
            OSError: It cannot be made ready now; another try may help.
        """
        ...

    def check(self, job_dir: Path) -> None:
        """Make sure that what was decided for a job can still be read: nothing else is asked of one that cannot.

        Raises:
            OSError, ValueError: It cannot.
        """
        ...

    def environment(self, job_dir: Path, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that put a process under a job's shares.

        Args:
            job_dir: The job's directory.
            gpus: The GPUs of the job's shares on this host; position = share index.
            env: What the process has already. Settings of the user's own (thread counts) are left alone.
        """
        ...

    def apply(self, job_dir: Path, shares: Sequence[Share], epoch: int, revision: int) -> None:
        """Put shares in force, for running processes at once. Creates what is needed in a new job directory.

        Raises:
            StaleCommand: ``(epoch, revision)`` is not newer than what is in force.
            ValueError: Another number of shares than before, or a value that is not accepted.
        """
        ...

    def ceilings(self, job_dir: Path) -> tuple[Ceiling, ...]:
        """Return what the job's running processes cannot exceed; empty where every share can grow."""
        ...

    def in_force(self, job_dir: Path) -> tuple[int, int]:
        """Return the (epoch, revision) in force.

        Raises:
            OSError: The job directory holds none.
            ValueError: What it holds cannot be read.
        """
        ...

    def shares(self, job_dir: Path, gpu_ids: Sequence[str]) -> list[Share]:
        """Return the shares in force; ``gpu_ids`` names their GPUs, position = share index.

        Raises:
            OSError: The job directory holds none.
            ValueError: What it holds cannot be read, or is another number of shares.
        """
        ...

    def report(self, job_dir: Path, monotonic_s: float) -> JobReport:
        """Return what the job's processes report; ``monotonic_s`` is now."""
        ...

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """Say what is guaranteed for a lease whose processes report this, and what is not."""
        ...

    def lost(self, job_dir: Path) -> str:
        """Say why the job's processes cannot go on through no fault of theirs; empty when they can."""
        ...

    def detach(self, job_dir: Path, pids: Collection[int]) -> Future[Any] | None:
        """Begin to take processes that are about to be killed off the device in good order, where that matters.

        Returns:
            Is done when they can be killed, or when it did not work; None = they can be killed now. Nobody needs to
            wait for longer than ``DETACH_S``.
        """
        ...

    def pause(self, job_dir: Path) -> Pause:
        """Return the best way to hold the job's processes still."""
        ...

    def unfreezable(self, job_dir: Path) -> str:
        """Say why the job's processes cannot be frozen, their device memory in the host's; empty when they can."""
        ...

    def move(self, job_dir: Path, gpu_ids: Sequence[str]) -> None:
        """Its frozen processes are about to go on on these GPUs; position = share index.

        Raises:
            OSError: That cannot be written down.
        """
        ...

    def tend(self, job_dirs: Sequence[Path]) -> None:
        """Do what has to be done from time to time; ``job_dirs`` are the jobs that run. May take a second."""
        ...

    def close(self, running: Sequence[Path] = ()) -> tuple[str, ...]:
        """Give back what the host lent: called when no job will come. Idempotent.

        Args:
            running: The directories of jobs that have not ended: what they run under stays.

        Returns:
            What stays, for people.
        """
        ...


class JobEnforcement(EnforcementBackend, Protocol):
    """What the launcher needs: all ways of a host, one of which is chosen for each job."""

    def admit(
        self,
        job_dir: Path,
        gpus: Sequence[GpuInfo],
        shares: Sequence[Share],
        isolation: Isolation,
        *,
        freezes: bool = False,
    ) -> None:
        """See ``EnforcementBackend.admit``.

        Args:
            job_dir: Its directory, empty.
            gpus: The GPUs of its shares on this host; position = share index.
            shares: Its shares.
            isolation: What its hints ask for.
            freezes: They ask for processes that can be frozen, which decides the way it is held.

        Raises:
            OSError: It cannot be made ready now; another try may help.
        """
        ...
