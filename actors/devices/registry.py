"""From settings to a device backend."""

from __future__ import annotations

from pathlib import Path

from cotenant.actors.devices.base import DeviceBackend
from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.devices.recording import load_recording
from cotenant.actors.devices.replay import ReplayBackend
from cotenant.configs.settings import DeviceSettings


def create_backend(settings: DeviceSettings, host_name: str, count: int | None) -> DeviceBackend:
    """Make the device backend of a host.

    Args:
        settings: Which backend, and what its GPUs are.
        host_name: Unique per Ray node, part of the GPU ids.
        count: Number of GPUs on this host; None = the setting, else whatever is found.

    Raises:
        ValueError: Settings that this host cannot satisfy; the message names the setting.
        OSError: The recording cannot be read.
    """
    count = settings.count if count is None else count
    if settings.backend == "cpu":
        return CpuBackend(settings, host_name, count)
    if settings.replay_file is None:
        raise ValueError(
            "device.replay_file: None is not accepted with device.backend 'replay'; give a recording's path"
        )
    return ReplayBackend(load_recording(Path(settings.replay_file)), host_name, count)
