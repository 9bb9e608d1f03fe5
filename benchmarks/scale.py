"""How the core's decisions grow with the cluster: 100, 1,000 and 10,000 GPUs, five jobs on each, five more waiting.

Drives the shipped ``Core`` (no Ray, no journal) through a full cluster: 97 of 100 jobs share one GPU of 80 GiB, the
others are gangs of two to eight; 60 programs, a few sizes of memory and compute; every third job has a deadline and
every second says how long it runs, all different. Jobs are made up, since the core only sees what agents tell it.

The cluster is filled by a policy that predicts nothing; then the shipped one takes over and the figures begin.

A decision is one ``Core.handle`` call in which one running job ends and whoever may takes its place; it counts its
processor time, so that other work on the machine hardly matters. Placements per second count all calls (ends,
submissions, starts) of a steady state in which lots of 64 jobs end and arrive at once, as shells batch them. Each size
runs in a process of its own, whose peak memory is told. The growth exponent is the slope of the logarithm of the
seconds per decision over that of the GPUs: 1 is linear.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np
from common import Row, options, write_report

from cotenant.configs.settings import PlacementSettings, Settings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import policy
from cotenant.placement.shares import first_shares, free_memory, reservable_compute
from cotenant.placement.types import GpuView, NoFit, Placement, Request
from cotenant.scheduler.core.commands import StartJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted
from cotenant.scheduler.core.model import Gpu, Hints, Host, JobSpec

GIB = 1 << 30
SEED = 5
GPUS_PER_HOST = 8
JOBS_PER_GPU = 5
LOT = 64
SECONDS_BETWEEN = 0.01
MOST_TRIED = 64
SIZES = (100, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one size came to: seconds of single decisions, and of a steady state in lots."""

    gpus: int
    running: int
    waiting: int
    decisions: Sequence[float]
    placements: int
    seconds: float
    peak_bytes: int


class Filling:
    """Places every job on the next GPUs of a host that have room, and predicts nothing."""

    name = "cotenant"
    exchanges = False

    def __init__(self) -> None:
        self._next = 0

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        for _ in range(MOST_TRIED):
            self._next += request.gpus
            chosen = [gpus[(self._next + k) % len(gpus)] for k in range(request.gpus)] if gpus else []
            if len({gpu.host_id for gpu in chosen}) == 1 and all(_has_room(request, gpu) for gpu in chosen):
                shares, given = zip(
                    *(first_shares(gpu, request, request.memory_bytes or 0) for gpu in chosen), strict=True
                )
                squeezed = tuple(each for some in given for each in some)
                return Placement(request.job_id, tuple(shares), {}, 0.0, 0.0, "to fill", squeezed)
        return NoFit(request.job_id, (), never=False)


def _has_room(request: Request, gpu: GpuView) -> bool:
    fits = (request.memory_bytes or 0) <= free_memory(gpu) and (request.compute or 0.0) <= reservable_compute(gpu)
    return fits and len(gpu.residents) < JOBS_PER_GPU + 1


@dataclass
class Cluster:
    """A core whose agents start and end everything at once."""

    gpus: int
    now: float = 0.0
    spent: float = 0.0
    placed: int = 0
    running: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        filling = Filling()
        self.core = Core(Settings(placement=PlacementSettings(max_jobs_per_gpu=8)), policies=lambda _: filling)
        self.rng = np.random.default_rng(SEED)
        self.submitted = 0
        sizes = [GPUS_PER_HOST] * (self.gpus // GPUS_PER_HOST) + [self.gpus % GPUS_PER_HOST]
        self.handle([HostJoined(_host(number, size)) for number, size in enumerate(sizes) if size])

    def handle(self, events: Sequence[Event]) -> float:
        """Have the core handle events, and what agents answer; return the seconds of the first call."""
        seconds = 0.0
        while events:
            self.now += SECONDS_BETWEEN
            begun = time.thread_time()
            commands = self.core.handle(events, self.now)
            took = time.thread_time() - begun
            self.spent += took
            seconds = seconds or took
            starts: dict[tuple[str, int], list[str]] = {}
            for command in commands:
                if isinstance(command, StartJob):
                    starts.setdefault((command.job_id, command.epoch), []).append(command.host_id)
            self.placed += len(starts)
            self.running += [(job_id, epoch, tuple(hosts)) for (job_id, epoch), hosts in starts.items()]
            events = [JobStarted(job_id, epoch, host) for (job_id, epoch), hosts in starts.items() for host in hosts]
        return seconds

    def submissions(self, count: int) -> list[Event]:
        """New jobs."""
        return [self._submission() for _ in range(count)]

    def _submission(self) -> Event:
        self.submitted += 1
        number, rng = self.submitted, self.rng
        gpus = int(rng.choice([2, 4, 8])) if rng.random() < 0.03 else 1
        hints = Hints(
            gpus=gpus,
            gpu_memory=int(rng.choice([4, 8, 12, 16])) * GIB,
            compute=float(rng.choice([0.1, 0.15, 0.2, 0.25])),
            max_slowdown=2.0,
            deadline_s=self.now + float(rng.uniform(3600.0, 360_000.0)) if number % 3 == 0 else None,
            expected_duration_s=float(rng.lognormal(8.0, 1.0)) if number % 2 == 0 else None,
        )
        name = f"job-{number}"
        program = f"program-{int(rng.integers(60))}"
        return JobSubmitted(JobSpec(name, name, "command", ("python", "train.py"), "/", {}, hints, program, self.now))

    def endings(self, count: int) -> list[Event]:
        """The ends of random running jobs."""
        events: list[Event] = []
        for _ in range(min(count, len(self.running))):
            place = int(self.rng.integers(len(self.running)))
            job_id, epoch, hosts = self.running[place]
            self.running[place] = self.running[-1]
            self.running.pop()
            events += [JobExited(job_id, epoch, host, 0) for host in hosts]
        return events


def _host(number: int, gpus: int) -> Host:
    name = f"host-{number}"
    return Host(name, name, tuple(Gpu(f"{name}-{k}", name, "made-up", k, 80 * GIB) for k in range(gpus)), joined_at=0.0)


def measure(gpus: int, single: int, lots: int) -> Measured:
    """Fill a cluster of this size, then measure single decisions and a steady state."""
    cluster = Cluster(gpus)
    while len(cluster.running) < JOBS_PER_GPU * gpus and len(cluster.core.state.queued) < LOT:
        cluster.handle(cluster.submissions(min(500, gpus)))
    cluster.core.policies = policy
    while len(cluster.core.state.queued) < JOBS_PER_GPU * gpus:
        cluster.handle(cluster.submissions(5000))
    for _ in range(5):
        cluster.handle([*cluster.endings(LOT), *cluster.submissions(LOT)])
    gc.collect()
    gc.freeze()  # as the scheduler does with what it has restored: the collector need not look at what stays
    decisions: list[float] = []
    for _ in range(single):
        decisions.append(cluster.handle(cluster.endings(1)))
        cluster.handle(cluster.submissions(1))
    cluster.placed, cluster.spent = 0, 0.0
    for _ in range(lots):
        cluster.handle([*cluster.endings(LOT), *cluster.submissions(LOT)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    waiting = len(cluster.core.state.queued)
    return Measured(gpus, len(cluster.running), waiting, decisions, cluster.placed, cluster.spent, peak)


def rows_of(found: Measured, largest: bool) -> list[Row]:
    """The figures of one size."""
    case = f"{found.gpus:,} GPUs, {found.running:,} running, {found.waiting:,} waiting"
    milliseconds = np.array(found.decisions) * 1e3
    spread = float(milliseconds.std())
    return [
        Row(case, "cotenant", "decision p50", float(np.percentile(milliseconds, 50)), "ms", spread),
        Row(
            case, "cotenant", "decision p99", float(np.percentile(milliseconds, 99)), "ms", spread,
            goal="<= 10" if largest else None,
        ),
        Row(
            case, "cotenant", "placements", found.placements / found.seconds, "1/s",
            goal=">= 5000" if largest else None,
        ),
        Row(case, "cotenant", "peak memory", found.peak_bytes / (1 << 20), "MiB"),
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", help="other sizes")
    arguments = parser.parse_args()
    sizes = arguments.gpus or (SIZES[:2] if arguments.quick else SIZES)
    single, lots = (50, 3) if arguments.quick else (300, 20)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = [pool.submit(measure, gpus, single, lots).result() for gpus in sizes]
    rows = [row for each in found for row in rows_of(each, each.gpus >= SIZES[-1])]
    if len(found) > 1:
        logs = np.log([each.gpus for each in found])
        for metric, seconds in (
            ("growth exponent of a decision", [float(np.median(each.decisions)) for each in found]),
            ("growth exponent of a placement in lots", [each.seconds / each.placements for each in found]),
        ):
            slope = float(np.polyfit(logs, np.log(seconds), 1)[0])
            rows.append(Row(f"{sizes[0]:,} to {sizes[-1]:,} GPUs", "cotenant", metric, slope, "1", goal="<= 1"))
    write_report("scale", rows, arguments.json)


if __name__ == "__main__":
    main()
