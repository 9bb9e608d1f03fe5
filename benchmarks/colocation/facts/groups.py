"""What control groups of either version give here, tried on a load in a group made for it and removed again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.colocation.facts.checks import (
    MIB,
    Check,
    Context,
    Finding,
    Load,
    Unknown,
    share_of_core,
    state_of,
    wait_for,
)

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")
_EXTRA_MIB = 512


def find_group(controller: str, mounts: Path = _MOUNTS, own: Path = _OWN) -> tuple[int, Path] | None:
    """This process's group of a controller.

    Args:
        controller: ``"memory"``, ``"cpu"`` or ``"freezer"``.
        mounts: The table of mounts.
        own: The file that names this process's groups.

    Returns:
        The version (1 or 2) and the group's folder; None when neither version has the controller here.
    """
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in own.read_text(encoding="utf-8").splitlines()}
    second = None
    for line in mounts.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup" and controller in options.split(","):
            name = next((names for names in paths if controller in names.split(",")), None)
            if name is not None:
                return 1, _inside(Path(mount), root, paths[name])
        if kind == "cgroup2" and "" in paths:
            folder = _inside(Path(mount), root, paths[""])
            offered = folder / "cgroup.controllers"
            # Every group of version 2 can be frozen; no controller is needed for that.
            if controller == "freezer" or (offered.exists() and controller in offered.read_text("utf-8").split()):
                second = 2, folder
    return second


def _inside(mount: Path, root: str, path: str) -> Path:
    """Where a group's path lies under its mount; in a container the mount may be the group itself."""
    folder = mount / path.removeprefix(root if root != "/" else "").lstrip("/")
    return folder if folder.is_dir() else mount


def _make(context: Context, controller: str) -> tuple[int, Path]:
    """A new group below this process's own, removed at the end of the check."""
    found = find_group(controller)
    if found is None:
        raise Unknown(f"no control group here has the controller {controller}")
    version, parent = found
    group = parent / f"cotenant-facts-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise Unknown(f"version {version}: no group can be made in it: {error.strerror}", version=version) from error
    context.stack.callback(_remove, group)
    return version, group


def _remove(group: Path) -> None:
    """Remove a group; its processes have ended, but the kernel may need a moment to notice."""

    def removed() -> bool:
        with suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_for(removed, 2.0)


def _set(group: Path, version: int, file: str, value: int | str) -> None:
    try:
        (group / file).write_text(f"{value}\n", encoding="ascii")
    except OSError as error:
        raise Unknown(f"version {version}: {file} cannot be set: {error.strerror}", version=version) from error


def _join(context: Context, group: Path, version: int) -> Load:
    load = context.load(core=context.core)
    load.answer()
    _set(group, version, "cgroup.procs", load.pid)
    return load


def memory_group(context: Context) -> Finding:
    """A memory limit on a group: what happens over it, to the process and to its neighbour."""
    version, group = _make(context, "memory")
    neighbour = context.load(core=context.core)
    neighbour.answer()
    load = _join(context, group, version)
    # What the load has touched so far is charged to the group it came from.
    _set(group, version, "memory.max" if version == 2 else "memory.limit_in_bytes", 256 * MIB)
    below = load.ask("hold", mib=64)["ok"]
    neighbour.tell("run", seconds=2.0)
    load.tell("hold", mib=_EXTRA_MIB)
    try:
        over = str(load.answer().get("error", "it was given"))
        status = None
    except Unknown:
        status = load.ended()
        over = "the process was killed"
    answer = neighbour.answer()
    evidence = {
        "version": version,
        "below": below,
        "over": over,
        "exit_status": status,
        "neighbour_steps": answer["steps"],
        "neighbour_longest_s": answer["longest_s"],
    }
    return Finding(below and over != "it was given" and answer["steps"] > 0, evidence)


def cpu_group(context: Context) -> Finding:
    """A quota of half a core on a group."""
    version, group = _make(context, "cpu")
    load = _join(context, group, version)
    if version == 2:
        _set(group, version, "cpu.max", "50000 100000")
    else:
        _set(group, version, "cpu.cfs_quota_us", 50000)
    share = share_of_core(load, cap=0.5)
    return Finding(abs(share - 0.5) < 0.05, {"version": version, "share": share})


def freezer_group(context: Context) -> Finding:
    """Freeze a group in the middle of training."""
    version, group = _make(context, "freezer")
    load = _join(context, group, version)
    file, on, off = ("cgroup.freeze", "1", "0") if version == 2 else ("freezer.state", "FROZEN", "THAWED")
    load.tell("run", seconds=1.5)
    time.sleep(0.3)
    _set(group, version, file, on)
    shown, word = (group / "cgroup.events", "frozen 1") if version == 2 else (group / file, "FROZEN")
    frozen_s = wait_for(lambda: word in shown.read_text(encoding="ascii"), 1.0)
    before = time.clock_gettime((~load.pid << 3) | 2)
    time.sleep(0.5)
    used_s = time.clock_gettime((~load.pid << 3) | 2) - before
    state = state_of(load.pid)
    _set(group, version, file, off)
    answer = load.answer()
    evidence = {"version": version, "frozen_after_s": frozen_s, "cpu_while_frozen_s": used_s, "state": state}
    return Finding(frozen_s is not None and used_s == 0.0, {**evidence, "steps": answer["steps"]})


GROUP_CHECKS = (
    Check("memory_cgroup", "Over a control group's memory limit only its own process suffers", memory_group),
    Check("cpu_cgroup", "A control group's quota holds a process to half a core within .05", cpu_group),
    Check("freezer_cgroup", "A frozen control group uses no CPU time and goes on where it was", freezer_group),
)
