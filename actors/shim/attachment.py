"""The stay of a process under a share: from the import of torch, or from ``attach``, to its end, or to ``detach``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from .bootstrap import JOINED, TRIGGER, mark, warn, when_imported
from .process import Config, DeviceProcess, read_config
from .shareword import ShareWordError


class _State:
    """What this process is to a job, if anything."""

    config: Config | None = None
    process: DeviceProcess | None = None
    pin_early = False
    waiting = False  # for the import of torch
    hooked = False


class Attachment:
    """A stay that the program itself has begun."""

    def __init__(self, marker: str) -> None:
        self._marker: str | None = marker

    def detach(self) -> None:
        """Leave the share: no more throttling, limits or pinning. Idempotent."""
        marker, self._marker = self._marker, None
        if marker is None:
            return
        process, _State.process, _State.config = _State.process, None, None
        if process is not None:
            process.release()
        with contextlib.suppress(FileNotFoundError):  # the lease has ended, and its directory with it
            os.unlink(marker)


def attach(environ: Mapping[str, str]) -> Attachment:
    """Put this process under a share from now on.

    Args:
        environ: The environment the host agent gives for the lease.

    Raises:
        RuntimeError: The process is under a share already.
        KeyError: A variable is missing.
        ValueError: A variable or the share word is not as expected.
        OSError: The job directory cannot be used from here.
    """
    refuse_second_share()
    config = read_config(environ)
    marker = mark(config.job_dir, JOINED)
    _State.config, _State.pin_early = config, True
    if TRIGGER in sys.modules:
        _hook(sys.modules[TRIGGER])
    elif not _State.waiting:
        _State.waiting = True
        when_imported(_hook)
    return Attachment(marker)


def refuse_second_share() -> None:
    """Check that this process may attach itself.

    Raises:
        RuntimeError: It is under a share already, its own or the one it was started with.
    """
    if _State.config is not None:
        raise RuntimeError(f"this process is already under a share ({_State.config.job_dir}); detach it first")
    if "_cotenant_shim" in sys.modules and __package__ != "_cotenant_shim":
        started_under = os.environ.get("COTENANT_JOB_ID", "unknown")
        raise RuntimeError(f"this process was started under a share of job {started_under} and keeps that one")


def begin(module: Any, *, pin_early: bool) -> None:
    """In a process of a job: torch's optimizers (``module``) have just been imported.

    Raises:
        KeyError, ValueError, OSError: As for ``attach``.
    """
    _State.config = read_config(os.environ)
    _State.pin_early = pin_early
    _hook(module)


def _hook(module: Any) -> None:
    if not _State.hooked:
        _State.hooked = True
        module.register_optimizer_step_post_hook(_after_step)
        os.register_at_fork(after_in_child=_after_fork)
    if _State.pin_early:
        # A program that never steps is at least held to the device's cores.
        _become_device_process()


def _become_device_process() -> DeviceProcess | None:
    if _State.config is None:
        return None
    try:
        _State.process = DeviceProcess(_State.config)
    except (OSError, ShareWordError) as error:
        _State.config = None
        warn(error)
    return _State.process


def _after_step(optimizer: object, _args: object, _kwargs: object) -> None:
    process = _State.process or _become_device_process()
    if process is not None:
        process.on_step(optimizer)


def _after_fork() -> None:
    """In a forked child: it is a process of its own, and when multiprocessing made it, a helper off the device."""
    inherited, _State.process = _State.process, None
    if inherited is None or not _forked_by_multiprocessing():
        return
    try:
        inherited.release()
    except (OSError, ValueError) as error:
        warn(error)


def _forked_by_multiprocessing() -> bool:
    frame = sys._getframe(2)  # the caller of os.fork: this function <- _after_fork <- caller
    return str(frame.f_globals.get("__name__", "")).startswith("multiprocessing.")
