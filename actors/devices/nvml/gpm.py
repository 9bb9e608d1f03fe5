"""GPM, the performance counters of Hopper and later GPUs: of the device or a MIG instance, never of a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cotenant.actors.devices.nvml.bounds import MAX_BYTES, bounded, fraction
from cotenant.actors.devices.nvml.library import SUCCESS, Asker, NvmlFailure, fields_of
from cotenant.forecasting.types import Reading

INTERVAL_S = 0.12  # NVML refuses two samples that are less than 100 ms apart
# NVML's numbers of the metrics used here (nvml.h). The first group are percentages, the second MiB per second.
_PERCENT = {
    "util": 1,
    "sm_active": 2,
    "tensor_active": 5,
    "membw_util": 10,
    "fp64_active": 11,
    "fp32_active": 12,
    "fp16_active": 13,
}
_MIB_S = {"pcie_tx_bytes_s": 20, "pcie_rx_bytes_s": 21, "nvlink_rx_bytes_s": 60, "nvlink_tx_bytes_s": 61}
METRICS = _PERCENT | _MIB_S
_MIB = 1 << 20


def why_not(asker: Asker, module: Any, board: Any, gpu_instance: int | None) -> str:
    """Say why a device has no counters; empty when it has."""
    counters = Gpm(asker, board, gpu_instance)
    counters.read(module, 0.0)
    counters.close()
    return counters.why_not


class Gpm:
    """The counters of one device; two samples, used in turn.

    Args:
        asker: Asks the device.
        board: Handle of the whole GPU.
        gpu_instance: Number of the MIG GPU instance; None = the whole GPU.

    Attributes:
        why_not: Why there are none; empty when there are, or nobody has looked yet.
        missing: Why single metrics are not told, by name.
    """

    def __init__(self, asker: Asker, board: Any, gpu_instance: int | None) -> None:
        self.why_not = ""
        self.missing: dict[str, str] = {}
        self._asker = asker
        self._board = board
        self._instance = gpu_instance
        self._samples: list[Any] = []
        self._taken_s: float | None = None
        self._request: Any = None
        self._answers: list[tuple[str, Any]] = []  # views of the request's metrics, which the driver fills in
        self._answer: Callable[[Any], tuple[Any, ...]] = tuple

    def read(self, module: Any, now_s: float) -> dict[str, Reading]:
        """Return the means since the last reading; empty when none is due, or there are no counters.

        Args:
            module: nvidia-ml-py.
            now_s: The monotonic clock.

        Raises:
            NvmlFailure: The GPU is gone.
        """
        if self.why_not or not (self._samples or self._start(module)):
            return {}
        if self._taken_s is not None and now_s - self._taken_s < INTERVAL_S:
            return {}
        first = self._taken_s is None
        self._samples.reverse()
        if not self._take():
            self._taken_s = None  # begin anew: the older sample may be far in the past
            return {}
        self._taken_s = now_s
        return {} if first else self._metrics(module)

    def close(self) -> None:
        """Give the samples back."""
        for sample in self._samples:
            self._asker.ask("nvmlGpmSampleFree", sample)
        self._samples = []

    def _start(self, module: Any) -> bool:
        support = self._asker.ask("nvmlGpmQueryDeviceSupport", self._board)
        if support is None or not support.isSupportedDevice:
            self.why_not = self._reason("nvmlGpmQueryDeviceSupport", "this GPU has none (Hopper and later have)")
            return False
        samples = [self._asker.ask("nvmlGpmSampleAlloc") for _ in range(2)]
        if None in samples:
            self.why_not = self._reason("nvmlGpmSampleAlloc", "sample buffers were refused")
            return False
        self._samples = samples
        self._request = module.c_nvmlGpmMetricsGet_t()
        self._request.version = module.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        for index, (name, number) in enumerate(METRICS.items()):
            metric = self._request.metrics[index]
            metric.metricId = number
            self._answers.append((name, metric))
        self._answer = fields_of(module.c_nvmlGpmMetric_t, "nvmlReturn", "value")
        return True

    def _take(self) -> bool:
        name = "nvmlGpmSampleGet" if self._instance is None else "nvmlGpmMigSampleGet"
        part = () if self._instance is None else (self._instance,)
        if self._asker.ask(name, self._board, *part, self._samples[1]) is not None:
            return True
        if not self._asker.can(name):
            self.why_not = self._reason(name, "")
        return False

    def _metrics(self, module: Any) -> dict[str, Reading]:
        request = self._request
        request.sample1, request.sample2 = self._samples
        if self._asker.ask("nvmlGpmMetricsGet", request) is None:
            return {}
        values: dict[str, Reading] = {}
        for name, metric in self._answers:
            code, value = self._answer(metric)
            if code != SUCCESS:  # each has a return code of its own
                self.missing.setdefault(name, str(module.NVMLError(code)))
            elif name in _PERCENT:
                values[name] = fraction(value)
            else:
                values[name] = bounded(value * _MIB, MAX_BYTES)
        return values

    def _reason(self, name: str, otherwise: str) -> str:
        failure: NvmlFailure | None = self._asker.failures.get(name)
        return otherwise if failure is None else str(failure)
