"""Memory groups of the kernel (cgroups): a limit that holds for all processes in it together, shared memory too.

Version 2 where its memory controller can be used below this process's own group or beside it, else version 1 where
that can be written, else none. A group that grows beyond its limit is not refused memory: the kernel kills a process
of it.

In version 2 a group that holds processes cannot hand controllers on to groups below it ("no internal processes"; only
the root of the hierarchy may). Since this process is in its own group, the groups lie beside that one, in its parent,
wherever the parent is ours to write: a unit or user session of systemd that is delegated, with this process in a
group below it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """The groups of one host.

    Attributes:
        base: The group below which they are.
        version: Of cgroups.
    """

    base: Path
    version: Literal[1, 2]

    def create(self, name: str, limit_bytes: int) -> Path:
        """Make a group.

        Raises:
            OSError: It cannot be made.
        """
        group = self.base / name
        group.mkdir(parents=True, exist_ok=True)
        self.limit(group, limit_bytes)
        return group

    def limit(self, group: Path, limit_bytes: int) -> None:
        """Limit a group, but never to less than it has: the kernel would kill for it.

        Raises:
            OSError: The kernel does not accept it.
        """
        most, current = _FILES[self.version]
        used = int((group / current).read_text(encoding="ascii"))
        (group / most).write_text(str(max(limit_bytes, used)), encoding="ascii")

    def add(self, group: Path, pids: Iterable[int]) -> None:
        """Put processes into a group; those that have ended are none."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def members(self, group: Path) -> set[int]:
        """Return the processes in a group."""
        return {int(line) for line in (group / "cgroup.procs").read_text(encoding="ascii").split()}

    def remove_all_but(self, names: Iterable[str]) -> None:
        """Remove the groups with other names, as far as no process is left in them."""
        kept = set(names)
        for group in self.base.iterdir() if self.base.exists() else ():
            if group.is_dir() and group.name not in kept:
                with contextlib.suppress(OSError):
                    group.rmdir()


def find_groups(
    name: str, own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> MemoryGroups | None:
    """Return where memory groups can be made; None where they cannot.

    Args:
        name: Of the group that will hold them.
        own: Says which groups this process is in.
        mounts: Says where they are mounted.
    """
    try:
        paths = group_paths(own.read_text(encoding="utf-8"))
        places = group_mounts(mounts.read_text(encoding="utf-8"))
    except OSError:
        return None
    for version, controller in ((2, ""), (1, "memory")):
        if controller not in paths or controller not in places:
            continue
        group = paths[controller].strip("/")
        within = places[controller] / group
        for parent in (within, within.parent) if version == 2 and group else (within,):
            groups = MemoryGroups(parent / name, version)  # type: ignore[arg-type]  # 1 or 2
            if _usable(groups):
                return groups
    return None


def _usable(groups: MemoryGroups) -> bool:
    """Try it out: whether a group can be limited, and processes be put into it, is not written anywhere."""
    trial = groups.base / f"trial-{os.getpid()}"
    try:
        if groups.version == 2:
            _hand_on_memory(groups.base.parent)
        groups.base.mkdir(exist_ok=True)
        if groups.version == 2:
            _hand_on_memory(groups.base)
        groups.create(trial.name, 1 << 30)
        process = subprocess.Popen(["sleep", "60"])
        try:
            groups.add(trial, [process.pid])
        finally:
            process.kill()
            process.wait()
        trial.rmdir()
    except (OSError, ValueError):
        for group in (trial, groups.base):
            with contextlib.suppress(OSError):
                group.rmdir()
        return False
    return True


def _hand_on_memory(group: Path) -> None:
    """Have the groups below a group of version 2 limit memory.

    Raises:
        OSError: It cannot: it does not have that controller itself, holds processes, or is not ours to write.
    """
    control = group / "cgroup.subtree_control"
    if "memory" not in control.read_text(encoding="ascii").split():
        control.write_text("+memory", encoding="ascii")


def group_paths(text: str) -> dict[str, str]:
    """Return this process's group by controller; "" is version 2."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def group_mounts(text: str) -> dict[str, Path]:
    """Return the mount point by controller; "" is version 2."""
    places: dict[str, Path] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        place, (kind, _, options) = Path(before.split()[4]), after.split(" ", 2)
        if kind == "cgroup2":
            places.setdefault("", place)
        elif kind == "cgroup" and "memory" in options.split(","):
            places.setdefault("memory", place)
    return places
