"""Random lives of a cluster whose driver freezes jobs, or fails to: in time, late, or never; see ``random_cluster``."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import precondition, rule
from random_cluster import Cluster
from scheduling import GIB, spec

from cotenant.scheduler.core.events import (
    JobExited,
    JobSubmitted,
    MoveRequested,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
)
from cotenant.scheduler.core.model import Job, JobState


class Freezing(Cluster):
    """A cluster on whose hosts the driver can freeze jobs, as long as it does."""

    freezes = True

    def jobs(self, *states: JobState, **having: bool) -> list[Job]:
        """The jobs in these states that may be frozen, are being, or are."""
        known = [job for job in self.core.state.jobs.values() if job.state in states]
        return [job for job in known if all(bool(getattr(job, name)) is is_so for name, is_so in having.items())]

    def all_goes_well(self) -> None:
        for agent in self.agents.values():
            for job_id, part in agent.parts.items():
                if part.freezing and part.phase == "running":
                    agent.end_freeze(job_id, part, ok=True)
        super().all_goes_well()

    @rule(
        gpus=st.sampled_from([1, 1, 2]),
        memory=st.sampled_from([2, 5]),
        then=st.lists(st.sampled_from(["suspend", "move", "resume", "go well"]), max_size=4),
    )
    def run_one(self, gpus: int, memory: int, then: list[str]) -> None:
        self.submitted += 1
        job_id = f"j{self.submitted}"
        hints = {"gpus": gpus, "gpu_memory": memory * GIB, "compute": 0.3, "checkpoint": "driver", "max_slowdown": 4.0}
        self.happen(JobSubmitted(spec(job_id, **hints)))
        self.all_goes_well()
        for what in then:
            if what == "suspend":
                self.happen(SuspendRequested(job_id, "x"))
            elif what == "move":
                self.happen(MoveRequested(job_id, "y"))
            elif what == "resume":
                self.happen(ResumeRequested(job_id, "z"))
            else:
                self.all_goes_well()
                self.all_goes_well()

    @precondition(lambda self: self.jobs(JobState.RUNNING, freezes=True))
    @rule(data=st.data(), suspends=st.booleans())
    def interrupt_one(self, data: st.DataObject, suspends: bool) -> None:
        job_id = data.draw(st.sampled_from(self.jobs(JobState.RUNNING, freezes=True))).spec.job_id
        self.happen(SuspendRequested(job_id, "x") if suspends else MoveRequested(job_id, "y"))

    @precondition(lambda self: self.jobs(JobState.STARTING, frozen=True))
    @rule(data=st.data())
    def interrupt_one_that_is_about_to_go_on(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs(JobState.STARTING, frozen=True)))
        self.happen(SuspendRequested(job.spec.job_id, "x"))

    @precondition(lambda self: self.jobs(JobState.SUSPENDED, frozen=True))
    @rule(data=st.data())
    def resume_one(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs(JobState.SUSPENDED, frozen=True)))
        self.happen(ResumeRequested(job.spec.job_id, "z"))

    @precondition(lambda self: self.jobs(JobState.STOPPING, freezing=True))
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def stop_one_that_is_being_frozen(self, data: st.DataObject, really: bool) -> None:
        job = data.draw(st.sampled_from(self.jobs(JobState.STOPPING, freezing=True)))
        if really:
            self.happen(StopRequested(job.spec.job_id, "enough"))

    @precondition(lambda self: any(part.freezing for _, _, part in self.parts("starting", "running")))
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def a_freeze_comes_to_an_end(self, data: st.DataObject, ok: bool) -> None:
        found = [each for each in self.parts("starting", "running") if each[2].freezing]
        agent, job_id, part = data.draw(st.sampled_from(found))
        agent.end_freeze(job_id, part, ok)

    @precondition(lambda self: any(agent.freezes for agent in self.agents.values()))
    @rule(data=st.data())
    def an_old_freeze_arrives(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from([agent for agent in self.agents.values() if agent.freezes]))
        agent.obey(data.draw(st.sampled_from(agent.freezes)))
        self.check()

    @precondition(lambda self: any(part.frozen for _, _, part in self.parts("running")))
    @rule(data=st.data(), heard=st.booleans())
    def frozen_processes_die(self, data: st.DataObject, heard: bool) -> None:
        found = [each for each in self.parts("running") if each[2].frozen]
        agent, job_id, part = data.draw(st.sampled_from(found))
        died = JobExited(job_id, part.epoch, agent.host.host_id, -9, "killed", lost=True)
        agent.end(job_id, died if heard else None)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def an_agent_restarts(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(list(self.agents.values())))
        agent.mail.clear()
        self.nothing_lost = False
        for job_id, part in agent.parts.items():
            if part.freezing:
                agent.end_freeze(job_id, part, ok=False)
            elif part.frozen and part.phase == "running":
                agent.say_frozen(job_id, part)


TestFreezing = Freezing.TestCase
TestFreezing.settings = hypothesis_settings(max_examples=40, stateful_step_count=40)
