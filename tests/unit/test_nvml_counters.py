"""Counters of a device: how often they are read, what becomes of one that wraps or begins anew."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from cotenant.actors.devices.nvml.counters import NVLINK_TX, PCIE_RX, PCIE_TX, Counters
from cotenant.actors.devices.nvml.gpm import INTERVAL_S, Gpm


class Gpu:
    """A GPU that says what it is told to say, and keeps when it was asked for samples."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sampled: list[float] = []
        self.fails: set[str] = set()
        self.fields: dict[int, tuple[int, int]] = {}  # number -> value, its type
        self.energy_mj: int | None = None

    def can(self, _: str) -> bool:
        return True

    def ask(self, name: str, *args: Any, **_: Any) -> Any:
        return None if name in self.fails else getattr(self, f"_{name}")(*args)

    def _nvmlGpmQueryDeviceSupport(self, _: Any) -> Any:  # noqa: N802 (NVML's names)
        return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=1)

    def _nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        return pynvml.c_nvmlGpmSample_t()

    def _nvmlGpmSampleGet(self, *_: Any) -> int:  # noqa: N802
        self.sampled.append(self.now)
        return 0

    def _nvmlGpmMetricsGet(self, request: Any) -> int:  # noqa: N802
        request.metrics[0].value = 50.0
        return 0

    def _nvmlDeviceGetFieldValues(self, *_: Any) -> list[Any]:  # noqa: N802
        return [self._field(number, *told) for number, told in self.fields.items()]

    def _nvmlDeviceGetTotalEnergyConsumption(self, _: Any) -> int | None:  # noqa: N802
        return self.energy_mj

    def _field(self, number: int, value: int, kind: int) -> Any:
        field = pynvml.c_nvmlFieldValue_t(fieldId=number, nvmlReturn=0, valueType=kind)
        setattr(field.value, "uiVal" if kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else "ullVal", value)
        return field


WIDE, NARROW = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT


def test_performance_counters_are_sampled_no_closer_than_the_driver_accepts() -> None:
    gpu = Gpu()
    gpm = Gpm(gpu, None, None)  # type: ignore[arg-type]
    told = []
    for tenth in range(10):  # somebody looks every 50 ms
        gpu.now = tenth * 0.05
        told.append(gpm.read(pynvml, gpu.now).get("util"))
    assert INTERVAL_S >= 0.12
    assert [round(at, 2) for at in gpu.sampled] == [0.0, 0.15, 0.3, 0.45]
    assert [at for at, util in enumerate(told) if util == 0.5] == [3, 6, 9]


def test_after_a_sample_that_failed_nothing_is_told_of_the_time_before() -> None:
    gpu = Gpu()
    gpm = Gpm(gpu, None, None)  # type: ignore[arg-type]
    told = []
    for second in range(5):
        gpu.fails = {"nvmlGpmSampleGet"} if second == 2 else set()
        told.append(gpm.read(pynvml, float(second)).get("util"))
    assert told == [None, 0.5, None, None, 0.5]


@pytest.mark.parametrize(
    ("number", "kind", "read", "name", "rate"),
    [
        (PCIE_TX, WIDE, (1000, 3000), "pcie_tx_bytes_s", 1000.0),
        (PCIE_RX, WIDE, (1 << 40, (1 << 40) + 10), "pcie_rx_bytes_s", 5.0),
        (NVLINK_TX, WIDE, (0, 4), "nvlink_tx_bytes_s", 2048.0),  # KiB
        (PCIE_TX, NARROW, ((1 << 32) - 100, 100), "pcie_tx_bytes_s", 100.0),  # wraps
        (PCIE_TX, WIDE, (3000, 1000), "pcie_tx_bytes_s", None),  # began anew, for example with the GPU
        (PCIE_TX, WIDE, (0, 1 << 63), "pcie_tx_bytes_s", None),  # absurd
    ],
)
def test_rates_of_byte_counters(number: int, kind: int, read: tuple[int, int], name: str, rate: float | None) -> None:
    gpu, counters = Gpu(), Counters(pynvml)
    gpu.fields[number] = (read[0], kind)
    assert counters.read(gpu, None, 10.0) == {}  # type: ignore[arg-type]
    gpu.fields[number] = (read[1], kind)
    assert counters.read(gpu, None, 12.0).get(name) == rate  # type: ignore[arg-type]


def test_a_counter_that_is_not_told_for_a_while_has_no_rate_over_the_gap() -> None:
    gpu, counters = Gpu(), Counters(pynvml)
    rates = []
    for second, value in enumerate([0, 100, None, 900, 1000]):
        gpu.fields = {} if value is None else {PCIE_TX: (value, WIDE)}
        rates.append(counters.read(gpu, None, float(second)).get("pcie_tx_bytes_s"))  # type: ignore[arg-type]
    assert rates == [None, 100.0, None, None, 100.0]


@pytest.mark.parametrize(("after_mj", "power_w"), [(501_000, 250.0), (1000, None), (500, None), (None, None)])
def test_power_is_energy_over_time(after_mj: int | None, power_w: float | None) -> None:
    gpu, counters = Gpu(), Counters(pynvml)
    gpu.energy_mj = 1000
    counters.read(gpu, None, 0.0)  # type: ignore[arg-type]
    gpu.energy_mj = after_mj
    assert counters.read(gpu, None, 2.0).get("power_w") == power_w  # type: ignore[arg-type]
