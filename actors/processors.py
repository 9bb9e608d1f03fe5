"""How many processor cores the jobs of this host may have together."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")  # in a container, the container's own


def processors(groups: Path = _GROUPS) -> float:
    """Return the cores this process may run on, or fewer where the kernel lets its container use less time of them.

    Args:
        groups: Where the container's control group is mounted.
    """
    cores = float(len(os.sched_getaffinity(0)))
    limit = _limit(groups)
    return cores if limit is None else min(cores, limit)


def _limit(groups: Path) -> float | None:
    """Return the processor time the group may use per time; None = as much as there is, or the kernel does not say."""
    try:  # version 2: "200000 100000" or "max 100000", microseconds per period
        quota, period = (groups / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:  # version 1: -1 = no limit
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii")
        except (OSError, ValueError):
            return None
    try:
        found = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return None
    return found if found > 0.0 else None
