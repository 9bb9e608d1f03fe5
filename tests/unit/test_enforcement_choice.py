"""How shares are held: the decision as a table."""

from __future__ import annotations

import pytest

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.choice import GUARANTEES, GpuTraits, choose, choose_pause
from cotenant.actors.enforcement.host import kind_of

CPU = GpuTraits("cpu-0", "cpu")
GPU = GpuTraits("GPU-a", "gpu")
OTHER = GpuTraits("GPU-b", "gpu")
BARE = GpuTraits("GPU-c", "gpu", mps_missing="nvidia-cuda-mps-control is not on PATH")
NO_CHECKPOINTS = GpuTraits("GPU-d", "gpu", checkpoint_missing="no cuda-core")
MIG = GpuTraits("MIG-a", "mig")


@pytest.mark.parametrize(
    ("gpus", "isolation", "method", "reason"),
    [
        ([CPU], "none", "cpu", "slice of CPU cores"),
        ([CPU, CPU], "hard", "cpu", "slice of CPU cores"),
        ([MIG], "soft", "mig", "the share is the instance"),
        ([MIG], "hard", "mig", "the share is the instance"),
        ([GPU], "soft", "mps", "capped when its processes start"),
        ([GPU], "none", "mps", "without caps"),
        ([GPU], "hard", "timeslice", "nobody else is on its GPUs"),
        ([GPU, OTHER], "soft", "timeslice", "several GPUs"),
        ([BARE], "soft", "timeslice", "no MPS: nvidia-cuda-mps-control is not on PATH"),
        ([BARE], "none", "timeslice", "no MPS"),
    ],
)
def test_every_job_is_held_in_the_way_that_suits_it(gpus, isolation, method, reason):
    choice = choose(gpus, isolation)
    assert choice.method == method
    assert reason in choice.reason
    assert method == "cpu" or GUARANTEES[method]


@pytest.mark.parametrize(
    ("gpus", "isolation", "method", "reason"),
    [
        ([GPU], "soft", "timeslice", "checkpoint driver: it can be frozen"),
        ([GPU], "none", "timeslice", "under MPS it could not"),
        ([GPU, OTHER], "hard", "timeslice", "checkpoint driver: it can be frozen"),
        ([NO_CHECKPOINTS], "soft", "mps", "capped when its processes start; it cannot be frozen: no cuda-core"),
        ([GPU, NO_CHECKPOINTS], "soft", "timeslice", "several GPUs"),
        ([MIG], "soft", "mig", "the share is the instance"),
        ([CPU], "soft", "cpu", "slice of CPU cores"),
    ],
)
def test_a_job_that_is_to_be_frozen_is_held_so_that_it_can_be(gpus, isolation, method, reason):
    choice = choose(gpus, isolation, freezes=True)
    assert choice.method == method
    assert reason in choice.reason


@pytest.mark.parametrize("gpus", [[], [CPU, GPU], [GPU, MIG]])
def test_gpus_of_several_kinds_are_refused(gpus):
    with pytest.raises(ValueError, match="give GPUs of one kind"):
        choose(gpus, "soft")


def test_several_instances_are_refused():
    with pytest.raises(ValueError, match="gpus: 2 MIG instances is not accepted; give 1"):
        choose([MIG, MIG], "soft")


@pytest.mark.parametrize(
    ("gpu", "method", "name", "why"),
    [
        (CPU, "cpu", "signal", "ending it"),
        (GPU, "mps", "signal", "under MPS"),
        (MIG, "mig", "signal", "under MIG"),
        (GPU, "timeslice", "checkpoint", ""),
        (
            GpuTraits("GPU-a", "gpu", checkpoint_missing="cuda-core is not installed"),
            "timeslice",
            "signal",
            "cuda-core",
        ),
    ],
)
def test_a_pause_frees_memory_only_where_the_driver_can(gpu, method, name, why):
    found, reason = choose_pause([gpu], method)
    assert found == name
    assert why in reason if why else not reason


@pytest.mark.parametrize(
    ("gpu_id", "visible", "cores", "kind"),
    [
        ("cpu-host-0", "", (0,), "cpu"),
        ("replay-0", "", (), "cpu"),
        ("GPU-1f", "GPU-1f", (), "gpu"),
        ("MIG-1f", "MIG-1f", (), "mig"),
    ],
)
def test_what_a_gpu_is_shows_in_what_its_backend_says(gpu_id, visible, cores, kind):
    assert kind_of(GpuInfo(gpu_id, "type", 0, 1, {"CUDA_VISIBLE_DEVICES": visible}, cores)) == kind
