"""One NVIDIA GPU as the device: what it is, and what NVML tells about a window."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.colocation.devices import host_identity
from benchmarks.colocation.nvml import GPM_METRICS, Counters, GpuReader, NvmlUnavailable, Tick
from benchmarks.colocation.readings import DeviceError, MemberReadings, Readings, Ticker, mean, peak

from cotenant.actors.devices.nvml.watchdog import Hung

MEMORY_EVERY = 5  # ticks; the process lists cost more than the rest
HOLD_S = 1.0  # the driver's longest sampling period: older shares are no reading any more
_PROBE_TIMEOUT_S = 120.0
_WRAP = 2**32
# Asked in a process of its own: a CUDA context here would hold memory on the device for the whole run.
_PROBE = """
import json, torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    uuid = str(getattr(p, "uuid", "")).removeprefix("GPU-")
    print(json.dumps({"gpu_type": p.name, "gpu_uuid": f"GPU-{uuid}" if uuid else None,
                      "memory_bytes": p.total_memory, "cuda": torch.version.cuda}))
else:
    print(json.dumps({"cuda": torch.version.cuda}))
"""


class CudaDevice:
    """The GPU that ``CUDA_VISIBLE_DEVICES`` names first, or the first of the machine.

    Args:
        dry_run: Go without a GPU.
        known: What an earlier ``identity`` said, which saves asking torch again.

    Raises:
        DeviceError: torch sees no GPU and this is no dry run.
    """

    name = "cuda"

    def __init__(self, dry_run: bool = False, known: Mapping[str, Any] | None = None) -> None:
        self.dry_run = dry_run
        self.notes: list[str] = []
        self._torch: dict[str, Any] = dict(known) if known is not None else {} if dry_run else _probe()
        selector = self._torch.get("gpu_uuid") or os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or None
        self.reader: GpuReader | None = None
        try:
            self.reader = GpuReader(selector)
        except NvmlUnavailable as error:
            self.notes.append(f"no readings of the device: {error}")
        self._identity = self._read_identity()
        self._sampling: _GpuSampling | None = None

    def identity(self) -> dict[str, Any]:
        """See ``Device.identity``; also cuda_driver, compute_mode, mig and power_limit_w where NVML gives them."""
        return dict(self._identity)

    def member_env(self) -> dict[str, str]:
        """See ``Device.member_env``: the GPU by its UUID, which means the same to NVML, CUDA and MPS."""
        uuid = self._identity["gpu_uuid"]
        return {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": uuid} if uuid else {})

    def start_sampling(self, pids: Mapping[str, int]) -> None:
        """See ``Device.start_sampling``."""
        if self._sampling is not None:
            raise RuntimeError("sampling has been started already; stop it first")
        self._sampling = _GpuSampling(self.reader, pids, self.notes)

    def stop_sampling(self) -> Readings:
        """See ``Device.stop_sampling``."""
        if self._sampling is None:
            raise RuntimeError("sampling has not been started")
        sampling, self._sampling = self._sampling, None
        return sampling.end()

    def close(self) -> None:
        """See ``Device.close``."""
        if self._sampling is not None:
            self.stop_sampling()
        if self.reader is not None:
            self.reader.close()

    def _read_identity(self) -> dict[str, Any]:
        nothing: dict[str, Any] = dict.fromkeys(("gpu_type", "gpu_uuid", "memory_bytes", "driver", "cuda"))
        told: dict[str, Any] = {}
        if self.reader is not None:
            try:
                told = self.reader.identity()
            except Hung as error:
                self.notes.append(str(error))
        known = {key: value for key, value in told.items() if value is not None}
        return nothing | self._torch | known | host_identity()


class _GpuSampling:
    """The readings of one window."""

    def __init__(self, reader: GpuReader | None, pids: Mapping[str, int], notes: list[str]) -> None:
        self._reader = reader
        self._pids = dict(pids)
        self._notes = list(notes)
        self._ticks: list[Tick] = []
        self._shares: dict[int, tuple[float, float]] = {}  # pid → when it came, the share
        self._held: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}  # age, share of every tick
        self._memory: dict[str, int] = {}
        self._strangers: set[int] = set()
        self._seen_ours = False
        self._cost_s = 0.0 if reader is None else reader.cost_s
        self._began = time.monotonic()
        self._ticker = Ticker(self._tick) if reader is not None else None

    def _tick(self) -> None:
        if self._reader is None or self._lost():
            return
        try:
            tick = self._reader.tick(with_memory=len(self._ticks) % MEMORY_EVERY == 0)
        except Hung as error:
            self._notes.append(f"{error}; the device is not read any more")
            self._reader = None
            return
        now = time.monotonic()
        if self._ticks:  # what the first one finds may be from before the window
            self._shares |= {pid: (now, share) for pid, share in tick.util.items()}
        self._ticks.append(tick)
        for name, pid in self._pids.items():
            came, share = self._shares.get(pid, (-math.inf, 0.0))
            if now - came <= HOLD_S:
                self._held[name].append((now - came, share))
        self._keep_memory(tick)

    def _lost(self) -> bool:
        return self._reader is None

    def _keep_memory(self, tick: Tick) -> None:
        for name, pid in self._pids.items():
            used = (tick.memory or {}).get(pid)
            if used is not None:
                self._memory[name] = max(used, self._memory.get(name, 0))
        ours = set(self._pids.values())
        self._seen_ours = self._seen_ours or bool(ours & set(tick.memory or {}))
        self._strangers |= set(tick.memory or {}) - ours

    def end(self) -> Readings:
        finished = self._ticker is None or self._ticker.stop()
        seconds = time.monotonic() - self._began
        if not finished:
            self._notes.append("the last reading of the device never came back")
        ticks = list(self._ticks)
        power, rx, tx = _rates(ticks)
        return Readings(
            members={name: self._member(name) for name in self._pids},
            seconds=seconds,
            ticks=len(ticks),
            cost_s=self._cost() - self._cost_s,
            device_util=mean([tick.device_util for tick in ticks]),
            power_w=mean([tick.power_w for tick in ticks]) if power is None else power,
            clock_mhz=mean([tick.clock_mhz for tick in ticks]),
            temperature_c=mean([tick.temperature_c for tick in ticks]),
            pcie_rx_bytes_s=rx,
            pcie_tx_bytes_s=tx,
            notes=tuple(dict.fromkeys(self._all_notes())),
            **{name: mean([tick.gpm.get(name) for tick in ticks]) for name in GPM_METRICS},
        )

    def _cost(self) -> float:
        own = 0.0 if self._ticker is None else self._ticker.cost_s
        return own + (self._cost_s if self._reader is None else self._reader.cost_s)

    def _member(self, name: str) -> MemberReadings:
        shares = [share for _, share in self._held[name]]
        return MemberReadings(
            util_mean=mean(shares),
            util_peak=peak(shares),
            memory_bytes=self._memory.get(name),
            util_age_s=mean([age for age, _ in self._held[name]]),
        )

    def _all_notes(self) -> list[str]:
        notes = list(self._notes)
        if self._reader is not None:
            notes += [f"{name}: {why}" for name, why in self._reader.notes.items()]
        if self._strangers and self._pids and not self._seen_ours:
            notes.append(
                "NVML lists processes, but none of the members: it names them by the host's numbers, not by those of"
                " this container"
            )
        return notes


def _rates(ticks: list[Tick]) -> tuple[float | None, float | None, float | None]:
    """Mean power in W and PCIe traffic (to, from the device) in bytes/s over the ticks, from counters."""
    if len(ticks) < 2:
        return None, None, None
    first, last = ticks[0].counters, ticks[-1].counters
    seconds = last.at_s - first.at_s
    power = None
    if first.energy_j is not None and last.energy_j is not None and last.energy_j > first.energy_j:
        power = (last.energy_j - first.energy_j) / seconds
    steps = [(a.counters, b.counters) for a, b in itertools.pairwise(ticks)]
    rx = _grown([(a.rx_bytes, b.rx_bytes, a) for a, b in steps])
    tx = _grown([(a.tx_bytes, b.tx_bytes, a) for a, b in steps])
    return power, None if rx is None else rx / seconds, None if tx is None else tx / seconds


def _grown(steps: list[tuple[int | None, int | None, Counters]]) -> float | None:
    """How much a counter grew over the steps; one that wraps at 32 bits wraps at most once in a step."""
    total = 0
    for before, after, counters in steps:
        if before is None or after is None:
            return None
        grown = after - before
        if grown < 0 and counters.narrow:
            grown += _WRAP
        if grown < 0:
            return None  # reset, for example with the device
        total += grown
    return float(total)


def _probe() -> dict[str, Any]:
    """What torch says of its first GPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"--device cuda: torch did not find a GPU within {_PROBE_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise DeviceError(f"--device cuda: torch failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "gpu_type" not in found:
        build = "is built for the CPU" if found["cuda"] is None else f"(CUDA {found['cuda']}) finds none"
        raise DeviceError(f"--device cuda: no GPU: torch {build}; --dry-run goes through everything without one")
    return found
