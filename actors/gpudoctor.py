"""Examines what a host has of NVIDIA's: driver, GPUs, MIG, MPS, performance counters, checkpoints, permissions.

Not run on a GPU yet: tested on a stand-in for the driver's library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.actors.checks import Check, verdict
from cotenant.actors.devices.nvml.board import Part
from cotenant.actors.devices.nvml.discovery import TIMEOUT_S, Finder, FoundBoard
from cotenant.actors.devices.nvml.gpm import why_not
from cotenant.actors.devices.nvml.library import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    Asker,
    Library,
    NvmlFailure,
    NvmlSilent,
    NvmlUnavailable,
)
from cotenant.actors.devices.nvml.pids import HOST_PROC, PidMap
from cotenant.actors.devices.nvml.processes import NOTHING_NEW, UTILISATION
from cotenant.actors.devices.nvml.watchdog import Hung, call_within
from cotenant.actors.enforcement.mpscontrol import CONTROL
from cotenant.actors.enforcement.pausing import CheckpointPause

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_PROHIBITED, _EXCLUSIVE = 2, (1, 3)
_NO_CHECKPOINTS = Check(
    "GPU checkpoints",
    True,
    "no; without NVIDIA's driver nothing is frozen, and checkpoint: driver counts as none (checkpoint: own works)",
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one GPU says of itself; ``*_missing``: why it does not give something, empty when it does."""

    name: str
    mig: bool
    instances: int
    compute_mode: int | None
    processes_missing: str
    gpm_missing: str


def gpu_checks() -> list[Check]:
    """Examine this host's NVIDIA GPUs; without a driver there is nothing to examine, which is fine."""
    try:
        library = Library()
    except NvmlUnavailable as error:
        found = _without_nvml(error)
        return [found, _NO_CHECKPOINTS] if found.ok else [found]
    try:
        boards, left_out = Finder(library, os.environ.get("CUDA_VISIBLE_DEVICES"), None, None).find()
        facts, silent = _facts(library, boards)
    except (NvmlFailure, ValueError) as error:
        return [_broken(str(error))]
    return [_driver(library), _gpus(facts, [*left_out, *silent]), *_checks_of(facts)]


def _checks_of(facts: Sequence[_Facts]) -> list[Check]:
    if not facts:
        return []
    return [
        _device_files(),
        _compute_modes(facts),
        _processes(facts),
        _process_numbers(PidMap()),
        _gpm(facts),
        _mig(facts),
        _mps(),
        _checkpoints(),
    ]


def _without_nvml(error: NvmlUnavailable) -> Check:
    kernel = _kernel_driver()
    if isinstance(error, NvmlSilent):
        return _silent(
            str(error), "the host joins without its GPUs, and uses them once the driver answers", essential=True
        )
    if error.code not in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        return _broken(str(error))
    if kernel is None:
        return Check("nvidia driver", True, "none; GPUs are slices of CPU cores (backend cpu)")
    return Check(
        "nvidia driver",
        False,
        f"{kernel}, but {error}",
        "the GPUs are left alone and jobs run on slices of CPU cores",
        "give the container the driver's libraries: --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )


def _kernel_driver() -> str | None:
    try:
        return KERNEL_DRIVER.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _broken(reason: str) -> Check:
    return Check(
        "nvidia driver",
        False,
        reason,
        "the host agent does not start here: jobs must not run on CPU cores instead of their GPUs",
        "mend the driver (reboot after an update, see dmesg), or set device.backend to cpu to go without GPUs",
        essential=True,
    )


def _silent(reason: str, cost: str, *, essential: bool) -> Check:
    fix = "see dmesg; where it does not come back, reset the GPUs (nvidia-smi -r) or reboot"
    return Check("nvidia driver", False, reason, cost, fix, essential)


def _driver(library: Library) -> Check:
    try:
        version, cuda = call_within(TIMEOUT_S, "the driver's version", _versions, library)
    except Hung as error:
        cost = "the host joins all the same, with the GPUs that answer; other calls may hang as well"
        return _silent(str(error), cost, essential=False)
    version = version or "of unknown version"
    return Check("nvidia driver", True, str(version) + (f", CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""))


def _versions(library: Library) -> tuple[Any, Any]:
    asker = Asker(library)
    return asker.ask("nvmlSystemGetDriverVersion"), asker.ask("nvmlSystemGetCudaDriverVersion")


def _facts(library: Library, boards: Sequence[FoundBoard]) -> tuple[list[_Facts], list[str]]:
    """What the GPUs say of themselves, and which of them do not answer."""
    facts, silent = [], []
    for board in boards:
        try:
            what, name = f"GPU {board.uuid}", board.gpus[0].gpu_type
            facts.append(call_within(TIMEOUT_S, what, _ask, library, board.uuid, board.parts, name))
        except (NvmlFailure, Hung) as error:
            silent.append(f"{board.uuid}: {error}")
    return facts, silent


def _ask(library: Library, uuid: str, parts: Sequence[Part], name: str) -> _Facts:
    asker = Asker(library)
    handle: Any = library.call("nvmlDeviceGetHandleByUUID", uuid)
    mig = any(part.mig for part in parts)
    asker.ask(UTILISATION, handle, 0, usual=NOTHING_NEW)
    failure = asker.failures.get(UTILISATION)
    return _Facts(
        name=name,
        mig=mig,
        instances=len(parts) if mig else 0,
        compute_mode=asker.ask("nvmlDeviceGetComputeMode", handle),
        processes_missing="not told of MIG instances" if mig else "" if failure is None else str(failure),
        gpm_missing=why_not(asker, library.module, handle, parts[0].gpu_instance),
    )


def _gpus(facts: Sequence[_Facts], left_out: Sequence[str]) -> Check:
    names = [each.name for each in facts]
    found = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none that can be used"
    return verdict(
        "GPUs",
        bool(facts) and not left_out,
        "; ".join([found, *left_out]),
        "jobs cannot use them",
        "see dmesg for XID errors, reset the GPU (nvidia-smi -r) or reboot; look at CUDA_VISIBLE_DEVICES",
        essential=not facts,
    )


def _device_files() -> Check:
    closed = [name for name in DEVICE_FILES if not os.access(name, os.R_OK | os.W_OK)]
    return verdict(
        "GPU permissions",
        not closed,
        f"no access to {', '.join(closed)}" if closed else "device files can be used",
        "CUDA programs do not start",
        "let this user read and write /dev/nvidia* (group, udev rule), or give the container the devices (--gpus all)",
    )


def _compute_modes(facts: Sequence[_Facts]) -> Check:
    modes = [each.compute_mode for each in facts if each.compute_mode is not None]
    words = ", ".join(dict.fromkeys(_COMPUTE_MODES.get(mode, str(mode)) for mode in modes)) or "not told"
    lonely = any(mode in _EXCLUSIVE for mode in modes) and not _has_mps()
    return verdict(
        "GPU compute mode",
        _PROHIBITED not in modes and not lonely,
        words,
        "no program may use the GPU"
        if _PROHIBITED in modes
        else "without MPS one process at a time: jobs cannot share",
        "nvidia-smi -c DEFAULT",
    )


def _processes(facts: Sequence[_Facts]) -> Check:
    missing = _reasons(each.processes_missing for each in facts)
    return verdict(
        "GPU use by process",
        not missing,
        missing or "told",
        "what each of several jobs on a GPU uses is an estimate",
        "a newer driver, or more permissions; of MIG instances nobody tells it: one job each is measured",
    )


def _process_numbers(pids: PidMap) -> Check:
    return verdict(
        "process numbers",
        pids.translates,
        "those of the host" if pids.same else "translated" if pids.translates else "a container's own",
        "the driver numbers processes as the host does: jobs on one GPU may not be told apart",
        f"start the container with --pid=host, or mount the host's /proc at {HOST_PROC}",
    )


def _gpm(facts: Sequence[_Facts]) -> Check:
    missing = _reasons(each.gpm_missing for each in facts)
    return verdict(
        "GPM counters",
        not missing,
        missing or "read",
        "no use of multiprocessors, pipes and memory bandwidth: slowdowns are predicted from shares of time alone",
        "Hopper or later GPUs have them; in a container they may need CAP_SYS_ADMIN",
    )


def _mig(facts: Sequence[_Facts]) -> Check:
    on = [each for each in facts if each.mig]
    instances = sum(each.instances for each in on)
    return Check(
        "MIG", True, f"on for {len(on)} GPUs, {instances} instances" if on else "off; GPUs are shared as a whole"
    )


def _has_mps() -> bool:
    return any(os.access(f"{part}/{CONTROL}", os.X_OK) for part in os.get_exec_path())


def _mps() -> Check:
    return verdict(
        "MPS",
        _has_mps(),
        CONTROL if _has_mps() else f"{CONTROL} is not on PATH",
        "jobs on a GPU take turns instead of running side by side, and memory is held by the job's own allocator only",
        "install the driver's compute utilities (nvidia-compute-utils), or mount them into the container",
    )


def _checkpoints() -> Check:
    return freezing_verdict("GPU checkpoints", CheckpointPause().missing())


def freezing_verdict(name: str, missing: str) -> Check:
    """Judge whether the driver can freeze jobs, from what is missing for that; empty = nothing is."""
    return verdict(
        name,
        not missing,
        missing or "jobs with checkpoint: driver can be frozen, on whole GPUs; they run without MPS",
        "checkpoint: driver does nothing here: suspending or moving a job stops it, and it starts over unless it saves "
        "its state itself (checkpoint: own)",
        "pip install 'cuda-core>=1.0' and a driver of CUDA 12.8 or later",
    )


def _reasons(missing: Any) -> str:
    return "; ".join(dict.fromkeys(reason for reason in missing if reason))
