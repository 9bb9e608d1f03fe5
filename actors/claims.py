"""Claims a node's GPUs in Ray's own accounting, so that no other Ray work is booked onto them."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from cotenant.scheduler.names import claim_name


def claim_gpus(host_id: str, count: int, timeout_s: float) -> str:
    """Hold ``count`` GPUs of a node in a detached placement group; idempotent.

    Args:
        host_id: Ray node id.
        count: Number of GPUs that Ray knows on the node and cotenant manages.
        timeout_s: How long to wait for Ray to reserve them.

    Returns:
        What is held, in words.

    Raises:
        TimeoutError: Ray could not reserve them in time, so somebody else uses at least one of them.
    """
    if count == 0:
        return "nothing to claim: Ray counts no GPUs on this node"
    group = _existing(host_id) or placement_group(
        [{"GPU": 1}] * count,
        name=claim_name(host_id),
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": host_id}] * count,
    )
    if not group.wait(timeout_seconds=timeout_s):
        raise TimeoutError(
            f"Ray did not hand over {count} GPUs of node {host_id[:12]} within {timeout_s:g} s: "
            "other Ray work holds some of them"
        )
    return f"{count} of Ray's GPUs claimed on this node"


def release_claim(host_id: str) -> None:
    """Give a node's GPUs back to Ray. Nothing happens when none are claimed."""
    group = _existing(host_id)
    if group is not None:
        remove_placement_group(group)


def _existing(host_id: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = get_placement_group(claim_name(host_id))
    except ValueError:  # Ray's answer for "no such group"
        return None
    return group
