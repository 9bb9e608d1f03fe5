"""What every enforcement backend must do. A new backend joins ``BACKENDS`` and passes all of it, on its own device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import wait_until

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import EnforcementBackend, StaleCommand
from cotenant.actors.enforcement.cpu import EVERYTHING_HELD, NO_STEP, NOTHING_SEEN, CpuEnforcement
from cotenant.actors.launchspec import job_variables
from cotenant.actors.shim.throttle import CREDIT_S
from cotenant.placement.types import Share

CORES = sorted(os.sched_getaffinity(0))
MIB = 1 << 20
GPUS = (
    GpuInfo("gpu-0", "cpu-core", 0, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[0],)),
    GpuInfo("gpu-1", "cpu-core", 1, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[-1],)),
)
BACKENDS = {"cpu": CpuEnforcement}
TRAIN = """
import sys, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(64, 64)
print("imported", flush=True)
sys.stdin.readline()
while True:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
ALLOCATE = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(8, 8)).sum().backward()
optimizer.step()
try:
    torch.ones(1 << 28)
    print("granted")
except RuntimeError:
    print("refused")
print(float(torch.ones(1 << 20).sum()))
"""


@dataclass
class Job:
    """A job directory under a backend."""

    backend: EnforcementBackend
    dir: Path
    gpus: tuple[GpuInfo, ...] = GPUS[:1]

    def apply(self, *computes: float, memory_bytes: int = 4 << 30, epoch: int = 1, revision: int = 0) -> None:
        shares = [Share(gpu.gpu_id, memory_bytes, compute) for gpu, compute in zip(GPUS, computes, strict=False)]
        self.backend.apply(self.dir, shares, epoch, revision)

    def start(self, code: str) -> subprocess.Popen[str]:
        base = {"PATH": os.environ["PATH"]}
        env = base | self.backend.environment(self.gpus, base) | job_variables("job", 1, self.dir, "")
        return subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def guaranteed(self) -> str:
        return self.backend.guarantees(self.backend.report(self.dir, time.monotonic()))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> EnforcementBackend:
    return BACKENDS[request.param]()


@pytest.fixture
def job(backend, tmp_path) -> Job:
    return Job(backend, tmp_path)


@pytest.fixture(scope="module")
def training(backend, tmp_path_factory) -> Iterator[tuple[Job, subprocess.Popen[str]]]:
    """A real training process under a share of a half that has imported torch and waits for a line to begin."""
    job = Job(backend, tmp_path_factory.mktemp("training"))
    job.apply(0.5)
    process = job.start(TRAIN)
    try:
        assert process.stdout.readline() == "imported\n"
        yield job, process
    finally:
        process.kill()
        process.communicate()


def cpu_seconds(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


def utilisation(pid: int, seconds: float) -> float:
    started, used = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - started)


def test_shares_are_in_force_as_applied(job):
    job.apply(0.5, 0.25, memory_bytes=7, epoch=2, revision=3)
    assert job.backend.in_force(job.dir) == (2, 3)
    assert job.backend.shares(job.dir, ["a", "b"]) == [Share("a", 7, 0.5), Share("b", 7, 0.25)]
    job.apply(1.0, 1.0, memory_bytes=8, epoch=2, revision=4)
    assert job.backend.in_force(job.dir) == (2, 4)
    assert job.backend.shares(job.dir, ["a", "b"]) == [Share("a", 8, 1.0), Share("b", 8, 1.0)]


@pytest.mark.parametrize(("epoch", "revision"), [(2, 3), (2, 2), (1, 9)])
def test_what_is_not_newer_changes_nothing(job, epoch, revision):
    job.apply(0.5, epoch=2, revision=3)
    with pytest.raises(StaleCommand, match="is not newer"):
        job.apply(0.9, epoch=epoch, revision=revision)
    assert job.backend.shares(job.dir, ["a"])[0].compute == 0.5


@pytest.mark.parametrize("compute", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(job, compute):
    job.apply(0.5)
    with pytest.raises(ValueError, match=r"compute: .* is not accepted"):
        job.apply(compute, revision=1)
    assert job.backend.shares(job.dir, ["a"])[0].compute == 0.5


def test_another_number_of_shares_is_refused(job):
    job.apply(0.5)
    with pytest.raises(ValueError, match="shares: 2"):
        job.apply(0.5, 0.5, revision=1)
    with pytest.raises(ValueError, match="zip"):
        job.backend.shares(job.dir, ["a", "b"])


def test_an_empty_directory_has_nothing_in_force(job):
    with pytest.raises(OSError, match="share"):
        job.backend.in_force(job.dir)


def test_a_users_own_settings_stay(backend):
    assert backend.environment(GPUS, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert backend.environment(GPUS, {})["OMP_NUM_THREADS"] == "1"


def test_nothing_is_promised_before_anything_is_seen(job):
    job.apply(0.5)
    assert job.guaranteed == NOTHING_SEEN
    assert job.backend.report(job.dir, time.monotonic()).steps is None


def test_a_training_process_is_held_resized_and_reported(training):
    job, process = training
    assert job.guaranteed == NO_STEP
    process.stdin.write("go\n")
    process.stdin.flush()
    wait_until(lambda: (job.backend.report(job.dir, time.monotonic()).steps or 0) > 50, 20, "it steps")
    assert job.guaranteed == EVERYTHING_HELD

    # On a busy machine it may have saved up credit; benchmarks/shares.py measures how exact the cap is.
    assert utilisation(process.pid, 1.5) < 0.5 + CREDIT_S / 1.5 + 0.03
    job.apply(0.05, revision=1)
    assert utilisation(process.pid, 1.5) < 0.05 + CREDIT_S / 1.5 + 0.03
    wait_until(lambda: job.backend.report(job.dir, time.monotonic()).throttled_s > 0.2, 20, "it is held back")
    held = job.backend.report(job.dir, time.monotonic())
    assert held.last_step_age_s < 10.0
    assert held.processes == 1

    job.apply(1.0, revision=2)
    time.sleep(0.3)
    free = job.backend.report(job.dir, time.monotonic())
    wait_until(lambda: job.backend.report(job.dir, time.monotonic()).steps > free.steps + 20, 20, "it steps freely")
    assert job.backend.report(job.dir, time.monotonic()).throttled_s == free.throttled_s


def test_memory_beyond_the_share_is_refused_in_the_job_that_asks(job):
    job.apply(1.0, memory_bytes=900 * MIB)
    process = job.start(ALLOCATE)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["refused", str(float(1 << 20))]
