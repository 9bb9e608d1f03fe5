"""A cluster that may grow: a core with the settings for it, and a fleet over nodes that are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduling import Driver, settings

from cotenant.actors import fleet, nodes, resting
from cotenant.actors.scaling import EVERY_S
from cotenant.configs.settings import ScalingSettings
from cotenant.scheduler.core.events import Tick
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.scaling import Ask, Size, asks_of

RULES = ScalingSettings(enabled=True, wait_s=30.0, idle_s=100.0)


def scaled(*hosts: Host, **rules: Any) -> Driver:
    """A cluster that may grow."""
    return Driver(*hosts, configured=settings().model_copy(update={"scaling": RULES.model_copy(update=rules)}))


def asked(driver: Driver) -> list[Ask]:
    """What the jobs that wait ask for after a while."""
    driver.do(Tick(), after_s=40.0)
    return asks_of(driver.core.state, RULES, driver.now)


class PlayedCluster:
    """A fleet over nodes that are played: their agents answer at once, what Ray is asked for is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, scaling: bool = True, **gpus: int) -> None:
        self.gpus, self.now = gpus, 0.0
        self.kinds: dict[str, str] = {}
        self.asked: list[list[dict[str, Any]]] = []
        self.agents: dict[str, PlayedAgent] = {}
        monkeypatch.setattr(fleet, "request_resources", self._ask)
        for room in (fleet, nodes):
            monkeypatch.setattr(room, "live_nodes", self._nodes)
        monkeypatch.setattr(resting, "answered", lambda answer: answer)
        monkeypatch.setattr(resting.ray, "kill", self._kill)
        monkeypatch.setattr(fleet.ray, "get_actor", self._find)
        self.fleet = fleet.Fleet(settings().model_copy(update={"scaling": ScalingSettings(enabled=scaling)}))
        self.fleet._resting = resting.Resting(lambda: self.now)
        self.fleet.ensure_agents()

    def look(self, *spare: str, stay: tuple[int, ...] = (), to_come: tuple[int, ...] = ()) -> set[str]:
        """One look of the scheduler; returns the nodes that have an agent after it."""
        self.now += EVERY_S
        self.fleet.resize(Size((*stay, *to_come), spare, to_come))
        return self.fleet.ensure_agents()

    def _nodes(self) -> dict[str, nodes.Node]:
        return {name: nodes.Node(name, gpus, False, self.kinds.get(name, "")) for name, gpus in self.gpus.items()}

    def _ask(self, *, bundles: list[dict[str, Any]]) -> None:
        self.asked.append(bundles)

    def _find(self, name: str, _namespace: str) -> PlayedAgent:
        return self.agents.setdefault(name, PlayedAgent())

    def _kill(self, agent: PlayedAgent, *, no_restart: bool) -> None:
        assert no_restart
        assert agent.ended, "what it started is ended first"
        self.agents = {name: other for name, other in self.agents.items() if other is not agent}

    def held(self, host_id: str) -> list[bool]:
        """What the agent was told to do with its GPUs."""
        return self.agents[fleet.agent_name(host_id)].held


class PlayedAgent:
    """A handle of an actor that notes what it is told; ``busy``: a job has just been started there."""

    def __init__(self) -> None:
        self.held: list[bool] = []
        self.busy = self.ended = False
        self.hold_gpus = SimpleNamespace(remote=self._hold)
        self.shut_down = SimpleNamespace(remote=self._shut_down)

    def _hold(self, wanted: bool) -> bool:
        self.held.append(wanted)
        return not wanted and not self.busy

    def _shut_down(self) -> tuple[str, ...]:
        self.ended = True
        return ()
