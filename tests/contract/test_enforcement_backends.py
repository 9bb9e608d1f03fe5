"""What every enforcement backend must do. A new backend joins ``BACKENDS`` and passes all of it, on its own device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mps import FakeMps
from fake_torch import FakeTorch
from support import wait_until

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.base import Ceiling, EnforcementBackend, JobReport, StaleCommand
from cotenant.actors.enforcement.cpu import EVERYTHING_HELD, NO_STEP, NOTHING_SEEN, CpuEnforcement
from cotenant.actors.enforcement.cuda import MPS_RECORD, MigEnforcement, MpsEnforcement, TimeSliceEnforcement
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.actors.enforcement.mps import MpsService
from cotenant.actors.enforcement.pausing import CheckpointPause
from cotenant.actors.launchspec import job_variables
from cotenant.actors.shim.throttle import CREDIT_S
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Isolation

CORES = sorted(os.sched_getaffinity(0))
MIB = 1 << 20
GPUS = (
    GpuInfo("gpu-0", "cpu-core", 0, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[0],)),
    GpuInfo("gpu-1", "cpu-core", 1, 4 << 30, {"CUDA_VISIBLE_DEVICES": ""}, cores=(CORES[-1],)),
)
CUDA_GPUS = (
    GpuInfo("GPU-a", "H100", 0, 80 << 30, {"CUDA_VISIBLE_DEVICES": "GPU-a"}),
    GpuInfo("GPU-b", "H100", 1, 80 << 30, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
)
MIG_GPUS = (GpuInfo("MIG-a", "H100 1g.10gb", 0, 10 << 30, {"CUDA_VISIBLE_DEVICES": "MIG-a"}),)


def mps(folder: Path) -> MpsEnforcement:
    services = {gpu.gpu_id: MpsService(gpu.gpu_id, str(folder / gpu.gpu_id)) for gpu in CUDA_GPUS}
    return MpsEnforcement(services.__getitem__)


BACKENDS = {
    "cpu": (lambda _: CpuEnforcement(), GPUS),
    "timeslice": (lambda _: TimeSliceEnforcement(), CUDA_GPUS),
    "mig": (lambda _: MigEnforcement(), MIG_GPUS),
    "mps": (mps, CUDA_GPUS),
    "host": (lambda folder: HostEnforcement(folder, CUDA_GPUS, EnforcementSettings()), CUDA_GPUS),
    "host-cpu": (lambda folder: HostEnforcement(folder, GPUS, EnforcementSettings()), GPUS),
}
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


STEP = """
import sys, threading, time, torch
optimizer = torch.optim.SGD()
print("imported", flush=True)
for line in sys.stdin:
    what, *sizes = line.split()
    if what == "init":
        torch.cuda.init()
    elif what == "hold":
        torch.cuda.held, torch.cuda.used = map(int, sizes)
    elif what == "step":
        break
while True:
    time.sleep(0.005)
    optimizer.step()
"""


@dataclass
class Job:
    """A job directory under a backend."""

    backend: EnforcementBackend
    dir: Path
    gpus: tuple[GpuInfo, ...] = GPUS[:1]
    kind: str = "cpu"

    def admit(self, *, memory_bytes: int = 4 << 30, compute: float = 1.0, isolation: Isolation = "soft") -> None:
        shares = [Share(gpu.gpu_id, memory_bytes, compute) for gpu in self.gpus]
        self.backend.admit(self.dir, self.gpus, shares, isolation)

    def apply(self, *computes: float, memory_bytes: int = 4 << 30, epoch: int = 1, revision: int = 0) -> None:
        shares = [Share(f"gpu-{index}", memory_bytes, compute) for index, compute in enumerate(computes)]
        self.backend.apply(self.dir, shares, epoch, revision)

    def start(self, code: str, **more: str) -> subprocess.Popen[str]:
        base = {"PATH": os.environ["PATH"], **more}
        python_path = more.get("PYTHONPATH", "")
        env = base | self.backend.environment(self.dir, self.gpus, base)
        env |= job_variables("job", 1, self.dir, python_path)
        return subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def guaranteed(self) -> str:
        return self.backend.guarantees(self.dir, self.backend.report(self.dir, time.monotonic()))


@pytest.fixture(params=BACKENDS)
def job(request, tmp_path, monkeypatch) -> Iterator[Job]:
    """A job directory under every backend."""
    FakeMps(tmp_path / "fake", monkeypatch)
    make, gpus = BACKENDS[request.param]
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    backend = make(tmp_path)
    job = Job(backend, job_dir, gpus[:1], request.param)
    yield job
    backend.close()


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Iterator[tuple[Job, subprocess.Popen[str]]]:
    """A real training process under a share of a half that has imported torch and waits for a line to begin."""
    job = Job(CpuEnforcement(), tmp_path_factory.mktemp("training"))
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


def it_steps_freely(job: Job) -> None:
    """Nothing holds it back any more, from a step on that began after its share had grown."""

    def report() -> JobReport:
        return job.backend.report(job.dir, time.monotonic())

    before = report()
    wait_until(lambda: report().steps > before.steps + 2, 20, "the step that was held back is over")
    free = report()
    wait_until(lambda: report().steps > free.steps + 20, 20, "it steps on")
    assert report().throttled_s == free.throttled_s


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


def test_a_users_own_settings_stay(tmp_path):
    cores = CpuEnforcement()
    assert cores.environment(tmp_path, GPUS, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert cores.environment(tmp_path, GPUS, {})["OMP_NUM_THREADS"] == "1"


def test_a_process_sees_the_gpus_of_its_shares_and_no_others(job):
    job.admit()
    env = job.backend.environment(job.dir, job.gpus, {})
    assert env["CUDA_VISIBLE_DEVICES"] == job.gpus[0].visible_env["CUDA_VISIBLE_DEVICES"]
    assert env["COTENANT_DEVICE"] == ("cpu" if job.gpus[0].cores else "cuda")


CAPPED = (
    "Now: no PyTorch optimizer seen: compute is not held to the share. Until it starts anew the driver refuses more"
)
NOTHING_YET = {
    "cpu": NOTHING_SEEN,
    "timeslice": "Now: no PyTorch optimizer seen: compute is not held to the share",
    "mig": "Now: held by the hardware",
    "mps": CAPPED,
    "host": CAPPED,
    "host-cpu": NOTHING_SEEN,
}


def test_nothing_is_promised_before_anything_is_seen(job):
    job.admit()
    job.apply(0.5)
    assert NOTHING_YET[job.kind] in job.guaranteed
    assert job.backend.report(job.dir, time.monotonic()).steps is None


PAUSES = {
    "cpu": "signal",
    "timeslice": "checkpoint",
    "mig": "signal",
    "mps": "signal",
    "host": "signal",  # its job runs under MPS
    "host-cpu": "signal",
}


def test_a_job_that_runs_is_not_lost_and_can_be_paused(job):
    job.admit()
    job.apply(0.5)
    job.backend.tend([job.dir])
    assert job.backend.lost(job.dir) == ""
    assert job.backend.detach(job.dir, ()) is None or job.kind in ("mps", "host")
    assert job.backend.pause(job.dir).name == PAUSES[job.kind]
    capped = [Ceiling(job.gpus[0].gpu_id, 4 << 30, 1.0)] if job.kind in ("mps", "host") else []
    assert list(job.backend.ceilings(job.dir)) == capped


@pytest.mark.parametrize(("missing", "name"), [("", "checkpoint"), ("no cuda-core", "signal")])
def test_a_job_that_takes_turns_is_paused_by_checkpoints_where_there_are_any(tmp_path, monkeypatch, missing, name):
    monkeypatch.setattr(CheckpointPause, "missing", lambda _: missing)
    backend = HostEnforcement(tmp_path, CUDA_GPUS, EnforcementSettings(mps="off"))
    job = Job(backend, tmp_path, CUDA_GPUS[:1])
    job.admit()
    assert backend.pause(tmp_path).name == name


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
    it_steps_freely(job)


def test_memory_beyond_the_share_is_refused_in_the_job_that_asks(tmp_path):
    job = Job(CpuEnforcement(), tmp_path)
    job.apply(1.0, memory_bytes=900 * MIB)
    process = job.start(ALLOCATE)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["refused", str(float(1 << 20))]


@pytest.fixture
def stepping(tmp_path, monkeypatch) -> Iterator[tuple[Job, subprocess.Popen[str], FakeTorch]]:
    """A program on a GPU of 1000 bytes that has not used CUDA yet and waits for a line."""
    FakeMps(tmp_path / "fake", monkeypatch)
    (tmp_path / "job").mkdir()
    job = Job(HostEnforcement(tmp_path, CUDA_GPUS, EnforcementSettings()), tmp_path / "job", CUDA_GPUS[:1])
    torch = FakeTorch(tmp_path)
    job.admit(memory_bytes=600)
    job.apply(0.5, memory_bytes=600)
    process = job.start(STEP, **torch.environment)
    assert process.stdout.readline() == "imported\n"
    yield job, process, torch
    process.kill()
    process.communicate()
    job.backend.close()


def tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_a_program_on_a_gpu_is_held_and_resized_while_it_runs(stepping):
    job, process, torch = stepping
    assert torch.done == [], "no context may be made on its behalf"
    tell(process, "init")
    wait_until(lambda: torch.done == [["fraction", 0.6, 0]], 10, "its memory is limited as soon as it uses CUDA")
    tell(process, "step")
    wait_until(lambda: (job.backend.report(job.dir, time.monotonic()).throttled_s or 0) > 0.5, 20, "it is held back")
    began = job.backend.report(job.dir, time.monotonic())
    wait_until(lambda: job.backend.report(job.dir, time.monotonic()).throttled_s > began.throttled_s + 0.5, 20, "again")
    report = job.backend.report(job.dir, time.monotonic())
    assert "compute is held to the share at optimizer steps; torch allocates no more than the memory share" in (
        job.guaranteed
    )
    assert report.processes == 1

    job.apply(1.0, memory_bytes=800, revision=1)
    wait_until(lambda: torch.done[-1] == ["fraction", 0.8, 0], 5, "more memory, with the next step")
    it_steps_freely(job)


def test_memory_of_a_gpu_shrinks_only_to_what_is_free_to_take(stepping):
    job, process, torch = stepping
    tell(process, "init")
    tell(process, "hold 700 500")  # 700 bytes with the allocator, 500 of them in use
    tell(process, "step")
    wait_until(lambda: ["empty_cache"] in torch.done, 10, "what lies idle is given back first")
    wait_until(lambda: torch.done[-1] == ["fraction", 0.6, 0], 10, "then the limit is the share")
    job.apply(0.5, memory_bytes=300, revision=1)
    wait_until(lambda: torch.done[-1] == ["fraction", 0.5, 0], 10, "what is in use stays")
    wait_until(lambda: "torch holds more than the memory share" in job.guaranteed, 5, "and it is said")
    job.apply(0.5, memory_bytes=900, revision=2)
    wait_until(lambda: torch.done[-1] == ["fraction", 0.9, 0], 10, "it grows at once")


def test_a_damaged_record_keeps_nobody_from_looking_at_the_daemons_of_others(tmp_path):
    looked: list[str] = []
    service: Any = SimpleNamespace(look=lambda: looked.append("GPU-a"))
    for name in ("damaged", "whole"):
        (tmp_path / name).mkdir()
    runner.write_json(str(tmp_path / "whole" / MPS_RECORD), {"gpu_id": "GPU-a", "daemon": 1})
    MpsEnforcement(lambda _: service).tend([tmp_path / "damaged", tmp_path / "whole"])
    assert looked == ["GPU-a"]


@pytest.mark.parametrize("words", [NOTHING_SEEN, NO_STEP, EVERYTHING_HELD])
def test_what_stands_in_every_row_of_ps_is_short(words: str) -> None:
    assert len(words) <= 80
