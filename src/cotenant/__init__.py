"""cotenant: many jobs on one GPU of a Ray cluster, measured, forecast, packed and enforced.

Importing this package imports neither Ray nor torch: it is imported inside users' jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.actors.leases import GpuLease
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView

from cotenant.scheduler.errors import LeaseLost

__version__ = "0.1.0"
__all__ = ["LeaseLost", "connect", "lease", "submit"]


def connect(address: str | None = None) -> Client:
    """Connect to the cotenant of a Ray cluster; see ``cotenant.scheduler.client.Client``."""
    from cotenant.scheduler.client import Client  # noqa: PLC0415 - keeps the import of cotenant light

    return Client.connect(address)


def submit(
    command: Sequence[str], *, name: str | None = None, job_id: str | None = None, cwd: str | None = None, **hints: Any
) -> JobView:
    """Submit a command to the cotenant of this Ray cluster and return at once.

    Args:
        command: Program and arguments.
        name: For people.
        job_id: Idempotency key: the same id twice is one job.
        cwd: Working directory; None = this process's.
        hints: ``gpus``, ``gpu_memory``, ``compute``, ``priority``, ``deadline``, ``max_slowdown`` … as everywhere.

    Raises:
        HintError: A hint is not accepted; names the field, the value and what is accepted.
        NotConnected: No cotenant is reachable.
    """
    import time  # noqa: PLC0415

    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415

    with connect() as client:
        return client.submit(command, parse_hints(hints, time.time()), name=name, job_id=job_id, cwd=cwd)


def lease(*, here: bool = False, name: str | None = None, timeout_s: float | None = None, **hints: Any) -> GpuLease:
    """Wait for shares of one or several GPUs and hold them; see ``cotenant.actors.leases.acquire``.

    Example:
        >>> with cotenant.lease(gpus=1, gpu_memory="2GiB", compute=0.4) as share:
        ...     result = ray.get(train.options(**share.options()).remote())
    """
    from cotenant.actors.leases import acquire  # noqa: PLC0415

    return acquire(here=here, name=name, timeout_s=timeout_s, **hints)
