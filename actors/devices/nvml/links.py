"""Which GPUs of a host are linked by NVLink: what is between them is several times as fast as between others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.actors.devices.nvml.library import Asker, Library

_NVLINK, _OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


def linked_to(library: Library, index: int, others: Sequence[int]) -> set[int] | None:
    """Return those of the other GPUs that a GPU reaches over NVLink, all by NVML's index; None = the driver cannot say.

    Raises:
        NvmlFailure: One of them, or the driver, is gone.
    """
    asker = Asker(library)
    mine = library.call("nvmlDeviceGetHandleByIndex", index)
    found = set()
    for other in others:
        handle = library.call("nvmlDeviceGetHandleByIndex", other)
        status = asker.ask("nvmlDeviceGetP2PStatus", mine, handle, _NVLINK)
        if status is None:
            return None
        if status == _OK:
            found.add(other)
    return found


def islands(linked: Mapping[int, set[int]]) -> dict[int, str]:
    """Return the name of each GPU's group of linked GPUs; "" for all when there are no links.

    Args:
        linked: The GPUs, by index, with others that each is linked to. One direction is enough.
    """
    first = {index: index for index in linked}
    for index, others in linked.items():
        joined = {first[each] for each in (index, *others)}
        first = {each: min(joined) if group in joined else group for each, group in first.items()}
    return {index: f"nvlink-{group}" if any(linked.values()) else "" for index, group in first.items()}
