"""How much more of the host's memory a process may take: what the machine has, and what its memory groups allow."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cotenant.actors.enforcement.cgroup import group_mounts, group_paths

_PROC = Path("/proc")
# By version: the limit of a group, what it uses, and the line of what it would give back before anything is refused.
_GROUP = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def room_bytes(pid: int, proc: Path = _PROC) -> int:
    """Return how many bytes a process may still take before it, or another, gets none.

    Args:
        pid: The process.
        proc: Where the kernel tells.

    Raises:
        OSError: The kernel does not tell.
    """
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(available, *_rooms(pid, proc)))


def _rooms(pid: int, proc: Path) -> list[int]:
    """The room in each memory group that the process is in, as far as they have limits."""
    found = [1 << 62]
    with suppress(OSError):  # no groups here, or the process is gone
        paths = group_paths((proc / str(pid) / "cgroup").read_text(encoding="utf-8"))
        places = group_mounts((proc / "self" / "mountinfo").read_text(encoding="utf-8"))
        for controller, files in _GROUP.items():
            if controller in paths and controller in places:
                place = places[controller]
                group = place / paths[controller].strip("/")
                above = [each for each in group.parents if each == place or place in each.parents]
                found += [room for each in (group, *above) if (room := _room(each, *files)) is not None]
    return found


def _room(group: Path, most: str, current: str, given_back: str) -> int | None:
    try:
        limit = int((group / most).read_text(encoding="ascii"))
        used = int((group / current).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + int(stat.get(given_back, 0))
    except (OSError, ValueError):
        return None  # no limit ("max"), or no memory controller
