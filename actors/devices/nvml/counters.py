"""Counters of a whole GPU that only grow: bytes over PCIe and NVLink, energy, memory errors."""

from __future__ import annotations

from typing import Any, NamedTuple

from cotenant.actors.devices.nvml.bounds import MAX_BYTES, MAX_W, bounded
from cotenant.actors.devices.nvml.library import SUCCESS, Asker, fields_of
from cotenant.forecasting.types import Reading

# NVML's numbers of the field values (nvml.h). nvmlDeviceGetPcieThroughput is never used: it blocks for 20 ms.
PCIE_TX, PCIE_RX = 197, 198  # bytes sent and received by the GPU
NVLINK_TX, NVLINK_RX = 138, 139  # KiB of payload
UNCORRECTED_ERRORS = 4  # double-bit errors since the driver was loaded
REMAP_FAILED = 145
RECOVERY_ACTION = 230  # what the driver says must be done about the GPU; 0 = nothing
ALL_LINKS = 0xFFFF_FFFF
_FIELDS: tuple[int | tuple[int, int], ...] = (
    PCIE_TX,
    PCIE_RX,
    (NVLINK_TX, ALL_LINKS),
    (NVLINK_RX, ALL_LINKS),
    UNCORRECTED_ERRORS,
    REMAP_FAILED,
    RECOVERY_ACTION,
)
_UNSIGNED_INT = 1
_KINDS = {0: "dVal", _UNSIGNED_INT: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}  # nvmlValueType_t
_RATES = {
    PCIE_TX: ("pcie_tx_bytes_s", 1),
    PCIE_RX: ("pcie_rx_bytes_s", 1),
    NVLINK_TX: ("nvlink_tx_bytes_s", 1024),
    NVLINK_RX: ("nvlink_rx_bytes_s", 1024),
}
_WRAP = 1 << 32
_ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


class Field(NamedTuple):
    """A field value, and whether its counter wraps at 32 bits."""

    value: int
    narrow: bool


class Counters:
    """The counters of one GPU, as rates since the last reading.

    Args:
        module: nvidia-ml-py.
    """

    def __init__(self, module: Any) -> None:
        self._field = fields_of(module.c_nvmlFieldValue_t, "fieldId", "nvmlReturn", "valueType", "value")
        self._at_s: float | None = None
        self._fields: dict[int, Field] = {}
        self._energy_mj: int | None = None

    def read(self, asker: Asker, handle: Any, now_s: float) -> dict[str, Reading]:
        """Return the rates since the last reading that are known: bytes per second, and ``power_w``.

        Raises:
            NvmlFailure: The GPU is gone.
        """
        fields, energy_mj = self._read_fields(asker, handle), asker.ask(_ENERGY, handle)
        before, self._fields = self._fields, fields
        energy_before, self._energy_mj = self._energy_mj, energy_mj
        then_s, self._at_s = self._at_s, now_s
        if then_s is None or now_s <= then_s:
            return {}
        rates: dict[str, Reading] = {}
        for number, (name, unit) in _RATES.items():
            grown = _grown(before.get(number), fields.get(number))
            if grown is not None:
                rates[name] = bounded(grown * unit / (now_s - then_s), MAX_BYTES)
        if energy_before is not None and energy_mj is not None and energy_mj > energy_before:
            rates["power_w"] = bounded((energy_mj - energy_before) / 1e3 / (now_s - then_s), MAX_W)
        return rates

    def newest(self, number: int) -> int | None:
        """Return a field value as last read; None when it is not told."""
        field = self._fields.get(number)
        return None if field is None else field.value

    def _read_fields(self, asker: Asker, handle: Any) -> dict[int, Field]:
        """The field values that the GPU tells, by number. Each has a return code of its own."""
        values = asker.ask("nvmlDeviceGetFieldValues", handle, _FIELDS)
        return {
            number: Field(int(getattr(value, _KINDS[kind])), kind == _UNSIGNED_INT)
            for number, code, kind, value in map(self._field, values or ())
            if code == SUCCESS and kind in _KINDS
        }


def _grown(before: Field | None, after: Field | None) -> int | None:
    """How much a counter grew; a narrow one wraps at most once between two readings."""
    if before is None or after is None:
        return None
    grown = after.value - before.value
    if grown < 0 and after.narrow:
        grown += _WRAP
    return grown if grown >= 0 else None  # it began anew, for example with the GPU
