"""Reading one GPU through NVML (``nvidia-ml-py``), where a missing, absurd or hanging answer is an ordinary answer.

Every reading that fails is None, and why is noted once under the function's name. All calls go through a watchdog.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

from cotenant.actors.devices.nvml.bounds import MAX_C, MAX_MHZ, MAX_W, bounded, fraction, used_bytes
from cotenant.actors.devices.nvml.processes import union
from cotenant.actors.devices.nvml.watchdog import Hung, Watchdog

CALL_TIMEOUT_S = 5.0
GPM_INTERVAL_S = 0.12  # two samples less than 100 ms apart are refused
# NVML's numbers of the counters used here (nvml.h): percentages of the possible.
GPM_METRICS = {"sm_active": 2, "tensor_active": 5, "membw_util": 10, "fp32_active": 12}
PCIE_TX, PCIE_RX = 197, 198  # field values: bytes sent and received by the GPU
_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG = 1, 2, 3
_CLOCK_SM = 1
_TEMPERATURE_GPU = 0


class NvmlUnavailable(RuntimeError):
    """NVML cannot be used here; says why."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters that only grow, at ``at_s`` (monotonic clock): energy in J, PCIe bytes; None = not given."""

    at_s: float
    energy_j: float | None
    tx_bytes: int | None
    rx_bytes: int | None
    narrow: bool  # the PCIe counters wrap at 32 bits


@dataclass(frozen=True, slots=True)
class Tick:
    """One reading of the device and of the processes on it.

    Attributes:
        util: Process number → share of the device over the driver's last sampling period, new samples only.
        memory: Process number → bytes; None when the lists were not read in this tick or cannot be read.
    """

    counters: Counters
    device_util: float | None
    power_w: float | None
    clock_mhz: float | None
    temperature_c: float | None
    gpm: dict[str, float | None]
    util: dict[int, float]
    memory: dict[int, int | None] | None


@dataclass(slots=True)
class _Gpm:
    """Two sample buffers of the performance counters, used in turn."""

    older: Any
    newer: Any
    taken_s: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)


class GpuReader:
    """One GPU. Any method may raise ``Hung``; after that every call does.

    Args:
        selector: UUID or index of the GPU; None = the first.

    Raises:
        NvmlUnavailable: No nvidia-ml-py, no driver, versions that do not match, no such GPU.
    """

    def __init__(self, selector: str | None = None, timeout_s: float = CALL_TIMEOUT_S) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable("nvidia-ml-py is not installed") from error
        self._errors = (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError)
        self._timeout_s = timeout_s
        self._seen_us = 0
        self._gpm: _Gpm | None = None
        self.notes: dict[str, str] = {}
        self._watchdog = Watchdog("NVML")
        try:
            self._handle = self._watchdog.call(timeout_s, self._open, selector)
        except Hung as error:
            raise NvmlUnavailable(str(error)) from error

    @property
    def cost_s(self) -> float:
        """CPU time that NVML calls took so far."""
        return self._watchdog.cost_s

    def identity(self) -> dict[str, Any]:
        """Name, UUID, memory, versions, modes and power limits (W) of the GPU; None where not given."""
        return self._watchdog.call(self._timeout_s, self._identity)

    def tick(self, with_memory: bool) -> Tick:
        """Read everything that changes; ``with_memory`` asks for the process lists too."""
        return self._watchdog.call(self._timeout_s, self._tick, with_memory)

    def process_memory(self) -> dict[int, int | None] | None:
        """Bytes per process, MPS clients included; a process whose memory is not told has None."""
        return self._watchdog.call(self._timeout_s, self._memory)

    def gpm_supported(self) -> bool | None:
        """Whether the GPU has performance counters (Hopper and later)."""
        return self._watchdog.call(self._timeout_s, self._gpm_supported)

    def power_limits_w(self) -> tuple[float, float, float] | None:
        """The power limit and the lowest and highest that may be set, in W."""
        return self._watchdog.call(self._timeout_s, self._power_limits)

    def close(self) -> None:
        """Let go of the library; never blocks for longer than one call may take."""
        try:
            self._watchdog.call(self._timeout_s, self._shut)
        except Hung:
            return  # its thread is stuck in the driver and stays
        self._watchdog.close()

    # What follows runs in the watchdog's thread.

    def _ask(self, name: str, *args: Any) -> Any:
        """Call one function of the library; None and a note when it fails or does not exist."""
        function = getattr(self._nvml, name, None)
        if function is None:
            self.notes.setdefault(name, "this nvidia-ml-py does not know it")
            return None
        try:
            return function(*args)
        except self._errors as error:
            self.notes.setdefault(name, str(error))
            return None

    def _open(self, selector: str | None) -> Any:
        try:
            self._nvml.nvmlInit()
        except self._errors as error:
            raise NvmlUnavailable(f"NVML cannot be started: {error}") from error
        try:
            if selector is None or selector.isdecimal():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(selector or 0))
            return self._nvml.nvmlDeviceGetHandleByUUID(selector)
        except self._errors as error:
            self._ask("nvmlShutdown")
            raise NvmlUnavailable(f"GPU {selector or 0}: {error}") from error

    def _shut(self) -> None:
        if self._gpm is not None:
            self._ask("nvmlGpmSampleFree", self._gpm.older)
            self._ask("nvmlGpmSampleFree", self._gpm.newer)
            self._gpm = None
        self._ask("nvmlShutdown")

    def _identity(self) -> dict[str, Any]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        cuda = self._ask("nvmlSystemGetCudaDriverVersion")
        mig = self._ask("nvmlDeviceGetMigMode", self._handle)
        limits = self._power_limits()
        return {
            "gpu_type": self._ask("nvmlDeviceGetName", self._handle),
            "gpu_uuid": self._ask("nvmlDeviceGetUUID", self._handle),
            "memory_bytes": None if memory is None else used_bytes(memory.total, None),
            "driver": self._ask("nvmlSystemGetDriverVersion"),
            "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "compute_mode": self._ask("nvmlDeviceGetComputeMode", self._handle),
            "mig": None if mig is None else bool(mig[0]),
            "power_limit_w": None if limits is None else limits[0],
        }

    def _power_limits(self) -> tuple[float, float, float] | None:
        limit = self._ask("nvmlDeviceGetPowerManagementLimit", self._handle)
        ends = self._ask("nvmlDeviceGetPowerManagementLimitConstraints", self._handle)
        if limit is None or ends is None:
            return None
        return limit / 1000, ends[0] / 1000, ends[1] / 1000

    def _tick(self, with_memory: bool) -> Tick:
        rates = self._ask("nvmlDeviceGetUtilizationRates", self._handle)
        power = self._ask("nvmlDeviceGetPowerUsage", self._handle)
        clock = self._ask("nvmlDeviceGetClockInfo", self._handle, _CLOCK_SM)
        temperature = self._ask("nvmlDeviceGetTemperature", self._handle, _TEMPERATURE_GPU)
        return Tick(
            counters=self._counters(),
            device_util=None if rates is None else fraction(rates.gpu),
            power_w=None if power is None else bounded(power / 1000, MAX_W),
            clock_mhz=None if clock is None else bounded(clock, MAX_MHZ),
            temperature_c=None if temperature is None else bounded(temperature, MAX_C),
            gpm=self._read_gpm(),
            util=self._process_util(),
            memory=self._memory() if with_memory else None,
        )

    def _counters(self) -> Counters:
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        fields = self._ask("nvmlDeviceGetFieldValues", self._handle, [PCIE_TX, PCIE_RX])
        tx, rx = (None, None) if fields is None else (self._field(fields[0]), self._field(fields[1]))
        narrow = fields is not None and fields[0].valueType == _UNSIGNED_INT
        at_s = time.monotonic()
        return Counters(at_s, None if energy_mj is None else energy_mj / 1000, tx, rx, narrow)

    def _field(self, value: Any) -> int | None:
        """A field value; each has a return code of its own."""
        if value.nvmlReturn != 0:
            self.notes.setdefault(f"field value {value.fieldId}", str(self._nvml.NVMLError(value.nvmlReturn)))
            return None
        kinds = {_UNSIGNED_INT: "uiVal", _UNSIGNED_LONG: "ulVal", _UNSIGNED_LONG_LONG: "ullVal"}
        kind = kinds.get(value.valueType)
        if kind is None:
            self.notes.setdefault(f"field value {value.fieldId}", f"value type {value.valueType} is not known")
            return None
        return int(getattr(value.value, kind))

    def _process_util(self) -> dict[int, float]:
        """Shares of the device per process since the last call. The driver samples slowly: nothing new is no error."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except self._nvml.NVMLError_NotFound:
            return {}
        except self._nvml.NVMLError_InsufficientSize:
            return {}  # processes appeared between its two calls; the next tick asks again
        except self._errors as error:
            # nvidia-ml-py raises its error number 0 (success) when there is no process at all.
            if getattr(error, "value", None) != 0:
                self.notes.setdefault("nvmlDeviceGetProcessUtilization", str(error))
            return {}
        newest: dict[int, tuple[int, float]] = {}
        for sample in samples:
            share = fraction(sample.smUtil)
            if share is None or sample.timeStamp <= self._seen_us:
                continue
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0.0)), (sample.timeStamp, share))
        self._seen_us = max([self._seen_us, *(stamp for stamp, _ in newest.values())])
        return {pid: share for pid, (_, share) in newest.items()}

    def _memory(self) -> dict[int, int | None] | None:
        """The union of the two lists: clients of MPS may be in either, or in both."""
        lists = [
            self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle),
            self._ask("nvmlDeviceGetMPSComputeRunningProcesses", self._handle),
        ]
        if all(found is None for found in lists):
            return None
        total = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        listed = ((process.pid, process.usedGpuMemory) for found in lists for process in found or ())
        return union(listed, None if total is None else total.total)

    def _gpm_supported(self) -> bool | None:
        support = self._ask("nvmlGpmQueryDeviceSupport", self._handle)
        return None if support is None else bool(support.isSupportedDevice)

    def _read_gpm(self) -> dict[str, float | None]:
        """The counters' means since the sample before; {} when none is due, or when the GPU has none."""
        if self._gpm is None and ("GPM" in self.notes or not self._start_gpm()):
            return {}
        gpm = self._gpm
        if gpm is None or (gpm.taken_s is not None and time.monotonic() - gpm.taken_s < GPM_INTERVAL_S):
            return {}
        gpm.older, gpm.newer = gpm.newer, gpm.older
        first = gpm.taken_s is None
        if self._ask("nvmlGpmSampleGet", self._handle, gpm.newer) is None:
            gpm.taken_s = None  # begin anew: the older sample may be far in the past
            return {}
        gpm.taken_s = time.monotonic()
        return {} if first else self._gpm_metrics(gpm)

    def _start_gpm(self) -> bool:
        if not self._gpm_supported():
            self.notes["GPM"] = "this GPU has no performance counters that NVML reads"
            return False
        older, newer = self._ask("nvmlGpmSampleAlloc"), self._ask("nvmlGpmSampleAlloc")
        if older is None or newer is None:
            self.notes["GPM"] = "sample buffers were refused"
            return False
        self._gpm = _Gpm(older, newer)
        return True

    def _gpm_metrics(self, gpm: _Gpm) -> dict[str, float | None]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = gpm.older, gpm.newer
        for index, number in enumerate(GPM_METRICS.values()):
            request.metrics[index].metricId = number
        if self._ask("nvmlGpmMetricsGet", request) is None:
            return {}
        values: dict[str, float | None] = {}
        for index, name in enumerate(GPM_METRICS):
            metric = request.metrics[index]
            if metric.nvmlReturn != 0:
                self.notes.setdefault(f"GPM {name}", str(self._nvml.NVMLError(metric.nvmlReturn)))
                values[name] = None
            else:
                values[name] = fraction(metric.value)
        return values
