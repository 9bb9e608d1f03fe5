"""cotenant: many jobs on one GPU of a Ray cluster, measured, forecast, packed and enforced.

Importing this package imports neither Ray nor torch: it is imported inside users' jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.actors.leases import GpuLease
    from cotenant.actors.shim.resources import Allocation
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView

from cotenant.scheduler.errors import LeaseLost

__version__ = "0.1.0"
__all__ = [
    "LeaseLost",
    "connect",
    "get_available_resources",
    "lease",
    "release_resources",
    "request_resource_allocation",
    "set_resource_limits",
    "submit",
]


def connect(address: str | None = None) -> Client:
    """Connect to the cotenant of a Ray cluster; see ``cotenant.scheduler.client.Client``."""
    from cotenant.scheduler.client import Client  # noqa: PLC0415 - keeps the import of cotenant light

    return Client.connect(address)


def submit(
    command: Sequence[str], *, name: str | None = None, job_id: str | None = None, cwd: str | None = None, **hints: Any
) -> JobView:
    """Submit a command to the cotenant of this Ray cluster and return at once.

    A job that no GPU of this cluster could ever take is no error here: the view that is returned says
    ``not_placeable=True``, and its ``reason`` what is short. (``lease`` raises ``NotPlaceable`` then.)

    Args:
        command: Program and arguments.
        name: For people.
        job_id: Idempotency key: the same id twice is one job, refused with another command or other hints.
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


# The virtual GPU interface (docs/virtual-gpu.md). The job's own interpreter may know no more of cotenant than its shim:
# then ``import cotenant`` gives these four functions alone.


def request_resource_allocation(resource_type: str, amount: float | str) -> Allocation:
    """In a job: ask for more of each of its GPUs; see ``cotenant.actors.shim.resources``.

    Example:
        >>> answer = cotenant.request_resource_allocation("memory", "2GiB")
        >>> answer.status, answer.granted, answer.reason
        ('partly', 1073741824, 'as much as there is room for: 1.0 GiB are free on GPU-1f')

    Raises:
        cotenant.actors.shim.resources.ResourceError: Not under a lease, no answer, or a value that is not accepted.
        cotenant.actors.shim.resources.RateLimited: Too many requests; says when the next one is answered.
    """
    from cotenant.actors.shim import resources  # noqa: PLC0415

    return resources.request_resource_allocation(resource_type, amount)


def release_resources(resource_type: str, amount: float | str) -> Allocation:
    """In a job: give back some of each of its GPUs; see ``request_resource_allocation``."""
    from cotenant.actors.shim import resources  # noqa: PLC0415

    return resources.release_resources(resource_type, amount)


def set_resource_limits(resource_type: str, limit: float | str | None) -> Allocation:
    """In a job: never have more of each of its GPUs than this; None = no limit. See ``request_resource_allocation``."""
    from cotenant.actors.shim import resources  # noqa: PLC0415

    return resources.set_resource_limits(resource_type, limit)


def get_available_resources() -> dict[str, dict[str, Any]]:
    """In a job: return what it has and could have of each of its GPUs; see ``cotenant.actors.shim.resources``."""
    from cotenant.actors.shim import resources  # noqa: PLC0415

    return resources.get_available_resources()
