"""Puts the shim into a Python process: decides what the process is and waits for torch.

Nothing here may change what the job computes, and no failure may stop it: a process whose environment does not fit runs
as if there were no shim, and says so in one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .memory import lift
from .process import Config, DeviceProcess, read_config
from .reportfile import start_ticks
from .shareword import ShareWordError

TRIGGER = "torch.optim.optimizer"
ATTACH_PREFIX = "attach-"
STARTED = "started"  # the whole process belongs to the job, which takes it along when it ends
JOINED = "joined"  # the process put itself under the job's share and goes on when the job has ended
_WARNED = "COTENANT_SHIM_WARNED"
_HELPER_MARKS = ("--multiprocessing-fork", "from multiprocessing.")


class _State:
    """What this process is to the job, if anything."""

    config: Config | None = None
    process: DeviceProcess | None = None
    pin_early = False
    watched = False


class Attachment:
    """A process' stay under a share."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def detach(self) -> None:
        """Leave the share: no more throttling, limits or pinning. Idempotent."""
        if not os.path.exists(self._marker) and _State.config is None:
            return
        process, _State.process, _State.config = _State.process, None, None
        if process is not None:
            process.release()
        if os.path.exists(self._marker):
            os.unlink(self._marker)


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
    if _State.config is not None:
        raise RuntimeError(f"this process is already under a share ({_State.config.job_dir}); detach it first")
    config = read_config(environ)
    marker = _mark(config.job_dir, JOINED)
    _State.config, _State.pin_early = config, True
    _watch()
    return Attachment(marker)


def install() -> None:
    """Read the environment and prepare this process. Called once, before any of the user's code runs."""
    try:
        config = read_config(os.environ)
        helper = _is_multiprocessing_helper()
        if helper:
            os.sched_setaffinity(0, config.host_cores)
            lift()
        elif os.environ.pop("COTENANT_ATTACH", "") == "1":
            _mark(config.job_dir, STARTED)
    except (KeyError, OSError, ValueError) as error:
        _warn(error)
        return
    # A helper that turns out to train (torch.multiprocessing.spawn) goes onto the device at its first step.
    _State.config, _State.pin_early = config, not helper
    _watch()


def _warn(error: Exception) -> None:
    """Say once per job that a process runs uncontrolled, and why."""
    if os.environ.get(_WARNED) or sys.stderr is None:
        return
    os.environ[_WARNED] = "1"
    what = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
    sys.stderr.write(f"cotenant: this process runs without its share being enforced: {what}\n")


def _watch() -> None:
    """Act when torch's optimizers are there, now or later."""
    if _State.watched:
        _early()
    elif TRIGGER in sys.modules:
        _on_torch(sys.modules[TRIGGER])
    else:
        _State.watched = True
        sys.meta_path.insert(0, _TorchWatcher())


class _TorchWatcher(MetaPathFinder):
    """Lets the import of torch's optimizers happen as ever and acts when it is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TRIGGER:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Make this one loader object call ``_on_torch`` when it has executed the module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _on_torch(module)

        loader.exec_module = exec_module


def _on_torch(module: Any) -> None:
    _State.watched = True
    module.register_optimizer_step_post_hook(_after_step)
    os.register_at_fork(after_in_child=_after_fork)
    _early()


def _early() -> None:
    """Onto the device as soon as torch is imported: a program that never steps is at least held to its cores."""
    if _State.pin_early and TRIGGER in sys.modules:
        _become_device_process()


def _become_device_process() -> DeviceProcess | None:
    if _State.config is None:
        return None
    try:
        _State.process = DeviceProcess(_State.config)
    except (OSError, ShareWordError) as error:
        _State.config = None
        _warn(error)
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
        _warn(error)


def _forked_by_multiprocessing() -> bool:
    frame = sys._getframe(2)  # the caller of os.fork: this function <- _after_fork <- caller
    return str(frame.f_globals.get("__name__", "")).startswith("multiprocessing.")


def _is_multiprocessing_helper() -> bool:
    """True in processes that multiprocessing starts afresh: spawned children, the fork server, the resource tracker."""
    return any(mark in argument for argument in sys.orig_argv[1:] for mark in _HELPER_MARKS)


def _mark(job_dir: str, kind: str) -> str:
    """Leave a marker by which the host agent finds a process that it did not start."""
    path = f"{job_dir}/{ATTACH_PREFIX}{os.getpid()}"
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(f"{start_ticks('self')} {kind}")
    os.replace(f"{path}.new", path)
    return path
