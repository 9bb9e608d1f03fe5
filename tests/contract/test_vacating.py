"""A killed job's device memory is seen to be free, on the stand-in, before its end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from nvml_standin import Standin
from support import wait_until

from cotenant.actors.devices.base import JobSample, Sample
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.vacating import Vacating
from cotenant.configs.settings import DeviceSettings

GIB = 1 << 30
DRIVERS_OWN = GIB // 2
TREE = "sleep 100 & echo $!; wait"


@pytest.fixture
def backend(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlBackend]:
    monkeypatch.setattr("cotenant.actors.devices.nvml.backend.TREES_S", 0.05)
    backend = NvmlBackend(DeviceSettings(), library=library)
    yield backend
    backend.close()


@pytest.fixture
def job() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a child, and the child's number."""
    with subprocess.Popen(["sh", "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill it with its child."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def show(standin: Standin, used: int, *processes: tuple[int, int]) -> None:
    """Have the GPU say how much is in use, and by whom."""
    lines = (f"process 0 pid={pid} memory={memory}" for pid, memory in processes)
    standin.set(f"gpu 0 total={16 * GIB} used={DRIVERS_OWN + used}", *lines)


def test_memory_that_the_child_of_a_killed_job_held_is_waited_for(
    standin: Standin, backend: NvmlBackend, job: tuple[subprocess.Popen[str], int]
) -> None:
    process, child = job
    (gpu,) = backend.discover()
    show(standin, 5 * GIB, (process.pid, GIB), (child, 4 * GIB))
    vacating = Vacating()
    backend.watch("job", [gpu.gpu_id], process.pid)

    def until(holds: Callable[[Sample, JobSample], bool], what: str) -> None:
        def reached() -> bool:
            time.sleep(0.05)
            sample = backend.sample()
            vacating.see(sample)
            return holds(sample, sample.jobs[0])

        wait_until(reached, 20, what)

    until(lambda _, job: job.memory_bytes == 5 * GIB, "the memory of both processes")
    end(process)
    show(standin, 4 * GIB, (child, 4 * GIB))  # the driver has not given all of it back yet
    until(lambda _, job: job.memory_bytes is None, "its end")
    until(lambda sample, _: sample.devices[0].memory_bytes == DRIVERS_OWN + 4 * GIB, "what the dead child held")
    assert vacating.wait("job", 1, [gpu.gpu_id], 0.0) is None
    show(standin, 0)
    until(lambda sample, _: sample.devices[0].memory_bytes == DRIVERS_OWN, "all of it to be free")
    assert vacating.wait("job", 1, [gpu.gpu_id], 1.0) == ""
