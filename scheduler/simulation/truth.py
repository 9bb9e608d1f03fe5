"""What really happens when jobs share a GPU. Schedulers never see this; they see what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_LEAST = 0.01  # nobody stands still for ever


class Truth(Protocol):
    """How fast work goes."""

    def alone(self, workload: str, gpu_type: str, gpus: int) -> float:
        """Return the speed of a job that has its GPUs to itself, 1.0 = as on the reference type."""
        ...

    def together(self, workloads: tuple[str, ...], gpu_type: str) -> tuple[float, ...]:
        """Return each member's normalised throughput n in (0, 1] when these share one GPU."""
        ...


@dataclass(slots=True)
class NoInterference:
    """Every job is as fast as alone, whatever runs beside it: the truth where nothing was measured.

    Attributes:
        speeds: Speed of a GPU type relative to the reference type; 1.0 where not given.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)

    def alone(self, workload: str, gpu_type: str, gpus: int) -> float:
        """See ``Truth.alone``."""
        return self.speeds.get(gpu_type, 1.0)

    def together(self, workloads: tuple[str, ...], gpu_type: str) -> tuple[float, ...]:
        """See ``Truth.together``."""
        return (1.0,) * len(workloads)


@dataclass(slots=True)
class PairTable:
    """Measured pairs, put together where more than two share.

    Three and more: a job's slowdown is 1 + the sum of the excess slowdowns 1/n - 1 that each neighbour alone costs it.
    Three jobs that halve each other in pairs run at a third: what sharing in turns gives. The sum misses that jobs
    which do not notice each other in pairs may fill the device in threes, so the device's work is bounded as well:
    ``sum(u * n)`` of the set is at most what its best pair does, or a full device where that is more; a set above it
    is slowed down alike.

    Attributes:
        pairs: n of the first of two workloads beside the second, both orders.
        util: Utilisation of each workload alone, for the bound; a workload not in it is not bounded.
        solo: Speed alone by (workload, GPU type), relative to the reference type.
        speeds: The same by GPU type, for workloads that ``solo`` does not have; 1.0 where neither says it.
        default: n of a pair that is not in ``pairs``; None = such a pair is an error.
    """

    pairs: Mapping[tuple[str, str], float]
    util: Mapping[str, float] = field(default_factory=dict)
    solo: Mapping[tuple[str, str], float] = field(default_factory=dict)
    default: float | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    _known: dict[tuple[str, ...], tuple[float, ...]] = field(default_factory=dict)

    def alone(self, workload: str, gpu_type: str, gpus: int) -> float:
        """See ``Truth.alone``."""
        return self.solo.get((workload, gpu_type), self.speeds.get(gpu_type, 1.0))

    def together(self, workloads: tuple[str, ...], gpu_type: str) -> tuple[float, ...]:
        """See ``Truth.together``.

        Raises:
            KeyError: A pair was never measured and there is no default.
        """
        known = self._known.get(workloads)
        if known is None:
            alike = tuple(sorted(workloads))  # sums are exact: the same comes out in whatever order they are given
            if alike not in self._known:
                self._known[alike] = self._compose(alike)
            n_of = dict(zip(alike, self._known[alike], strict=True))
            known = self._known[workloads] = tuple([n_of[name] for name in workloads])
        return known

    def pair(self, one: str, other: str) -> float:
        """Return n of ``one`` beside ``other``."""
        n = self.pairs.get((one, other), self.default)
        if n is None:
            raise KeyError(f"the pair of {one!r} and {other!r} is not in the table")
        return min(1.0, max(_LEAST, n))

    def _compose(self, workloads: tuple[str, ...]) -> tuple[float, ...]:
        count = len(workloads)
        if count == 1:
            return (1.0,)
        pair = self.pair
        excess = [
            math.fsum([1.0 / pair(one, other) - 1.0 for j, other in enumerate(workloads) if j != i])
            for i, one in enumerate(workloads)
        ]
        speeds = [1.0 / (1.0 + e) for e in excess]
        if count > 2 and all(name in self.util for name in workloads):
            work = math.fsum(self.util[name] * n for name, n in zip(workloads, speeds, strict=True))
            bound = max(1.0, self._best_pair(workloads))
            if work > bound:
                speeds = [n * bound / work for n in speeds]
        return tuple(max(_LEAST, n) for n in speeds)

    def _best_pair(self, workloads: Sequence[str]) -> float:
        util = self.util
        return max(
            util[a] * self.pair(a, b) + util[b] * self.pair(b, a)
            for i, a in enumerate(workloads)
            for b in workloads[i + 1 :]
        )
