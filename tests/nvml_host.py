"""The ``nvml`` backend on the stand-in for NVML, for its tests: hardware, processes, time, and single readings."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from nvml_standin import Standin
from support import wait_until

from cotenant.actors.devices.base import DeviceSample, JobSample, Sample
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.configs.settings import DeviceSettings

WAIT_S = 20.0
GIB = 1 << 30
FOUR = tuple(f"gpu {index} uuid=GPU-{index} total={16 * GIB} used={index * GIB}" for index in range(4))


class Clock:
    """Time that passes as the test says: how fast the machine is decides nothing."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


class NvmlHost:
    """A backend on the stand-in, with two processes that sleep."""

    def __init__(self, standin: Standin, library: Library, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.standin = standin
        self.pids = [process.pid for process in processes]
        self._library = library
        self._backends: list[NvmlBackend] = []

    def start(
        self,
        *lines: str,
        visible: str | None = None,
        counted: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: int,
    ) -> NvmlBackend:
        """Make the backend of a host with this hardware; ``PID0`` and ``PID1`` are the processes."""
        self.show(*lines)
        made = NvmlBackend(DeviceSettings(**settings), counted, library=self._library, visible=visible, clock=clock)
        self._backends.append(made)
        return made

    def show(self, *lines: str) -> None:
        named = [line.replace("PID0", str(self.pids[0])).replace("PID1", str(self.pids[1])) for line in lines]
        self.standin.set(*named)

    def close(self) -> None:
        self.standin.set("gpu 0")  # whatever hangs comes back
        for backend in self._backends:
            backend.close()


def until(backend: NvmlBackend, holds: Callable[[Sample], bool], what: str, clock: Clock | None = None) -> Sample:
    """Sample at 20 Hz until this holds; a clock goes on by as much."""
    samples: list[Sample] = []

    def reached() -> bool:
        time.sleep(0.05)
        if clock is not None:
            clock.now_s += 0.05
        samples.append(backend.sample())
        return holds(samples[-1])

    wait_until(reached, WAIT_S, what)
    return samples[-1]


def device(sample: Sample, gpu_id: str) -> DeviceSample:
    (found,) = [each for each in sample.devices if each.gpu_id == gpu_id]
    return found


def job(sample: Sample, job_id: str) -> JobSample:
    (found,) = [each for each in sample.jobs if each.job_id == job_id]
    return found


def all_read(sample: Sample) -> bool:
    return all(each.memory_bytes is not None for each in sample.devices)
