"""A cluster that grows and shrinks: nodes join some time after they are asked for, and cost while they are there."""

from __future__ import annotations

from typing import Any

from cotenant.configs.settings import ScalingSettings
from cotenant.scheduler.core.events import Event, HostJoined, HostLost
from cotenant.scheduler.core.scaling import ScalingMemory, asks_of, decide, loads_of
from cotenant.scheduler.simulation.shell import CoreShell
from cotenant.scheduler.simulation.world import World

LOOK_S = 10.0


class ElasticShell(CoreShell):
    """The shipped core on a cluster of which only ``least_gpus`` are there at first.

    The cluster of the world is the largest it may become. A node costs from the moment it is asked for until it goes.

    Args:
        world: The world; nobody else takes nodes away (no node faults).
        scaling: Limits and pauses.
        join_s: From asking for a node until it takes jobs.
        how: See ``CoreShell``.
    """

    def __init__(self, world: World, scaling: ScalingSettings, join_s: float, **how: Any) -> None:
        super().__init__(world, **how)
        self._scaling, self._join_s = scaling, join_s
        self._memory = ScalingMemory()
        self._since: dict[int, float] = {}  # when each node was asked for
        self._paid_s = 0.0
        there = 0
        for number, gpus in enumerate(world.node_gpus):
            if there < scaling.least_gpus:
                self._since[number] = world.now
                there += len(gpus)
            else:
                self._leave(number)
        world.alarm(world.now + LOOK_S, ("look",))

    @property
    def node_hours(self) -> float:
        """What the nodes cost until now, in hours of one node."""
        return (self._paid_s + sum(self.world.now - since for since in self._since.values())) / 3600.0

    def _on_look(self) -> list[Event]:
        self.world.alarm(self.world.now + LOOK_S, ("look",))
        state, now = self.core.state, self.world.now
        size, self._memory = decide(
            asks_of(state, self._scaling, now), loads_of(state), self._memory, self._scaling, now
        )
        for host_id in size.spare:
            self._leave(next(number for number, host in enumerate(self._hosts) if host.host_id == host_id))
        there = sum(len(self.world.node_gpus[number]) for number in self._since)
        for number, gpus in enumerate(self.world.node_gpus):
            if there >= sum(size.bundles) + sum(ask.gpus for ask in size.particular):
                break
            if number not in self._since:
                self._since[number] = now
                self.world.alarm(now + self._join_s, ("join", number))
                there += len(gpus)
        return []

    def _on_join(self, number: int) -> list[Event]:
        self.world.bring_up(number)
        return [HostJoined(self._hosts[number])]

    def _leave(self, number: int) -> None:
        self.world.take_down(number)
        self._paid_s += self.world.now - self._since.pop(number, self.world.now)
        self._do([HostLost(self._hosts[number].host_id, "the node is given back")])
