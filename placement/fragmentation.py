"""How much of the cluster a placement makes unusable for the jobs that are typically asked for.

After the fragmentation gradient of FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023): what is free counts
as a fragment for a class of jobs that cannot use it, fragments are weighted by how common each class is, and a job
goes where it adds fewest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cotenant.placement.fleet import Fleet, Floats, Integers

# How common jobs of each size are, in whole GPUs on one host and in the part of a GPU's memory. The sizes follow what
# is published of clusters for training (most jobs ask for one GPU, and the rest for powers of two).
GANGS: Mapping[int, float] = {1: 0.70, 2: 0.12, 4: 0.10, 8: 0.08}
MEMORY: Mapping[float, float] = {0.125: 0.25, 0.25: 0.25, 0.5: 0.30, 1.0: 0.20}


def fragments_made(fleet: Fleet, places: Integers, needs: Integers) -> Floats:
    """Return the expected fragments that one share on each of these GPUs adds, in GPUs; negative when it uses some up.

    Args:
        fleet: All GPUs.
        places: Positions of the GPUs asked about, shape (candidates,).
        needs: Memory the share would take there, bytes, same shape.
    """
    left = fleet.idle[fleet.host[places]]
    hosts = np.where(fleet.crowd[places] == 0, _idle_fragments(left - 1) - _idle_fragments(left), 0.0)
    capacity = np.maximum(fleet.capacity[places], 1)
    free = fleet.free[places]
    made: Floats = hosts + _memory_fragments((free - needs) / capacity) - _memory_fragments(free / capacity)
    return np.round(made, 9)


def _idle_fragments(idle: Integers) -> Floats:
    """Return the idle GPUs of a host that a typical gang cannot use, since there are fewer than it needs."""
    lost = np.zeros(len(idle))
    for size, common in GANGS.items():
        lost += common * np.where(idle < size, idle, 0)
    return lost


def _memory_fragments(free: Floats) -> Floats:
    """Return the part of a GPU's memory that is free and too small for a typical job."""
    lost = np.zeros(len(free))
    for size, common in MEMORY.items():
        lost += common * np.where(free < size, free, 0.0)
    return lost
