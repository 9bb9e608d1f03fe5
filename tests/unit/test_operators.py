"""The operator mix: when it is measured, how it is added up, and that it never disturbs the program."""

from __future__ import annotations

import os
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.colocation.workloads import mix as measured_with

from cotenant.actors.enforcement.cpu import CpuEnforcement
from cotenant.actors.shim import operators, reportfile
from cotenant.actors.shim.operators import OperatorProfile, class_of, summary
from cotenant.actors.shim.reportfile import CLASSES, MixReport, ReportWriter, read_report
from cotenant.forecasting.signatures import BY_NAME
from cotenant.forecasting.types import OperatorMix

NAMES = {
    "aten::addmm": "gemm",
    "ampere_sgemm_128x64_tn": "gemm",
    "aten::mkldnn_convolution": "conv",
    "sm80_xmma_fprop_implicit_gemm_f16": "conv",
    "ConvolutionBackward0": "conv",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::native_batch_norm": "normalisation",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "aten::_foreach_addcdiv_": "elementwise",
    "aten::threshold_backward": "elementwise",
    "aten::max_pool2d_with_indices": "reduce",
    "aten::_log_softmax": "reduce",
    "Memcpy HtoD (Pinned -> Device)": "memcpy",
    "aten::copy_": "memcpy",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "collective",
    "aten::empty": "other",
    "aten::view": "other",
}


@pytest.mark.parametrize(("name", "want"), NAMES.items())
def test_classes(name: str, want: str) -> None:
    assert class_of(name) == want


@pytest.mark.parametrize("name", [*NAMES, "aten::bernoulli_", "aten::embedding", "aten::mul_", "aten::gelu_backward"])
def test_the_classes_are_those_of_the_measurements_that_models_learn_from(name: str) -> None:
    assert class_of(name) == measured_with.class_of(name)
    assert measured_with.CLASSES == CLASSES
    assert {"mix_" + each for each in CLASSES} <= set(BY_NAME)


# -- adding up ------------------------------------------------------------------------------------------------------


def event(name: str, start: int, duration: int, *, thread: int = 1, device: str = "CPU") -> Any:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        duration_ns=lambda: duration,
        start_thread_id=lambda: thread,
        device_type=lambda: SimpleNamespace(name=device),
    )


def fractions(mix: MixReport | None) -> dict[str, float]:
    assert mix is not None
    return {name: round(value, 6) for name, value in zip(CLASSES, mix.fractions, strict=True) if value}


def test_on_the_cpu_the_operators_own_time_counts() -> None:
    events = [
        event("aten::linear", 0, 100),
        event("aten::addmm", 10, 80),  # inside; both are of class gemm
        event("aten::copy_", 20, 30),  # inside of that
        event("aten::relu", 100, 100),  # begins where the other ends
        event("aten::view", 50, 100, thread=2),
        event("Optimizer.step#SGD.step", 0, 10_000),  # a range that marks a part of the program
    ]
    mix = summary(events, steps=2, step=23, batch_size=8)
    assert fractions(mix) == {"gemm": 0.233333, "memcpy": 0.1, "elementwise": 0.333333, "other": 0.333333}
    assert mix is not None
    assert (mix.launches_per_step, mix.step, mix.batch_size) == (2.5, 23, 8)


def test_on_a_gpu_the_kernels_time_counts() -> None:
    events = [
        event("aten::conv2d", 0, 1000),
        event("cudnn_fprop", 5, 60, device="CUDA"),
        event("Memcpy HtoD", 7, 40, device="CUDA"),
    ]
    mix = summary(events, steps=1, step=23, batch_size=0)
    assert fractions(mix) == {"conv": 0.6, "memcpy": 0.4}
    assert mix is not None
    assert mix.launches_per_step == 1


@pytest.mark.parametrize("events", [[], [event("aten::add", 0, 0)]])
def test_no_time_is_no_mix(events: list[Any]) -> None:
    assert summary(events, 3, 3, 0) is None


# -- when it is measured --------------------------------------------------------------------------------------------


class Torch:
    """As much of torch as a profile needs."""

    def __init__(self) -> None:
        self.busy = False  # the program's own profiler is on
        self.error: Exception | None = None
        self.began = self.ended = 0
        self.cuda = SimpleNamespace(is_available=lambda: False)
        self.autograd = SimpleNamespace(
            _profiler_enabled=lambda: self.busy, profiler=SimpleNamespace(profile=lambda **_options: self)
        )
        self.Tensor = Tensor
        hooks = self.hooks = []

        def register(hook: Any) -> Any:
            hooks.append(hook)
            return SimpleNamespace(remove=lambda: hooks.remove(hook))

        module = SimpleNamespace(register_module_forward_pre_hook=register)
        self.nn = SimpleNamespace(modules=SimpleNamespace(module=module))
        self.kineto_results = SimpleNamespace(events=lambda: [event("aten::mm", 0, 10)])

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error
        self.began += 1

    def __exit__(self, *_error: object) -> None:
        self.ended += 1


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def dim(self) -> int:
        return len(self.shape)


class Program:
    """Steps of a program, one a tenth of a second unless a test says otherwise."""

    def __init__(self) -> None:
        self.profile = OperatorProfile()
        self.step, self.now = 0, 1000.0
        self.made: list[MixReport] = []
        self.disturbed: list[int] = []

    def run(self, steps: int, took_s: float = 0.1) -> list[MixReport]:
        made = []
        for _ in range(steps):
            self.step += 1
            self.now += took_s
            mix = self.profile.on_round(self.step, self.now, took_s)
            made += [] if mix is None else [mix]
            self.disturbed += [self.step] if self.profile.disturbs else []
        return made


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.setenv("TEARDOWN_CUPTI", "")
    return made


def test_once_after_the_warm_up_and_then_no_more(torch: Torch) -> None:
    program = Program()
    assert program.run(50) == []
    (mix,) = program.run(10)  # the warm-up is five seconds
    assert (mix.step, program.disturbed) == (54, [51, 52, 53, 54])
    assert program.run(5000) == []
    assert (torch.began, torch.ended, torch.hooks) == (1, 1, [])


@pytest.mark.parametrize(("took_s", "step"), [(1 / 128, 644), (1.0, 21)], ids=["fast steps", "slow steps"])
def test_the_warm_up_is_of_steps_and_of_seconds(torch: Torch, took_s: float, step: int) -> None:
    program = Program()
    assert [mix.step for mix in program.run(700, took_s)] == [step]


@pytest.mark.parametrize(
    ("after_s", "took_s", "again"), [(100.0, 0.2, 1), (100.0, 0.06, 1), (100.0, 0.12, 0), (0.0, 0.2, 0)]
)
def test_again_when_the_time_of_a_step_has_changed_for_good(
    torch: Torch, after_s: float, took_s: float, again: int
) -> None:
    program = Program()
    program.run(100)
    program.now += after_s
    assert len(program.run(100, took_s)) == again


def test_a_few_slow_steps_are_no_change(torch: Torch) -> None:
    program = Program()
    program.run(100)
    for _ in range(50):
        assert program.run(19) + program.run(1, 0.5) == []


def test_the_number_of_profiles_is_bounded(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MOST_PROFILES", 3)
    program = Program()
    made = [mix for number in range(20) for mix in program.run(1000, 0.1 * 2 ** (number % 2))]
    assert len(made) == 3


def test_a_program_that_profiles_itself_is_left_alone(torch: Torch) -> None:
    torch.busy = True
    program = Program()
    assert program.run(200) == []
    assert torch.began == 0
    torch.busy = False
    assert len(program.run(10)) == 1


def test_another_thread_does_not_end_a_profile(torch: Torch) -> None:
    program = Program()
    program.run(51)
    other = threading.Thread(target=program.run, args=(10,))
    other.start()
    other.join()
    assert (torch.began, torch.ended) == (1, 0)
    assert len(program.run(1)) == 1


def test_an_error_ends_the_profiling_and_nothing_else(torch: Torch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.error = RuntimeError("no tracer")
    program = Program()
    assert program.run(200) == []
    assert capsys.readouterr().err == (
        "cotenant: the operators of this process are not profiled: RuntimeError('no tracer')\n"
    )


@pytest.mark.parametrize(
    ("inputs", "want"),
    [
        ([((Tensor(32, 3, 8, 8),))], 32),
        ([(), ("text",), (Tensor(5),), (Tensor(4, 7), 1), (Tensor(9, 9),)], 4),
        ([()], 0),
        ([], 0),
    ],
)
def test_the_batch_size_is_that_of_the_first_input(torch: Torch, inputs: list[Any], want: int) -> None:
    program = Program()
    program.run(51)
    for each in inputs:
        torch.hooks[0](None, each if isinstance(each, tuple) else (each,))
    (mix,) = program.run(3)
    assert mix.batch_size == want


def test_compiled_programs_get_no_hook(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo = SimpleNamespace(utils=SimpleNamespace(counters={"frames": {"ok": 1}}))
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    program = Program()
    program.run(51)
    assert torch.hooks == []


def test_cupti_is_told_to_go_away_after_a_profile(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI")
    Program().run(60)
    assert os.environ["TEARDOWN_CUPTI"] == "1"


def test_with_the_real_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(operators, "WARM_S", 0.0)
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    program = Program()
    made: list[MixReport] = []
    for _ in range(30):
        optimizer.zero_grad()
        net(torch.ones(6, 3, 8, 8)).sum().backward()
        optimizer.step()
        made += program.run(1)
    (mix,) = made
    assert sum(mix.fractions) == pytest.approx(1.0)
    assert fractions(mix).keys() >= {"conv", "gemm", "normalisation", "elementwise"}
    assert (mix.batch_size, mix.step) == (6, 23)
    assert 10 < mix.launches_per_step < 500
    assert not torch.autograd._profiler_enabled()


# -- the report -----------------------------------------------------------------------------------------------------

MIX = MixReport((0.5, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0), 120.0, 23, 8)


@pytest.fixture
def writer(tmp_path: Path) -> ReportWriter:
    return ReportWriter(str(tmp_path), 0)


def test_step_times_and_mix_travel_in_the_report(writer: ReportWriter, tmp_path: Path) -> None:
    writer.write(1, 1.0, 0.0, 0)
    report = read_report(writer.path)
    assert report is not None
    assert (report.step_times_s, report.mix) == ((), None)
    for step in range(2, 200):
        writer.note_step_time(step, float(step))
        writer.write(step, 1.0, 0.0, 0)
    writer.write_mix(MIX)
    report = read_report(writer.path)
    assert report is not None
    assert report.step_times_s == tuple(map(float, range(152, 200)))
    assert report.mix == MIX
    job = CpuEnforcement().report(tmp_path, 2.0)
    assert job.mix == OperatorMix(0.5, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, launches_per_step=120.0, step=23)
    assert (job.batch_size, job.framework, job.recent[0].seconds) == (8, "torch", report.step_times_s)


def test_a_step_time_that_is_not_known_is_left_out(writer: ReportWriter) -> None:
    for step, seconds in ((1, 0.0), (2, 0.1), (3, 0.0), (4, 0.3)):
        writer.note_step_time(step, seconds)
    writer.write(4, 1.0, 0.0, 0)
    report = read_report(writer.path)
    assert report is not None
    assert report.step_times_s == (0.1, 0.3)


def test_a_report_of_version_1_is_read_and_one_of_a_newer_version_is_not(writer: ReportWriter) -> None:
    writer.note_step_time(2, 0.1)
    writer.write(2, 1.0, 0.5, 3)
    path = Path(writer.path)
    data = path.read_bytes()
    first = struct.pack("<8sII", reportfile.MAGIC, 1, 48) + data[16:200]
    path.write_bytes(first)
    report = read_report(writer.path)
    assert report is not None
    assert (report.steps, report.throttled_s, report.step_times_s, report.mix) == (2, 0.5, (), None)
    for changed in (struct.pack("<8sII", reportfile.MAGIC, 3, 48) + data[16:], first + b"more", data[:-8]):
        path.write_bytes(changed)
        assert read_report(writer.path) is None
