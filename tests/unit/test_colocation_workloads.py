"""The measurement suite's workloads: all build and step, their waits are real, and nothing is left behind."""

from __future__ import annotations

import fcntl
import math
import os
import random
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.colocation.workloads import Workload, WorkloadError, build, catalogue
from benchmarks.colocation.workloads import __main__ as command
from benchmarks.colocation.workloads.catalogue import Storage, configuration, configurations
from benchmarks.colocation.workloads.helper import ENDED, FELL, REQUEST, CartPole, TokenBucket
from benchmarks.colocation.workloads.mix import CLASSES, class_of
from benchmarks.colocation.workloads.processes import Helper, helper_cores
from benchmarks.colocation.workloads.reinforcement import DISCOUNT, discounted
from support import alive, wait_until

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "image_classification",
    "segmentation",
    "reinforcement_learning",
    "gan",
    "text_classification",
    "inference",
}
READS = {"none", "prefetch", "sync", "environment", "requests"}

Build = Callable[..., Workload]


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[None]:
    """Give this process its arithmetic back: ``build`` sets it for a process that runs one workload only."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.fixture
def built() -> Iterator[Build]:
    """``build`` for tensors on the CPU; closes what it built."""
    workloads = []

    def make(name: str, device: str, seed: int = 0) -> Workload:
        workloads.append(build(name, device, "cpu", seed=seed))
        return workloads[-1]

    yield make
    for workload in workloads:
        workload.close()


def waiting_bytes(helper: Helper) -> int:
    """How many bytes a helper has written that nobody has read."""
    count = array("i", [0])
    fcntl.ioctl(helper, termios.FIONREAD, count)
    return count[0]


# The catalogues


@pytest.mark.parametrize(("device", "least"), [("cpu", 13), ("cuda", 22)])
def test_catalogue_spans_the_families(device: str, least: int) -> None:
    descriptions = catalogue(device)
    assert len(descriptions) == 13 if device == "cpu" else len(descriptions) >= least
    assert {each.family for each in descriptions.values()} == FAMILIES
    assert {each.reads for each in descriptions.values()} == READS
    images = [each for each in descriptions.values() if each.family == "image_classification"]
    assert len(images) >= 5
    assert len({each.architecture for each in images}) == 5
    assert Counter(each.reads for each in descriptions.values())["sync"] >= 2
    services = [each for each in descriptions.values() if each.kind == "inference"]
    assert {each.family for each in services} == {"inference"}
    assert min(each.batch for each in services) == 1 < max(each.batch for each in services)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_say_architecture_and_batch_and_are_unique(device: str) -> None:
    for name, description in catalogue(device).items():
        assert name == description.name
        assert name == f"{description.architecture}-{description.batch}" or name.startswith(
            f"{description.architecture}-{description.batch}-"
        )
    rows = (
        (ROOT / "benchmarks/colocation/workloads/catalogue.py").read_text(encoding="utf-8").count("    Configuration(")
    )
    assert rows == len(catalogue("cpu")) + len(catalogue("cuda"))  # none is hidden behind another of its name


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"workload 'resnet' is not in the cpu catalogue; give one of .*resnet-32, "):
        build("resnet", "cpu", "cpu")
    with pytest.raises(ValueError, match="device 'tpu' is not accepted; give one of cpu, cuda"):
        build("resnet-32", "tpu", "cpu")
    with pytest.raises(ValueError, match="device 'tpu' is not accepted"):
        catalogue("tpu")


# Steps


@pytest.mark.parametrize(
    ("device", "name"), [(device, name) for device in ("cpu", "cuda") for name in configurations(device)]
)
def test_every_configuration_steps(built: Build, device: str, name: str) -> None:
    workload = built(name, device)
    assert workload.description == catalogue(device)[name] or device == "cuda"  # a dry run has a smaller batch
    assert all(math.isfinite(workload.step()) for _ in range(2))
    workload.synchronize()
    assert (len(workload.helper_pids()) == 0) == (workload.description.reads == "none")


@pytest.mark.parametrize("name", ["lenet-32", "resnet-16-sync", "unet-4", "dcgan-16", "bert-6", "cartpole-16"])
def test_a_seed_decides_everything(built: Build, name: str) -> None:
    def losses(seed: int) -> list[float]:
        workload = built(name, "cpu", seed)
        return [workload.step() for _ in range(2)]

    first = losses(1)
    assert losses(1) == first
    assert losses(2) != first


def test_training_learns(built: Build) -> None:
    workload = built("lenet-32", "cpu")
    batches = workload._batches  # type: ignore[attr-defined]
    always = batches.next().clone()
    batches.next = lambda: always
    losses = [workload.step() for _ in range(40)]
    assert losses[-1] < 0.9 * losses[0]


# Waits


def test_a_storage_holds_its_rate(built: Build) -> None:
    source = configuration("efficientnet-24-sync", "cpu").source
    assert isinstance(source, Storage)
    batches = built("efficientnet-24-sync", "cpu")._batches  # type: ignore[attr-defined]
    batches.next()
    began = time.monotonic()
    for _ in range(10):
        batches.next()
    assert time.monotonic() - began > 0.85 * 10 * 24 / source.rate


def test_only_a_prefetching_loader_reads_unasked(built: Build) -> None:
    ahead, between = (built(name, "cpu")._batches for name in ("resnet-32", "resnet-16-sync"))  # type: ignore[attr-defined]
    ahead.next()
    between.next()
    wait_until(lambda: waiting_bytes(ahead._loader) == 2, 5.0, "both batches ahead are read")
    assert waiting_bytes(between._loader) == 0


def test_token_bucket_by_hand() -> None:
    bucket = TokenBucket(rate=100.0, burst=1.0, now=0.0)
    assert bucket.wait_s(11, now=0.0) == pytest.approx(0.10)  # 1 was saved up, 10 are owed
    assert bucket.wait_s(10, now=0.10) == pytest.approx(0.10)
    assert bucket.wait_s(1, now=9.0) == 0.0  # never more than the burst is saved up


def test_cart_pole_by_hand() -> None:
    pole = CartPole(random.Random(0))
    pole.state = [0.0, 0.0, 0.0, 0.0]
    pole.step(right=True)
    # Upright and at rest: 10 N on 1.1 kg; the pole turns the other way, by Florian's equations (23) and (24).
    turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    assert pole.state == pytest.approx([0.0, 0.02 * (10 / 1.1 - 0.1 * 0.5 * turn / 1.1), 0.0, 0.02 * turn])
    steps = 1
    while not (flags := pole.step(right=True)):
        steps += 1
    assert 7 <= steps <= 12  # always pushing one way fells it in about ten steps
    assert flags == FELL | ENDED
    assert max(abs(value) for value in pole.state) <= 0.05


def test_discounting_by_hand() -> None:
    rewards = torch.ones(3, 2)
    alive = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    worth = discounted(rewards, alive, torch.tensor([10.0, 10.0]))
    final = 1 + DISCOUNT * 10
    expected = [[1 + DISCOUNT * (1 + DISCOUNT * final), 1 + DISCOUNT], [1 + DISCOUNT * final, 1.0], [final, final]]
    assert torch.allclose(worth, torch.tensor(expected))


def test_a_service_answers_full_batches_and_turns_the_rest_away(built: Build) -> None:
    service = built("bert-8-serve", "cpu")
    service.step()
    wait_until(lambda: waiting_bytes(service._clients) == 24 * REQUEST.size, 5.0, "three batches wait")  # type: ignore[attr-defined]
    time.sleep(0.1)  # as long as 22 more need to arrive
    sizes = []
    gather = service._gather  # type: ignore[attr-defined]
    service._gather = lambda: sizes.append(gather()) or sizes[-1]  # type: ignore[attr-defined,func-returns-value]
    for _ in range(3):
        service.step()
    assert [len(requests) for requests in sizes] == [8, 8, 8]
    numbers = [number for requests in sizes for number in requests]
    assert numbers == list(range(numbers[0], numbers[0] + 24))


# Helper processes


@pytest.mark.parametrize("name", ["lenet-32", "resnet-16-sync", "cartpole-16", "mobilenet-1-serve", "bert-8-serve"])
def test_a_killed_helper_is_an_error_and_closing_leaves_no_process(built: Build, name: str) -> None:
    workload = built(name, "cpu")
    workload.step()
    (pid,) = workload.helper_pids()
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkloadError, match=rf"helper process {pid} \(\w+\) was killed by SIGKILL"):
        for _ in range(10):  # what was read ahead is still there
            workload.step()
    workload.close()

    other = built(name, "cpu")
    (pid,) = other.helper_pids()
    other.close()
    assert not alive(pid)
    other.close()


OWNER = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
from benchmarks.colocation.workloads import build
workload = build("lenet-32", "cpu", "cpu")
workload.step()
print(*workload.helper_pids(), flush=True)
sys.stdin.read()
"""


def test_helpers_die_with_their_owner_ignore_ctrl_c_and_leave_it_the_core() -> None:
    usable = os.sched_getaffinity(0)
    core = min(usable)
    argv = [sys.executable, "-c", OWNER, str(core)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert os.sched_getaffinity(pid) == (usable - {core} or usable)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert alive(pid)
        owner.kill()
        owner.wait()
        wait_until(lambda: not alive(pid), 5.0, "the helper ends with its owner")


@pytest.mark.parametrize(
    ("own", "starters", "expected"),
    [({0}, {0, 1, 2}, {1, 2}), ({1}, {0, 1}, {0}), ({0, 1}, {0, 1}, {0, 1}), ({0}, {0}, {0})],
)
def test_helpers_get_the_cores_that_are_not_the_devices(
    monkeypatch: pytest.MonkeyPatch, own: set[int], starters: set[int], expected: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: starters if pid == os.getppid() else own)
    assert helper_cores() == expected


# The operator mix


@pytest.mark.parametrize(
    ("name", "operator_class"),
    [
        ("aten::addmm", "gemm"),
        ("aten::bmm", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("aten::mkldnn_convolution", "conv"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32", "conv"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "conv"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("aten::native_batch_norm", "normalisation"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", "normalisation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("aten::mul_", "elementwise"),
        ("void at::native::distribution_elementwise_grid_stride_kernel<float, 4, normal_kernel>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduce"),
        ("aten::_log_softmax", "reduce"),
        ("Memcpy HtoD (Pinned -> Device)", "memcpy"),
        ("aten::copy_", "memcpy"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective"),
        ("aten::embedding", "other"),
    ],
)
def test_operators_and_kernels_are_classed_by_name(name: str, operator_class: str) -> None:
    assert class_of(name) == operator_class


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [("lenet-32", ("conv", "gemm"), "attention"), ("bert-6", ("gemm", "attention"), "conv")],
)
def test_operator_mix(built: Build, name: str, present: tuple[str, ...], absent: str) -> None:
    workload = built(name, "cpu")
    workload.step()
    mix = workload.operator_mix(2)
    assert tuple(mix["fractions"]) == CLASSES
    assert sum(mix["fractions"].values()) == pytest.approx(1.0)
    assert min(mix["fractions"][each] for each in (*present, "elementwise")) > 0.01
    assert mix["fractions"][absent] == 0
    assert mix["launches_per_step"] > 100
    assert mix["seconds"] > 0
    with pytest.raises(ValueError, match="steps 0 is not accepted"):
        workload.operator_mix(0)


# The command


def test_command_lists_and_measures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["workloads"])
    command.main()
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(catalogue("cpu"))

    monkeypatch.setattr(command, "WARM_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["workloads", "unet-8-sync", "--seconds", "0.3"])
    affinity = os.sched_getaffinity(0)
    try:
        command.main()
    finally:
        os.sched_setaffinity(0, affinity)
    out = capsys.readouterr().out
    for word in ("steps/s", "utilisation of a core", "varies by", "MiB", "conv 0."):
        assert word in out

    monkeypatch.setattr(sys, "argv", ["workloads", "unet-8-sync", "--seconds", "0"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--seconds: 0.0 is not accepted" in capsys.readouterr().err


def test_variation_of_a_steady_rate_is_none() -> None:
    assert command.variation([0.3 * step for step in range(20)]) == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(command.variation([0.0, 0.5, 1.0]))
