"""Whatever others do, every placeable job is started in the end; limits are never exceeded on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from scheduling import GIB, host, settings, spec

from cotenant.configs.settings import AccountSettings, LeaseSettings, RebalanceSettings, SchedulingSettings
from cotenant.scheduler.core.board import REST
from cotenant.scheduler.core.commands import Command, StartJob, StopJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted, StartFailed, Tick
from cotenant.scheduler.core.invariants import check
from cotenant.scheduler.core.priority import SIZE_SCALE_S, overtaking_s, pace_of
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.waiting import RESERVE_AFTER_S

LONGEST_RUN_S = 400.0
STEP_S = 50.0
REST_S = 100.0  # that a job has between two interruptions
MOST_WAITING = 12
RULES = SchedulingSettings(
    queues={"night": AccountSettings(weight=0.5, most_jobs=2)},
    tenants={"a": AccountSettings(most_gpus=1.5), "b": AccountSettings(weight=2.0, most_jobs=2)},
)
CONFIGURED = settings().model_copy(
    update={
        "scheduling": RULES,
        "rebalance": RebalanceSettings(move_cost_s=REST_S / REST),
        "lease": LeaseSettings(start_timeout_s=30.0, stop_grace_s=2.0, max_restarts=4),
    }
)
LARGEST_GPU_S = 3 * 5000.0
# The oldest is not overtaken any more, once it has waited so long, by those who come after that and wait for less than
# its lead takes them to make up for; and of those ahead of it (MOST_WAITING jobs at a time) each waits for a
# reservation, which is over when those are gone that run.
PACE = pace_of(SIZE_SCALE_S / (SIZE_SCALE_S + LARGEST_GPU_S))
LINE_S = (MOST_WAITING + 2) * (RESERVE_AFTER_S + 2 * LONGEST_RUN_S)
PATIENCE_S = overtaking_s(RULES, PACE) + pace_of(1.0) * LINE_S / PACE + LINE_S


class Crowd(RuleBasedStateMachine):
    """A cluster where all that is started ends within ``LONGEST_RUN_S``, whatever it says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core(CONFIGURED)
        self.now = 1000.0
        self.submitted = 0
        self.running: dict[str, tuple[int, list[str], float]] = {}  # epoch, hosts, latest end
        self.doomed: set[str] = set()
        self.interrupted: dict[str, list[float]] = {}
        self.log: list[tuple[float, list[Event]]] = []
        self.happen(HostJoined(host("h1", 2)), HostJoined(host("h2", 1)))

    def happen(self, *events: Event) -> None:
        self.log.append((self.now, list(events)))
        commands = self.core.handle(events, self.now)
        self.check()
        self.obey(commands)

    def obey(self, commands: Sequence[Command]) -> None:
        answers: list[Event] = []
        for command in commands:
            if isinstance(command, StartJob):
                if command.job_id in self.doomed:
                    answers.append(StartFailed(command.job_id, command.epoch, command.host_id, "broken", retry=True))
                    continue
                _, hosts, _ = self.running.setdefault(command.job_id, (command.epoch, [], self.now + LONGEST_RUN_S))
                hosts.append(command.host_id)
                answers.append(JobStarted(command.job_id, command.epoch, command.host_id))
            elif isinstance(command, StopJob):
                self.running.pop(command.job_id, None)
                ending = self.core.state.jobs[command.job_id].ending
                if ending is not None and ending.interruption is not None:
                    self.interrupted.setdefault(command.job_id, []).append(self.now)
                answers.append(JobExited(command.job_id, command.epoch, command.host_id, -15))
        if answers:
            self.happen(*answers)

    def check(self) -> None:
        state = self.core.state
        check(state)
        for kind, limits in (("tenant", RULES.tenants), ("queue", RULES.queues)):
            for name, terms in limits.items():
                account = state.accounts.by_kind[kind].get(name)  # type: ignore[index]
                if account is not None:
                    assert terms.most_gpus is None or account.held <= terms.most_gpus, (name, account)
                    assert terms.most_jobs is None or account.jobs <= terms.most_jobs, (name, account)
        for job in state.jobs.values():
            if job.spec.job_id in state.queued and job.spec.job_id not in self.doomed:
                assert self.now - job.queued_at <= PATIENCE_S, (
                    f"{job.spec.job_id} has waited {self.now - job.queued_at}"
                )

    def end(self, job_id: str) -> None:
        epoch, hosts, _ = self.running.pop(job_id)
        self.happen(*(JobExited(job_id, epoch, host_id, 0) for host_id in hosts))

    # -- what happens -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.core.state.queued) < MOST_WAITING)
    @rule(
        count=st.integers(1, 4),
        hints=st.fixed_dictionaries(
            {
                "gpus": st.sampled_from([1, 1, 1, 2, 3]),
                "gpu_memory": st.sampled_from([GIB, 3 * GIB, 6 * GIB, 8 * GIB]),
                "compute": st.sampled_from([0.1, 0.4, 0.6, None]),
                "priority": st.sampled_from(["low", "normal", "high"]),
                "isolation": st.sampled_from(["soft", "hard"]),
                "expected_duration_s": st.sampled_from([None, 10.0, 200.0, 5000.0]),
                "max_slowdown": st.sampled_from([1.0, 1.5]),
                "tenant": st.sampled_from(["a", "b", "c", "d"]),
                "queue": st.sampled_from(["default", "night"]),
                "deadline_s": st.sampled_from([None, 3000.0, 9000.0]),
                "criticality": st.sampled_from([None, 1.0]),
                "checkpoint": st.sampled_from(["none", "own"]),
            }
        ),
        doomed=st.sampled_from([False] * 9 + [True]),
    )
    def submit(self, count: int, hints: dict[str, Any], doomed: bool) -> None:
        if hints["gpus"] == 3:
            hints = {**hints, "gang": "cluster"}
        batch = []
        for _ in range(count):
            self.submitted += 1
            job_id = f"j{self.submitted}"
            if doomed:
                self.doomed.add(job_id)
            batch.append(JobSubmitted(spec(job_id, **hints)))
        self.happen(*batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    @rule(steps=st.integers(1, 10))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once nobody new arrives everything gets its turn: no livelock."""
        for _ in range(int(PATIENCE_S / STEP_S)):
            if not self.core.state.queued and not self.running:
                break
            self.step()
        state = self.core.state
        assert not state.queued, [state.jobs[job_id].spec.hints for job_id in state.queued]
        for job in state.jobs.values():
            assert job.state == "SUCCEEDED" or job.not_placeable or job.spec.job_id in self.doomed, job
        for job_id, times in self.interrupted.items():  # nobody thrashes
            assert state.jobs[job_id].spec.hints.checkpoint == "own", job_id
            assert all(after - before >= REST_S for before, after in pairwise(times)), (job_id, times)
        again = Core(CONFIGURED)
        for number, (now, events) in enumerate(self.log):
            again.handle(events, now)
            if number == len(self.log) // 2:
                again = Core.from_state(State.from_json(again.state.to_json()))
        assert again.state.to_json() == state.to_json()

    def step(self) -> None:
        self.now += STEP_S
        for job_id in [job_id for job_id, (_, _, until) in self.running.items() if until <= self.now]:
            if job_id in self.running:  # the end of one may have another make room
                self.end(job_id)
        self.happen(Tick())


TestCrowd = Crowd.TestCase
TestCrowd.settings = hypothesis_settings(max_examples=20, stateful_step_count=40)
