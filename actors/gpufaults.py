"""Which GPUs of a host cannot be used, in words that stay the same: every change of them is an event that is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.jobrecords import Exited

NO_REASON = "the GPU is lost"
REST_S, MAX_REST_S = 10.0, 600.0  # doubles with every loss in a row, from the second on
HEALTHY_S = 300.0  # one that was used for so long has not been lost in a row


@dataclass(slots=True)
class _Past:
    """What is remembered of a GPU that was lost: how often in a row, and since when it answers, or is used, again."""

    losses: int = 0
    since_s: float | None = None

    def rest_s(self) -> float:
        """For how long it has to answer before it is used again: not at all when it was lost for the first time."""
        return 0.0 if self.losses < 2 else min(MAX_REST_S, REST_S * 2.0 ** (self.losses - 2))


class GpuFaults:
    """Remembers why each GPU was lost; a driver that says how long it has been silent says something new each time.

    Every loss costs the jobs there a start, and a few of them cost them all that they have. So one that is lost again
    soon after it was used again has to answer for a while first.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        back: Those that could not be used at the update before, and can be now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.back: frozenset[str] = frozenset()
        self._clock = clock
        self._faults: dict[str, str] = {}
        self._past: dict[str, _Past] = {}

    def update(self, readings: Iterable[DeviceSample]) -> Mapping[str, str]:
        """Take in the newest readings; return GPU id → fault of those that must not be used."""
        before, now = self._faults, self._clock()
        self._faults = {
            device.gpu_id: why for device in readings if (why := self._look(device, before.get(device.gpu_id), now))
        }
        self.back = frozenset(before.keys() - self._faults.keys())
        return self._faults

    def _look(self, device: DeviceSample, known: str | None, now: float) -> str:
        """Say why a GPU must not be used; empty when it may."""
        past = self._past.setdefault(device.gpu_id, _Past()) if device.lost else self._past.get(device.gpu_id)
        if past is None:
            return ""  # it was never lost
        if known is None:
            if not device.lost:
                return ""
            healthy = past.since_s is None or now - past.since_s > HEALTHY_S
            past.losses = 1 if healthy else past.losses + 1
            known = device.note or NO_REASON
            if past.rest_s():
                known += f"; lost {past.losses} times in a row: it is used once it has answered for {past.rest_s():g} s"
        if device.lost:
            past.since_s = None
        elif past.since_s is None:
            past.since_s = now
        if past.since_s is None or now - past.since_s < past.rest_s():
            return known
        past.since_s = now  # from now on it is used
        return ""


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
