"""What every device backend promises (``cotenant.actors.devices.base``). Add a backend: write its harness, list it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from support import wait_until

from cotenant.actors.devices.base import DeviceBackend, JobSample
from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.devices.recording import Fault, Levels, RecordedGpu, RecordedSample, Recording
from cotenant.actors.devices.replay import ReplayBackend
from cotenant.configs.settings import DeviceSettings

BURN_S = 0.3
TOLERANCE_S = 0.03  # the interpreter's own start and end lie outside what the process measures


class Harness(Protocol):
    """Makes jobs that behave in known ways on one backend.

    ``counts``: the backend reports device time as a counter; else as a ratio.
    """

    backend: DeviceBackend
    counts: bool

    def busy(self) -> int:
        """Start a process that uses ``BURN_S`` of device time and then idles; returns its root process."""
        ...

    def idle(self) -> int:
        """Start a process that does nothing."""
        ...

    def wait_busy(self, pid: int) -> None:
        """Return when the busy process has used its time."""
        ...

    def vanish(self, pid: int) -> None:
        """End a process."""
        ...

    def close(self) -> None: ...


class CpuHarness:
    """Real processes, pinned to the first device."""

    counts = True

    def __init__(self) -> None:
        self.backend = CpuBackend(DeviceSettings(), "host-a", count=2)
        self._core = self.backend.discover()[0].cores[0]
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def _start(self, burn_s: float) -> int:
        program = (
            "import os, sys, time\n"
            f"os.sched_setaffinity(0, {{{self._core}}})\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            f"end = time.process_time() + {burn_s}\n"
            "while time.process_time() < end: pass\n"
            "print('done', flush=True); sys.stdin.readline()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self._processes[process.pid] = process
        return process.pid

    def busy(self) -> int:
        return self._start(BURN_S)

    def idle(self) -> int:
        return self._start(0.0)

    def wait_busy(self, pid: int) -> None:
        process = self._processes[pid]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    def vanish(self, pid: int) -> None:
        with self._processes.pop(pid) as process:
            process.kill()

    def close(self) -> None:
        for pid in list(self._processes):
            self.vanish(pid)
        self.backend.close()


class ReplayHarness:
    """A recording on a clock that the test moves. A process is the number in its job's id."""

    counts = True

    def __init__(self) -> None:
        levels = {"job-1": Levels(1.0, 1e9, 0.5), "job-2": Levels(0.0, 1e8, 0.0)}
        end = {"job-1": Levels(0.0, 1e9, 0.0), "job-2": Levels(0.0, 1e8, 0.0)}
        self.now = 0.0
        self.backend = ReplayBackend(
            Recording(
                gpus=(RecordedGpu("A", 8 << 30), RecordedGpu("A", 8 << 30)),
                samples=(RecordedSample(0.0, (), levels), RecordedSample(BURN_S, (), end)),
                faults=(Fault(100.0, "missing"),),
            ),
            "host-a",
            clock=lambda: self.now,
        )

    def busy(self) -> int:
        return 1

    def idle(self) -> int:
        return 2

    def wait_busy(self, pid: int) -> None:
        self.now += 0.5

    def vanish(self, pid: int) -> None:
        self.now = 100.0

    def close(self) -> None:
        self.backend.close()


class NvmlHarness:
    """Real processes, which the stand-in for NVML lists on the first of two GPUs as a test wants it."""

    counts = False

    def __init__(self, standin: Standin, library: Library) -> None:
        self._standin = standin
        self._sm: dict[int, int] = {}  # process → per cent
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._show()
        self.backend = NvmlBackend(DeviceSettings(), library=library)

    def _show(self) -> None:
        gpus = (f"gpu 0 uuid=GPU-a util={sum(self._sm.values())}", "gpu 1 uuid=GPU-b")
        self._standin.set(*gpus, *(f"process 0 pid={pid} sm={sm} memory=1000" for pid, sm in self._sm.items()))

    def _start(self, sm: int) -> int:
        process = subprocess.Popen(["sleep", "60"])
        self._processes[process.pid] = process
        self._sm[process.pid] = sm
        self._show()
        return process.pid

    def busy(self) -> int:
        return self._start(80)

    def idle(self) -> int:
        return self._start(0)

    def wait_busy(self, pid: int) -> None:
        self._sm[pid] = 0
        self._show()

    def vanish(self, pid: int) -> None:
        with self._processes.pop(pid) as process:
            process.kill()

    def close(self) -> None:
        for pid in list(self._processes):
            self.vanish(pid)
        self.backend.close()


@pytest.fixture(params=["cpu", "replay", "nvml"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with ExitStack() as stack:
        made: Harness
        if request.param == "nvml":
            standin = request.getfixturevalue("standin")
            standin.set("gpu 0")
            made = NvmlHarness(standin, stack.enter_context(loaded(standin)))
        else:
            made = CpuHarness() if request.param == "cpu" else ReplayHarness()
        stack.callback(made.close)
        yield made


def watch(harness: Harness, pid: int, gpu: int = 0) -> str:
    job_id = f"job-{pid}"
    harness.backend.watch(job_id, [harness.backend.discover()[gpu].gpu_id], pid)
    return job_id


def read(harness: Harness, job_id: str) -> JobSample:
    (sample,) = [job for job in harness.backend.sample().jobs if job.job_id == job_id]
    return sample


def read_known(harness: Harness, job_id: str) -> JobSample:
    """The first reading that says something: a driver may take a moment to begin."""
    samples: list[JobSample] = []

    def known() -> bool:
        samples.append(read(harness, job_id))
        said = samples[-1]
        return None not in (said.memory_bytes, said.host_busy_s, said.busy_s if harness.counts else said.util)

    wait_until(known, 10.0, f"a reading of {job_id}")
    return samples[-1]


def test_discover_gives_the_same_distinct_gpus_in_index_order(harness: Harness) -> None:
    gpus = harness.backend.discover()
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert len({gpu.gpu_id for gpu in gpus}) == 2
    assert all(gpu.memory_bytes > 0 and gpu.gpu_type for gpu in gpus)
    assert harness.backend.discover() == gpus


def test_another_host_has_other_gpus() -> None:
    ids = [{gpu.gpu_id for gpu in CpuBackend(DeviceSettings(), host, 2).discover()} for host in ("a", "b")]
    assert not ids[0] & ids[1]


def test_watching_an_unknown_gpu_is_a_key_error_and_watches_nothing(harness: Harness) -> None:
    known = harness.backend.discover()[0].gpu_id
    with pytest.raises(KeyError, match="gpu-of-another-host"):
        harness.backend.watch("job-1", [known, "gpu-of-another-host"], harness.idle())
    assert harness.backend.sample().jobs == ()


def test_a_sample_has_every_gpu_and_no_job_when_nothing_is_watched(harness: Harness) -> None:
    gpus = harness.backend.discover()
    sample = harness.backend.sample()
    assert [device.gpu_id for device in sample.devices] == [gpu.gpu_id for gpu in gpus]
    assert sample.jobs == ()
    assert not any(device.lost for device in sample.devices)


def test_a_busy_job_is_measured_and_an_idle_neighbour_is_not(harness: Harness) -> None:
    busy, idle = harness.busy(), harness.idle()
    jobs = watch(harness, busy), watch(harness, idle)
    if not harness.counts:
        samples = [read_known(harness, job) for job in jobs]
        assert [(sample.util, sample.busy_s) for sample in samples] == [(0.8, None), (0.0, None)]
        assert [sample.memory_bytes for sample in samples] == [1000.0, 1000.0]
        harness.wait_busy(busy)
        wait_until(lambda: read(harness, jobs[0]).util == 0.0, 10.0, "a job that has ended its work to be idle")
        return
    before = [read(harness, job) for job in jobs]
    harness.wait_busy(busy)
    after = [read(harness, job) for job in jobs]
    grown = [b.busy_s - a.busy_s for a, b in zip(before, after, strict=True)]
    assert grown == pytest.approx([BURN_S, 0.0], abs=TOLERANCE_S)
    assert all(sample.memory_bytes > 0 for sample in after)


def test_counters_never_go_back(harness: Harness) -> None:
    busy = harness.busy()
    job = watch(harness, busy)
    samples = [read(harness, job)]
    harness.wait_busy(busy)
    samples += [read(harness, job) for _ in range(5)]
    for name in ("busy_s", "host_busy_s"):
        readings = [value for sample in samples if (value := getattr(sample, name)) is not None]
        assert readings == sorted(readings)


def test_a_vanished_job_reads_none_and_never_zero(harness: Harness) -> None:
    busy = harness.busy()
    job = watch(harness, busy)
    harness.wait_busy(busy)
    assert read_known(harness, job).host_busy_s is not None
    harness.vanish(busy)

    def gone() -> bool:
        sample = read(harness, job)
        return (sample.busy_s, sample.util, sample.memory_bytes, sample.host_busy_s) == (None, None, None, None)

    wait_until(gone, 5.0, "a vanished job to have no readings")


def test_a_job_on_two_gpus_has_a_sample_of_each(harness: Harness) -> None:
    gpu_ids = [gpu.gpu_id for gpu in harness.backend.discover()]
    harness.backend.watch("job-1", gpu_ids, harness.busy())
    assert [job.gpu_id for job in harness.backend.sample().jobs] == gpu_ids


def test_a_job_on_no_gpu_has_no_sample_and_the_others_have_theirs(harness: Harness) -> None:
    other = watch(harness, harness.busy())
    harness.backend.watch("frozen", [], harness.idle())
    assert [job.job_id for job in harness.backend.sample().jobs] == [other]


def test_an_unwatched_job_is_gone_and_unwatching_again_does_nothing(harness: Harness) -> None:
    job = watch(harness, harness.idle())
    harness.backend.unwatch(job)
    harness.backend.unwatch(job)
    harness.backend.unwatch("never-watched")
    assert harness.backend.sample().jobs == ()


def test_a_job_watched_anew_counts_from_zero(harness: Harness) -> None:
    busy = harness.busy()
    job = watch(harness, busy)
    harness.wait_busy(busy)
    harness.backend.unwatch(job)
    watch(harness, busy)
    again = read_known(harness, job)
    assert again.busy_s == (pytest.approx(0.0, abs=TOLERANCE_S) if harness.counts else None)
    assert again.host_busy_s == pytest.approx(0.0, abs=TOLERANCE_S)


def test_closing_twice_does_nothing(harness: Harness) -> None:
    watch(harness, harness.idle())
    harness.backend.close()
    harness.backend.close()


def test_a_sample_takes_a_few_milliseconds_at_most(harness: Harness) -> None:
    for job in [harness.idle(), harness.busy()]:
        watch(harness, job)

    def quick() -> bool:
        begin = time.thread_time()
        harness.backend.sample()
        return time.thread_time() - begin < 0.005

    wait_until(quick, 10.0, "a sample of two jobs within 5 ms of CPU time")
