"""How fast the scheduling core and its journal are: events per second and latency of one decision.

Every case drives the shipped ``Core`` (no Ray, no fake policy); the cluster is made up, since the core only sees what
agents tell it. Latencies are of one ``Core.handle`` call.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from common import Row, options, write_report

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import DemandProfile, Forecast, JobMeasurement, Quantiles, Signature
from cotenant.scheduler.core.commands import Command, StartJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted, MeasurementsReported
from cotenant.scheduler.core.model import Gpu, Hints, Host, JobSpec
from cotenant.scheduler.journal.recovery import recover
from cotenant.scheduler.journal.store import Journal

GIB = 1 << 30
GPUS_PER_HOST = 8
SEED = 7


@dataclass
class World:
    """A core on a made-up cluster whose agents start everything at once."""

    hosts: int
    core: Core = field(default_factory=lambda: Core(Settings()))
    now: float = 0.0
    submitted: int = 0
    running: list[StartJob] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(SEED)
        self.handle([HostJoined(host(number)) for number in range(self.hosts)])
        self.seconds.clear()
        self.events = 0

    def handle(self, events: Sequence[Event]) -> list[Command]:
        """Time one call; started jobs are noted as running."""
        self.now += 0.1
        begun = time.perf_counter()
        commands = self.core.handle(events, self.now)
        self.seconds.append(time.perf_counter() - begun)
        self.events += len(events)
        self.running.extend(command for command in commands if isinstance(command, StartJob))
        return commands

    def submissions(self, count: int) -> list[Event]:
        """Jobs with hints as people give them: a few sizes, a few compute shares."""
        events: list[Event] = []
        for _ in range(count):
            self.submitted += 1
            memory, compute = int(self.rng.integers(1, 9)) * GIB, float(self.rng.choice([0.2, 0.3, 0.4, 0.6]))
            events.append(JobSubmitted(spec(self.submitted, Hints(gpu_memory=memory, compute=compute))))
        return events

    def exit_of_one(self) -> Event:
        """The end of a random running job."""
        start = self.running.pop(int(self.rng.integers(len(self.running))))
        return JobExited(start.job_id, start.epoch, start.host_id, 0)


def host(number: int) -> Host:
    """A host with eight GPUs of 16 GiB."""
    name = f"host-{number}"
    gpus = tuple(Gpu(f"{name}-{index}", name, "made-up", index, 16 * GIB) for index in range(GPUS_PER_HOST))
    return Host(name, name, gpus, joined_at=0.0)


def spec(number: int, hints: Hints) -> JobSpec:
    """Job number ``number``; one in ten runs of the same program."""
    name = f"job-{number}"
    return JobSpec(name, name, "command", ("python", "train.py"), "/", {}, hints, f"program-{number % 10}", 0.0)


def measured(start: StartJob) -> JobMeasurement:
    """One window of a running job, with its forecast."""
    gpu_id = start.shares[0].gpu_id
    util, memory = Quantiles(0.2, 0.3, 0.4, 0.4, 0.5), Quantiles(*[1.0 * GIB] * 5)
    window = Signature(start.job_id, gpu_id, 0.0, 1.0, 10, 0.3, 0.5, GIB, GIB, 9.0, 0.0, 0.1, 1, 0.5)
    forecast = Forecast(start.job_id, {5: util}, {60: memory}, GIB, 60)
    profile = DemandProfile(0.3, 0.4, GIB, 10.0, 60.0, "history")
    return JobMeasurement(start.job_id, start.spec.fingerprint, window, forecast, profile)


def rows_of(case: str, world: World) -> Iterator[Row]:
    """Events per second and latency of the calls so far."""
    milliseconds = np.array(world.seconds) * 1e3
    yield Row(case, "cotenant", "throughput", world.events / sum(world.seconds), "events/s")
    for percent in (50, 99):
        value = float(np.percentile(milliseconds, percent))
        yield Row(case, "cotenant", f"latency p{percent}", value, "ms", spread=float(milliseconds.std()))


def batch(quick: bool) -> Iterator[Row]:
    """Ten thousand submissions in one batch on two GPUs' worth of host."""
    for hosts in (1, 16):
        world = World(hosts)
        world.handle(world.submissions(10_000))
        case = f"10,000 submissions in one batch, {hosts * GPUS_PER_HOST} GPUs"
        yield Row(case, "cotenant", "duration", world.seconds[0], "s", goal="< 2")


def stream(quick: bool) -> Iterator[Row]:
    """One event per call: submit, started, exit, on a cluster that is about full."""
    for hosts in (1, 16):
        world = World(hosts)
        for _ in range(200 if quick else 2000):
            world.handle(world.submissions(1))
            for start in world.running[-1:]:
                world.handle([JobStarted(start.job_id, start.epoch, start.host_id)])
            if len(world.running) > 2 * hosts * GPUS_PER_HOST:
                world.handle([world.exit_of_one()])
        yield from rows_of(f"one event per call, {hosts * GPUS_PER_HOST} GPUs", world)


def full_queue(quick: bool) -> Iterator[Row]:
    """A job ends while ten thousand wait: every call is a cycle over the whole queue."""
    world = World(2)
    world.handle(world.submissions(10_000))
    world.seconds.clear()
    world.events = 0
    for _ in range(20 if quick else 200):
        world.handle([world.exit_of_one()])
    yield from rows_of("an exit while 10,000 jobs wait, 16 GPUs", world)


def measurements(quick: bool) -> Iterator[Row]:
    """One host's report: every job measured, every share looked at."""
    world = World(16)
    while len(world.running) < 3 * 16 * GPUS_PER_HOST and world.submitted < 2000:
        world.handle(world.submissions(50))
    reports = [
        MeasurementsReported(f"host-{n}", tuple(measured(s) for s in world.running if s.host_id == f"host-{n}"))
        for n in range(16)
    ]
    world.seconds.clear()
    world.events = 0
    for _ in range(5 if quick else 50):
        for event in reports:
            world.handle([event])
    yield from rows_of(f"one host's report of {len(world.running) / 16:.0f} jobs, 128 GPUs", world)


def journal(quick: bool) -> Iterator[Row]:
    """Durable appends (each synced to disk) and recovery."""
    count = 200 if quick else 2000
    world = World(2)
    with tempfile.TemporaryDirectory() as folder:
        store = Journal(f"sqlite:///{folder}/journal.db")
        recover(store, Settings())
        store.append([HostJoined(host(0)), HostJoined(host(1))], 0.0)
        seconds = []
        for number in range(count):
            events = world.submissions(1)
            begun = time.perf_counter()
            store.append(events, float(number))
            seconds.append(time.perf_counter() - begun)
        milliseconds = np.array(seconds) * 1e3
        for percent in (50, 99):
            value = float(np.percentile(milliseconds, percent))
            yield Row("journal, one batch per transaction", "cotenant", f"append p{percent}", value, "ms")
        begun = time.perf_counter()
        recover(store, Settings())
        rate = count / (time.perf_counter() - begun)
        yield Row(f"recovery of {count} batches", "cotenant", "throughput", rate, "events/s")
        store.close()


def main() -> None:
    """Run the benchmark."""
    arguments = options(str(__doc__).partition("\n")[0]).parse_args()
    cases: Sequence[Callable[[bool], Iterator[Row]]] = (batch, stream, full_queue, measurements, journal)
    write_report("core", [row for case in cases for row in case(arguments.quick)], arguments.json)


if __name__ == "__main__":
    main()
