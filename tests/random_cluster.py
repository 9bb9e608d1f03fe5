"""Random lives of a cluster: invariants after every event, agents that are never fooled, replay that is identical.

The agents are simulated: commands reach them in order but late, get lost when their host does not answer, and events
come back late. An agent refuses what is stale and keeps book of what really runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduling import GIB, half, host, measurement, profile, report, settings, spec, without
from simulated_agents import Agent, Part

from cotenant.configs.settings import (
    LeaseSettings,
    PlacementSettings,
    RebalanceSettings,
    ResizeSettings,
    SchedulingSettings,
    Settings,
)
from cotenant.forecasting.types import Quantiles
from cotenant.scheduler.core import queries, whatif
from cotenant.scheduler.core.commands import Command, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    FreezeFailed,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobExited,
    JobFrozen,
    JobHeldBack,
    JobStarted,
    JobSubmitted,
    LeaseReturned,
    MemoryOverrun,
    MoveRequested,
    ResourcesAsked,
    ResumeRequested,
    SettingsChanged,
    StartFailed,
    StopRequested,
    SuspendRequested,
    Tick,
)
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.core.reconcile import Phase, reconcile
from cotenant.scheduler.core.state import State
from cotenant.scheduler.resources import resources_view

HOSTS = ("h1", "h2", "h3")
CPUS = {"h1": 6.0, "h2": 4.0, "h3": None}  # processors
CONFIGURED = Settings(
    placement=settings().placement,
    rebalance=RebalanceSettings(move_cost_s=5.0),
    lease=LeaseSettings(ttl_s=10.0, start_timeout_s=20.0, stop_grace_s=1.0, max_restarts=2),
)


class Cluster(RuleBasedStateMachine):
    """A core and simulated agents. ``freezes``: the driver of all hosts can freeze jobs, unless it is said to fail."""

    freezes = False

    def __init__(self) -> None:
        super().__init__()
        self.core = Core(CONFIGURED)
        self.now = 1000.0
        self.log: list[tuple[float, list[Event]]] = []
        self.agents: dict[str, Agent] = {}
        self.submitted = 0
        self.asked = 0
        self.nothing_lost = True
        self.ended: dict[str, str] = {}

    # -- driving the core -------------------------------------------------------------------------------------------

    def happen(self, *events: Event) -> None:
        self.log.append((self.now, list(events)))
        held = [job for job in self.core.state.jobs.values() if job.was_held]
        self.send(self.core.handle(events, self.now))
        self.check()
        for job in held:
            now = self.core.state.jobs[job.spec.job_id]
            if now.lease is None and not now.state.terminal:
                assert job.given_back, f"{now.spec.job_id} waits, but its program still believes that it is held"

    def send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StopJob) and command.freezes:
                assert self.core.state.jobs[command.job_id].spec.hints.checkpoint == "driver", "nobody has said it may"
            if isinstance(command, StopJob) and command.asks:
                assert self.core.state.jobs[command.job_id].saves, "asked of somebody who has promised nothing"
            agent = self.agents.get(command.host_id)
            if agent is not None and agent.reachable:
                agent.mail.append((self.now, command))

    def check(self) -> None:
        state = self.core.state
        check(state)
        for job_id, job in state.jobs.items():
            assert self.ended.get(job_id, job.state) == job.state, f"{job_id} ended as {self.ended[job_id]}"
            if job.state.terminal:
                self.ended[job_id] = job.state
        for view in queries.hosts(state):
            assert view.cpus is None or view.cpus_reserved <= view.cpus, view
        running: dict[str, int] = {}
        for agent in self.agents.values():
            for job_id, part in agent.parts.items():
                assert running.setdefault(job_id, part.epoch) == part.epoch, f"{job_id} runs twice"
                job = state.jobs[job_id]
                loose = not (part.frozen or part.freezing) and part.phase in ("starting", "running")
                waits = job.frozen is not None and job.lease is None and job.epoch == part.epoch
                assert not (loose and waits), f"{job_id} runs, and is said to be frozen"
                told = part.phase == "stopping" and job.lease is not None and job.epoch == part.epoch
                assert not told or job.state is JobState.STOPPING, (
                    f"{job_id} is being stopped, and said to be {job.state}"
                )
        if self.nothing_lost:
            self.check_enforced()

    def check_enforced(self) -> None:
        """What the agents enforce at this very moment never adds up to more than a GPU."""
        for agent in self.agents.values():
            shares = [share for part in agent.parts.values() if not part.frozen for share in part.shares]
            for gpu in agent.host.gpus:
                here = [share for share in shares if share.gpu_id == gpu.gpu_id]
                assert sum(share.compute for share in here) <= 1.0 + 1e-9, here
                assert sum(share.memory_bytes for share in here) <= gpu.memory_bytes, here

    def parts(self, *phases: Phase) -> list[tuple[Agent, str, Part]]:
        return [(a, job_id, p) for a in self.agents.values() for job_id, p in a.parts.items() if p.phase in phases]

    # -- what clients do --------------------------------------------------------------------------------------------

    @initialize(gpus=st.sampled_from([0, 1, 2, 3]))
    def begin(self, gpus: int) -> None:
        if gpus:
            self.join("h1", gpus, 8)
            self.join("h2", 1, 8)

    @rule(
        count=st.integers(1, 3),
        kind=st.sampled_from(["command", "command", "lease"]),
        memory=st.sampled_from([1, 1, 2, 2, 3, 5, 8, 9, None]),
        compute=st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0, None]),
        hints=st.fixed_dictionaries(
            {
                "gpus": st.sampled_from([1, 1, 2, 3]),
                "gang": st.sampled_from(["host", "cluster"]),
                "priority": st.sampled_from(["low", "normal", "high"]),
                "isolation": st.sampled_from(["none", "soft", "hard"]),
                "restart": st.sampled_from(["never", "on_node_loss", "on_failure"]),
                "deadline_s": st.sampled_from([None, 1100.0]),
                "checkpoint": st.sampled_from(["none", "own", "own", "driver", "driver"]),
                "expected_duration_s": st.sampled_from([None, 20.0, 5000.0]),
                "cpus": st.sampled_from([None, None, 1.0, 2.5, 7.0]),
            }
        ),
    )
    def submit(self, count: int, kind: Any, memory: int | None, compute: float | None, hints: dict[str, Any]) -> None:
        wanted = {"gpu_memory": memory and memory * GIB, "compute": compute}
        batch = []
        for _ in range(count):
            self.submitted += 1
            known = f"fp-{self.submitted % 3}"
            described = spec(f"j{self.submitted}", **wanted, **hints, max_slowdown=4.0)
            batch.append(JobSubmitted(replace(described, kind=kind, fingerprint=known)))
        self.happen(*batch)

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(1, 30), lost=st.booleans())
    def ask_to_stop(self, number: int, lost: bool) -> None:
        job_id = f"j{number % self.submitted + 1}"
        self.happen(ClientLost(job_id) if lost else StopRequested(job_id, "stopped by user"))

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(1, 30), what=st.sampled_from(["suspend", "resume", "move", "move to"]))
    def ask_to_move(self, number: int, what: str) -> None:
        job_id = f"j{number % self.submitted + 1}"
        gpu_ids = tuple(self.core.state.gpus)[:2] if what == "move to" else ()
        asked = {"suspend": SuspendRequested(job_id, "x"), "resume": ResumeRequested(job_id, "y")}
        self.happen(asked.get(what, MoveRequested(job_id, "z", gpu_ids)))

    @precondition(lambda self: any(job.owed for job in self.core.state.jobs.values()))
    @rule(data=st.data(), stale=st.sampled_from([0, 0, 0, 1]))
    def give_back(self, data: st.DataObject, stale: int) -> None:
        job = data.draw(st.sampled_from([job for job in self.core.state.jobs.values() if job.owed]))
        self.happen(LeaseReturned(job.spec.job_id, job.epoch - stale))

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(1, 30))
    def submit_again(self, number: int) -> None:
        self.happen(JobSubmitted(half(f"j{number % self.submitted + 1}")))

    @rule(
        policy=st.sampled_from(["cotenant", "cotenant", "exclusive", "static"]),
        bias=st.sampled_from([0.0, 0.5, 1.0]),
        resize=st.booleans(),
        most_gpus=st.sampled_from([None, None, 1.5]),
        factor=st.sampled_from([1.0, 1.5]),
        aim=st.sampled_from(["completion", "makespan"]),
    )
    def change_settings(  # noqa: PLR0917 - hypothesis gives them by name
        self, policy: str, bias: float, resize: bool, most_gpus: float | None, factor: float, aim: str
    ) -> None:
        packing = PlacementSettings.model_validate({"policy": policy, "packing_bias": bias})
        ordering = SchedulingSettings.model_validate({"aim": aim, "other_tenants": {"most_gpus": most_gpus}})
        moving = RebalanceSettings(move_cost_s=5.0, priority_factor=factor)
        self.happen(SettingsChanged(packing, ResizeSettings(enabled=resize), ordering, moving))

    @rule()
    def look(self) -> None:
        before = self.core.state.to_json()
        whatif.plan(self.core, [half("x"), spec("y", gpus=2)], self.now, settings(max_jobs_per_gpu=2))
        queries.jobs(self.core.state)
        queries.gpus(self.core.state)
        queries.hosts(self.core.state)
        for job_id in self.core.state.jobs:
            core = self.core
            queries.explain(core.state, job_id, self.now, predictor=core.predictor, policy=core.policy)
            resources_view(self.core.state, self.core.state.jobs[job_id])
        assert self.core.state.to_json() == before

    # -- what hosts do ----------------------------------------------------------------------------------------------

    @rule(
        host_id=st.sampled_from(HOSTS),
        gpus=st.integers(1, 3),
        memory=st.sampled_from([8, 8, 8, 8, 8, 2]),
        able=st.sampled_from([True, True, True, False]),
    )
    def join(self, host_id: str, gpus: int, memory: int, able: bool = True) -> None:
        agent = self.agents.get(host_id)
        found = host(host_id, gpus, memory * GIB, CPUS[host_id], checkpoints=self.freezes and able)
        if host_id == "h3":  # of another type
            found = replace(found, gpus=tuple(replace(gpu, gpu_type="cpu-2") for gpu in found.gpus))
        if agent is None:
            agent = self.agents[host_id] = Agent(found)
        elif agent.host != found:
            agent.host = found
            self.nothing_lost = False  # a GPU that shrank is over-full for a while
        agent.reachable = True
        self.happen(HostJoined(agent.host))

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def fall_silent(self, data: st.DataObject, really: bool) -> None:
        agent = data.draw(st.sampled_from(list(self.agents.values())))
        if not really:  # often enough would be too often: little else would ever happen
            return
        agent.reachable = False
        agent.mail.clear()
        self.nothing_lost = False
        self.happen(HostUnreachable(agent.host.host_id, "no report"))

    @precondition(lambda self: any(not agent.reachable for agent in self.agents.values()))
    @rule(data=st.data())
    def be_lost(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from([agent for agent in self.agents.values() if not agent.reachable]))
        del self.agents[agent.host.host_id]
        self.happen(HostLost(agent.host.host_id, "leases expired"))

    @precondition(lambda self: any(agent.mail for agent in self.agents.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def mail_arrives(self, data: st.DataObject, count: int) -> None:
        agent = data.draw(st.sampled_from([agent for agent in self.agents.values() if agent.mail]))
        for _ in range(min(count, len(agent.mail))):
            agent.receive()
            self.check()

    @rule()
    def all_goes_well(self) -> None:
        for agent in list(self.agents.values()):
            while agent.mail:
                agent.receive()
                self.check()
            for job_id, part in agent.parts.items():
                if part.phase == "starting":
                    part.phase = "running"
                    agent.outbox.append(JobStarted(job_id, part.epoch, agent.host.host_id))
            self.report_of(agent)

    @precondition(lambda self: self.parts("starting"))
    @rule(data=st.data(), how=st.sampled_from(["ok", "retry", "let down", "bad"]))
    def a_start_comes_to_an_end(self, data: st.DataObject, how: str) -> None:
        agent, job_id, part = data.draw(st.sampled_from(self.parts("starting")))
        host_id = agent.host.host_id
        part.freezing = part.freezing and how == "ok"
        if how == "ok":
            part.phase = "running"
            agent.outbox.append(JobStarted(job_id, part.epoch, host_id))
        else:
            wait_s = 2.0 if how == "let down" else None
            failed = StartFailed(job_id, part.epoch, host_id, how, retry=how != "bad", retry_after_s=wait_s)
            agent.end(job_id, failed)

    @precondition(lambda self: self.parts("running", "stopping"))
    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 1, -9, None]), heard=st.booleans())
    def a_job_ends(self, data: st.DataObject, code: int | None, heard: bool) -> None:
        agent, job_id, part = data.draw(st.sampled_from(self.parts("running", "stopping")))
        host_id, stopped = agent.host.host_id, heard and part.phase == "stopping"
        exited = None if code is None else JobExited(job_id, part.epoch, host_id, code, stopped=stopped)
        agent.end(job_id, exited)

    @precondition(lambda self: any(agent.reachable and agent.parts for agent in self.agents.values()))
    @rule(
        data=st.data(),
        util=st.sampled_from([0.05, 0.3, 0.6, 0.95]),
        held_back=st.sampled_from([0.0, 0.4]),
        expected=st.lists(st.sampled_from([1, 1, 2, 4, 6, 9]), min_size=1, max_size=3),
        missing=st.lists(st.sampled_from(["", "", "", "util", "memory", "util memory"]), min_size=1, max_size=3),
    )
    def jobs_are_measured(
        self, data: st.DataObject, util: float, held_back: float, expected: list[int], missing: list[str]
    ) -> None:
        found = [agent for agent in self.agents.values() if agent.reachable and agent.parts]
        agent = data.draw(st.sampled_from(found))
        known = profile(util=util, memory=GIB)
        windows = [
            measurement(job_id, share.gpu_id, known, throttled_fraction=held_back)
            for job_id, part in agent.parts.items()
            for share in part.shares
        ]
        levels = [Quantiles(*[float(each * GIB)] * 5) for each in expected]
        seen = [
            replace(each, forecast=replace(each.forecast, memory=dict.fromkeys((1, 60), levels[row % len(levels)])))
            for row, each in enumerate(windows)
        ]
        seen = [without(each, missing[row % len(missing)]) for row, each in enumerate(seen)]
        self.happen(report(agent.host.host_id, *seen))

    @precondition(lambda self: self.parts("running"))
    @rule(data=st.data(), fraction=st.sampled_from([0.0, 0.5, 1.0]))
    def a_job_is_held_back(self, data: st.DataObject, fraction: float) -> None:
        agent, job_id, part = data.draw(st.sampled_from(self.parts("running")))
        agent.outbox.append(JobHeldBack(job_id, part.epoch, agent.host.host_id, fraction))

    @precondition(lambda self: self.parts("starting", "running", "stopping"))
    @rule(
        data=st.data(),
        action=st.sampled_from(["request", "release", "limit"]),
        asked=st.sampled_from(
            [
                ("memory", 1.0),
                ("memory", 2.0 * GIB),
                ("memory", 2.0**60),
                ("compute", 0.02),
                ("compute", 1.0),
                ("power", 1.0),
            ]
        ),
    )
    def a_job_asks(self, data: st.DataObject, action: Any, asked: tuple[Any, float]) -> None:
        _, job_id, part = data.draw(st.sampled_from(self.parts("starting", "running", "stopping")))
        resource, amount = asked
        self.asked += 1
        least = None if action == "limit" and self.asked % 2 else amount
        self.happen(ResourcesAsked(job_id, part.epoch, f"r{self.asked}", action, resource, least))

    @precondition(lambda self: self.parts("running"))
    @rule(data=st.data(), used=st.sampled_from([2, 4, 7, 20]))
    def a_job_overruns(self, data: st.DataObject, used: int) -> None:
        agent, job_id, part = data.draw(st.sampled_from(self.parts("running")))
        agent.outbox.append(MemoryOverrun(job_id, part.epoch, agent.host.host_id, used * GIB))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def report_in(self, data: st.DataObject) -> None:
        self.report_of(data.draw(st.sampled_from(list(self.agents.values()))))

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0, 25.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for agent in self.agents.values():
            while agent.mail and self.now - agent.mail[0][0] > CONFIGURED.lease.ttl_s / 2:
                agent.receive()
                self.check()
        self.happen(Tick())

    def report_of(self, agent: Agent) -> None:
        if not agent.reachable:
            return
        events, agent.outbox = agent.outbox, []
        for event in events:
            self.happen(event)
        noted, commands = reconcile(self.core.state, agent.host.host_id, agent.inventory(), self.now)
        for event in noted:
            self.happen(event)
        self.send(commands)

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        self.settle_down()
        for agent in self.agents.values():
            if agent.reachable:
                self.check_in_step(agent)
        self.check_old_news()
        self.check_replay()

    def settle_down(self) -> None:
        """Everybody who is told to stop stops, all mail and reports arrive."""
        for _ in range(4):
            self.now += 6.0
            for agent in list(self.agents.values()):
                while agent.mail:
                    agent.receive()
                    self.check()
                for job_id, part in list(agent.parts.items()):
                    if part.freezing and part.phase != "stopping":
                        agent.end_freeze(job_id, part, ok=True)
                    if part.phase == "stopping":
                        agent.end(job_id, JobExited(job_id, part.epoch, agent.host.host_id, -15))
                    part.phase = "running" if part.phase == "starting" else part.phase
                self.report_of(agent)

    def check_in_step(self, agent: Agent) -> None:
        """The agent holds exactly what the leases say, apart from what is under way."""
        host_id, state = agent.host.host_id, self.core.state
        under_way = {command.job_id for _, command in agent.mail}
        still = [job for job in state.jobs.values() if job.frozen and job.frozen.host_id == host_id]
        there = [*state.on_host(host_id), *(job for job in still if job.lease is None)]
        want = {job.spec.job_id: job for job in there if job.spec.job_id not in under_way}
        have = {job_id: part for job_id, part in agent.parts.items() if job_id not in under_way}
        assert {job_id: job.epoch for job_id, job in want.items()} == {job_id: p.epoch for job_id, p in have.items()}
        for job_id, part in have.items():
            assert part.frozen == (want[job_id].lease is None)
            assert part.frozen or part.shares == state.shares_on(want[job_id], host_id)

    def check_old_news(self) -> None:
        """Messages that come twice change nothing once the job lives its next life."""
        for event in self.old_news():
            ignored = sum(self.core.state.ignored.values())
            self.happen(event)
            assert sum(self.core.state.ignored.values()) == ignored + 1, event

    def old_news(self) -> list[Event]:
        """Messages about an earlier life of a job that now holds another lease."""
        kinds = (JobStarted, JobExited, StartFailed, MemoryOverrun, JobFrozen, FreezeFailed)
        told = [event for _, events in self.log for event in events if isinstance(event, kinds)]
        jobs = self.core.state.jobs
        return [event for event in told if jobs[event.job_id].lease and jobs[event.job_id].epoch > event.epoch]

    def check_replay(self) -> None:
        again = Core(CONFIGURED)
        for number, (now, events) in enumerate(self.log):
            again.handle(events, now)
            if number == len(self.log) // 2:  # as after a restart from a snapshot
                again = Core.from_state(State.from_json(again.state.to_json()))
        assert again.state.to_json() == self.core.state.to_json()
