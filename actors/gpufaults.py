"""Which GPUs of a host cannot be used, in words that stay the same: every change of them is an event that is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.jobrecords import Exited

NO_REASON = "the GPU is lost"


class GpuFaults:
    """Remembers why each GPU was lost; a driver that says how long it has been silent says something new each time.

    Attributes:
        back: Those that were lost at the update before, and are no more.
    """

    def __init__(self) -> None:
        self.back: frozenset[str] = frozenset()
        self._faults: dict[str, str] = {}

    def update(self, readings: Iterable[DeviceSample]) -> Mapping[str, str]:
        """Take in the newest readings; return GPU id → fault of those that must not be used."""
        before = self._faults
        self._faults = {
            device.gpu_id: before.get(device.gpu_id) or device.note or NO_REASON for device in readings if device.lost
        }
        self.back = frozenset(before.keys() - self._faults.keys())
        return self._faults


def judged(ended: Exited, gpu_ids: Collection[str], readings: Iterable[DeviceSample]) -> Exited:
    """Return how a job has ended: one that failed by itself on a GPU that is lost by now was let down by its host.

    Args:
        ended: How it looks from its processes.
        gpu_ids: Its GPUs on this host.
        readings: The newest of the host's devices.
    """
    if ended.exit_code == 0 or ended.lost or ended.stopped:
        return ended
    lost = [device for device in readings if device.lost and device.gpu_id in gpu_ids]
    if not lost:
        return ended
    why = "; ".join(f"GPU {device.gpu_id}: {device.note or NO_REASON}" for device in lost)
    return replace(ended, lost=True, reason=f"{why}; it ended with {ended.exit_code}")
