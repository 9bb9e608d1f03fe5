"""What a device tells about a window, and the thread that asks it ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

PERIOD_S = 0.1
_JOIN_S = 5.0


class DeviceError(RuntimeError):
    """The device cannot be used; says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class MemberReadings:
    """One member's readings over a window; None = the device does not say.

    Attributes:
        util_mean: Share of the device that it used, 0 to 1, on average.
        util_peak: The 95th percentile of that share over the 10 Hz readings.
        memory_bytes: The most device memory it held (cpu: resident memory of its main process).
        util_age_s: Mean age of the reading behind each tick: drivers refresh more slowly than we ask. 0 on cpu.
    """

    util_mean: float | None = None
    util_peak: float | None = None
    memory_bytes: int | None = None
    util_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """A window as the device saw it; None = the device does not say.

    Attributes:
        members: Readings by the names given to ``Device.start_sampling``.
        seconds: How long the sampling lasted.
        ticks: How often the device was read.
        cost_s: CPU time the sampling itself took.
        device_util: Share of the time in which the device did anything, 0 to 1.
        membw_util: Memory bandwidth used, over the possible.
        sm_active, tensor_active, fp32_active: Activity of the units, 0 to 1.
        power_w, clock_mhz, temperature_c: Means over the window.
        pcie_rx_bytes_s, pcie_tx_bytes_s: Traffic to and from the device.
        foreign_s: CPU time of strangers on the device's core (cpu only).
        notes: What could not be read, and why; each once.
    """

    members: Mapping[str, MemberReadings]
    seconds: float
    ticks: int
    cost_s: float
    device_util: float | None = None
    membw_util: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    fp32_active: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    foreign_s: float | None = None
    notes: tuple[str, ...] = ()


class Device(Protocol):
    """The device that is shared."""

    name: str
    dry_run: bool

    def identity(self) -> dict[str, Any]:
        """What the data card says of the device: gpu_type, gpu_uuid, memory_bytes, driver, cuda, host_cores, …"""

    def member_env(self) -> dict[str, str]:
        """What every member needs in its environment to use this very device."""

    def start_sampling(self, pids: Mapping[str, int]) -> None:
        """Begin to read the device and the main processes of the members, by name."""

    def stop_sampling(self) -> Readings:
        """End what ``start_sampling`` began."""

    def close(self) -> None:
        """Let go of the device; sampling that goes on is ended."""


class Ticker:
    """Calls ``tick`` every ``PERIOD_S`` in a thread of its own until stopped; a late tick is not made up for."""

    def __init__(self, tick: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> None:
        self._tick = tick
        self._prepare = prepare
        self._stop = threading.Event()
        self._finished = False
        self.ticks = 0
        self.cost_s = 0.0
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the ticking; False when the last tick never came back (its thread is left behind).

        Raises:
            RuntimeError: A tick failed; its traceback is on stderr.
        """
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return False
        if not self._finished:
            raise RuntimeError("the sampler failed; see the traceback above")
        return True

    def _run(self) -> None:
        self._prepare()
        began = time.thread_time()
        due = time.monotonic()
        while True:
            self._tick()
            self.ticks += 1
            self.cost_s = time.thread_time() - began
            now = time.monotonic()
            due = max(due + PERIOD_S, now)
            if self._stop.wait(due - now):
                break
        self._finished = True


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None when there is none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def peak(values: Sequence[float | None]) -> float | None:
    """95th percentile of the values that are there; None when there is none."""
    known = [value for value in values if value is not None]
    return float(np.quantile(known, 0.95)) if known else None
