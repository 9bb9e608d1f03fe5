"""A power limit on whole GPUs for as long as cotenant runs, and what was there before put back afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.actors import runner
from cotenant.actors.devices.nvml.library import Library, NvmlFailure, NvmlUnavailable

RECORD = "power.json"


class PowerLimit:
    """Limits the power of GPUs; a GPU that does not take it is left as it is, and ``notes`` say so.

    What was there before is written down first: an agent that is killed is followed by one that still knows it.

    Args:
        run_dir: The host's run directory.
        gpu_ids: UUIDs of the GPUs.
        watts: The limit.
    """

    def __init__(self, run_dir: Path, gpu_ids: Sequence[str], watts: float) -> None:
        self.notes: list[str] = []
        self._record = run_dir / RECORD
        self._watts = watts
        self.add(gpu_ids)

    def add(self, gpu_ids: Sequence[str]) -> None:
        """Limit these GPUs too."""
        try:
            library = Library()
        except NvmlUnavailable as error:
            self.notes.append(f"power is not limited: {error}")
            return
        try:
            for gpu_id in gpu_ids:
                try:
                    self._limit(library, gpu_id, round(self._watts * 1000))
                except NvmlFailure as error:
                    self.notes.append(f"power of {gpu_id} is not limited: {error}")
        finally:
            library.close()

    def restore(self) -> None:
        """Put back what was there before. Idempotent; what a GPU does not take is in ``notes``."""
        before = runner.read_json(str(self._record)) or {}
        if not before:
            return
        try:
            library = Library()
        except NvmlUnavailable as error:
            self.notes.append(f"power limits could not be put back: {error}")
            return
        try:
            for gpu_id, milliwatts in before.items():
                try:
                    handle = library.call("nvmlDeviceGetHandleByUUID", gpu_id)
                    library.call("nvmlDeviceSetPowerManagementLimit", handle, milliwatts)
                except NvmlFailure as error:
                    self.notes.append(f"the power limit of {gpu_id} could not be put back: {error}")
        finally:
            library.close()
        self._record.unlink()

    def _limit(self, library: Library, gpu_id: str, milliwatts: int) -> None:
        handle = library.call("nvmlDeviceGetHandleByUUID", gpu_id)
        least, most = library.call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        if not least <= milliwatts <= most:
            self.notes.append(
                f"enforcement.power_limit_w: {milliwatts / 1000:g} is not accepted by {gpu_id}; "
                f"give {least / 1000:g} to {most / 1000:g}"
            )
            return
        before = runner.read_json(str(self._record)) or {}
        if gpu_id not in before:
            before[gpu_id] = library.call("nvmlDeviceGetPowerManagementLimit", handle)
            runner.write_json(str(self._record), before)
        library.call("nvmlDeviceSetPowerManagementLimit", handle, milliwatts)
