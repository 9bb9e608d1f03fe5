"""Drives the shipped core in virtual time: the same events in, the same commands out, carried out by simulated hosts.

The core is told what real host agents would tell it, with their delays: submissions, starts, exits, lost nodes and
measurements. It never sees a run time or the truth about sharing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.commands import Command, ResizeShares, StartJob, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    Event,
    EvidenceGathered,
    HostJoined,
    HostLost,
    JobExited,
    JobStarted,
    JobSubmitted,
    MeasurementsReported,
    MemoryOverrun,
    Tick,
)
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.model import Gpu, Hints, Host, JobSpec
from cotenant.scheduler.core.models import ModelSource, first_models
from cotenant.scheduler.simulation.sensing import Sensing, Sensor, fingerprint_of
from cotenant.scheduler.simulation.world import Happening, Run, World

_KILLED = -15
_EVER = 1_000_000  # restarts: in a simulation no job is given up
_SLACK = 1.25  # reserved over used memory, above which the core would take some back
_SWEEPS = 3  # measurements of one set of residents for that


@dataclass(frozen=True, slots=True)
class Delays:
    """How long host agents take.

    Attributes:
        start_s: From the command to the job's first step.
        stop_s: From the command to the end of its processes.
        tick_s: Between two ticks of the core's clock while jobs wait.
    """

    start_s: float = 1.0
    stop_s: float = 1.0
    tick_s: float = 60.0


@dataclass(slots=True)
class _Part:
    """What the hosts know of a job: its lease's number, its shares, whether it runs yet."""

    epoch: int
    hosts: list[str]
    gpus: list[int]
    memory: dict[int, int]
    begun: bool = False
    stopping: bool = False


class CoreShell:
    """The driver of a world for the shipped core.

    Args:
        world: The world.
        settings: The core's settings; restarts are not limited here.
        models: What predicts for the core.
        sensing: How it is measured.
        delays: How long hosts take.
        hints: Makes the hints of a job; None = GPUs, expected run time, accepted slowdown and nothing else.
        checked: Check the core's invariants after every step (slow).
        known_programs: Every program ran before on every GPU type, alone: the core knows what that showed.
    """

    def __init__(
        self,
        world: World,
        *,
        settings: Settings | None = None,
        models: ModelSource = first_models,
        sensing: Sensing | None = None,
        delays: Delays | None = None,
        hints: Callable[[Run], Hints] | None = None,
        checked: bool = False,
        known_programs: bool = False,
    ) -> None:
        settings = settings or Settings()
        lease = settings.lease.model_copy(update={"max_restarts": _EVER})
        self.world, self.delays, self._checked = world, delays or Delays(), checked
        checkpoints = settings.checkpoints.model_copy(update={"directory": "everywhere"})  # any host can read them
        self.core = Core(settings.model_copy(update={"lease": lease, "checkpoints": checkpoints}), models)
        names = [node.name for node in world.cluster.nodes]
        self._gpu_ids = [f"{names[world.node_of[gpu]]}/{gpu}" for gpu in range(len(world.node_of))]
        self._gpu_of = {gpu_id: gpu for gpu, gpu_id in enumerate(self._gpu_ids)}
        self._hosts = [self._host(number) for number in range(len(names))]
        self._sensor = Sensor(world, sensing or Sensing(), self._gpu_ids)
        self._hints = hints or self._plain_hints
        self._parts: dict[int, _Part] = {}
        self._by_id = {run.job.job_id: run for run in world.runs}
        self._members: dict[int, int] = {}  # how often the residents of a GPU have changed
        self._looks: dict[int, tuple[int, int]] = {}  # by GPU: its version, and how often it was looked at for memory
        self._suspects: set[int] = set()  # GPUs on which more memory may be reserved than used
        self._ticking = self._sweeping = False
        self._look_at = math.inf  # when the core's clock ticks so that it can rebalance
        self.calls = self.commands = 0
        self._do([HostJoined(host) for host in self._hosts])
        for run in world.runs if known_programs else ():
            for gpu_type, profile in self._sensor.earlier_runs(run):
                self.core.state.learn(fingerprint_of(run), profile, gpu_type)

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the core says at the end."""
        state = self.core.state
        return {
            "cycles": state.cycle,
            "calls": self.calls,
            "commands": self.commands,
            "ignored": dict(state.ignored),
            "predictor": self.core.predictor.name,
        }

    # -- from the world to the core ---------------------------------------------------------------------------------

    def step(self, happened: Sequence[Happening]) -> None:
        """See ``Driver.step``."""
        events: list[Event] = []
        for happening in happened:
            events += self._events(happening)
        self._do(events)

    def _events(self, happening: Happening) -> list[Event]:
        run = happening.run
        if happening.kind == "alarm":
            action, *details = happening.what
            return list(getattr(self, f"_on_{action}")(*details))
        if happening.kind == "node_lost":
            return [HostLost(self._hosts[happening.what].host_id, "the node is lost")]
        if happening.kind == "node_back":
            return [HostJoined(self._hosts[happening.what])]
        if run is None:
            return []
        if happening.kind == "arrived":
            return [JobSubmitted(self._spec(run))]
        part = self._parts.pop(run.index)
        self._changed(part.gpus)
        code = 0 if happening.kind == "finished" else 1
        return [JobExited(run.job.job_id, part.epoch, host_id, code) for host_id in part.hosts]

    def _on_begin(self, run: Run, epoch: int) -> list[Event]:
        """The job's processes are up: it runs, unless it was stopped meanwhile or needs more memory than it got."""
        part = self._parts.get(run.index)
        if part is None or part.epoch != epoch or part.begun or part.stopping:
            return []
        if any(self.world.node_of[gpu] in self.world.down for gpu in part.gpus):
            return self._forget(run, part, _KILLED)
        short = [gpu for gpu in part.gpus if part.memory[gpu] < run.job.memory_bytes]
        if short:
            hosts = dict.fromkeys(self._host_of(gpu) for gpu in short)
            return [MemoryOverrun(run.job.job_id, epoch, host_id, run.job.memory_bytes) for host_id in hosts]
        part.begun = True
        self.world.start(run, part.gpus)
        self._changed(part.gpus)
        return [JobStarted(run.job.job_id, epoch, host_id) for host_id in part.hosts]

    def _on_end(self, run: Run, epoch: int) -> list[Event]:
        part = self._parts.get(run.index)
        return [] if part is None or part.epoch != epoch else self._forget(run, part, _KILLED)

    def _forget(self, run: Run, part: _Part, code: int) -> list[Event]:
        del self._parts[run.index]
        if part.begun:
            self.world.suspend(run)
            self._changed(part.gpus)
        return [JobExited(run.job.job_id, part.epoch, host_id, code) for host_id in part.hosts]

    def _on_measure(self, gpu: int, version: int, last: bool) -> list[Event]:
        """Measure everybody on a GPU whose residents have been the same for a while."""
        if self._members.get(gpu) != version or self.world.node_of[gpu] in self.world.down:
            return []
        found = tuple(self._sensor.measure(run, gpu) for run in self.world.residents[gpu])
        again_s = self._sensor.sensing.again_s
        if again_s is not None and last and found:
            self.world.alarm(self.world.now + again_s, ("measure", gpu, version, True))
        return [MeasurementsReported(self._host_of(gpu), found)] if found else []

    def _on_evidence(self, gpu: int, version: int, seconds: float) -> list[Event]:
        if self._members.get(gpu) != version or self.world.node_of[gpu] in self.world.down:
            return []
        found = tuple(self._sensor.evidence(gpu, seconds))
        return [EvidenceGathered(found)] if found else []

    def _on_sweep(self) -> list[Event]:
        """Measure the GPUs on which more memory is reserved than used: somebody waits and could use it.

        Real hosts report every second, and the core takes memory back only while somebody waits.
        """
        self._sweeping = False
        found: list[Event] = []
        for gpu in sorted(self._suspects):
            present = self.world.residents[gpu]
            if not any(self._parts[run.index].memory[gpu] > run.job.memory_bytes * _SLACK for run in present):
                self._suspects.discard(gpu)
                continue
            version, looks = self._looks.get(gpu, (0, 0))
            looks = looks + 1 if version == self._members[gpu] else 1
            self._looks[gpu] = (self._members[gpu], looks)
            if looks <= _SWEEPS:
                measured = tuple(self._sensor.measure(run, gpu) for run in present)
                found.append(MeasurementsReported(self._host_of(gpu), measured))
        if found:
            self._sweeping = True
            self.world.alarm(self.world.now + self._sensor.sensing.looks_s[0], ("sweep",))
        return found

    def _on_look(self) -> list[Event]:
        self._look_at = math.inf
        return [Tick()]

    def _on_tick(self) -> list[Event]:
        self._ticking = False
        return [Tick()]

    # -- from the core to the world ---------------------------------------------------------------------------------

    def _do(self, events: Sequence[Event]) -> None:
        """Hand events to the core and carry out what it commands; what follows at once is handed to it as well."""
        if not events:
            return
        while events:
            commands = self.core.handle(events, self.world.now)
            self.calls += 1
            if self._checked:
                check(self.core.state)
            events = self._carry_out(commands)
        self._keep_time()

    def _carry_out(self, commands: Sequence[Command]) -> list[Event]:
        self.commands += len(commands)
        follow: list[Event] = []
        starting: dict[int, Run] = {}
        for command in commands:
            run = self._by_id[command.job_id]
            if isinstance(command, StartJob):
                self._prepare(run, command)
                starting[run.index] = run
            elif isinstance(command, ResizeShares):
                follow += self._resize(run, command)
            elif isinstance(command, StopJob):
                self._stop(run, command)
        for run in starting.values():
            self.world.alarm(self.world.now + self.delays.start_s, ("begin", run, self._parts[run.index].epoch))
        return follow

    def _prepare(self, run: Run, command: StartJob) -> None:
        part = self._parts.get(run.index)
        if part is None or part.epoch != command.epoch:
            part = self._parts[run.index] = _Part(command.epoch, [], [], {})
        part.hosts.append(command.host_id)
        for share in command.shares:
            gpu = self._gpu_of[share.gpu_id]
            part.gpus.append(gpu)
            part.memory[gpu] = share.memory_bytes

    def _resize(self, run: Run, command: ResizeShares) -> list[Event]:
        part = self._parts.get(run.index)
        if part is None or part.epoch != command.epoch:
            return []
        for share in command.shares:
            gpu = self._gpu_of[share.gpu_id]
            part.memory[gpu] = share.memory_bytes
            self._suspects.add(gpu)
        if not part.begun and not part.stopping:
            self.world.alarm(self.world.now, ("begin", run, part.epoch))  # it may have waited for more memory
        elif any(share.memory_bytes < run.job.memory_bytes for share in command.shares):
            return [MemoryOverrun(run.job.job_id, part.epoch, command.host_id, run.job.memory_bytes)]
        return []

    def _stop(self, run: Run, command: StopJob) -> None:
        part = self._parts.get(run.index)
        if part is not None and part.epoch == command.epoch and not part.stopping:
            part.stopping = True
            self.world.alarm(self.world.now + self.delays.stop_s, ("end", run, part.epoch))

    def _keep_time(self) -> None:
        """While jobs wait, have the clock tick and unused memory noticed."""
        state = self.core.state
        waiting = state.queued or state.pending
        if waiting and not self._ticking:
            due = [job.not_before for job in state.in_order(state.delayed)]
            at = min([self.world.now + self.delays.tick_s, *(each for each in due if each > self.world.now)])
            self._ticking = True
            self.world.alarm(at, ("tick",))
        look_at = max(state.moves.next_look_at, self.world.now)
        if state.savers and state.settings.rebalance.enabled and look_at < self._look_at:
            self._look_at = look_at
            self.world.alarm(look_at, ("look",))
        if waiting and not self._sweeping:
            self._sweeping = True
            self.world.alarm(self.world.now + self._sensor.sensing.delay_s, ("sweep",))

    def _changed(self, gpus: Sequence[int]) -> None:
        """The residents of these GPUs have changed: have them measured once they have been so for a while."""
        sensing = self._sensor.sensing
        self._suspects.update(gpus)
        for gpu in gpus:
            version = self._members[gpu] = self._members.get(gpu, 0) + 1
            present = self.world.residents[gpu]
            if not present:
                continue
            for look_s in sensing.looks_s:
                last = look_s == sensing.looks_s[-1]
                self.world.alarm(self.world.now + look_s + sensing.delay_s, ("measure", gpu, version, last))
            if sensing.evidence_s is not None and len(present) > 1:
                at = self.world.now + sensing.evidence_s + sensing.delay_s
                self.world.alarm(at, ("evidence", gpu, version, sensing.evidence_s))

    # -- names ------------------------------------------------------------------------------------------------------

    def _host(self, number: int) -> Host:
        node = self.world.cluster.nodes[number]
        gpus = tuple(
            Gpu(self._gpu_ids[gpu], node.name, node.gpu_type, index, node.memory_bytes)
            for index, gpu in enumerate(self.world.node_gpus[number])
        )
        return Host(node.name, node.name, gpus, joined_at=0.0, cpus=node.cpus)

    def _host_of(self, gpu: int) -> str:
        return self._hosts[self.world.node_of[gpu]].host_id

    def _spec(self, run: Run) -> JobSpec:
        job = run.job
        return JobSpec(
            job_id=job.job_id,
            name=job.job_id,
            kind="command",
            command=("simulated",),
            cwd="/",
            env={},
            hints=self._hints(run),
            fingerprint=fingerprint_of(run),
            submitted_at=self.world.now,
        )

    def _plain_hints(self, run: Run) -> Hints:
        job, truth = run.job, self.world.truth
        fastest = max(truth.alone(job.workload, each, job.gpus) for each in dict.fromkeys(self.world.gpu_type))
        # An estimate is meant on the type that the trace's run times are, a hint on the job's fastest.
        estimate_s = job.estimate_s / fastest if job.estimate_s is not None and fastest > 0.0 else job.estimate_s
        return Hints(
            gpus=job.gpus,
            gang="host" if any(node.could_have(job) for node in self.world.cluster.nodes) else "cluster",
            expected_duration_s=estimate_s,
            max_slowdown=job.max_slowdown,
            tenant=job.user or "default",
            restart="on_failure",
            cpus=job.cpus,
            checkpoint="own",  # as the baselines have it: anybody can be suspended, at the world's cost
        )
