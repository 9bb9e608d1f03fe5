"""What is remembered of a job whose processes are frozen: where they are, and what they need to go on."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.placement.types import Share


@dataclass(frozen=True, slots=True)
class Frozen:
    """Processes that the driver holds still, with their device memory in the host's. Their GPUs are free.

    They can go on only on their host, on as many GPUs of the same type, and take as much device memory there as before.

    Attributes:
        host_id: The host.
        gpu_type: Of the GPUs.
        shares: What they had.
        memory_bytes: Host memory that their device memory takes; 0 = not known.
        since: Unix seconds.
        revision: Newest of their lease: what lets them go on has a newer one, of the same epoch.
        stuck_since: Since when none of the GPUs works on which they could go on, Unix seconds; None = some do.
        ends: Why they are to end, since they can go on nowhere; the job starts over once they have.
    """

    host_id: str
    gpu_type: str
    shares: tuple[Share, ...]
    memory_bytes: int
    since: float
    revision: int
    stuck_since: float | None = None
    ends: str = ""
