"""Finding GPUs for a job: whole nodes first for large jobs, the fullest node that fits for small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cotenant.scheduler.simulation.desk import Desk, Entry


def whole_gpus(desk: Desk, entry: Entry) -> list[int] | None:
    """Return empty GPUs for the job with as few nodes as possible; None when there are not enough.

    A job that fits one node gets the node with the fewest free GPUs that suffice. A larger one gets wholly free nodes
    and the rest of its GPUs from the node after them with the most free ones (Lucid's "consolidated" placement).
    """
    want = entry.gpus
    if want > desk.free_count:
        return None
    return consolidated(desk, want, lambda gpus: gpus, desk.free, entry.memory_bytes)


def consolidated(
    desk: Desk,
    want: int,
    order: Callable[[Sequence[int]], Sequence[int]],
    usable: Sequence[Sequence[int]],
    memory_bytes: int = 0,
) -> list[int] | None:
    """Return ``want`` of the usable GPUs on as few nodes as possible; None when there are not enough.

    Args:
        desk: The desk.
        want: How many.
        order: Sorts the GPUs of the chosen node, best first.
        usable: For each node the GPUs that may be used.
        memory_bytes: GPUs with less free memory are left out.
    """
    fits = usable
    if memory_bytes:
        fits = [[gpu for gpu in gpus if desk.memory_bytes(gpu) >= memory_bytes] for gpus in usable]
    best: int | None = None
    for node, gpus in enumerate(fits):
        if len(gpus) >= want and (best is None or len(gpus) < len(fits[best])):
            best = node
    if best is not None:
        return list(order(fits[best])[:want])
    return _several_nodes(desk, want, fits)


def _several_nodes(desk: Desk, want: int, fits: Sequence[Sequence[int]]) -> list[int] | None:
    largest = max((len(desk.gpus_of(node)) for node in range(len(fits))), default=0)
    if want <= largest:  # it fits one node: it is not spread over several
        return None
    whole = [node for node, gpus in enumerate(fits) if gpus and len(gpus) == len(desk.gpus_of(node))]
    chosen: list[int] = []
    used: set[int] = set()
    for node in whole:
        if want - len(chosen) < len(fits[node]):
            break
        chosen += fits[node]
        used.add(node)
    left = want - len(chosen)
    if left == 0:
        return chosen
    rest = max((node for node in range(len(fits)) if node not in used), key=lambda node: len(fits[node]), default=None)
    if rest is None or len(fits[rest]) < left:
        return None
    return chosen + list(fits[rest][:left])
