"""What a workload's time on the device goes to, by class of operator, from a short window of torch's profiler."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

CLASSES = (
    "gemm",
    "conv",
    "attention",
    "elementwise",
    "normalisation",
    "reduce",
    "memcpy",
    "collective",
    "other",
)

# Parts of the lower-case names of operators (CPU) and kernels (GPU). The first class with a match takes the name: a
# convolution's kernel may call itself an implicit gemm, and attention is made of softmax and gemm.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("collective", ("nccl", "allreduce", "all_reduce", "c10d")),
    ("attention", ("attention", "flash", "fmha")),
    ("conv", ("conv", "fprop", "dgrad", "wgrad", "winograd", "im2col", "col2im")),
    ("gemm", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "addmm", "::mm", "bmm", "matmul", "linear")),
    ("memcpy", ("memcpy", "memset", "copy", "contiguous", "clone", "::cat", "nchwtonhwc", "nhwctonchw", "zero_")),
    ("normalisation", ("batch_norm", "batchnorm", "layer_norm", "layernorm", "bn_fw", "bn_bw", "gammabeta")),
    ("reduce", ("reduce", "softmax", "pool", "::sum", "::mean", "nll_loss", "argmax", "multinomial", "::std", "::var")),
    (
        "elementwise",
        (
            "elementwise", "pointwise", "multi_tensor", "foreach", "adam", "sgd", "unrolled",
            "::add", "::sub", "::mul", "::div", "::rsub", "::neg", "::sqrt", "::exp", "::lerp", "::clamp", "::where",
            "relu", "silu", "gelu", "tanh", "sigmoid", "threshold", "hardtanh", "dropout", "cross_entropy", "smooth_l1",
        ),
    ),
)  # fmt: skip


def class_of(name: str) -> str:
    """The class of an operator or kernel, by its name."""
    lowered = name.lower()
    for operator_class, parts in _PATTERNS:
        if any(part in lowered for part in parts):
            return operator_class
    return "other"


def profiled(step: Callable[[], object], synchronize: Callable[[], None], steps: int, device: str) -> dict[str, Any]:
    """Profile ``steps`` steps.

    Args:
        step: Makes one step.
        synchronize: Waits for the device.
        steps: How many.
        device: ``"cuda"`` counts the kernels' time on the GPU, ``"cpu"`` the operators' own time on the CPU.

    Returns:
        ``fractions``: class → fraction of the time (None when no time was seen); ``launches_per_step``: kernels, on the
        CPU calls of operators; ``seconds``: how long the window took.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps {steps} is not accepted; give 1 or more")
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        os.environ["TEARDOWN_CUPTI"] = "1"  # or every later step would stay slower
    synchronize()
    began = time.monotonic()
    with profile(activities=activities, acc_events=True) as window:
        for _ in range(steps):
            step()
        synchronize()
    seconds = time.monotonic() - began
    times, launches = _totals(window, device)
    del window
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the recorded events would count as the workload's memory from now on
    total = sum(times.values())
    return {
        "fractions": {each: spent / total if total else None for each, spent in times.items()},
        "launches_per_step": launches / steps if total else None,
        "seconds": seconds,
    }


def _totals(window: profile, device: str) -> tuple[dict[str, float], int]:
    """Time by class (µs), and the number of launches."""
    times = dict.fromkeys(CLASSES, 0.0)
    launches = 0
    for row in window.key_averages():
        if row.is_user_annotation:  # a name for a stretch of time, whose operators are counted themselves
            continue
        if device == "cuda":
            if row.device_type.name != "CUDA":
                continue
            spent, counts = row.self_device_time_total, not row.key.startswith(("Memcpy", "Memset"))
        else:
            spent, counts = row.self_cpu_time_total, row.key.startswith("aten::")
        times[class_of(row.key)] += spent
        launches += row.count if counts else 0
    return times, launches
