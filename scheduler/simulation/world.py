"""The physical side of a simulation: time, GPUs, the progress of jobs, failures. It decides nothing.

A driver (a baseline policy's desk, or the shipped core's shell) is told what happened and answers by starting and
suspending jobs. Time is virtual: the next event is taken from a heap. A job's remaining work counts in seconds alone
on the reference GPU type; it shrinks with the job's present speed, which changes only when the residents of one of its
GPUs change. A job on several GPUs runs at the speed of its slowest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from cotenant.scheduler.simulation.errors import SimulationError
from cotenant.scheduler.simulation.truth import Truth
from cotenant.scheduler.simulation.watch import Watch, fruitless, stalled
from cotenant.scheduler.simulation.workload import Cluster, Trace, TraceJob


@dataclass(frozen=True, slots=True)
class Costs:
    """What it costs to take a job from its GPUs and bring it back, in seconds of its work.

    Attributes:
        restart_s: For a job on at most ``wide_above`` GPUs.
        wide_restart_s: For a larger job.
        wide_above: The most GPUs a job has that pays ``restart_s``.
    """

    restart_s: float = 60.0
    wide_restart_s: float = 60.0
    wide_above: int = 8

    def of(self, gpus: int) -> float:
        """Return the cost for a job on so many GPUs."""
        return self.restart_s if gpus <= self.wide_above else self.wide_restart_s


@dataclass(frozen=True, slots=True)
class Faults:
    """What breaks, at random times (exponential) that depend on the seed and not on the policy's decisions.

    Attributes:
        job_mtbf_s: Mean time a job runs before it crashes; None = never. It goes on from its last checkpoint.
        node_mtbf_s: Mean time between losses of one node; None = never.
        node_repair_s: How long a lost node is away.
        checkpoint_s: Work between two checkpoints: what is done since the last one is lost in a crash.
        seed: Of the random times.
    """

    job_mtbf_s: float | None = None
    node_mtbf_s: float | None = None
    node_repair_s: float = 3600.0
    checkpoint_s: float = 600.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Run:
    """A job and what has become of it.

    Attributes:
        remaining_s: Work it has left, restarts included.
        restart_s: The part of it that its last restart still costs.
        saved_s: Work that its last checkpoint holds.
    """

    index: int
    job: TraceJob
    remaining_s: float
    restart_s: float = 0.0
    saved_s: float = 0.0
    gpus: tuple[int, ...] = ()
    speed: float = 0.0
    updated: float = 0.0
    since: float = 0.0
    version: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    run_s: float = 0.0
    work_s: float = 0.0
    suspensions: int = 0
    failures: int = 0
    starts: int = 0
    ran_with: dict[int, None] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether it holds GPUs now."""
        return bool(self.gpus)

    @property
    def done_s(self) -> float:
        """What it has done of its work; restarts are none."""
        return self.job.duration_s - (self.remaining_s - self.restart_s)


Kind = Literal["arrived", "finished", "failed", "node_lost", "node_back", "alarm"]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened now. ``run`` is None for nodes and alarms; ``what`` is the node's number or the alarm."""

    kind: Kind
    run: Run | None = None
    what: Any = None
    gpus: tuple[int, ...] = ()  # the GPUs the run held until now


class Driver(Protocol):
    """Whoever decides."""

    def step(self, happened: Sequence[Happening]) -> None:
        """Take in what happened at this moment and act on it."""
        ...


@dataclass(frozen=True, slots=True)
class Stint:
    """A stretch of time in which a job held GPUs, for the Gantt chart."""

    run: int
    start: float
    end: float
    gpus: tuple[int, ...]


@dataclass(slots=True)
class Timeline:
    """Cluster state after every event.

    Attributes:
        at: Times.
        occupied, shared: GPUs with a job, and with several.
        busy: Sum of the GPUs' utilisations, each at most 1.
        running, waiting: Jobs.
        up: GPUs of hosts that are not lost.
    """

    at: list[float] = field(default_factory=list)
    occupied: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)


class World:
    """GPUs, jobs and time.

    Attributes:
        now: Seconds since the start of the trace.
        runs: Every job of the trace, in order of submission.
        residents: Jobs on each GPU, in order of arrival there.
        node_of, gpu_type, memory: Of each GPU.
        node_gpus: GPUs of each node.
        down: Nodes that are lost.
        unfinished, coming: Numbers of jobs that have not ended, and that have not even arrived.
        utils_known: Whether the trace says the utilisation of every job that can run.
        busy: Sum of the GPUs' utilisations now, if so.
        unplaceable: Jobs that are larger than the whole cluster; they never arrive.
    """

    def __init__(
        self, trace: Trace, cluster: Cluster, truth: Truth, costs: Costs | None = None, faults: Faults | None = None
    ) -> None:
        if trace.counts != "seconds":
            raise SimulationError(f"trace {trace.name}: its jobs count in {trace.counts}; turn them into seconds first")
        self.trace, self.cluster, self.truth = trace, cluster, truth
        self.costs, self.faults = costs or Costs(), faults or Faults()
        self.now = 0.0
        self.runs = [Run(index, job, job.duration_s) for index, job in enumerate(trace.jobs)]
        self.node_gpus: list[list[int]] = []
        self.node_of: list[int] = []
        self.gpu_type: list[str] = []
        self.memory: list[int] = []
        for number, node in enumerate(cluster.nodes):
            first = len(self.node_of)
            self.node_gpus.append(list(range(first, first + node.gpus)))
            self.node_of += [number] * node.gpus
            self.gpu_type += [node.gpu_type] * node.gpus
            self.memory += [node.memory_bytes] * node.gpus
        self.residents: list[list[Run]] = [[] for _ in self.node_of]
        self.memory_used = [0] * len(self.node_of)
        self.down: set[int] = set()
        self.running: dict[int, Run] = {}
        self.waiting_count = 0
        self.occupied = 0
        self.shared = 0
        self.busy = 0.0
        self._busy_of = [0.0] * len(self.node_of)
        self.stints: list[Stint] = []
        self.timeline = Timeline()
        self.steps = 0
        self._heap: list[tuple[float, int, str, Any, int]] = []
        self._seq = 0
        self.unfinished = 0
        self.coming = 0
        self._large_enough: dict[int, int] = {}  # GPUs by the memory that they have at least
        self.unplaceable = [run for run in self.runs if not self._could_ever_run(run.job)]
        self.utils_known = all(run.job.util is not None for run in self.runs if self._could_ever_run(run.job))
        for run in self.runs:
            if self._could_ever_run(run.job):
                self._push(run.job.submit_s, "arrived", run)
                self.unfinished += 1
                self.coming += 1
        if self.faults.node_mtbf_s is not None:
            for number in range(len(cluster.nodes)):
                self._push(self._node_gap(number, 0), "node_lost", (number, 0))

    # -- time -------------------------------------------------------------------------------------------------------

    def run(self, driver: Driver, look: Callable[[World], None] | None = None) -> None:
        """Let time pass until every job that can run has ended.

        Args:
            driver: Decides.
            look: Called whenever jobs have ended, for whoever waits for the end.

        Raises:
            SimulationError: Nothing happens any more although jobs wait, nothing comes of what happens, or the driver
                did something impossible.
        """
        watch = Watch()
        while self.unfinished:
            if not self._heap:
                raise SimulationError(stalled(self))
            before, happened = self.unfinished, self._next()
            if not happened:
                continue
            driver.step(happened)
            self.steps += 1
            self._note_state()
            if look is not None and self.unfinished != before:
                look(self)
            if watch.stuck(self):
                raise SimulationError(fruitless(self))

    def alarm(self, at: float, what: Any) -> None:
        """Have the driver stepped at that time, with this as the happening's ``what``."""
        self._push(max(at, self.now), "alarm", what)

    def _next(self) -> list[Happening]:
        """Advance to the next time at which something happens, and return all of it."""
        self.now = self._heap[0][0]
        happened: list[Happening] = []
        while self._heap and self._heap[0][0] <= self.now:
            _, _, kind, subject, version = heapq.heappop(self._heap)
            happened += self._happen(kind, subject, version)
        return happened

    def _happen(self, kind: str, subject: Any, version: int) -> list[Happening]:
        if kind == "arrived":
            self.coming -= 1
            self.waiting_count += 1
            return [Happening("arrived", subject)]
        if kind == "alarm":
            return [Happening("alarm", None, subject)]
        if kind == "node_lost":
            return self._lose_node(*subject)
        if kind == "node_back":
            return self._bring_back(*subject)
        return self._end_stint(kind, subject, version)

    def _end_stint(self, kind: str, run: Run, version: int) -> list[Happening]:
        """A job finishes or crashes, unless its speed has changed since that was foreseen or it left its GPUs."""
        if not run.gpus or version != (run.version if kind == "finished" else run.starts):
            return []
        gpus = run.gpus
        if kind == "failed":
            self._crash(run)
            return [Happening("failed", run, gpus=gpus)]
        self._leave(run)
        run.remaining_s = 0.0
        run.ended_at = self.now
        self.unfinished -= 1
        return [Happening("finished", run, gpus=gpus)]

    # -- what a driver can do ---------------------------------------------------------------------------------------

    def start(self, run: Run, gpus: Sequence[int]) -> None:
        """Put a waiting job on these GPUs.

        Raises:
            SimulationError: The job runs or has ended, the number of GPUs is wrong, one is down or lacks memory.
        """
        self._check_start(run, gpus)
        run.gpus = tuple(gpus)
        run.since = run.updated = self.now
        run.starts += 1
        if run.started_at is None:
            run.started_at = self.now
        self.running[run.index] = run
        self.waiting_count -= 1
        for gpu in run.gpus:
            present = self.residents[gpu]
            for other in present:
                other.ran_with.setdefault(run.index)
                run.ran_with.setdefault(other.index)
            present.append(run)
            self.memory_used[gpu] += run.job.memory_bytes
            self.occupied += len(present) == 1
            self.shared += len(present) == 2
        self._refresh(run.gpus)
        if self.faults.job_mtbf_s is not None:
            rng = np.random.default_rng((self.faults.seed, 1, run.index, run.starts))
            self._push(self.now + rng.exponential(self.faults.job_mtbf_s), "failed", run, run.starts)

    def suspend(self, run: Run) -> None:
        """Take a running job from its GPUs; it saves what it has done, waits again and pays for its restart.

        Raises:
            SimulationError: The job does not run.
        """
        if not run.gpus:
            raise SimulationError(f"job {run.job.job_id}: cannot be suspended, it does not run")
        self._leave(run)
        run.saved_s = run.done_s
        run.restart_s += self.costs.of(run.job.gpus)
        run.remaining_s += self.costs.of(run.job.gpus)
        run.suspensions += 1
        self.waiting_count += 1

    def take_down(self, number: int) -> None:
        """Take away a node that carries nothing.

        Raises:
            SimulationError: A job runs on it.
        """
        if any(self.residents[gpu] for gpu in self.node_gpus[number]):
            raise SimulationError(f"node {self.cluster.nodes[number].name}: cannot be taken away, a job runs on it")
        self.down.add(number)

    def bring_up(self, number: int) -> None:
        """Bring back a node that was taken away."""
        self.down.discard(number)

    def remaining_now(self, run: Run) -> float:
        """Return the work a job has left, in seconds alone on the reference type."""
        return run.remaining_s - (self.now - run.updated) * run.speed if run.gpus else run.remaining_s

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_start(self, run: Run, gpus: Sequence[int]) -> None:
        name = run.job.job_id
        if run.gpus or run.ended_at is not None:
            raise SimulationError(f"job {name}: cannot be started, it {'runs' if run.gpus else 'has ended'}")
        if len(set(gpus)) != run.job.gpus or len(gpus) != run.job.gpus:
            raise SimulationError(f"job {name}: got GPUs {list(gpus)}, needs {run.job.gpus} different ones")
        for gpu in gpus:
            if self.node_of[gpu] in self.down:
                raise SimulationError(f"job {name}: GPU {gpu} is on a lost node")
            free = self.memory[gpu] - self.memory_used[gpu]
            if run.job.memory_bytes > free:
                raise SimulationError(f"job {name}: needs {run.job.memory_bytes} bytes, GPU {gpu} has {free} left")

    def _leave(self, run: Run) -> None:
        self._settle(run)
        gpus, run.gpus, run.speed = run.gpus, (), 0.0
        run.version += 1
        del self.running[run.index]
        self.stints.append(Stint(run.index, run.since, self.now, gpus))
        for gpu in gpus:
            present = self.residents[gpu]
            self.occupied -= len(present) == 1
            self.shared -= len(present) == 2
            present.remove(run)
            self.memory_used[gpu] -= run.job.memory_bytes
        self._refresh(gpus)

    def _settle(self, run: Run) -> None:
        """Account for the time since the last change of speed."""
        spent = self.now - run.updated
        if spent <= 0.0:
            return
        work = spent * run.speed
        run.remaining_s = max(0.0, run.remaining_s - work)
        run.restart_s = max(0.0, run.restart_s - work)
        run.work_s += work
        run.run_s += spent
        run.updated = self.now

    def _refresh(self, gpus: Iterable[int]) -> None:
        """Work out the speed of everybody on these GPUs anew."""
        affected = {run.index: run for gpu in gpus for run in self.residents[gpu]}
        changed = set(gpus)
        for run in affected.values():
            speed = self._speed(run)
            if speed != run.speed:
                self._settle(run)
                run.speed = speed
                self._schedule_end(run)
                changed.update(run.gpus)
        if self.utils_known:
            for gpu in changed:
                self._weigh(gpu)

    def _weigh(self, gpu: int) -> None:
        """Work out how busy a GPU is: a job at half of its speed there uses half of what it does alone."""
        kind, busy = self.gpu_type[gpu], 0.0
        for run in self.residents[gpu]:
            busy += (run.job.util or 0.0) * run.speed / self.truth.alone(run.job.workload, kind, run.job.gpus)
        busy = min(1.0, busy)
        self.busy += busy - self._busy_of[gpu]
        self._busy_of[gpu] = busy

    def _speed(self, run: Run) -> float:
        slowest = math.inf
        truth, key = self.truth, run.job.workload
        for gpu in run.gpus:
            present = self.residents[gpu]
            speed = truth.alone(key, self.gpu_type[gpu], run.job.gpus)
            if len(present) > 1:
                try:
                    together = truth.together(tuple(other.job.workload for other in present), self.gpu_type[gpu])
                except KeyError as error:
                    raise SimulationError(_unknown(present, str(error.args[0]))) from error
                speed *= together[present.index(run)]
            slowest = min(slowest, speed)
        return slowest

    def _schedule_end(self, run: Run) -> None:
        run.version += 1
        if run.speed <= 0.0:
            raise SimulationError(f"job {run.job.job_id}: cannot run on {self.gpu_type[run.gpus[0]]}: its speed is 0")
        self._push(self.now + run.remaining_s / run.speed, "finished", run, run.version)

    def _crash(self, run: Run) -> None:
        self._leave(run)
        run.saved_s = max(run.saved_s, run.done_s - run.done_s % self.faults.checkpoint_s)
        run.restart_s = self.costs.of(run.job.gpus)
        run.remaining_s = run.job.duration_s - run.saved_s + run.restart_s
        run.failures += 1
        self.waiting_count += 1

    def _lose_node(self, number: int, count: int) -> list[Happening]:
        self.down.add(number)
        happened = [Happening("node_lost", None, number)]
        hit = {run.index: run for gpu in self.node_gpus[number] for run in self.residents[gpu]}
        for run in hit.values():
            gpus = run.gpus
            self._crash(run)
            happened.append(Happening("failed", run, gpus=gpus))
        self._push(self.now + self.faults.node_repair_s, "node_back", (number, count + 1))
        return happened

    def _bring_back(self, number: int, count: int) -> list[Happening]:
        self.down.discard(number)
        self._push(self.now + self._node_gap(number, count), "node_lost", (number, count))
        return [Happening("node_back", None, number)]

    def _node_gap(self, number: int, count: int) -> float:
        rng = np.random.default_rng((self.faults.seed, 2, number, count))
        return float(rng.exponential(self.faults.node_mtbf_s or math.inf))

    def _could_ever_run(self, job: TraceJob) -> bool:
        large_enough = self._large_enough.get(job.memory_bytes)
        if large_enough is None:
            large_enough = sum(job.memory_bytes <= memory for memory in self.memory)
            self._large_enough[job.memory_bytes] = large_enough
        return large_enough >= job.gpus

    def _push(self, at: float, kind: str, subject: Any, version: int = 0) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at, self._seq, kind, subject, version))

    def _note_state(self) -> None:
        line = self.timeline
        line.at.append(self.now)
        line.occupied.append(self.occupied)
        line.shared.append(self.shared)
        line.busy.append(self.busy)
        line.running.append(len(self.running))
        line.waiting.append(self.waiting_count)
        line.up.append(len(self.node_of) - sum(len(self.node_gpus[number]) for number in self.down))


def _unknown(present: Sequence[Run], why: str) -> str:
    """Say which jobs share a GPU and cannot be found in the table of pairs."""
    names = " beside ".join(f"job {run.job.job_id}" for run in present)
    nameless = next((run.job.job_id for run in present if not run.job.workload), None)
    if nameless is None:
        return f"{names}: {why}; give a table that has it, or a policy that does not share"
    return f"{names}: no pair with job {nameless} can be known, it has no workload; give that field in the trace"
