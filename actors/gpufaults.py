"""Which GPUs of a host cannot be used, in words that stay the same: every change of them is an event that is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.actors.devices.base import DeviceSample

NO_REASON = "the GPU is lost"


class GpuFaults:
    """Remembers why each GPU was lost; a driver that says how long it has been silent says something new each time."""

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}

    def update(self, readings: Iterable[DeviceSample]) -> Mapping[str, str]:
        """Take in the newest readings; return GPU id → fault of those that must not be used."""
        self._faults = {
            device.gpu_id: self._faults.get(device.gpu_id) or device.note or NO_REASON
            for device in readings
            if device.lost
        }
        return self._faults
