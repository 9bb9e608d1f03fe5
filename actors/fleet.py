"""The scheduler's hands: finds, creates and talks to the host agents, and knows whether the other actors answer."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cotenant.actors.nodes import hosting_nodes, live_nodes
from cotenant.actors.resting import Resting
from cotenant.configs.settings import Settings
from cotenant.scheduler.core.commands import Command
from cotenant.scheduler.core.scaling import Size
from cotenant.scheduler.names import NAMESPACE, PRM, agent_name
from cotenant.scheduler.views import ComponentHealth, Health

PING_TIMEOUT_S = 2.0
MOST_KNOWN = 10_000  # nodes whose kind is remembered
SOME = 0.001  # of a resource that says of which kind a node is: what Ray itself asks for with accelerator_type


class Fleet:
    """All host agents. Safe to use from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._agents: dict[str, Any] = {}
        self._resting = Resting()
        self._kinds: dict[str, str] = {}  # of GPUs, by node, as Ray names them: also of nodes that it has removed
        self._lock = threading.Lock()

    @staticmethod
    def identity() -> str:
        """Return what tells this scheduler from others, and stays when Ray starts it anew."""
        return str(ray.get_runtime_context().get_actor_id())

    def ensure_agents(self) -> set[str]:
        """Create the agents that are missing, but of nodes given back; return the ids of the nodes that have one."""
        nodes = hosting_nodes(self._settings.scaling.enabled)
        with self._lock:
            self._resting.keep_to(nodes)
            nodes -= self._resting.nodes
            for host_id in nodes - set(self._agents):
                self._agents[host_id] = self._find(host_id)
            for host_id in set(self._agents) - nodes:
                del self._agents[host_id]
        return nodes

    def why_gone(self, host_id: str) -> str:
        """Say why a node has no agent."""
        with self._lock:
            return "given back to Ray" if host_id in self._resting.nodes else "Ray says the node is dead"

    def forget(self, host_id: str) -> None:
        """Look the agent of a host up again, and make it anew when it is gone for good."""
        with self._lock:
            self._agents.pop(host_id, None)

    def dispatch(self, commands: Sequence[Command]) -> None:
        """Send commands, one message per host, and do not wait.

        A lost message is harmless: the next inventory shows the difference and the command is sent again.
        """
        by_host: dict[str, list[Command]] = defaultdict(list)
        for command in commands:
            by_host[command.host_id].append(command)
        for host_id, batch in by_host.items():
            with self._lock:
                agent = self._agents.get(host_id)
            try:
                if agent is not None:
                    agent.apply.remote(batch)
            except RayError as error:
                print(f"cotenant scheduler: commands to host {host_id}: {error}", flush=True)  # noqa: T201 - the log

    def resize(self, size: Size) -> None:
        """Ask Ray's autoscaler for a cluster of this size; give spare hosts back to it, or use them again."""
        nodes = {node_id: node for node_id, node in live_nodes().items() if node.gpus}
        known = self._kinds | {node_id: node.kind for node_id, node in nodes.items()}
        self._kinds = dict(list(known.items())[-MOST_KNOWN:])
        bundles: list[dict[str, float]] = [{"GPU": gpus} for gpus in size.bundles]
        for ask in () if size.unsure else size.particular:
            kind = next((kind for node_id in ask.such_as if (kind := self._kinds.get(node_id))), "")
            bundles.append({"GPU": ask.gpus} | ({kind: SOME} if kind else {}))
        request_resources(bundles=bundles)
        gpus = {node_id: node.gpus for node_id, node in nodes.items()}
        with self._lock:
            self._resting.wake(size.to_come, gpus, [(ask.gpus, ask.such_as) for ask in size.particular])
            self._resting.send_off(self._agents, size.spare, gpus)

    def health(self, silence: Mapping[str, float], note: str, models: str) -> Health:
        """Ask every component whether it answers.

        Args:
            silence: Seconds since each host's last report.
            note: What the scheduler has to say of itself.
            models: What is to be said of the models that predict.
        """
        components = [ComponentHealth(name="scheduler", ok=True, note=note)]
        components.append(ComponentHealth(name="models", ok=True, note=models))
        components.append(_asked(PRM, "serving"))
        for host_id, seconds in sorted(silence.items()):
            ok = seconds <= self._settings.lease.ttl_s
            components.append(
                ComponentHealth(name=f"host {host_id[:12]}", ok=ok, note="" if ok else f"no report for {seconds:.0f} s")
            )
        return Health(ok=all(component.ok for component in components), components=components)

    def _find(self, host_id: str) -> Any:
        try:
            return ray.get_actor(agent_name(host_id), NAMESPACE)
        except ValueError:
            return self._create(host_id)

    def _create(self, host_id: str) -> Any:
        from cotenant.actors.host_agent import HostAgent  # noqa: PLC0415 - a restarted scheduler finds agents in place

        # Commands keep their order in a group of one thread; output is served by others.
        actor: Any = ray.remote(concurrency_groups={"control": 1, "output": 16})(HostAgent)  # type: ignore[call-overload]
        return actor.options(
            name=agent_name(host_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host_id, soft=False),
        ).remote(host_id, self._settings.model_dump_json())


def _asked(name: str, what: str) -> ComponentHealth:
    """Ask an actor for what it has to say of itself: whether it answers, and what."""
    try:
        said = ray.get(getattr(ray.get_actor(name, NAMESPACE), what).remote(), timeout=PING_TIMEOUT_S)
    except ValueError:
        return ComponentHealth(name=name, ok=False, note="the actor does not exist")
    except (GetTimeoutError, RayActorError) as error:
        return ComponentHealth(name=name, ok=False, note=f"{type(error).__name__}: no answer")
    return ComponentHealth(name=name, ok=True, note=str(said))
