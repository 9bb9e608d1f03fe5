"""Ray's view of the cluster's nodes, typed."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from cotenant.scheduler.errors import CotenantError

_KIND = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class Node:
    """A live Ray node. ``gpus`` is what Ray counts, whatever they are; ``kind`` the resource it names their type by."""

    node_id: str
    gpus: int
    head: bool
    kind: str = ""


def live_nodes() -> dict[str, Node]:
    """Return all live nodes by their id."""
    return {
        node["NodeID"]: Node(
            node_id=node["NodeID"],
            gpus=int(node["Resources"].get("GPU", 0)),
            head="node:__internal_head__" in node["Resources"],
            kind=next((name for name in node["Resources"] if name.startswith(_KIND)), ""),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


def hosting_nodes(scaling: bool) -> set[str]:
    """Return the ids of the live nodes that get a host agent.

    In a cluster where Ray counts GPUs these are the nodes that have some, in one without GPUs all of them; but where
    Ray's autoscaler is asked for GPUs none: else jobs would start on the head's cores, and lose them when GPUs come.

    Args:
        scaling: Whether Ray's autoscaler is asked for GPUs.
    """
    nodes = live_nodes()
    with_gpus = {node_id for node_id, node in nodes.items() if node.gpus}
    return with_gpus if with_gpus or scaling else set(nodes)


def head_node_id() -> str:
    """Return the id of the head node.

    Raises:
        CotenantError: The cluster has no live head node.
    """
    for node in live_nodes().values():
        if node.head:
            return node.node_id
    raise CotenantError("this Ray cluster has no live head node")
