"""Measured pairs as arrays: what the interference model is fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

UTIL, BANDWIDTH, STEP, MEMORY = "util", "membw_util", "log_step_s", "log_memory_bytes"
DEMANDS: tuple[str, ...] = (UTIL, BANDWIDTH)  # more of these in a neighbour can only hurt


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Jobs as the model sees them.

    Attributes:
        ids: One key per job; measured pairs are found again by it. "" = never seen before.
        families: Model family per job; "" = not known.
        features: Shape (jobs, features); NaN = not measured. ``util`` and ``membw_util`` are fractions in [0, 1].
    """

    ids: tuple[str, ...]
    families: tuple[str, ...]
    features: Floats

    def __post_init__(self) -> None:
        count = len(self.ids)
        if len(self.families) != count or self.features.ndim != 2 or self.features.shape[0] != count:
            shape = self.features.shape
            raise ValueError(
                f"jobs: {count} ids, {len(self.families)} families and features of shape {shape} do not belong together"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: Sequence[int] | Ints) -> Jobs:
        """The jobs at these positions, in this order."""
        return Jobs(
            tuple(self.ids[i] for i in which),
            tuple(self.families[i] for i in which),
            self.features[np.asarray(which, dtype=np.intp)],
        )

    def joined(self, other: Jobs) -> Jobs:
        """These jobs and then the others."""
        return Jobs(self.ids + other.ids, self.families + other.families, np.vstack([self.features, other.features]))


@dataclass(frozen=True, slots=True, eq=False)
class PairTable:
    """Ordered pairs of jobs that shared a GPU, one row per focal job.

    Attributes:
        names: Names of the features.
        jobs: The jobs the rows speak of.
        focal: Shape (rows,): position of the job whose throughput was measured.
        other: Shape (rows,): position of its neighbour.
        throughput: Shape (rows,): shared rate / solo rate of the focal job; finite, may exceed 1 by noise.
        noise: Shape (rows,): standard error of ``throughput``; 0 = as noisy as the others.
    """

    names: tuple[str, ...]
    jobs: Jobs
    focal: Ints
    other: Ints
    throughput: Floats
    noise: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        rows = len(self.focal)
        if not len(self.noise):
            object.__setattr__(self, "noise", np.zeros(rows))
        if not rows == len(self.other) == len(self.throughput) == len(self.noise):
            raise ValueError("pairs: focal, other, throughput and noise must have one entry per row")
        if len(self.names) != self.jobs.features.shape[1]:
            raise ValueError(f"pairs: {len(self.names)} names for {self.jobs.features.shape[1]} features")
        if len(set(self.jobs.ids)) != len(self.jobs) or "" in self.jobs.ids:
            raise ValueError("pairs: the ids of measured jobs must be different and not empty")
        bad = np.flatnonzero(~np.isfinite(self.throughput) | (self.throughput <= 0.0))
        if len(bad):
            row = int(bad[0])
            raise ValueError(f"pairs: throughput {self.throughput[row]} in row {row} is not accepted; give one above 0")
        if rows and not (0 <= min(self.focal.min(), self.other.min()) <= max(self.focal.max(), self.other.max())):
            raise ValueError("pairs: a row names a job that does not exist")
        if rows and max(self.focal.max(), self.other.max()) >= len(self.jobs):
            raise ValueError("pairs: a row names a job that does not exist")

    def __len__(self) -> int:
        return len(self.focal)

    def rows(self, which: Sequence[int] | Ints | NDArray[np.bool_]) -> PairTable:
        """The rows at these positions (or where true); the jobs stay."""
        pick = np.asarray(which)
        return replace(
            self,
            focal=self.focal[pick],
            other=self.other[pick],
            throughput=self.throughput[pick],
            noise=self.noise[pick],
        )

    def measured_only(self) -> PairTable:
        """The same rows, without the jobs that occur in none of them."""
        used, index = np.unique(np.concatenate([self.focal, self.other]), return_inverse=True)
        count = len(self.focal)
        return replace(self, jobs=self.jobs.take(used), focal=index[:count], other=index[count:])

    def families(self) -> Ints:
        """Shape (jobs,): the number of each job's family; a job of no known family is one of its own."""
        return group_numbers(
            [family or f"only {name}" for family, name in zip(self.jobs.families, self.jobs.ids, strict=True)]
        )

    def touched(self, groups: Ints, group: int) -> NDArray[np.bool_]:
        """Which rows have a job of this group on either side; groups has one number per job."""
        return np.asarray((groups[self.focal] == group) | (groups[self.other] == group), dtype=np.bool_)


def group_numbers(names: Sequence[str]) -> Ints:
    """Number the different names 0, 1, … in order of their first appearance."""
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(name, len(seen)) for name in names], dtype=np.intp)
