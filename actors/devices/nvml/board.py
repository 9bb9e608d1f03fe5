"""One GPU with its MIG instances: opened by UUID, read in passes. Everything here may hang in the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.actors.devices.nvml.bounds import MAX_C, MAX_MHZ, MAX_W, bounded, fraction, used_bytes
from cotenant.actors.devices.nvml.counters import Counters
from cotenant.actors.devices.nvml.gpm import Gpm
from cotenant.actors.devices.nvml.health import Health, slowdowns
from cotenant.actors.devices.nvml.library import Asker, Library, NvmlFailure
from cotenant.actors.devices.nvml.processes import Held, UtilisationHold, read_memory, utilisation_is_told
from cotenant.forecasting.types import DeviceActivity, Reading

# How often what is read that is not in every pass. Process lists are read at once when the memory in use has changed.
LISTS_S, GPM_S, COUNTERS_S, SLOW_S = 2.0, 0.6, 0.6, 1.0
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0


@dataclass(frozen=True, slots=True)
class Readings:
    """What one device said in a pass.

    Attributes:
        answered: Whether it told its memory, which every GPU does; if not, it may be in trouble.
        util: Fraction of the time in which any kernel ran, in [0, 1].
        memory_bytes: Device memory in use.
        shares: Utilisation by process, NVML's numbers; None = not told by process.
        memory: Device memory by process, None = not told; None as a whole = the lists cannot be read.
        activity: What else was read in this very pass; None = nothing.
        notes: What is worth knowing.
        read_s: When it was said.
        listed_s: When ``memory`` was read.
    """

    answered: bool
    util: Reading = None
    memory_bytes: Reading = None
    shares: dict[int, Held] | None = None
    memory: dict[int, int | None] | None = None
    activity: DeviceActivity | None = None
    notes: tuple[str, ...] = ()
    read_s: float = 0.0
    listed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What a GPU said: its devices' readings by UUID; ``fault`` = it must not be used, and why."""

    at_s: float
    devices: dict[str, Readings] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A device of a GPU: the GPU itself, or a MIG instance with the number of its GPU instance (None = not told)."""

    uuid: str
    mig: bool = False
    gpu_instance: int | None = None


class _Due:
    """When something is to be read again."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._at_s = -1e9

    def __call__(self, now_s: float) -> bool:
        if now_s < self._at_s:
            return False
        self._at_s = now_s + self._period_s * 0.9  # passes come a little early or late
        return True


class _Device:
    """Reads one device of an opened GPU."""

    def __init__(self, library: Library, board: Any, handle: Any, part: Part) -> None:
        self._module = library.module
        self._handle = handle
        self._board = board
        self._part = part
        self._asker = Asker(library)
        self._gpm: Gpm | None = None
        if not part.mig or part.gpu_instance is not None:
            self._gpm = Gpm(self._asker, board, part.gpu_instance)
        self._hold = UtilisationHold(library.module)
        self._memory: dict[int, int | None] | None = None
        self._listed_s = 0.0
        self._used: Reading = None
        self._util: Reading = None
        self._lists_due, self._gpm_due = _Due(LISTS_S), _Due(GPM_S)

    def read(self, now_s: float, other: dict[str, Reading], notes: Sequence[str]) -> Readings:
        """Read it; ``other`` is what was read of the whole GPU."""
        info = self._asker.ask("nvmlDeviceGetMemoryInfo", self._handle)
        total = None if info is None else info.total
        used = None if info is None else used_bytes(info.used, total)
        if self._lists_due(now_s) or used != self._used:
            self._memory, self._listed_s = read_memory(self._asker, self._handle, total), now_s
        self._used = used
        counted = self._gpm.read(self._module, now_s) if self._gpm is not None and self._gpm_due(now_s) else {}
        activity = counted | other  # byte counters are exact, the counters' rates are of their own interval
        self._read_util(now_s, activity)
        told_by_gpm = activity.pop("util", None)
        if self._part.mig and told_by_gpm is not None:
            self._util = told_by_gpm
        told = utilisation_is_told(self._asker)
        return Readings(
            answered=info is not None or not self._asker.can("nvmlDeviceGetMemoryInfo"),
            util=self._util,
            memory_bytes=used,
            shares=self._hold.held() if told else None,
            memory=self._memory,
            activity=DeviceActivity(**activity) if activity else None,
            notes=tuple(notes),
            read_s=now_s,
            listed_s=self._listed_s,
        )

    def is_there(self) -> bool:
        """Whether its handle still means it: that of an instance that was destroyed may come to mean another one."""
        return not self._part.mig or self._asker.ask("nvmlDeviceGetUUID", self._handle) == self._part.uuid

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    def _counts(self) -> bool:
        return self._gpm is not None and not self._gpm.why_not

    def _read_util(self, now_s: float, activity: dict[str, Reading]) -> None:
        rates = self._asker.ask("nvmlDeviceGetUtilizationRates", self._handle)
        if not self._part.mig:
            self._util = None if rates is None else fraction(rates.gpu)
        if rates is not None and activity.get("membw_util") is None and not self._counts():
            # Share of the time in which the memory was read or written: never an amount of memory.
            activity["membw_util"] = fraction(rates.memory)
        self._hold.update(self._asker, self._handle, now_s)


class Board:
    """One GPU. Used by one thread, which may be stuck in any call.

    Args:
        library: NVML.
        uuid: The GPU's.
        parts: Its devices that are of interest.
        clock: Monotonic seconds.
    """

    def __init__(self, library: Library, uuid: str, parts: Sequence[Part], clock: Callable[[], float]) -> None:
        self.uuid = uuid
        self.parts = tuple(parts)
        self._library = library
        self._clock = clock
        self._open: _Open | None = None

    def read(self) -> Pass:
        """Read everything that is due. A GPU that is gone is opened anew at every call until it is there."""
        now_s = self._clock()
        try:
            if self._open is None:
                self._open = _Open(self._library, self.uuid, self.parts)
            return self._open.read(now_s)
        except NvmlFailure as error:
            self.close()
            return Pass(now_s, fault=f"the GPU is lost ({error})")

    def close(self) -> None:
        """Give back what it holds of the driver's."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


class _Open:
    """A GPU while it answers."""

    def __init__(self, library: Library, uuid: str, parts: Sequence[Part]) -> None:
        self._library, self._parts = library, parts
        self._handle = library.call("nvmlDeviceGetHandleByUUID", uuid)
        self._asker = Asker(library)
        self._devices: dict[str, _Device] = {}
        self._counters = Counters(library.module)
        self._health = Health(self._asker, self._handle, library.module)
        self._counters_due, self._slow_due = _Due(COUNTERS_S), _Due(SLOW_S)
        self._slow = ""

    def read(self, now_s: float) -> Pass:
        other: dict[str, Reading] = {}
        if self._counters_due(now_s):
            other |= self._counters.read(self._asker, self._handle, now_s)
            if "power_w" not in other:
                milliwatts = self._asker.ask("nvmlDeviceGetPowerUsage", self._handle)
                other["power_w"] = None if milliwatts is None else bounded(milliwatts / 1000, MAX_W)
        if self._slow_due(now_s):
            self._open_devices()
            other |= self._read_slow()
        notes = [note for note in (self._slow, *self._health.notes(self._counters)) if note]
        devices = {uuid: device.read(now_s, dict(other), notes) for uuid, device in self._devices.items()}
        return Pass(now_s, devices, self._health.fault(self._counters))

    def _open_devices(self) -> None:
        """Instances come and go: one that is destroyed has no readings, the others have."""
        for part in self._parts:
            known = self._devices.get(part.uuid)
            if known is not None and not known.is_there():
                self._devices.pop(part.uuid).close()
            if part.uuid not in self._devices:
                handle = self._asker.ask("nvmlDeviceGetHandleByUUID", part.uuid) if part.mig else self._handle
                if handle is not None:
                    self._devices[part.uuid] = _Device(self._library, self._handle, handle, part)

    def _read_slow(self) -> dict[str, Reading]:
        """Clocks, heat, why clocks are held down, and errors."""
        self._health.look()
        clock = self._asker.ask("nvmlDeviceGetClockInfo", self._handle, _CLOCK_SM)
        heat = self._asker.ask("nvmlDeviceGetTemperature", self._handle, _TEMPERATURE_GPU)
        self._slow = slowdowns(self._asker.ask("nvmlDeviceGetCurrentClocksEventReasons", self._handle))
        return {"sm_clock_mhz": bounded(clock, MAX_MHZ), "temperature_c": bounded(heat, MAX_C)}

    def close(self) -> None:
        try:
            self._health.close()
            for device in self._devices.values():
                device.close()
        except NvmlFailure:
            return  # the GPU is gone, and what it held with it
