"""Where baseline policies work: what one may know of jobs and GPUs, and how it starts and suspends jobs.

A policy is a small class, nearly always without any state of its own. It is called after every change and acts through
the desk, whose actions take effect at once. It knows of a job's length what its ``knows`` says: nothing, somebody's
estimate, or the true run time (an oracle, for comparison).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cotenant.scheduler.simulation.world import Happening, Run, World

Knows = Literal["nothing", "estimates", "durations"]
Key = tuple[float, ...]
UNKNOWN_UTIL = 1.0  # a job nobody knows the utilisation of counts as one that fills the GPU
_LOST = 1_000_000  # added to the crowd of a lost node's GPUs


@dataclass(slots=True, eq=False)
class Entry:
    """A job as a policy sees it.

    Attributes:
        index: Its place in the order of submission.
        job_id, submit_s, gpus, workload, memory_bytes, util, user, weight: As in the trace.
        size_s: Expected run time in all, as far as the policy is told; None = it is not.
        held: GPUs it has now; empty while it waits.
        since: When it got them.
        attained_s: Time it ran before that.
        restarts: How often it was suspended or crashed.
    """

    index: int
    job_id: str
    submit_s: float
    gpus: int
    workload: str
    memory_bytes: int
    util: float | None
    user: str
    weight: float
    size_s: float | None
    held: tuple[int, ...] = ()
    since: float = 0.0
    attained_s: float = 0.0
    restarts: int = 0
    key: Key = ()

    def service(self, now: float) -> float:
        """Return the GPU-seconds it has had so far."""
        return self.gpus * (self.attained_s + (now - self.since if self.held else 0.0))


class BaselinePolicy(Protocol):
    """One way to schedule. The class is its documentation; an instance serves one simulation."""

    name: str
    knows: Knows

    def key(self, entry: Entry, desk: Desk) -> Key:
        """Return what the waiting queue is ordered by, smallest first, when the job joins it."""
        ...

    def schedule(self, desk: Desk) -> None:
        """Start and suspend jobs."""
        ...


class Desk:
    """The driver of a world for one baseline policy.

    Attributes:
        waiting: Jobs that wait, by the policy's key.
        running: Jobs that hold GPUs, in order of their starts.
        free: For each node the GPUs nobody uses (none of a lost node), in order.
        arrived: Jobs that have come since the last call.
        freed: Whether GPUs have become free since the last call: if not, who did not fit then does not fit now.
        crowds: Number of jobs on each GPU, shape (GPUs,); of a lost node's GPUs more than any policy allows.
        utils: Sum of its jobs' utilisations, shape (GPUs,); a job nobody knows the utilisation of counts as 1.
        memory_left: Bytes no job uses, shape (GPUs,).
        nodes: Number of the node of each GPU, shape (GPUs,).
    """

    def __init__(self, world: World, policy: BaselinePolicy) -> None:
        self._world, self._policy = world, policy
        self.waiting: list[Entry] = []
        self.running: dict[int, Entry] = {}
        self.free: list[list[int]] = [list(gpus) for gpus in world.node_gpus]
        self.free_count = len(world.node_of)
        self._keys: list[tuple[Key, int]] = []
        self._entries: dict[int, Entry] = {}
        self._alarm_at = -1.0
        self.arrived: list[Entry] = []
        self.freed = False
        self.crowds = np.zeros(len(world.node_of), dtype=np.int64)
        self.utils = np.zeros(len(world.node_of))
        self.memory_left = np.array(world.memory, dtype=np.int64)
        self.nodes = np.array(world.node_of, dtype=np.intp)
        self.node_count = len(world.node_gpus)

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start of the trace."""
        return self._world.now

    @property
    def total_gpus(self) -> int:
        """GPUs of nodes that are up."""
        return len(self._world.node_of) - sum(len(self._world.node_gpus[number]) for number in self._world.down)

    @property
    def largest_node(self) -> int:
        """GPUs of the largest node, lost or not."""
        return max(len(gpus) for gpus in self._world.node_gpus)

    def is_lost(self, node: int) -> bool:
        """Return whether the node is lost."""
        return node in self._world.down

    def gpus_of(self, node: int) -> Sequence[int]:
        """Return the GPUs of a node."""
        return self._world.node_gpus[node]

    def gpu_type(self, gpu: int) -> str:
        """Return the type of a GPU."""
        return self._world.gpu_type[gpu]

    def memory_bytes(self, gpu: int) -> int:
        """Return the memory of a GPU."""
        return self._world.memory[gpu]

    def slot_bytes(self, slots: int) -> NDArray[np.int64]:
        """Return the memory of one of ``slots`` equal parts of each GPU, shape (GPUs,)."""
        return np.array(self._world.memory, dtype=np.int64) // slots

    def residents(self, gpu: int) -> list[Entry]:
        """Return the jobs on a GPU."""
        return [self._entries[run.index] for run in self._world.residents[gpu]]

    def remaining_s(self, entry: Entry) -> float:
        """Return the run time the job is expected to have left, restarts included.

        Raises:
            ValueError: The policy is not told any run times.
        """
        if entry.size_s is None:
            raise ValueError(f"job {entry.job_id}: {self._policy.name} is told nothing of its run time")
        run = self._world.runs[entry.index]
        left = self._world.remaining_now(run)
        return left if self._policy.knows == "durations" else max(0.0, entry.size_s - (run.job.duration_s - left))

    # -- acting -----------------------------------------------------------------------------------------------------

    def start(self, entry: Entry, gpus: Sequence[int]) -> None:
        """Put a waiting job on these GPUs."""
        world = self._world
        for gpu in gpus:
            if not world.residents[gpu]:
                self.free[world.node_of[gpu]].remove(gpu)
                self.free_count -= 1
        world.start(world.runs[entry.index], gpus)
        entry.held, entry.since = tuple(gpus), world.now
        place = bisect_left(self._keys, (entry.key, entry.index))
        del self._keys[place], self.waiting[place]
        self.running[entry.index] = entry
        self._count(entry, gpus, 1)

    def suspend(self, entry: Entry) -> None:
        """Take a running job from its GPUs and let it wait again."""
        gpus = entry.held
        self._world.suspend(self._world.runs[entry.index])
        self._left(entry, gpus)
        entry.restarts += 1
        self._join(entry)

    def wake(self, at: float) -> None:
        """Be called at that time even if nothing happens; only the earliest of several wishes counts."""
        if self._alarm_at > self.now and self._alarm_at <= at:
            return
        self._alarm_at = at
        self._world.alarm(at, at)

    # -- the driver -------------------------------------------------------------------------------------------------

    def step(self, happened: Sequence[Happening]) -> None:
        """See ``Driver.step``."""
        self.arrived, self.freed = [], False
        for happening in happened:
            run = happening.run
            if happening.kind == "arrived" and run is not None:
                entry = self._meet(run)
                self._join(entry)
                self.arrived.append(entry)
            elif happening.kind == "finished" and run is not None:
                self._left(self._entries.pop(run.index), happening.gpus)
            elif happening.kind == "failed" and run is not None:
                entry = self._entries[run.index]
                self._left(entry, happening.gpus)
                entry.restarts += 1
                self._join(entry)
            elif happening.kind == "node_lost":
                self.free_count -= len(self.free[happening.what])
                self.free[happening.what] = []
                self.crowds[self._world.node_gpus[happening.what]] += _LOST
            elif happening.kind == "node_back":
                self.free[happening.what] = list(self._world.node_gpus[happening.what])
                self.free_count += len(self.free[happening.what])
                self.crowds[self._world.node_gpus[happening.what]] -= _LOST
                self.freed = True
        self._policy.schedule(self)

    def _meet(self, run: Run) -> Entry:
        job = run.job
        told = {"nothing": None, "estimates": job.estimate_s, "durations": job.duration_s}
        size_s = told[self._policy.knows]
        entry = Entry(
            run.index, job.job_id, job.submit_s, job.gpus, job.workload, job.memory_bytes, job.util, job.user,
            job.weight, size_s,
        )  # fmt: skip
        self._entries[run.index] = entry
        return entry

    def _join(self, entry: Entry) -> None:
        entry.key = self._policy.key(entry, self)
        place = bisect_left(self._keys, (entry.key, entry.index))
        self._keys.insert(place, (entry.key, entry.index))
        self.waiting.insert(place, entry)

    def _left(self, entry: Entry, gpus: Sequence[int]) -> None:
        world = self._world
        del self.running[entry.index]
        entry.attained_s += world.now - entry.since
        entry.held = ()
        self.freed = True
        self._count(entry, gpus, -1)
        for gpu in gpus:
            node = world.node_of[gpu]
            if not world.residents[gpu] and node not in world.down and gpu not in self.free[node]:
                self.free[node].append(gpu)
                self.free[node].sort()
                self.free_count += 1

    def _count(self, entry: Entry, gpus: Sequence[int], sign: int) -> None:
        util = UNKNOWN_UTIL if entry.util is None else entry.util
        for gpu in gpus:
            self.crowds[gpu] += sign
            self.memory_left[gpu] -= sign * entry.memory_bytes
            self.utils[gpu] = self.utils[gpu] + sign * util if self.crowds[gpu] % _LOST else 0.0
