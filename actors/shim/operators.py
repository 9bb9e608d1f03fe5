"""Which operators a job uses: torch's profiler for a few steps, now and then, from outside the program.

A profile is made once after the warm-up, and again when the time of a step has changed markedly. It slows down the
steps it covers, and reading it takes a moment. torch is not imported here: a program that steps has it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Any

from .reportfile import CLASSES, MixReport

WARM_STEPS = 20
WARM_S = 5.0
PROFILED_STEPS = 3
PROFILED_S = 0.5  # or fewer steps, when they take this long: a profile grows with what happens in it
PAUSE_S = 60.0
BLOCK_STEPS = 20
CHANGE = 1.5  # factor
MOST_PROFILES = 20

# Parts of operators' and kernels' names in lower case; the first class with a match counts. The order decides where a
# name speaks of two things: the kernel of a convolution may be an implicit gemm, attention is made of gemm and softmax.
_NAMES = (
    ("collective", ("nccl", "c10d", "allreduce", "all_reduce", "allgather", "reduce_scatter")),
    ("attention", ("attention", "flash", "fmha")),
    ("conv", ("conv", "fprop", "dgrad", "wgrad", "winograd", "im2col", "col2im")),
    ("gemm", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "addmm", "::mm", "bmm", "matmul", "linear")),
    ("memcpy", ("memcpy", "memset", "copy", "contiguous", "clone", "::cat", "nchwtonhwc", "nhwctonchw", "zero_")),
    ("normalisation", ("norm", "bn_fw", "bn_bw", "rowwisemoments", "gammabeta", "welford")),
    ("reduce", ("reduce", "softmax", "pool", "::sum", "::mean", "nll_loss", "argmax", "multinomial", "::std", "::var")),
    ("elementwise", (
        "elementwise", "pointwise", "multi_tensor", "foreach", "unrolled", "adam", "sgd", "dropout",
        "::add", "::sub", "::rsub", "::mul", "::div", "::neg", "::sqrt", "::exp", "::lerp", "::clamp", "::where",
        "relu", "silu", "gelu", "tanh", "sigmoid", "threshold", "cross_entropy", "smooth_l1",
    )),
)  # fmt: skip
_Range = tuple[int, int, int, str]  # thread, start, duration times -1 (so that the outer of two sorts first), class
_NO_OPERATORS = ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.")  # ranges that programs mark


def class_of(name: str) -> str:
    """Return the class of an operator or kernel."""
    lowered = name.lower()
    for operator_class, parts in _NAMES:
        if any(part in lowered for part in parts):
            return operator_class
    return "other"


class OperatorProfile:
    """Makes profiles at the boundaries of steps. Called by one thread at a time, at every step.

    Whatever goes wrong ends the profiling, with a line on stderr, and nothing else.

    Attributes:
        disturbs: Whether the round that has just ended, or the next, is slower for it.
    """

    def __init__(self) -> None:
        self.disturbs = False
        self._profiler: Any = None
        self._thread = 0
        self._input = _FirstInput()
        self._began = (0, 0.0)  # step and time at which the present profile began
        self._made = 0
        self._first_s: float | None = None
        self._made_s = 0.0
        self._block: list[float] = []
        self._usual_s: float | None = None  # time of a step when the last profile was made
        self._changed_blocks = 0
        self._over = False

    def on_round(self, step: int, now: float, took_s: float) -> MixReport | None:
        """Go on after a step; returns a profile when one is complete.

        Args:
            step: The number of the step that has ended.
            now: Monotonic seconds.
            took_s: How long it took, without the time the process was held back.
        """
        self.disturbs = self._profiler is not None
        if self._over:
            return None
        try:
            if self._profiler is None:
                self._follow(now, took_s)
                if self._due(step, now):
                    self._start(step, now)
            elif self._complete(step, now) and threading.get_ident() == self._thread:
                return self._stop(step, now)
        except Exception as error:  # noqa: BLE001 - nothing here may disturb the program
            self._give_up(error)
        return None

    def _due(self, step: int, now: float) -> bool:
        if self._first_s is None:
            self._first_s = now
        if self._made == 0:
            return step >= WARM_STEPS and now - self._first_s >= WARM_S
        return self._made < MOST_PROFILES and self._changed_blocks >= 2 and now - self._made_s >= PAUSE_S

    def _complete(self, step: int, now: float) -> bool:
        return step - self._began[0] >= PROFILED_STEPS or now - self._began[1] >= PROFILED_S

    def _follow(self, now: float, took_s: float) -> None:
        """Notice when steps take much more or less time than when the last profile was made."""
        self._block.append(took_s)
        if self._made == 0 or len(self._block) < BLOCK_STEPS:
            del self._block[:-BLOCK_STEPS]
            return
        mean_s = sum(self._block) / len(self._block)
        self._block.clear()
        if self._usual_s is None:
            self._usual_s = mean_s
        changed = not self._usual_s / CHANGE <= mean_s <= self._usual_s * CHANGE
        self._changed_blocks = self._changed_blocks + 1 if changed else 0

    def _start(self, step: int, now: float) -> None:
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
            return  # the program is profiling itself: next time
        os.environ.setdefault("TEARDOWN_CUPTI", "1")  # or every later step would stay slower on a GPU
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        profiler = torch.autograd.profiler.profile(use_device="cuda" if uses_gpu else None, use_kineto=True)
        profiler.__enter__()
        self._profiler, self._thread = profiler, threading.get_ident()
        atexit.register(self._abandon)
        self._began = (step, now)
        self._input.watch(torch)
        self.disturbs = True

    def _stop(self, step: int, now: float) -> MixReport | None:
        profiler, self._profiler = self._profiler, None
        atexit.unregister(self._abandon)
        batch_size = self._input.unwatch()
        profiler.__exit__(None, None, None)
        self._made += 1
        self._made_s, self._usual_s, self._changed_blocks = now, None, 0
        self._block.clear()
        return summary(profiler.kineto_results.events(), step - self._began[0], step, batch_size)

    def _abandon(self) -> None:
        """The program ends in the middle of a profile: torch would complain on stderr if it were left open."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and threading.get_ident() == self._thread:
            with contextlib.suppress(Exception):
                profiler.__exit__(None, None, None)

    def _give_up(self, error: Exception) -> None:
        self._over = True
        self._profiler = None
        if sys.stderr is not None:
            sys.stderr.write(f"cotenant: the operators of this process are not profiled: {error!r}\n")


class _FirstInput:
    """Sees what the first module is given that is called with a tensor: its leading dimension is the batch size."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._tensor: Any = None
        self._seen = 0

    def watch(self, torch: Any) -> None:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and dynamo.utils.counters["frames"]:
            return  # a hook would make compiled programs compile again
        self._seen, self._tensor = 0, torch.Tensor
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._look)

    def unwatch(self) -> int:
        """Return the batch size; 0 when it is not known."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        return self._seen

    def _look(self, _module: object, inputs: Any) -> None:
        given = inputs[0] if isinstance(inputs, tuple) and inputs else None
        if not self._seen and isinstance(given, self._tensor) and given.dim() > 1:
            self._seen = int(given.shape[0])


def summary(events: Any, steps: int, step: int, batch_size: int) -> MixReport | None:
    """Add up the events of a profile; None when they took no time.

    Args:
        events: As torch's tracer gives them: ranges on the CPU, which nest, and kernels.
        steps: The number of steps they are of.
        step: The step at which the profile ended.
        batch_size: As observed; 0 = not known.
    """
    ranges: list[_Range] = []
    times = dict.fromkeys(CLASSES, 0.0)
    classes: dict[str, str] = {}
    kernels = operators = 0
    kernel_ns = 0.0
    for event in events:
        name, duration_ns = event.name(), event.duration_ns()
        operator_class = classes.get(name) or classes.setdefault(name, class_of(name))
        if event.device_type().name == "CPU":
            if not name.startswith(_NO_OPERATORS):
                ranges.append((event.start_thread_id(), event.start_ns(), -duration_ns, operator_class))
                operators += name.startswith("aten::")
        else:
            times[operator_class] += duration_ns
            kernel_ns += duration_ns
            kernels += not name.startswith(("Memcpy", "Memset"))
    if not kernel_ns:
        _add_own_times(ranges, times)
    total = sum(times.values())
    if total <= 0.0:
        return None
    launches = (kernels if kernel_ns else operators) / steps
    return MixReport(tuple(times[each] / total for each in CLASSES), launches, step, batch_size)


def _add_own_times(ranges: list[_Range], times: dict[str, float]) -> None:
    """Add the time of each range, without that of the ranges inside it on the same thread, to its class."""
    ranges.sort()
    inside: list[tuple[int, int, str]] = []  # thread, end, class
    for thread, start_ns, minus_ns, operator_class in ranges:
        while inside and (inside[-1][0] != thread or inside[-1][1] <= start_ns):
            inside.pop()
        if inside:
            times[inside[-1][2]] += minus_ns
        inside.append((thread, start_ns - minus_ns, operator_class))
        times[operator_class] -= minus_ns
    for each, time_ns in times.items():
        times[each] = max(0.0, time_ns)
