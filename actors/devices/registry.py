"""From settings to a device backend."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.actors.devices.base import DeviceBackend
from cotenant.actors.devices.cpu import CpuBackend
from cotenant.actors.devices.nvml.backend import NvmlBackend
from cotenant.actors.devices.nvml.discovery import COUNT, TIMEOUT_S, Silence
from cotenant.actors.devices.nvml.library import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    Library,
    NvmlFailure,
    NvmlSilent,
    NvmlUnavailable,
)
from cotenant.actors.devices.nvml.visible import NO_DEVICES
from cotenant.actors.devices.nvml.watchdog import Hung, call_within
from cotenant.actors.devices.recording import load_recording
from cotenant.actors.devices.replay import ReplayBackend
from cotenant.configs.settings import DeviceSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_DRIVER = (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)


class DriverSilent(ValueError):
    """There is a driver, and it does not answer; it may do so later."""

    def __init__(self, silence: Silence) -> None:
        self.silence = silence
        super().__init__(silence.reason)


def create_backend(settings: DeviceSettings, host_name: str, count: int | None) -> DeviceBackend:
    """Make the device backend of a host.

    Args:
        settings: Which backend, and what its GPUs are.
        host_name: Unique per Ray node, part of the ids of GPUs that have none of their own.
        count: Number of GPUs on this host, as Ray counts them; None = the setting, else whatever is found.

    Raises:
        ValueError: Settings that this host cannot satisfy; the message names the setting.
        OSError: The recording cannot be read.
    """
    if settings.backend == "replay":
        if settings.replay_file is None:
            raise ValueError(
                "device.replay_file: None is not accepted with device.backend 'replay'; give a recording's path"
            )
        return ReplayBackend(load_recording(Path(settings.replay_file)), host_name, count or settings.count)
    try:
        library = start_nvml(settings)
    except DriverSilent as error:
        print(f"cotenant host agent: {error}", flush=True)  # noqa: T201 - the actor's log
        return NvmlBackend(settings, count, visible=os.environ.get(VISIBLE), silent=error.silence)
    if library is not None:
        return NvmlBackend(settings, count, library=library, visible=os.environ.get(VISIBLE))
    return CpuBackend(settings, host_name, count or settings.count)


def start_nvml(settings: DeviceSettings) -> Library | None:
    """Start NVML where the backend of this host is, or turns out to be, ``nvml``.

    A driver that is there and does not work is an error and no reason to let jobs run on CPU cores instead.

    Returns:
        NVML; None when another backend is to be used.

    Raises:
        DriverSilent: The driver does not answer.
        ValueError: NVML is needed here and cannot be used; the message names the setting and says why.
    """
    if settings.backend not in ("auto", "nvml"):
        return None
    auto = settings.backend == "auto"
    if auto and os.environ.get(VISIBLE, "unset").strip() in NO_DEVICES:
        return None
    library: Library | None = None
    try:
        library = Library()
        boards = call_within(TIMEOUT_S, COUNT, library.call, COUNT) if auto else None
    except (NvmlSilent, Hung) as error:
        reason = f"no GPU can be used: the NVIDIA driver does not answer: {error}"
        raise DriverSilent(Silence(reason, error.answer, library)) from error
    except (NvmlUnavailable, NvmlFailure) as error:
        if auto and error.code in _NO_DRIVER:
            return None
        advice = "; set it to 'cpu' to go without GPUs" if auto else ""
        raise ValueError(
            f"device.backend: {settings.backend!r} is not accepted on this host: {error}{advice}"
        ) from error
    if boards == 0:
        library.close()
        return None
    return library
