"""A host agent in the test's own process, with a stand-in for Ray and none of its own threads: tests call its loops."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from scheduling import spec

from cotenant.actors import host_agent
from cotenant.actors.host_agent import HostAgent
from cotenant.configs.settings import Settings
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.views import AllocationView, ResourcesView, ResourceView

VIEW = ResourceView(share=1.0, available=2.0, guaranteed=None, used=None, limit=None, note="")


class Scheduler:
    """What the agent asks the scheduler for; ``error`` is what it answers instead."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.allocate = SimpleNamespace(remote=lambda *what: ("allocate", *what))
        self.resources = SimpleNamespace(remote=lambda *what: ("resources", *what))

    def get(self, call: tuple[Any, ...], timeout: float) -> Any:
        assert timeout > 0
        self.asked.append(call)
        if self.error is not None:
            raise self.error
        if call[0] == "resources":
            return ResourcesView(job_id=call[1], epoch=1, memory=VIEW, compute=VIEW, power=VIEW)
        wish = call[2]
        fields = {"action": wish.action, "resource_type": wish.resource_type, "status": "refused", "granted": 0.0}
        return AllocationView(job_id=call[1], requested=wish.amount, share=None, reason="no", **fields)


def make_agent(monkeypatch: pytest.MonkeyPatch, run_dir: Path, settings: Settings) -> HostAgent:
    """Make the agent of host ``h1``; ``agent.scheduler`` is what it talks to."""
    scheduler = Scheduler()
    context = SimpleNamespace(get_session_name=lambda: "session")
    monkeypatch.setattr(
        host_agent,
        "ray",
        SimpleNamespace(
            get_runtime_context=lambda: context, get_actor=lambda *_: scheduler, get=scheduler.get, method=ray.method
        ),
    )
    monkeypatch.setattr(host_agent, "live_nodes", lambda: {"h1": SimpleNamespace(gpus=0)})
    monkeypatch.setattr(host_agent, "claim_gpus", lambda *_: "claimed")
    monkeypatch.setattr(host_agent, "start_vital_thread", lambda *_: None)
    monkeypatch.setenv("COTENANT_RUN_DIR", str(run_dir))
    agent: Any = HostAgent("h1", settings.model_dump_json())
    agent.scheduler = scheduler
    return agent


def job_spec(job_id: str, *command: str) -> JobSpec:
    """What a job wants whose program is a command of this machine."""
    return replace(spec(job_id), command=command, cwd="/", env=dict(os.environ))
