"""The ways in which members share a device, and what each member needs in its environment for it."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.colocation.mps import CONTROL, MpsDaemon
from benchmarks.colocation.readings import Device

PAIR_SHARES: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.7, 0.3), (0.3, 0.7))
UNCAPPED: tuple[None] = (None,)
Shares = tuple[float, ...]
# A folder in which no daemon listens: the driver then does without MPS, also where the system runs a daemon.
NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/no-mps"}
_COMPUTE_MODES = {1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


class Mode:
    """Time-slicing: the device's own scheduler alternates between the members, nobody is capped.

    The other modes differ from it in what they override.

    Attributes:
        name: As in the tables.
        shares: The shares a pair is measured with; ``(None,)`` where nothing is capped.
        restarts: Whether a share is fixed when a process starts, so that another share needs another process.
        limits_memory: Whether a limit of device memory can be given at the start of a process.
    """

    name = "timeslice"
    shares: tuple[Shares | None, ...] = UNCAPPED
    restarts = False
    limits_memory = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def available(self) -> tuple[bool, str]:
        """Whether this mode can be measured here, and if not, why."""
        mode: Any = self._device.identity().get("compute_mode")
        if mode in _COMPUTE_MODES:
            return False, f"the GPU's compute mode is {_COMPUTE_MODES[mode]}: it takes no second process without MPS"
        return True, ""

    def member_env(self, share: float | None = None, memory_bytes: int | None = None) -> dict[str, str]:
        """The environment of a member.

        Args:
            share: Its share of the device, in (0, 1]; None = not capped.
            memory_bytes: A limit of its device memory, where the mode can set one; None = no limit.
        """
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share: {share} is not accepted; give a fraction in (0, 1] or None")
        if memory_bytes is not None and not self.limits_memory:
            raise ValueError(f"memory_bytes: the mode {self.name} cannot limit memory; only mps and mps_cap can")
        return self._device.member_env() | (NO_MPS if self._device.name == "cuda" else {})

    def duty(self, share: float | None) -> float | None:
        """The duty cycle that a member with this share keeps at its step boundaries; None = it is not held back."""
        del share
        return None

    def start(self) -> None:
        """Make the mode ready for members. Before the first member starts."""

    def stop(self) -> None:
        """Undo ``start``. After the last member has ended; may be called at any time, more than once."""

    def check(self) -> None:
        """See whether members can still be started; ``MpsRefused`` or ``MpsError`` when not."""

    def terminate_client(self, pid: int) -> None:
        """Before a member is killed: take it from the device in good order, so that the others are not harmed."""


class DutyMode(Mode):
    """Time-slicing, and every member holds itself to its share at step boundaries."""

    name = "duty"
    shares = PAIR_SHARES

    def duty(self, share: float | None) -> float | None:
        """See ``Mode.duty``."""
        return share


class MpsMode(Mode):
    """One MPS server for all members: their work runs on the device at the same time, nobody is capped.

    Attributes:
        daemon: The private daemon, running between ``start`` and ``stop``.
    """

    name = "mps"
    limits_memory = True

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.daemon = MpsDaemon(device.identity().get("gpu_uuid"))

    def available(self) -> tuple[bool, str]:
        """See ``Mode.available``. Whether clients are accepted shows when the first one starts."""
        if shutil.which(CONTROL) is None:
            return False, f"{CONTROL} is not on PATH"
        return True, ""

    def member_env(self, share: float | None = None, memory_bytes: int | None = None) -> dict[str, str]:
        """See ``Mode.member_env``; RuntimeError before ``start``."""
        env = super().member_env(share, memory_bytes) | self.daemon.environment
        if share is not None:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share * 100:.4g}"
        if memory_bytes is not None:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory_bytes >> 20}M"  # 0: the only device a member sees
        return env

    def start(self) -> None:
        """See ``Mode.start``; ``MpsError`` when the daemon does not start."""
        self.daemon.start()

    def stop(self) -> None:
        """See ``Mode.stop``."""
        self.daemon.stop()

    def check(self) -> None:
        """See ``Mode.check``."""
        self.daemon.check()

    def terminate_client(self, pid: int) -> None:
        """See ``Mode.terminate_client``."""
        self.daemon.terminate_client(pid)


class MpsCapMode(MpsMode):
    """MPS, where each member gets at most its share of the processor's threads."""

    name = "mps_cap"
    shares = PAIR_SHARES
    restarts = True


def modes_for(device: Device) -> dict[str, Mode]:
    """The modes of a device by name, the one that needs nothing first. Whether one can be used here it says itself."""
    kinds: tuple[type[Mode], ...] = (Mode, DutyMode) if device.name == "cpu" else (Mode, MpsMode, MpsCapMode, DutyMode)
    return {kind.name: kind(device) for kind in kinds}
