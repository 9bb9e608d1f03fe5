"""Whether a GPU can be used: what the driver asks for, and XID errors."""

from __future__ import annotations

from typing import Any

from cotenant.actors.devices.nvml.counters import RECOVERY_ACTION, REMAP_FAILED, UNCORRECTED_ERRORS, Counters
from cotenant.actors.devices.nvml.library import TIMEOUT, Asker

XID_EVENT = 8  # nvmlEventTypeXidCriticalError
# XID errors after which a GPU computes nothing right until it is reset (NVIDIA's XID catalogue: reset or restart).
# The others are a program's own doing, or were dealt with (13, 31, 43, 45, 63, 68, 94 ...): the program ends by itself.
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered memory error",
    143: "GPU initialisation failed",
}
_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "that peer-to-peer work is drained",
    4: "that the GPU is drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of the bus",
    7: "a reboot of the system",
}
# Why clocks are held down (nvmlClocksEventReason*). Not here: idle, and clocks that somebody has set.
_SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
_WAIT_MS = 0
_MOST_A_LOOK = 8
_KEPT_XIDS = 4


class Health:
    """Errors of one GPU since it was opened.

    Attributes:
        xids: The newest different XID errors, oldest first, bounded.
    """

    def __init__(self, asker: Asker, handle: Any, module: Any) -> None:
        self.xids: list[int] = []
        self._asker = asker
        self._fatal: int | None = None
        self._errors_before: int | None = None
        self._events = asker.ask("nvmlEventSetCreate")
        if self._events is not None:
            asker.ask("nvmlDeviceRegisterEvents", handle, module.nvmlEventTypeXidCriticalError, self._events)
            if "nvmlDeviceRegisterEvents" in asker.failures:
                self.close()

    @property
    def tells_xids(self) -> bool:
        """Whether XID errors are told."""
        return self._events is not None

    def look(self) -> None:
        """Take note of the XID errors that happened since the last look."""
        for _ in range(_MOST_A_LOOK):
            if self._events is None:
                return
            event = self._asker.ask("nvmlEventSetWait", self._events, _WAIT_MS, usual=(TIMEOUT,))
            if event is None:
                return
            if event.eventType == XID_EVENT:
                self._take(int(event.eventData))

    def _take(self, xid: int) -> None:
        self.xids = [*(other for other in self.xids if other != xid), xid][-_KEPT_XIDS:]
        if xid in FATAL_XIDS and self._fatal is None:
            self._fatal = xid

    def fault(self, counters: Counters) -> str:
        """Return why the GPU must not be used; empty when it may."""
        action = counters.newest(RECOVERY_ACTION)
        if action:
            return f"the driver asks for {_ACTIONS.get(action, f'recovery action {action}')}"
        if self._fatal is not None and action is None:
            # Drivers that tell the action also tell when it is done; for others only a new start of the GPU does.
            return f"XID {self._fatal} ({FATAL_XIDS[self._fatal]}): the GPU must be reset"
        return ""

    def notes(self, counters: Counters) -> list[str]:
        """Return what is worth knowing though the GPU can be used."""
        notes = [f"XID {xid}" for xid in self.xids]
        errors = counters.newest(UNCORRECTED_ERRORS)
        if errors is not None and self._errors_before is None:
            self._errors_before = errors
        if errors is not None and self._errors_before is not None and errors > self._errors_before:
            notes.append(f"{errors - self._errors_before} uncorrected memory errors")
        if counters.newest(REMAP_FAILED):
            notes.append("memory rows could not be remapped: the board should be replaced")
        return notes

    def close(self) -> None:
        """Give the event set back."""
        if self._events is not None:
            events, self._events = self._events, None
            self._asker.ask("nvmlEventSetFree", events)


def slowdowns(reasons: int | None) -> str:
    """Say why the clocks are held down; empty when they are not, or nobody knows."""
    words = [word for bit, word in _SLOWDOWNS.items() if reasons and reasons & bit]
    return f"clocks held down: {', '.join(words)}" if words else ""
