"""The interface every device backend implements, and the contract its implementations share.

Thread safety: a backend is owned by one thread (the host agent's device loop). It must never block longer than a
few milliseconds; a device that does not answer gives missing readings (None), never zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotenant.forecasting.types import DeviceActivity, MemorySource, Reading, UtilSource
from cotenant.forecasting.versions import restorable

SILENT_LOST_S = 5.0  # a driver that has not answered for this long will not soon: its jobs are better off elsewhere


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU of this host.

    Attributes:
        gpu_id: Stable, unique in the cluster (for NVIDIA the UUID).
        gpu_type: Model name, the key of everything learnt per type.
        index: Position on this host.
        memory_bytes: Memory jobs may use.
        visible_env: Environment variables that make a process see just this GPU.
        cores: CPU cores the device consists of (``cpu`` backend), else empty.
        physical_memory_bytes: Memory the hardware has, the yardstick for absurd readings; None = ``memory_bytes``.
        island: Name of the group of this host's GPUs that are linked faster than the others; "" = there are none, or
            nobody knows.
    """

    gpu_id: str
    gpu_type: str
    index: int
    memory_bytes: int
    visible_env: Mapping[str, str]
    cores: tuple[int, ...] = ()
    physical_memory_bytes: int | None = None
    island: str = ""


@dataclass(frozen=True, slots=True)
class JobSample:
    """One reading of one job on one GPU.

    ``busy_s`` is a counter: seconds of device time the job has used since it was first seen (monotonic), from which
    utilisation over any interval follows: one second a second is the whole device, however many cores it has. ``util``
    is used instead by devices that only report a ratio. ``host_busy_s`` is a counter of CPU seconds used outside the
    device; a job on several GPUs has an equal part of it on each, so that the sum over its GPUs is the job's.

    ``read_bytes`` and ``write_bytes`` are counters of what the job read from and wrote to files, divided in the same
    way. They and ``host_busy_s`` may be read less often than the others: None in a sample in which they were not.

    ``util_age_s`` is the age of a ``util`` that a driver refreshes more slowly than it is asked, and ``util_source``
    says whose reading it is; both only go with ``util``. ``memory_source`` says it of ``memory_bytes``; None = of the
    job's processes.
    """

    job_id: str
    gpu_id: str
    busy_s: Reading
    util: Reading
    memory_bytes: Reading
    host_busy_s: Reading
    read_bytes: Reading = None
    write_bytes: Reading = None
    util_age_s: Reading = None
    util_source: UtilSource | None = None
    memory_source: MemorySource | None = None


@restorable
@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one GPU as a whole. ``lost`` = the device cannot be used and must be drained; ``note`` says why.

    ``activity`` is what else the device says, each value the mean since the sample before; its ``util`` is not used.
    """

    gpu_id: str
    util: Reading
    memory_bytes: Reading
    lost: bool = False
    note: str = ""
    activity: DeviceActivity | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything read in one pass of the device loop. ``monotonic_s`` is ``time.monotonic()`` at the reading."""

    monotonic_s: float
    devices: tuple[DeviceSample, ...]
    jobs: tuple[JobSample, ...]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Which of some processes hold memory of some devices.

    Attributes:
        memory: Bytes by process, over all these devices; None = the device does not say how many.
        certain: A process that is not named holds nothing. In a container its number may not be told from others'.
        read_s: When the devices were last asked (the one asked longest ago; monotonic clock).
        listed_s: When they last named their processes. They are asked for that less often while what is in use on them
            stays the same, so that this may be of before ``read_s``.
    """

    memory: Mapping[int, int | None]
    certain: bool
    read_s: float
    listed_s: float


class DeviceBackend(Protocol):
    """What the host agent needs of a device.

    ``notes``: what is worth knowing of the host's devices as a whole, such as GPUs that could not be used.
    """

    name: str
    notes: Sequence[str]

    def discover(self) -> Sequence[GpuInfo]:
        """Return this host's GPUs, in index order. Called before anything else.

        Later calls return the same, with those behind them that did not answer before. Costs nothing.
        """
        ...

    def watch(self, job_id: str, gpu_ids: Sequence[str], root_pid: int) -> None:
        """Attribute ``root_pid`` and all its descendants to the job from now on.

        A further call for a job that is already watched adds a root (and GPUs it did not have). A process that does
        not exist is no error: a job none of whose roots lives has no readings (None). A job on no GPU is in no
        sample.

        Raises:
            KeyError: A GPU id that ``discover`` did not return.
        """
        ...

    def unwatch(self, job_id: str) -> None:
        """Forget the job. Unknown ids are ignored."""
        ...

    def sample(self) -> Sample:
        """Read all devices and watched jobs once. Never raises for a missing process or a lost device."""
        ...

    def contexts(self, gpu_ids: Sequence[str], pids: Collection[int]) -> Contexts | None:
        """Return which of these processes hold memory of these devices, as of the last sample.

        Returns:
            None: it cannot be told, at the moment or by these devices at all.
        """
        ...

    def close(self) -> None:
        """Release what ``discover`` opened. Idempotent."""
        ...
