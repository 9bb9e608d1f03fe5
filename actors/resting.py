"""Nodes that were given back to Ray: without a host agent, since Ray's autoscaler keeps a node on which an actor lives.

A node rests from the moment its agent was told to leave until its GPUs are wanted again or Ray has removed it. The
agent gives its GPUs back first, and is ended only once it has said so: one on which a job has just been started stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

END_S = 30.0  # an agent that has not put everything back by then is ended all the same
WAKE_S = 20.0  # until the agent of a node that is wanted again has reported, its GPUs count as on their way


class Resting:
    """Ends the agents of nodes that may go, step by step, and says which are wanted again. Not thread-safe.

    Args:
        clock: Seconds, never going backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, Any] = {}  # what agents will answer that were told to give their GPUs back
        self._ending: dict[str, tuple[Any, Any, float]] = {}  # agent, its answer to being shut down, since when
        self._woken: dict[str, tuple[int, float]] = {}  # GPUs, since when
        self.nodes: set[str] = set()

    def keep_to(self, alive: Collection[str]) -> None:
        """Forget the nodes that Ray has removed."""
        self.nodes.intersection_update(alive)

    def send_off(self, agents: Mapping[str, Any], spare: Collection[str], gpus: Mapping[str, int]) -> None:
        """Go on with ending the agents of spare hosts; the others hold their GPUs.

        Args:
            agents: The agents by host.
            spare: Hosts that may go.
            gpus: GPUs that Ray counts, of the nodes on which it counts some: the others nobody could ask it for again.
        """
        self._asked = {host_id: answer for host_id, answer in self._asked.items() if host_id in spare}
        for host_id, agent in agents.items():
            if host_id not in spare:
                agent.hold_gpus.remote(True)
            elif host_id not in self._asked or answered(self._asked[host_id]) is False:
                self._asked[host_id] = agent.hold_gpus.remote(False)
            elif answered(self._asked[host_id]) and host_id in gpus:
                del self._asked[host_id]
                self._ending[host_id] = agent, agent.shut_down.remote(), self._clock()
                self.nodes.add(host_id)
        for host_id, (agent, answer, since) in list(self._ending.items()):
            if answered(answer) is not None or self._clock() - since > END_S:
                ray.kill(agent, no_restart=True)
                del self._ending[host_id]

    def wake(
        self,
        to_come: Sequence[int],
        gpus: Mapping[str, int],
        particular: Sequence[tuple[int, Collection[str]]] = (),
    ) -> None:
        """Let as many nodes rest no more as the bundles need that no host has; the smallest on which they fit.

        Args:
            to_come: GPUs that are to be on one host together, by bundle.
            gpus: GPUs that Ray counts, of the nodes on which it counts some.
            particular: The same where only some nodes will do, with their ids.
        """
        now = self._clock()
        self._woken = {host_id: woken for host_id, woken in self._woken.items() if now - woken[1] < WAKE_S}
        left = {host_id: there for host_id, (there, _) in self._woken.items()}
        for bundle, only in [*particular, *((bundle, None) for bundle in sorted(to_come, reverse=True))]:
            host_id = _smallest(left, bundle, only)
            if host_id is None:
                resting = {node: gpus.get(node, 0) for node in self.nodes - self._ending.keys()}
                if (host_id := _smallest(resting, bundle, only)) is None:
                    continue  # a node that Ray adds
                self.nodes.discard(host_id)
                self._woken[host_id] = resting[host_id], now
                left[host_id] = resting[host_id]
            left[host_id] -= bundle


def answered(answer: Any) -> Any:
    """Return what an actor has answered: None while it has not, False where it failed."""
    try:
        return ray.get(answer, timeout=0)
    except GetTimeoutError:
        return None
    except RayError:
        return False


def _smallest(gpus: Mapping[str, int], least: int, only: Collection[str] | None) -> str | None:
    """Return the host with the fewest GPUs among those that have enough, and of some only, if any are named."""
    enough = [(there, host_id) for host_id, there in gpus.items() if there >= least]
    return min((each for each in enough if only is None or each[1] in only), default=(0, None))[1]
